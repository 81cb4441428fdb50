"""GraphBatch: graphs that differ in nothing but their sizes, as one skeleton and one array. One graph is a batch of one.

The sizes of a graph begin with the bytes of its storages, in order. Each operator follows with its FLOPs, the bytes that it
reads and writes, its shape, and the integers among its attributes. These are tuples of integers, and single integers that are
not booleans.

Notation:
    C  graphs      N  operators      S  storages      U  different sizes (a network repeats its blocks, so they are few)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from perfguard.graph._op import Op, Storage, StorageKind
from perfguard.graph._polynomials import LARGEST
from perfguard.graph._quick_replay import reserved_bytes_of

if TYPE_CHECKING:
    from perfguard.graph._schema import OpGraph

Ints = npt.NDArray[Any]
"""int64, or Python's integers where these would not fit."""
_NUM_COSTS = 3
"""FLOPs, bytes read and bytes written: what every operator has before its other sizes."""
_ONE, _ZERO = -1, -2
"""Places of a 1 and a 0, which stand for a size that an operator does not have."""


def sizes_in(value: Any) -> tuple[int, ...]:
    """The sizes in an attribute. A flag or a name is none, nor is a tuple of names as that of a fused kernel."""
    if isinstance(value, tuple):
        return value if all(isinstance(item, int) and not isinstance(item, bool) for item in value) else ()
    return (value,) if type(value) is int else ()


def sizes_of(graph: OpGraph) -> Ints:
    """All sizes of ``graph``, in the order of the module's docstring."""
    sizes = [storage.num_bytes for storage in graph.storages]
    for op in graph.ops:
        sizes += [op.flops, op.bytes_read, op.bytes_written, *op.shape]
        for value in op.attributes.values():
            sizes += sizes_in(value)
    return np.array(sizes, dtype=np.int64 if max(sizes, default=0) < LARGEST else object)


def filled(skeleton: OpGraph, sizes: Ints) -> tuple[tuple[Op, ...], tuple[Storage, ...]]:
    """The operators and storages of ``skeleton`` with ``sizes``: the inverse of :func:`sizes_of`."""
    rest = iter(sizes.tolist())
    storages = tuple([Storage(next(rest), *storage[1:]) for storage in skeleton.storages])
    return tuple([_with_sizes(op, rest) for op in skeleton.ops]), storages


def _with_sizes(op: Op, rest: Iterator[int]) -> Op:
    name, kind, phase, _, _, _, inputs, outputs, module, shape, dtype, attributes = op
    flops, read, written, own = next(rest), next(rest), next(rest), tuple(islice(rest, len(shape)))
    if attributes:
        attributes = {key: _value_with_sizes(value, rest) for key, value in attributes.items()}
    return Op(name, kind, phase, flops, read, written, inputs, outputs, module, own, dtype, attributes)


def _value_with_sizes(value: Any, rest: Iterator[int]) -> Any:
    sizes = tuple(islice(rest, len(sizes_in(value))))
    if not sizes:
        return value
    return sizes if isinstance(value, tuple) else sizes[0]


def skeleton_key(graph: OpGraph) -> Hashable:
    """Key of a graph without its sizes. It is equal for graphs that fit in one batch."""
    ops = tuple(
        (op.name, op.kind, op.phase, op.inputs, op.outputs, op.module, len(op.shape), op.dtype, _attributes_key(op.attributes))
        for op in graph.ops
    )
    settings = graph.mode, graph.precision, graph.layout, graph.options, graph.unmodelled
    return ops, tuple(storage[1:] for storage in graph.storages), settings


def _attributes_key(attributes: Mapping[str, Any]) -> Hashable:
    """Key of the attributes without their sizes."""
    lengths = {key: len(sizes_in(value)) for key, value in attributes.items()}
    return tuple((key, "sizes", lengths[key]) if lengths[key] else (key, type(value), value) for key, value in attributes.items())


class SizeLayout:
    """Positions of each operator's sizes among all sizes of a graph.

    Attributes:
        starts: where those of each operator begin, and where the last ones end. Shape: (N + 1,).
    """

    def __init__(self, graph: OpGraph) -> None:
        self._num_storages = at = len(graph.storages)
        starts = [at]
        self._ranges: list[dict[str, tuple[int, int]]] = []
        for op in graph.ops:
            at += _NUM_COSTS
            found = {"shape": (at, len(op.shape))}
            at += len(op.shape)
            for name, value in op.attributes.items():
                if length := len(sizes_in(value)):
                    found[name] = at, length
                    at += length
            self._ranges.append(found)
            starts.append(at)
        self.starts = np.array(starts, dtype=np.int64)
        self._known: dict[str, npt.NDArray[np.int64]] = {}

    def places(self, name: str) -> npt.NDArray[np.int64]:
        """Positions of the sizes of "shape" or of an attribute; -1: the operator has no such size. Shape: (N, longest)."""
        if name not in self._known:
            first, length = np.array([found.get(name, (0, 0)) for found in self._ranges], dtype=np.int64).reshape(-1, 2).T
            along = np.arange(int(length.max(initial=0)))
            self._known[name] = np.where(along < length[:, None], first[:, None] + along, _ONE)
        return self._known[name]

    @property
    def dimensions(self) -> npt.NDArray[np.int64]:
        """Indices of the sizes that are neither bytes nor FLOPs."""
        is_cost = np.zeros(int(self.starts[-1]), dtype=np.bool_)
        is_cost[: self._num_storages] = True
        is_cost[self.starts[:-1, None] + np.arange(_NUM_COSTS)] = True
        return np.flatnonzero(~is_cost)


