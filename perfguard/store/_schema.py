"""Tables of the measurement log, and the conversion of PerfGuard's types to rows and back.

    meta           "schema_version"
    graphs         one OpGraph each. Equal graphs are stored once.
    devices        one Device each, as JSON, also stored once.
    decisions      one verdict on one trial
    measurements   the measured cost of that trial. Each decision has at most one.
    weights        a predictor's weights. A row has their origin, their metrics and their state.
    leases         the process that holds a lease, and when it ends

There are no foreign keys, because a row that was delayed by a lock may arrive after the rows that refer to it. A change here
needs a step in `_migrations.py`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timedelta, timezone
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sqlalchemy import BigInteger, Column, Double, Index, LargeBinary, MetaData, Row, Select, Table, Text, select

from perfguard.devices import Device
from perfguard.measure import NOT_A_NUMBER, Measurement, Status
from perfguard.predictor import Estimate, Prediction, Target

if TYPE_CHECKING:
    from perfguard.graph import OpGraph
    from perfguard.verdict import Action

SCHEMA_VERSION = 4
MOST_IN_A_LIST = 900

_1970 = datetime(1970, 1, 1, tzinfo=timezone.utc)

WeightsState = Literal["candidate", "promoted", "superseded", "rejected", "rolled back"]

metadata = MetaData()
meta = Table("meta", metadata, Column("key", Text, primary_key=True), Column("value", Text))
graphs = Table("graphs", metadata, Column("content_hash", Text, primary_key=True), Column("data", LargeBinary))
devices = Table(
    "devices", metadata, Column("content_hash", Text, primary_key=True), Column("device_id", Text), Column("data", Text)
)
decisions = Table(
    "decisions",
    metadata,
    Column("decision_id", Text, primary_key=True),
    Column("created_at_ns", BigInteger, index=True),
    Column("study", Text, index=True),
    Column("trial", BigInteger),
    Column("action", Text),
    Column("reason", Text),
    Column("params", Text),
    Column("graph_hash", Text),
    Column("device_hash", Text),
    Column("predictor", Text),
    Column("peak_memory_median_bytes", Double),
    Column("peak_memory_log_sigma", Double),
    Column("step_time_median_s", Double),
    Column("step_time_log_sigma", Double),
    Column("total_time_median_s", Double),
    Column("total_time_log_sigma", Double),
    # Since schema 3.
    Column("peak_memory_widening", Double),
    Column("step_time_widening", Double),
    # Since schema 4.
    Column("host", Text),
    Column("trial_id", Text),
)
measurements = Table(
    "measurements",
    metadata,
    Column("decision_id", Text, primary_key=True),
    Column("recorded_at_ns", BigInteger),
    Column("status", Text),
    Column("device_id", Text),
    Column("device_name", Text),
    Column("peak_memory_bytes", BigInteger),
    Column("step_time_s", Double),
    Column("total_time_s", Double),
    Column("num_steps", BigInteger),
    Column("method", Text),
    Column("framework", Text),
    Column("note", Text),
    # Since schema 2.
    Column("allocated_peak_bytes", BigInteger),
    Column("reserved_peak_bytes", BigInteger),
    Column("sm_utilisation", Double),
    Column("energy_j", Double),
    Column("sm_clock_hz", Double),
    Column("throttled", Text),
    Column("data_wait_s", Double),
    Column("oom_retries", BigInteger),
    Column("driver", Text),
    Column("confidence", Text),
    # Since schema 4. A text in set_aside says why nothing is learnt from the row; NULL: it is used.
    Column("host", Text),
    Column("set_aside", Text),
    Index("ix_measurements_device_id_recorded_at_ns", "device_id", "recorded_at_ns"),
    Index("ix_measurements_device_id_decision_id", "device_id", "decision_id"),  # since schema 2: to draw at random
)
weights = Table(  # since schema 2
    "weights",
    metadata,
    Column("weights_id", Text, primary_key=True),
    Column("parent_id", Text),
    Column("predictor", Text, index=True),
    Column("created_at_ns", BigInteger),
    Column("sha256", Text),
    Column("metrics", Text),
    Column("state", Text),
    Column("state_changed_at_ns", BigInteger),
    Column("data", LargeBinary),
)
leases = Table(  # since schema 3
    "leases",
    metadata,
    Column("name", Text, primary_key=True),
    Column("holder", Text),
    Column("expires_at_ns", BigInteger),
)


_MEASUREMENT_FIELDS = tuple(field.name for field in fields(Measurement))


class Entry(NamedTuple):
    """One row that waits for its table. Holds only None, int, float, str and, in a graph, bytes."""

    table: str
    row: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LoggedDecision:
    """One verdict as it was logged, beside what the trial then cost. None: not known, or not measured."""

    decision_id: str
    created_at: datetime
    """Time in UTC."""
    study: str
    trial: int | None
    action: Action
    reason: str
    params: Mapping[str, Any]
    device_id: str | None
    predictor: str | None
    predicted_peak_memory_bytes: float | None
    """Median of the prediction."""
    predicted_peak_memory_low_bytes: float | None
    """Lower end of the 90% interval."""
    predicted_peak_memory_high_bytes: float | None
    predicted_step_time_s: float | None
    predicted_total_time_s: float | None
    measured_peak_memory_bytes: int | None
    measured_step_time_s: float | None
    measured_total_time_s: float | None
    status: Status | None
    """None: pruned, still running, or never measured."""
    note: str = ""
    """Limits of the measurement's reliability."""
    trial_id: str | None = None
    """The tuner's own name of the trial, where it has one, for instance Ray Tune's."""
    host: str | None = None
    """Name of the machine that ran the trial; of the one that decided, where it was not measured. None: before schema 4."""
    set_aside: str | None = None
    """Reason why nothing is learnt from the measurement. None: it is used, unless it is implausible."""
    measured_device_id: str | None = None
    """The device that the trial ran on, which need not be the one that was decided for. None: not measured."""
    measured_device_name: str | None = None
    predicted_step_time_low_s: float | None = None
    """Lower end of the 90% interval."""
    predicted_step_time_high_s: float | None = None
    predicted_total_time_low_s: float | None = None
    predicted_total_time_high_s: float | None = None


