"""The border of a budget in the search space: a log-linear fit of what the guard predicted, over the hyperparameters.

    log(predicted / limit) = intercept + sum over parameters of coefficient * position

The position of a number is its share of the range that was tried, 0 to 1, on a logarithmic axis where the range is wide. A choice
has one coefficient for each of its values. Memory and time are nearly products of powers of the sizes, so the fit is close, and
its share of explained variance (R²) says how close. The border is where the fit is zero. It explains verdicts. It gives none.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perfguard.budget import Quantity
from perfguard.report._data import Report

_WIDE = 8.0
"""Ratio of the ends of a range from which on its axis is logarithmic."""
_MOST_CHOICES = 12
"""A parameter with more different values that are no numbers is left out, because it may be an id."""
_RIDGE = 1e-6
_HUGE = 1e300
"""From here on, infinity and NaN included, a value is no position on an axis."""
_SPARE_TRIALS = 3
"""Trials beyond the number of coefficients that a fit needs."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One hyperparameter of the search space."""

    name: str
    low: float = 0.0
    """Lowest value that was tried; of a choice 0."""
    high: float = 0.0
    is_log: bool = False
    choices: tuple[str, ...] = ()
    """Values of a choice, as text. Empty: a number."""

    def position(self, value: Any) -> float | None:
        """Position of a number within the range, 0 to 1. None: it is none."""
        if self.choices or not _is_number(value):
            return None
        low, high, value = (math.log(x) if self.is_log else float(x) for x in (self.low, self.high, value))
        return float((value - low) / (high - low))

    def value_at(self, position: float) -> float:
        """The number at that position."""
        if self.is_log:
            return math.exp(math.log(self.low) + position * (math.log(self.high) - math.log(self.low)))
        return self.low + position * (self.high - self.low)


@dataclass(frozen=True, slots=True)
class Border:
    """A fit of one quantity."""

    intercept: float
    slopes: Mapping[str, float]
    """Change of log(predicted / limit) over the range of each numeric parameter."""
    levels: Mapping[str, Mapping[str, float]]
    """Change by the value of each choice."""
    typical: Mapping[str, float]
    """What each parameter adds at its median, or at its most frequent value."""
    r_squared: float
    accuracy: float
    """Share of the trials that the border puts on the side on which their prediction is."""

    def factor(self, name: str) -> float:
        """How many times more is predicted at the worst end of a parameter's range than at the best."""
        effects = self.levels[name].values() if name in self.levels else (0.0, self.slopes[name])
        return math.exp(min(max(effects) - min(effects), 700.0))

    def ranked(self) -> Sequence[tuple[str, float]]:
        """The parameters with their factors, the strongest first."""
        factors = [(name, self.factor(name)) for name in (*self.slopes, *self.levels)]
        return sorted(factors, key=lambda pair: -pair[1])

    def crossing(self, axis: Axis) -> float | None:
        """Value of a numeric parameter on the border, with the others as is typical. None: it does not cross its range."""
        slope = self.slopes.get(axis.name)
        if not slope:
            return None
        rest = self.intercept + sum(added for name, added in self.typical.items() if name != axis.name)
        position = -rest / slope
        return axis.value_at(position) if 0.0 < position < 1.0 else None


def number_in_words(value: float) -> str:
    """A number without an exponent where people would write none: 0.05, 20, 13,970."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def axes_of(report: Report) -> Sequence[Axis]:
    """The hyperparameters that vary, by name."""
    values: dict[str, list[Any]] = {}
    for trial in report.trials:
        for name, value in trial.params.items():
            values.setdefault(name, []).append(value)
    found = []
    for name, tried in values.items():
        if all(map(_is_number, tried)):
            low, high = float(min(tried)), float(max(tried))
            if low < high:
                found.append(Axis(name, low, high, low > 0 and high / low >= _WIDE))
        elif 1 < len(choices := tuple(dict.fromkeys(map(str, tried)))) <= _MOST_CHOICES:
            found.append(Axis(name, choices=choices))
    return found


def fit_border(report: Report, axes: Sequence[Axis], quantity: Quantity) -> Border | None:
    """Fit the border of one budget. None: there is no limit, no parameter, or there are too few trials."""
    known = [
        (trial.params, math.log(trial.record.predicted[quantity] / trial.record.limits[quantity]))
        for trial in report.trials
        if trial.record.predicted.get(quantity, 0.0) > 0 and trial.record.limits.get(quantity, 0.0) > 0
    ]
    known = [(params, distance) for params, distance in known if math.isfinite(distance)]
    columns = [(axis, choice) for axis in axes for choice in (axis.choices or (None,))]
    if not columns or len(known) < len(columns) + 1 + _SPARE_TRIALS:
        return None
    design = np.array([[1.0, *(_feature(axis, choice, params) for axis, choice in columns)] for params, _ in known])
    missing = np.isnan(design)  # a conditional parameter that the trial does not have: as is typical
    typical_values = [float(np.median(column[~gone])) for column, gone in zip(design.T, missing.T, strict=True)]
    design = np.where(missing, typical_values, design)
    y = np.array([distance for _, distance in known])
    penalty = _RIDGE * len(y) * np.diag([0.0] + [1.0] * len(columns))
    coefficients = np.linalg.solve(design.T @ design + penalty, design.T @ y)
    fitted = design @ coefficients
    residual, total = float(((y - fitted) ** 2).sum()), float(((y - y.mean()) ** 2).sum())
    slopes: dict[str, float] = {}
    levels: dict[str, dict[str, float]] = {}
    typical: dict[str, float] = {}
    for index, (axis, choice) in enumerate(columns, 1):
        coefficient = float(coefficients[index])
        if choice is None:
            slopes[axis.name] = coefficient
            typical[axis.name] = coefficient * typical_values[index]
        else:
            levels.setdefault(axis.name, {})[choice] = coefficient
    for name, of_choice in levels.items():
        most_frequent, _ = Counter(str(params[name]) for params, _ in known if name in params).most_common(1)[0]
        typical[name] = of_choice[most_frequent]
    return Border(
        intercept=float(coefficients[0]),
        slopes=slopes,
        levels=levels,
        typical=typical,
        r_squared=1 - residual / total if total else 1.0,
        accuracy=statistics.fmean(map(bool, (fitted > 0) == (y > 0))),
    )


def _feature(axis: Axis, choice: str | None, params: Mapping[str, Any]) -> float:
    if choice is not None:
        return float(str(params.get(axis.name)) == choice)
    position = axis.position(params.get(axis.name))
    return math.nan if position is None else position


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _HUGE
