"""The summary of a study: what ran, what was rejected and why, what that saved, and what was not measured.

Integrations read their trials as :class:`TrialRecord` and count them into a :class:`GuardSummary`.
"""

from __future__ import annotations

import io
import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from perfguard.budget import NOUNS, Quantity
from perfguard.quantities import format_seconds

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table
    from typing_extensions import Self

QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)
RAN_OUT: Mapping[Quantity, str] = {"memory": "oom", "time": "timeout"}
"""The status of a run that ended because it had no more of a quantity."""
_VERDICTS = {"launch": "launched", "repair": "repaired", "prune": "pruned"}
_WIDTH = 120
"""Columns of a table that is printed as text; longer cells are wrapped."""


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """Record of one trial. None: not predicted, or not measured."""

    number: int
    verdict: str | None
    reason: str
    predicted: Mapping[str, float]
    """Predictions by quantity: "memory" in bytes, times in seconds, "energy" in joules."""
    intervals: Mapping[str, tuple[float, float]]
    """The central 90% of each predicted quantity."""
    limits: Mapping[str, float]
    measured: Mapping[str, float]
    status: str | None
    not_measured: str = ""
    """Reason why a trial that ran was not measured; empty: it was, or did not run."""
    capacity_bytes: float | None = None
    """The device's own memory. None: not judged, or by an older PerfGuard."""

    @property
    def is_unguarded(self) -> bool:
        """Whether the trial was launched without a verdict: PerfGuard was not called, or could not predict."""
        return self.verdict is None or (self.verdict == "launch" and not self.predicted)

    @property
    def verdict_in_words(self) -> str:
        """What happened to the trial: "launched", "repaired", "pruned" or "unguarded"."""
        return "unguarded" if self.verdict is None or self.is_unguarded else _VERDICTS[self.verdict]

    @property
    def broken_limit(self) -> Quantity | None:
        """The limit that the interval of the trial exceeds by the largest factor.

        None: no limit was recorded with a prediction.
        """
        known = [quantity for quantity in QUANTITIES if quantity in self.limits and quantity in self.predicted]
        return max(known, key=lambda quantity: self.intervals[quantity][1] / self.limits[quantity], default=None)

    @property
    def fails_at_once(self) -> bool:
        """Whether a pruned trial would have run out of the device's own memory in its first step, whatever its budget."""
        return self.capacity_bytes is not None and self.predicted.get("memory", 0.0) > self.capacity_bytes

    @property
    def saved_s(self) -> float | None:
        """Predicted seconds of a pruned trial that would have run; None for others, and without a prediction."""
        predicted_s = self.predicted.get("time", math.nan)
        over_budget = self.predicted.get("memory", 0.0) > self.limits.get("memory", math.inf)
        may_fail = self.fails_at_once or (self.capacity_bytes is None and over_budget)  # an older trial does not say
        return None if may_fail or not math.isfinite(predicted_s) else predicted_s

    @property
    def is_measured(self) -> bool:
        """Whether the trial ran, and it is known whether it exceeded a limit."""
        ran_out = self.status in RAN_OUT.values() and not self.not_measured
        return ran_out or any(quantity in self.measured for quantity in self.limits)

    @property
    def violates(self) -> bool:
        """Whether a trial that ran broke one of its limits."""
        return any(map(self.breaks, QUANTITIES))

    def breaks(self, quantity: Quantity) -> bool:
        """Return whether a trial that ran broke its limit of ``quantity``, or ran out of it."""
        limit = self.limits.get(quantity)
        is_over = limit is not None and self.measured.get(quantity, 0.0) > limit
        return is_over or (self.status == RAN_OUT.get(quantity, "-") and not self.not_measured)

    def prediction_error(self, quantity: Quantity) -> float | None:
        """Return |predicted / measured - 1|; None for a run that did not end well, or where there is nothing to compare."""
        predicted, measured = self.predicted.get(quantity), self.measured.get(quantity)
        return abs(predicted / measured - 1) if self.status == "ok" and predicted and measured else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSummary(ABC):
    """The counts that every integration prints. ``print(summary)`` prints the table. None: unknown."""

    num_launched: int
    """Trials that ran, or still run."""
    num_repaired: int
    """Launched after a repair; counted in ``num_launched``."""
    num_pruned: int
    """Trials, or different configurations, that were rejected before launch."""
    pruned_for: Mapping[Quantity | None, int]
    """Number of rejected ones by the limit that they would exceed. None: an unknown limit."""
    num_measured: int
    """Launched trials with a known outcome: they exceeded a budget or not."""
    num_violations: int | None
    """Measured trials that exceeded a budget, or ran out of memory or time. None: none was measured."""
    num_crashes_avoided: int
    """Number of pruned trials that need more memory than the device has. They would have ended in their first steps, so they
    save no time."""
    saved_s: float | None
    """Predicted time of the other pruned trials, in seconds, if each had run to its end. They include trials that exceed only a
    memory budget below the memory of the device. None: no trial time was predicted."""

    @classmethod
    def of(
        cls,
        launched: Sequence[TrialRecord],
        pruned: Sequence[TrialRecord],
        measured: Sequence[TrialRecord],
        *,
        pruned_for: Sequence[Quantity | None],
        **own: Any,
    ) -> Self:
        """Count trials.

        Args:
            launched: the trials that ran, or still run.
            pruned: the trials that were pruned.
            measured: the launched trials with a known outcome.
            pruned_for: for each pruned trial the limit that it would break. None: unknown.
            own: the fields of the integration's own summary.
        """
        counts: dict[str, Any] = {
            "num_launched": len(launched),
            "num_repaired": sum(record.verdict == "repair" for record in launched),
            "num_pruned": len(pruned),
            "pruned_for": {quantity: pruned_for.count(quantity) for quantity in (*QUANTITIES, None) if quantity in pruned_for},
            "num_measured": len(measured),
            "num_violations": sum(record.violates for record in measured) if measured else None,
            "num_crashes_avoided": sum(record.fails_at_once for record in pruned),
            "saved_s": total_saved_s(pruned),
        }
        return cls(**counts | own)

    @property
    @abstractmethod
    def title(self) -> str:
        """Title of the table."""

    @abstractmethod
    def rows(self) -> Iterator[tuple[str, str]]:
        """The rows of the table: a label, and a value in words."""

    @property
    def launched_in_words(self) -> str:
        """Number of launched trials in words, for instance "9, 1 repaired"."""
        return f"{self.num_launched}" + (f", {self.num_repaired} repaired" if self.num_repaired else "")

    @property
    def pruned_in_words(self) -> str:
        """Number of pruned trials in words, for instance "3 (peak memory 2, trial time 1)"."""
        names = {quantity: "unknown" if quantity is None else NOUNS[quantity] for quantity in self.pruned_for}
        counts = ", ".join(f"{names[quantity]} {count}" for quantity, count in self.pruned_for.items())
        return f"{self.num_pruned}" + (f" ({counts})" if counts else "")

    def table(self) -> Table:
        """The summary as a table for the terminal."""
        from rich.markup import escape
        from rich.table import Table

        table = Table(title=self.title, show_header=False)
        for label, value in self.rows():
            table.add_row(label, escape(value))
        return table

    def __str__(self) -> str:
        return as_text(self.table())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.table()


def total_saved_s(pruned: Iterable[TrialRecord]) -> float | None:
    """Return the predicted seconds that the pruned trials did not take; None if none of them has any."""
    saved = [seconds for record in pruned if (seconds := record.saved_s) is not None]
    return sum(saved) if saved else None


def mean_error(record: TrialRecord) -> float | None:
    """Return the mean error of peak memory and trial time; None if neither was both predicted and measured."""
    errors = [error for quantity in ("memory", "time") if (error := record.prediction_error(quantity)) is not None]
    return statistics.fmean(errors) if errors else None


def time_in_words(seconds: float | None) -> str:
    """Return a time that may be unknown; "-" is unknown."""
    return "-" if seconds is None else format_seconds(seconds)


def as_text(table: Table) -> str:
    """Return ``table`` as plain text, as wide as it needs to be."""
    from rich.console import Console

    text = io.StringIO()
    Console(file=text, width=_WIDTH).print(table)
    return text.getvalue().rstrip()


__all__ = ["QUANTITIES", "GuardSummary", "TrialRecord", "as_text", "mean_error", "time_in_words", "total_saved_s"]
