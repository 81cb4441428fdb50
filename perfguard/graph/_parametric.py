"""The graph of a network as a function of its widths, learnt from a few traces.

The sizes of tensors are affine in the widths or products of them. Bytes and FLOPs are sums of products of sizes. So each number
of the graph is a polynomial of low degree in the few widths that it depends on. Changing one width at a time shows which widths
these are. Then points are traced until every number lies exactly on a polynomial with points to spare.

A polynomial cannot show a network that takes another branch at some widths. Examples are a shortcut where two sizes are equal
and a pad up to a multiple of 8. Code decides such branches by comparing sizes and by remainders. The *branch conditions* of a
candidate are how any two of its sizes compare (less, equal, more) and the remainder of each width by 16. A candidate is computed
only if each of its conditions occurred in a trace that lies on the polynomials. A candidate with a new condition is traced. So
are all candidates that share a condition with a trace that was different. If a trace is different without any new condition,
nothing is computed from then on.

Notation:
    K  widths      C  candidates      T  traces      U  different numbers      p  terms of a polynomial
"""

from __future__ import annotations

import itertools
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from perfguard.graph._graph_batch import GraphBatch, Ints, skeleton_key
from perfguard.graph._polynomials import LARGEST, Bools, Polynomials, distinct
from perfguard.graph._schema import OpGraph

Widths = tuple[int, ...]
_SPARE = 2
"""Traces that must agree with each polynomial beyond those that determine it."""
_DEGREES = (0, 1, 2, 3)
"""Total degrees of the polynomials in all widths."""
_TRIES = 3
"""Values of a width that are tried until the same operators run."""
_MOST_TO_FIT, _MOST_PROBES = 64, 24
_FIRST, _ROUND, _FEWEST_RANDOM = 6, 4, 4
"""Random points that are traced after one width at a time was changed, when more are needed, and that run the same operators."""
_POOL = 512
"""Points from which a probe is chosen."""
_MODULUS = 16
"""Kernels pad to multiples of 8 and 16 (tensor cores, rows of attention's masks, `make_divisible` of mobile networks)."""
_LARGEST = 2**53
"""Numbers below are exact in double precision too."""
_FEW = 24
"""Spaces with at most this many candidates are traced on demand."""
_MOST_KEPT = 64
"""Graphs of candidates that had to be traced."""
_T = TypeVar("_T")


