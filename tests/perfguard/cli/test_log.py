"""`perfguard log`, `learn` and `weights`: what they print, what they write, and what they say when they cannot."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perfguard import MeasurementStore
from perfguard.cli import main
from perfguard.devices import catalog, mig_instance, mig_profiles
from tests.perfguard.log_rows import DEVICE, LAUNCHED, MEASUREMENT, PRUNED, make_graph, record


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "log.db"
    with MeasurementStore(path) as store:
        for trial in range(3):
            decision_id = record(store, trial, LAUNCHED, study="s[1]", graph=make_graph(), device=DEVICE)
            store.record_measurement(decision_id, MEASUREMENT)
        record(store, 3, PRUNED, study="other")
    monkeypatch.setenv("PERFGUARD_LOG", str(path))
    return path


def run(*words: object) -> int:
    return main(["log", *map(str, words)])


def test_show_prints_newest_decisions_and_row_counts(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert document["decisions"][0]["memory_measured_bytes"] == 1100
    assert document["counts"]["decisions"] == 4


def trials(capsys: pytest.CaptureFixture[str], *words: object) -> list[int]:
    """Of the decisions that `perfguard log show` shows."""
    assert run("show", "--json", *words) == 0
    return [decision["trial"] for decision in json.loads(capsys.readouterr().out)["decisions"]]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--device", "toy", "--host", "node-7", "--status", "ok"], [0, 1, 2]),
        (["--verdict", "prune"], [3]),
        (["--since", "1h"], [0, 1, 2, 3]),
        (["--since", "2020-01-01", "--before", "2020-01-02 14:30"], []),
        (["--before", "2020-01-01T00:00Z"], []),
        (["--study", "s[1]", "--verdict", "prune"], []),
    ],
)
def test_show_prune_and_export_select_alike(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: list[int]
) -> None:
    # Finding 1: `log prune` could choose neither a device nor a study.
    assert trials(capsys, *words) == expected
    assert run("export", tmp_path / "out.csv", *words) == 0
    assert f"{len(expected)} decisions" in capsys.readouterr().out
    assert run("prune", "--yes", *words) == 0
    assert capsys.readouterr().out.endswith(f"{len(expected)} decisions removed\n")
    assert trials(capsys) == [trial for trial in range(4) if trial not in expected]


def test_device_alias_selects_every_variant(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An alias selects every card that it may have meant, an id only its own."""
    # On a machine with an A100 SXM Guard("a100") is that; `log forget --device a100` missed its rows.
    a100 = catalog()["a100-sxm-80gb"]
    devices = [
        catalog()["a100-pcie-40gb"],
        a100,
        mig_instance(a100, mig_profiles(a100)[0]),
        catalog()["h100-sxm-80gb"],
        catalog()["rtx3090"],
        replace(DEVICE, id="a100-sxm-80gbx"),
    ]
    with MeasurementStore(log) as store:
        for trial, device in enumerate(devices, 10):
            record(store, trial, device=device)
        measured_elsewhere = record(store, 20, device=DEVICE)
        store.record_measurement(measured_elsewhere, replace(MEASUREMENT, device_id="a100-sxm-40gb"))
    assert trials(capsys, "--device", "A100") == [10, 11, 12, 20]
    assert trials(capsys, "--device", "a100-80gb") == [11, 12]
    assert trials(capsys, "--device", "a100-40gb") == [10, 20]
    assert trials(capsys, "--device", "3090") == [14]
    assert trials(capsys, "--device", "a100-sxm-80gb") == [11]
    assert trials(capsys, "--device", "NVIDIA A100-SXM4-80GB") == [11]
    assert trials(capsys, "--device", "a100-sxm-80gb:1g.10gb") == [12]
    assert run("forget", "--device", "a100", "--yes") == 0
    assert "1 measurements of 1 study" in capsys.readouterr().out
    assert run("prune", "--device", "a100-pcie-40gb", "--yes") == 0
    assert capsys.readouterr().out.endswith("\n1 decisions removed\n")
    assert trials(capsys, "--device", "a100") == [11, 12, 20]


