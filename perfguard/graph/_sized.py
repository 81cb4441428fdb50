"""Graphs that differ in nothing but their numbers, as one graph and arrays: what thousands of candidates are predicted from.

Notation:
    C  graphs      N  operators      S  storages      U  different numbers (a network repeats its blocks, so they are few)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from perfguard.graph._quick_replay import reserved_bytes_of
from perfguard.graph._schema import Op, OpGraph, Storage, StorageKind

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_OWN = 3
"""FLOPs, bytes read and bytes written: what every operator has before its sizes."""


def form_of(graph: OpGraph) -> Hashable:
    """All of ``graph`` but its numbers."""
    ops = tuple(
        (op.name, op.kind, op.phase, op.inputs, op.outputs, op.module, len(op.shape), op.dtype, _form_of(op.attributes))
        for op in graph.ops
    )
    settings = graph.mode, graph.precision, graph.layout, graph.options, graph.unmodelled
    return ops, tuple(storage[1:] for storage in graph.storages), settings


def numbers_of(graph: OpGraph) -> list[int]:
    """Bytes of the storages; of each operator FLOPs, bytes read and written, and the sizes in its shape and attributes."""
    numbers = [storage.num_bytes for storage in graph.storages]
    for op in graph.ops:
        numbers += [op.flops, op.bytes_read, op.bytes_written, *op.shape]
        for value in op.attributes.values():
            if isinstance(value, tuple):
                numbers += value
            elif type(value) is int:
                numbers.append(value)
    return numbers


class SizedGraphs:
    """C graphs of one form. ``len`` is C; an index or iteration gives an :class:`OpGraph`.

    Args:
        graph: any graph of the form.
        values: of each graph its different numbers, less than 2^53. Shape: (C, U).
        columns: where each of :func:`numbers_of` is in ``values``.
    """

    def __init__(self, graph: OpGraph, values: Ints, columns: Ints) -> None:
        self.form = graph
        self._num_values = values.shape[1]
        self._values = np.concatenate([values, np.zeros((len(values), 1), np.int64), np.ones((len(values), 1), np.int64)], axis=1)
        self._columns = columns
        self._storage_columns = columns[: len(graph.storages)]
        self._places = _places_of(graph)

    @staticmethod
    def of(graphs: Sequence[OpGraph]) -> SizedGraphs:
        """Of graphs that have one form, at least one."""
        numbers = np.array([numbers_of(graph) for graph in graphs], dtype=np.int64)
        values, columns = np.unique(numbers, axis=1, return_inverse=True)
        return SizedGraphs(graphs[0], values, columns.reshape(-1))

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[OpGraph]:
        return (self[at] for at in range(len(self)))

    def __getitem__(self, at: int) -> OpGraph:
        graph, numbers = self.form, iter(self._values[at, self._columns].tolist())
        storages = tuple([Storage(next(numbers), *storage[1:]) for storage in graph.storages])
        ops = tuple([_filled(op, numbers) for op in graph.ops])
        made = OpGraph(ops, storages, graph.mode, graph.precision, graph.layout, graph.options, graph.unmodelled)
        made.__dict__["edges"] = graph.edges
        return made

    def part(self, rows: slice) -> SizedGraphs:
        """Some of them."""
        return SizedGraphs(self.form, self._values[rows, : self._num_values], self._columns)

    def _taken(self, places: Ints, default: int) -> Ints:
        """The numbers at ``places``, or ``default`` (0 or 1) where that is negative. Shape: (C, *places.shape)."""
        columns = np.where(places < 0, self._num_values + default, self._columns[places])
        return self._values[:, columns]

    @cached_property
    def storage_bytes(self) -> Ints:
        """Shape: (C, S)."""
        return self._values[:, self._storage_columns]

    @cached_property
    def op_numbers(self) -> Ints:
        """FLOPs, bytes read and bytes written. Shape: (3, C, N)."""
        return np.stack([self._taken(self._places.own + at, 0) for at in range(_OWN)])

    def shape_at(self, axis: int) -> Ints:
        """The sizes of the first outputs along ``axis``; 1 where they have no such axis. Shape: (C, N)."""
        return self._taken(self._places.of("shape", axis), 1)

    def shape_product(self, first_axis: int) -> Ints:
        """The product of the sizes from ``first_axis`` on. Shape: (C, N)."""
        return np.asarray(self._taken(self._places.all_of("shape", first_axis), 1).prod(axis=2))

    def attribute_at(self, name: str, axis: int, default: int) -> Ints:
        """A number among the attributes; ``default`` (0 or 1) where an operator has none. Shape: (C, N)."""
        return self._taken(self._places.of(name, axis), default)

    def attribute_product(self, name: str, first_axis: int) -> Ints:
        """The product of an attribute's numbers from ``first_axis`` on; 1 without it. Shape: (C, N)."""
        return np.asarray(self._taken(self._places.all_of(name, first_axis), 1).prod(axis=2))

    def attribute_sizes(self, name: str, first_axis: int) -> Ints:
        """An attribute's numbers from ``first_axis`` on, filled up with ones. Shape: (C, N, most)."""
        return self._taken(self._places.all_of(name, first_axis), 1)

    @cached_property
    def live_bytes(self) -> Floats:
        """As :attr:`OpGraph.live_bytes`. Shape: (C, N + 1)."""
        graph = self.form
        change = np.zeros((self._values.shape[1], len(graph.ops) + 3))
        births, deaths = (np.array([getattr(storage, name) for storage in graph.storages]) for name in ("birth", "death"))
        np.add.at(change, (self._storage_columns, births + 1), 1)
        np.subtract.at(change, (self._storage_columns, deaths + 2), 1)
        return self._values.astype(np.float64) @ np.cumsum(change, axis=1)[:, : len(graph.ops) + 1]

    @cached_property
    def peak_index(self) -> Ints:
        """As :attr:`OpGraph.peak_index`. Shape: (C,)."""
        return np.asarray(np.argmax(self.live_bytes, axis=1) - 1)

    @cached_property
    def peak_live_bytes(self) -> Floats:
        """Shape: (C,)."""
        return np.asarray(self.live_bytes.max(axis=1))

    def at_peak(self, weights: Floats, *, smaller_than: int | None = None) -> Floats:
        """What is alive at each graph's peak: the sum over the storages of bytes times weights.

        Args:
            weights: of each storage. Shape: (S, d).
            smaller_than: others count nothing.

        Returns:
            Shape: (C, d).
        """
        found = np.zeros((len(self), weights.shape[1]))
        values = self._values.astype(np.float64)
        if smaller_than is not None:
            values[values >= smaller_than] = 0
        births, deaths = (np.array([getattr(storage, name) for storage in self.form.storages]) for name in ("birth", "death"))
        for at in np.unique(self.peak_index).tolist():
            rows = self.peak_index == at
            alive = (births <= at) & (at <= deaths)
            summed = np.zeros((values.shape[1], weights.shape[1]))
            np.add.at(summed, self._storage_columns[alive], weights[alive])
            found[rows] = values[rows] @ summed
        return found

    @cached_property
    def bytes_by_kind(self) -> Floats:
        """What is alive at each graph's peak. Shape: (C, len(StorageKind))."""
        kinds = np.array([storage.kind for storage in self.form.storages], dtype=np.int64)
        return self.at_peak(np.eye(len(StorageKind))[kinds])

    @cached_property
    def reserved_bytes(self) -> Floats:
        """As :attr:`OpGraph.reserved_bytes`. Shape: (C,)."""
        return reserved_bytes_of(self.form, self.storage_bytes)

    @property
    def flops(self) -> Floats:
        """Of the whole step. Shape: (C,)."""
        return np.asarray(self.op_numbers[0].sum(axis=1, dtype=np.float64))


