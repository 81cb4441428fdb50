"""The report of a measurement log, whichever tuner wrote it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from perfguard.budget import Quantity, limits_in
from perfguard.exceptions import LogError
from perfguard.log_summary import LogSummary, has_run, is_measured, record_of_row, summarize_rows
from perfguard.report._data import History, Report, ReportTrial, flat_params
from perfguard.summary import TrialRecord

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.log import LoggedDecision, LoggedWeights, MeasurementStore

_SAME = 0.006
"""A limit that is written with three digits differs by less than this share from the exact one."""


def report_of_log(log: MeasurementStore, study: str | None = None) -> Report:
    """Read the report of a measurement log.

    The log has a verdict's sentence, but not its limits. So limits are read from the sentences, to three digits. One that all
    sentences of a study agree on holds for each of its trials. The device's own memory always is one.

    Args:
        log: the log.
        study: only the trials of this study. None: all.

    Raises:
        LogError: if there is no decision, or the log cannot be read.
    """
    decisions = log.decisions(study)
    if not decisions:
        known = sorted({row.study for row in log.decisions()}) if study is not None else []
        names = f" It has {', '.join(map(repr, known[:10]))}." if known else ""
        raise LogError(f"The measurement log {log.location} has no decision{f' of study {study!r}' if study else ''}.{names}")
    devices = _devices_in(log)
    limits = _limits_of(decisions, devices)
    rows = [
        (row, record_of_row(row, limits=limits[row.decision_id], device=devices.get(row.device_id or ""))) for row in decisions
    ]
    studies = list(dict.fromkeys(row.study for row in decisions))
    title = studies[0] if len(studies) == 1 else f"{len(studies)} studies"
    device = device_names(log, decisions)
    history, doubts = history_of(log, decisions)
    return Report(
        title=title,
        source=f"measurement log {log.location}",
        device=device,
        summary=summarize_rows(rows, LogSummary, study=title, device=device),
        trials=trials_of_rows(rows, doubts),
        history=history,
    )


def trials_of_rows(rows: Sequence[tuple[LoggedDecision, TrialRecord]], doubts: Mapping[str, str]) -> Sequence[ReportTrial]:
    """Return the trials of logged decisions.

    Args:
        rows: the decisions, each with its record.
        doubts: reasons why readings are not believed, by the decision's id.
    """
    return [
        ReportTrial(
            record=record,
            params=flat_params(row.params),
            has_run=has_run(row),
            is_measured=is_measured(record),
            is_whole=row.status == "ok",
            study=row.study,
            doubt=doubts.get(row.decision_id, ""),
        )
        for row, record in rows
    ]


def history_of(log: MeasurementStore, decisions: Sequence[LoggedDecision]) -> tuple[History, Mapping[str, str]]:
    """Return what ``log`` says of drift and learning on the devices of ``decisions``, and the doubtful readings.

    Args:
        log: the log.
        decisions: the report's trials, in order.

    Returns:
        The history, and by the decision's id why nothing is learnt from its reading.
    """
    from perfguard.learning import assess_log

    index_of = {row.decision_id: index for index, row in enumerate(decisions)}
    doubts = {row.decision_id: row.set_aside for row in decisions if row.set_aside}
    drifts: list[tuple[int | None, str]] = []
    for device_id in sorted({row.device_id for row in decisions if row.device_id and row.status}):
        assessment = assess_log(log.observations(device_id))
        for refused in assessment.quarantined:
            doubts.setdefault(refused.observation.decision_id, refused.reason)
        drifts += [(index_of.get(drift.first.decision_id), drift.reason) for drift in assessment.drifts]
    begun = decisions[0].created_at if decisions else None
    return History(
        log=log.location,
        drifts=drifts,
        weights=[_weights_in_words(known) for known in log.weights() if begun is not None and known.created_at >= begun],
        predictors=list(dict.fromkeys(row.predictor for row in decisions if row.predictor)),
    ), doubts


def _weights_in_words(weights: LoggedWeights) -> tuple[str, str, str]:
    metrics = weights.metrics
    errors = [
        f"{target} {metrics[f'recent {target} before']:.1%} → {metrics[f'recent {target} after']:.1%}"
        for target in ("memory", "time")
        if metrics.get(f"recent {target} before") is not None and metrics.get(f"recent {target} after") is not None
    ]
    learnt = f"{metrics['rows']} runs" if "rows" in metrics else ""
    return f"{weights.created_at:%Y-%m-%d %H:%M}", weights.state, "; ".join(filter(None, [learnt, *errors]))


def _devices_in(log: MeasurementStore) -> dict[str, Device]:
    from perfguard.log_tables import device_from_json

    return {row["device_id"]: device_from_json(row["data"]) for row in log.rows("devices")}


def device_names(log: MeasurementStore, decisions: Sequence[LoggedDecision]) -> str:
    """Return the names of the devices that ``decisions`` are for, in order, separated by commas."""
    devices = _devices_in(log)
    ids = dict.fromkeys(row.device_id for row in decisions if row.device_id)
    return ", ".join(devices[id_].name if id_ in devices else id_ for id_ in ids)


def _limits_of(decisions: Sequence[LoggedDecision], devices: Mapping[str, Device]) -> dict[str, dict[str, float]]:
    """The limits of each decision, by its id."""
    own = {row.decision_id: limits_in(row.reason) for row in decisions}
    of_study: defaultdict[tuple[str, str | None, Quantity], set[float]] = defaultdict(set)
    for row in decisions:
        for quantity, limit in own[row.decision_id].items():
            of_study[row.study, row.device_id, quantity].add(limit)
    agreed = {key: next(iter(limits)) for key, limits in of_study.items() if len(limits) == 1}
    found: dict[str, dict[str, float]] = {}
    for row in decisions:
        device = devices.get(row.device_id or "")
        limits: dict[str, float] = {} if device is None else {"memory": float(device.memory_bytes)}
        limits |= {quantity: limit for (*of, quantity), limit in agreed.items() if of == [row.study, row.device_id]}
        for quantity, limit in own[row.decision_id].items():
            limits[quantity] = limit
        if device is not None and abs(limits["memory"] / device.memory_bytes - 1) < _SAME:
            limits["memory"] = float(device.memory_bytes)
        found[row.decision_id] = limits
    return found
