"""The summary of a study: what ran, what was pruned and why, what that saved, and how good the predictions were.

Every tuner's plugin and the report count their trials here, so "why pruned?" has one answer.
"""

from __future__ import annotations

import html
import io
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perfguard.guard_time import GuardCost
from perfguard.quantities import SPECS, Quantity, format_seconds
from perfguard.record import QUANTITIES, TrialRecord
from perfguard.verdict import NOT_SEALED

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class Errors:
    """Mean relative errors, |predicted / measured - 1|, of the first and of the last trials that ended well."""

    quantity: Quantity
    first: float
    num_first: int
    last: float
    num_last: int

    @classmethod
    def of(cls, records: Iterable[TrialRecord], quantity: Quantity, *, first: int = 5, last: int = 10) -> Errors | None:
        """Return the errors of ``quantity``. None: no trial has both a prediction and a measurement of it."""
        errors = [error for record in records if (error := record.error(quantity)) is not None]
        if not errors:
            return None
        means = statistics.fmean(errors[:first]), statistics.fmean(errors[-last:])
        return cls(quantity, means[0], len(errors[:first]), means[1], len(errors[-last:]))

    def __str__(self) -> str:
        if self.num_first == self.num_last:  # so few that both are the same trials
            return error_in_words(self.first)
        first = error_in_words(self.first)
        last = error_in_words(self.last)
        return f"{first} in the first {self.num_first} trials, {last} in the last {self.num_last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The counts of a study or of a log. ``print(summary)`` prints the table. None: unknown."""

    title: str
    device: str
    """Names of the guarded devices. Empty: unknown."""
    num_launched: int
    """Trials that ran, or still run."""
    num_repaired: int
    """Launched after a repair; counted in ``num_launched``."""
    num_pruned: int
    """Trials, or different configurations, that were rejected before launch."""
    pruned_for: Mapping[Quantity | None, int]
    """Number of pruned ones by the limit that they would break. None: an unknown limit."""
    num_repeated: int
    """Further proposals of rejected configurations, which have no trial of their own."""
    sources: Mapping[str, int]
    """Number of judged trials by how it was known what they run, as in :attr:`Verdict.source`."""
    num_unguarded: int
    """Launched without a verdict, or against it."""
    why_unguarded: str
    """Reason of the first of those; empty: there is none, or it is unknown."""
    num_interrupted: int
    num_failed: int
    """Trials that ended with their own error."""
    num_measured: int
    """Launched trials of which it is known whether they broke a budget."""
    num_violations: int | None
    """Measured trials that broke a budget, or ran out of memory or time. None: none was measured."""
    not_measured: Mapping[str, int]
    """Reasons why launched trials do not measure the guarded device, with the number of trials."""
    launched_s: float | None
    """Time of the launched trials, in seconds."""
    num_crashes_avoided: int
    """Pruned trials that need more memory than the device has. They would have failed in their first step, so they save no
    time of a whole trial."""
    saved_s: float | None
    """Predicted time of the other pruned trials, in seconds, if each had run to its end. They include trials that break only a
    memory budget below the memory of the device. None: no trial time was predicted."""
    crash_s: float | None
    """Estimated seconds until a trial runs out of memory at once. It is the median of those that did, else of the first steps of
    launched trials. None: unknown."""
    cost: GuardCost | None
    """The guard's own time beside what it saved. None: it was not recorded."""
    memory_errors: Errors | None
    time_errors: Errors | None
    """Errors of the trial time, or of the step time where no trial time was predicted."""

    def rows(self) -> Iterator[tuple[str, str]]:
        """The rows of the table: a label, and a value in words. Rows that have nothing to say are left out."""
        yield "trials launched", f"{self.num_launched}" + (f", {self.num_repaired} repaired" if self.num_repaired else "")
        names = {quantity: "unknown" if quantity is None else SPECS[quantity].noun for quantity in self.pruned_for}
        counts = ", ".join(f"{names[quantity]} {count}" for quantity, count in self.pruned_for.items())
        yield "pruned before launch", f"{self.num_pruned}" + (f" ({counts})" if counts else "")
        if self.num_repeated:
            yield "proposed again and pruned from memory", f"{self.num_repeated}"
        if self.sources:
            yield "what trials run was", ", ".join(f"{source} {count}" for source, count in self.sources.items())
        if any(source.endswith("not sealed") for source in self.sources):
            yield "a warning", NOT_SEALED
        why = f" ({self.why_unguarded})" if self.why_unguarded else ""
        yield "launched without a verdict, or against it", f"{self.num_unguarded}{why}"
        if self.num_interrupted:
            yield "interrupted", f"{self.num_interrupted}"
        if self.num_failed:
            yield "failed", f"{self.num_failed}"
        if self.num_violations is not None:
            yield "budget violations", f"{self.num_violations} of {self.num_measured} measured trials"
        for reason, count in self.not_measured.items():
            yield "not measured", f"{count}: {reason}"
        if self.launched_s is not None:
            yield "time of the launched trials", format_seconds(self.launched_s)
        if self.num_crashes_avoided:
            after = "" if self.crash_s is None else f", each after about {format_seconds(self.crash_s)}"
            yield "would have run out of memory at once", f"{self.num_crashes_avoided}{after}"
        if self.saved_s is not None:
            yield "time of the other pruned trials (predicted)", format_seconds(self.saved_s)
        if self.cost is not None:
            yield "time of the guard", f"{self.cost}"
        for errors in (self.memory_errors, self.time_errors):
            if errors is not None:
                yield f"prediction error, {SPECS[errors.quantity].noun}", f"{errors}"

    def table(self) -> Table:
        """The summary as a table for the terminal."""
        from rich.markup import escape
        from rich.table import Table

        table = Table(title=self.title, show_header=False)
        for label, value in self.rows():
            table.add_row(label, escape(value))
        return table

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=120).print(self.table())
        return text.getvalue().rstrip()

    def _repr_html_(self) -> str:
        """The table, as a notebook shows the summary in the last line of a cell."""
        rows = "".join(
            f'<tr><th scope="row" style="text-align: left">{html.escape(label)}</th>'
            f'<td style="text-align: left">{html.escape(value)}</td></tr>'
            for label, value in self.rows()
        )
        return f"<table><caption>{html.escape(self.title)}</caption><tbody>{rows}</tbody></table>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.table()


