"""What the guard did for a Tune run: what ran, what was turned down and why, and how good the predictions were."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from perfguard.budget import NOUNS, Quantity
from perfguard.measure import Measurement
from perfguard.quantities import format_seconds
from perfguard_ray._ledger import Ledger, ledger_of

if TYPE_CHECKING:
    from perfguard.store import LoggedDecision

_ENDS: Mapping[str, Quantity] = {" an epoch (": "epoch_time", " a step (": "step_time", " a batch (": "latency"}
_WIDTH = 100


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The guard's account of a Tune run. ``print(summary)`` is the table; None: nothing to say it from."""

    study: str
    """The name of the run in the measurement log."""
    device: str
    """The name of the guarded device."""
    num_launched: int
    """Trials that ran, or still run; repaired, unjudged and interrupted ones included."""
    num_repaired: int
    num_unjudged: int
    """Launched without a verdict, or against it."""
    num_rejected: int
    """Different configurations that were turned down before launch."""
    rejected_for: Mapping[Quantity, int]
    """How many of them each limit turned down."""
    num_repeated: int
    """Further proposals of what had been turned down."""
    num_interrupted: int
    """Trials that were cut off and have not been resumed."""
    num_failed: int
    """Trials that ended with an error of their own."""
    num_measured: int
    """Trials that ran to their end, or out of memory or time, on the guarded device, and reported what they cost."""
    num_violations: int
    """Measured trials that broke a budget, or ran out of memory or time."""
    not_measured: Mapping[str, int] = field(default_factory=dict)
    """Why launched trials say nothing about the guarded device: how many for each reason."""
    launched_s: float | None = None
    """Time that the measured trials took, in seconds."""
    saved_s: float | None = None
    """Time that the trials turned down would have taken, as predicted, in seconds; without those that would have run out of the
    device's own memory. None: not predicted."""
    num_would_crash: int = 0
    """Configurations turned down that need more memory than the device has: they would have ended in their first steps."""
    memory_error: float | None = None
    """Median of |predicted / measured - 1| over the measured trials' peak memory."""
    step_time_error: float | None = None
    """Likewise of the step time."""

    def table(self) -> Table:
        """The summary as a table for the terminal."""
        table = Table(title=f"PerfGuard: {self.study} on {self.device}", show_header=False)
        for label, value in self._rows():
            table.add_row(label, value)
        return table

    def _rows(self) -> Iterator[tuple[str, str]]:
        rejected = ", ".join(f"{NOUNS[quantity]} {count}" for quantity, count in self.rejected_for.items())
        yield "trials launched", f"{self.num_launched}" + (f", {self.num_repaired} repaired" if self.num_repaired else "")
        yield "configurations turned down before launch", f"{self.num_rejected}" + (f" ({rejected})" if rejected else "")
        if self.num_repeated:
            yield "of these proposed again, and turned down from memory", f"{self.num_repeated} times"
        yield "launched without a verdict, or against it", f"{self.num_unjudged}"
        if self.num_interrupted:
            yield "interrupted, not yet resumed", f"{self.num_interrupted}"
        if self.num_failed:
            yield "failed", f"{self.num_failed}"
        for reason, count in self.not_measured.items():
            yield "not measured", f"{count}: {reason}"
        if self.num_measured:
            yield "budget violations among the measured", f"{self.num_violations} of {self.num_measured}"
        if self.launched_s is not None:
            yield "time of the measured trials", format_seconds(self.launched_s)
        if self.num_would_crash:
            yield "would have run out of memory at their start", f"{self.num_would_crash}"
        if self.saved_s is not None:
            yield "time of the others turned down (predicted)", format_seconds(self.saved_s)
        for label, error in (("peak memory", self.memory_error), ("step time", self.step_time_error)):
            if error is not None:
                yield f"median prediction error, {label}", f"{error:.1%}" if error < 1 else f"a factor of {1 + error:.3g}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.table()

    def __str__(self) -> str:
        console = Console(width=_WIDTH)
        with console.capture() as captured:
            console.print(self.table())
        return captured.get().rstrip()