class ParametricGraph:
    """Graphs for widths: computed where that is exact, else traced.

    Args:
        values: what each width may be, in increasing order.
        trace: gives the graph for widths.
    """

    def __init__(self, values: Sequence[Sequence[int]], trace: Callable[[Widths], OpGraph]) -> None:
        self._values = values
        self._trace = trace
        self.num_traces = 0
        self.why_traced: str | None = None
        """Reason why every candidate is traced; None: most are computed."""
        self._traced: OrderedDict[Widths, OpGraph] = OrderedDict()
        self._different: list[Widths] = []
        """Traced, and not on the polynomials."""
        self._num_agreeing = 0
        """Traces on the polynomials since there are any."""
        self._rng = random.Random(0)
        self._form: OpGraph
        self._key: Hashable
        self._columns: Ints
        self._polynomials: _Graphs
        self._low: Ints
        self._high: Ints
        self._conditions: _BranchConditions
        self.num_ops = 1
        """Number of operators of the first traced graph."""
        if (number := math.prod(map(len, values))) <= _FEW:
            self.why_traced = f"there are only {number} candidates"
        elif max(map(max, values)) ** _DEGREES[-1] >= LARGEST:
            self.why_traced = "its widths are too large"
        else:
            self._explore()

    def at(self, points: Ints, use: Callable[[OpGraph], _T]) -> tuple[GraphBatch | None, Ints, dict[int, _T]]:
        """The graphs for ``points`` (C, K).

        Args:
            points: the widths.
            use: what becomes of a graph that is traced; thousands of them would not fit into memory.

        Returns:
            Those that are computed, the rows of ``points`` that they belong to, and what ``use`` made of the others, by their
            rows.
        """
        traced: dict[int, _T] = {}
        waiting = np.arange(len(points)) if self.why_traced else self._first_unknown(points)
        while len(waiting) and self.why_traced is None:
            row, *rest = waiting.tolist()
            before = self._num_agreeing
            traced[row] = use(self._graph(tuple(points[row].tolist())))
            waiting = np.array(rest, dtype=np.int64)
            if self._num_agreeing > before:
                waiting = waiting[self._first_unknown(points[waiting])]
        if self.why_traced is not None:
            rest = [row for row in range(len(points)) if row not in traced]
            traced |= {row: use(self._graph(tuple(points[row].tolist()))) for row in rest}
            return None, np.arange(0), traced
        rows = np.setdiff1d(np.arange(len(points)), list(traced))
        values, _ = self._polynomials.at(points[rows])
        return GraphBatch(self._form.skeleton, values, self._columns) if len(rows) else None, rows, traced

    def _first_unknown(self, points: Ints) -> Ints:
        """Indices of the ``points`` that must be traced, the most informative one first."""
        unknown = self._unknown(points)
        rows = np.flatnonzero(unknown)
        return rows[np.argsort(-unknown[rows], kind="stable")]

    def _graph(self, point: Widths) -> OpGraph:
        """Trace ``point`` and record the result."""
        if point in self._traced:
            self._traced.move_to_end(point)
            return self._traced[point]
        graph = self._traced_once(point)
        if self.why_traced is None:
            self._note(point, graph)
        return graph

    def _traced_once(self, point: Widths) -> OpGraph:
        graph = self._trace(point)
        self.num_traces += 1
        self._traced[point] = graph
        if len(self._traced) > _MOST_KEPT:
            self._traced.popitem(last=False)
        return graph

    def _note(self, point: Widths, graph: OpGraph) -> None:
        at = np.array([point], dtype=np.int64)
        values, whole = self._polynomials.at(at)
        agrees = bool(whole[0]) and skeleton_key(graph) == self._key and graph.sizes.tolist() == values[0, self._columns].tolist()
        if agrees:
            self._low, self._high = np.minimum(self._low, at[0]), np.maximum(self._high, at[0])
            self._conditions.know(at, values)
            self._num_agreeing += 1
            self._check_different(self._different)
        elif point not in self._different:  # one that was forgotten and traced again teaches nothing
            self._different.append(point)
            self._check_different([point])

    def _check_different(self, points: Sequence[Widths]) -> None:
        different = np.array(points, dtype=np.int64).reshape(-1, len(self._values))
        for row in np.flatnonzero(self._unknown(different) == 0).tolist():
            point = points[row]
            self.why_traced = f"at {point} other operators run, or of other sizes, and no branch condition identifies them"

    def _unknown(self, points: Ints) -> Ints:
        """Number of branch conditions of each of ``points`` without a trace on the polynomials. Shape: (C,)."""
        values, whole = self._polynomials.at(points)
        outside = (points < self._low) | (points > self._high)
        unknown = self._conditions.unknown(points, values) >= 0
        return np.asarray(unknown.sum(axis=1) + outside.sum(axis=1) + ~whole)

    def _explore(self) -> None:
        points, numbers = self._one_at_a_time()
        if self.why_traced is not None:
            return
        supports = _supports(points, numbers)
        wanted, at_least = _FIRST, len(points) + _FEWEST_RANDOM
        while True:
            for point in self._fresh(wanted, points):
                graph = self._traced_once(point)
                if skeleton_key(graph) == self._key:
                    points.append(point)
                    numbers.append(graph.sizes.tolist())
                else:
                    self._different.append(point)
            if max(map(max, numbers)) >= _LARGEST:
                self.why_traced = "its numbers are too large"
                return
            columns, fitted = _fitted(points, numbers, supports, self._values)
            if isinstance(fitted, _Graphs) and len(points) >= at_least:
                break
            wanted = _ROUND
            if fitted == 0 or self.num_traces >= _MOST_TO_FIT + 2 * len(self._values) or not self._fresh(1, points):
                self.why_traced = "its sizes are no polynomials of the widths in a few dozen traces"
                return
        self._columns, self._polynomials = columns, fitted
        at = np.array(points, dtype=np.int64)
        self._low, self._high = at.min(axis=0), at.max(axis=0)
        values, _ = fitted.at(at)
        self._conditions = _BranchConditions(at, values, np.unique(columns[self._form.size_layout.dimensions]))
        self._check_different(self._different)
        self._probe()

    def _one_at_a_time(self) -> tuple[list[Widths], list[list[int]]]:
        """A base point, points that differ from it in one width, and the numbers at each point.

        The changed width is as large or as small as possible, while the network still runs the same operators.
        """
        pool = [tuple(self._rng.choice(values) for values in self._values) for _ in range(_POOL)]
        base = max(pool, key=lambda point: len(set(point)))
        self._form = self._traced_once(base)
        self._key = skeleton_key(self._form)
        self.num_ops = max(len(self._form.ops), 1)
        points, numbers = [base], [self._form.sizes.tolist()]
        for at, end in itertools.product(range(len(base)), (-1, 0)):
            values = self._values[at]
            tried = (values[end], *self._rng.sample(values, min(len(values), _POOL)))
            others = [(*base[:at], value, *base[at + 1 :]) for value in tried]
            for point in [other for other in others if other not in points][:_TRIES]:
                graph = self._traced_once(point)
                if skeleton_key(graph) == self._key:
                    points.append(point)
                    numbers.append(graph.sizes.tolist())
                    break
                self._different.append(point)
            else:
                if len(values) > 1 and not any(other in points[1:] for other in others):
                    self.why_traced = f"other operators run at {self._different[-1]} than at {base}"
        return points, numbers

    def _fresh(self, number: int, seen: Sequence[Widths]) -> list[Widths]:
        """Random points that were not traced; fewer where there are no more."""
        drawn = (tuple(self._rng.choice(values) for values in self._values) for _ in range(_POOL))
        return list(dict.fromkeys(point for point in drawn if point not in {*seen, *self._different}))[:number]

    def _probe(self) -> None:
        """Trace the points that show most branch conditions at once."""
        for _ in range(_MOST_PROBES):
            if self.why_traced is not None:
                return
            known = {*self._traced, *self._different}
            pool = list(dict.fromkeys(point for point in self._few_valued() if point not in known))
            if not pool:
                return
            gain = self._gain(np.array(pool, dtype=np.int64))
            best = int(np.argmax(gain))
            if not gain[best]:
                return
            self._graph(pool[best])

    def _gain(self, points: Ints) -> npt.NDArray[np.float64]:
        """The expected information from a trace at each of ``points``. Shape: (C,).

        Any new condition of a trace that was different may be the cause, so points with few such conditions come first. A
        condition that was the only new one of such a trace is the cause, and is not tried again.
        """
        values, _ = self._polynomials.at(points)
        unknown = self._conditions.unknown(points, values)
        different = np.array(self._different, dtype=np.int64).reshape(-1, len(self._values))
        suspected = self._conditions.unknown(different, self._polynomials.at(different)[0])
        found = [set(row[row >= 0].tolist()) for row in suspected]
        guilty = np.array(sorted(set().union(*(some for some in found if len(some) == 1))), dtype=np.int64)
        suspects = np.array(sorted(set().union(*found)), dtype=np.int64)
        num_unknown = (unknown >= 0).sum(axis=1)
        num_suspects = np.isin(unknown, suspects).sum(axis=1)
        return np.where(np.isin(unknown, guilty).any(axis=1), 0, num_unknown / (1 + num_suspects))

    def _few_valued(self) -> Iterable[Widths]:
        """Points of few different values, at which many sizes are equal, and plain random ones."""
        every = sorted({value for values in self._values for value in values})
        for at in range(_POOL):
            most = (1, 2, 3, None)[at % 4]
            pick = None if most is None else self._rng.sample(every, k=min(most, len(every)))
            yield tuple(
                self._rng.choice([value for value in values if pick is None or value in pick] or list(values))
                for values in self._values
            )


