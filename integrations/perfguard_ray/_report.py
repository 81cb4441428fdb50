"""The report of a Ray Tune run; see :mod:`perfguard.report`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perfguard.exceptions import ConfigurationError
from perfguard.report import Report, history_of, trials_of_rows
from perfguard_ray._ledger import ledger_of
from perfguard_ray._summary import rows_of, summary_of

if TYPE_CHECKING:
    from perfguard.log import MeasurementStore


def read(source: Any, study: str | None, log: MeasurementStore | None) -> Report | None:
    """Read the report of a run from its search or its callback. None: ``source`` is something else.

    Args:
        source: the PerfGuardSearcher or PerfGuardVariantGenerator of the run, or its PerfGuardCallback.
        study: not used, because a search has one run.
        log: not used, because a search knows its log.
    """
    try:
        ledger = ledger_of(source, who="perfguard.report")
    except ConfigurationError:
        return None
    rows = rows_of(ledger)
    history, doubts = history_of(ledger.guard.log, [row for row, _ in rows])
    return Report(
        title=ledger.study,
        source="Ray Tune run",
        device=ledger.guard.device.name,
        summary=summary_of(rows, ledger),
        trials=trials_of_rows(rows, doubts),
        history=history,
    )