class _Places:
    """Where the numbers of each operator are in :func:`numbers_of`; -1 where it has none."""

    def __init__(self, graph: OpGraph) -> None:
        at = len(graph.storages)
        own: list[int] = []
        ranges: list[dict[str, tuple[int, int]]] = []
        for op in graph.ops:
            own.append(at)
            at += _OWN
            found = {"shape": (at, len(op.shape))}
            at += len(op.shape)
            for name, value in op.attributes.items():
                length = len(value) if isinstance(value, tuple) else int(type(value) is int)
                if length:
                    found[name] = at, length
                    at += length
            ranges.append(found)
        self.own = np.array(own, dtype=np.int64)
        self._ranges = ranges
        self._known: dict[tuple[str, int], Ints] = {}

    def of(self, name: str, axis: int) -> Ints:
        """Shape: (N,)."""
        found = self.all_of(name, 0)
        return found[:, axis] if axis < found.shape[1] else np.full(len(found), -1)

    def all_of(self, name: str, first: int) -> Ints:
        """Shape: (N, most)."""
        if (name, first) not in self._known:
            self._known[name, first] = self._found(name, first)
        return self._known[name, first]

    def _found(self, name: str, first: int) -> Ints:
        ranges = [found.get(name, (0, 0)) for found in self._ranges]
        most = max((length - first for _, length in ranges), default=0)
        rows = [[start + axis if axis < length else -1 for axis in range(first, first + most)] for start, length in ranges]
        return np.array(rows, dtype=np.int64).reshape(len(ranges), max(most, 0))


_known_places: WeakKeyDictionary[OpGraph, _Places] = WeakKeyDictionary()


def _places_of(graph: OpGraph) -> _Places:
    if graph not in _known_places:
        _known_places[graph] = _Places(graph)
    return _known_places[graph]


def dimensions_in(graph: OpGraph) -> Ints:
    """Which of :func:`numbers_of` are sizes of an operator, not its bytes or FLOPs: indices."""
    places = np.arange(len(numbers_of(graph)))
    own = _places_of(graph).own
    is_cost = np.isin(places, np.concatenate([own + at for at in range(_OWN)])) if len(own) else np.zeros(len(places), bool)
    return places[(places >= len(graph.storages)) & ~is_cost]


def _form_of(attributes: Mapping[str, Any]) -> Hashable:
    return tuple(
        (key, len(value) if isinstance(value, tuple) else "number" if type(value) is int else value)
        for key, value in attributes.items()
    )


def _filled(op: Op, numbers: Iterator[int]) -> Op:
    return Op(
        op.name, op.kind, op.phase, next(numbers), next(numbers), next(numbers), op.inputs, op.outputs, op.module,
        tuple(islice(numbers, len(op.shape))), op.dtype,
        {key: _number(value, numbers) for key, value in op.attributes.items()},
    )  # fmt: skip


def _number(value: Any, numbers: Iterator[int]) -> Any:
    if isinstance(value, tuple):
        return tuple(islice(numbers, len(value)))
    return next(numbers) if type(value) is int else value
