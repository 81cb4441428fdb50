"""What the guard did for a study: counts, violations, time saved, and how good its predictions were."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import optuna
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from perfguard.budget import NOUNS, Quantity
from perfguard.quantities import format_quantity, format_seconds
from perfguard_optuna._attributes import QUANTITIES, TrialRecord, record_of

_RAN_OUT = {"memory": "oom", "time": "timeout"}
_FIRST, _LAST = 5, 10
_FACTOR = 10.0
"""Errors from here on are no percentage that anybody reads."""
_WIDTH = 120
"""Columns of a table that is printed as text; longer cells are wrapped."""
_CELL_WIDTHS = {"memory": 9, "time": 8}
_HEADING = f"trial  verdict    {'memory (pred → meas)':^21s}  {'time (pred → meas)':^19s}  value"


@dataclass(frozen=True, slots=True)
class StudySummary:
    """The guard's account of a study. Errors are mean relative errors, |predicted / measured - 1|; None: nothing to compare."""

    num_launched: int
    num_repaired: int
    """Launched after a repair; counted in ``num_launched``."""
    num_pruned: int
    pruned_for: Mapping[Quantity | None, int]
    """How many trials each limit pruned; None where nobody knows which."""
    num_unjudged: int
    """Launched without a verdict, because PerfGuard was not asked, or could not tell what the trial runs."""
    why_unjudged: str
    """Why the first of those was not judged; empty: there is none, or nobody knows."""
    num_measured: int
    """Launched trials of which it is known whether they broke a budget."""
    why_not_measured: str
    """Why a launched trial was not measured; empty: all were, or nobody knows."""
    num_violations: int | None
    """Measured trials that broke a budget, or ran out of memory. None: none was measured."""
    launched_s: float
    """Time that the launched trials took."""
    num_crashes_avoided: int
    """Pruned trials that need more memory than the device has: they would have ended in their first steps, so no time is counted
    for them."""
    saved_s: float | None
    """Time that the other pruned trials were predicted to take, had each run to its end; one over a memory budget that is a part
    of the device's memory would have run. None: there is none whose trial time was predicted."""
    first_error: float | None
    """Of the first five measured trials' predictions, memory and trial time together."""
    last_error: float | None
    """Of the last ten."""

    def __str__(self) -> str:
        """The table, as text."""
        return as_text(self.table())

    def table(self) -> Table:
        """The summary as a table for the terminal."""
        table = Table(title="PerfGuard", show_header=False)
        rows = {
            "trials launched": f"{self.num_launched}" + (f", {self.num_repaired} repaired" if self.num_repaired else ""),
            "trials pruned before launch": f"{self.num_pruned}" + (f" ({_counts(self.pruned_for)})" if self.num_pruned else ""),
            "launched without a verdict": f"{self.num_unjudged}" + (f" ({self.why_unjudged})" if self.why_unjudged else ""),
            "budget violations among the launched": self._violations(),
            "time of the launched trials": format_seconds(self.launched_s),
            "would have run out of memory at their start": f"{self.num_crashes_avoided}",
            "time of the other pruned trials (predicted)": "-" if self.saved_s is None else format_seconds(self.saved_s),
            f"prediction error, first {_FIRST} trials": _percent(self.first_error),
            f"prediction error, last {_LAST} trials": _percent(self.last_error),
        }
        for label, value in rows.items():
            table.add_row(label, escape(value))
        return table

    def _violations(self) -> str:
        num_unmeasured = self.num_launched - self.num_measured
        why = f": {self.why_not_measured}" if self.why_not_measured else ""
        if self.num_violations is None:
            return f"not measured{why}" if self.num_launched else "-"
        return f"{self.num_violations}" + (f" ({num_unmeasured} not measured{why})" if num_unmeasured else "")


def summarize(study: optuna.Study) -> StudySummary:
    """The guard's account of ``study``, from what it wrote into the trials."""
    finished = finished_trials(study)
    records = [record for _, record in finished]
    launched = [record for record in records if record.verdict != "prune"]
    pruned = [record for record in records if record.verdict == "prune"]
    complete = [record for trial, record in finished if trial.state == TrialState.COMPLETE]  # others did not take all their time
    errors = [error for record in complete if (error := prediction_error(record)) is not None]
    broken = [broken_limit(record) for record in pruned]
    unjudged = [record for record in launched if not record.predicted]
    measured = [record for record in launched if is_measured(record)]
    saved = [seconds for record in pruned if (seconds := saved_s(record)) is not None]
    return StudySummary(
        num_launched=len(launched),
        num_repaired=sum(record.verdict == "repair" for record in launched),
        num_pruned=len(pruned),
        pruned_for={quantity: broken.count(quantity) for quantity in (*QUANTITIES, None) if quantity in broken},
        num_unjudged=len(unjudged),
        why_unjudged=next((record.reason.removeprefix("not judged: ") for record in unjudged if record.reason), ""),
        num_measured=len(measured),
        why_not_measured=next((record.not_measured for record in launched if record.not_measured), ""),
        num_violations=sum(map(violates, measured)) if measured else None,
        launched_s=sum(spent_s(trial, record) for trial, record in finished if record.verdict != "prune"),
        num_crashes_avoided=sum(map(fails_at_once, pruned)),
        saved_s=sum(saved) if saved else None,
        first_error=statistics.fmean(errors[:_FIRST]) if errors else None,
        last_error=statistics.fmean(errors[-_LAST:]) if errors else None,
    )


