"""The graphs between those that were traced.

The numbers of a graph (bytes, FLOPs, sizes) are polynomials in the sizes of its inputs as long as the same operators run: affine
in the batch, of low degree in the size of an image or the length of a sequence. What some of the traces determine must agree with
at least one more, exactly, in every number; a term that is left out must either have shown there, or make no difference where the
polynomial is used. That is only between two traces, for sizes congruent to all of them (after 16, 32 and 64 for multiples of 16:
a network may pad, and strides round), and only if no trace in between runs other operators.
"""

from __future__ import annotations

import math
import operator
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from perfguard.graph._graph_batch import attributes_key
from perfguard.graph._optimizer_part import OptimizerPart, StepWithGap, joined
from perfguard.graph._schema import OpGraph

Sizes = tuple[int, ...]
_Numbers = npt.NDArray[Any]
_Point = tuple[int, int]
"""Batch and size, or one of them and 0."""
_Term = tuple[int, int]
"""The powers of the two."""
_OF_ONE: tuple[tuple[_Term, ...], ...] = (((0, 0), (1, 0)), ((0, 0), (1, 0), (2, 0)))
_OF_TWO: tuple[tuple[_Term, ...], ...] = (
    ((0, 0), (1, 0), (0, 1), (1, 1)),
    ((0, 0), (1, 0), (0, 1), (1, 2)),
    ((0, 0), (1, 0), (0, 1), (1, 1), (1, 2)),
    ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)),
)
"""The polynomials that are tried, from few terms to many."""
_TERMS = tuple((b, s) for b in range(4) for s in range(5))
"""Those that may be left out."""
_NUMBERS_OF_GAP = 3
"""FLOPs, bytes read and bytes written."""
_MOST_FRAMES = 16
"""Optimizers of a step that are kept."""
_FEWEST = 3
"""Samples of the shortest polynomial, and one to spare."""
LARGEST = 2**62
"""Of the products that fit 64 bits."""


class Sample:
    """A step that was traced, ready to be compared with others."""

    def __init__(self, step: StepWithGap) -> None:
        self.step = step
        self.frames = Frames(step)

    @cached_property
    def form(self) -> Hashable:
        """All of the step but its numbers."""
        graph = self.step.graph
        ops = tuple(
            (op.name, op.phase, op.inputs, op.outputs, op.module, len(op.shape), op.dtype, attributes_key(op.attributes))
            for op in graph.ops
        )
        elements = self.step.elements
        moved = tuple([tensor[1:] for tensors in (*elements.read, *elements.written) for tensor in tensors])
        storages = tuple(storage[1:] for storage in graph.storages)
        return ops, storages, graph.unmodelled, self.step.gap, moved, elements[2:], self.step.reads_dtype

    @cached_property
    def numbers(self) -> _Numbers:
        """Those of its graph, then the elements of each storage, and of what each operator reads and writes."""
        graph, elements = self.step.graph, self.step.elements
        counts = list(map(operator.floordiv, graph.storage_bytes.tolist(), elements.element_bytes))
        for read, written in zip(elements.read, elements.written, strict=True):
            counts += [tensor.num_elements for tensor in (*read, *written)]
        return np.concatenate([graph.sizes, np.array(counts, dtype=graph.sizes.dtype)])


def templates_through(samples: Mapping[Sizes, Sample]) -> list[Template]:
    """Polynomials through the samples that run the same operators, and through those of them that differ only in their batch."""
    found: list[Template | None] = []
    for alike in _by_form(samples) if len(samples) >= _FEWEST else ():
        first, *others = alike
        varying = [at for at, size in enumerate(first) if any(sizes[at] != size for sizes in others)]
        batch = tuple(at for at in varying if all(sizes[at] == sizes[0] for sizes in alike))
        rest = tuple(at for at in varying if at not in batch)
        strangers = [sizes for sizes in samples if sizes not in alike]
        found.append(_template(alike, [axis for axis in (batch, rest) if axis], strangers))
        if batch and rest:
            of_one_size: dict[Sizes, dict[Sizes, Sample]] = {}
            for sizes, sample in alike.items():
                of_one_size.setdefault(tuple(sizes[at] for at in rest), {})[sizes] = sample
            found += [_template(some, [batch], strangers) for some in of_one_size.values()]
    return [template for template in found if template is not None]


def _by_form(samples: Mapping[Sizes, Sample]) -> list[dict[Sizes, Sample]]:
    groups: list[dict[Sizes, Sample]] = []
    for sizes, sample in samples.items():
        for group in groups:
            first = next(iter(group.values()))
            if sample.form == first.form:
                sample.form = first.form  # one object: the next comparison is short
                group[sizes] = sample
                break
        else:
            groups.append({sizes: sample})
    return groups


