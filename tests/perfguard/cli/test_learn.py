"""`perfguard learn`, `perfguard weights` and `perfguard log quarantine`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perfguard import MeasurementStore
from perfguard.cli import main
from tests.perfguard.log_rows import DEVICE, LAUNCHED, MEASUREMENT, make_graph, record


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "log.db"
    MeasurementStore(path).close()
    monkeypatch.setenv("PERFGUARD_LOG", str(path))
    return path


def test_without_anything_new_it_says_so(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["learn"]) == 0
    assert "Nothing to learn: fewer than 20 new runs" in capsys.readouterr().out
    assert main(["weights", "list"]) == 0
    assert "the shipped ones are in use" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["learn", "--log", "nowhere.db"], "There is no measurement log at nowhere.db"),
        (["learn", "--predictor", "oracle"], "No predictor is called 'oracle'"),
        (["learn", "--predictor", "trees"], "'trees' cannot be fine-tuned"),
        (["weights", "rollback"], "the shipped ones are"),
    ],
)
def test_a_wrong_word_is_told_in_a_line(log: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(words) == (1 if "shipped" in message or "oracle" in message else 2)
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_weights_are_listed_and_rolled_back(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MeasurementStore(log) as store:
        store.promote("guardnet-1", b"1", {"recent time after": 0.1})
    assert main(["weights", "list", "--json"]) == 0
    (generation,) = json.loads(capsys.readouterr().out)
    assert (generation["state"], generation["metrics"]) == ("promoted", {"recent time after": 0.1})
    assert main(["weights", "list"]) == 0
    assert generation["weights_id"][:12] in capsys.readouterr().out
    assert main(["weights", "rollback"]) == 0
    assert "the shipped weights are in use again" in capsys.readouterr().out


def test_quarantine_lists_what_is_not_believed(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MeasurementStore(log) as store:
        readings: list[dict[str, Any]] = [{}, {"step_time_s": float("nan")}, {"total_time_s": float("inf")}]
        for changes in readings:
            decision_id = record(store, verdict=LAUNCHED, graph=make_graph(), device=DEVICE)
            store.record_measurement(decision_id, replace(MEASUREMENT, **changes))
    assert main(["log", "quarantine"]) == 0
    out = capsys.readouterr().out
    assert "step_time_s was nan" in out
    assert "the time of the trial is nan s" in out
    assert "2 readings are quarantined" in out
    assert main(["log", "quarantine", "--json"]) == 0
    row, _ = json.loads(capsys.readouterr().out)
    assert (row["device"], row["reading"]) == ("toy", "time")
