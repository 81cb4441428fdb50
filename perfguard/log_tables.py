"""Tables of the measurement log, and the conversion of PerfGuard's types to rows and back.

    meta           "format" of the log
    graphs         one OpGraph each. Equal graphs are stored once.
    devices        one Device each, as JSON, also stored once.
    decisions      one verdict on one trial, with the columns of perfguard.record
    measurements   the measured cost of that trial. Each decision has at most one.
    weights        one generation of a predictor's fine-tuned weights

There are no foreign keys, because a row that was delayed may arrive after the rows that refer to it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timedelta, timezone
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from sqlalchemy import BigInteger, Double, Index, LargeBinary, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from perfguard.devices import Device
from perfguard.measure import NOT_A_NUMBER, Measurement
from perfguard.physics import least_exceeding
from perfguard.predictor import Observation, Target
from perfguard.record import QUANTITIES, VERDICT_COLUMNS, TrialRecord, breaks, columns_of, measured_by, numbers_in, verdict_from
from perfguard.risk_budget import EndedTrial, RunningTrial, shows

if TYPE_CHECKING:
    from perfguard.graph import OpGraph
    from perfguard.quantities import Quantity
    from perfguard.verdict import Verdict

LOG_FORMAT = "3"
_1970 = datetime(1970, 1, 1, tzinfo=timezone.utc)


class Base(DeclarativeBase):
    """Base of the tables. The types are those that SQLite and PostgreSQL both have."""

    type_annotation_map: ClassVar[dict[Any, Any]] = {str: Text, int: BigInteger, float: Double, bytes: LargeBinary}


class MetaRow(Base):
    """A property of the log itself."""

    __tablename__ = "meta"
    key: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str | None]


class GraphRow(Base):
    """A graph, as :meth:`OpGraph.to_bytes` writes it."""

    __tablename__ = "graphs"
    content_hash: Mapped[str] = mapped_column(primary_key=True)
    data: Mapped[bytes]


class DeviceRow(Base):
    """A device. Its key is the hash of what identifies it, so the rates of a CPU stay as its first process measured them."""

    __tablename__ = "devices"
    content_hash: Mapped[str] = mapped_column(primary_key=True)
    device_id: Mapped[str]
    data: Mapped[str]


class DecisionRow(Base):
    """A verdict on a trial. The other columns of :data:`perfguard.record.VERDICT_COLUMNS` are added below."""

    __tablename__ = "decisions"
    decision_id: Mapped[str] = mapped_column(primary_key=True)
    created_at_ns: Mapped[int] = mapped_column(index=True)
    study: Mapped[str] = mapped_column(index=True)
    trial: Mapped[int | None]
    trial_id: Mapped[str | None]
    host: Mapped[str | None]
    params: Mapped[str]
    graph_hash: Mapped[str | None]
    device_hash: Mapped[str | None]
    verdict: Mapped[str]
    predictor: Mapped[str | None]


class MeasurementRow(Base):
    """What a trial cost. The other fields of :class:`perfguard.measure.Measurement` are added below."""

    __tablename__ = "measurements"
    __table_args__ = (Index("ix_measurements_device_id_recorded_at_ns", "device_id", "recorded_at_ns"),)
    decision_id: Mapped[str] = mapped_column(primary_key=True)
    recorded_at_ns: Mapped[int]
    set_aside: Mapped[str | None]
    status: Mapped[str]
    device_id: Mapped[str]
    host: Mapped[str | None]


class WeightsRow(Base):
    """A generation of weights. The newest one of a predictor that was not rolled back is in use."""

    __tablename__ = "weights"
    weights_id: Mapped[str] = mapped_column(primary_key=True)
    predictor: Mapped[str] = mapped_column(index=True)
    created_at_ns: Mapped[int]
    sha256: Mapped[str]
    metrics: Mapped[str]
    rolled_back_at_ns: Mapped[int | None]
    data: Mapped[bytes]


def _add_columns(row: type[Base], kinds: Mapping[str, Any]) -> None:
    for name, kind in kinds.items():
        if not hasattr(row, name):
            setattr(row, name, mapped_column(kind))


_MEASUREMENT_FIELDS = tuple(field.name for field in fields(Measurement))
_add_columns(DecisionRow, {name: {str: Text, float: Double}[kind] for name, kind in VERDICT_COLUMNS.items()})
_add_columns(
    MeasurementRow,
    {  # annotations are texts here, for instance "int | None"; all that is no number is a text
        field.name: {"int": BigInteger, "float": Double}.get(str(field.type).partition(" ")[0], Text)
        for field in fields(Measurement)
    },
)


class Row(NamedTuple):
    """One row on its way to its table: None, int, float and str, and in a graph's "data" the graph itself, or bytes."""

    table: str
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LoggedWeights:
    """One generation of a predictor's fine-tuned weights."""

    weights_id: str
    predictor: str
    created_at: datetime
    """Time in UTC."""
    sha256: str
    """SHA-256 of the weights' bytes, hexadecimal."""
    metrics: Mapping[str, Any]
    """What it was judged by."""
    state: Literal["promoted", "superseded", "rolled back"]
    """Only one generation of a predictor is "promoted": the one in use."""
    state_changed_at: datetime
    """When it was promoted, or rolled back."""