def summarize(search: Any) -> RunSummary:
    """The guard's account of a Tune run, from the measurement log.

    Example:
        >>> tuner.fit()                                                                             # doctest: +SKIP
        >>> print(perfguard_ray.summarize(search))                                                  # doctest: +SKIP

    A run prints it at its end, unless ``RunConfig(verbose=0)``; a run that is restored prints the account of the whole.

    Args:
        search: the PerfGuardSearcher or PerfGuardVariantGenerator of the run, or its PerfGuardCallback.

    Raises:
        ConfigurationError: for anything else.
    """
    ledger = ledger_of(search, who="perfguard_ray.summarize")
    rows = [row for row in ledger.guard.log.decisions(ledger.study) if row.created_at.timestamp() >= ledger.begun_at]
    rows = [row for row in rows if row.decision_id not in ledger.superseded]
    return _summary_of(rows, ledger)


def _summary_of(rows: Sequence[LoggedDecision], ledger: Ledger) -> RunSummary:
    guard = ledger.guard
    launched = [row for row in rows if row.action != "prune" or row.status is not None]
    rejected = [row for row in rows if row.action == "prune" and row.status is None]
    crashes = [row for row in rejected if (row.predicted_peak_memory_bytes or 0.0) > guard.device.memory_bytes]
    others = [row for row in rejected if (row.predicted_peak_memory_bytes or 0.0) <= guard.device.memory_bytes]
    saved = [row.predicted_total_time_s for row in others if row.predicted_total_time_s is not None]
    ended = [row for row in launched if row.status in ("ok", "oom", "timeout")]
    why_not = {row.decision_id: _why_not_measured(row, ledger) for row in ended}
    measured = [row for row in ended if why_not[row.decision_id] is None]
    ok = [row for row in measured if row.status == "ok"]
    return RunSummary(
        study=ledger.study,
        device=guard.device.name,
        num_launched=len(launched),
        num_repaired=sum(row.action == "repair" for row in launched),
        num_unjudged=ledger.num_unjudged,
        num_rejected=len(rejected),
        rejected_for=Counter(quantity_of(row.reason) for row in rejected),
        num_repeated=ledger.num_repeated,
        num_interrupted=sum(row.status == "interrupted" for row in launched),
        num_failed=sum(row.status == "failed" for row in launched),
        num_measured=len(measured),
        num_violations=sum(_violates(row, ledger) for row in measured),
        not_measured=Counter(reason for reason in why_not.values() if reason is not None),
        launched_s=sum(row.measured_total_time_s or 0.0 for row in measured) if measured else None,
        saved_s=sum(saved) if saved else None,
        num_would_crash=len(crashes),
        memory_error=_error([(row.predicted_peak_memory_bytes, row.measured_peak_memory_bytes) for row in ok]),
        step_time_error=_error([(row.predicted_step_time_s, row.measured_step_time_s) for row in ok]),
    )


def _why_not_measured(row: LoggedDecision, ledger: Ledger) -> str | None:
    """Why a trial that has ended says nothing about the guarded device; None: it does."""
    if row.set_aside:
        return row.set_aside
    device = ledger.guard.device
    name = row.measured_device_name or "another device"
    ran = Measurement("ok", row.measured_device_id or "", name, None, None, 0.0, 0, "none", "")
    if not ran.is_of(device):
        return f"their workers used no {device.name}; they ran on {name}"
    is_silent = row.measured_peak_memory_bytes is None and row.measured_step_time_s is None
    return "they did not report what they cost" if is_silent and row.status == "ok" else None


def _violates(row: LoggedDecision, ledger: Ledger) -> bool:
    """Whether a measured trial broke a budget, or ran out of memory or time."""
    if row.status in ("oom", "timeout"):
        return True
    budget = ledger.guard.budget
    limits = (
        (row.measured_peak_memory_bytes, budget.capacity_bytes(ledger.guard.device)),
        (row.measured_total_time_s, budget.trial_time_s),
        (row.measured_step_time_s, budget.step_time_s),
    )
    return any(value is not None and limit is not None and value > limit for value, limit in limits)


def quantity_of(reason: str) -> Quantity:
    """The limit that a verdict's sentence speaks of."""
    verb = reason.partition(" ")[0]
    if verb == "takes":
        return next((quantity for end, quantity in _ENDS.items() if end in reason), "time")
    return "energy" if verb == "uses" else "memory"


def _error(pairs: Sequence[tuple[float | None, float | None]]) -> float | None:
    errors = [abs(predicted / measured - 1) for predicted, measured in pairs if predicted and measured]
    return statistics.median(errors) if errors else None
