"""Summary of a guarded Tune run: trials that ran, rejected ones with reasons, and errors of predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perfguard.log_summary import LogSummary, record_of_row, summarize_rows
from perfguard.summary import TrialRecord
from perfguard_ray._ledger import Ledger, ledger_of

if TYPE_CHECKING:
    from perfguard.log import LoggedDecision


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary(LogSummary):
    """The guard's summary of a Tune run. ``print(summary)`` prints the table. None: unknown."""

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
    return summary_of(rows_of(ledger), ledger)


def rows_of(ledger: Ledger) -> Sequence[tuple[LoggedDecision, TrialRecord]]:
    """The run's decisions in the log, oldest first, each with its record beside the limits of the run's budget."""
    budget, device = ledger.guard.budget, ledger.guard.device
    own: Mapping[str, float | None] = {
        "memory": budget.capacity_bytes(device),
        "time": budget.longest_trial_s,
        "step_time": budget.step_time_s,
    }
    limits = {quantity: limit for quantity, limit in own.items() if limit is not None}
    rows = [row for row in ledger.guard.log.decisions(ledger.study) if row.created_at.timestamp() >= ledger.begun_at]
    rows = [row for row in rows if row.decision_id not in ledger.superseded]
    return [(row, record_of_row(row, limits=limits, device=device)) for row in rows]


def summary_of(rows: Sequence[tuple[LoggedDecision, TrialRecord]], ledger: Ledger) -> RunSummary:
    """Count the run's decisions and what the ledger knows beside them."""
    return summarize_rows(
        rows,
        RunSummary,
        study=ledger.study,
        device=ledger.guard.device.name,
        num_unjudged=ledger.num_unjudged,
        num_repeated=ledger.num_repeated,
    )
