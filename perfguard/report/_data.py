"""The data of a report: plain records, whatever they were read from."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from perfguard.budget import Quantity
from perfguard.summary import GuardSummary, TrialRecord

Outcome = Literal["launched", "repaired", "over", "failed", "unmeasured", "unguarded", "pruned"]
OUTCOMES: Mapping[Outcome, str] = {
    "launched": "ran within budget",
    "repaired": "repaired, ran within budget",
    "over": "ran, broke a budget",
    "failed": "failed or interrupted",
    "unmeasured": "ran, not measured",
    "unguarded": "ran without a verdict",
    "pruned": "pruned before launch",
}
"""Each outcome of a trial, in words."""
TIMES: tuple[Quantity, ...] = ("time", "step_time", "epoch_time", "latency")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTrial:
    """One trial of a report."""

    record: TrialRecord
    params: Mapping[str, Any]
    """Hyperparameters; nested ones have names such as "model/width"."""
    has_run: bool
    """Whether it was launched, with a verdict or against it."""
    is_measured: bool
    """Whether the trial ran, and it is known whether it exceeded a limit."""
    is_whole: bool
    """Whether it ran to its end, so that its measured time is that of the whole trial."""
    study: str = ""
    doubt: str = ""
    """Reason why nothing is learnt from its reading. Empty: it is believed, or there is none."""

    @property
    def outcome(self) -> Outcome:
        """What became of the trial."""
        record = self.record
        if not self.has_run:
            return "pruned"
        if self.is_measured and record.violates:
            return "over"
        if record.status in ("failed", "interrupted"):
            return "failed"
        if record.is_unguarded:
            return "unguarded"
        if not self.is_measured:
            return "unmeasured"
        return "repaired" if record.verdict == "repair" else "launched"

    def measured(self, quantity: Quantity) -> float | None:
        """The measured value that a prediction can be compared with. None: there is none, or the trial did not end well."""
        is_whole = self.is_whole or quantity not in ("time", "cost")
        is_complete = self.is_measured and self.record.status in (None, "ok") and is_whole
        return self.record.measured.get(quantity) if is_complete else None

    def is_inside(self, quantity: Quantity) -> bool | None:
        """Whether the measured value lies in its 90% interval. None: nothing to compare."""
        measured, interval = self.measured(quantity), self.record.intervals.get(quantity)
        return None if measured is None or interval is None else interval[0] <= measured <= interval[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What the measurement log says of drift and learning."""

    log: str = ""
    """Where the log is. Empty: none was read."""
    drifts: Sequence[tuple[int | None, str]] = ()
    """Index of the first trial of each new regime in the report's trials, and what changed. None: another study's trial."""
    weights: Sequence[tuple[str, str, str]] = ()
    """Time (UTC), state and metrics of each generation of fine-tuned weights."""
    predictors: Sequence[str] = ()
    """Name and version of each predictor that gave a verdict, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a page shows. Its trials are in the order in which they were judged."""

    title: str
    """Name of the study, or of the log."""
    source: str
    """What it was read from."""
    device: str
    """Name of the guarded device; empty: unknown."""
    summary: GuardSummary
    trials: Sequence[ReportTrial]
    history: History = field(default_factory=History)

    def count(self, outcome: Outcome) -> int:
        """Number of trials with that outcome."""
        return sum(trial.outcome == outcome for trial in self.trials)

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """The quantities that were predicted or measured for a trial: memory first."""
        known = {name for trial in self.trials for name in (*trial.record.predicted, *trial.record.measured)}
        return tuple(quantity for quantity in get_args(Quantity) if quantity in known)

    @property
    def compared(self) -> tuple[Quantity, ...]:
        """Peak memory, and the time that most trials can be compared by: of a trial, or else of a step."""
        predicted = [quantity for quantity in self.quantities if any(quantity in t.record.predicted for t in self.trials)]
        times = [quantity for quantity in predicted if quantity in TIMES]
        best = max(times, key=lambda quantity: len(self.pairs(quantity)), default=None)  # the first of equals
        return tuple(quantity for quantity in predicted if quantity == "memory" or quantity == best)

    def pairs(self, quantity: Quantity) -> list[tuple[float, float]]:
        """Predicted and measured values of each trial that has both."""
        return [
            (trial.record.predicted[quantity], measured)
            for trial in self.trials
            if (measured := trial.measured(quantity)) is not None and trial.record.predicted.get(quantity)
        ]

    def coverage(self, quantity: Quantity) -> tuple[int, int]:
        """How many measured values lie in their 90% interval, and how many there are."""
        inside = [known for trial in self.trials if (known := trial.is_inside(quantity)) is not None]
        return sum(inside), len(inside)

    def median_error(self, quantity: Quantity) -> float | None:
        """Median of |predicted / measured - 1|. None: nothing to compare."""
        errors = [abs(predicted / measured - 1) for predicted, measured in self.pairs(quantity) if measured]
        return statistics.median(errors) if errors else None


def flat_params(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return hyperparameters without nesting: ``{"model": {"width": 8}}`` gives ``{"model/width": 8}``."""
    flat: dict[str, Any] = {}
    for name, value in params.items():
        if isinstance(value, Mapping) and value:
            flat |= flat_params(value, f"{prefix}{name}/")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
