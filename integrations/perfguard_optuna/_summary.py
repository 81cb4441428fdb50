"""What the guard did for a study: counts, violations, time saved, and how good its predictions were."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import optuna
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.table import Table

from perfguard.quantities import format_bytes, format_seconds
from perfguard_optuna._attributes import TrialRecord, record_of

_FIRST, _LAST = 5, 10
_CELL_WIDTHS = {"memory": 9, "time": 8}
_HEADING = f"trial  verdict    {'memory (pred → meas)':^21s}  {'time (pred → meas)':^19s}  value"


@dataclass(frozen=True, slots=True)
class StudySummary:
    """The guard's account of a study. Errors are mean relative errors, |predicted / measured - 1|; None: nothing to compare."""

    num_launched: int
    num_pruned: int
    num_unjudged: int
    """Launched without a verdict, because the workload was not known or could not be traced."""
    num_violations: int
    """Launched trials that broke a budget, or ran out of memory."""
    launched_s: float
    """Time that the launched trials took."""
    saved_s: float
    """Time that the pruned trials would have taken, as predicted."""
    first_error: float | None
    """Of the first five launched trials' predictions, memory and trial time together."""
    last_error: float | None
    """Of the last ten."""

    def table(self) -> Table:
        """The summary as a table for the terminal."""
        table = Table(title="PerfGuard", show_header=False)
        rows = {
            "trials launched": f"{self.num_launched}",
            "trials pruned before launch": f"{self.num_pruned}",
            "launched without a verdict": f"{self.num_unjudged}",
            "budget violations among the launched": f"{self.num_violations}",
            "time of the launched trials": format_seconds(self.launched_s),
            "compute time saved (predicted)": format_seconds(self.saved_s),
            f"prediction error, first {_FIRST} trials": _percent(self.first_error),
            f"prediction error, last {_LAST} trials": _percent(self.last_error),
        }
        for label, value in rows.items():
            table.add_row(label, value)
        return table


def summarize(study: optuna.Study) -> StudySummary:
    """The guard's account of ``study``, from what it wrote into the trials."""
    records = records_of(study)
    launched = [record for record in records if record.verdict != "prune"]
    pruned = [record for record in records if record.verdict == "prune"]
    errors = [error for record in launched if (error := prediction_error(record)) is not None]
    return StudySummary(
        num_launched=len(launched),
        num_pruned=len(pruned),
        num_unjudged=sum(not record.predicted for record in launched),
        num_violations=sum(violates(record) for record in launched),
        launched_s=sum(record.measured.get("time", 0.0) for record in launched),
        saved_s=sum(record.predicted.get("time", 0.0) for record in pruned),
        first_error=statistics.fmean(errors[:_FIRST]) if errors else None,
        last_error=statistics.fmean(errors[-_LAST:]) if errors else None,
    )


def violates(record: TrialRecord) -> bool:
    """Whether a trial that ran broke one of its limits."""
    over = (record.measured.get(quantity, 0.0) > limit for quantity, limit in record.limits.items())
    return record.status in ("oom", "timeout") or any(over)


def prediction_error(record: TrialRecord) -> float | None:
    """Mean of |predicted / measured - 1| over peak memory and trial time; None if neither was both predicted and measured."""
    errors = [
        abs(record.predicted[quantity] / record.measured[quantity] - 1)
        for quantity in ("memory", "time")
        if quantity in record.predicted and record.measured.get(quantity)
    ]
    return statistics.fmean(errors) if errors and record.status == "ok" else None


class TrialPrinter:
    """A study callback that prints one line a trial: verdict, predicted and measured memory and time.

    Example:
        >>> study.optimize(objective, n_trials=40, callbacks=[TrialPrinter()])   # doctest: +SKIP
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._has_heading = False

    def __call__(self, study: optuna.Study, trial: FrozenTrial) -> None:
        record = record_of(trial)
        cells = [_cell(record, "memory"), _cell(record, "time")]
        style = {"prune": "yellow", None: "dim"}.get(record.verdict, "red" if violates(record) else "green")
        verdict = {"prune": "pruned", None: "unguarded"}.get(record.verdict, "launched")
        values = trial.values if trial.state == TrialState.COMPLETE else ()
        value = f"{', '.join(f'{value:.4g}' for value in values)}" if values else ""
        over = "  over" if violates(record) else ""
        if not self._has_heading:
            self._has_heading = True
            self._console.print(_HEADING, style="bold", highlight=False)
        self._console.print(f"{trial.number:5d}  [{style}]{verdict:9s}[/]  {'  '.join(cells)}  {value}{over}", highlight=False)


def _cell(record: TrialRecord, quantity: str) -> str:
    def text(value: float | None) -> str:
        if value is None:
            return "-"
        return format_bytes(value) if quantity == "memory" else format_seconds(value)

    width = _CELL_WIDTHS[quantity]
    return f"{text(record.predicted.get(quantity)):>{width}s} → {text(record.measured.get(quantity)):<{width}s}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def records_of(study: optuna.Study) -> Sequence[TrialRecord]:
    """What PerfGuard wrote into each finished trial of ``study``, in order."""
    return [record_of(trial) for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()]
