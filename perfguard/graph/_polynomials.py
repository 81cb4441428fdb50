"""Exact polynomials: numbers of a graph as functions of its sizes (batch, image, sequence, widths), from a few traces.

Sizes and numbers are integers and coefficients are fractions, so a polynomial either goes through a point or it does not. Where
64 bits do not suffice, Python's own integers are used.

Notation:
    K  sizes      C  points      U  numbers      p  terms, each the powers of all sizes
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[Any]
"""int64, or Python's integers."""
Bools = npt.NDArray[np.bool_]
LARGEST = 2**62
"""Numbers with an upper bound below this are computed in 64 bits."""


class Polynomials:
    """U polynomials with the same terms.

    Args:
        terms: the powers of the sizes. Shape: (p, K).
        numerators: the coefficients times the denominators. Shape: (p, U).
        denominators: Shape: (U,).
    """

    def __init__(self, terms: Integers, numerators: Integers, denominators: Integers) -> None:
        self._terms = terms
        self._numerators, self._denominators = _narrowed(numerators), _narrowed(denominators)
        self._magnitudes = np.abs(numerators).astype(np.float64)

    @classmethod
    def through(cls, points: Integers, terms: Integers, numbers: Integers) -> Polynomials | None:
        """The polynomials through as many of the points as determine them; :meth:`agree` checks whether they meet the others.

        Args:
            points: Shape: (C, K).
            terms: Shape: (p, K).
            numbers: at each point. Shape: (C, U).

        Returns:
            None if the points do not determine them.
        """
        values = monomials(points.astype(object), terms)
        basis = _independent(values.tolist())
        if basis is None:
            return None
        weights = _inverse(values[basis].tolist())
        denominator = math.lcm(*(weight.denominator for row in weights for weight in row))
        whole = np.array([[int(weight * denominator) for weight in row] for row in weights], dtype=object)
        numerators = whole @ numbers[basis].astype(object)
        common = np.array([math.gcd(denominator, *column) for column in numerators.T.tolist()], dtype=object)
        return cls(terms, numerators // common, denominator // common)

    def at(self, points: Integers) -> tuple[Integers, Bools]:
        """The numbers at ``points`` (C, K), and whether all of a point's are whole. Shapes: (C, U), (C,)."""
        total = self._totals(points)
        if (self._denominators == 1).all():
            return total, np.ones(len(points), dtype=bool)
        return total // self._denominators, ~(total % self._denominators != 0).any(axis=1)

    def agree(self, points: Integers, numbers: Integers) -> Bools:
        """Whether each polynomial takes the values ``numbers`` (C, U) at all ``points`` (C, K). Shape: (U,)."""
        total = self._totals(points)
        return np.asarray(((total % self._denominators == 0) & (total // self._denominators == numbers)).all(axis=0))

    def part(self, chosen: Bools) -> Polynomials:
        """The ``chosen`` polynomials."""
        return Polynomials(self._terms, self._numerators[:, chosen], self._denominators[chosen])

    def largest_at(self, points: Integers) -> float:
        """Upper bound on any sum of terms at ``points`` (C, K) and at smaller ones."""
        most = np.abs(points).max(axis=0, keepdims=True, initial=0).astype(np.float64)
        return float((monomials(most, self._terms) @ self._magnitudes).max(initial=0))

    def _totals(self, points: Integers) -> Integers:
        """The numbers times their denominators. Shape: (C, U)."""
        dtype = np.int64 if self.largest_at(points) < LARGEST else object
        return np.asarray(monomials(points.astype(dtype), self._terms) @ self._numerators.astype(dtype))


def monomials(points: npt.NDArray[Any], terms: Integers) -> npt.NDArray[Any]:
    """The terms at ``points`` (C, K). Shape: (C, p)."""
    out = np.ones((len(points), len(terms)), dtype=points.dtype)
    for at, powers in enumerate(terms.T):
        if powers.any():
            out *= points[:, at, None] ** powers
    return out


def distinct(numbers: Integers) -> tuple[Integers, npt.NDArray[np.int64]]:
    """The different columns of ``numbers`` (C, all), and where each column is among them. Shapes: (C, U), (all,)."""
    if numbers.dtype == object:
        return numbers, np.arange(numbers.shape[1])
    different, columns = np.unique(numbers, axis=1, return_inverse=True)
    return different, columns.reshape(-1)


def _narrowed(numbers: Integers) -> Integers:
    return numbers.astype(np.int64 if np.abs(numbers).max(initial=0) < LARGEST else object)


def _independent(rows: Sequence[Sequence[int]]) -> list[int] | None:
    """Indices of the first linearly independent rows, as many as there are columns; None: there are not so many."""
    chosen: list[int] = []
    kept: list[list[Fraction]] = []
    for index, row in enumerate(rows):
        rest = _reduced([Fraction(value) for value in row], kept)
        if any(rest):
            chosen.append(index)
            kept.append(rest)
            if len(chosen) == len(row):
                return chosen
    return None


def _reduced(row: list[Fraction], others: Sequence[list[Fraction]]) -> list[Fraction]:
    """``row`` less the multiples of ``others`` that make it zero where each of them begins."""
    for other in others:
        at = next(index for index, value in enumerate(other) if value)
        factor = row[at] / other[at]
        row = [value - factor * mine for value, mine in zip(row, other, strict=True)]
    return row


def _inverse(matrix: Sequence[Sequence[int]]) -> list[list[Fraction]]:
    """The inverse of a regular matrix, by Gauss and Jordan."""
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
