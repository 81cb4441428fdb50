"""Searchers propose the absurd: batches of a million million. It is pruned like anything else that does not fit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState
from torch import nn

from perfguard import Workload
from perfguard_optuna import PerfGuardPruner, create_study, guarded, record_of

pytestmark = pytest.mark.usefixtures("pretended_gpu")

LARGEST = 10**12


def build(params: Mapping[str, Any]) -> Workload:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    return Workload(model, (params["batch_size"], 3, 32, 32), loss=torch.mean, steps=2)


def build_wide(params: Mapping[str, Any]) -> Workload:
    """From a width of 2^30 on not even the model can be described."""
    width = params["batch_size"]
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width))
    return Workload(model, (32, 64), loss=torch.mean, steps=2)


@pytest.mark.parametrize("gpu", ["a100", "cpu"])
@pytest.mark.parametrize("make", [build, build_wide], ids=["batch", "width"])
def test_huge_proposals_leave_no_unguarded_trial(make: Callable[..., Workload], gpu: str) -> None:
    """Each crashed the predictor or the trace, was launched unguarded, and killed the process."""
    launched: list[int] = []

    def objective(trial: optuna.Trial) -> float:
        launched.append(trial.suggest_int("batch_size", 1, LARGEST, log=True))
        return float(launched[-1])

    pruner = PerfGuardPruner(gpu, build=make, memory_budget="4GiB", log=False)
    study = create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        study.optimize(objective, n_trials=40, count="proposed", pruner=pruner)
    assert [str(warning.message) for warning in caught if "judge" in str(warning.message)] == []
    records = [record_of(trial) for trial in study.trials]
    assert {record.in_words for record in records} == {"launched", "pruned"}
    for trial, record in zip(study.trials, records, strict=True):
        batch_size = trial.params["batch_size"]
        assert (batch_size in launched) == (record.in_words == "launched") == (trial.state is TrialState.COMPLETE)
        assert trial.constraints.keys() == {"perfguard:memory"}
        assert (trial.constraints["perfguard:memory"] > 0) == record.is_pruned
    assert max(launched) < 10**7
    assert any("needs at least" in record.reason for record in records)


def test_the_constraint_grows_with_the_batch() -> None:
    """A sampler that learns from constraints must not be told that the hopeless is nearer to feasible than the doubtful."""
    pruner = PerfGuardPruner("a100", build=build, memory_budget="4GiB", log=False)
    study = create_study()
    for exponent in range(3, 13):
        study.enqueue_trial({"batch_size": 10**exponent})
    study.optimize(lambda trial: trial.suggest_int("batch_size", 1, LARGEST), n_trials=10, count="proposed", pruner=pruner)
    violations = [trial.constraints["perfguard:memory"] for trial in study.trials]
    assert violations == sorted(violations)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("gpu", ["a100", "cpu"])
@pytest.mark.parametrize("kind", ["layer", "embedding", "data"])
def test_objective_that_the_host_cannot_even_set_up_is_pruned(kind: str, gpu: str) -> None:
    """Its dry run failed for want of memory, so the hopeless trial was launched, and ended the study with an error."""
    launched: list[int] = []

    def objective(trial: optuna.Trial) -> float:
        size = trial.suggest_int("size", 1, LARGEST)
        if not nn.Linear(1, 1).weight.is_meta:
            launched.append(size)
        data = torch.randn(size if kind == "data" else 32, 256)
        model = nn.Linear(256, size if kind == "layer" else 8)
        words = nn.Embedding(size if kind == "embedding" else 8, 64)
        if gpu == "a100":
            data, model, words = data.cuda(), model.cuda(), words.cuda()
        optimizer = torch.optim.Adam([*model.parameters(), *words.parameters()])
        for _ in range(3):
            optimizer.zero_grad()
            (model(data).mean() + words(torch.zeros(4, dtype=torch.long, device=data.device)).mean()).backward()
            optimizer.step()
        return 0.0

    study = create_study()
    for size in (10**9, 3 * 10**8):  # 1 TB and 307 GB of a layer or of data, 256 GB and 77 GB of words
        study.enqueue_trial({"size": size})
    study.optimize(guarded(objective, gpu, log=False), n_trials=2, count="proposed")
    assert [trial.state for trial in study.trials] == [TrialState.PRUNED] * 2
    assert launched == []
    assert all(trial.constraints["perfguard:memory"] > 0 for trial in study.trials)
