"""A dry run has the number, the attributes and the study of the real trial, and what it writes there reaches nobody."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from torch import nn

from perfguard import resolve_device
from perfguard.capture.first_forward import FirstForward
from perfguard.exceptions import CaptureError
from perfguard_optuna import PerfGuardPruner, create_study, guarded
from perfguard_optuna.capture import ObjectiveBuild, leave_study
from perfguard_optuna.dry_trial import DryTrial
from perfguard_optuna.facts import Facts, snapshot_of

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="its objectives really train where there is a GPU"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::perfguard.exceptions.MeasurementWarning"),
]
WIDE = 3 * 10**8
"""Outputs of a layer that no machine that runs these tests can hold: 72 GB for 64 inputs."""


def train(width: int) -> float:
    model = nn.Linear(64, width)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 64)).mean().backward()
        optimizer.step()
    return float(width)


def states(objective: Callable[[optuna.Trial], float], study: optuna.Study, num_trials: int, **options: Any) -> list[str]:
    study.optimize(guarded(objective, gpu="cpu", log=False), n_trials=num_trials, **options)
    return [trial.state.name for trial in study.trials]


def stored_study(kind: str, folder: Path) -> optuna.Study:
    storages: dict[str, Any] = {
        "memory": None,
        "sqlite": f"sqlite:///{folder}/study.db",
        "journal": JournalStorage(JournalFileBackend(str(folder / "journal.log"))),
    }
    return optuna.create_study(storage=storages[kind], study_name="named", sampler=optuna.samplers.RandomSampler(seed=0))


@pytest.fixture(params=["memory", "sqlite", "journal"])
def study(request: pytest.FixtureRequest, tmp_path: Path) -> optuna.Study:
    return stored_study(request.param, tmp_path)


def test_number_decides_on_the_width(study: optuna.Study) -> None:
    """All trials have the same parameters, and every other one does not fit."""

    def objective(trial: optuna.Trial) -> float:
        return train(trial.suggest_int("width", 4, 4) if trial.number % 2 == 0 else WIDE)

    assert states(objective, study, 4) == ["COMPLETE", "PRUNED"] * 2


def test_attributes_of_an_enqueued_trial_decide(study: optuna.Study) -> None:
    study.enqueue_trial({"width": 4})
    study.enqueue_trial({"width": 4}, user_attrs={"factor": WIDE // 4})
    study.enqueue_trial({"width": 4})

    def objective(trial: optuna.Trial) -> float:
        return train(trial.suggest_int("width", 4, 64) * trial.user_attrs.get("factor", 1))

    assert states(objective, study, 3) == ["COMPLETE", "PRUNED", "COMPLETE"]


def test_attributes_of_the_study_are_those_of_now(study: optuna.Study) -> None:
    """A callback writes them after each trial."""

    def grow(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        study.set_user_attr("width", WIDE if trial.number else 8)

    def objective(trial: optuna.Trial) -> float:
        assert trial.study.study_name == "named"
        return train(trial.study.user_attrs.get("width", 4))

    assert states(objective, study, 3, callbacks=[grow]) == ["COMPLETE", "COMPLETE", "PRUNED"]


def test_earlier_trials_decide(study: optuna.Study) -> None:
    def objective(trial: optuna.Trial) -> float:
        finished = trial.study.get_trials(states=[TrialState.COMPLETE])
        trial.set_user_attr("width", 4 if not finished else 4 * trial.study.best_trial.user_attrs["width"])
        assert [each.number for each in trial.study.trials] == list(range(trial.number + 1))
        assert trial.study.trials[trial.number].state is TrialState.RUNNING
        return train(WIDE if trial.user_attrs["width"] == 16 and len(finished) == 2 else trial.user_attrs["width"])

    assert states(objective, study, 4) == ["COMPLETE", "COMPLETE", "PRUNED", "PRUNED"]
    assert study.trials[1].user_attrs["width"] == 16


def test_best_trial_decides(study: optuna.Study) -> None:
    def objective(trial: optuna.Trial) -> float:
        try:
            best = trial.study.best_value
        except ValueError:  # no trial is completed yet
            best = 1
        return train(4 if best < 4 else WIDE)

    assert states(objective, study, 3) == ["COMPLETE", "PRUNED", "PRUNED"]


def test_proposals_of_a_guarded_study_have_the_number_of_their_trial() -> None:
    launched: list[int] = []

    def objective(trial: optuna.Trial) -> float:
        width = trial.suggest_categorical("width", [4, 8])
        if not nn.Linear(1, 1).weight.is_meta:
            launched.append(trial.number)
        return train(width if trial.number % 2 == 0 else WIDE)

    study = create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(objective, n_trials=4, count="proposed", pruner=PerfGuardPruner("cpu", log=False))
    assert all(number % 2 == 0 for number in launched)
    assert {trial.state for trial in study.trials if trial.number % 2} == {TrialState.PRUNED}


def test_two_threads_have_trials_of_their_own() -> None:
    def objective(trial: optuna.Trial) -> float:
        return train(4 if trial.number % 2 == 0 else WIDE)

    study = optuna.create_study()
    states(objective, study, 6, n_jobs=2)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE, TrialState.PRUNED] * 3


def test_trial_of_ask_and_tell_has_its_parameters() -> None:
    study = optuna.create_study()
    objective = guarded(lambda trial: train(WIDE if trial.params["wide"] else 4), gpu="cpu", log=False)
    for wide in (True, False):
        study.enqueue_trial({"wide": wide})
        trial = study.ask({"wide": optuna.distributions.CategoricalDistribution([True, False])})
        if wide:
            with pytest.raises(optuna.TrialPruned):
                objective(trial)
        else:
            assert objective(trial) == 4


def test_number_in_a_file_name_costs_no_dry_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another number and another rate show the same step, so no later trial is dry-run to its end."""
    ran: list[int] = []
    converse = ObjectiveBuild._converse

    def counting(self: ObjectiveBuild, *args: Any, **kwargs: Any) -> Any:
        found = converse(self, *args, **kwargs)
        ran.append(self._num_runs)
        return found

    monkeypatch.setattr(ObjectiveBuild, "_converse", counting)

    def objective(trial: optuna.Trial) -> float:
        width = trial.suggest_categorical("width", [4])
        value = train(width)
        return value + 0 * len(f"model-{trial.number}.pt")

    assert states(objective, optuna.create_study(), 5) == ["COMPLETE"] * 5
    assert len(ran) == 3, "one of the first trial, and two with another number: with and without whole epochs"


