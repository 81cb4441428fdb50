"""`perfguard learn`, `perfguard weights` and `perfguard log quarantine`, in processes of their own where that matters."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perfguard import MeasurementStore
from perfguard.cli import main
from tests.perfguard.learning.test_trainer import by_width, fill
from tests.perfguard.store.rows import DEVICE, MEASUREMENT, PREDICTION, make_graph, record

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "log.db"
    MeasurementStore(path).close()
    monkeypatch.setenv("PERFGUARD_LOG", str(path))
    return path


@pytest.fixture
def start() -> Iterator[Start]:
    """Start `perfguard learn --watch` with further words. A failed test leaves no learner behind."""
    children: list[subprocess.Popen[str]] = []

    def started(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "perfguard.cli", "learn", "--watch", "--every", "200ms", *words]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        children.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return children[-1]

    yield started
    for child in children:
        if child.poll() is None:
            end(child, signal.SIGKILL)


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
    assert main(words) == (1 if "No predictor" in message or words[0] == "weights" else 2)
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_learn_service_promotes_and_weights_rollback_goes_back(
    log: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    with MeasurementStore(log) as store:
        fill(store, by_width)  # before it starts, or it would learn from the first twenty alone
    child = start("--min-new", "20")
    assert "promoted" in line(child)
    assert "Watching" in line(child)
    assert end(child, signal.SIGTERM) == 130
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
def test_a_service_waits_while_the_database_is_away(postgres_url: str, start: Start) -> None:
    away = postgres_url.replace("port=", "port=1")
    child = start("--log", away)
    texts = [line(child)]
    while "Watching" not in texts[-1]:
        assert texts[-1]
        texts.append(line(child))
    assert "cannot be used now" in "".join(texts)
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
