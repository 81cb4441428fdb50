"""The graph of a network as a function of its widths, learnt from a few traces.

The sizes of tensors are affine in the widths or products of them, and bytes and FLOPs are sums of products of sizes, so each
number of the graph is a polynomial of low degree in the few widths that it depends on. Which these are is seen by changing one
width at a time; then points are traced until every number lies exactly on a polynomial with points to spare.

What a polynomial cannot show is a network that does something else at some widths: a shortcut where two sizes are equal, a pad
up to a multiple of 8. Code decides such things by comparing sizes and by remainders. So a candidate is computed only if each of
its *circumstances* (how any two sizes compare: less, equal, more; what each width leaves when divided by 16) was there in a
trace that lies on the polynomials. A candidate with a new circumstance is traced, and so are all that share one with a trace
that was different. If a trace is different without any new circumstance, nothing is computed from then on.

Notation:
    K  widths      C  candidates      T  traces      U  different numbers      p  terms of a polynomial
"""

from __future__ import annotations

import itertools
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from perfguard.graph._graph_batch import GraphBatch, Ints, skeleton_key
from perfguard.graph._schema import OpGraph
from perfguard.graph._template import LARGEST, inverse, reduced

Widths = tuple[int, ...]
_SPARE = 2
"""Traces that must agree with each polynomial beyond those that determine it."""
_DEGREES = (0, 1, 2, 3)
"""Of all widths together."""
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
"""Candidates of a whole space, which are traced when they are asked for."""
_MOST_KEPT = 64
"""Graphs of candidates that had to be traced."""
Bools = npt.NDArray[np.bool_]
_T = TypeVar("_T")


class ElasticGraph:
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
        """Why every candidate is traced; None: most are computed."""
        self._traced: OrderedDict[Widths, OpGraph] = OrderedDict()
        self._different: list[Widths] = []
        """Traced, and not on the polynomials."""
        self._num_agreeing = 0
        """Traces on the polynomials since there are any."""
        self._rng = random.Random(0)
        self._form: OpGraph
        self._key: Hashable
        self._columns: Ints
        self._polynomials: Polynomials
        self._low: Ints
        self._high: Ints
        self._circumstances: _Circumstances
        self.num_ops = 1
        """Of the first graph that was traced."""
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
        """Those of ``points`` that must be traced, as far as is known, the one that shows most first. Indices."""
        unknown = self._unknown(points)
        rows = np.flatnonzero(unknown)
        return rows[np.argsort(-unknown[rows], kind="stable")]

    def _graph(self, point: Widths) -> OpGraph:
        """Traced; what it shows is remembered."""
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
            self._circumstances.know(at, values)
            self._num_agreeing += 1
            self._check_different(self._different)
        elif point not in self._different:  # one that was forgotten and traced again teaches nothing
            self._different.append(point)
            self._check_different([point])

    def _check_different(self, points: Sequence[Widths]) -> None:
        different = np.array(points, dtype=np.int64).reshape(-1, len(self._values))
        for row in np.flatnonzero(self._unknown(different) == 0).tolist():
            point = points[row]
            self.why_traced = f"at {point} other operators run, or of other sizes, and nothing tells it from the rest"

    def _unknown(self, points: Ints) -> Ints:
        """How many circumstances of each of ``points`` no trace on the polynomials had. Shape: (C,)."""
        values, whole = self._polynomials.at(points)
        outside = (points < self._low) | (points > self._high)
        unknown = self._circumstances.unknown(points, values) >= 0
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
            if isinstance(fitted, Polynomials) and len(points) >= at_least:
                break
            wanted = _ROUND
            if fitted == 0 or self.num_traces >= _MOST_TO_FIT + 2 * len(self._values) or not self._fresh(1, points):
                self.why_traced = "its sizes are no polynomials of the widths, as far as a few dozen traces can tell"
                return
        self._columns, self._polynomials = columns, fitted
        at = np.array(points, dtype=np.int64)
        self._low, self._high = at.min(axis=0), at.max(axis=0)
        values, _ = fitted.at(at)
        self._circumstances = _Circumstances(at, values, np.unique(columns[self._form.size_layout.dimensions]))
        self._check_different(self._different)
        self._probe()

    def _one_at_a_time(self) -> tuple[list[Widths], list[list[int]]]:
        """A point, and others that differ from it in one width alone, which is as large or as small as can be, and run the same
        operators; and the numbers there."""
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
        """Trace the points that show most circumstances at once."""
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
        """How much a trace of each of ``points`` is expected to teach. Shape: (C,).

        What was there in a trace that was different may be why, so points with little of that come first; what was found guilty,
        because it was the only new circumstance of such a trace, is not tried again.
        """
        values, _ = self._polynomials.at(points)
        unknown = self._circumstances.unknown(points, values)
        different = np.array(self._different, dtype=np.int64).reshape(-1, len(self._values))
        suspected = self._circumstances.unknown(different, self._polynomials.at(different)[0])
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


