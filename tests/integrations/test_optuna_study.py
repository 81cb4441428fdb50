"""GuardedStudy: `study.optimize(objective, ..., pruner=PerfGuardPruner(...))` runs as it stands, and runs on whatever happens."""

from __future__ import annotations

import functools
import inspect
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import perfguard_optuna
from perfguard import Workload
from perfguard.exceptions import ConfigurationError, UnguardedTrialWarning
from perfguard.verdict import ALIKE
from perfguard_optuna import GuardedStudy, PerfGuardPruner, load_study, record_of
from tests.doubles import ReplayPredictor
from tests.integrations.one_layer import (
    COMPLETE,
    FAIL,
    LARGE,
    PRUNED,
    SMALL,
    build,
    make_pruner,
    objective,
    run_study,
    states,
    study_of,
    train,
)

pytestmark = pytest.mark.usefixtures("pretended_gpu")


def statuses(pruner: PerfGuardPruner, study: optuna.Study) -> list[str | None]:
    return [decision.status for decision in pruner.guard.guard.log.records(study.study_name)]


def test_the_literal_line_runs() -> None:
    study = perfguard_optuna.create_study()
    study.optimize(objective, n_trials=10, pruner=PerfGuardPruner(gpu="a100", log=False))
    assert states(study) == [COMPLETE] * 10
    verdicts = [record_of(trial).verdict for trial in study.trials]
    # Such trials are so short that the guard may cost more than it saves, so the last ones need no dry run of their own.
    assert all(verdict is not None and verdict.source in ("captured", ALIKE) and verdict.predicted for verdict in verdicts)


def test_pace_stops_a_trial_that_never_asks() -> None:
    def slow(trial: optuna.Trial) -> float:
        model = nn.Linear(64, trial.suggest_int("width", SMALL, SMALL))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (batch,) in DataLoader(TensorDataset(torch.ones(400, 64))):
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()
            time.sleep(0.05)  # five times as long as predicted
        return 0.0

    study = optuna.create_study()
    study.optimize(perfguard_optuna.guarded(slow, "cpu", time_budget="5s", predictor=ReplayPredictor(), log=False), n_trials=1)
    assert states(study) == [PRUNED]
    assert "at the measured pace it takes" in study.trials[0].user_attrs["perfguard:stopped"]


def test_launched_trial_has_prediction_and_measurement() -> None:
    pruner = make_pruner()
    trained: list[int] = []

    def unchanged(trial: optuna.Trial) -> float:
        trained.append(trial.suggest_int("width", SMALL, LARGE))
        return train(trained[-1])

    study = study_of(SMALL, LARGE)
    study.optimize(unchanged, n_trials=2, count="proposed", pruner=pruner)
    assert trained == [SMALL]
    launched, pruned = map(record_of, study.trials)
    assert (launched.in_words, launched.status) == ("launched", "ok")
    assert set(launched.measured) == {"time", "step_time"}  # it ran on no GPU, so there is no GPU memory to measure
    assert (pruned.in_words, pruned.status, pruned.measured) == ("pruned", None, {})
    assert study.trials[0].constraints["perfguard:memory"] < 0 < study.trials[1].constraints["perfguard:memory"]
    assert statuses(pruner, study) == ["ok", None]
    (observation,) = pruner.guard.guard.predictor.learnt  # type: ignore[attr-defined]
    assert observation.measurement.num_steps == 3


class ObjectiveWithBuild:
    """An objective that says itself what it runs."""

    def __call__(self, trial: optuna.Trial) -> float:
        return objective(trial)

    def build(self, params: Mapping[str, Any]) -> Workload:
        return build(params)


def test_an_objective_may_bring_its_build() -> None:
    assert states(run_study(SMALL, LARGE, objective=ObjectiveWithBuild(), build=None)) == [COMPLETE, PRUNED]


def test_another_pruner_works_as_ever() -> None:
    study = study_of(SMALL, LARGE)
    study.optimize(objective, n_trials=2, count="proposed", pruner=optuna.pruners.NopPruner())
    assert states(study) == [COMPLETE, COMPLETE]
    assert isinstance(study.pruner, optuna.pruners.NopPruner)


@pytest.mark.parametrize("pruner", [PerfGuardPruner, "a100"])
def test_what_is_no_pruner_is_an_error(pruner: Any) -> None:
    """Optuna takes anything, and so every trial would run unguarded without a word."""
    study = study_of(SMALL)
    with pytest.raises(ConfigurationError, match="pruner must be a pruner, such as PerfGuardPruner"):
        study.optimize(objective, n_trials=1, pruner=pruner)
    assert states(study) == [TrialState.WAITING]


def test_trial_ends_at_the_deciding_suggestion() -> None:
    reached = []

    def three_suggestions(trial: optuna.Trial) -> float:
        trial.suggest_float("lr", 1e-3, 1.0)
        reached.append("lr")
        trial.suggest_int("width", SMALL, LARGE)
        reached.append("width")
        trial.suggest_categorical("optimizer", ["sgd", "adam"])
        reached.append("optimizer")
        return 0.0

    run_study(LARGE, SMALL, objective=three_suggestions)
    assert reached == ["lr", "lr", "width", "optimizer"]