class GraphBatch:
    """C graphs with one skeleton. ``len`` is C; an index gives an :class:`OpGraph`, a slice or an array of indices a batch.

    Args:
        skeleton: :attr:`OpGraph.skeleton` of any of the graphs.
        sizes: of each graph its different sizes. Shape: (C, U).
        columns: where each of :attr:`OpGraph.sizes` is in ``sizes``; None: they are all there, in that order.
    """

    def __init__(self, skeleton: OpGraph, sizes: Ints, columns: npt.NDArray[np.int64] | None = None) -> None:
        self.skeleton = skeleton
        self._sizes = sizes
        self._columns = columns

    @staticmethod
    def of(graphs: Sequence[OpGraph]) -> GraphBatch:
        """The batch of ``graphs``, at least one.

        Raises:
            ValueError: if they differ in more than their sizes.
        """
        key = skeleton_key(graphs[0])
        if any(skeleton_key(graph) != key for graph in graphs[1:]):
            raise ValueError("Graphs in a batch must run the same operators; these differ in more than their sizes.")
        return GraphBatch(graphs[0].skeleton, np.stack([graph.sizes for graph in graphs]))

    def __len__(self) -> int:
        return len(self._sizes)

    @overload
    def __getitem__(self, at: int | np.integer[Any]) -> OpGraph: ...
    @overload
    def __getitem__(self, at: slice | npt.NDArray[Any]) -> GraphBatch: ...
    def __getitem__(self, at: int | np.integer[Any] | slice | npt.NDArray[Any]) -> OpGraph | GraphBatch:
        if isinstance(at, (int, np.integer)):
            row = self._sizes[at]
            return self.skeleton.with_sizes(row if self._columns is None else row[self._columns])
        return GraphBatch(self.skeleton, self._sizes[at], self._columns)

    def __iter__(self) -> Iterator[OpGraph]:
        return (self[at] for at in range(len(self)))

    @cached_property
    def _padded(self) -> Ints:
        """The sizes, a 0 and a 1. Shape: (C, U + 2)."""
        constants = np.broadcast_to(np.array([0, 1], dtype=self._sizes.dtype), (len(self), 2))
        return np.concatenate([self._sizes, constants], axis=1)

    def _taken(self, places: npt.NDArray[np.int64]) -> Ints:
        """The sizes at ``places``. Shape: (C, *places.shape)."""
        columns = places if self._columns is None else np.where(places < 0, places, self._columns[places])
        return np.take(self._padded, columns, axis=1)

    def attribute(
        self, name: str, *, ops: npt.NDArray[np.int64] | slice = slice(None), length: int = 0, default: int = 1
    ) -> Ints:
        """The sizes of an attribute of each operator, or of its first output.

        Args:
            name: of the attribute, or "shape".
            ops: the V operators. All by default.
            length: how many sizes there are at the least.
            default: 0 or 1. It stands for each size that an operator does not have.

        Returns:
            Shape: (C, V, length of the longest).
        """
        places = self.skeleton.size_layout.places(name)[ops]
        if places.shape[1] < length:
            places = np.pad(places, ((0, 0), (0, length - places.shape[1])), constant_values=_ONE)
        return self._taken(places if default else np.where(places < 0, _ZERO, places))

    @cached_property
    def storage_bytes(self) -> Ints:
        """Shape: (C, S)."""
        num_bytes = self._taken(np.arange(len(self.skeleton.storages)))
        fits = num_bytes.astype(np.float64).sum(axis=1).max(initial=0) < LARGEST
        return num_bytes.astype(np.int64 if fits else object, copy=False)

    @cached_property
    def costs(self) -> Ints:
        """FLOPs, bytes read and bytes written of each operator. Shape: (3, C, N)."""
        starts = self.skeleton.size_layout.starts[:-1]
        return np.stack([self._taken(starts + at) for at in range(_NUM_COSTS)])

    @property
    def flops(self) -> Ints:
        """Floating-point operations of each step. Shape: (C,)."""
        flops = self.costs[0]
        fits = flops.astype(np.float64).sum(axis=1).max(initial=0) < LARGEST
        return np.asarray(flops.astype(np.int64 if fits else object, copy=False).sum(axis=1))

    @cached_property
    def live_bytes(self) -> npt.NDArray[Any]:
        """Bytes alive while each operator runs, and before the first: int64, or float64 beyond that. Shape: (C, N + 1)."""
        return self.live_bytes_of(*StorageKind)

    def live_bytes_of(self, *kinds: StorageKind) -> npt.NDArray[Any]:
        """Same as :attr:`live_bytes`, for storages of ``kinds`` alone."""
        return self.live_bytes_where(np.isin(self.skeleton.lifetimes[0], kinds))

    def live_bytes_where(self, chosen: npt.NDArray[np.bool_], *, of_last_step: bool = True) -> npt.NDArray[Any]:
        """Same as :attr:`live_bytes`, for the ``chosen`` (S,) storages, with or without what the last step leaves of them."""
        number = len(self.skeleton.ops) + 1
        (_, births, deaths), num_bytes = self.skeleton.lifetimes[:, chosen], self.storage_bytes[:, chosen]
        live = _summed_up_to(num_bytes, births + 1, number) - _summed_up_to(num_bytes, deaths + 2, number)
        kept = deaths >= number  # alive until an operator of the next step
        if of_last_step and kept.any():
            of_last = num_bytes[:, kept]
            live = live + of_last.sum(axis=1, keepdims=True) - _summed_up_to(of_last, deaths[kept] - number + 2, number)
        return live.astype(np.float64) if live.dtype == object else live

    @cached_property
    def peak_index(self) -> npt.NDArray[np.int64]:
        """The operator at which most bytes are alive; -1 for the time before the first one. Shape: (C,)."""
        return np.asarray(np.argmax(self.live_bytes, axis=1) - 1)

    @cached_property
    def peak_live_bytes(self) -> npt.NDArray[Any]:
        """Most bytes alive at once. Shape: (C,)."""
        return np.asarray(self.live_bytes.max(axis=1))

    def held_bytes(self, index: npt.NDArray[np.int64]) -> Ints:
        """Bytes of each storage that is alive at operator ``index`` (C,) of its graph, 0 of all others. Shape: (C, S)."""
        return np.asarray(self.storage_bytes * self.num_alive(index))

    def num_alive(self, index: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Number of copies of each storage alive at operator ``index`` (C,): 2 while the last step's is there. Shape: (C, S)."""
        (_, births, deaths), at, number = self.skeleton.lifetimes, index[:, None], len(self.skeleton.ops) + 1
        return np.asarray(((births <= at) & (at <= deaths)).astype(np.int64) + ((deaths >= number) & (at <= deaths - number)))

    def bytes_by_kind(self, index: npt.NDArray[np.int64] | None = None) -> Ints:
        """Bytes alive at operator ``index`` (C,), by default at the peak, of each kind. Shape: (C, len(StorageKind))."""
        if index is None:
            return self._bytes_by_kind_at_peak
        return summed_by(self.held_bytes(index), self.skeleton.lifetimes[0], len(StorageKind))

    @cached_property
    def _bytes_by_kind_at_peak(self) -> Ints:
        return summed_by(self.held_at_peak, self.skeleton.lifetimes[0], len(StorageKind))

    @cached_property
    def held_at_peak(self) -> Ints:
        """:meth:`held_bytes` at the peak. Shape: (C, S)."""
        return self.held_bytes(self.peak_index)

    @cached_property
    def reserved_bytes(self) -> Ints:
        """Memory that CUDA's caching allocator takes from the driver for each step, with its default settings. Shape: (C,)."""
        return reserved_bytes_of(self.skeleton, self.storage_bytes)


def summed_by(values: Ints, group: npt.NDArray[np.int64], number: int) -> Ints:
    """The sums of the columns of each of ``number`` groups, exact for integers.

    Args:
        values: Shape: (C, n).
        group: of each column, 0 to ``number`` - 1. Shape: (n,).
        number: of groups.

    Returns:
        Shape: (C, number).
    """
    return np.diff(_summed_up_to(values, group, number), axis=1, prepend=0)


def _summed_up_to(values: Ints, group: npt.NDArray[np.int64], number: int) -> Ints:
    """The sums of the columns of each group and those before it. Shape: (C, number)."""
    order = np.argsort(group, kind="stable")
    sums = np.zeros((len(values), len(group) + 1), dtype=values.dtype)
    np.cumsum(np.take(values, order, axis=1), axis=1, out=sums[:, 1:])
    return np.take(sums, np.searchsorted(group[order], np.arange(number), side="right"), axis=1)