def test_forget_sets_aside_and_undo_takes_back(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Finding 1: what a smoke test on a laptop had written spoilt the predictions of an A100, and nothing could undo it.
    assert run("forget", "--host", "node-7", "--yes") == 0
    out = capsys.readouterr().out
    assert "3 measurements of 1 study on toy" in out
    assert "3 measurements are set aside; the same selection with --undo takes them back" in out
    assert "weights" not in out
    with MeasurementStore(log) as store:
        assert store.observations("toy") == []
    assert run("quarantine") == 0
    out = capsys.readouterr().out
    assert out.count("toy  all: forgotten on ") == 3
    assert "0 readings are quarantined, 3 measurements are set aside" in out
    assert run("show") == 0
    assert "ok, set aside" in capsys.readouterr().out
    assert run("forget", "--host", "node-7", "--yes") == 1
    assert "No measurement that is in use matches" in capsys.readouterr().err
    assert run("forget", "--status", "ok", "--undo", "--yes") == 0
    assert "3 measurements are used again" in capsys.readouterr().out
    with MeasurementStore(log) as store:
        assert len(store.observations("toy")) == 3


def test_forget_names_weights_to_roll_back(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Named are the weights that may have learnt from what is forgotten."""
    with MeasurementStore(log) as store:
        store.promote("guardnet-1", b"1")
    assert run("forget", "--study", "s[1]", "--yes") == 0
    command = capsys.readouterr().out.splitlines()[-1].split()
    assert command == ["perfguard", "weights", "rollback"]
    assert main(command[1:]) == 0
    with MeasurementStore(log) as store:
        assert store.promoted("guardnet-1") is None


@pytest.mark.parametrize(("answer", "count"), [("y", 3), ("yes ", 3), ("", 0), ("n", 0)])
def test_forget_asks_on_a_terminal(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str, count: int
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(answer + "\n"))
    assert run("forget", "--study", "s[1]") == (0 if count else 1)
    with MeasurementStore(log) as store:
        assert sum(bool(row.set_aside) for row in store.records()) == count


@pytest.mark.parametrize(("answer", "count"), [("y", 3), ("", 0)])
def test_prune_asks_on_a_terminal(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str, count: int
) -> None:
    """It deleted without a question, and `forget`, which can be undone, asked."""
    monkeypatch.setattr("sys.stdin", Terminal(answer + "\n"))
    assert run("prune", "--study", "s[1]") == (0 if count else 1)
    out = capsys.readouterr().out
    assert "3 decisions of 1 study on toy" in out
    assert "There is no way back" in out
    assert len(trials(capsys)) == 4 - count


def test_prune_without_terminal_deletes_nothing(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert run("prune", "--study", "s[1]") == 1
    assert "Nothing was changed: add --yes" in capsys.readouterr().err
    assert len(trials(capsys)) == 4


@pytest.mark.parametrize("verb", [["show"], ["show", "--json"], ["export", "out.csv"], ["forget", "--yes"], ["prune", "--yes"]])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--study", "s[2]"], "The log has no study 's[2]' (did you mean 's[1]'?). It has 'other', 's[1]'."),
        (["--device", "a100"], "The log has no device 'a100'. It has 'toy'."),
        (["--host", "node-8"], "The log has no host 'node-8' (did you mean 'node-7'?). It has "),
    ],
)
def test_name_that_the_log_does_not_have_is_an_error(
    log: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verb: list[str],
    words: list[str],
    message: str,
) -> None:
    """An empty table and the status 0 looked like an answer."""
    monkeypatch.chdir(tmp_path)
    assert run(*verb, *words) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert message in error
    assert not (tmp_path / "out.csv").exists()


class Terminal(io.StringIO):
    """Somebody who types."""

    def isatty(self) -> bool:
        return True


def test_forget_without_terminal_changes_nothing(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert run("forget", "--study", "s[1]") == 1
    assert "Nothing was changed: add --yes" in capsys.readouterr().err
    with MeasurementStore(log) as store:
        assert len(store.observations("toy")) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "--log", "nowhere.db"], "There is no measurement log at nowhere.db"),
        (["prune"], "Say what to remove"),
        (["export", "out.xlsx"], "must end in .csv"),
        (["show", "--since", "yesterday"], '"2026-11-20", "2026-11-20 14:30" (UTC) or an age such as "90d"'),
        (["export", "out.csv", "--before", "2026-13-01"], "--before must look like"),
        (["show", "--before", "9999999999d"], "--before must look like"),
        (["show", "--since", "1h", "--before", "2h"], "since must be earlier than before"),
        (["forget"], "Say which measurements to forget"),
        (["forget", "--undo", "--yes"], "Say which measurements to forget"),
        (["forget", "--study", "other", "--yes"], "No measurement that is in use matches"),
    ],
)
def test_what_cannot_be_done_is_said(
    log: Path, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*words) == (1 if "No measurement" in message else 2)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "nowhere.db").exists()


# --- `perfguard learn` and `perfguard weights`


def test_report_that_is_no_page_is_refused(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(log), "--out", "report.pdf"]) == 2
    assert "--out writes a page, so its name ends in .html, but got 'report.pdf'" in capsys.readouterr().err


def test_without_anything_new_it_says_so(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["learn"]) == 0
    assert "Nothing to learn: too few runs are new" in capsys.readouterr().out
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