def build_with_default(params: Mapping[str, Any], default: int) -> Workload:
    return build({"width": params["width"] * params.get("factor", default)})


def two_suggestions(trial: optuna.Trial) -> float:
    return train(trial.suggest_int("width", SMALL, LARGE) * trial.suggest_int("factor", 1, LARGE // SMALL))


@pytest.mark.parametrize(("default", "factor", "state"), [(1, LARGE // SMALL, PRUNED), (LARGE // SMALL, 1, COMPLETE)])
def test_default_does_not_replace_a_later_suggestion(default: int, factor: int, state: TrialState) -> None:
    with_default = functools.partial(build_with_default, default=default)
    study = run_study({"width": SMALL, "factor": factor}, objective=two_suggestions, build=with_default)
    assert states(study) == [state]


@pytest.mark.parametrize("settle", ["should_prune", "report"])
def test_a_default_is_taken_once_the_trial_runs(settle: str) -> None:
    trained = []

    def one_suggestion(trial: optuna.Trial) -> float:
        width = trial.suggest_int("width", SMALL, LARGE)
        if settle == "report":
            trial.report(0.0, 0)
        elif trial.should_prune():
            raise optuna.TrialPruned
        trained.append(width)
        return train(width)

    study = run_study(SMALL, LARGE, objective=one_suggestion, build=functools.partial(build_with_default, default=1))
    assert states(study) == [COMPLETE, PRUNED]
    assert trained == [SMALL]


@pytest.mark.parametrize("unsettled", [lambda params: params["depth"], lambda params: params.get("depth", 2)])
def test_never_suggested_param_leaves_trials_unguarded(unsettled: Callable[[Any], int]) -> None:
    def build_deep(params: Mapping[str, Any]) -> Workload:
        unsettled(params)
        return build(params)

    with pytest.warns(UnguardedTrialWarning, match=r"reads 'depth', which the trial has not suggested") as caught:
        study = run_study(SMALL, LARGE, SMALL, build=build_deep)
    assert [warning.category for warning in caught].count(UnguardedTrialWarning) == 1
    assert states(study) == [COMPLETE] * 3


def failing_at(number: int, error: BaseException) -> Callable[[optuna.Trial], float]:
    def failing(trial: optuna.Trial) -> float:
        value = objective(trial)
        if trial.number == number:
            raise error
        return value

    return failing


def test_oom_prunes_the_trial_and_the_study_goes_on() -> None:
    pruner = make_pruner()
    study = study_of(SMALL, SMALL, SMALL)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    study.optimize(failing_at(1, error), n_trials=3, count="proposed", pruner=pruner)
    assert states(study) == [COMPLETE, PRUNED, COMPLETE]
    assert statuses(pruner, study) == ["ok", "oom", "ok"]
    assert record_of(study.trials[1]).status == "oom"
    assert study.trials[1].constraints["perfguard:memory"] > 0, "the sampler is told that more was needed"
    assert [row.measurement.status for row in pruner.guard.guard.predictor.learnt] == ["ok", "oom", "ok"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("error", [ValueError("a mistake"), TimeoutError("the server did not answer within 30 s")])
def test_other_errors_end_as_optuna_has_it(error: Exception) -> None:
    pruner = make_pruner()
    study = study_of(SMALL, SMALL, SMALL)
    study.optimize(failing_at(0, error), n_trials=2, catch=type(error), pruner=pruner)
    with pytest.raises(ValueError, match="another mistake"):
        study.optimize(failing_at(2, ValueError("another mistake")), n_trials=1)
    assert states(study) == [FAIL, COMPLETE, FAIL]
    assert statuses(pruner, study) == ["failed", "ok", "failed"]


def test_interrupted_study_is_logged_and_resumed() -> None:
    pruner = make_pruner()
    study = study_of(SMALL, SMALL, SMALL)
    with pytest.raises(KeyboardInterrupt):
        study.optimize(failing_at(1, KeyboardInterrupt()), n_trials=3, pruner=pruner)
    assert states(study)[:2] == [COMPLETE, FAIL]
    assert statuses(pruner, study) == ["ok", "interrupted"]
    study.optimize(objective, n_trials=1, count="proposed")
    assert statuses(pruner, study) == ["ok", "interrupted", "ok"]


def url_of(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'study.db'}"


def journal_of(tmp_path: Path) -> JournalStorage:
    return JournalStorage(JournalFileBackend(str(tmp_path / "journal.log")))


@pytest.mark.parametrize("storage_of", [url_of, journal_of])
def test_a_study_is_resumed_from_its_storage(storage_of: Callable[[Path], Any], tmp_path: Path) -> None:
    log = str(tmp_path / "log.db")
    study = study_of(SMALL, LARGE, SMALL, SMALL, LARGE, study_name="resumed", storage=storage_of(tmp_path))
    study.optimize(objective, n_trials=3, count="proposed", pruner=make_pruner(log=log))

    resumed = load_study(study_name="resumed", storage=storage_of(tmp_path))
    pruner = make_pruner(log=log)
    assert isinstance(resumed, GuardedStudy)
    assert len(pruner.guard.guard.predictor.learnt) == 2  # type: ignore[attr-defined]
    resumed.optimize(objective, n_trials=2, count="proposed", pruner=pruner)
    assert states(resumed) == [COMPLETE, PRUNED, COMPLETE, COMPLETE, PRUNED]
    assert statuses(pruner, resumed) == ["ok", None, "ok", "ok", None]


def test_a_study_with_two_objectives_is_guarded() -> None:
    def two_values(trial: optuna.Trial) -> Sequence[float]:
        width = trial.suggest_int("width", SMALL, LARGE)
        return train(width), float(width)

    sampler = optuna.samplers.TPESampler(seed=0, n_startup_trials=2)
    study = study_of(SMALL, LARGE, LARGE, directions=["minimize", "maximize"], sampler=sampler)
    study.optimize(two_values, n_trials=6, count="proposed", pruner=make_pruner())
    assert states(study)[:3] == [COMPLETE, PRUNED, PRUNED]
    assert all(record_of(trial).is_pruned == (trial.state == PRUNED) for trial in study.trials)
    assert study.best_trials


def test_ask_and_tell_are_optunas() -> None:
    study = study_of(LARGE, pruner=make_pruner())
    trial = study.ask()
    assert type(trial) is optuna.Trial
    trial.suggest_int("width", SMALL, LARGE)
    study.tell(trial, 1.0)
    with pytest.warns(UnguardedTrialWarning, match="never judged a trial"):
        study.ask().suggest_int("width", SMALL, LARGE)


def test_a_guarded_study_pickles() -> None:
    study = run_study(SMALL, LARGE)
    copy = pickle.loads(pickle.dumps(study))
    assert isinstance(copy, GuardedStudy)
    for width in (LARGE, SMALL):
        copy.enqueue_trial({"width": width})
    copy.optimize(objective, n_trials=2, count="proposed")
    assert states(copy) == [COMPLETE, PRUNED, PRUNED, COMPLETE]
    assert states(study) == [COMPLETE, PRUNED]


def test_optimize_adds_pruner_and_count_to_optunas() -> None:
    ours, theirs = (inspect.signature(study.optimize).parameters for study in (GuardedStudy, optuna.Study))
    assert list(ours) == [*theirs, "pruner", "count"]
    assert all(ours[parameter].default == theirs[parameter].default for parameter in theirs)


@pytest.mark.parametrize("name", ["_suggest", "should_prune", "report"])
def test_a_guarded_trial_takes_what_optunas_takes(name: str) -> None:
    from perfguard_optuna.study import _GuardedTrial

    ours, theirs = (inspect.signature(getattr(trial, name)).parameters for trial in (_GuardedTrial, optuna.Trial))
    assert {parameter: ours[parameter].default for parameter in ours} == {
        parameter: theirs[parameter].default for parameter in theirs
    }


class Bar:
    """A progress bar that remembers its steps, in the place of tqdm's."""

    def __init__(self, made: list[Bar], total: int) -> None:
        self.total = total
        self.num_steps = 0
        self.is_closed = False
        made.append(self)

    def update(self, steps: int) -> None:
        assert not self.is_closed
        self.num_steps += steps

    def set_description(self, text: str) -> None:
        """Show nothing."""

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_one_progress_bar_counts_launched_trials(n_jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar was drawn again for each trial that replaced a pruned one."""
    made: list[Bar] = []
    monkeypatch.setattr("optuna.progress_bar.tqdm", functools.partial(Bar, made))
    study = study_of(LARGE, SMALL, LARGE - 1, LARGE - 2, 9, LARGE - 3, 10)
    study.optimize(objective, n_trials=3, n_jobs=n_jobs, pruner=make_pruner(), show_progress_bar=True)
    assert PRUNED in states(study)
    assert states(study).count(COMPLETE) >= 3
    (bar,) = made
    assert bar.total == 3
    assert bar.num_steps == states(study).count(COMPLETE)
    assert bar.is_closed


def test_progress_bar_of_proposals_is_optunas(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Bar] = []
    monkeypatch.setattr("optuna.progress_bar.tqdm", functools.partial(Bar, made))
    study = study_of(LARGE, SMALL)
    study.optimize(objective, n_trials=2, pruner=make_pruner(), show_progress_bar=True, count="proposed")
    (bar,) = made
    assert (bar.total, bar.num_steps) == (2, 2)


def test_notebook_and_terminal_show_what_a_study_has() -> None:
    """Both showed the address of the object."""
    study = study_of(LARGE, SMALL, study_name="a < b")
    assert repr(study) == "<GuardedStudy 'a < b': 2 waiting>"
    study.optimize(objective, n_trials=2, pruner=make_pruner(), count="proposed")
    assert repr(study) == "<GuardedStudy 'a < b': 1 complete, 1 pruned>"
    page = study._repr_html_()
    assert page.startswith("<table><caption>a &lt; b</caption>")
    assert 'text-align: left">pruned before launch</th><td style="text-align: left">1 (peak memory 1)</td>' in page
