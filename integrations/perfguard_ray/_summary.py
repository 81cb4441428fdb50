"""Summary of a guarded Tune run: trials that ran, rejected ones with reasons, and errors of predictions."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perfguard.budget import Quantity, quantity_of
from perfguard.measure import Measurement
from perfguard.quantities import format_seconds
from perfguard.summary import GuardSummary, TrialRecord
from perfguard_ray._ledger import Ledger, ledger_of

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.store import LoggedDecision

_ENDED = ("ok", "oom", "timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary(GuardSummary):
    """The guard's summary of a Tune run. ``print(summary)`` is the table; None: nothing to say it from."""

    study: str
    """The name of the run in the measurement log."""
    device: str
    """The name of the guarded device."""
    num_unjudged: int
    """Launched without a verdict, or against it."""
    num_repeated: int
    """Further proposals of what had been turned down."""
    num_interrupted: int
    """Trials that were cut off and have not been resumed."""
    num_failed: int
    """Trials that ended with an error of their own."""
    not_measured: Mapping[str, int]
    """Reasons why launched trials do not measure the guarded device, with the number of trials."""
    launched_s: float | None
    """Time that the measured trials took, in seconds."""
    memory_error: float | None
    """Median of |predicted / measured - 1| over the measured trials' peak memory."""
    step_time_error: float | None
    """Likewise of the step time."""

    @property
    def title(self) -> str:
        """Title of the table."""
        return f"PerfGuard: {self.study} on {self.device}"

    def rows(self) -> Iterator[tuple[str, str]]:
        """The rows of the table; what there is nothing to say of is left out."""
        yield "trials launched", self.launched_in_words
        yield "configurations turned down before launch", self.pruned_in_words
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
        if self.num_crashes_avoided:
            yield "would have run out of memory at their start", f"{self.num_crashes_avoided}"
        if self.saved_s is not None:
            yield "time of the others turned down (predicted)", format_seconds(self.saved_s)
        for label, error in (("peak memory", self.memory_error), ("step time", self.step_time_error)):
            if error is not None:
                yield f"median prediction error, {label}", f"{error:.1%}" if error < 1 else f"a factor of {1 + error:.3g}"

    # The names before version 0.2; they go in the next one.
    num_rejected = property(lambda self: self.num_pruned)
    rejected_for = property(lambda self: self.pruned_for)
    num_would_crash = property(lambda self: self.num_crashes_avoided)


def summarize(search: Any) -> RunSummary:
    """The guard's summary of a Tune run, from the measurement log.

    Example:
        >>> tuner.fit()                                                                             # doctest: +SKIP
        >>> print(perfguard_ray.summarize(search))                                                  # doctest: +SKIP

    A run prints it at its end, unless ``RunConfig(verbose=0)``; a run that is restored prints the summary of the whole.

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
    launched = [row for row in rows if row.action != "prune" or row.status is not None]
    pruned = [row for row in rows if row.action == "prune" and row.status is None]
    records = [_record_of(row, ledger) for row in launched]
    measured = [record for record in records if record.status in _ENDED and not record.not_measured]
    return RunSummary.of(
        records,
        [_record_of(row, ledger) for row in pruned],
        measured,
        pruned_for=[quantity_of(row.reason) for row in pruned],
        study=ledger.study,
        device=ledger.guard.device.name,
        num_unjudged=ledger.num_unjudged,
        num_repeated=ledger.num_repeated,
        num_interrupted=sum(row.status == "interrupted" for row in launched),
        num_failed=sum(row.status == "failed" for row in launched),
        not_measured=Counter(record.not_measured for record in records if record.not_measured),
        launched_s=sum(record.measured.get("time", 0.0) for record in measured) if measured else None,
        memory_error=_median_error(measured, "memory"),
        step_time_error=_median_error(measured, "step_time"),
    )


def _record_of(row: LoggedDecision, ledger: Ledger) -> TrialRecord:
    """The log's record of a trial, beside the limits of the run's budget."""
    budget, device = ledger.guard.budget, ledger.guard.device

    def known(memory: float | None, time_s: float | None, step_time_s: float | None) -> dict[str, float]:
        values = {"memory": memory, "time": time_s, "step_time": step_time_s}
        return {quantity: value for quantity, value in values.items() if value is not None}

    return TrialRecord(
        number=-1 if row.trial is None else row.trial,
        verdict=row.action,
        reason=row.reason,
        predicted=known(row.predicted_peak_memory_bytes, row.predicted_total_time_s, row.predicted_step_time_s),
        intervals={},
        limits=known(budget.capacity_bytes(device), budget.trial_time_s, budget.step_time_s),
        measured=known(row.measured_peak_memory_bytes, row.measured_total_time_s, row.measured_step_time_s),
        status=row.status,
        not_measured=_why_not_measured(row, device) if row.status in _ENDED else "",
        capacity_bytes=device.memory_bytes,
    )


def _why_not_measured(row: LoggedDecision, device: Device) -> str:
    """The reason why a finished trial does not measure the guarded device; empty: it does."""
    if row.set_aside:
        return row.set_aside
    name = row.measured_device_name or "another device"
    ran = Measurement("ok", row.measured_device_id or "", name, None, None, 0.0, 0, "none", "")
    if not ran.is_of(device):
        return f"their workers used no {device.name}; they ran on {name}"
    is_silent = row.measured_peak_memory_bytes is None and row.measured_step_time_s is None
    return "they did not report what they cost" if is_silent and row.status == "ok" else ""


def _median_error(measured: Sequence[TrialRecord], quantity: Quantity) -> float | None:
    errors = [error for record in measured if (error := record.prediction_error(quantity)) is not None]
    return statistics.median(errors) if errors else None
