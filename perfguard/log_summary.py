"""The summary of decisions in the measurement log. Ray Tune's runs and the report of a log share it."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from perfguard.budget import Quantity, quantity_of
from perfguard.measure import Measurement
from perfguard.quantities import format_seconds
from perfguard.summary import GuardSummary, TrialRecord

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.store import LoggedDecision

_ENDED = ("ok", "oom", "timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSummary(GuardSummary):
    """The guard's summary of logged decisions. ``print(summary)`` prints the table. None: unknown."""

    study: str
    """The name of the run in the measurement log."""
    device: str
    """The name of the guarded device."""
    num_unjudged: int
    """Launched without a verdict, or against it."""
    num_repeated: int
    """Further proposals of rejected configurations."""
    num_interrupted: int
    """Trials that were cut off and have not been resumed."""
    num_failed: int
    """Trials that ended with their own error."""
    not_measured: Mapping[str, int]
    """Reasons why launched trials do not measure the guarded device, with the number of trials."""
    launched_s: float | None
    """Time that the measured trials took, in seconds."""
    memory_error: float | None
    """Median of |predicted / measured - 1| over the measured trials' peak memory."""
    step_time_error: float | None
    """The same for the step time."""

    @property
    def title(self) -> str:
        """Title of the table."""
        return f"PerfGuard: {self.study} on {self.device}"

    def rows(self) -> Iterator[tuple[str, str]]:
        """The rows of the table. Rows without a value are left out."""
        yield "trials launched", self.launched_in_words
        yield "configurations rejected before launch", self.pruned_in_words
        if self.num_repeated:
            yield "of these proposed again, and rejected from memory", f"{self.num_repeated} times"
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
            yield "time of the others rejected (predicted)", format_seconds(self.saved_s)
        for label, error in (("peak memory", self.memory_error), ("step time", self.step_time_error)):
            if error is not None:
                yield f"median prediction error, {label}", f"{error:.1%}" if error < 1 else f"a factor of {1 + error:.3g}"


Summary = TypeVar("Summary", bound=LogSummary)


def summarize_rows(
    rows: Sequence[tuple[LoggedDecision, TrialRecord]],
    kind: type[Summary],
    *,
    study: str,
    device: str,
    num_unjudged: int | None = None,
    num_repeated: int = 0,
) -> Summary:
    """Count logged decisions.

    Args:
        rows: the decisions, each with its record (:func:`record_of_row`).
        kind: the class of the summary.
        study: the name of the run.
        device: the name of the guarded device.
        num_unjudged: trials that were launched without a verdict, or against it. None: count them in ``rows``.
        num_repeated: proposals that were rejected from memory, without a row.
    """
    launched = [(row, record) for row, record in rows if has_run(row)]
    pruned = [(row, record) for row, record in rows if not has_run(row)]
    records = [record for _, record in launched]
    measured = [record for record in records if is_measured(record)]
    if num_unjudged is None:
        num_unjudged = sum(row.action == "prune" or record.is_unguarded for row, record in launched)
    return kind.of(
        records,
        [record for _, record in pruned],
        measured,
        pruned_for=[quantity_of(row.reason) for row, _ in pruned],
        study=study,
        device=device,
        num_unjudged=num_unjudged,
        num_repeated=num_repeated,
        num_interrupted=sum(row.status == "interrupted" for row, _ in launched),
        num_failed=sum(row.status == "failed" for row, _ in launched),
        not_measured=Counter(record.not_measured for record in records if record.not_measured),
        launched_s=sum(record.measured.get("time", 0.0) for record in measured) if measured else None,
        memory_error=_median_error(measured, "memory"),
        step_time_error=_median_error(measured, "step_time"),
    )


def record_of_row(row: LoggedDecision, *, limits: Mapping[str, float], device: Device | None) -> TrialRecord:
    """Return the log's record of a trial.

    Args:
        row: a decision, with its measurement if it has one.
        limits: the limits of the trial, by quantity, in bytes, seconds and joules.
        device: the guarded device. None: unknown, so every measurement counts as one of it.
    """

    def known(memory: Any, time: Any, step_time: Any) -> dict[str, Any]:
        values = {"memory": memory, "time": time, "step_time": step_time}
        return {quantity: value for quantity, value in values.items() if value is not None}

    def ends(low: float | None, high: float | None) -> tuple[float, float] | None:
        return None if low is None or high is None else (low, high)

    return TrialRecord(
        number=-1 if row.trial is None else row.trial,
        verdict=row.action,
        reason=row.reason,
        predicted=known(row.predicted_peak_memory_bytes, row.predicted_total_time_s, row.predicted_step_time_s),
        intervals=known(
            ends(row.predicted_peak_memory_low_bytes, row.predicted_peak_memory_high_bytes),
            ends(row.predicted_total_time_low_s, row.predicted_total_time_high_s),
            ends(row.predicted_step_time_low_s, row.predicted_step_time_high_s),
        ),
        limits=limits,
        measured=known(row.measured_peak_memory_bytes, row.measured_total_time_s, row.measured_step_time_s),
        status=row.status,
        not_measured=_why_not_measured(row, device) if row.status in _ENDED else "",
        capacity_bytes=None if device is None else device.memory_bytes,
    )


def has_run(row: LoggedDecision) -> bool:
    """Whether the trial was launched; a rejected trial may have run nevertheless."""
    return row.action != "prune" or row.status is not None


def is_measured(record: TrialRecord) -> bool:
    """Whether it is known of a logged trial that ran if it broke a limit."""
    return record.status in _ENDED and not record.not_measured


def _why_not_measured(row: LoggedDecision, device: Device | None) -> str:
    """The reason why a finished trial does not measure the guarded device; empty: it does."""
    if row.set_aside:
        return row.set_aside
    if device is not None:
        name = row.measured_device_name or "another device"
        ran = Measurement("ok", row.measured_device_id or "", name, None, None, 0.0, 0, "none", "")
        if not ran.is_of(device):
            return f"their workers used no {device.name}; they ran on {name}"
    is_silent = row.measured_peak_memory_bytes is None and row.measured_step_time_s is None
    return "they did not report what they cost" if is_silent and row.status == "ok" else ""


def _median_error(measured: Sequence[TrialRecord], quantity: Quantity) -> float | None:
    errors = [error for record in measured if (error := record.prediction_error(quantity)) is not None]
    return statistics.median(errors) if errors else None


__all__ = ["LogSummary", "has_run", "is_measured", "record_of_row", "summarize_rows"]
