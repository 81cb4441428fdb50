"""Traces that need not be made again.

A study asks for the same network again and again, with another learning rate, batch size, image size or optimizer. Equal
structures give the graph that was traced before. What another optimizer launches is found out by itself and joined with the step
that is known (`_optimizer_part.py`, `_optimizer_pattern.py`); other sizes are computed from those that were traced, where that is
exact (`_template.py`), and so are other precisions (`_precision.py`). All else is traced.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from itertools import chain
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from perfguard.graph._optimizer_part import Gap, OptimizerPart, is_separable, trace_part
from perfguard.graph._optimizer_pattern import Pattern, find_pattern, has_pattern
from perfguard.graph._precision import InAnotherPrecision, in_another_precision
from perfguard.graph._schema import OpGraph
from perfguard.graph._structure import Structure, structure_of
from perfguard.graph._target import Target, target_of
from perfguard.graph._template import Sample, Sizes, Template, templates_through
from perfguard.graph._trace import trace, traced_step, tracing
from perfguard.workload import Precision, Workload

if TYPE_CHECKING:
    from perfguard.devices import Device

_MOST_STRUCTURES = 64
_MOST_OF_A_FAMILY = 16
"""Traced steps, optimizers and graphs that are kept."""
_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class TraceCache:
    """:func:`trace`, remembering. Thread-safe; holds no tensors and no models."""

    def __init__(self) -> None:
        self._families: OrderedDict[Hashable, _Family] = OrderedDict()
        self._patterns: OrderedDict[Hashable, Pattern | None] = OrderedDict()
        self._lock = threading.Lock()

    def trace(self, workload: Workload, *, target: Device | Literal["cuda", "cpu"] = "cuda") -> OpGraph:
        """As :func:`perfguard.graph.trace`, with the same errors."""
        kind = target_of(target)
        structure = structure_of(workload, kind)
        if structure is None:
            return trace(workload, target=target)
        if workload.mode == "infer" or is_separable(workload):
            family = self._family((structure.key, structure.precision))
            graph = self._graph(family, workload, structure, kind) if family.is_separable else None
            if graph is not None:
                return graph
            family.is_separable = False
        family = self._family((structure.key, structure.precision, structure.optimizer))
        family.is_separable = False
        graph = self._graph(family, workload, structure, kind)
        assert graph is not None
        return graph

    def _family(self, key: tuple[Hashable, ...]) -> _Family:
        with self._lock:
            family = self._families.get(key) or _kept(self._families, key, _Family(key), _MOST_STRUCTURES)
            self._families.move_to_end(family.key)  # the same object: comparing two keys takes a millisecond
            return family

    def _graph(self, family: _Family, workload: Workload, structure: Structure, target: Target) -> OpGraph | None:
        """None: the optimizer cannot be told apart."""
        optimizer, sizes = structure.optimizer, structure.sizes
        with self._lock:
            graph = family.graphs.get((sizes, optimizer))
            sample = family.samples.get(sizes)
            template = None if sample is not None or graph is not None else self._template_for(family, structure)
        if graph is not None:
            return graph
        if template is not None:
            part = self._part(family, workload, optimizer, template.step.gap, target)
            with self._lock:
                graph = template.at(sizes, optimizer, part)
        if graph is None:
            if sample is None:
                step = traced_step(workload, target, leaves_gap=family.is_separable)
                if step is None:
                    return None
                sample = Sample(step)
                with self._lock:
                    family.add(sizes, sample)
            step = sample.step
            part = self._part(family, workload, optimizer, step.gap, target)
            with self._lock:
                graph = step.graph if part is None else sample.frames.filled(step.graph.sizes, optimizer, part)
        with self._lock:
            return _kept(family.graphs, (sizes, optimizer), graph)

    def _template_for(self, family: _Family, structure: Structure) -> Template | InAnotherPrecision | None:
        template = family.template_for(structure.sizes)
        if template is not None or not family.samples:
            return template
        for precision in get_args(Precision):
            other = self._families.get((structure.key, precision, *family.key[2:]))
            template = None if other is None or other is family else other.template_for(structure.sizes)
            if template is not None and (found := family.through(template)) is not None:
                return found
        return None

    def _part(
        self, family: _Family, workload: Workload, optimizer: Hashable, gap: Gap | None, target: Target
    ) -> OptimizerPart | None:
        if gap is None:
            return None
        with self._lock:
            part = family.parts.get((optimizer, gap.parameters))
        if part is None:
            with tracing(target):
                pattern = self._pattern(workload, optimizer, gap, target) if has_pattern(workload, gap.parameters) else None
                part = pattern.for_parameters(gap.parameters) if pattern else trace_part(workload, target, gap.parameters)
            with self._lock:
                _kept(family.parts, (optimizer, gap.parameters), part)
        return part

    def _pattern(self, workload: Workload, optimizer: Hashable, gap: Gap, target: Target) -> Pattern | None:
        dtype = next(parameter.layout.dtype for parameter in gap.parameters if parameter.requires_grad)
        key = optimizer, dtype, target
        if key not in self._patterns:
            found = find_pattern(workload, target, dtype)
            with self._lock:
                _kept(self._patterns, key, found, _MOST_STRUCTURES)
        return self._patterns.get(key)


class _Family:
    """What is known of one structure."""

    def __init__(self, key: tuple[Hashable, ...]) -> None:
        self.key = key
        """The structure and the precision; with the optimizer, where it cannot be told apart."""
        self.is_separable = True
        """Whether its steps are traced without their optimizer; otherwise the optimizer is a part of the key."""
        self.graphs: OrderedDict[tuple[Sizes, Hashable], OpGraph] = OrderedDict()
        self.samples: OrderedDict[Sizes, Sample] = OrderedDict()
        self.parts: OrderedDict[Hashable, OptimizerPart] = OrderedDict()
        self._templates: list[Template] = []
        self._in_other_precisions: OrderedDict[Template, InAnotherPrecision | None] = OrderedDict()

    def template_for(self, sizes: Sizes) -> Template | None:
        return next((template for template in self._templates if template.reaches(sizes)), None)

    def through(self, template: Template) -> InAnotherPrecision | None:
        """What ``template``, of another precision, says of this one."""
        if template not in self._in_other_precisions:
            known = filter(None, reversed(self._in_other_precisions.values()))
            found = chain(
                (other.through(template) for other in known),
                (in_another_precision(sample, sizes, template) for sizes, sample in self.samples.items()),
            )
            return _kept(self._in_other_precisions, template, next(filter(None, found), None))
        return self._in_other_precisions[template]

    def add(self, sizes: Sizes, sample: Sample) -> None:
        _kept(self.samples, sizes, sample)
        self._templates = templates_through(self.samples)
        for template in [template for template, found in self._in_other_precisions.items() if found is None]:
            del self._in_other_precisions[template]  # the new sample may be what it needs


def _kept(known: OrderedDict[_K, _V], key: _K, value: _V, most: int = _MOST_OF_A_FAMILY) -> _V:
    known[key] = value
    if len(known) > most:
        known.popitem(last=False)
    return value