def summarize(
    records: Sequence[TrialRecord], *, title: str = "PerfGuard", num_repeated: int = 0, more_guard_s: float = 0.0
) -> Summary:
    """Count trials.

    Args:
        records: the trials, in order.
        title: title of the table.
        num_repeated: proposals that were rejected from memory and have no record.
        more_guard_s: seconds of the guard for verdicts that have no record.
    """
    launched = [record for record in records if not record.is_pruned]
    pruned = [record for record in records if record.is_pruned]
    measured = [record for record in launched if record.is_measured]
    unguarded = [record for record in launched if _ran_unguarded(record)]
    verdicts = [record.verdict for record in records if record.verdict is not None]
    broken = Counter(record.broken_limit for record in pruned)
    crash_s = _crash_s(launched)
    return Summary(
        title=title,
        device=", ".join(dict.fromkeys(record.device_name for record in records if record.device_name)),
        num_launched=len(launched),
        num_repaired=sum(record.in_words == "repaired" for record in launched),
        num_pruned=len(pruned),
        pruned_for={quantity: broken[quantity] for quantity in (*QUANTITIES, None) if quantity in broken},
        num_repeated=num_repeated,
        num_unguarded=len(unguarded),
        sources=Counter(verdict.source for verdict in verdicts if verdict.source),
        why_unguarded=next((record.reason for record in unguarded if record.reason), "").removeprefix("not judged: "),
        num_interrupted=sum(record.status == "interrupted" for record in launched),
        num_failed=sum(record.status == "failed" for record in launched),
        num_measured=len(measured),
        num_violations=sum(record.violates for record in measured) if measured else None,
        not_measured=Counter(record.not_measured for record in launched if record.not_measured),
        launched_s=_sum_of_known(record.ran_s for record in launched),
        num_crashes_avoided=sum(record.fails_at_once for record in pruned),
        saved_s=_sum_of_known(record.saved_s for record in pruned),
        crash_s=crash_s,
        cost=_cost_of(launched, pruned, crash_s=crash_s, more_guard_s=more_guard_s),
        memory_errors=Errors.of(launched, "memory"),
        time_errors=Errors.of(launched, "time") or Errors.of(launched, "step_time"),
    )


def _ran_unguarded(record: TrialRecord) -> bool:
    """Return whether a launched trial had no verdict, or ran against it."""
    return record.is_unguarded or (record.verdict is not None and record.verdict.is_overruled)


def _sum_of_known(seconds: Iterable[float | None]) -> float | None:
    """Return the sum of what is known. None: nothing is."""
    known = [one for one in seconds if one is not None]
    return sum(known) if known else None


def _cost_of(
    launched: Sequence[TrialRecord], pruned: Sequence[TrialRecord], *, crash_s: float | None, more_guard_s: float
) -> GuardCost | None:
    """Return the guard's own time beside what it saved. None: it was not recorded."""
    records = [*launched, *pruned]
    guard_s = more_guard_s + sum(record.guard_s for record in records)
    if not guard_s:
        return None
    dry_run_s: Counter[str] = Counter()
    for record in records:
        dry_run_s.update({} if record.verdict is None else record.verdict.dry_run_s)
    would_take_s = [crash_s if record.fails_at_once else record.saved_s for record in pruned]
    return GuardCost(
        guard_s=guard_s,
        dry_run_s=dry_run_s,
        launched_s=_sum_of_known(record.ran_s for record in launched) if launched else 0.0,
        saved_s=None if None in would_take_s else _sum_of_known(would_take_s) or 0.0,
    )


def _crash_s(launched: Iterable[TrialRecord]) -> float | None:
    """Return the seconds until a trial runs out of memory in its first step. None: no launched trial shows it."""
    launched = [record for record in launched if not record.not_measured]
    crashes = [record.ran_s for record in launched if record.status == "oom" and record.ran_s is not None]
    first_steps = [record.first_step_s for record in launched if record.first_step_s is not None]
    return statistics.median(crashes or first_steps) if crashes or first_steps else None


def error_in_words(error: float) -> str:
    """Return a relative error, for instance "3.4%"; a large one as a factor."""
    return f"{error:.1%}" if error < 10 else f"a factor of {1 + error:.0f}: the predictor does not fit these runs"
