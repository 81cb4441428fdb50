"""PerfGuardSampler: the study spends its trials on what fits, and the inner sampler learns where the border is."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.samplers import (
    BaseSampler,
    BruteForceSampler,
    CmaEsSampler,
    GPSampler,
    NSGAIIISampler,
    PartialFixedSampler,
    QMCSampler,
    RandomSampler,
    TPESampler,
)
from torch import nn

from perfguard import Estimate, Workload
from perfguard.exceptions import ConfigurationError, NothingFeasibleWarning, UnguardedTrialWarning
from perfguard.risk_budget import EVEN_CHANCE
from perfguard_optuna import PerfGuardPruner, PerfGuardSampler, create_study, record_of
from tests.doubles import ReplayPredictor
from tests.integrations import one_layer
from tests.integrations.one_layer import COMPLETE, PRUNED, QUIET_SAMPLERS

pytestmark = [pytest.mark.usefixtures("pretended_gpu"), *QUIET_SAMPLERS]

GRID = {"width": [8, 256, 4096], "batch": [8, 128, 1024]}
GRID_THAT_FITS = [(8, 8), (8, 128), (8, 1024), (256, 8), (256, 128)]


def build(params: Mapping[str, Any]) -> Workload:
    """Needs more than 1 MiB in the corner where both are large: a joint limit."""
    return Workload(nn.Linear(64, params["width"]), inputs=(params["batch"], 64), loss=torch.mean)


def suggest(trial: optuna.Trial) -> tuple[int, int]:
    return trial.suggest_int("width", 8, 4096, log=True), trial.suggest_int("batch", 8, 1024, log=True)


def objective(trial: optuna.Trial) -> float:
    width, batch = suggest(trial)
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    if trial.should_prune():
        raise optuna.TrialPruned
    return width * batch * (1 - lr)  # favours what does not fit


def make_pruner(**options: Any) -> PerfGuardPruner:
    return one_layer.make_pruner(**{"build": build} | options)


def plain_study(inner: BaseSampler, **options: Any) -> optuna.Study:
    pruner = make_pruner(**options)
    return optuna.create_study(direction="maximize", sampler=PerfGuardSampler(inner, pruner, max_seconds=300), pruner=pruner)


def completed(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    return study.get_trials(states=(COMPLETE,))


def fits(study: optuna.Study, params: Mapping[str, Any]) -> bool:
    pruner = study.pruner
    assert isinstance(pruner, PerfGuardPruner)
    return pruner.guard.check(build(params)).action == "launch"


SAMPLERS: dict[str, Callable[[], BaseSampler]] = {
    "tpe": lambda: TPESampler(seed=1),
    "multivariate tpe": lambda: TPESampler(seed=1, multivariate=True, group=True),
    "cma-es": lambda: CmaEsSampler(seed=1),
    "nsga-iii": lambda: NSGAIIISampler(seed=1, population_size=5),
    "qmc": lambda: QMCSampler(seed=1),
    "partial fixed": lambda: PartialFixedSampler({"batch": 512}, TPESampler(seed=1)),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_plain_study_launches_n_trials(name: str) -> None:
    study = plain_study(SAMPLERS[name]())
    study.optimize(objective, n_trials=12)
    assert len(completed(study)) >= 11  # the very first trial of a study is judged after its suggestions
    assert all(fits(study, trial.params) for trial in completed(study))
    rejected = study.get_trials(states=(PRUNED,))
    assert rejected or name == "cma-es"  # which stays where it begins
    assert all(trial.constraints["perfguard:memory"] > 0 for trial in rejected)
    assert all(trial.constraints["perfguard:memory"] < 0 for trial in completed(study))
    assert all("the budget is 1.00 MiB" in record_of(trial).reason for trial in rejected)


def test_two_jobs_share_a_sampler() -> None:
    pruner = make_pruner()
    study = create_study(direction="maximize", sampler=PerfGuardSampler(TPESampler(seed=0), pruner))
    study.optimize(objective, n_trials=12, n_jobs=2, pruner=pruner)
    assert len(completed(study)) == 12
    chances = [pruner.guard.check(build(trial.params)).p_violation for trial in completed(study)]
    assert max(chances) <= EVEN_CHANCE


def test_brute_force_tries_every_fitting_point_in_any_order() -> None:
    """Its tree holds the parameters as the objective suggests them, and said "param_name mismatch" for any other order."""

    def reads_batch_first(params: Mapping[str, Any]) -> Workload:
        return build({"batch": params["batch"], "width": params["width"]})

    def small_space(trial: optuna.Trial) -> float:
        width = trial.suggest_categorical("width", GRID["width"])
        batch = trial.suggest_categorical("batch", GRID["batch"])
        if trial.should_prune():
            raise optuna.TrialPruned
        return float(width + batch)

    study = plain_study(BruteForceSampler(seed=0), build=reads_batch_first)
    study.optimize(small_space, n_trials=60)  # a warning would be an error here
    assert sorted({(trial.params["width"], trial.params["batch"]) for trial in completed(study)}) == sorted(GRID_THAT_FITS)
    assert len(study.trials) <= 11


def conditional_build(params: Mapping[str, Any]) -> Workload:
    width = params["wide"] if params["kind"] == "wide" else params["narrow"]
    return Workload(nn.Linear(64, width), inputs=(32, 64), loss=torch.mean, retain="nothing")


def test_conditional_space_is_followed_by_branch() -> None:
    def conditional(trial: optuna.Trial) -> float:
        kind = trial.suggest_categorical("kind", ["wide", "narrow"])
        width = trial.suggest_int("wide", 512, 3000) if kind == "wide" else trial.suggest_int("narrow", 8, 64)
        if trial.should_prune():
            raise optuna.TrialPruned
        return float(width)

    study = plain_study(TPESampler(seed=0), build=conditional_build)
    study.optimize(conditional, n_trials=15)
    assert len(completed(study)) >= 13  # the first trial, and the first of the other branch
    branches = {trial.params["kind"] for trial in completed(study)}
    assert branches == {"wide", "narrow"}
    assert all(
        trial.params.get("wide", 0) < 2048 and set(trial.params) in ({"kind", "wide"}, {"kind", "narrow"})
        for trial in completed(study)
    )


def test_enqueued_trial_is_judged_but_not_replaced() -> None:
    study = plain_study(RandomSampler(seed=0))
    study.optimize(objective, n_trials=2)
    study.enqueue_trial({"width": 4096, "batch": 1024})
    study.enqueue_trial({"width": 16, "batch": 16})
    study.optimize(objective, n_trials=2)
    large, small = (trial for trial in study.trials if (trial.params["width"], trial.params["batch"]) in ((4096, 1024), (16, 16)))
    assert (large.state, small.state) == (PRUNED, COMPLETE)


def test_resumed_study_knows_its_space(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    for _ in range(2):
        pruner = make_pruner()
        study = optuna.create_study(
            study_name="resumed", storage=storage, load_if_exists=True, direction="maximize",
            sampler=PerfGuardSampler(TPESampler(seed=0), pruner), pruner=pruner,
        )  # fmt: skip
        before = len(completed(study))
        study.optimize(objective, n_trials=5)
    assert len(completed(study)) == before + 5


@pytest.mark.slow
def test_gp_sampler_resumes_a_study_begun_unguarded() -> None:
    """Its first trials carry no constraints, so the later ones carry none either."""
    study = optuna.create_study(direction="maximize", sampler=RandomSampler(seed=0))
    study.optimize(objective, n_trials=6)
    pruner = make_pruner()
    study.sampler = PerfGuardSampler(GPSampler(seed=0, n_startup_trials=2, deterministic_objective=True), pruner, max_seconds=300)
    study.pruner = pruner
    study.optimize(objective, n_trials=3)
    assert [trial.constraints for trial in completed(study)] == [{}] * 9
    assert all(fits(study, trial.params) for trial in completed(study)[6:])


def test_study_that_affords_no_failure_and_finds_no_sure_trial_says_what_to_do() -> None:
    unsure = ReplayPredictor(memory=Estimate(0.8 * 2**20, 1.0))
    study = create_study(sampler=RandomSampler(seed=0))
    with pytest.warns(NothingFeasibleWarning, match=r"300 proposals in a row may break .*, accept failures \(risk=0\.05\)"):
        study.optimize(objective, n_trials=1000, pruner=make_pruner(predictor=unsure, risk=0))
    assert not completed(study)


def test_trial_gets_the_least_bad_after_max_proposals() -> None:
    class Stubborn(RandomSampler):
        """Goes through the same three widths for ever. None of them fits."""

        widths = itertools.cycle([4096, 1024, 2048])

        def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
            return next(self.widths) if param_name == "width" else {"batch": 1024, "lr": 0.01}[param_name]

    pruner = make_pruner()
    study = create_study(direction="maximize", sampler=PerfGuardSampler(Stubborn(), pruner, max_proposals=3))
    study.enqueue_trial({"width": 16, "batch": 16, "lr": 0.1})
    study.optimize(objective, n_trials=2, pruner=pruner, count="proposed")
    assert [(trial.params["width"], trial.state) for trial in study.trials] == [
        (16, COMPLETE), (1024, PRUNED), (4096, PRUNED), (1024, PRUNED), (2048, PRUNED),
    ]  # fmt: skip


def test_constant_parameter_does_not_hide_the_others() -> None:
    def with_a_constant(trial: optuna.Trial) -> float:
        width, batch = suggest(trial)
        trial.suggest_int("layers", 1, 1)
        if trial.should_prune():
            raise optuna.TrialPruned
        return float(width * batch)

    def reads_it(params: Mapping[str, Any]) -> Workload:
        return build(params) if params["layers"] == 1 else build({"width": 1, "batch": 1})

    study = plain_study(RandomSampler(seed=1), build=reads_it)
    study.optimize(with_a_constant, n_trials=12)
    assert len(completed(study)) >= 11


def test_partly_fixed_params_end_only_their_trial() -> None:
    """What the user fixed is not moved, even where it does not fit."""
    pruner = make_pruner()
    sampler = PerfGuardSampler(TPESampler(seed=0, multivariate=True, n_startup_trials=2), pruner, max_proposals=2)
    study = create_study(direction="maximize", sampler=sampler)
    study.optimize(objective, n_trials=4, pruner=pruner)
    study.enqueue_trial({"width": 4096})  # fits with no batch
    study.optimize(objective, n_trials=2, pruner=pruner)
    asked_for = [record for record in pruner.guard.log.records() if record.params["width"] == 4096]
    assert {record.in_words for record in asked_for} == {"pruned"}
    assert len(completed(study)) == 6


def test_a_sampler_pickles() -> None:
    study = plain_study(TPESampler(seed=0))
    study.optimize(objective, n_trials=3)
    twin = pickle.loads(pickle.dumps(study.sampler))
    assert str(twin) == "PerfGuardSampler(TPESampler)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda: ("tpe", make_pruner()), "inner must be an Optuna sampler"),
        (lambda: (TPESampler(), "a100"), "guard must be an OptunaGuard or a PerfGuardPruner"),
        (lambda: (TPESampler(), make_pruner(), 0), "must be positive, but got 0"),
    ],
)
def test_what_cannot_work_is_refused(arguments: Callable[[], tuple[Any, ...]], message: str) -> None:
    inner, guard, *most = arguments()
    with pytest.raises(ConfigurationError, match=message):
        PerfGuardSampler(inner, guard, **({"max_proposals": most[0]} if most else {}))


def test_failing_guard_leaves_search_to_inner_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    study = plain_study(RandomSampler(seed=0))
    sampler = study.sampler
    assert isinstance(sampler, PerfGuardSampler)
    study.optimize(objective, n_trials=2)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no verdict today")

    monkeypatch.setattr(sampler, "_propose", broken)
    with pytest.warns(UnguardedTrialWarning, match="could not guide the search .* no verdict today"):
        study.optimize(objective, n_trials=4)
    assert len(study.trials) >= 6
