"""The data of the plots, in the units of their axes. They are read from the trials once, and drawn by two libraries."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, get_args

import optuna
from optuna.trial import FrozenTrial, TrialState

from perfguard.budget import NOUNS, Quantity
from perfguard.exceptions import ConfigurationError
from perfguard.quantities import format_quantity, format_seconds
from perfguard.summary import TrialRecord
from perfguard_optuna._summary import finished_trials, run_time_s

Group = Literal["launched", "repaired", "over", "unmeasured", "pruned", "pruned_elsewhere"]
GROUPS: tuple[Group, ...] = get_args(Group)

# Okabe and Ito's palette, which colour-blind people can distinguish.
BLUE, GREEN, ORANGE, RED, PURPLE, SKY, GREY = "#0072B2", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#56B4E9", "#8C8C8C"
GROUP_COLORS: Mapping[Group, str] = {
    "launched": BLUE,
    "repaired": GREEN,
    "over": RED,
    "unmeasured": BLUE,
    "pruned": ORANGE,
    "pruned_elsewhere": GREY,
}

_MEMORY_UNITS = (("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30))
_ENERGY_UNITS = (("mJ", 1e-3), ("J", 1.0), ("kJ", 1e3))
_COST_UNITS = (("$", 1.0),)
_TIME_UNITS = (("us", 1e-6), ("ms", 1e-3), ("s", 1.0), ("min", 60.0), ("h", 3600.0))
MOST_BUDGET_LINES = 3
"""Budgets that get a line each; more, as where the study's remaining time is the budget, are one band."""
_FARTHEST_INTERVAL = 3.0
"""Largest ratio of an interval's end to its prediction in the axes, so that a wide interval does not squeeze the points."""
_MARGIN_SHARE = 0.12
"""Share of the width for trials without a measurement."""
_GOLDEN_RATIO = (1 + math.sqrt(5)) / 2
"""The fractional parts of its multiples spread evenly over an interval."""


@dataclass(frozen=True, slots=True)
class Point:
    """One predicted trial. All amounts are in the axes' unit."""

    number: int
    group: Group
    predicted: float
    low: float
    high: float
    measured: float | None
    """None: not measured, so the point stands in the margin."""
    hover: tuple[str, ...]
    """Lines."""


@dataclass(frozen=True, slots=True)
class BudgetView:
    """Predicted against measured. ``message``: why there is nothing to draw; "" otherwise."""

    noun: str
    unit: str
    points: Sequence[Point]
    limits: Sequence[float]
    """All budgets that a trial was judged by, ascending."""
    bounds: tuple[float, float]
    """Lowest and highest value of both axes."""
    headline: str
    message: str = ""

    @property
    def labels(self) -> Mapping[Group, str]:
        """Label of each group in the legend."""
        return {
            "launched": "launched",
            "repaired": "repaired, then launched",
            "over": "launched, broke the budget",
            "unmeasured": "launched, not measured in full",
            "pruned": f"pruned: {self.noun}",
            "pruned_elsewhere": "pruned for another limit",
        }

    def groups(self) -> Iterator[tuple[Group, Sequence[Point]]]:
        """The groups that have a point."""
        for group in GROUPS:
            if points := [point for point in self.points if point.group == group]:
                yield group, points

    @property
    def left(self) -> float:
        """Left end of the measured axis, with a margin left of the lowest value."""
        low, high = self.bounds
        return low / math.pow(high / low, _MARGIN_SHARE / (1 - _MARGIN_SHARE))

    @property
    def margin(self) -> float:
        """The middle of the margin on the measured axis."""
        return math.sqrt(self.left * self.bounds[0])

    def x_of(self, point: Point) -> float:
        """Position of a point on the measured axis. Points without a measurement are spread over the margin, side by side."""
        if point.measured is not None:
            return point.measured
        share = 0.2 + 0.6 * (point.number * _GOLDEN_RATIO % 1)
        return self.left * math.pow(self.bounds[0] / self.left, share)

    @property
    def budget_label(self) -> str:
        """Label of the budget in the legend."""
        ends = list(dict.fromkeys((tick_text(self.limits[0]), tick_text(self.limits[-1]))))
        return f"budget, {' to '.join(ends)} {self.unit}"