def _template(samples: Mapping[Sizes, Sample], axes: Sequence[tuple[int, ...]], strangers: Sequence[Sizes]) -> Template | None:
    """None if the samples are too few or lie on no polynomial, or if other operators run at sizes between them, ``strangers``."""
    if len(samples) < _FEWEST or not axes or any(len({sizes[at] for at in axis}) > 1 for sizes in samples for axis in axes):
        return None
    if any(_is_between(sizes, samples) for sizes in strangers):
        return None
    points = {_point(sizes, axes): sample for sizes, sample in samples.items()}
    for terms in _OF_ONE if len(axes) == 1 else _OF_TWO:
        basis = _independent(list(points), terms) if len(terms) < len(points) else None
        if basis is not None:
            template = Template(next(iter(samples)), axes, terms, points, basis)
            if template.agrees:
                return template
    return None


def _is_between(sizes: Sequence[int], known: Iterable[Sequence[int]]) -> bool:
    """Whether one of ``known`` is nowhere larger, and one nowhere smaller."""
    return any(all(map(operator.le, low, sizes)) for low in known) and any(all(map(operator.ge, high, sizes)) for high in known)


class Template:
    """A step whose numbers are polynomials of its sizes.

    Args:
        sizes: of one of the samples.
        axes: the positions of the sizes that vary; those of one axis are always equal.
        terms: of the polynomials.
        samples: all that were traced.
        basis: the points of those that determine the polynomials.
    """

    def __init__(
        self,
        sizes: Sizes,
        axes: Sequence[tuple[int, ...]],
        terms: Sequence[_Term],
        samples: Mapping[_Point, Sample],
        basis: Sequence[_Point],
    ) -> None:
        self._sizes = sizes
        self._axes = axes
        self._terms = terms
        self._points = list(samples)
        self._inverse = inverse([_values(point, terms) for point in basis])
        self._basis = basis
        self._numbers = np.stack([samples[point].numbers for point in basis])
        self._largest = int(self._numbers.max())
        self._strides = [math.gcd(*(value - values[0] for value in values)) for values in zip(*samples, strict=True)]
        self.step = samples[basis[0]].step
        """One of those that were traced."""
        self._frames = samples[basis[0]].frames
        self._num_own = len(self.step.graph.sizes)
        further = [point for point in samples if point not in basis]
        self.agrees = all(_equal(self._numbers_at(point), samples[point].numbers) for point in further)
        """With all that were traced."""
        left_out = [term for term in _TERMS if term not in terms]
        self._hidden = [
            term for term in left_out if all(self._foretells(term, point, self._weights_at(point)) for point in further)
        ]
        """Terms that would not have shown."""

    def reaches(self, sizes: Sizes) -> bool:
        """Whether the polynomials say what a trace would say for ``sizes``."""
        varying = {at for axis in self._axes for at in axis}
        if any(size != mine for at, (size, mine) in enumerate(zip(sizes, self._sizes, strict=True)) if at not in varying):
            return False
        if any(len({sizes[at] for at in axis}) > 1 for axis in self._axes):
            return False
        point = _point(sizes, self._axes)
        if any(
            (x - start) % stride if stride else x != start
            for x, start, stride in zip(point, self._points[0], self._strides, strict=True)
        ):
            return False
        if not _is_between(point, self._points):
            return False
        weights = self._weights_at(point)
        return all(self._foretells(term, point, weights) for term in self._hidden)

    def at(self, sizes: Sizes, optimizer: Hashable, part: OptimizerPart | None) -> OpGraph | None:
        """The graph for ``sizes``, which must be in reach; None if its numbers would not be whole.

        Args:
            sizes: of all inputs.
            optimizer: whose part it is; one optimizer has one part.
            part: what fills the gap. None: there is none.
        """
        numbers = self.numbers_at(sizes)
        return None if numbers is None else self._frames.filled(numbers[: self._num_own], optimizer, part)

    def numbers_at(self, sizes: Sizes) -> _Numbers | None:
        """As :attr:`Sample.numbers`, of a trace for ``sizes``; None if they would not be whole."""
        return self._numbers_at(_point(sizes, self._axes))

    @property
    def columns(self) -> _Numbers:
        """These numbers in the traces that determine the polynomials. Shape: (num_terms, num_numbers)."""
        return self._numbers

    @cached_property
    def is_constant(self) -> npt.NDArray[np.bool_]:
        """Which of these numbers do not depend on the sizes."""
        return np.asarray((self._numbers == self._numbers[0]).all(axis=0))

    def _weights_at(self, point: _Point) -> list[Fraction]:
        """How much each sample of the basis counts at ``point``."""
        values = _values(point, self._terms)
        return [sum((x * row[at] for x, row in zip(values, self._inverse, strict=True)), Fraction()) for at in range(len(values))]

    def _foretells(self, term: _Term, point: _Point, weights: Sequence[Fraction]) -> bool:
        return sum(w * _value(at, term) for w, at in zip(weights, self._basis, strict=True)) == _value(point, term)

    def _numbers_at(self, point: _Point) -> _Numbers | None:
        weights = self._weights_at(point)
        denominator = math.lcm(*(weight.denominator for weight in weights))
        factors = [int(weight * denominator) for weight in weights]
        fits = self._largest * sum(map(abs, factors)) < LARGEST
        samples = self._numbers if fits else self._numbers.astype(object)
        total = np.array(factors, dtype=samples.dtype) @ samples
        whole, rest = total // denominator, total % denominator
        return None if rest.any() else whole


