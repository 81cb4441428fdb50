"""`perfguard explain` and `--explain` print the number that a trial got, and no other."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from perfguard import Guard, Workload
from perfguard.cli import main
from perfguard.measure import Measurement
from perfguard.verdict import Decision
from tests.perfguard.log_rows import UNJUDGED

SCRIPT = """
from torch import nn
from perfguard import Workload

def build(params):
    return Workload(nn.Linear(64, params["width"]), inputs=(4, 64), loss=lambda output: output.mean(), steps=100)
"""


@pytest.fixture
def log(tmp_path: Path) -> str:
    return str(tmp_path / "log.db")


def workload(width: int) -> Workload:
    return Workload(nn.Linear(64, width), inputs=(4, 64), loss=lambda output: output.mean(), steps=100)


def run_study(log: str, study: str = "s") -> list[Decision]:
    """Four trials that take twice what is predicted, and a fifth that has not ended."""
    guard = Guard("t4", log=log, memory_budget="8GiB")
    decisions = []
    for number in range(5):
        decisions.append(guard.decide(workload(32 * (number + 1)), study=study, trial=number, params={"width": number}))
        predicted = decisions[-1].verdict.predicted
        step_s, num_bytes = 2 * predicted["step_time"].median, int(1.5 * predicted["memory"].median)
        measured = Measurement("ok", guard.device.id, guard.device.name, num_bytes, step_s, 110 * step_s, 100, "double", "torch")
        if number < 4:
            guard.learn(decisions[-1], measured)
    guard.log.close()
    return decisions


def explain(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["explain", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_account_ends_with_the_number_that_the_trial_got(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    decisions = run_study(log)
    for number in (0, 3, 4):
        document = explain(capsys, str(number), log)
        predicted = decisions[number].verdict.predicted
        for quantity in ("memory", "step_time", "time"):
            lines, estimate = document["account"][quantity], predicted[quantity]
            assert lines[-1]["median"] == pytest.approx(estimate.median, rel=1e-6)
            assert (lines[-1]["low"], lines[-1]["high"]) == pytest.approx(estimate.interval(), rel=1e-3)
            factors = math.prod(line["factor"] for line in lines)
            assert lines[0]["median"] * factors == pytest.approx(estimate.median, rel=1e-3)
    names = [line["name"] for line in document["account"]["step_time"]]
    assert "this device's runs" in names, "the fifth trial has learnt"
    assert document["limits"] == {"memory": 8 * 2**30}


def test_people_get_a_table_and_a_picture(log: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly")
    run_study(log)
    page = tmp_path / "new" / "account.html"
    assert main(["explain", "2", log, "--plot", str(page)]) == 0
    text = capsys.readouterr().out
    for expected in (
        "trial 2 of s",
        "account of the peak memory",
        "physics",
        "network",
        "measured",
        "docs/howto/wrong-number.md",
    ):
        assert expected in text
    assert "How the predicted" in page.read_text(encoding="utf-8")
    assert main(["explain", "2", log, "--quantity", "memory"]) == 0
    assert "step time" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["9"], "has no trial '9'. Its 6 trials that have ended are from 0 to 5."),
        (["0", "--study", "no"], "has no decision of study 'no'. It has 's'."),
        (["0", "--quantity", "energy"], "Trial 0 has no account of peak memory".replace("peak memory", "energy")),
        (["5"], "Trial 5 has no prediction to explain: not judged: a test."),
        (["0", "--plot", "a.txt"], "--plot writes a page, so its name ends in .html"),
    ],
)
def test_wrong_trial_study_or_file_is_explained(
    log: str, words: list[str], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_study(log)
    with Guard("t4", log=log).log as store:
        store.record_decision(UNJUDGED, graph=None, device=None, study="s", trial=5, params={})
    assert main(["explain", words[0], log, *words[1:]]) in (1, 2)
    assert match in capsys.readouterr().err


def test_step_that_cannot_fit_has_the_number_of_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bound decides alone, so the account begins with it; `predict` names it beside its own number."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "explained_large.py").write_text(SCRIPT)
    words = [f"{tmp_path / 'explained_large.py'}:build", "--set", "width=400_000_000", "--gpu", "t4", "--explain", "--json"]
    assert main(["check", *words]) == 1
    memory = json.loads(capsys.readouterr().out)["account"]["memory"]
    assert [memory[0]["name"], memory[-1]["name"]] == ["physics", "least memory"]
    assert main(["predict", *words]) == 0
    assert any("cannot fit: it needs at least" in note for note in json.loads(capsys.readouterr().out)["notes"])


def test_log_that_is_not_there_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "0", "nowhere.db"]) == 2
    assert "There is no file 'nowhere.db'. Give a measurement log, or the storage" in capsys.readouterr().err
    assert main(["explain", "0"]) == 2
    assert "There is no measurement log at" in capsys.readouterr().err


def test_prediction_of_another_predictor_without_account_is_explained(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    decision = run_study(log)[0]
    verdict = decision.verdict
    bare = {quantity: replace(estimate, stages=()) for quantity, estimate in verdict.predicted.items()}
    with Guard("t4", log=log).log as store:
        store.record_decision(replace(verdict, predicted=bare), graph=None, device=None, study="s", trial=7, params={})
    assert main(["explain", "7", log]) == 2
    assert "Trial 7 has predictions, but no account of them" in capsys.readouterr().err


def test_own_log_that_cannot_be_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "explained_alone.py").write_text(SCRIPT)
    words = ["check", f"{tmp_path / 'explained_alone.py'}:build", "--set", "width=160", "--gpu", "t4"]
    damaged = tmp_path / "damaged.db"
    damaged.write_text("no database")
    monkeypatch.setenv("PERFGUARD_LOG", str(damaged))
    assert main(words) == 0
    assert main([*words, "--log", str(damaged)]) == 3, "a log that was named is meant"
    assert "is no measurement log, or is damaged" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["predict", "check"])
def test_explain_of_a_workload_prints_the_number_that_a_trial_would_get(
    command: str, log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was that of the shipped weights, without what the log has taught and without bounds."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "explained_script.py").write_text(SCRIPT)
    run_study(log)
    words = [command, f"{tmp_path / 'explained_script.py'}:build", "--set", "width=160", "--gpu", "t4", "--explain"]
    with Guard("t4", log=log).log as store:
        guard = Guard("t4", log=store)
        expected = guard.decide(workload(160), study="another").verdict.predicted
    assert main([*words, "--log", log, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    for quantity in ("memory", "step_time", "time"):
        assert document["account"][quantity][-1]["median"] == pytest.approx(expected[quantity].median, rel=1e-6)
    assert any("Learnt from 4 runs of Tesla T4" in note for note in document["notes"])
    monkeypatch.setenv("PERFGUARD_LOG", log)
    monkeypatch.setenv("PERFGUARD_QUIET", "")
    assert main([*words, "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["account"] == document["account"], "the user's own log counts"
    assert "brings 4 runs" not in printed.err, "the line of a study"
    assert main([*words, "--log", "none", "--json"]) == 0
    shipped = json.loads(capsys.readouterr().out)["account"]
    assert shipped["step_time"][-1]["median"] < 0.9 * document["account"]["step_time"][-1]["median"]
    assert main([*words, "--log", log]) == 0
    assert "this device's runs" in capsys.readouterr().out
    assert main([*words, "--log", str(tmp_path / "none.db")]) == 2
    assert "Give another one, or --log none." in capsys.readouterr().err
