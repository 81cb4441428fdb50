"""Traces that need not be made again.

A study traces the same network many times, with another learning rate, batch or image size. Equal structures of equal sizes give
the graph that was traced before. Other sizes are computed from those that were traced, where that is exact (`_template.py`).
Everything else is traced, other precisions and optimizers too.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import TYPE_CHECKING, Literal, TypeVar

from perfguard.graph._schema import OpGraph
from perfguard.graph._structure import structure_of
from perfguard.graph._target import target_of
from perfguard.graph._template import Sample, Sizes, Template, templates_through
from perfguard.graph._trace import trace
from perfguard.workload import Workload

if TYPE_CHECKING:
    from perfguard.devices import Device

_MOST_STRUCTURES = 64
_MOST_GRAPHS = 16
"""Graphs of one structure that are kept, traced and computed ones apart."""
_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class TraceCache:
    """:func:`trace`, remembering. Thread-safe; holds no tensors and no models."""

    def __init__(self) -> None:
        self._families: OrderedDict[Hashable, _Family] = OrderedDict()
        self._lock = threading.Lock()

    def trace(self, workload: Workload, *, target: Device | Literal["cuda", "cpu"] = "cuda") -> OpGraph:
        """Same as :func:`perfguard.graph.trace`, with the same errors."""
        structure = structure_of(workload, target_of(target))
        if structure is None:
            return trace(workload, target=target)
        key, sizes = structure
        with self._lock:
            family = self._families.get(key) or _kept(self._families, key, _Family(key), _MOST_STRUCTURES)
            self._families.move_to_end(family.key)  # the same object: comparing two keys takes a millisecond
            graph = family.graph_for(sizes)
        if graph is None:
            graph = trace(workload, target=target)
            with self._lock:
                family.add(sizes, graph)
        return graph


class _Family:
    """Traced and computed graphs of one structure."""

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.samples: OrderedDict[Sizes, Sample] = OrderedDict()
        """Traced graphs."""
        self._computed: OrderedDict[Sizes, OpGraph] = OrderedDict()
        self._templates: list[Template] = []

    def graph_for(self, sizes: Sizes) -> OpGraph | None:
        """A graph without a trace; None: it must be traced."""
        if sizes in self.samples:
            return self.samples[sizes].graph
        if sizes not in self._computed:
            template = next((template for template in self._templates if template.reaches(sizes)), None)
            graph = None if template is None else template.at(sizes)
            return None if graph is None else _kept(self._computed, sizes, graph)
        return self._computed[sizes]

    def add(self, sizes: Sizes, graph: OpGraph) -> None:
        _kept(self.samples, sizes, Sample(graph))
        self._templates = templates_through(self.samples)


def _kept(known: OrderedDict[_K, _V], key: _K, value: _V, most: int = _MOST_GRAPHS) -> _V:
    known[key] = value
    if len(known) > most:
        known.popitem(last=False)
    return value
