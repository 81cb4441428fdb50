"""Summary of a guarded study: counts, violations, time saved, and errors of predictions."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import optuna
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from perfguard.budget import NOUNS
from perfguard.quantities import format_quantity, format_seconds
from perfguard.summary import GuardSummary, TrialRecord, mean_error, time_in_words, total_saved_s
from perfguard_optuna._attributes import record_of

_FIRST, _LAST = 5, 10
_FACTOR = 10.0
"""Relative errors from this size are printed as a factor instead of a percentage."""
_CELL_WIDTHS = {"memory": 9, "time": 8}
_HEADING = f"trial  verdict    {'memory (pred → meas)':^21s}  {'time (pred → meas)':^19s}  value"


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySummary(GuardSummary):
    """The guard's summary of a study. Errors are mean relative errors, |predicted / measured - 1|; None: nothing to compare."""

    num_unjudged: int
    """Trials launched without a verdict, because PerfGuard was not called, or did not know their workload."""
    why_unjudged: str
    """Reason of the first of those trials; empty: there is none, or the reason is unknown."""
    why_not_measured: str
    """Reason why a launched trial was not measured; empty: all were, or the reason is unknown."""
    launched_s: float
    """Time that the launched trials took."""
    first_error: float | None
    """Error of the first five measured trials' predictions, memory and trial time together."""
    last_error: float | None
    """Error of the last ten."""

    @property
    def title(self) -> str:
        """Title of the table."""
        return "PerfGuard"

    def rows(self) -> Iterator[tuple[str, str]]:
        """The rows of the table."""
        yield "trials launched", self.launched_in_words
        yield "trials pruned before launch", self.pruned_in_words
        yield "launched without a verdict", f"{self.num_unjudged}" + (f" ({self.why_unjudged})" if self.why_unjudged else "")
        yield "budget violations among the launched", self._violations()
        yield "time of the launched trials", format_seconds(self.launched_s)
        yield "would have run out of memory at their start", f"{self.num_crashes_avoided}"
        yield "time of the other pruned trials (predicted)", time_in_words(self.saved_s)
        yield f"prediction error, first {_FIRST} trials", _percent(self.first_error)
        yield f"prediction error, last {_LAST} trials", _percent(self.last_error)

    def _violations(self) -> str:
        num_unmeasured = self.num_launched - self.num_measured
        why = f": {self.why_not_measured}" if self.why_not_measured else ""
        if self.num_violations is None:
            return f"not measured{why}" if self.num_launched else "-"
        return f"{self.num_violations}" + (f" ({num_unmeasured} not measured{why})" if num_unmeasured else "")


def summarize(study: optuna.Study) -> StudySummary:
    """The guard's summary of ``study``, from what it wrote into the trials."""
    finished = finished_trials(study)
    launched = [record for _, record in finished if record.verdict != "prune"]
    pruned = [record for _, record in finished if record.verdict == "prune"]
    complete = [record for trial, record in finished if trial.state == TrialState.COMPLETE]  # others did not take all their time
    errors = [error for record in complete if (error := mean_error(record)) is not None]
    unjudged = [record for record in launched if record.is_unguarded]
    return StudySummary.of(
        launched,
        pruned,
        [record for record in launched if record.is_measured],
        pruned_for=[record.broken_limit for record in pruned],
        num_unjudged=len(unjudged),
        why_unjudged=next((record.reason.removeprefix("not judged: ") for record in unjudged if record.reason), ""),
        why_not_measured=next((record.not_measured for record in launched if record.not_measured), ""),
        launched_s=sum(run_time_s(trial, record) for trial, record in finished if record.verdict != "prune"),
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
    table = Table(title=f"{len(pruned)} trials pruned before launch", show_footer=bool(pruned))
    table.add_column("trial", justify="right", footer="all")
    table.add_column("over")
    table.add_column("predicted (90% interval)")
    table.add_column("budget", justify="right")
    table.add_column("time saved\n(predicted)", justify="right", footer=time_in_words(total_saved_s(pruned)))
    shown = pruned[-max_rows:] if max_rows > 0 else []
    if len(shown) < len(pruned):
        table.add_row("…", f"{len(pruned) - len(shown)} earlier ones")
    for record in shown:
        table.add_row(*_skipped_cells(record))
    return table


def _skipped_cells(record: TrialRecord) -> tuple[str, ...]:
    time, quantity = time_in_words(record.saved_s), record.broken_limit
    if quantity is None:
        return f"{record.number}", "-", escape(record.reason) or "-", "-", time
    predicted, low, high, limit = (
        format_quantity(quantity, value)
        for value in (record.predicted[quantity], *record.intervals[quantity], record.limits[quantity])
    )
    return f"{record.number}", NOUNS[quantity], f"{predicted} ({low} to {high})", limit, time


def run_time_s(trial: FrozenTrial, record: TrialRecord) -> float:
    """Compute time of a finished trial in seconds: as measured, else from its start to its end as the study knows them."""
    if "time" in record.measured:
        return record.measured["time"]
    return 0.0 if trial.duration is None else trial.duration.total_seconds()


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
        verdict = record.verdict_in_words
        style = {"pruned": "yellow", "unguarded": "dim"}.get(verdict, "red" if record.violates else "green")
        values = trial.values if trial.state == TrialState.COMPLETE else ()
        value = f"{', '.join(f'{value:.4g}' for value in values)}" if values else ""
        over = "  over" if record.violates else ""
        if not self._has_heading:
            self._has_heading = True
            self._print(_HEADING, style="bold")
        self._print(f"{trial.number:5d}  [{style}]{verdict:9s}[/]  {'  '.join(cells)}  {value}{over}")

    def _print(self, line: str, style: str | None = None) -> None:
        """Print a line; while Rich shows a progress line, through the stream that puts it above that one."""
        streams = [one for one in (sys.stdout, sys.stderr) if getattr(one, "rich_proxied_file", None) is self._console.file]
        if not streams:
            self._console.print(line, style=style, highlight=False)
            return
        with self._console.capture() as text:
            self._console.print(line, style=style, highlight=False)
        streams[0].write(text.get())


def _cell(record: TrialRecord, quantity: str) -> str:
    def text(value: float | None) -> str:
        if value is None:
            return "-"
        return format_quantity(quantity, value)

    width = _CELL_WIDTHS[quantity]
    return f"{text(record.predicted.get(quantity)):>{width}s} → {text(record.measured.get(quantity)):<{width}s}"


def _percent(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" if value < _FACTOR else f"a factor of {1 + value:.0f}: the predictor does not fit these runs"


def finished_trials(study: optuna.Study) -> Sequence[tuple[FrozenTrial, TrialRecord]]:
    """Each finished trial of ``study`` with what PerfGuard wrote into it, in order."""
    return [(trial, record_of(trial)) for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()]


def records_of(study: optuna.Study) -> Sequence[TrialRecord]:
    """The records that PerfGuard wrote into the finished trials of ``study``, in order."""
    return [record for _, record in finished_trials(study)]
