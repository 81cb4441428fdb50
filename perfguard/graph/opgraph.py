"""OpGraph: the operators of one step, in order, and the storages between them.

The fields and their legal values, once and for all:

    ops[i]        the i-th kernel launch of the step. Views and other operators that move no data are left out.
    storages[s]   one allocation, in the order in which they were made. `birth` is the index of the operator that allocates it,
                  -1 if it was there before the step. `death` is the index of the last operator before it is freed: the storage
                  is alive while `ops[death]` runs. `death` is `len(ops)` if the storage outlives the step. It is
                  `len(ops) + 1 + j` if the storage is freed right after `ops[j]` of the next step: a training loop keeps the
                  outputs until the next forward pass has returned. Inputs and gradients end with the step, unless they are kept.
    ops[i].inputs / outputs   indices into `storages`. An operator that writes in place has the same index in both.

The properties show the same numbers as arrays. Sizes are int64, or Python's integers (dtype object) where their sum does not fit.

Notation:
    N  operators      S  storages
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from perfguard.exceptions import WorkloadError
from perfguard.graph.allocator import replay_allocator
from perfguard.graph.op import Op, Phase, Storage, StorageKind
from perfguard.unmodelled import GROUPED_PRODUCTS, HOST_OPTIMIZER, Unmodelled, said_before

if TYPE_CHECKING:
    from perfguard.devices import Device

SCHEMA_VERSION = 4
_LASTING = (
    StorageKind.PARAMETER,
    StorageKind.BUFFER,
    StorageKind.INPUT,
    StorageKind.GRADIENT,
    StorageKind.OPTIMIZER_STATE,
)
Ints = npt.NDArray[Any]
"""int64, or Python's integers where these would not fit."""