class _Graphs:
    """The numbers of the graph, each of the polynomials that has as few terms as possible."""

    def __init__(self, groups: Sequence[tuple[Ints, Polynomials]]) -> None:
        self._groups = groups
        self._number = sum(len(columns) for columns, _ in groups)

    def at(self, points: Ints) -> tuple[Ints, Bools]:
        """The different numbers at ``points`` (C, K), and whether all of a point's are whole. Shapes: (C, U), (C,)."""
        values = np.empty((len(points), self._number), dtype=np.int64)
        are_whole = np.ones(len(points), dtype=bool)
        for columns, polynomials in self._groups:
            values[:, columns], whole = polynomials.at(points)
            are_whole &= whole
        return values, are_whole


def _supports(points: Sequence[Widths], numbers: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """For each number, the indices of the widths that it depends on. A number depends on a width if changing that width alone
    changes it."""
    rows, at = np.array(numbers, dtype=object), np.array(points, dtype=np.int64)
    width = np.argmax(at[1:] != at[0], axis=1)
    changes = rows[1:] != rows[0]
    return [tuple(np.unique(width[column]).tolist()) for column in changes.T]


def _fitted(
    points: Sequence[Widths],
    numbers: Sequence[Sequence[int]],
    supports: Sequence[tuple[int, ...]],
    values: Sequence[Sequence[int]],
) -> tuple[Ints, _Graphs | int]:
    """The polynomials through all points, and the position of each number among them.

    If there are none: how many points are missing. 0: no further point would help.

    A polynomial counts as found if it agrees with all points, and the points are enough. They are enough if they show more
    combinations of its widths than it has terms, or all combinations that exist.
    """
    at = np.array(points, dtype=np.int64)
    different, columns = distinct(np.array(numbers, dtype=np.int64))
    by_support: dict[tuple[int, ...], list[int]] = {}
    support_of = dict(zip(columns.tolist(), supports, strict=True))
    for column, support in support_of.items():
        by_support.setdefault(support, []).append(column)
    groups: list[tuple[Ints, Polynomials]] = []
    missing = 0
    for support, members in by_support.items():
        left = np.array(members, dtype=np.int64)
        seen = len({tuple(point[at] for at in support) for point in points})
        most = math.prod(len(values[at]) for at in support)
        for degree in _DEGREES:
            if not len(left):
                break
            terms = _terms(support, degree, values)
            if seen < min(len(terms) + _SPARE, most):
                missing = max(missing, len(terms) + _SPARE - seen)
                break
            found = Polynomials.through(at, terms, different[:, left])
            if found is None:
                continue
            fits = found.agree(at, different[:, left])
            groups.append((left[fits], found.part(fits)))
            left = left[~fits]
        else:
            if len(left):
                return columns, 0
    largest = np.array([[allowed[-1] for allowed in values]], dtype=np.int64)
    if missing or any(polynomials.largest_at(largest) >= LARGEST for _, polynomials in groups):
        return columns, missing
    return columns, _Graphs([(members, polynomials) for members, polynomials in groups if len(members)])


def _terms(support: Sequence[int], degree: int, values: Sequence[Sequence[int]]) -> Ints:
    """The powers of all widths in the monomials of ``support`` up to ``degree``, as far as they differ on ``values``."""
    choices = [range(min(degree, len(values[at]) - 1) + 1) for at in support]
    terms = [powers for powers in itertools.product(*choices) if sum(powers) <= degree] if len(support) <= 12 else []
    if len(support) > 12:  # affine is all that so many can be tried for
        terms = [tuple(int(at == which) for at in range(len(support))) for which in range(-1, len(support) if degree else 0)]
    out = np.zeros((len(terms), len(values)), dtype=np.int64)
    out[:, list(support)] = np.array(terms, dtype=np.int64).reshape(len(terms), len(support))
    return out


class _BranchConditions:
    """Branch conditions: comparisons of sizes, and remainders of the widths.

    Args:
        points: that were traced and lie on the polynomials. Shape: (T, K).
        values: the numbers there. Shape: (T, U).
        sizes: which of the numbers are sizes.
    """

    def __init__(self, points: Ints, values: Ints, sizes: Ints) -> None:
        _, first = np.unique(np.concatenate([points, values[:, sizes]], axis=1), axis=1, return_index=True)
        self._sizes = sizes
        self._different = np.sort(first)
        table = np.concatenate([points, values[:, sizes]], axis=1)[:, self._different]
        varies = (table != table[0]).any(axis=0)
        pairs = [(a, b) for a, b in itertools.combinations(range(len(varies)), 2) if varies[a] or varies[b]]
        self._left, self._right = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        self._offsets = 3 * np.arange(len(pairs)) + 1
        self._moduli = 3 * len(pairs) + _MODULUS * np.arange(points.shape[1])
        self._known = np.zeros(3 * len(pairs) + _MODULUS * points.shape[1], dtype=bool)
        self.know(points, values)

    def know(self, points: Ints, values: Ints) -> None:
        """Mark the branch conditions of ``points`` as covered by a trace."""
        self._known[self._of(points, values)] = True

    def unknown(self, points: Ints, values: Ints) -> Ints:
        """The conditions of each of ``points`` that no trace on the polynomials had, by their numbers; -1 elsewhere.

        Shape: (C, pairs + K).
        """
        found = self._of(points, values)
        return np.where(self._known[found], -1, found)

    def _of(self, points: Ints, values: Ints) -> Ints:
        """Shape: (C, pairs + K)."""
        table = np.concatenate([points, values[:, self._sizes]], axis=1)[:, self._different]
        compared = np.sign(table[:, self._left] - table[:, self._right]) + self._offsets
        return np.concatenate([compared, points % _MODULUS + self._moduli], axis=1)


__all__ = ["ParametricGraph", "Widths"]
