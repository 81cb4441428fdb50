"""A run whose driver is stopped, by Ctrl-C or by kill -9, is resumed without loss: real processes, real signals."""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from perfguard import MeasurementStore
from perfguard.record import TrialRecord
from tests import warm

pytest.importorskip("ray")
PATIENCE_S = 900.0
"""Starting Ray's processes takes seconds, or minutes on a crowded machine."""
SCRIPT = Path(__file__).with_name("ray_interrupted.py")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SCRIPT.parents[2]), *filter(None, sys.path)]))  # of Ray's workers
    monkeypatch.setenv("TUNE_GLOBAL_CHECKPOINT_S", "1")
    monkeypatch.setenv("COLUMNS", "120")


def begin(what: str, folder: Path) -> BaseProcess:
    return warm.begin(str(SCRIPT), what, str(folder), cwd=folder, printed=folder / what)


def console_of(process: BaseProcess, what: str, folder: Path) -> str:
    """What it printed until it ended."""
    process.join(PATIENCE_S)
    assert process.exitcode is not None, "it did not end in time"
    return (folder / what).read_text()


def wait_for(names: list[str], folder: Path, process: BaseProcess, *, timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not all((folder / name).exists() for name in names):
        assert process.is_alive(), (folder / "start").read_text()
        assert time.monotonic() < deadline, "the trials did not start in time"
        time.sleep(0.1)


def rows_of(folder: Path) -> dict[int, TrialRecord]:
    with MeasurementStore(folder / "log.db") as log:
        rows = log.records("run")
    assert len(rows) == len({row.params["width"] for row in rows}), "a configuration has one row"
    return {row.params["width"]: row for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["SIGINT", "SIGKILL"])
def test_interrupted_run_is_resumed_into_the_same_rows(ending: str, tmp_path: Path) -> None:
    """Trials that Ctrl-C had cut off were logged as ok with no steps, and what they cost after Tuner.restore was thrown away."""
    process = begin("start", tmp_path)
    wait_for(["half-8", "half-16"], tmp_path, process)
    time.sleep(3)  # Tune saves its state each second
    assert process.pid is not None
    os.kill(process.pid, signal.Signals[ending])
    console = console_of(process, "start", tmp_path)
    assert "measure()" not in console, "it was there"
    assert "PerfGuard rejected width=4096" in console
    before = rows_of(tmp_path)
    expected = "interrupted" if ending == "SIGINT" else None
    assert {width: row.status for width, row in before.items()} == {8: expected, 4096: None, 16: expected, 24: None}
    if ending == "SIGINT":
        assert "interrupted" in console, "the account at the end"
        assert "memory" in before[8].measured, "what it had reported is kept"

    (tmp_path / "go").touch()
    process = begin("resume", tmp_path)
    console = console_of(process, "resume", tmp_path)
    assert process.exitcode == 0, console
    after = rows_of(tmp_path)
    assert {width: row.status for width, row in after.items()} == {8: "ok", 4096: None, 16: "ok", 24: "ok"}
    assert {width: row.decision_id for width, row in after.items()} == {width: row.decision_id for width, row in before.items()}
    results = dict(line.split()[1:4:2] for line in console.splitlines() if line.startswith("result "))
    assert {str(width): row.trial_id for width, row in after.items() if not row.is_pruned} == results
    assert all("step_time" in after[width].measured for width in (8, 16, 24))
    steps = {line.split()[2] for line in console.splitlines() if line.startswith("result ")}
    assert steps == {"12"}, "a trial that begins anew is measured once"
    assert "0 of 3" in console, "the account at the end is of the whole run"
    assert "measure()" not in console
