"""Rows that several tests of the log write."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from perfguard import Estimate, Measurement, MeasurementStore, OpGraph, Prediction, TensorSpec, Workload, trace
from perfguard.budget import Limit
from perfguard.verdict import Verdict
from tests.doubles import TOY_GPU

DEVICE = replace(TOY_GPU, context_bytes=2**28)
CPU = replace(DEVICE, id="cpu", name="A processor", kind="cpu", context_bytes=0, source="measured on this machine")
PREDICTION = Prediction(Estimate(1000.0, 0.1), Estimate(0.25, 0.2), Estimate(25.0, 0.2), "double-1", "toy", True)
LIMITS = (Limit("memory", 2000.0, PREDICTION.peak_memory), Limit("step_time", 1.0, PREDICTION.step_time))
LAUNCHED = Verdict.of(PREDICTION, LIMITS, accepted=0.05)
PRUNED = Verdict.of(PREDICTION, [Limit("memory", 500.0, PREDICTION.peak_memory)], accepted=0.05)
UNJUDGED = Verdict(action="launch", unjudged="a test")
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
    energy_j=12.5,
    driver="550.54",
    host="node-7",
)


def make_graph(width: int = 8) -> OpGraph:
    """A perceptron's step."""
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))
    return trace(Workload(model, (4, 8), TensorSpec((4,), "int64"), nn.functional.cross_entropy))


def record(store: MeasurementStore, trial: int | None = 0, verdict: Verdict = UNJUDGED, **changes: Any) -> str:
    """Log a decision that differs from the plainest one by ``changes``."""
    arguments: dict[str, Any] = {"study": "s", "graph": None, "device": None, "params": {}}
    return store.record_decision(verdict, trial=trial, **(arguments | changes))


def trials(path: Path) -> list[int | None]:
    """The numbers of the trials in the log."""
    with MeasurementStore(path) as store:
        return [trial.number for trial in store.records()]


def beside(folder: Path) -> list[Path]:
    """The files of rows that wait beside a log."""
    return list(folder.glob("*.rows.jsonl"))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another program holds the log."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        yield
        connection.execute("ROLLBACK")
