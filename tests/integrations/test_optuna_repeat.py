"""A seeded study that learns from nothing outside of itself repeats itself to the last verdict."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from torch import nn

import perfguard_optuna
from perfguard import MeasurementStore, TensorSpec, Workload
from perfguard_optuna import PerfGuardPruner

NUM_PROPOSALS = 24


def make_model(params: Mapping[str, Any]) -> nn.Module:
    width, depth = params["width"], params["depth"]
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(16, width), *layers, nn.Linear(width, 2))


def build(params: Mapping[str, Any]) -> Workload:
    return Workload(make_model(params), (8, 16), TensorSpec((8,), "int64"), nn.functional.cross_entropy, steps=12)


def suggest(trial: optuna.Trial) -> dict[str, Any]:
    return {"width": trial.suggest_int("width", 8, 128, log=True), "depth": trial.suggest_int("depth", 1, 16)}


def objective(trial: optuna.Trial) -> float:
    params = suggest(trial)
    if trial.should_prune():
        raise optuna.TrialPruned
    model = make_model(params)  # a smoke test on a laptop: it really trains, on the CPU
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(12):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.ones(8, 16)), torch.zeros(8, dtype=torch.int64)).backward()
        optimizer.step()
    return float(abs(params["width"] - 60) / params["depth"])


def one_study(log: Path | bool) -> list[tuple[Any, ...]]:
    """What was proposed and what was said of it, trial by trial, as the log has it."""
    study = perfguard_optuna.create_study(study_name="repeat", sampler=optuna.samplers.TPESampler(seed=3))
    store = MeasurementStore(log if isinstance(log, Path) else ":memory:")
    pruner = PerfGuardPruner("a100", build=build, step_time_budget="6ms", log=store)
    study.optimize(objective, n_trials=NUM_PROPOSALS, pruner=pruner, count="proposed")
    rows = [(record.number, record.params, record.in_words, record.reason, record.predicted) for record in store.records()]
    store.close()
    return rows


@pytest.mark.filterwarnings("ignore::perfguard.exceptions.PerfGuardWarning")
def test_seeded_study_repeats_every_verdict(tmp_path: Path) -> None:
    # Finding 8: the same seed gave another study the next day, because the user's log had grown in between.
    first = one_study(log=False)
    assert {in_words for _, _, in_words, *_ in first} == {"launched", "pruned"}
    assert one_study(log=False) == first
    assert one_study(tmp_path / "own.db") == first