def test_what_a_dry_run_writes_is_read_back_in_it_and_reaches_nobody(study: optuna.Study) -> None:
    study.set_user_attr("before", 1)

    def objective(trial: optuna.Trial) -> float:
        trial.set_user_attr("a", 1)
        trial.set_constraint("c", 0.5)
        trial.report(1.0, step=0)
        trial.study.set_user_attr("b", 2)
        trial.study.enqueue_trial({"x": 1})
        other = trial.study.ask()
        trial.study.tell(other, 3.0)
        trial.set_user_attr("later", 2)
        own = trial.study.trials[trial.number]
        assert own.user_attrs["a"] == trial.user_attrs["a"] == 1
        assert own.user_attrs["later"] == 2
        assert own.intermediate_values == {0: 1.0}
        assert trial.constraints["c"] == own.constraints["c"] == 0.5
        assert trial.study.user_attrs == {"before": 1, "b": 2}
        assert len(trial.study.trials) == trial.number + 2
        assert trial.study.best_value == 3.0
        trial.study.stop()
        assert not trial.should_prune()
        return train(4)

    build = ObjectiveBuild(objective, resolve_device("cpu"), study.directions)
    trial = study.ask()
    try:
        assert build.ask(trial).graph.ops
    finally:
        build.close()
    (only,) = study.trials
    assert (only.user_attrs, only.constraints, only.intermediate_values) == ({}, {}, {})
    assert study.user_attrs == {"before": 1}


def test_facts_of_a_dry_trial_are_those_of_the_trial(study: optuna.Study) -> None:
    study.add_trial(optuna.create_trial(value=1.0))
    study.enqueue_trial({"x": 0.5}, user_attrs={"note": "mine"})
    real = study.ask({"x": optuna.distributions.FloatDistribution(0, 1)})
    dry = DryTrial(lambda *_: None, Facts(study, real).of, study.directions)
    for name in ("number", "user_attrs", "datetime_start", "params", "distributions", "relative_params", "constraints"):
        assert getattr(dry, name) == getattr(real, name), name
    for name in ("study_name", "directions", "user_attrs", "best_value", "metric_names"):
        assert getattr(dry.study, name) == getattr(study, name), name
    assert dry.study.best_trial == study.best_trial
    assert dry.study.trials[0] == study.trials[0]
    assert isinstance(dry.datetime_start, datetime.datetime)


def test_attribute_that_cannot_be_sent_says_so() -> None:
    study = optuna.create_study()
    study._storage.set_study_user_attr(study._study_id, "made", lambda: 1)
    build = ObjectiveBuild(lambda trial: train(len(trial.study.user_attrs)), resolve_device("cpu"), study.directions)
    try:
        with pytest.raises(CaptureError, match="cannot be sent to a dry run"):
            build.ask(study.ask())
    finally:
        build.close()


def test_trial_that_is_judged_at_its_first_forward_pass_keeps_what_it_is(study: optuna.Study) -> None:
    study.add_trial(optuna.create_trial(value=1.0))
    study.set_user_attr("width", 4)
    study.enqueue_trial({"x": 1}, user_attrs={"note": "mine"})
    trial = study.ask()
    trial.suggest_int("x", 0, 2)
    found: list[Any] = []
    fact = snapshot_of(trial)
    with FirstForward(resolve_device("cpu"), found.append, lambda: leave_study(trial, fact), problem=CaptureError("why")):
        trial.set_user_attr("set", "before")
        model = nn.Linear(64, 4)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 64)).mean().backward()
            assert trial.number == 1
            assert trial.user_attrs == {"note": "mine", "set": "before"}
            assert trial.params == {"x": 1}
            assert trial.study.user_attrs == {"width": 4}
            assert trial.study.best_value == 1.0
            assert len(trial.study.trials) == 2
            optimizer.step()
    (seen,) = found
    assert not isinstance(seen, Exception), seen