@dataclass(frozen=True, slots=True)
class LoggedWeights:
    """One generation of a predictor's weights."""

    weights_id: str
    parent_id: str | None
    """The generation that it was fine-tuned from; None: the shipped one."""
    predictor: str
    created_at: datetime
    """Time in UTC."""
    sha256: str
    """SHA-256 of the weights' bytes, hexadecimal."""
    metrics: Mapping[str, Any]
    """Metrics of its evaluation, as the trainer wrote them."""
    state: WeightsState
    state_changed_at: datetime


def graph_entry(graph: OpGraph) -> Entry:
    return Entry("graphs", {"content_hash": graph.content_hash, "data": graph.to_bytes()})


def device_entry(device: Device) -> Entry:
    """The row of a device, found by what identifies it. The rates of a CPU differ from process to process, and stay as the first
    process of the machine measured them."""
    key = _content_hash(json.dumps(dict(device.identity), sort_keys=True))
    return Entry("devices", {"content_hash": key, "device_id": device.id, "data": json.dumps(asdict(device), sort_keys=True)})


def decision_entry(prediction: Prediction | None, params: Mapping[str, Any], **columns: Any) -> Entry:
    row = {**columns, "params": _json(params)}
    if prediction is not None:
        total = prediction.total_time
        row |= {
            "predictor": prediction.predictor,
            "peak_memory_median_bytes": prediction.peak_memory.median,
            "peak_memory_log_sigma": prediction.peak_memory.log_sigma,
            "step_time_median_s": prediction.step_time.median,
            "step_time_log_sigma": prediction.step_time.log_sigma,
            "total_time_median_s": None if total is None else total.median,
            "total_time_log_sigma": None if total is None else total.log_sigma,
            "peak_memory_widening": prediction.widening.get("memory"),
            "step_time_widening": prediction.widening.get("time"),
        }
    return Entry("decisions", {name: _plain(value) for name, value in row.items()})