class Frames:
    """A step with the parts of several optimizers."""

    def __init__(self, step: StepWithGap) -> None:
        self._step = step
        self._frames: OrderedDict[Hashable, _Frame] = OrderedDict()

    def filled(self, numbers: _Numbers, optimizer: Hashable, part: OptimizerPart | None) -> OpGraph:
        """The graph with ``numbers`` of the step and the optimizer's part; see :meth:`Template.at`."""
        if optimizer not in self._frames:
            self._frames[optimizer] = _Frame(self._step, part)
            if len(self._frames) > _MOST_FRAMES:
                self._frames.popitem(last=False)
        return self._frames[optimizer].filled(numbers)


class _Frame:
    """A step with its optimizer's part, whose other numbers are filled in."""

    def __init__(self, step: StepWithGap, part: OptimizerPart | None) -> None:
        gap, self._graph = step.gap, step.graph
        self._given: _Numbers | None = None
        """Which of the graph's numbers are filled in; None: all."""
        if part is None or gap is None:
            return
        self._graph = joined(step, part)
        starts, end = self._graph.size_layout.starts, gap.before_step + len(part.states)
        own = [(gap.before_state, gap.before_state + len(part.states)), (end, end + len(part.temporaries))]
        own.append((starts[gap.place], starts[gap.place + len(part.ops)]))
        self._given = np.ones(len(self._graph.sizes), dtype=np.bool_)
        for first, last in own:
            self._given[first:last] = False
        start = step.graph.size_layout.starts[gap.place]
        self._of_gap = slice(start, start + _NUMBERS_OF_GAP)

    def filled(self, numbers: _Numbers) -> OpGraph:
        """The graph with ``numbers`` of the step without its optimizer."""
        if self._given is not None:
            given = np.delete(numbers, self._of_gap)
            numbers = self._graph.sizes.astype(np.result_type(self._graph.sizes, given))
            numbers[self._given] = given
        return self._graph.with_sizes(numbers)


def _point(sizes: Sizes, axes: Sequence[tuple[int, ...]]) -> _Point:
    return sizes[axes[0][0]], sizes[axes[1][0]] if len(axes) > 1 else 0


def _value(point: _Point, term: _Term) -> int:
    return int(point[0] ** term[0] * point[1] ** term[1])


def _values(point: _Point, terms: Sequence[_Term]) -> list[int]:
    return [_value(point, term) for term in terms]


def _equal(numbers: _Numbers | None, others: _Numbers) -> bool:
    return numbers is not None and np.array_equal(numbers, others)


def _independent(points: Sequence[_Point], terms: Sequence[_Term]) -> list[_Point] | None:
    """Points at which ``terms`` take linearly independent values, as many as there are terms; None if there are not so many."""
    chosen: list[_Point] = []
    kept: list[list[Fraction]] = []
    for point in points:
        row = reduced([Fraction(value) for value in _values(point, terms)], kept)
        if any(row):
            chosen.append(point)
            kept.append(row)
    return chosen if len(chosen) == len(terms) else None


def reduced(row: list[Fraction], others: Sequence[list[Fraction]]) -> list[Fraction]:
    """``row`` less the multiples of ``others`` that make it zero where each of them begins."""
    for other in others:
        at = next(index for index, value in enumerate(other) if value)
        factor = row[at] / other[at]
        row = [value - factor * mine for value, mine in zip(row, other, strict=True)]
    return row


def inverse(matrix: Sequence[Sequence[int]]) -> list[list[Fraction]]:
    """Of a regular matrix, by Gauss and Jordan."""
    size = len(matrix)
    rows = [[Fraction(v) for v in row] + [Fraction(int(at == index)) for at in range(size)] for index, row in enumerate(matrix)]
    for at in range(size):
        pivot = next(index for index in range(at, size) if rows[index][at])
        rows[at], rows[pivot] = rows[pivot], rows[at]
        rows[at] = [value / rows[at][at] for value in rows[at]]
        for index in range(size):
            if index != at and rows[index][at]:
                factor = rows[index][at]
                rows[index] = [value - factor * mine for value, mine in zip(rows[index], rows[at], strict=True)]
    return [row[size:] for row in rows]
