"""The graphs between those that were traced.

The numbers of a graph (bytes, FLOPs, sizes) are polynomials in the sizes of its inputs as long as the same operators run. They
are affine in the batch, and of low degree in the size of an image or the length of a sequence. A polynomial that some of the
traces determine must agree exactly with at least one more trace, in every number. A term that is left out must either have shown
in that trace, or make no difference where the polynomial is used. The polynomial is used only between two traces, and only if no
trace in between runs other operators. It is used only for sizes congruent to all traces, because a network may pad and strides
round. After traces at 16, 32 and 64, these are multiples of 16.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from perfguard.graph._graph_batch import skeleton_key
from perfguard.graph._polynomials import Polynomials, distinct, monomials
from perfguard.graph._schema import OpGraph
from perfguard.graph._unknown import has_assumed_sizes

Sizes = tuple[int, ...]
_Point = tuple[int, int]
"""Batch and size, or one of them and 0."""
_Term = tuple[int, int]
"""Powers of batch and size."""
_OF_ONE: tuple[tuple[_Term, ...], ...] = (((0, 0), (1, 0)), ((0, 0), (1, 0), (2, 0)))
_OF_TWO: tuple[tuple[_Term, ...], ...] = (
    ((0, 0), (1, 0), (0, 1), (1, 1)),
    ((0, 0), (1, 0), (0, 1), (1, 2)),
    ((0, 0), (1, 0), (0, 1), (1, 1), (1, 2)),
    ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)),
)
"""The polynomials that are tried, from few terms to many."""
_TERMS = tuple((b, s) for b in range(4) for s in range(5))
"""Terms that a polynomial may leave out."""
_FEWEST = 3
"""Samples of the shortest polynomial, and one to spare."""


class Sample:
    """A step that was traced, ready to be compared with others."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph

    @cached_property
    def form(self) -> Hashable:
        """Key of the step without its numbers."""
        return skeleton_key(self.graph)


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
    choices = _OF_ONE if len(axes) == 1 else _OF_TWO
    if has_assumed_sizes(next(iter(samples.values())).graph):
        # They are rounded. An affine function through several of them is off by at most a rounding. A parabola can be far off.
        choices = _OF_ONE[:1] if len(axes) == 1 else ()
    points = np.array([_point(sizes, axes) for sizes in samples], dtype=np.int64)
    numbers, columns = distinct(np.stack([sample.graph.sizes for sample in samples.values()]))
    for terms in map(np.array, choices):
        polynomials = Polynomials.through(points, terms, numbers) if len(terms) < len(points) else None
        if polynomials is not None and polynomials.agree(points, numbers).all():
            return Template(samples, axes, points, terms, polynomials, columns)
    return None


def _is_between(sizes: Sequence[int], known: Iterable[Sequence[int]]) -> bool:
    """Whether one of ``known`` is nowhere larger, and one nowhere smaller."""
    return any(all(map(operator.le, low, sizes)) for low in known) and any(all(map(operator.ge, high, sizes)) for high in known)


class Template:
    """A step whose numbers are polynomials of its sizes.

    Args:
        samples: all that were traced.
        axes: the positions of the sizes that vary; those of one axis are always equal.
        points: batch and size of each sample. Shape: (T, 2).
        terms: of the polynomials. Shape: (p, 2).
        polynomials: through all samples.
        columns: where each number of the graph is among the polynomials.
    """

    def __init__(
        self,
        samples: Mapping[Sizes, Sample],
        axes: Sequence[tuple[int, ...]],
        points: npt.NDArray[np.int64],
        terms: npt.NDArray[np.int64],
        polynomials: Polynomials,
        columns: npt.NDArray[np.int64],
    ) -> None:
        self._sizes, sample = next(iter(samples.items()))
        self._graph = sample.graph
        self._axes = axes
        self._points = points.tolist()
        self._strides = np.gcd.reduce(points - points[0]).tolist()
        self._polynomials, self._columns = polynomials, columns
        others = np.array([term for term in _TERMS if term not in set(map(tuple, terms.tolist()))])
        expected = monomials(points.astype(object), others)
        left_out = Polynomials.through(points, terms, expected)
        assert left_out is not None
        is_hidden = left_out.agree(points, expected)
        self._hidden_terms, self._hidden = others[is_hidden], left_out.part(is_hidden)
        """Terms that would not have shown, and the polynomials that stand in for them."""

    def reaches(self, sizes: Sizes) -> bool:
        """Whether the polynomials give the same numbers as a trace for ``sizes``."""
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
        at = np.array([point])
        return bool(self._hidden.agree(at, monomials(at.astype(object), self._hidden_terms)).all())

    def at(self, sizes: Sizes) -> OpGraph | None:
        """The graph for ``sizes``, which must be in reach; None if its sizes would not be whole."""
        numbers, whole = self._polynomials.at(np.array([_point(sizes, self._axes)]))
        return self._graph.with_sizes(numbers[0, self._columns]) if whole[0] else None


def _point(sizes: Sizes, axes: Sequence[tuple[int, ...]]) -> _Point:
    return sizes[axes[0][0]], sizes[axes[1][0]] if len(axes) > 1 else 0
