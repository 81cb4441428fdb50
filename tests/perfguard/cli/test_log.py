"""`perfguard log`: what it prints, what it writes, and what it says when it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perfguard import MeasurementStore
from perfguard.cli import main
from tests.perfguard.store.rows import DEVICE, MEASUREMENT, PREDICTION, make_graph, record


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "log.db"
    with MeasurementStore(path) as store:
        for trial in range(3):
            decision_id = record(store, trial, study="s[1]", graph=make_graph(), device=DEVICE, prediction=PREDICTION)
            store.record_measurement(decision_id, MEASUREMENT)
        record(store, 3, study="other", action="prune")
    monkeypatch.setenv("PERFGUARD_LOG", str(path))
    return path


def run(*words: object) -> int:
    return main(["log", *map(str, words)])


def test_show_prints_the_newest_decisions_and_the_numbers_of_rows(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", "--last", 2) == 0
    out = capsys.readouterr().out
    assert "s[1]" in out
    assert "other" in out
    assert out.count("launch") == 1
    assert "4 decisions, 3 measurements, 1 graphs" in out


def test_show_tells_data_of_one_study(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", "--study", "s[1]", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [decision["trial"] for decision in document["decisions"]] == [0, 1, 2]
    assert document["decisions"][0]["measured_peak_memory_bytes"] == 1100
    assert document["counts"]["decisions"] == 4


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_an_export_is_imported_once(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], format: str) -> None:
    assert run("export", tmp_path / "out", "--format", format, "--anonymize") == 0
    assert "4 decisions, 3 measurements" in capsys.readouterr().out
    for new in (4, 0):
        assert run("import", tmp_path / "out", "--log", tmp_path / "copy.db") == 0
        assert f"{new} decisions" in capsys.readouterr().out
    assert (log.parent / "out" / f"decisions.{format}").exists()


def test_prune_keeps_the_newest(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("prune", "--older-than", "90d") == 0
    assert run("prune", "--keep", 1) == 0
    assert capsys.readouterr().out == "0 decisions removed\n3 decisions removed\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "--log", "nowhere.db"], "There is no measurement log at nowhere.db"),
        (["import", "nowhere"], "nowhere is no complete export"),
        (["prune"], "Say what to remove"),
        (["prune", "--older-than", "long"], "--older-than must look like"),
        (["prune", "--keep", "-1"], "keep_newest must be at least 0"),
    ],
)
def test_what_cannot_be_done_is_said(
    log: Path, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*words) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "nowhere.db").exists()