def budget_view(study: optuna.Study, quantity: str) -> BudgetView:
    """The data of ``plot_budget``.

    Raises:
        ConfigurationError: for a quantity that there is not.
    """
    known = next((name for name in NOUNS if name == quantity), None)
    if known is None:
        raise ConfigurationError(f"quantity must be one of {', '.join(NOUNS)}, but got {quantity!r}.")
    finished = finished_trials(study)
    predicted = [(trial, record) for trial, record in finished if _usable(record.predicted.get(known))]
    if not predicted:
        return BudgetView(NOUNS[known], "", (), (), (1.0, 1.0), "", _why_nothing(finished, known))
    unit, size = _unit_of(known, [record.predicted[known] for _, record in predicted])
    points = [_point(trial, record, known, size) for trial, record in predicted]
    limits = sorted({record.limits[known] / size for _, record in predicted if _usable(record.limits.get(known))})
    coverage = _coverage(points, [trial for trial, _ in predicted])
    return BudgetView(NOUNS[known], unit, points, limits, _bounds(points, limits), coverage)


def _point(trial: FrozenTrial, record: TrialRecord, quantity: Quantity, size: float) -> Point:
    predicted, measured = record.predicted[quantity], _measured(trial, record, quantity)
    low, high = (end if _usable(end) else predicted for end in record.intervals.get(quantity, (predicted, predicted)))
    lines = [
        f"trial {trial.number}",
        f"predicted {format_quantity(quantity, predicted)} "
        f"(90%: {format_quantity(quantity, low)} to {format_quantity(quantity, high)})",
    ]
    if measured is not None:
        lines.append(f"measured {format_quantity(quantity, measured)}")
    return Point(
        number=trial.number,
        group=_group(record, quantity, measured),
        predicted=predicted / size,
        low=low / size,
        high=high / size,
        measured=None if measured is None else measured / size,
        hover=(*lines, *_about(trial, record)),
    )


def _bounds(points: Sequence[Point], limits: Sequence[float]) -> tuple[float, float]:
    values = [*limits]
    for point in points:
        values += [point.predicted, point.predicted if point.measured is None else point.measured]
        values.append(max(point.low, point.predicted / _FARTHEST_INTERVAL))
        values.append(min(point.high, point.predicted * _FARTHEST_INTERVAL))
    return min(values) / 1.3, max(values) * 1.3


def _measured(trial: FrozenTrial, record: TrialRecord, quantity: Quantity) -> float | None:
    """The measured value; None also for the time and the cost of a stopped trial, which do not show the whole."""
    measured = record.measured.get(quantity)
    is_whole = quantity not in ("time", "cost") or trial.state == TrialState.COMPLETE or record.breaks(quantity)
    return measured if is_whole and _usable(measured) else None


def _group(record: TrialRecord, quantity: Quantity, measured: float | None) -> Group:
    if record.verdict == "prune":
        would_break = record.predicted[quantity] > record.limits.get(quantity, math.inf)  # if not most surely of all limits
        return "pruned" if would_break or record.broken_limit == quantity else "pruned_elsewhere"
    if record.breaks(quantity):
        return "over"
    if measured is None:
        return "unmeasured"
    return "repaired" if record.verdict == "repair" else "launched"


def _coverage(points: Sequence[Point], trials: Sequence[FrozenTrial]) -> str:
    """Coverage of the intervals in words. For a stopped trial the measured value is only a lower bound."""
    inside = [
        point.low <= point.measured <= point.high
        for point, trial in zip(points, trials, strict=True)
        if trial.state == TrialState.COMPLETE and point.measured is not None
    ]
    return f"{sum(inside)} of {len(inside)} completed trials lie in their 90% interval" if inside else "nothing was measured yet"


def _why_nothing(finished: Sequence[tuple[FrozenTrial, TrialRecord]], quantity: Quantity | None) -> str:
    if not finished:
        return "no trial has finished yet"
    judged = {name for _, record in finished for name in record.predicted}
    if not judged or quantity is None:
        return "no trial was judged by PerfGuard:\nrun the study with a PerfGuardPruner"
    hint = "\nSay Workload(steps=...)." if quantity in ("time", "cost") else ""
    return f"{NOUNS[quantity]} was not predicted, only {', '.join(NOUNS[name] for name in NOUNS if name in judged)}{hint}"


