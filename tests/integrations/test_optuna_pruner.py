"""PerfGuardPruner in studies of plain Optuna: what it prunes, writes, measures, and survives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial

from perfguard import MeasurementStore, Workload
from perfguard.exceptions import ConfigurationError, LogWarning, PredictorError
from perfguard.quantities import format_seconds
from perfguard_optuna import PerfGuardPruner, record_of
from tests.integrations.one_layer import (
    COMPLETE,
    FAIL,
    LARGE,
    PRUNED,
    SMALL,
    make_guard,
    make_pruner,
    plain_study_of,
    states,
    suggest_width,
    train,
    workload,
)

pytestmark = pytest.mark.usefixtures("pretended_gpu")


def build_steps(params: Mapping[str, Any]) -> Workload:
    return workload(params["width"], steps=3)


class Objective:
    """Asks the pruner once, before anything is allocated, and remembers the widths that it then trained."""

    def __init__(self) -> None:
        self.trained: list[int] = []

    def __call__(self, trial: optuna.Trial) -> float:
        width = suggest_width(trial)
        if trial.should_prune():
            raise optuna.TrialPruned
        self.trained.append(width)
        return train(width)


def test_a_pruned_trial_says_why_in_numbers() -> None:
    pruner = make_pruner(build=build_steps, memory_budget="8MiB", time_budget="20ms", step_time_budget="15ms")
    study = plain_study_of(LARGE, pruner=pruner)
    study.optimize(Objective(), n_trials=1)
    (trial,) = study.trials
    peak = pruner.guard.guard.trace(workload(LARGE)).peak_live_bytes
    spread = math.exp(0.01 * 1.6448536)
    taken, low, high = (format_seconds(0.03 * factor) for factor in (1, 1 / spread, spread))
    reason = f"takes {taken} ({low} to {high}), the budget is 20.0 ms, exceeded with a chance of over 99.9% (50.0% accepted)"
    assert trial.user_attrs == {
        "perfguard:verdict": "prune",
        "perfguard:source": "described",
        "perfguard:accepted": 0.5,
        "perfguard:reason": reason,
        "perfguard:predictor": "replay-1",
        "perfguard:account": '{"memory":[["physics",0.0,0.01,"tensors that live at once"]]}',
        "perfguard:decision_id": pruner.guard.log.records()[0].decision_id,
        "perfguard:guard_s": pruner.guard.log.records()[0].guard_s,
        "perfguard:device_id": pruner.guard.device.id,
        "perfguard:device_name": pruner.guard.device.name,
        "perfguard:capacity_bytes": pruner.guard.device.memory_bytes,
        "perfguard:memory_predicted_bytes": peak,
        "perfguard:memory_low_bytes": pytest.approx(peak / spread),
        "perfguard:memory_high_bytes": pytest.approx(peak * spread),
        "perfguard:memory_limit_bytes": 2**23,
        "perfguard:step_time_predicted_s": 0.01,
        "perfguard:step_time_low_s": pytest.approx(0.01 / spread),
        "perfguard:step_time_high_s": pytest.approx(0.01 * spread),
        "perfguard:step_time_limit_s": 0.015,
        "perfguard:time_predicted_s": pytest.approx(0.03),
        "perfguard:time_low_s": pytest.approx(0.03 / spread),
        "perfguard:time_high_s": pytest.approx(0.03 * spread),
        "perfguard:time_limit_s": 0.02,
    }
    assert record_of(trial).reason == reason  # which is made from the numbers
    assert trial.constraints == {
        "perfguard:memory": pytest.approx(math.log(peak / 2**23)),
        "perfguard:time": pytest.approx(math.log(0.03 / 0.02)),
        "perfguard:step_time": pytest.approx(math.log(0.01 / 0.015)),
    }
    assert trial.constraints["perfguard:time"] > 0 > trial.constraints["perfguard:memory"]


def test_plain_study_trial_is_measured_at_the_next_one() -> None:
    """Without a block nothing says that a trial is over until the next one begins."""
    pruner = make_pruner()

    def objective(trial: optuna.Trial) -> float:
        value = Objective()(trial)
        if trial.number == 2:
            raise ValueError("a mistake of the user")
        return value

    study = plain_study_of(SMALL, LARGE, SMALL, SMALL, pruner=pruner)
    study.optimize(objective, n_trials=4, catch=ValueError)
    records = pruner.guard.log.records(study.study_name)
    assert [(record.number, record.in_words, record.status) for record in records] == [
        (0, "launched", "ok"),
        (1, "pruned", None),
        (2, "launched", "failed"),
        (3, "launched", None),
    ]
    assert "time" in records[0].measured
    assert len(pruner.guard.guard.predictor.learnt) == 1  # type: ignore[attr-defined]


def test_study_survives_a_destroyed_log(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    store = MeasurementStore(path)
    pruner = make_pruner(log=store)
    for file in tmp_path.iterdir():
        file.write_bytes(b"no database" * 1000)
    study, objective = plain_study_of(SMALL, LARGE, SMALL, pruner=pruner), Objective()
    with pytest.warns(LogWarning, match="Rows wait in files beside it") as caught:
        study.optimize(objective, n_trials=3)
    assert len(caught) == 1
    assert states(study) == [COMPLETE, PRUNED, COMPLETE]
    store.close()
    path.unlink()
    with MeasurementStore(path) as mended:
        assert [record.in_words for record in mended.records()] == ["launched", "pruned", "launched"]


class InlineObjective:
    """Judged and measured by ``with pruner.trial(...)``; ``error`` is raised inside the block."""

    def __init__(self, pruner: PerfGuardPruner, *, error: BaseException | None = None, steps_by_hand: int = 0) -> None:
        self.pruner, self.error, self.steps_by_hand = pruner, error, steps_by_hand
        self.trained: list[int] = []

    def __call__(self, trial: optuna.Trial) -> float:
        width = suggest_width(trial)
        with self.pruner.trial(trial, workload(width)) as run:
            self.trained.append(width)
            value = train(width)
            for _ in range(self.steps_by_hand):
                run.step()
            if self.error is not None:
                raise self.error
        return value


@pytest.mark.parametrize(("error", "status"), [(MemoryError(), "oom"), (ValueError("a mistake of the user"), "failed")])
def test_error_in_the_block_prunes_if_memory_ran_out(error: Exception, status: str) -> None:
    pruner = make_pruner(build=None)
    study = plain_study_of(SMALL, SMALL, pruner=pruner)
    study.optimize(InlineObjective(pruner, error=error), n_trials=2, catch=ValueError)
    assert states(study) == [PRUNED if status == "oom" else FAIL] * 2
    assert [record_of(trial).status for trial in study.trials] == [status] * 2


@pytest.mark.parametrize(("steps_by_hand", "num_steps"), [(0, 3), (5, 5)])
def test_marked_steps_replace_optimizer_steps(steps_by_hand: int, num_steps: int) -> None:
    """Steps marked in the block count instead of the optimizer's."""
    pruner = make_pruner(build=None)
    plain_study_of(SMALL, pruner=pruner).optimize(InlineObjective(pruner, steps_by_hand=steps_by_hand), n_trials=1)
    (observation,) = pruner.guard.guard.predictor.learnt  # type: ignore[attr-defined]
    assert observation.measurement.num_steps == num_steps