class _Group(NamedTuple):
    """Numbers with the same terms."""

    terms: Ints  # shape: (p, K), the powers of the widths
    numerators: Ints  # shape: (p, m)
    denominators: Ints  # shape: (m,)
    columns: Ints  # shape: (m,), where they are among all


class Polynomials:
    """U numbers, each a polynomial in the widths with rational coefficients."""

    def __init__(self, groups: Sequence[_Group]) -> None:
        self._groups = groups
        self._number = sum(len(group.columns) for group in groups)

    def at(self, points: Ints) -> tuple[Ints, Bools]:
        """The numbers at ``points`` (C, K), and whether all of a point's are whole. Shapes: (C, U), (C,)."""
        values = np.empty((len(points), self._number), dtype=np.int64)
        whole = np.ones(len(points), dtype=bool)
        for terms, numerators, denominators, columns in self._groups:
            total = _monomials(points, terms) @ numerators
            if (denominators != 1).any():
                whole &= ~(total % denominators).any(axis=1)
                total //= denominators
            values[:, columns] = total
        return values, whole


def _monomials(points: Ints, terms: Ints) -> Ints:
    """Shape: (C, p)."""
    out = np.ones((len(points), len(terms)), dtype=np.int64)
    for at, powers in enumerate(terms.T):
        if powers.any():
            out *= points[:, at, None] ** powers
    return out