@dataclass(frozen=True, slots=True)
class Band:
    """One layer of the account, in the unit of the axis."""

    label: str
    color: str
    is_predicted: bool
    """False: it was spent."""
    heights: Sequence[float]
    """Sum up to and with each finished trial."""


@dataclass(frozen=True, slots=True)
class Skip:
    """A pruned trial on the upper line."""

    x: float
    y: float
    color: str
    hover: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Total:
    """A sum over the study."""

    y: float
    interval: tuple[float, float] | None
    """Interval of the total, if all predictions are at the same end of their 90% intervals. None: nothing in it is predicted."""
    label: str


@dataclass(frozen=True, slots=True)
class SavingsView:
    """The savings by the guard. ``message``: why there is nothing to draw; "" otherwise."""

    numbers: Sequence[int]
    """Numbers of the finished trials."""
    axis: str
    bands: Sequence[Band]
    """The lowest first."""
    skips: Sequence[Skip]
    totals: Sequence[Total]
    """Totals at the right end of the plot."""
    headline: str
    caption: Sequence[str]
    """Lines."""
    message: str = ""


@dataclass(frozen=True, slots=True)
class _Row:
    """A finished trial and its share of the account: seconds, or one where trials are counted."""

    trial: FrozenTrial
    record: TrialRecord
    cost: float
    low: float
    high: float

    @property
    def is_pruned(self) -> bool:
        return self.record.verdict == "prune"

    @property
    def layer(self) -> str:
        if self.is_pruned:
            return self.record.broken_limit or "unknown"
        return "broke" if self.record.violates else "launched"


_LAYERS: Mapping[str, tuple[str, str]] = {
    "launched": ("launched, within budget", BLUE),
    "broke": ("launched, broke a budget", RED),
    **{quantity: (f"pruned: {noun}", {"memory": ORANGE, "time": PURPLE}.get(quantity, SKY)) for quantity, noun in NOUNS.items()},
    "unknown": ("pruned", GREY),
}
"""Label and colour of each layer, the lowest first."""


def savings_view(study: optuna.Study) -> SavingsView:
    """The data of ``plot_savings``: compute time, or numbers of trials if no trial time was predicted."""
    finished = finished_trials(study)
    if all(record.verdict is None for _, record in finished):
        return SavingsView((), "", (), (), (), "", (), _why_nothing(finished, None))
    predictions = [record.predicted.get("time") for _, record in finished if record.verdict == "prune"]
    in_time = not predictions or any(map(_usable, predictions))
    rows = [_row(trial, record) if in_time else _Row(trial, record, 1.0, 1.0, 1.0) for trial, record in finished]
    spent = sum(row.cost for row in rows if not row.is_pruned)
    saved, low, high = (sum(getattr(row, end) for row in rows if row.is_pruned) for end in ("cost", "low", "high"))
    unit, size = _unit_of("time", [(spent + saved) / 2]) if in_time else ("", 1.0)
    bands = [_band(layer, rows, size, in_time=in_time) for layer in _LAYERS if any(row.layer == layer for row in rows)]
    tops = accumulate(row.cost / size for row in rows)
    return SavingsView(
        numbers=[row.trial.number for row in rows],
        axis=f"cumulative compute time ({unit})" if in_time else "trials",
        bands=bands,
        skips=[
            Skip(row.trial.number, top, _LAYERS[row.layer][1], _skip_lines(row))
            for row, top in zip(rows, tops, strict=True)
            if row.is_pruned
        ],
        totals=_totals(spent, (saved, low, high), size, in_time=in_time),
        headline=_savings_headline(rows, (saved, low, high) if in_time else None),
        caption=_savings_caption(rows, in_time=in_time),
    )


def _row(trial: FrozenTrial, record: TrialRecord) -> _Row:
    if record.verdict != "prune":
        seconds = run_time_s(trial, record)
        seconds = seconds if _usable(seconds) else 0.0
        return _Row(trial, record, seconds, seconds, seconds)
    predicted = record.predicted.get("time")
    if predicted is None or not _usable(predicted):
        return _Row(trial, record, 0.0, 0.0, 0.0)
    low, high = record.intervals.get("time", (predicted, predicted))
    return _Row(trial, record, predicted, low if _usable(low) else predicted, high if _usable(high) else predicted)


