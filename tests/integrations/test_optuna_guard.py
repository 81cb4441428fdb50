"""OptunaGuard: inline in the objective, with ask and tell, with repairs, and when a trial breaks a budget all the same."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping
from typing import Any

import optuna
import pytest
import torch
from torch import nn

from perfguard import Estimate, Workload
from perfguard.exceptions import MeasurementWarning, UnguardedTrialWarning
from perfguard.repair import Repair
from perfguard_optuna import OptunaGuard, PerfGuardPruner, record_of, repair_of
from tests.doubles import ReplayPredictor
from tests.integrations.one_layer import (
    COMPLETE,
    LARGE,
    PRUNED,
    SMALL,
    make_guard,
    make_pruner,
    only_suggest,
    run_study,
    states,
    study_of,
    suggest_width,
    workload,
)


def build(params: Mapping[str, Any]) -> Workload:
    return workload(params["width"], steps=40)


pytestmark = pytest.mark.usefixtures("pretended_gpu")


def test_guard_trial_judges_a_model_and_batch() -> None:
    guard = make_guard()
    trained = []

    def objective(trial: optuna.Trial) -> float:
        model = nn.Linear(64, suggest_width(trial))
        optimizer = torch.optim.AdamW(model.parameters())
        with guard.trial(trial, model, torch.ones(32, 64), loss=torch.mean, optimizer=optimizer) as run:
            trained.append(model.out_features)
            for _ in range(3):
                model(torch.ones(32, 64)).mean().backward()
                optimizer.step()
                run.step()
        assert run.measurement is not None
        return float(run.measurement.num_steps)

    study = study_of(SMALL, LARGE, SMALL)
    study.optimize(objective, n_trials=3)
    assert states(study) == [COMPLETE, PRUNED, COMPLETE]
    assert trained == [SMALL, SMALL]
    assert study.best_value == 3
    assert record_of(study.trials[0]).measured["time"] > 0


def test_guard_keeps_a_seeded_study_the_same() -> None:
    def outcome(*, is_guarded: bool) -> list[float]:
        torch.manual_seed(0)
        random.seed(0)
        guard = OptunaGuard("cpu", log=False) if is_guarded else None

        def objective(trial: optuna.Trial) -> float:
            model = nn.Sequential(nn.Linear(64, suggest_width(trial)), nn.Dropout())
            batch = torch.randn(32, 64)
            if guard is not None:
                with guard.trial(trial, model, batch, loss=torch.mean) as run:
                    run.step()
            return float(model(torch.randn(32, 64)).mean().detach()) + random.random()

        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
        study.optimize(objective, n_trials=3)
        return [trial.value for trial in study.trials if trial.value is not None]

    assert outcome(is_guarded=True) == outcome(is_guarded=False)


def slowly(step: Any, num_steps: int, seconds: float) -> None:
    for _ in range(num_steps):
        time.sleep(seconds)
        step()


@pytest.mark.parametrize(
    ("budget", "quantity", "limit"),
    [({"time_budget": "1s"}, "time", "1.00 s"), ({"cost_budget": 2, "price_per_hour": 7200}, "cost", "1.00 s ($2.00)")],
)
def test_pace_over_budget_stops_trial(budget: Any, quantity: str, limit: str) -> None:
    """The predictor says 40 steps of 10 ms; they take 30 ms, so that after 25 of them the budget of a second is out of reach."""
    guard = make_guard(**budget)
    steps = []

    def objective(trial: optuna.Trial) -> float:
        with guard.trial(trial, build({"width": suggest_width(trial)})) as run:
            for _ in range(40):
                steps.append(1)
                slowly(run.step, 1, 0.03)
        return 1.0

    study = study_of(SMALL)
    study.optimize(objective, n_trials=1)
    (trial,) = study.trials
    assert trial.state == PRUNED
    assert 20 <= len(steps) < 40
    assert trial.user_attrs["perfguard:stopped"].endswith(f"the budget is {limit}")
    assert trial.constraints[f"perfguard:{quantity}"] > 0
    assert record_of(trial).measured[quantity] > 0  # type: ignore[index]
    (ended,) = guard.log.history(study.study_name).ended
    assert ended.exceeded == "by the pace", "its time is lost"


def test_constraint_of_a_trial_that_ran_is_what_was_measured() -> None:
    """A trial that was doubtful and fits must not make the sampler shy of its size."""
    guard = make_guard(memory_budget=None, step_time_budget="100ms", predictor=ReplayPredictor(step_time=Estimate(0.09, 0.5)))

    def objective(trial: optuna.Trial) -> float:
        with guard.trial(trial, build({"width": suggest_width(trial)})) as run:
            assert trial.study.trials[0].constraints["perfguard:step_time"] == pytest.approx(math.log(0.9))
            slowly(run.step, 4, 0.001)
        return 1.0

    study = study_of(SMALL)
    study.optimize(objective, n_trials=1)
    (trial,) = study.trials
    measured = record_of(trial).measured["step_time"]
    assert trial.constraints["perfguard:step_time"] == pytest.approx(math.log(measured / 0.1))


def test_should_prune_looks_at_the_pace_too() -> None:
    pruner = make_pruner(build=build, time_budget="1s")

    def objective(trial: optuna.Trial) -> float:
        suggest_width(trial)
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight])
        for epoch in range(4):
            slowly(optimizer.step, 10, 0.03)
            trial.report(1.0, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned
        return 1.0

    study = study_of(SMALL)
    study.optimize(objective, n_trials=1, pruner=pruner)
    assert study.trials[0].state == PRUNED
    assert study.trials[0].last_step == 2


def build_wide_batch(params: Mapping[str, Any]) -> Workload:
    """Mostly activations, which smaller batches mend."""
    return Workload(nn.Linear(64, params["width"]), inputs=(512, 64), loss=torch.mean)


def repairing() -> OptunaGuard:
    return make_guard(build=build_wide_batch, on_violation="repair", memory_budget="6MiB")


def test_repair_reaches_objective_and_trial_attributes() -> None:
    seen = []

    def objective(trial: optuna.Trial) -> float:
        suggest_width(trial)
        seen.append(repair_of(trial))
        return 1.0

    study = study_of(SMALL, LARGE)
    study.optimize(objective, n_trials=2, pruner=PerfGuardPruner(guard=repairing()))
    plain, repaired = seen
    assert plain == repair_of(optuna.create_study().ask()) == Repair()
    assert repaired.micro_batch_size is not None
    assert repaired.micro_batch_size * repaired.accumulation == 512
    verdict = record_of(study.trials[1]).verdict
    assert verdict is not None
    assert (verdict.action, verdict.repair) == ("repair", repaired)
    assert study.trials[1].constraints["perfguard:memory"] < 0


def test_a_repair_reaches_the_block() -> None:
    guard = repairing()

    def objective(trial: optuna.Trial) -> float:
        with guard.trial(trial, build_wide_batch({"width": suggest_width(trial)})) as run:
            return float(run.repair.accumulation)

    study = study_of(LARGE)
    study.optimize(objective, n_trials=1)
    assert study.best_value > 1


def test_repair_ignored_by_objective_is_not_learnt() -> None:
    guard, study = repairing(), study_of(LARGE)
    with pytest.warns(UnguardedTrialWarning, match=r"did not call `repair_of\(trial\)`"):
        study.optimize(only_suggest, n_trials=1, pruner=PerfGuardPruner(guard=guard))
    assert states(study) == [COMPLETE]
    assert guard.guard.predictor.learnt == []  # type: ignore[attr-defined]


def test_constraints_stay_those_of_the_first_budget() -> None:
    """Constraints must be the same in all trials of a study, so a budget given later adds none."""
    study = study_of(SMALL, SMALL)
    study.optimize(only_suggest, n_trials=1, pruner=make_pruner(build=build))
    strict = make_pruner(build=build, time_budget="1ms")
    study.optimize(only_suggest, n_trials=1, pruner=strict, count="proposed")
    first, second = study.trials
    assert set(first.constraints) == set(second.constraints) == {"perfguard:memory"}
    assert first.constraints["perfguard:memory"] < 0 < second.constraints["perfguard:memory"]


def test_guard_survives_a_storage_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    study = study_of(SMALL, LARGE, SMALL)

    def away(*_: Any) -> None:
        raise ConnectionError("the server closed the connection")

    monkeypatch.setattr(study._storage, "set_trial_user_attr", away)
    with pytest.warns(UnguardedTrialWarning, match="could not write into trial 0 .* the server closed the connection") as caught:
        study.optimize(only_suggest, n_trials=3, pruner=make_pruner(build=build), count="proposed")
    assert states(study) == [COMPLETE, PRUNED, COMPLETE]
    assert [warning.category for warning in caught].count(UnguardedTrialWarning) == 1


def test_what_cannot_be_measured_runs_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr("perfguard.measure.Run.start", broken)
    with pytest.warns(MeasurementWarning, match="could not measure a trial .* the driver is gone"):
        study = run_study(SMALL, SMALL, objective=only_suggest, build=build)
    assert states(study) == [COMPLETE, COMPLETE]


def test_report_after_the_block_is_not_measured_again() -> None:
    pruner = make_pruner(build=build)

    def objective(trial: optuna.Trial) -> float:
        width = suggest_width(trial)
        with pruner.trial(trial, build({"width": width})) as run:
            slowly(run.step, 3, 0.03)
        trial.report(1.0, 0)
        return 1.0 if not trial.should_prune() else 0.0

    study = study_of(SMALL)
    study.optimize(objective, n_trials=1, pruner=pruner)
    assert record_of(study.trials[0]).measured["time"] > 0.05
    assert len(pruner.guard.log.records()) == 1
