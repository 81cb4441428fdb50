"""Traces that need not be made again.

A study asks for the same network again and again, with another learning rate or another batch size. Equal structure and batch
give the graph that was traced before. For another batch, every number of a graph (bytes, FLOPs, sizes) is usually an affine
function of it; a template is made of three traces that agree in everything else and lie on one line, exactly. It is used only
between the smallest and the largest batch that were traced, and only for batches that are congruent to them (after 16, 32 and 64
for multiples of 16: a network may pad). Where the traces do not agree, each batch is traced.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Hashable
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from perfguard.graph._schema import Op, OpGraph, Storage
from perfguard.graph._structure import structure_of
from perfguard.graph._target import target_of
from perfguard.graph._trace import trace
from perfguard.workload import Workload

if TYPE_CHECKING:
    from perfguard.devices import Device

_MOST_STRUCTURES = 64
_MOST_SAMPLES = 16
"""Graphs kept of one structure."""
_SAMPLES_FOR_A_TEMPLATE = 3


class TraceCache:
    """:func:`trace`, remembering. Thread-safe; holds no tensors and no models."""

    def __init__(self) -> None:
        self._families: OrderedDict[Hashable, _Family] = OrderedDict()
        self._lock = threading.Lock()

    def trace(self, workload: Workload, *, target: Device | Literal["cuda", "cpu"] = "cuda") -> OpGraph:
        """As :func:`perfguard.graph.trace`, with the same errors."""
        structure = structure_of(workload, target_of(target))
        if structure is None:
            return trace(workload, target=target)
        with self._lock:
            family = self._families.get(structure.key)
            if family is None:
                family = self._families[structure.key] = _Family(structure.key)
                if len(self._families) > _MOST_STRUCTURES:
                    self._families.popitem(last=False)
            self._families.move_to_end(family.key)  # the same object: comparing two keys takes a millisecond
            known = family.at(structure.batch)
        if known is not None:
            return known
        graph = trace(workload, target=target)
        with self._lock:
            family.add(structure.batch, graph)
        return graph


class _Family:
    """The graphs of one structure by batch size."""

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self._samples: OrderedDict[int, OpGraph] = OrderedDict()
        self._template: _Template | None = None
        self._is_affine = True

    def at(self, batch: int) -> OpGraph | None:
        known = self._samples.get(batch)
        if known is None and self._template is not None:
            known = self._template.at(batch)
            if known is not None:
                self._samples[batch] = known
        if len(self._samples) > _MOST_SAMPLES:
            self._samples.popitem(last=False)
        return known

    def add(self, batch: int, graph: OpGraph) -> None:
        self._samples[batch] = graph
        if self._is_affine and batch and len(self._samples) >= _SAMPLES_FOR_A_TEMPLATE:
            self._template = _Template.through(dict(self._samples))
            self._is_affine = self._template is not None


class _Template:
    """A graph whose numbers are affine in the batch size."""

    def __init__(
        self, low: int, high: int, stride: int, first: OpGraph, at_low: npt.NDArray[Any], slope: npt.NDArray[Any]
    ) -> None:
        self.low = low
        self.high = high
        self._stride = stride
        self._first = first
        self._at_low = at_low
        self._slope = slope  # of (high - low) steps, so that it stays an integer
        self._attributes_have_numbers = [any(isinstance(value, tuple) for value in op.attributes.values()) for op in first.ops]

    @classmethod
    def through(cls, graphs: dict[int, OpGraph]) -> _Template | None:
        """None if the graphs differ in more than numbers, or their numbers do not lie on a line."""
        low, high = min(graphs), max(graphs)
        first = graphs[low]
        form = _form(first)
        if any(_form(graph) != form for graph in graphs.values()):
            return None
        numbers = {batch: _numbers(graph) for batch, graph in graphs.items()}
        if max(int(values.max()) for values in numbers.values()) * (high - low) >= 2**62:
            numbers = {batch: values.astype(object) for batch, values in numbers.items()}
        slope = numbers[high] - numbers[low]
        for batch, values in numbers.items():
            if not np.array_equal((values - numbers[low]) * (high - low), slope * (batch - low)):
                return None
        return cls(low, high, math.gcd(*(batch - low for batch in graphs)), first, numbers[low], slope)

    def at(self, batch: int) -> OpGraph | None:
        if not self.low <= batch <= self.high or (batch - self.low) % self._stride:
            return None
        scaled = self._slope * (batch - self.low)
        if (scaled % (self.high - self.low)).any():
            return None
        numbers = iter((self._at_low + scaled // (self.high - self.low)).tolist())
        first = self._first
        storages = tuple(Storage(next(numbers), kind, birth, death, module) for _, kind, birth, death, module in first.storages)
        ops = tuple(
            Op(
                op.name, op.kind, op.phase, next(numbers), next(numbers), next(numbers), op.inputs, op.outputs, op.module,
                tuple(islice(numbers, len(op.shape))), op.dtype,
                _with_numbers(op.attributes, numbers) if has_numbers else op.attributes,
            )
            for op, has_numbers in zip(first.ops, self._attributes_have_numbers, strict=True)
        )  # fmt: skip
        graph = OpGraph(ops, storages, first.mode, first.precision, first.layout, first.options, first.unmodelled)
        graph.__dict__["edges"] = first.edges
        return graph


def _form(graph: OpGraph) -> Hashable:
    """All of a graph but its numbers."""
    return (
        tuple(
            (op.name, op.phase, op.inputs, op.outputs, op.module, len(op.shape), op.dtype, _form_of(op.attributes))
            for op in graph.ops
        ),
        tuple(storage[1:] for storage in graph.storages),
        graph.unmodelled,
    )


def _numbers(graph: OpGraph) -> npt.NDArray[Any]:
    numbers = [storage.num_bytes for storage in graph.storages]
    for op in graph.ops:
        numbers += [op.flops, op.bytes_read, op.bytes_written, *op.shape]
        for value in op.attributes.values():
            if isinstance(value, tuple):
                numbers += value
    return np.array(numbers, dtype=np.int64 if max(numbers) < 2**62 else object)


def _form_of(attributes: Any) -> Hashable:
    return tuple((key, len(value) if isinstance(value, tuple) else value) for key, value in attributes.items())


def _with_numbers(attributes: Any, numbers: Any) -> dict[str, Any]:
    return {key: tuple(islice(numbers, len(value))) if isinstance(value, tuple) else value for key, value in attributes.items()}
