"""A search in a space of which little or nothing fits ends, repeats itself at most once, and gives up nothing that would run."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import optuna
import pytest
import torch
from optuna.samplers import (
    BaseSampler,
    BruteForceSampler,
    CmaEsSampler,
    GPSampler,
    GridSampler,
    NSGAIISampler,
    QMCSampler,
    RandomSampler,
    TPESampler,
)
from optuna.trial import TrialState
from torch import nn

from perfguard import Estimate, Prediction, Workload
from perfguard.exceptions import NothingFeasibleWarning
from perfguard.rejections import Search
from perfguard.workload import WatchedParams
from perfguard_optuna import PerfGuardSampler, create_study
from tests.doubles import ReplayPredictor
from tests.integrations.one_layer import QUIET_SAMPLERS, make_pruner

pytestmark = [pytest.mark.usefixtures("pretended_gpu"), *QUIET_SAMPLERS]

WIDTHS = [2**k for k in range(3, 13)]
BATCHES = [8, 32, 128, 1024]
SAMPLERS: dict[str, Callable[[], BaseSampler]] = {
    "tpe": lambda: TPESampler(seed=1),
    "random": lambda: RandomSampler(seed=1),
    "gp": lambda: GPSampler(seed=1, n_startup_trials=5, deterministic_objective=True),
    "cma-es": lambda: CmaEsSampler(seed=1),
    "qmc": lambda: QMCSampler(seed=1),
    "grid": lambda: GridSampler({"width": WIDTHS, "batch": BATCHES}),
    "brute force": lambda: BruteForceSampler(seed=1),
    "nsga-ii": lambda: NSGAIISampler(seed=1, population_size=5),
}
FITS = {(8, 8), (16, 8)}
"""Two of forty points: 95% does not fit."""
NUM_TRIALS = 5
SEARCHES = [*((name, "guarded study") for name in SAMPLERS), *((name, "plain study") for name in ("tpe", "nsga-ii", "grid"))]


def build(params: Mapping[str, Any]) -> Workload:
    """Needs 1 KiB, or 4 MiB, of a budget of 1 MiB."""
    return build_of(8 if (params["width"], params["batch"]) in FITS else 2**17)


def build_nothing_that_fits(params: Mapping[str, Any]) -> Workload:
    return build_of(2**17 + params["width"] + params["batch"])


def build_of(width: int) -> Workload:
    return Workload(nn.Linear(8, width), inputs=(8, 8), loss=torch.mean)


def objective(trial: optuna.Trial) -> float:
    width, batch = trial.suggest_categorical("width", WIDTHS), trial.suggest_categorical("batch", BATCHES)
    if trial.should_prune():
        raise optuna.TrialPruned
    return float(width * batch)


def study_of(way: str, inner: BaseSampler, **options: Any) -> optuna.Study:
    """One that has run; a plain one has the sampler around ``inner``."""
    pruner = make_pruner(**{"build": build} | options)
    if way == "guarded study":
        study: optuna.Study = create_study(sampler=inner, direction="maximize", pruner=pruner)
    else:
        study = optuna.create_study(sampler=PerfGuardSampler(inner, pruner), direction="maximize", pruner=pruner)
    study.optimize(objective, n_trials=NUM_TRIALS)
    return study


def num_launched(study: optuna.Study) -> int:
    return len(study.get_trials(states=(TrialState.COMPLETE,)))


def most_repeated(study: optuna.Study) -> int:
    rejected = study.get_trials(states=(TrialState.PRUNED,))
    return max(Counter(tuple(sorted(trial.params.items())) for trial in rejected if trial.params).values())


@pytest.mark.parametrize(("name", "way"), SEARCHES)
def test_study_launches_its_trials_where_little_fits(name: str, way: str) -> None:
    """A sampler that knows nothing of constraints proposes what was rejected, again and again."""
    study = study_of(way, SAMPLERS[name]())
    if name in ("grid", "brute force"):  # which try each point once and end
        assert {
            (trial.params["width"], trial.params["batch"]) for trial in study.get_trials(states=(TrialState.COMPLETE,))
        } == FITS
    else:
        assert num_launched(study) >= (NUM_TRIALS if way == "guarded study" else NUM_TRIALS - 1)  # the first is judged late
    assert most_repeated(study) <= 2


@pytest.mark.parametrize(("name", "way"), SEARCHES)
def test_study_ends_where_nothing_fits(name: str, way: str) -> None:
    with pytest.warns(NothingFeasibleWarning, match=r"Nothing fits: \d+ proposals in a row .* 1\.00 MiB\. .* Raise the budget"):
        study = study_of(way, SAMPLERS[name](), build=build_nothing_that_fits)
    assert num_launched(study) == 0
    assert most_repeated(study) <= 2
    assert len(study.trials) <= 2 * len(WIDTHS) * len(BATCHES) + 2


class Scattering(ReplayPredictor):
    """A step takes what its width says, known to a factor of three (90%)."""

    def predict(self, graph: Any, device: Any, *, steps: int | None = None) -> Prediction:
        exact = super().predict(graph, device, steps=steps)
        step_time = Estimate(0.001 * graph.peak_live_bytes / 2**10, math.log(3) / 1.645)
        return Prediction(exact.peak_memory, step_time, None, exact.predictor, exact.device_id, trained_on_device=True)


@pytest.mark.parametrize("way", ["guarded study", "plain study"])
def test_scattered_times_do_not_end_the_study(way: str) -> None:
    """Nothing is sure to hold the budget, and much is likely to; 300 prunes later "Nothing fits" was said."""
    pruner = make_pruner(
        build=lambda params: build_of(params["width"]), memory_budget=None, step_time_budget="10ms", predictor=Scattering()
    )
    median = pruner.guard.guard.trace(build_of(100)).peak_live_bytes / 2**20
    assert 0.004 < median < 0.02, "the toy's smallest trials need about half of the budget"
    sampler: BaseSampler = RandomSampler(seed=0)
    if way == "guarded study":
        study: optuna.Study = create_study(sampler=sampler, pruner=pruner)
    else:
        study = optuna.create_study(sampler=PerfGuardSampler(sampler, pruner), pruner=pruner)

    def of_width(trial: optuna.Trial) -> float:
        width = trial.suggest_int("width", 60, 400)
        if trial.should_prune():
            raise optuna.TrialPruned
        return float(width)

    study.optimize(of_width, n_trials=8)
    assert num_launched(study) >= 7


@pytest.mark.parametrize("way", ["guarded study", "plain study"])
@pytest.mark.parametrize("name", ["tpe", "grid"])
def test_least_doubtful_proposal_runs_before_the_study_ends_with_nothing(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are predicted to need a hundred times the budget, and each of them would fit."""
    monkeypatch.setattr("perfguard_optuna.guard.Search", functools.partial(Search, most_rejected=60))
    predictor = ReplayPredictor(factor=100.0)
    pruner = make_pruner(build=lambda params: build_of(params["width"] * params["batch"]), predictor=predictor)
    inner = GridSampler({"width": [50, 60, 80, 70], "batch": [8]}) if name == "grid" else TPESampler(seed=1)
    sampler = inner if way == "guarded study" else PerfGuardSampler(inner, pruner)
    study = (create_study if way == "guarded study" else optuna.create_study)(sampler=sampler, pruner=pruner)

    def of_width(trial: optuna.Trial) -> float:
        width, batch = trial.suggest_int("width", 50, 80, step=10), trial.suggest_categorical("batch", [8])
        if trial.should_prune():
            raise optuna.TrialPruned
        predictor.factor = 1.0  # learnt
        return float(width * batch)

    study.optimize(of_width, n_trials=3)
    first = study.get_trials(states=(TrialState.COMPLETE,))[0]
    assert first.params["width"] == 50
    assert "the least doubtful of all proposals" in first.user_attrs["perfguard:reason"]
    if name == "tpe":
        assert num_launched(study) >= 2, "the search goes on"


