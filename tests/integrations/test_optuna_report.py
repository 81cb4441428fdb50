"""The report of an Optuna study: from the study, from its storage, and beside its log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from torch import nn

from perfguard import MeasurementStore, Workload
from perfguard.exceptions import ConfigurationError
from perfguard.report import Report, page_of, report_of_log
from perfguard_optuna import PerfGuardPruner, create_study, summarize
from perfguard_optuna._report import read
from tests.doubles import ReplayPredictor

pytest.importorskip("plotly")


def build(params: Mapping[str, Any]) -> Workload:
    return Workload(nn.Linear(64, params["width"]), inputs=(32, 64), loss=torch.mean, steps=3)


def objective(trial: optuna.Trial) -> float:
    loss, model = torch.tensor(0.0), nn.Linear(64, trial.suggest_int("width", 8, 2**21, log=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(32, 64)).mean()
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A guarded study, run for real on this CPU: study.db and journal.log are its storages, log.db is its log."""
    folder = tmp_path_factory.mktemp("study")
    storage = f"sqlite:///{folder / 'study.db'}"
    study = create_study(study_name="linear", storage=storage, sampler=optuna.samplers.RandomSampler(seed=0))
    pruner = PerfGuardPruner(
        gpu="cpu", build=build, memory_budget="64MiB", predictor=ReplayPredictor(), log=str(folder / "log.db")
    )
    study.optimize(objective, n_trials=8, pruner=pruner, count="proposed")
    optuna.copy_study(
        from_study_name="linear",
        from_storage=storage,
        to_storage=JournalStorage(JournalFileBackend(str(folder / "journal.log"))),
    )
    return folder


def read_report(source: object, study: str | None = None, log: MeasurementStore | None = None) -> Report:
    report = read(source, study, log)
    assert report is not None
    return report


def test_report_of_a_study_has_the_counts_of_its_summary(folder: Path) -> None:
    study = optuna.load_study(study_name="linear", storage=f"sqlite:///{folder / 'study.db'}")
    report, summary = read_report(study), summarize(study)
    assert report.summary == summary
    assert summary.num_pruned > 0
    assert report.count("pruned") == summary.num_pruned
    assert len(report.trials) - report.count("pruned") == summary.num_launched == summary.num_measured
    assert report.count("over") == summary.num_violations
    assert [trial.params for trial in report.trials] == [trial.params for trial in study.trials]
    assert report.history.log == ""
    assert "No measurement log was read" in page_of(report)


def test_study_and_its_log_tell_the_same(folder: Path) -> None:
    with MeasurementStore(folder / "log.db") as log:
        of_study, of_log = read_report(str(folder / "study.db"), log=log), report_of_log(log)
    assert of_study.device == of_log.device != ""
    assert [trial.outcome for trial in of_study.trials] == [trial.outcome for trial in of_log.trials]
    assert [trial.doubt for trial in of_study.trials] == [trial.doubt for trial in of_log.trials]
    assert of_study.summary.pruned_for == of_log.summary.pruned_for
    assert of_study.summary.num_violations == of_log.summary.num_violations
    for ours, logged in zip(of_study.trials, of_log.trials, strict=True):
        assert ours.record.limits == logged.record.limits == {"memory": 64 * 2**20}
        assert ours.record.predicted == pytest.approx(logged.record.predicted, rel=1e-5)
        assert ours.record.measured == pytest.approx(logged.record.measured, rel=1e-5)


@pytest.mark.parametrize("source", ["study.db", "journal.log"])
def test_study_is_read_from_its_storage(folder: Path, source: str) -> None:
    report = read_report(str(folder / source))
    assert report.title == "linear"
    assert len(report.trials) == 8
    assert read_report(str(folder / source), "linear").summary == report.summary


def test_study_that_is_not_clear_is_asked_for(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"There is no study 'conv'. The storage has 1: 'linear'."):
        read(str(folder / "study.db"), "conv", None)
    url = f"sqlite:///{tmp_path / 'two.db'}"
    for name in ("a", "b"):
        optuna.create_study(study_name=name, storage=url)
    with pytest.raises(ConfigurationError, match=r"Say which study .* The storage has 2: 'a', 'b'."):
        read(url, None, None)


def test_what_is_no_storage_is_left_alone(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a storage\n", encoding="utf-8")
    assert read(str(text), None, None) is None
    before = (folder / "log.db").read_bytes()
    assert read(str(folder / "log.db"), None, None) is None
    assert (folder / "log.db").read_bytes() == before, "Optuna would make its own tables there"


def test_study_without_trials_or_verdicts_has_a_page() -> None:
    empty = read_report(optuna.create_study(study_name="empty"))
    assert "No trial has finished yet." in page_of(empty)
    plain = optuna.create_study(study_name="plain")
    plain.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)
    report = read_report(plain)
    assert [trial.outcome for trial in report.trials] == ["unguarded"] * 2
    assert "2 trials ran without a verdict." in page_of(report)


def test_log_of_another_study_of_the_same_name_is_not_mixed_in(folder: Path) -> None:
    other = optuna.create_study(study_name="linear")
    other.add_trial(optuna.trial.create_trial(value=0.0, user_attrs={"perfguard:verdict": "launch", "perfguard:reason": "fits"}))
    with MeasurementStore(folder / "log.db") as log:
        report = read_report(other, log=log)
    assert (report.device, report.history.log) == ("", "")