def measurement_entry(measurement: Measurement, **columns: Any) -> Entry:
    """The row of a measurement. NaN and infinity go into the note, in words, because SQLite would store them as NULL."""
    row = {**columns, **asdict(measurement)}
    strange = {name: value for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
    notes = [measurement.note, *(NOT_A_NUMBER.format(name, value) for name, value in strange.items())]
    row |= dict.fromkeys(strange) | {"note": "; ".join(filter(None, notes))}
    return Entry("measurements", {name: _plain(value) for name, value in row.items()})


def replacing_interrupted(new: Any) -> dict[str, Any]:
    """When and how the row ``new`` replaces the measurement of the same decision: a later one replaces an interrupted one."""
    old = measurements.c
    return {
        "index_elements": ["decision_id"],
        "set_": {column.name: new[column.name] for column in old if column.name != "decision_id"},
        "where": (old.status == "interrupted") & (new.recorded_at_ns > old.recorded_at_ns),
    }


def weights_entry(metrics: Mapping[str, Any], data: bytes | None, **columns: Any) -> Entry:
    row = {name: _plain(value) for name, value in columns.items()}
    return Entry("weights", row | {"metrics": _json(metrics), "data": data})


def select_decisions(ids: Select[Any], newest: int | None = None) -> Select[Any]:
    """The decisions with those ids, oldest first; of more than ``newest``, the last ones."""
    if newest is not None:
        ids = ids.order_by(decisions.c.created_at_ns.desc(), decisions.c.decision_id.desc()).limit(newest)
    return (
        select(
            decisions,
            devices.c.device_id,
            measurements.c.peak_memory_bytes,
            measurements.c.step_time_s,
            measurements.c.total_time_s,
            measurements.c.status,
            measurements.c.note,
            measurements.c.host.label("measured_host"),
            measurements.c.device_id.label("measured_device_id"),
            measurements.c.device_name.label("measured_device_name"),
            measurements.c.set_aside,
        )
        .outerjoin(devices, devices.c.content_hash == decisions.c.device_hash)
        .outerjoin(measurements, measurements.c.decision_id == decisions.c.decision_id)
        .where(decisions.c.decision_id.in_(ids))
        .order_by(decisions.c.created_at_ns, decisions.c.decision_id)
    )


def select_promoted(predictor: str) -> Select[Any]:
    """The id of the generation in use: the newest, should an older PerfGuard's import have brought another."""
    query = select(weights.c.weights_id).where(weights.c.predictor == predictor, weights.c.state == "promoted")
    return query.order_by(weights.c.state_changed_at_ns.desc()).limit(1)


def select_observations(device_id: str, limit: int) -> Select[Any]:
    """Select a device's observations, newest first."""
    newest_first = measurements.c.recorded_at_ns.desc(), measurements.c.decision_id.desc()
    return _observed().where(measurements.c.device_id == device_id).order_by(*newest_first).limit(limit)


def select_measured_ids(device_id: str | None, limit: int) -> Select[Any]:
    """Select the ids of the measurements that are not set aside."""
    query = select(measurements.c.decision_id).where(measurements.c.set_aside.is_(None))
    query = query.order_by(measurements.c.decision_id).limit(limit)
    return query if device_id is None else query.where(measurements.c.device_id == device_id)


def select_observations_of(decision_ids: Sequence[str]) -> Select[Any]:
    return _observed().where(measurements.c.decision_id.in_(decision_ids)).order_by(measurements.c.decision_id)


def select_observations_from(decision_id: str, device_id: str | None, limit: int) -> Select[Any]:
    """Select observations in the order of their random ids, from ``decision_id`` on."""
    query = _observed().where(measurements.c.decision_id >= decision_id).order_by(measurements.c.decision_id).limit(limit)
    return query if device_id is None else query.where(measurements.c.device_id == device_id)


def _observed() -> Select[Any]:
    """The condition for rows that a predictor can learn from.

    A run that was out of memory gives a lower bound. A measurement on another device than the one of the decision is left out,
    because it describes neither. Measurements that are set aside are left out, too.
    """
    ends = ("_median_bytes", "_median_s", "_log_sigma", "_widening")
    predicted = [column for column in decisions.c if column.name.endswith(ends) or column.name == "predictor"]
    return (
        select(decisions.c.graph_hash, decisions.c.study, devices.c.data.label("device"), *measurements.c, *predicted)
        .join(decisions, decisions.c.decision_id == measurements.c.decision_id)
        .join(devices, devices.c.content_hash == decisions.c.device_hash)
        .join(graphs, graphs.c.content_hash == decisions.c.graph_hash)
        .where(
            measurements.c.status.in_(("ok", "oom")),
            measurements.c.device_id == devices.c.device_id,
            measurements.c.set_aside.is_(None),
        )
    )


def decision_from_row(row: Row[Any]) -> LoggedDecision:
    memory_low, memory_high = _interval(row.peak_memory_median_bytes, row.peak_memory_log_sigma)
    step_low, step_high = _interval(row.step_time_median_s, row.step_time_log_sigma)
    total_low, total_high = _interval(row.total_time_median_s, row.total_time_log_sigma)
    return LoggedDecision(
        decision_id=row.decision_id,
        created_at=_as_time(row.created_at_ns),
        study=row.study,
        trial=row.trial,
        action=row.action,
        reason=row.reason,
        params=json.loads(row.params),
        device_id=row.device_id,
        predictor=row.predictor,
        predicted_peak_memory_bytes=row.peak_memory_median_bytes,
        predicted_peak_memory_low_bytes=memory_low,
        predicted_peak_memory_high_bytes=memory_high,
        predicted_step_time_s=row.step_time_median_s,
        predicted_total_time_s=row.total_time_median_s,
        measured_peak_memory_bytes=row.peak_memory_bytes,
        measured_step_time_s=row.step_time_s,
        measured_total_time_s=row.total_time_s,
        status=row.status,
        note=row.note or "",
        trial_id=row.trial_id,
        host=row.measured_host or row.host,
        set_aside=row.set_aside,
        measured_device_id=row.measured_device_id,
        measured_device_name=row.measured_device_name,
        predicted_step_time_low_s=step_low,
        predicted_step_time_high_s=step_high,
        predicted_total_time_low_s=total_low,
        predicted_total_time_high_s=total_high,
    )


def _interval(median: float | None, log_sigma: float | None) -> tuple[float, float] | tuple[None, None]:
    return (None, None) if median is None or log_sigma is None else Estimate(median, log_sigma).interval()


def weights_from_row(row: Row[Any]) -> LoggedWeights:
    return LoggedWeights(
        weights_id=row.weights_id,
        parent_id=row.parent_id,
        predictor=row.predictor,
        created_at=_as_time(row.created_at_ns),
        sha256=row.sha256,
        metrics=json.loads(row.metrics),
        state=row.state,
        state_changed_at=_as_time(row.state_changed_at_ns),
    )


def in_lists(ids: Sequence[str]) -> list[Sequence[str]]:
    """``ids`` in pieces that one statement may name: SQLite before 3.32 takes 999 variables."""
    return [ids[start : start + MOST_IN_A_LIST] for start in range(0, len(ids), MOST_IN_A_LIST)]


@functools.lru_cache(maxsize=64)
def device_from_json(data: str) -> Device:
    document = json.loads(data)
    return Device(**{field.name: document[field.name] for field in fields(Device)})


def measurement_from_row(row: Row[Any]) -> Measurement:
    known = {name: getattr(row, name) for name in _MEASUREMENT_FIELDS}
    return Measurement(**known | {"total_time_s": math.nan if known["total_time_s"] is None else known["total_time_s"]})


def predicted_from_row(row: Row[Any]) -> dict[Target, Estimate]:
    """Predictions of the row's decision; empty if nothing could be predicted."""
    if row.peak_memory_median_bytes is None:
        return {}
    return {
        "memory": Estimate(row.peak_memory_median_bytes, row.peak_memory_log_sigma),
        "time": Estimate(row.step_time_median_s, row.step_time_log_sigma),
    }


def widening_from_row(row: Row[Any]) -> dict[Target, float]:
    """Factors by which the prediction's intervals were widened; empty before schema 3, which had no widening."""
    found: dict[Target, float | None] = {"memory": row.peak_memory_widening, "time": row.step_time_widening}
    return {target: factor for target, factor in found.items() if factor}


def as_ns(time: datetime) -> int:
    """Nanoseconds since 1970, within what a database's integer holds."""
    return max(-(2**63), min((time - _1970) // timedelta(microseconds=1) * 1000, 2**63 - 1))


def _as_time(time_ns: int) -> datetime:
    """Convert to whole microseconds, rounded down, so that a row is found by its own time."""
    return _1970 + timedelta(microseconds=time_ns // 1000)


def _content_hash(data: str) -> str:
    return hashlib.sha256(data.encode()).hexdigest()


def _json(params: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(params), default=str)
    except (TypeError, ValueError, RecursionError):  # a key that is no text, or a circle
        return json.dumps({str(name): repr(value) for name, value in params.items()})


def _plain(value: Any) -> int | float | str | None:
    """``value`` as every database driver takes it: no numpy scalars, no lone surrogates, no NUL."""
    if value is None:
        return None
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    return str(value).encode("utf-8", "replace").decode().replace("\0", "?")
