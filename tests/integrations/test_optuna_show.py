"""What a study shows is what its log has: summary, report, pictures, and trackers."""

from __future__ import annotations

import json
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
from perfguard.cli import main
from perfguard.exceptions import ConfigurationError
from perfguard.plots import outcome_of
from perfguard.report import page_of, read_report
from perfguard_optuna import (
    PerfGuardPruner,
    PerfGuardSampler,
    TrackingCallback,
    create_study,
    plot_budget,
    plot_savings,
    summarize,
)
from tests.doubles import ReplayPredictor
from tests.integrations.one_layer import train

pytest.importorskip("plotly")


def build(params: Mapping[str, Any]) -> Workload:
    return Workload(nn.Linear(64, params["width"]), inputs=(32, 64), loss=torch.mean, steps=3)


def objective(trial: optuna.Trial) -> float:
    return train(trial.suggest_int("width", 8, 2**21, log=True))


def guard(log: Any = False) -> PerfGuardPruner:
    return PerfGuardPruner(gpu="cpu", build=build, memory_budget="64MiB", predictor=ReplayPredictor(), log=log)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A guarded study, run for real on this CPU: study.db and journal.log are its storages, log.db is its log."""
    folder = tmp_path_factory.mktemp("study")
    storage = f"sqlite:///{folder / 'study.db'}"
    study = create_study(study_name="linear", storage=storage, sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(objective, n_trials=8, pruner=guard(str(folder / "log.db")), count="proposed")
    journal = JournalStorage(JournalFileBackend(str(folder / "journal.log")))
    optuna.copy_study(from_study_name="linear", from_storage=storage, to_storage=journal)
    return folder


@pytest.fixture(scope="module")
def study(folder: Path) -> optuna.Study:
    return optuna.load_study(study_name="linear", storage=f"sqlite:///{folder / 'study.db'}")


def test_a_study_and_its_log_tell_the_same(folder: Path, study: optuna.Study) -> None:
    of_study = read_report(str(folder / "study.db"))
    with MeasurementStore(folder / "log.db") as log:
        of_log = read_report(log)
    assert of_study.summary.device == of_log.summary.device != ""
    assert of_study.summary.pruned_for == of_log.summary.pruned_for == {"memory": of_log.summary.num_pruned}
    assert of_study.summary.num_violations == of_log.summary.num_violations
    for ours, logged in zip(of_study.records, of_log.records, strict=True):
        assert outcome_of(ours) == outcome_of(logged)
        assert ours.params == logged.params
        assert ours.reason == logged.reason
        stages = ours.predicted["memory"].stages
        assert stages == logged.predicted["memory"].stages
        assert stages[0].name == "physics"
        assert ours.limits == logged.limits == {"memory": 64 * 2**20}
        assert ours.measured == pytest.approx(logged.measured)
        assert ours.guard_s == logged.guard_s > 0
        assert ours.first_step_s == logged.first_step_s
    summary = summarize(study)
    assert (summary.num_pruned, summary.num_launched) == (of_log.summary.num_pruned, of_log.summary.num_launched)
    assert summary.num_pruned > 0
    assert summary.cost is not None
    assert summary.cost.guard_s == pytest.approx(sum(record.guard_s for record in of_log.records))


def test_a_trial_of_a_study_is_explained_by_the_number_that_it_got(
    folder: Path, study: optuna.Study, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "1", str(folder / "study.db"), "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)["account"]["memory"]
    assert lines[-1]["median"] == pytest.approx(study.trials[1].user_attrs["perfguard:memory_predicted_bytes"])
    assert len(study.trials[1].user_attrs["perfguard:account"]) < 2000, "a study has thousands of trials"
    assert main(["explain", "99", str(folder / "study.db")]) == 2
    assert "has no trial '99'. Its 8 trials that have ended are from 0 to 7." in capsys.readouterr().err


def test_the_pictures_have_every_trial(study: optuna.Study) -> None:
    assert sum(len(trace.x) for trace in plot_budget(study).data if trace.x[0] is not None) == 8
    assert f"{summarize(study).num_pruned} of 8 trials pruned" in plot_savings(study).layout.title.text


@pytest.mark.parametrize("source", ["study.db", "journal.log"])
def test_a_study_is_read_from_its_storage(folder: Path, source: str) -> None:
    report = read_report(str(folder / source))
    assert report.title == "linear"
    assert len(report.records) == 8
    assert read_report(str(folder / source), study="linear").summary == report.summary


def test_a_study_that_is_not_clear_is_asked_for(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"There is no study 'conv'. The storage has 1: 'linear'."):
        read_report(str(folder / "study.db"), study="conv")
    url = f"sqlite:///{tmp_path / 'two.db'}"
    for name in ("a", "b"):
        optuna.create_study(study_name=name, storage=url)
    with pytest.raises(ConfigurationError, match=r"Say which study .* The storage has 2: 'a', 'b'."):
        read_report(url)


def test_a_study_without_trials_or_verdicts_has_a_page() -> None:
    empty = read_report(optuna.create_study(study_name="empty"))
    assert "No trial has finished yet." in page_of(empty)
    plain = optuna.create_study(study_name="plain")
    plain.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)
    report = read_report(plain)
    assert [outcome_of(record) for record in report.records] == ["unguarded"] * 2


def test_trackers_get_rejected_proposals_too(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    pruner = guard()
    study = create_study(sampler=PerfGuardSampler(optuna.samplers.RandomSampler(seed=3), pruner))
    study.optimize(objective, n_trials=12, pruner=pruner, callbacks=[TrackingCallback("tensorboard", log_dir=str(tmp_path))])
    assert len(study.trials) > 12, "some proposals were rejected"
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert len(events.Scalars("perfguard/memory_predicted_bytes")) == len(study.trials)
    assert len(events.Scalars("value")) == 12
