"""OpGraph: the operators of one step, in order, and the storages between them.

The fields and their legal values, once and for all:

    ops[i]        the i-th kernel launch of the step. Views and other operators that move no data are left out.
    storages[s]   one allocation, in the order in which they were made. `birth` is the index of the operator that allocates it,
                  -1 if it was there before the step. `death` is the index of the last operator before it is freed: the storage
                  is alive while `ops[death]` runs. `death` is `len(ops)` if the storage outlives the step. It is
                  `len(ops) + 1 + j` if the storage is freed right after `ops[j]` of the next step: a training loop keeps the
                  outputs until the next forward pass has returned. Inputs and gradients end with the step, unless they are kept.
    ops[i].inputs / outputs   indices into `storages`. An operator that writes in place has the same index in both.

A study's graphs differ in their sizes alone (bytes, FLOPs, shapes) as long as it changes nothing but sizes. Such a graph is the
`skeleton` of an earlier graph, with other `sizes`. Its operators and storages are made when they are first read. Everything that
does not depend on sizes is computed once, for the skeleton. What depends on sizes is computed for a `GraphBatch`; a graph's own
properties are those of a batch of one.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import warnings
import zlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from perfguard.exceptions import WorkloadError
from perfguard.graph._graph_batch import GraphBatch, SizeLayout, filled, sizes_of
from perfguard.graph._op import Op, Phase, Storage, StorageKind
from perfguard.graph._polynomials import LARGEST
from perfguard.graph._unknown import GROUPED_PRODUCTS

if TYPE_CHECKING:
    import os

SCHEMA_VERSION = 3
_MAX_SERIALISED_BYTES = 256 * 2**20
_SETTINGS = ("mode", "precision", "layout", "options", "unmodelled")
_LASTING = (
    StorageKind.PARAMETER,
    StorageKind.BUFFER,
    StorageKind.INPUT,
    StorageKind.GRADIENT,
    StorageKind.OPTIMIZER_STATE,
)


@dataclass(frozen=True, eq=False)
class OpGraph:
    """One traced step. Immutable; see the module docstring for the meaning of the indices."""

    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    mode: str
    precision: str
    layout: str
    options: tuple[str, ...] = field(default=())
    """Other switches: "compiled", "cudnn_benchmark", "ddp", "ema"; "tf32" everywhere in fp32, "no-tf32" nowhere.
    Of one operator out of a table: "operator" if the host's launch is timed too, "kernel" if not."""
    unmodelled: tuple[str, ...] = field(default=())
    """Parts that the trace does not account for, in words. It names every such part."""

    def with_sizes(self, sizes: npt.NDArray[Any]) -> OpGraph:
        """This graph with other sizes.

        Args:
            sizes: in the order of :attr:`sizes`. Shape: (len(self.sizes),).
        """
        if sizes.dtype == object and max(sizes.tolist(), default=0) < LARGEST:
            sizes = sizes.astype(np.int64)
        sizes = sizes.copy()
        sizes.setflags(write=False)
        graph = object.__new__(OpGraph)
        graph.__dict__.update({name: getattr(self, name) for name in _SETTINGS}, _skeleton=self.skeleton, sizes=sizes)
        return graph

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Compute a field that :meth:`with_sizes` has left out."""
            if name not in ("ops", "storages") or "sizes" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            ops, storages = filled(self.skeleton, self.sizes)
            self.__dict__.update(ops=ops, storages=storages)
            return self.__dict__[name]

    @property
    def skeleton(self) -> OpGraph:
        """The operators and storages of this graph with meaningless sizes: one object for all graphs of `with_sizes`.

        It is another object than the graph, so that the graph can hold its batch without a cycle of references.
        """
        if self.is_skeleton:
            return self
        if "_skeleton" not in self.__dict__:
            skeleton = object.__new__(OpGraph)
            fields = {name: getattr(self, name) for name in ("ops", "storages", *_SETTINGS)}
            skeleton.__dict__.update(fields, is_skeleton=True)
            self.__dict__["_skeleton"] = skeleton
        found: OpGraph = self.__dict__["_skeleton"]
        return found

    @cached_property
    def is_skeleton(self) -> bool:
        """Whether it is the :attr:`skeleton` of other graphs."""
        return False

    @cached_property
    def sizes(self) -> npt.NDArray[Any]:
        """Bytes of the storages; of each operator FLOPs, bytes read and written, and the sizes in its shape and attributes.

        int64, or Python's integers where they are larger.
        """
        return sizes_of(self)

    def as_batch(self) -> GraphBatch:
        """The batch of this graph alone."""
        if "_batch" not in self.__dict__:
            self.__dict__["_batch"] = GraphBatch(self.skeleton, self.sizes[None])
        batch: GraphBatch = self.__dict__["_batch"]
        return batch

    @cached_property
    def size_layout(self) -> SizeLayout:
        """Positions of each operator's sizes in :attr:`sizes`."""
        return SizeLayout(self) if self.is_skeleton else self.skeleton.size_layout

    @cached_property
    def lifetimes(self) -> npt.NDArray[np.int64]:
        """Kind, birth and death of each storage. Shape: (3, len(storages))."""
        if not self.is_skeleton:
            return self.skeleton.lifetimes
        columns = [(storage.kind, storage.birth, storage.death) for storage in self.storages]
        return np.array(columns, dtype=np.int64).reshape(-1, 3).T.copy()

    @property
    def storage_bytes(self) -> npt.NDArray[Any]:
        """Bytes of each storage: int64, or Python's integers if their sum does not fit. Shape: (len(storages),)."""
        return np.asarray(self.as_batch().storage_bytes[0])

    @property
    def costs(self) -> npt.NDArray[Any]:
        """FLOPs, bytes read and bytes written of each operator. Shape: (3, len(ops))."""
        return np.asarray(self.as_batch().costs[:, 0])

    @property
    def live_bytes(self) -> npt.NDArray[Any]:
        """Bytes alive while each operator runs, its outputs included: int64, or float64 beyond that. Shape: (len(ops) + 1,).

        The first entry is what is alive before the first operator (parameters, inputs, optimizer state).
        """
        return np.asarray(self.as_batch().live_bytes[0])

    @property
    def peak_index(self) -> int:
        """Index of the operator at which most bytes are alive; -1 for the time before the first one."""
        return int(self.as_batch().peak_index[0])

    @property
    def peak_live_bytes(self) -> int:
        """Most bytes alive at once in the step."""
        return int(self.as_batch().peak_live_bytes[0])

    @property
    def has_all_bytes(self) -> bool:
        """Whether no part that is missing from the trace has bytes: how tokens are spread over a grouped product changes none."""
        return set(self.unmodelled) <= {GROUPED_PRODUCTS}

    @cached_property
    def least_bytes_by_kind(self) -> dict[StorageKind, int]:
        """Lower bound on the memory of the step by kind of storage, for any allocator.

        All that is alive at the peak, without the outputs that a loop may keep. A trace may be incomplete
        (:attr:`unmodelled`), and a compiler may keep less. Then only what is alive in any case counts: parameters, buffers,
        inputs, optimizer states, and the gradients that are alive at once.
        """
        kinds, births, deaths = self.lifetimes
        lasting = np.isin(kinds, _LASTING)
        counted = lasting | (deaths <= len(self.skeleton.ops)) if self.has_all_bytes else lasting
        at = int(np.argmax(self.as_batch().live_bytes_where(counted, of_last_step=False)[0])) - 1
        held = self.storage_bytes * (counted & (births <= at) & (at <= deaths))
        return {kind: int(held[kinds == kind].sum()) for kind in (StorageKind if self.has_all_bytes else _LASTING)}

    @property
    def reserved_bytes(self) -> int:
        """Memory that CUDA's caching allocator takes from the driver for the step, with its default settings."""
        return int(self.as_batch().reserved_bytes[0])

    def bytes_by_kind(self, at: int | None = None) -> dict[StorageKind, int]:
        """Bytes alive at operator ``at`` (default: at the peak), by kind of storage."""
        num_bytes = self.as_batch().bytes_by_kind(None if at is None else np.array([at]))
        return dict(zip(StorageKind, map(int, num_bytes[0]), strict=True))

    @property
    def flops(self) -> int:
        """Floating-point operations of the whole step."""
        return int(self.as_batch().flops[0])

    @cached_property
    def edges(self) -> npt.NDArray[np.int64]:
        """Data flow: pairs (producer, consumer) of operator indices. Shape: (2, num_edges)."""
        if not self.is_skeleton:
            return self.skeleton.edges
        writer: dict[int, int] = {}
        pairs: list[tuple[int, int]] = []
        for index, op in enumerate(self.ops):
            pairs.extend({(writer[s], index) for s in op.inputs if s in writer})
            writer.update(dict.fromkeys(op.outputs, index))
        return np.array(pairs, dtype=np.int64).reshape(-1, 2).T

    @staticmethod
    def from_onnx(path: str | os.PathLike[str], **options: Any) -> OpGraph:
        """Deprecated: call :func:`perfguard.onnx.graph_from_onnx`, which takes the same arguments."""
        warnings.warn(
            "OpGraph.from_onnx is deprecated and goes in the next version. Call perfguard.onnx.graph_from_onnx instead.",
            DeprecationWarning,
            stacklevel=2,
        )
        graph: OpGraph = importlib.import_module("perfguard.onnx").graph_from_onnx(path, **options)
        return graph

    def to_bytes(self) -> bytes:
        """Compressed JSON; nothing in it but shapes, operators and module paths."""
        return zlib.compress(self._to_json(), 6)

    def _to_json(self) -> bytes:
        document = {
            "schema": SCHEMA_VERSION,
            "mode": self.mode,
            "precision": self.precision,
            "layout": self.layout,
            "options": self.options,
            "unmodelled": self.unmodelled,
            "storages": [tuple(storage) for storage in self.storages],
            "ops": [(*op[:-1], dict(op.attributes)) for op in self.ops],
        }
        return json.dumps(document, separators=(",", ":")).encode()

    @staticmethod
    def from_bytes(data: bytes) -> OpGraph:
        """Read what :meth:`to_bytes` wrote.

        Raises:
            WorkloadError: if the data is damaged, too large or of a newer schema.
        """
        try:
            decompressor = zlib.decompressobj()
            text = decompressor.decompress(data, _MAX_SERIALISED_BYTES)
            if decompressor.unconsumed_tail:
                raise WorkloadError(f"A stored graph is larger than {_MAX_SERIALISED_BYTES} bytes; it is refused.")
            document = json.loads(text)
            if document["schema"] > SCHEMA_VERSION:
                raise WorkloadError(
                    f"A stored graph has schema {document['schema']}, this PerfGuard reads up to {SCHEMA_VERSION}. "
                    f"Update perfguard."
                )
            graph = OpGraph(
                ops=tuple(_op_from_json(row) for row in document["ops"]),
                storages=tuple(Storage(n, StorageKind(kind), b, d, module) for n, kind, b, d, module in document["storages"]),
                mode=document["mode"],
                precision=document["precision"],
                layout=document["layout"],
                options=tuple(document.get("options", ())),  # since schema 2
                unmodelled=tuple(document["unmodelled"]),
            )
            known, end = range(len(graph.storages)), len(graph.ops)
            if any(index not in known for op in graph.ops for index in (*op.inputs, *op.outputs)) or any(
                not (-1 <= storage.birth <= end and -1 <= storage.death <= 2 * end) for storage in graph.storages
            ):
                raise ValueError("an index is out of range")
            return graph
        except (zlib.error, ValueError, KeyError, TypeError, RecursionError) as error:
            raise WorkloadError(f"A stored graph is damaged ({error}); trace the workload again.") from error

    @cached_property
    def kinds(self) -> frozenset[str]:
        """Kinds of its operators."""
        if not self.is_skeleton:
            return self.skeleton.kinds
        return frozenset(op.kind for op in self.ops)

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of the graph's content, hexadecimal."""
        return hashlib.sha256(self._to_json()).hexdigest()


def _op_from_json(row: list[Any]) -> Op:
    name, kind, phase, flops, read, written, inputs, outputs, module, shape, dtype, attributes = row
    return Op(
        name,
        kind,
        Phase(phase),
        flops,
        read,
        written,
        tuple(inputs),
        tuple(outputs),
        module,
        tuple(shape),
        dtype,
        {key: tuple(value) if isinstance(value, list) else value for key, value in attributes.items()},
    )


__all__ = ["SCHEMA_VERSION", "GraphBatch", "Op", "OpGraph", "Phase", "Storage", "StorageKind"]