def _band(layer: str, rows: Sequence[_Row], size: float, *, in_time: bool) -> Band:
    label, color = _LAYERS[layer]
    members = [row for row in rows if row.layer == layer]
    is_predicted = members[0].is_pruned
    trials = f"{len(members)} trial{'s' if len(members) != 1 else ''}"
    if in_time:
        trials += f", {format_seconds(sum(row.cost for row in members))}{' predicted' if is_predicted else ''}"
    heights = list(accumulate(row.cost / size if row.layer == layer else 0.0 for row in rows))
    return Band(f"{label} ({trials})", color, is_predicted, heights)


def _totals(spent: float, saved: tuple[float, float, float], size: float, *, in_time: bool) -> Sequence[Total]:
    about, low, high = ((spent + more) / size for more in saved)
    text = format_seconds if in_time else "{:.0f}".format
    totals = [Total(spent / size, None, f"{text(spent)}\n{'spent' if in_time else 'launched'}")]
    if saved[0]:
        label = f"{text(spent + saved[0])}\nwith the pruned"
        totals.append(Total(about, (low, high) if low < high else None, label))
    return totals


def _savings_headline(rows: Sequence[_Row], saved: tuple[float, float, float] | None) -> str:
    num_pruned = sum(row.is_pruned for row in rows)
    pruned = f"{num_pruned} of {len(rows)} trials pruned before launch"
    if not num_pruned or saved is None:
        return pruned
    about, low, high = map(format_seconds, saved)
    return f"{pruned}, about {about} saved ({low} to {high})"


def _savings_caption(rows: Sequence[_Row], *, in_time: bool) -> Sequence[str]:
    pruned = [row for row in rows if row.is_pruned]
    if not pruned:
        return ()
    if not in_time:
        return ("No trial time was predicted. With Workload(steps=...) this picture shows the time saved.",)
    lines = ["Saved time is predicted: the time of the pruned trials, if each had run to its end."]
    if any(row.layer == "memory" for row in pruned):
        lines.append("A trial that runs out of memory might have crashed sooner.")
    if unknown := sum(not row.cost for row in pruned):
        lines.append(f"{unknown} without a predicted time count as nothing.")
    return lines


def _skip_lines(row: _Row) -> tuple[str, ...]:
    time_s = row.record.predicted.get("time")
    would = [f"would have taken {format_seconds(time_s)}"] if time_s is not None and _usable(time_s) else []
    return (f"trial {row.trial.number}, pruned", *would, *_about(row.trial, row.record))


def _about(trial: FrozenTrial, record: TrialRecord) -> Iterator[str]:
    for name, value in trial.params.items():
        yield f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}"
    if record.status not in (None, "ok"):
        yield f"status: {record.status}"
    if record.reason:
        yield record.reason


def log_ticks(low: float, high: float) -> Sequence[float]:
    """Round values between ``low`` and ``high``: as many as stay legible on a logarithmic axis."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: Sequence[float] = ()
    fine = ((1.0, 1.5, 2.0, 3.0, 5.0, 7.0),) if high <= 10 * low else ()  # over more, 1,500 and 2,000 would touch
    for steps in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), *fine):
        finer = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(finer) > 8:
            break
        ticks = finer
    return ticks


def tick_text(value: float) -> str:
    """A number as people write it: 0.05, 20, 1,500."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def _unit_of(quantity: Quantity, values: Sequence[float]) -> tuple[str, float]:
    """The largest unit that leaves most of ``values`` at one or more, and what it is worth."""
    units = {"memory": _MEMORY_UNITS, "energy": _ENERGY_UNITS, "cost": _COST_UNITS}.get(quantity, _TIME_UNITS)
    middle = statistics.median(values)
    return next(((name, size) for name, size in reversed(units) if middle >= size), units[0])


def _usable(value: Any) -> bool:
    """Whether a value can stand on a logarithmic axis."""
    return isinstance(value, (int, float)) and math.isfinite(value) and value > 0