def skipped_table(study: optuna.Study, *, max_rows: int = 20) -> Table:
    """The trials that were pruned before launch: what each needed, against which limit, and the time that it did not take.

    A trial that needs more memory than the device has would have failed in its first step, so no time is saved by it.

    Example:
        >>> rich.print(skipped_table(study))                                                        # doctest: +SKIP

    Args:
        study: a study that ran with a guard.
        max_rows: how many trials to show, the latest ones; the total counts all.
    """
    pruned = [record for record in records_of(study) if record.verdict == "prune"]
    saved = [seconds for record in pruned if (seconds := saved_s(record)) is not None]
    table = Table(title=f"{len(pruned)} trials pruned before launch", show_footer=bool(pruned))
    table.add_column("trial", justify="right", footer="all")
    table.add_column("over")
    table.add_column("predicted (90% interval)")
    table.add_column("budget", justify="right")
    table.add_column("time saved\n(predicted)", justify="right", footer=format_seconds(sum(saved)) if saved else "-")
    shown = pruned[-max_rows:] if max_rows > 0 else []
    if len(shown) < len(pruned):
        table.add_row("…", f"{len(pruned) - len(shown)} earlier ones")
    for record in shown:
        table.add_row(*_skipped_cells(record))
    return table


def _skipped_cells(record: TrialRecord) -> tuple[str, ...]:
    seconds = saved_s(record)
    time = "-" if seconds is None else format_seconds(seconds)
    quantity = broken_limit(record)
    if quantity is None:
        return f"{record.number}", "-", escape(record.reason) or "-", "-", time
    predicted, low, high, limit = (
        format_quantity(quantity, value)
        for value in (record.predicted[quantity], *record.intervals[quantity], record.limits[quantity])
    )
    return f"{record.number}", NOUNS[quantity], f"{predicted} ({low} to {high})", limit, time


def broken_limit(record: TrialRecord) -> Quantity | None:
    """The limit that a trial would break most surely: the one that the upper end of its interval exceeds by the largest factor.

    None: no limit was recorded with a prediction.
    """
    known = [quantity for quantity in QUANTITIES if quantity in record.limits and quantity in record.predicted]
    return max(known, key=lambda quantity: record.intervals[quantity][1] / record.limits[quantity], default=None)


def spent_s(trial: FrozenTrial, record: TrialRecord) -> float:
    """Compute time of a finished trial in seconds: as measured, else from its start to its end as the study knows them."""
    if "time" in record.measured:
        return record.measured["time"]
    return 0.0 if trial.duration is None else trial.duration.total_seconds()


def fails_at_once(record: TrialRecord) -> bool:
    """Whether a pruned trial would have run out of the device's own memory in its first step, whatever its budget."""
    return record.capacity_bytes is not None and record.predicted.get("memory", 0.0) > record.capacity_bytes


def saved_s(record: TrialRecord) -> float | None:
    """Seconds that a pruned trial that would have run was predicted to take; None for others, and where nobody knows."""
    predicted = record.predicted.get("time", math.nan)
    over_budget = record.predicted.get("memory", 0.0) > record.limits.get("memory", math.inf)
    may_fail = fails_at_once(record) or (record.capacity_bytes is None and over_budget)  # an older trial does not say
    return None if may_fail or not math.isfinite(predicted) else predicted


def is_measured(record: TrialRecord) -> bool:
    """Whether it is known of a trial that ran if it broke a limit."""
    return record.status in _RAN_OUT.values() or any(quantity in record.measured for quantity in record.limits)


def violates(record: TrialRecord) -> bool:
    """Whether a trial that ran broke one of its limits."""
    return any(breaks(record, quantity) for quantity in QUANTITIES)


def breaks(record: TrialRecord, quantity: Quantity) -> bool:
    """Whether a trial that ran broke its limit of ``quantity``, or ran out of it."""
    limit = record.limits.get(quantity)
    is_over = limit is not None and record.measured.get(quantity, 0.0) > limit
    return is_over or record.status == _RAN_OUT.get(quantity, "-")


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
        verdict = {"prune": "pruned", "repair": "repaired", None: "unguarded"}.get(record.verdict, "launched")
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
        return format_quantity(quantity, value)

    width = _CELL_WIDTHS[quantity]
    return f"{text(record.predicted.get(quantity)):>{width}s} → {text(record.measured.get(quantity)):<{width}s}"


def _counts(pruned_for: Mapping[Quantity | None, int]) -> str:
    return ", ".join(f"{'unknown' if quantity is None else NOUNS[quantity]} {count}" for quantity, count in pruned_for.items())


def _percent(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" if value < _FACTOR else f"a factor of {1 + value:.0f}: the predictor does not fit these runs"


def as_text(table: Table) -> str:
    """``table`` as plain text, as wide as it needs to be."""
    text = io.StringIO()
    Console(file=text, width=_WIDTH).print(table)
    return text.getvalue().rstrip()


def finished_trials(study: optuna.Study) -> Sequence[tuple[FrozenTrial, TrialRecord]]:
    """Each finished trial of ``study`` with what PerfGuard wrote into it, in order."""
    return [(trial, record_of(trial)) for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()]


def records_of(study: optuna.Study) -> Sequence[TrialRecord]:
    """What PerfGuard wrote into each finished trial of ``study``, in order."""
    return [record for _, record in finished_trials(study)]