@dataclass(frozen=True, eq=False)
class OpGraph:
    """One traced step. Immutable; see the module docstring for the meaning of the indices."""

    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    mode: str
    precision: str
    layout: str
    options: tuple[str, ...] = field(default=())
    """Other switches: "compiled", "cudnn_benchmark", "ddp", "deepspeed", "fsdp", "tp", "ema"; "tf32" everywhere in fp32,
    "no-tf32" nowhere. Of one operator out of a table: "operator" if the host's launch is timed too, "kernel" if not."""
    unmodelled: tuple[Unmodelled, ...] = field(default=())
    """Parts that the trace does not account for, each a code and a sentence. It names every such part."""

    @cached_property
    def lifetimes(self) -> npt.NDArray[np.int64]:
        """Kind, birth and death of each storage. Shape: (3, S)."""
        columns = [(storage.kind, storage.birth, storage.death) for storage in self.storages]
        return np.array(columns, dtype=np.int64).reshape(-1, 3).T.copy()

    @cached_property
    def storage_bytes(self) -> Ints:
        """Bytes of each storage. Shape: (S,)."""
        return _integers([storage.num_bytes for storage in self.storages])

    @cached_property
    def costs(self) -> Ints:
        """FLOPs, bytes read and bytes written of each operator. Shape: (3, N)."""
        return _integers([size for op in self.ops for size in (op.flops, op.bytes_read, op.bytes_written)]).reshape(-1, 3).T

    def attribute(self, name: str, *, ops: Iterable[int] | None = None, length: int = 0, default: int = 1) -> Ints:
        """The sizes in an attribute of some operators.

        Args:
            name: of the attribute, or "shape" for the shape of the first output.
            ops: the V operators. None: all.
            length: how many sizes there are at the least.
            default: stands for each size that an operator does not have.

        Returns:
            Shape: (V, length of the longest).
        """
        chosen = self.ops if ops is None else [self.ops[index] for index in ops]
        found = [op.shape if name == "shape" else op.attributes.get(name, ()) for op in chosen]
        rows = [value if isinstance(value, tuple) else (int(value),) for value in found]
        length = max(length, *map(len, rows), 0)
        return _integers([size for row in rows for size in (*row, *[default] * (length - len(row)))]).reshape(len(rows), length)

    @property
    def flops(self) -> int:
        """Floating-point operations of the whole step."""
        return sum(op.flops for op in self.ops)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """Kinds of its operators."""
        return frozenset(op.kind for op in self.ops)

    @cached_property
    def live_bytes(self) -> npt.NDArray[Any]:
        """Bytes alive while each operator runs, its outputs included: int64, or float64 beyond that. Shape: (N + 1,).

        The first entry is what is alive before the first operator (parameters, inputs, optimizer state).
        """
        return self._live_bytes_where(np.ones(len(self.storages), dtype=np.bool_))

    def live_bytes_of(self, *kinds: StorageKind) -> npt.NDArray[Any]:
        """Same as :attr:`live_bytes`, for storages of ``kinds`` alone."""
        return self._live_bytes_where(np.isin(self.lifetimes[0], kinds))

    def _live_bytes_where(self, chosen: npt.NDArray[np.bool_], *, of_last_step: bool = True) -> npt.NDArray[Any]:
        """Same as :attr:`live_bytes`, for the ``chosen`` (S,) storages, with or without what the last step leaves of them."""
        number = len(self.ops) + 1
        (_, births, deaths) = self.lifetimes[:, chosen]
        num_bytes = self.storage_bytes[chosen]
        change = np.zeros(2 * number + 2, dtype=num_bytes.dtype)
        np.add.at(change, births + 1, num_bytes)
        np.subtract.at(change, deaths + 2, num_bytes)
        kept = deaths >= number  # alive until an operator of the next step
        if of_last_step and kept.any():
            change[0] += num_bytes[kept].sum()
            np.subtract.at(change, deaths[kept] - number + 2, num_bytes[kept])
        live = np.cumsum(change)[:number]
        return live.astype(np.float64) if live.dtype == object else live

    @cached_property
    def peak_index(self) -> int:
        """Index of the operator at which most bytes are alive; -1 for the time before the first one."""
        return int(np.argmax(self.live_bytes)) - 1

    @property
    def peak_live_bytes(self) -> int:
        """Most bytes alive at once in the step."""
        return int(self.live_bytes.max())

    @cached_property
    def _most_alive_bytes(self) -> dict[tuple[StorageKind, ...], int]:
        return {}

    def most_alive_bytes(self, *kinds: StorageKind) -> int:
        """Most bytes of ``kinds`` that are alive at once. Kept, because a log of hundreds of runs is judged by these again."""
        if kinds not in self._most_alive_bytes:
            self._most_alive_bytes[kinds] = int(self.live_bytes_of(*kinds).max())
        return self._most_alive_bytes[kinds]

    def num_alive(self, index: int) -> npt.NDArray[np.int64]:
        """Number of copies of each storage alive at operator ``index``: 2 while the last step's is still there. Shape: (S,)."""
        (_, births, deaths) = self.lifetimes
        number = len(self.ops) + 1
        own = (births <= index) & (index <= deaths)
        of_last_step = (deaths >= number) & (index <= deaths - number)
        return np.asarray(own.astype(np.int64) + of_last_step)

    def bytes_by_kind(self, at: int | None = None) -> dict[StorageKind, int]:
        """Bytes alive at operator ``at`` (default: at the peak), by kind of storage."""
        held = self.storage_bytes * self.num_alive(self.peak_index if at is None else at)
        return {kind: int(held[self.lifetimes[0] == kind].sum()) for kind in StorageKind}

    @property
    def has_all_bytes(self) -> bool:
        """Whether no part that is missing from the trace has bytes. Neither how tokens are spread over a grouped product changes
        any, nor the time of an optimizer on the host."""
        return set(self.unmodelled) <= {GROUPED_PRODUCTS, HOST_OPTIMIZER}

    @cached_property
    def least_bytes_by_kind(self) -> dict[StorageKind, int]:
        """Lower bound on the memory of the step by kind of storage, for any allocator.

        All that is alive at the peak, without the outputs that a loop may keep. A trace may be incomplete
        (:attr:`unmodelled`), and a compiler may keep less. Then only what is alive in any case counts: parameters, buffers,
        inputs, optimizer states, and the gradients that are alive at once.
        """
        kinds, births, deaths = self.lifetimes
        lasting = np.isin(kinds, _LASTING)
        counted = lasting | (deaths <= len(self.ops)) if self.has_all_bytes else lasting
        at = int(np.argmax(self._live_bytes_where(counted, of_last_step=False))) - 1
        held = self.storage_bytes * (counted & (births <= at) & (at <= deaths))
        return {kind: int(held[kinds == kind].sum()) for kind in (StorageKind if self.has_all_bytes else _LASTING)}

    @cached_property
    def _reserved_bytes(self) -> dict[str, int]:
        return {}

    def reserved_bytes(self, device: Device) -> int:
        """Memory that CUDA's caching allocator takes from the driver of ``device`` for the step, with its default settings."""
        if device.architecture not in self._reserved_bytes:  # the workspaces of cuBLAS depend on it
            self._reserved_bytes[device.architecture] = replay_allocator(self, device).reserved_bytes
        return self._reserved_bytes[device.architecture]

    @cached_property
    def edges(self) -> npt.NDArray[np.int64]:
        """Data flow: pairs (producer, consumer) of operator indices. Shape: (2, num_edges)."""
        writer: dict[int, int] = {}
        pairs: list[tuple[int, int]] = []
        for index, op in enumerate(self.ops):
            pairs.extend({(writer[s], index) for s in op.inputs if s in writer})
            writer.update(dict.fromkeys(op.outputs, index))
        return np.array(pairs, dtype=np.int64).reshape(-1, 2).T

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of the graph's content, hexadecimal."""
        return hashlib.sha256(self._to_json()).hexdigest()

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
            "unmodelled": [(gap.code, gap.sentence) for gap in self.unmodelled],
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
        most_bytes = 256 * 2**20  # a few kilobytes of zeros could fill the memory
        try:
            decompressor = zlib.decompressobj()
            text = decompressor.decompress(data, most_bytes)
            if decompressor.unconsumed_tail:
                raise WorkloadError(f"A stored graph is larger than {most_bytes} bytes; it is refused.")
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
                unmodelled=tuple(map(_gap_from_json, document["unmodelled"])),
            )
            known = range(len(graph.storages))
            end = len(graph.ops)
            if any(index not in known for op in graph.ops for index in (*op.inputs, *op.outputs)) or any(
                not (-1 <= storage.birth <= end and -1 <= storage.death <= 2 * end) for storage in graph.storages
            ):
                raise ValueError("an index is out of range")
            return graph
        except (zlib.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WorkloadError(f"A stored graph is damaged ({error}); trace the workload again.") from error


def _gap_from_json(row: str | list[str]) -> Unmodelled:
    return said_before(row) if isinstance(row, str) else Unmodelled(*row)  # with its code since schema 4


def _op_from_json(row: list[Any]) -> Op:
    op = Op(*row)
    return op._replace(
        phase=Phase(op.phase),
        inputs=tuple(op.inputs),
        outputs=tuple(op.outputs),
        shape=tuple(op.shape),
        attributes={key: tuple(value) if isinstance(value, list) else value for key, value in op.attributes.items()},
    )


def _integers(sizes: list[int]) -> Ints:
    """An array whose sums stay exact."""
    return np.array(sizes, dtype=np.int64 if sum(sizes) < 2**62 else object)
