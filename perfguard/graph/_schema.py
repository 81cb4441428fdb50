"""OpGraph: the operators of one step, in order, and the storages between them.

The fields and their legal values, once and for all:

    ops[i]        the i-th kernel launch of the step. Views and other operators that move no data are left out.
    storages[s]   one allocation, in the order in which they were made. `birth` is the index of the operator that allocates
                  it, -1 if it was there before the step. `death` is the index of the last operator before it is freed (the
                  storage is alive while `ops[death]` runs), `len(ops)` if it outlives the step.
    ops[i].inputs / outputs   indices into `storages`; an operator that writes in place has the same index in both.

A study's graphs differ in their numbers alone (bytes, FLOPs, sizes) as long as it changes nothing but sizes. Such a graph is its
`twin`, which was there before, and its `numbers`: operators and storages are made when somebody looks at them, and what does not
depend on numbers is worked out for the twin, once.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from perfguard.exceptions import WorkloadError
from perfguard.graph._allocator import replay_allocator
from perfguard.graph._op import Op, Phase, Storage, StorageKind

if TYPE_CHECKING:
    import os

SCHEMA_VERSION = 2
_MAX_SERIALISED_BYTES = 256 * 2**20
_LARGEST = 2**62
"""Of the numbers, and of their sums, that are kept in 64 bits; larger ones are Python's own."""


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
    """What else was switched on: "compiled", "cudnn_benchmark", "ddp", "ema"."""
    unmodelled: tuple[str, ...] = field(default=())
    """What the trace could not account for, in words. Never empty in silence."""

    @staticmethod
    def alike(twin: OpGraph, numbers: npt.NDArray[Any]) -> OpGraph:
        """``twin`` with other ``numbers``, in the order of :attr:`numbers`."""
        if numbers.dtype == object and max(numbers.tolist(), default=0) < _LARGEST:
            numbers = numbers.astype(np.int64)
        graph = object.__new__(OpGraph)
        settings = {name: getattr(twin, name) for name in ("mode", "precision", "layout", "options", "unmodelled")}
        graph.__dict__.update(settings, twin=twin.twin or twin, numbers=numbers)
        return graph

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """What :meth:`alike` left out."""
            twin = self.__dict__.get("twin")
            if twin is None or name not in ("ops", "storages"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            numbers = iter(self.numbers.tolist())
            storages = tuple([Storage(next(numbers), *storage[1:]) for storage in twin.storages])
            self.__dict__.update(storages=storages, ops=tuple([_with_numbers(op, numbers) for op in twin.ops]))
            return self.__dict__[name]

    @cached_property
    def twin(self) -> OpGraph | None:
        """A graph that differs from this one in its numbers alone; None: it is the first of its kind."""
        return None

    @cached_property
    def numbers(self) -> npt.NDArray[Any]:
        """Bytes of the storages; of each operator FLOPs, bytes read and written, and the sizes in its shape and attributes.

        int64, or Python's integers where they are larger.
        """
        numbers = [storage.num_bytes for storage in self.storages]
        for op in self.ops:
            numbers += [op.flops, op.bytes_read, op.bytes_written, *op.shape]
            for value in op.attributes.values():
                if are_sizes(value):
                    numbers += value
        return np.array(numbers, dtype=np.int64 if max(numbers, default=0) < _LARGEST else object)

    @cached_property
    def op_starts(self) -> npt.NDArray[np.int64]:
        """Where the numbers of each operator begin, and where they end. Shape: (len(ops) + 1,)."""
        if self.twin is not None:
            return self.twin.op_starts
        sizes = [[op.shape, *(value for value in op.attributes.values() if are_sizes(value))] for op in self.ops]
        lengths = [3 + sum(map(len, some)) for some in sizes]
        return np.cumsum([len(self.storages), *lengths])

    @cached_property
    def storage_bytes(self) -> npt.NDArray[Any]:
        """Of each storage: int64, or Python's integers where their sum does not fit. Shape: (len(storages),)."""
        num_bytes = self.numbers[: self.op_starts[0]]
        return np.asarray(num_bytes.astype(np.int64 if num_bytes.sum(dtype=np.float64) < _LARGEST else object))

    @property
    def costs(self) -> npt.NDArray[Any]:
        """FLOPs, bytes read and bytes written of each operator. Shape: (3, len(ops))."""
        return np.asarray(self.numbers[self.op_starts[:-1] + np.arange(3)[:, None]])

    @cached_property
    def lifetimes(self) -> npt.NDArray[np.int64]:
        """Kind, birth and death of each storage. Shape: (3, len(storages))."""
        if self.twin is not None:
            return self.twin.lifetimes
        columns = [(storage.kind, storage.birth, storage.death) for storage in self.storages]
        return np.array(columns, dtype=np.int64).reshape(-1, 3).T.copy()

    @cached_property
    def live_bytes(self) -> npt.NDArray[Any]:
        """Bytes alive while each operator runs, its outputs included: int64, or float64 beyond that. Shape: (len(ops) + 1,).

        The first entry is what is alive before the first operator (parameters, inputs, optimizer state).
        """
        return self.live_bytes_of(*StorageKind)

    def live_bytes_of(self, *kinds: StorageKind) -> npt.NDArray[Any]:
        """As :attr:`live_bytes`, of storages of ``kinds`` alone."""
        num_ops = len(self.op_starts) - 1
        of_kinds = np.isin(self.lifetimes[0], kinds)
        (_, births, deaths), num_bytes = self.lifetimes[:, of_kinds], self.storage_bytes[of_kinds]
        change = np.zeros(num_ops + 3, dtype=num_bytes.dtype)
        np.add.at(change, births + 1, num_bytes)
        np.subtract.at(change, deaths + 2, num_bytes)
        live = np.cumsum(change)[: num_ops + 1]
        return live.astype(np.float64) if live.dtype == object else live

    @property
    def peak_index(self) -> int:
        """Index of the operator at which most bytes are alive; -1 for the time before the first one."""
        return int(np.argmax(self.live_bytes)) - 1

    @property
    def peak_live_bytes(self) -> int:
        """Most bytes alive at once in the step."""
        return int(self.live_bytes.max())

    @cached_property
    def least_bytes_by_kind(self) -> dict[StorageKind, int]:
        """What the step needs at least, whoever hands out the memory, by kind of storage.

        All that is alive at the peak. Where the trace does not say all (:attr:`unmodelled`; a compiler may keep less),
        only what lasts whatever the operators do: parameters, buffers, inputs, optimizer states, and the gradients that are
        there at once.
        """
        if not self.unmodelled:
            return self.bytes_by_kind()
        at = int(np.argmax(self.live_bytes_of(*_LASTING))) - 1
        return {kind: num_bytes for kind, num_bytes in self._bytes_by_kind(at).items() if kind in _LASTING}

    @cached_property
    def reserved_bytes(self) -> int:
        """What CUDA's caching allocator takes from the driver for the step, with its default settings."""
        return replay_allocator(self).reserved_bytes

    def bytes_by_kind(self, at: int | None = None) -> dict[StorageKind, int]:
        """Bytes alive at operator ``at`` (default: at the peak), by kind of storage."""
        return dict(self._bytes_by_kind_at_peak) if at is None else self._bytes_by_kind(at)

    @cached_property
    def _bytes_by_kind_at_peak(self) -> dict[StorageKind, int]:
        return self._bytes_by_kind(self.peak_index)

    def _bytes_by_kind(self, index: int) -> dict[StorageKind, int]:
        kinds, births, deaths = self.lifetimes
        lives = (births <= index) & (index <= deaths)
        return {kind: int(self.storage_bytes[lives & (kinds == kind)].sum()) for kind in StorageKind}

    @property
    def flops(self) -> int:
        """Floating-point operations of the whole step."""
        return sum(self.costs[0].tolist())

    @cached_property
    def edges(self) -> npt.NDArray[np.int64]:
        """Data flow: pairs (producer, consumer) of operator indices. Shape: (2, num_edges)."""
        if self.twin is not None:
            return self.twin.edges
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
                not (-1 <= storage.birth <= end and -1 <= storage.death <= end) for storage in graph.storages
            ):
                raise ValueError("an index is out of range")
            return graph
        except (zlib.error, ValueError, KeyError, TypeError, RecursionError) as error:
            raise WorkloadError(f"A stored graph is damaged ({error}); trace the workload again.") from error

    @cached_property
    def kinds(self) -> frozenset[str]:
        """Of its operators."""
        if self.twin is not None:
            return self.twin.kinds
        return frozenset(op.kind for op in self.ops)

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of the graph's content, hexadecimal."""
        return hashlib.sha256(self._to_json()).hexdigest()


def are_sizes(value: Any) -> bool:
    """Whether an attribute is made of sizes, not of names as those of a fused kernel."""
    return isinstance(value, tuple) and not any(isinstance(item, str) for item in value)


def _with_numbers(op: Op, numbers: Iterator[int]) -> Op:
    name, kind, phase, _, _, _, inputs, outputs, module, shape, dtype, attributes = op
    flops, read, written, sizes = next(numbers), next(numbers), next(numbers), tuple(islice(numbers, len(shape)))
    if attributes:
        attributes = {key: tuple(islice(numbers, len(value))) if are_sizes(value) else value for key, value in attributes.items()}
    return Op(name, kind, phase, flops, read, written, inputs, outputs, module, sizes, dtype, attributes)


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


__all__ = ["SCHEMA_VERSION", "Op", "OpGraph", "Phase", "Storage", "StorageKind", "are_sizes"]
