"""`perfguard learn`, `perfguard weights` and `perfguard log quarantine`, in processes of their own where that matters."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.perfguard.learning.test_trainer import by_width, fill

from perfguard import MeasurementStore
from perfguard.cli import main
from tests.perfguard.log_rows import DEVICE, MEASUREMENT, PREDICTION, make_graph, record


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "log.db"
    MeasurementStore(path).close()
    monkeypatch.setenv("PERFGUARD_LOG", str(path))
    return path


def learner(log: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "perfguard.cli", "learn", "--watch", "--every", "200ms", "--min-new", "20"]
    environment = os.environ | {"PERFGUARD_LOG": str(log), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline()


def end(child: subprocess.Popen[str], how: int) -> int:
    os.kill(child.pid, how)
    code = child.wait(60)
    assert child.stdout is not None
    child.stdout.close()
    return code


def test_without_anything_new_it_says_so(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["learn", "--once"]) == 0
    assert "Nothing to learn: fewer than 20 new runs" in capsys.readouterr().out
    assert main(["weights", "list"]) == 0
    assert "the shipped ones are in use" in capsys.readouterr().out


def test_while_another_learns_it_does_nothing(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MeasurementStore(log) as store:
        store.lease(LEASE, "another", seconds=60)
    assert main(["learn"]) == 0
    assert "Another learner is at work" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["learn", "--log", "nowhere.db"], "There is no measurement log at nowhere.db"),
        (["learn", "--predictor", "oracle"], "No predictor is called 'oracle'"),
        (["learn", "--predictor", "trees"], "'trees' cannot be fine-tuned"),
        (["learn", "--every", "soon"], "--every"),
        (["weights", "rollback"], "In use: none: the shipped weights are"),
        (["weights", "rollback", "abc"], "Say which generation"),
    ],
)
def test_a_wrong_word_is_told_in_a_line(log: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(words) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_learn_service_replaces_killed_learner(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A service learns what comes in, and another takes the place of a killed one."""
    first = learner(log)
    assert "Watching" in line(first)
    second = learner(log)
    assert "Another learner is at work; waiting" in line(second)
    assert end(first, signal.SIGKILL) != 0
    with MeasurementStore(log) as store:
        store.lease(LEASE, "x", seconds=0)  # refused: the dead one's lease still runs
        fill(store, by_width)
        holder = next(row for row in store.rows("leases"))["holder"]
        store.release(LEASE, holder)  # as its end, after two minutes, would
    texts = [line(second)]
    while "promoted" not in texts[-1]:
        assert texts[-1]
        texts.append(line(second))
    assert end(second, signal.SIGTERM) == 130
    with MeasurementStore(log) as store:
        assert list(store.rows("leases")) == []  # given back
    capsys.readouterr()
    assert main(["weights", "list", "--json"]) == 0
    (generation,) = json.loads(capsys.readouterr().out)
    assert generation["state"] == "promoted"
    assert main(["weights", "list"]) == 0
    assert "time" in (out := capsys.readouterr().out)
    assert generation["weights_id"][:12] in out
    assert main(["weights", "rollback", generation["weights_id"][:8]]) == 0
    assert "the shipped weights are in use again" in capsys.readouterr().out


@pytest.mark.slow
def test_a_service_waits_while_the_database_is_away(postgres_url: str) -> None:
    away = postgres_url.replace("port=", "port=1")
    command = [sys.executable, "-m", "perfguard.cli", "learn", "--watch", "--every", "200ms", "--log", away]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert "cannot be used now" in line(child)
    time.sleep(0.5)
    assert child.poll() is None
    end(child, signal.SIGTERM)


def test_quarantine_lists_what_is_not_believed(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MeasurementStore(log) as store:
        readings: list[dict[str, Any]] = [{}, {"step_time_s": float("nan")}, {"total_time_s": float("inf")}]
        for changes in readings:
            decision_id = record(store, graph=make_graph(), device=DEVICE, prediction=PREDICTION)
            store.record_measurement(decision_id, replace(MEASUREMENT, **changes))
    assert main(["log", "quarantine"]) == 0
    out = capsys.readouterr().out
    assert "step_time_s was nan" in out
    assert "the time of the trial is nan s" in out
    assert "2 readings are quarantined" in out
    assert main(["log", "quarantine", "--json"]) == 0
    row, _ = json.loads(capsys.readouterr().out)
    assert (row["device"], row["reading"]) == ("toy", "time")