def test_parameters_know_who_looked_at_them() -> None:
    """`params.pop("width")` went unseen."""
    for look, used in (
        (lambda params: params.pop("a"), {"a"}),
        (lambda params: params.pop("a", 1), {"a"}),
        (lambda params: params.setdefault("a", 1), {"a"}),
        (lambda params: params.update(a=2 * params["a"]), {"a"}),
        (lambda params: params.popitem(), {"a", "b"}),
        (lambda params: params.copy(), {"a", "b"}),
        (lambda params: params | {}, {"a", "b"}),
        (lambda params: {} | params, {"a", "b"}),
        (lambda params: next(reversed(params)), {"a", "b"}),
        (lambda params: "a" in params, {"a"}),
        (len, {"a", "b"}),
        (bool, {"a", "b"}),
        (lambda params: params != {}, {"a", "b"}),
        (lambda params: params.pop("c", None), set()),
    ):
        params = WatchedParams({"a": 1, "b": 2})
        look(params)
        assert params.used.keys() == used
    assert params.missing == {"c"}
    params.setdefault("d", 4)
    assert (params["d"], params.missing, params.given) == (4, {"c", "d"}, {"a": 1, "b": 2})
    with pytest.raises(TypeError, match="unhashable"):
        hash(params)


@pytest.mark.parametrize("most", [20, 21, 22, 23])
def test_study_ends_whoever_counts_the_last_rejection(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler counts its repeats into the same search; where the last one fell to it the study never ended."""
    monkeypatch.setattr("perfguard_optuna.guard.Search", functools.partial(Search, most_rejected=most))
    pruner = make_pruner(build=lambda params: build_of(2**17 + params["width"]))
    study = create_study(sampler=TPESampler(seed=0, n_startup_trials=5), pruner=pruner)

    def of_width(trial: optuna.Trial) -> float:
        assert trial.number <= 2 * most, "the study goes on"
        return float(trial.suggest_int("width", 0, 60))

    with pytest.warns(NothingFeasibleWarning) as caught:
        study.optimize(of_width, n_trials=2)
    assert len([warning for warning in caught if warning.category is NothingFeasibleWarning]) == 1
    assert len(study.trials) <= most + 1


@pytest.mark.parametrize(("learns", "asked", "launched"), [(False, [1, 1, 2, 3, 3], [2]), (True, [1, 1, 2, 3, 4], [2, 3, 4])])
def test_rejected_point_is_judged_again_once_a_trial_ran(learns: bool, asked: list[int], launched: list[int]) -> None:
    """A guard that was wrong at first must not hold it against a point for ever, nor judge it again without a reason."""
    predictor = ReplayPredictor(factor=100.0)
    pruner = make_pruner(build=lambda params: build_of(params["width"]), predictor=predictor)
    study, judged = create_study(pruner=pruner), []

    def of_width(trial: optuna.Trial) -> float:
        width = trial.suggest_int("width", 1, 512)
        predictor.factor = 1.0 if learns else 100.0
        return float(width)

    for width in (512, 512, 1, 512, 512):
        study.enqueue_trial({"width": width})
    study.optimize(of_width, n_trials=5, count="proposed", callbacks=[lambda *_: judged.append(predictor.num_asked)])
    assert judged == asked
    assert [trial.number for trial in study.get_trials(states=(TrialState.COMPLETE,))] == launched