def _supports(points: Sequence[Widths], numbers: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Of each number the widths that it depends on: where a point that differs from the first in one of them has another."""
    rows, at = np.array(numbers, dtype=object), np.array(points, dtype=np.int64)
    width = np.argmax(at[1:] != at[0], axis=1)
    changes = rows[1:] != rows[0]
    return [tuple(np.unique(width[column]).tolist()) for column in changes.T]


def _fitted(
    points: Sequence[Widths],
    numbers: Sequence[Sequence[int]],
    supports: Sequence[tuple[int, ...]],
    values: Sequence[Sequence[int]],
) -> tuple[Ints, Polynomials | int]:
    """The polynomials through all points, and where each number is among them; else how many points are missing (0: none
    would help).

    A polynomial counts as found if it agrees with all points, and these show more combinations of the widths that it depends on
    than it has terms; or all that there are.
    """
    rows = np.array(numbers, dtype=np.int64)
    different, columns = np.unique(rows, axis=1, return_inverse=True)
    columns = columns.reshape(-1)
    by_support: dict[tuple[int, ...], list[int]] = {}
    support_of = dict(zip(columns.tolist(), supports, strict=True))
    for column, support in support_of.items():
        by_support.setdefault(support, []).append(column)
    groups: list[_Group] = []
    missing = 0
    for support, members in by_support.items():
        left = np.array(members, dtype=np.int64)
        seen = len({tuple(point[at] for at in support) for point in points})
        most = math.prod(len(values[at]) for at in support)
        for degree in _DEGREES:
            terms = _terms(support, degree, values)
            if len(left) and seen < min(len(terms) + _SPARE, most):
                missing = max(missing, len(terms) + _SPARE - seen)
                break
            basis = _independent(points, terms) if len(left) else None
            if basis is None:
                continue
            group = _through(points, basis, terms, different, left)
            found, _ = Polynomials([group._replace(columns=np.arange(len(left)))]).at(np.array(points))
            fits = (found == different[:, left]).all(axis=0)
            groups.append(_Group(terms, group.numerators[:, fits], group.denominators[fits], left[fits]))
            left = left[~fits]
        else:
            if len(left):
                return columns, 0
    if missing or any(_overflows(group, values) for group in groups):
        return columns, missing
    return columns, Polynomials([group for group in groups if len(group.columns)])


def _terms(support: Sequence[int], degree: int, values: Sequence[Sequence[int]]) -> Ints:
    """The powers of all widths in the monomials of ``support`` up to ``degree``, as far as they differ on ``values``."""
    choices = [range(min(degree, len(values[at]) - 1) + 1) for at in support]
    terms = [powers for powers in itertools.product(*choices) if sum(powers) <= degree] if len(support) <= 12 else []
    if len(support) > 12:  # affine is all that so many can be tried for
        terms = [tuple(int(at == which) for at in range(len(support))) for which in range(-1, len(support) if degree else 0)]
    out = np.zeros((len(terms), len(values)), dtype=np.int64)
    out[:, list(support)] = np.array(terms, dtype=np.int64).reshape(len(terms), len(support))
    return out


def _independent(points: Sequence[Widths], terms: Ints) -> list[int] | None:
    """Indices of points at which ``terms`` take linearly independent values, as many as there are terms; None: there are not."""
    chosen: list[int] = []
    kept: list[list[Fraction]] = []
    for index, row in enumerate(_monomials(np.array(points, dtype=np.int64), terms).tolist()):
        rest = reduced([Fraction(value) for value in row], kept)
        if any(rest):
            chosen.append(index)
            kept.append(rest)
            if len(chosen) == len(terms):
                return chosen
    return None


def _through(points: Sequence[Widths], basis: Sequence[int], terms: Ints, numbers: Ints, columns: Ints) -> _Group:
    """The polynomials through the points of ``basis``."""
    weights = inverse(_monomials(np.array([points[at] for at in basis], dtype=np.int64), terms).tolist())
    denominator = math.lcm(*(weight.denominator for row in weights for weight in row))
    whole = np.array([[int(weight * denominator) for weight in row] for row in weights], dtype=object)
    numerators = whole @ numbers[np.array(basis)][:, columns].astype(object)
    common = [math.gcd(denominator, *column) for column in numerators.T.tolist()]
    numerators //= np.array(common, dtype=object)
    denominators = [denominator // divisor for divisor in common]
    fits = [max(map(abs, column)) < _LARGEST and rest < _LARGEST for column, rest in zip(numerators.T, denominators, strict=True)]
    numerators[:, ~np.array(fits)] = 0  # it will not agree with the points
    return _Group(terms, numerators.astype(np.int64), np.array([min(rest, _LARGEST) for rest in denominators]), columns)


def _overflows(group: _Group, values: Sequence[Sequence[int]]) -> bool:
    """Whether a sum of terms could leave 64 bits."""
    largest = _monomials(np.array([[allowed[-1] for allowed in values]], dtype=np.int64), group.terms).astype(object)
    return bool(len(group.columns)) and int((largest @ abs(group.numerators.astype(object))).max()) >= 2**62


class _Circumstances:
    """How the sizes compare, and the remainders of the widths.

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
        """Those of ``points`` are harmless."""
        self._known[self._of(points, values)] = True

    def unknown(self, points: Ints, values: Ints) -> Ints:
        """The circumstances of each of ``points`` that no trace on the polynomials had, by their numbers; -1 elsewhere.

        Shape: (C, pairs + K).
        """
        found = self._of(points, values)
        return np.where(self._known[found], -1, found)

    def _of(self, points: Ints, values: Ints) -> Ints:
        """Shape: (C, pairs + K)."""
        table = np.concatenate([points, values[:, self._sizes]], axis=1)[:, self._different]
        compared = np.sign(table[:, self._left] - table[:, self._right]) + self._offsets
        return np.concatenate([compared, points % _MODULUS + self._moduli], axis=1)


__all__ = ["ElasticGraph", "Polynomials", "Widths"]
