"""The numbers that the charts draw, as one JSON document, and what each chart says in a sentence."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from perfguard.budget import NOUNS, Quantity
from perfguard.quantities import format_quantity
from perfguard.report._advice import times_in_words
from perfguard.report._border import Axis, Border
from perfguard.report._data import OUTCOMES, Report

_UNITS: Mapping[str, Sequence[tuple[str, float]]] = {
    "memory": (("B", 1.0), ("KiB", 2.0**10), ("MiB", 2.0**20), ("GiB", 2.0**30)),
    "energy": (("mJ", 1e-3), ("J", 1.0), ("kJ", 1e3)),
    "time": (("us", 1e-6), ("ms", 1e-3), ("s", 1.0), ("min", 60.0), ("h", 3600.0)),
}
_CLEAR_BORDER = 0.85
"""A border is drawn where it puts at least this share of the trials on the right side."""
_WINDOWS = 6
"""Most rows of the table of errors over the study."""
_LEAST_WINDOW = 5
"""Measured trials of a row, if there are so many."""


def chart_json(report: Report, axes: Sequence[Axis], borders: Mapping[Quantity, Border]) -> str:
    """Return the document. It is safe within a script element: no "<", ">" or "&" is in it."""
    outcomes = list(OUTCOMES)
    document = {
        "names": [_name(report, index) for index in range(len(report.trials))],
        "outcomes": [outcomes.index(trial.outcome) for trial in report.trials],
        "labels": list(OUTCOMES.values()),
        "quantities": {quantity: _series(report, quantity) for quantity in report.compared},
        "params": [_param(report, axis) for axis in axes],
        "borders": {quantity: _border(border) for quantity, border in borders.items()},
        "drifts": [[index, reason] for index, reason in report.history.drifts if index is not None],
    }
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _name(report: Report, index: int) -> str:
    number = report.trials[index].record.number
    return f"{number}" if number >= 0 else f"#{index + 1}"


def _series(report: Report, quantity: Quantity) -> dict[str, Any]:
    records = [trial.record for trial in report.trials]
    intervals = [record.intervals.get(quantity, (None, None)) for record in records]
    predicted = [_positive(record.predicted.get(quantity)) for record in records]
    unit, size = _unit_of(quantity, [value for value in predicted if value is not None])
    return {
        "noun": NOUNS[quantity],
        "unit": unit,
        "size": size,
        "predicted": predicted,
        "low": [_positive(low) for low, _ in intervals],
        "high": [_positive(high) for _, high in intervals],
        "measured": [_positive(trial.measured(quantity)) for trial in report.trials],
        "limit": [_positive(record.limits.get(quantity), 12) for record in records],
    }


def _param(report: Report, axis: Axis) -> dict[str, Any]:
    values = [trial.params.get(axis.name) for trial in report.trials]
    if axis.choices:
        known = [None if value is None and "None" not in axis.choices else str(value) for value in values]
        return {"name": axis.name, "choices": list(axis.choices), "values": known}
    numbers = [None if axis.position(value) is None else float(value) for value in values]  # type: ignore[arg-type]
    return {"name": axis.name, "log": axis.is_log, "low": axis.low, "high": axis.high, "values": numbers}


def _border(border: Border) -> dict[str, Any]:
    return {
        "intercept": border.intercept,
        "slopes": border.slopes,
        "typical": border.typical,
        "drawn": border.accuracy >= _CLEAR_BORDER,
    }


def _positive(value: float | None, num_digits: int = 6) -> float | None:
    """``num_digits`` digits of a value that can stand on a logarithmic axis."""
    return None if value is None or not math.isfinite(value) or value <= 0 else float(f"{value:.{num_digits}g}")


def _unit_of(quantity: Quantity, values: Sequence[float]) -> tuple[str, float]:
    """The largest unit that leaves most of ``values`` at one or more, and its size."""
    units = _UNITS.get(quantity, _UNITS["time"])
    middle = statistics.median(values) if values else 1.0
    return next(((name, size) for name, size in reversed(units) if middle >= size), units[0])


def comparison_sentence(report: Report, quantity: Quantity) -> str:
    """What the chart of predictions beside measurements says."""
    inside, compared = report.coverage(quantity)
    if not compared:
        return f"No {NOUNS[quantity]} was measured yet, so predictions cannot be compared."
    error = report.median_error(quantity)
    text = f"{inside} of {compared} measured values of {NOUNS[quantity]} lie in their 90% interval."
    return text if error is None else f"{text} The median error is {error:.1%}."


def border_sentence(border: Border | None, quantity: Quantity) -> str:
    """What the map of the search space says of one budget."""
    noun = NOUNS[quantity]
    if border is None:
        return f"There are too few trials for a border of {noun}."
    ranked = [f"{name} ({times_in_words(factor)})" for name, factor in border.ranked()[:3]]
    range_ = "each over its range" if len(ranked) > 1 else "over its range"
    return (
        f"{noun.capitalize()} depends most on {', '.join(ranked)}, {range_}. A log-linear fit of the predictions "
        f"explains {max(border.r_squared, 0.0):.0%} of their variance, and puts {border.accuracy:.0%} of the trials on the "
        "right side of the budget."
    )


def learning_rows(report: Report, quantity: Quantity) -> list[tuple[str, str, str, str]]:
    """The error over the study: trials, number of measured ones, median error, and how many lie in their interval."""
    known = [index for index, trial in enumerate(report.trials) if trial.is_inside(quantity) is not None]
    size = max(_LEAST_WINDOW, math.ceil(len(known) / _WINDOWS))
    rows = []
    for start in range(0, len(known), size):
        window = known[start : start + size]
        trials = [report.trials[index] for index in window]
        pairs = [(trial.record.predicted[quantity], trial.measured(quantity)) for trial in trials]
        errors = [abs(predicted / measured - 1) for predicted, measured in pairs if measured]
        name = f"{_name(report, window[0])} to {_name(report, window[-1])}" if len(window) > 1 else _name(report, window[0])
        error = f"{statistics.median(errors):.1%}" if errors else "-"
        rows.append((name, f"{len(window)}", error, f"{sum(bool(trial.is_inside(quantity)) for trial in trials)}"))
    return rows


def in_words(quantity: Quantity, value: float | None) -> str:
    """A value that may be unknown; "–" is unknown."""
    return "–" if value is None else format_quantity(quantity, value)
