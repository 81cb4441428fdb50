"""Rows that several tests of the log write, and logs as older versions made them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    Index,
    LargeBinary,
    MetaData,
    Table,
    Text,
    create_engine,
    insert,
)
from torch import nn

from perfguard import Device, Estimate, Measurement, MeasurementStore, OpGraph, Prediction, TensorSpec, Workload, trace

DEVICE = Device(
    id="toy",
    name="Toy",
    kind="cuda",
    memory_bytes=2**30,
    bandwidth_bytes_per_s=1e11,
    peak_flops={"fp32": 1e12, "fp16": 4e12},
    num_sms=8,
    boost_clock_hz=1e9,
    l2_bytes=2**20,
    tdp_w=50.0,
    architecture="toy",
    context_bytes=2**28,
    launch_overhead_s=5e-6,
    source="made up",
)
CPU = replace(DEVICE, id="cpu", name="A processor", kind="cpu", context_bytes=0, source="measured on this machine")
PREDICTION = Prediction(
    peak_memory=Estimate(1000.0, 0.1),
    step_time=Estimate(0.25, 0.2),
    total_time=Estimate(25.0, 0.2),
    predictor="double-1",
    device_id="toy",
    trained_on_device=True,
)
MEASUREMENT = Measurement(
    status="ok",
    device_id="toy",
    device_name="Toy",
    peak_memory_bytes=1100,
    step_time_s=0.3,
    total_time_s=30.0,
    num_steps=100,
    method="nvml-process+allocator",
    framework="torch",
    note="a note",
    allocated_peak_bytes=600,
    reserved_peak_bytes=700,
    sm_utilisation=0.5,
    energy_j=12.5,
    sm_clock_hz=1.4e9,
    throttled="",
    data_wait_s=0.01,
    oom_retries=0,
    driver="550.54",
    confidence="high",
    host="node-7",
)


def make_graph(width: int = 8) -> OpGraph:
    """A perceptron's step."""
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))
    return trace(Workload(model, (4, 8), TensorSpec((4,), "int64"), nn.functional.cross_entropy))


def record(store: MeasurementStore, trial: int | None = 0, **changes: Any) -> str:
    """A decision that differs from the plainest one by ``changes``."""
    arguments: dict[str, Any] = {
        "study": "s",
        "trial": trial,
        "graph": None,
        "device": None,
        "action": "launch",
        "reason": "fits",
        "prediction": None,
        "params": {},
    }
    return store.record_decision(**(arguments | changes))


_first = MetaData()
"""Schema 1, of the first commit; a copy that stays as it is."""
Table("meta", _first, Column("key", Text, primary_key=True), Column("value", Text))
Table("graphs", _first, Column("content_hash", Text, primary_key=True), Column("data", LargeBinary))
Table("devices", _first, Column("content_hash", Text, primary_key=True), Column("device_id", Text), Column("data", Text))
Table(
    "decisions",
    _first,
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
)
Table(
    "measurements",
    _first,
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
    Index("ix_measurements_device_id_recorded_at_ns", "device_id", "recorded_at_ns"),
)


def make_log_of_schema_1(url: str, graph: OpGraph, num_rows: int) -> None:
    """A log as the first PerfGuard wrote it: ``num_rows`` decisions, and a measurement for each but the last."""
    engine = create_engine(url)
    device = {
        "content_hash": "d" * 64,
        "device_id": "toy",
        "data": json.dumps({name: getattr(DEVICE, name) for name in DEVICE.__slots__}),
    }
    decisions = [
        {"decision_id": f"{trial:032x}", "created_at_ns": 10**18 + trial, "study": "old", "trial": trial, "action": "launch"}
        | {"reason": "fits", "params": '{"lr": 0.1}', "graph_hash": graph.content_hash, "device_hash": "d" * 64}
        for trial in range(num_rows)
    ]
    measurements = [
        {
            "decision_id": f"{trial:032x}",
            "recorded_at_ns": 10**18 + trial,
            "status": "ok",
            "device_id": "toy",
            "device_name": "Toy",
        }
        | {"peak_memory_bytes": 1000 + trial, "step_time_s": 0.5, "total_time_s": 5.0, "num_steps": 10, "method": "vmhwm"}
        | {"framework": "torch", "note": "old"}
        for trial in range(num_rows - 1)
    ]
    with engine.begin() as connection:
        _first.create_all(connection)
        tables = _first.tables
        connection.execute(insert(tables["meta"]), {"key": "schema_version", "value": "1"})
        connection.execute(insert(tables["graphs"]), {"content_hash": graph.content_hash, "data": graph.to_bytes()})
        connection.execute(insert(tables["devices"]), device)
        connection.execute(insert(tables["decisions"]), decisions)
        connection.execute(insert(tables["measurements"]), measurements)
    engine.dispose()


def make_spool_of_schema_1(log: Path) -> Path:
    """A spool as the first PerfGuard left it beside its log."""
    row = {"decision_id": "f" * 32, "created_at_ns": 2 * 10**18, "study": "old", "trial": 99, "action": "prune", "params": "{}"}
    path = log.with_name(f"{log.name}.{'a' * 32}.spool.jsonl")
    path.write_text(json.dumps({"schema": 1, "table": "decisions", "row": row}) + "\n")
    return path


_added_by_2 = MetaData()
"""What schema 2 brought beside columns; a copy that stays as it is."""
Table(
    "weights",
    _added_by_2,
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


def make_log_of_schema_2(url: str, graph: OpGraph, num_rows: int) -> None:
    """A log of the first PerfGuard after the second one opened it."""
    make_log_of_schema_1(url, graph, num_rows)
    engine = create_engine(url)
    columns = dict.fromkeys(("allocated_peak_bytes", "reserved_peak_bytes", "oom_retries"), "BIGINT")
    columns |= dict.fromkeys(("sm_utilisation", "energy_j", "sm_clock_hz", "data_wait_s"), Double().compile(engine.dialect))
    columns |= dict.fromkeys(("throttled", "driver", "confidence"), "TEXT")
    with engine.begin() as connection:
        for name, kind in columns.items():
            connection.exec_driver_sql(f"ALTER TABLE measurements ADD COLUMN {name} {kind}")
        index = "CREATE INDEX ix_measurements_device_id_decision_id ON measurements (device_id, decision_id)"
        connection.exec_driver_sql(index)
        _added_by_2.create_all(connection)
        connection.exec_driver_sql("UPDATE meta SET value = '2' WHERE key = 'schema_version'")
    engine.dispose()


def make_log_of_schema_3(url: str, graph: OpGraph, num_rows: int) -> None:
    """A log as the PerfGuard before schema 4 left it."""
    make_log_of_schema_2(url, graph, num_rows)
    engine = create_engine(url)
    double = Double().compile(engine.dialect)
    with engine.begin() as connection:
        for name in ("peak_memory_widening", "step_time_widening"):
            connection.exec_driver_sql(f"ALTER TABLE decisions ADD COLUMN {name} {double}")
        connection.exec_driver_sql(
            "CREATE TABLE leases (name TEXT NOT NULL, holder TEXT, expires_at_ns BIGINT, PRIMARY KEY (name))"
        )
        connection.exec_driver_sql("UPDATE meta SET value = '3' WHERE key = 'schema_version'")
    engine.dispose()


LOGS_OF_OLD = {1: make_log_of_schema_1, 2: make_log_of_schema_2, 3: make_log_of_schema_3}
"""Every schema that a released PerfGuard wrote, and how to make such a log."""