def graph_row(graph: OpGraph) -> Row:
    """Return the row of a graph. Its bytes are made when they are written, because most graphs are there already."""
    return Row("graphs", {"content_hash": graph.content_hash, "data": graph})


def device_row(device: Device) -> Row:
    """Return the row of a device."""
    key = hashlib.sha256(json.dumps(dict(device.identity), sort_keys=True).encode()).hexdigest()
    data = json.dumps(asdict(device), sort_keys=True)
    return Row("devices", {"content_hash": key, "device_id": device.id, "data": data})


def decision_row(verdict: Verdict, params: Mapping[str, object], **values: object) -> Row:
    """Return the row of a verdict."""
    values |= {"params": as_json(params)} | dict.fromkeys(VERDICT_COLUMNS) | columns_of(verdict)
    return Row("decisions", {name: _plain(value) for name, value in values.items()})


def measurement_row(measurement: Measurement, **values: object) -> Row:
    """Return the row of a measurement. What is no number goes into the note, in words."""
    values |= asdict(measurement)
    strange = {name: value for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    notes = [measurement.note, *(NOT_A_NUMBER.format(name, value) for name, value in strange.items())]
    values["note"] = "; ".join(filter(None, notes))
    return Row("measurements", {name: _plain(value) for name, value in values.items()})


WHOLE_TRIAL = 0.5
"""Share of its predicted time, at the predicted pace, below which a trial was stopped early. The time holds more than steps: how
much more is learnt, so nearer to 1 a whole trial would count as stopped."""


def record_of(decision: DecisionRow, run: MeasurementRow | None, device_row: DeviceRow | None) -> TrialRecord:
    """Return the record of a trial. A row that no PerfGuard writes is a ValueError, a KeyError or a TypeError."""
    device = None if device_row is None else device_from_json(device_row.data)
    where: dict[str, Any] = {}
    if device is not None:
        where = {"device_id": device.id, "device_name": device.name, "capacity_bytes": device.memory_bytes}
    decided = TrialRecord(
        number=decision.trial,
        verdict=verdict_from(_columns_in(decision)),
        params=json.loads(decision.params),
        study=decision.study,
        trial_id=decision.trial_id,
        decision_id=decision.decision_id,
        created_at=as_time(decision.created_at_ns),
        host=decision.host,
        predictor=decision.predictor or "",
        **where,
    )
    if run is None:
        return decided
    measurement = measurement_of(run)
    predicted = decided.predicted
    time = predicted.get("time")
    step_time = predicted.get("step_time")
    stopped_early = bool(measurement.cut_short)
    if measurement.has_result and time is not None and step_time is not None:
        stopped_early = measurement.num_steps < WHOLE_TRIAL * time.median / step_time.median
    return replace(
        decided,
        measured=measured_by(measurement, predicted) if device is None or measurement.is_of(device) else {},
        status=measurement.status,
        not_measured=_why_not_measured(run, measurement, device),
        note=measurement.note,
        cut_short=measurement.cut_short,
        set_aside=run.set_aside or "",
        host=run.host or decision.host,
        stopped_early=stopped_early,
        first_step_s=measurement.first_step_s,
    )


def _why_not_measured(run: MeasurementRow, measurement: Measurement, device: Device | None) -> str:
    """The reason why a finished trial says nothing of the guarded device. Empty: it does, or it did not come to its end."""
    if measurement.status not in ("ok", "oom", "timeout"):
        return ""
    if run.set_aside:
        return run.set_aside
    if device is not None and not measurement.is_of(device):
        return f"their workers used no {device.name}; they ran on {measurement.device_name or 'another device'}"
    is_silent = measurement.peak_memory_bytes is None and measurement.step_time_s is None
    return "they did not report what they cost" if is_silent and measurement.status == "ok" else ""


def measurement_of(run: MeasurementRow) -> Measurement:
    """Return the measurement that a row holds. A total time that was no number is NaN again."""
    known = {name: getattr(run, name) for name in _MEASUREMENT_FIELDS}
    return Measurement(**known | {"total_time_s": math.nan if known["total_time_s"] is None else known["total_time_s"]})


def observation_of(run: MeasurementRow, decision: DecisionRow, graph: OpGraph, device: Device) -> Observation:
    """Return what a predictor learns from a run: what was measured, and what had been predicted, as far as it could be."""
    columns = _columns_in(decision)
    predicted, _ = numbers_in(columns)
    names: dict[Target, Quantity] = {"memory": "memory", "time": "step_time"}
    widening = {target: columns[f"{name}_widening"] for target, name in names.items()}
    step_time = predicted.get("step_time")
    epoch_time = predicted.get("epoch_time")
    return Observation(
        graph,
        device,
        measurement_of(run),
        {target: predicted[name] for target, name in names.items() if name in predicted},
        {target: factor for target, factor in widening.items() if factor is not None},
        predicted_by=decision.predictor or "",
        decision_id=decision.decision_id,
        recorded_at_ns=run.recorded_at_ns,
        study=decision.study,
        steps_per_epoch=epoch_time.median / step_time.median if step_time and epoch_time else None,
    )


def ended_trial_of(run: MeasurementRow, decision: DecisionRow, *, usual_bytes: float | None) -> EndedTrial:
    """Return what the account of risk needs of a launched trial that has ended on the guarded device.

    A trial that has its result exceeded no limit of memory for sure if its reading is over it by no more than equal readings
    scatter.

    Args:
        run: its measurement.
        decision: the verdict on it.
        usual_bytes: the median reading of its step, which counts instead of its own. None: there is none.
    """
    predicted, limits = numbers_in(_columns_in(decision))
    measurement = measurement_of(run)
    measured = measured_by(measurement, predicted)
    if usual_bytes is not None:
        measured["memory"] = usual_bytes
    most = {limit.quantity: limit.limit for limit in limits}
    if measurement.has_result and "memory" in most:
        most["memory"] = least_exceeding(most["memory"], "cpu" if run.device_id == "cpu" else "cuda")
    exceeded = [name for name in QUANTITIES if breaks(name, measurement.status, measured, most.get(name))]
    if measurement.cut_short == "too slow":
        exceeded = ["time"]
    return EndedTrial(
        total_s=measurement.total_time_s if math.isfinite(measurement.total_time_s) else 0.0,
        exceeded=shows(exceeded[0], phase=decision.phase or "") if exceeded else None,  # type: ignore[attr-defined]
        first_step_s=measurement.first_step_s,
        has_result=measurement.has_result,
    )


def running_trial_of(decision: DecisionRow, *, now_ns: int) -> RunningTrial | None:
    """Return a doubtful trial that was launched and has not ended. None: there was no limit that decided."""
    verdict = verdict_from(_columns_in(decision))
    if verdict is None or verdict.worst is None:
        return None
    return RunningTrial(
        chance=verdict.p_violation,
        shows=shows(verdict.worst.quantity, phase=verdict.phase),
        age_s=1e-9 * (now_ns - decision.created_at_ns),
    )


def _columns_in(decision: DecisionRow) -> dict[str, Any]:
    return {name: getattr(decision, name) for name in VERDICT_COLUMNS}


def device_from_json(data: str) -> Device:
    """Return the device that :func:`device_row` wrote."""
    document = json.loads(data)
    return Device(**{field.name: document[field.name] for field in fields(Device)})


def as_ns(time: datetime) -> int:
    """Return nanoseconds since 1970, within what a database's integer holds."""
    return max(-(2**63), min((time - _1970) // timedelta(microseconds=1) * 1000, 2**63 - 1))


def as_time(time_ns: int) -> datetime:
    """Return whole microseconds, rounded down, so that a row is found by its own time."""
    return _1970 + timedelta(microseconds=time_ns // 1000)


def as_json(params: Mapping[str, object]) -> str:
    """Return ``params`` as JSON. A value that JSON does not know is written as text."""
    try:
        return json.dumps(dict(params), default=str)
    except (TypeError, ValueError, RecursionError):  # a key that is no text, or a circle
        return json.dumps({str(name): repr(value) for name, value in params.items()})


def _plain(value: object) -> int | float | str | None:
    """``value`` as every driver takes it: no numpy scalars, no lone surrogates, no NUL, no NaN, no integer of over 64 bits."""
    if value is None:
        return None
    if isinstance(value, Integral):
        return int(value) if -(2**63) <= int(value) < 2**63 else None
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    return str(value).encode("utf-8", "replace").decode().replace("\0", "?")
