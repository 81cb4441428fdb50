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


def rows_of(folder: Path) -> dict[int, TrialRecord]:
    with MeasurementStore(folder / "log.db") as log:
        rows = log.records("run")
    assert len(rows) == len({row.params["width"] for row in rows}), "a configuration has one row"
    return {row.params["width"]: row for row in rows}


def end(process: BaseProcess, what: str, folder: Path, number: signal.Signals) -> str:
    """Ends the run in the middle of its first two trials. Returns what it printed."""
    halves = [folder / f"half-{width}" for width in (8, 16)]
    deadline = time.monotonic() + PATIENCE_S
    while not all(half.exists() for half in halves):
        assert process.is_alive(), (folder / what).read_text()
        assert time.monotonic() < deadline, "the trials did not start in time"
        time.sleep(0.1)
    time.sleep(2)  # Tune saves its state each second
    assert process.pid is not None
    os.kill(process.pid, number)
    for half in halves:
        half.unlink()
    return console_of(process, what, folder)


@pytest.mark.slow
def test_run_that_is_interrupted_and_then_killed_is_resumed_into_the_same_rows(tmp_path: Path) -> None:
    """Trials that Ctrl-C had cut off were logged as ok with no steps, and what they cost after Tuner.restore was thrown away."""
    console = end(begin("start", tmp_path), "start", tmp_path, signal.SIGINT)
    assert "measure()" not in console, "it was there"
    assert "PerfGuard rejected width=4096" in console
    before = rows_of(tmp_path)
    assert {width: row.status for width, row in before.items()} == {8: "interrupted", 4096: None, 16: "interrupted", 24: None}
    assert "interrupted" in console, "the account at the end"
    assert "memory" in before[8].measured, "what it had reported is kept"

    end(begin("resume", tmp_path), "resume", tmp_path, signal.SIGKILL)
    assert not {row.status for row in rows_of(tmp_path).values()} & {"ok", "failed"}

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
    assert "of 3 measured trials" in console, "the account at the end is of the whole run"
    assert "measure()" not in console