def test_block_measures_its_own_trial_only() -> None:
    """A trial of another study, which nobody finished, comes before it."""
    pruner = make_pruner()
    plain = plain_study_of(SMALL, pruner=pruner, study_name="plain")
    plain.optimize(Objective(), n_trials=1)
    other = plain_study_of(SMALL, pruner=pruner, study_name="other")
    other.optimize(InlineObjective(pruner), n_trials=1)
    assert record_of(other.trials[0]).status == "ok"
    assert [(decision.study, decision.status) for decision in pruner.guard.log.records()] == [("plain", "ok"), ("other", "ok")]


class CountingPruner(optuna.pruners.BasePruner):
    """Prunes trials at their third report, and remembers whom it was asked about."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        self.asked.append(trial.number)
        return len(trial.intermediate_values) >= 3


def reporting_objective(trial: optuna.Trial) -> float:
    suggest_width(trial)
    for step in range(5):
        trial.report(float(trial.number + step), step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return 0.0


def test_inner_pruner_sees_launched_trials_only() -> None:
    inner = CountingPruner()
    pruner = make_pruner(inner=inner)
    study = plain_study_of(SMALL, LARGE, pruner=pruner)
    study.optimize(reporting_objective, n_trials=2)
    assert states(study) == [PRUNED, PRUNED]
    assert inner.asked == [0, 0, 0]
    assert [record_of(trial).in_words for trial in study.trials] == ["launched", "pruned"]
    assert len(pruner.guard.log.records(study.study_name)) == 2, "each is judged once, however often it asks"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"gpu": "a1000"}, ConfigurationError, "Did you mean 'a100'"),
        ({"build": 3}, ConfigurationError, "build must be a function of the hyperparameters, but got 3"),
        ({"memory_limit": "4GiB"}, ConfigurationError, r"no setting 'memory_limit' \(did you mean 'memory_budget'\?\)"),
        ({"predictor": "crystal-ball"}, PredictorError, "No predictor is called 'crystal-ball'"),
        ({"guard": make_guard()}, ConfigurationError, "Give a guard, or the settings of one"),
        ({"inner": "hyperband"}, ConfigurationError, "inner must be an Optuna pruner"),
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_pruner(**options)
