"""The trials of many tests: one linear layer, narrow enough for a budget of 1 MiB, or too wide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState
from torch import nn

from perfguard import Workload
from perfguard_optuna import GuardedStudy, OptunaGuard, PerfGuardPruner, create_study
from tests.doubles import BARE_A100, ReplayPredictor

COMPLETE, PRUNED, FAIL = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL
SMALL, LARGE = 8, 4096
"""Widths that need about 17 KiB and 2.5 MiB."""
QUIET_SAMPLERS = [
    pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning"),
    pytest.mark.filterwarnings("ignore:Constraints have been set, but CmaEsSampler"),
]


def workload(width: int, **fields: Any) -> Workload:
    return Workload(nn.Linear(64, width), inputs=(32, 64), loss=torch.mean, **fields)


def build(params: Mapping[str, Any]) -> Workload:
    return workload(params["width"])


def train(width: int) -> float:
    """Three steps."""
    return train_model(nn.Linear(64, width), num_steps=3)


def train_model(model: nn.Module, *, num_steps: int, after_step: Callable[[int], object] = lambda _: None) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = model(torch.ones(32, 64)).mean()
        loss.backward()
        optimizer.step()
        after_step(step)
    return float(loss.detach())


def suggest_width(trial: optuna.Trial) -> int:
    return trial.suggest_int("width", SMALL, LARGE)


def only_suggest(trial: optuna.Trial) -> float:
    return float(suggest_width(trial))


def objective(trial: optuna.Trial) -> float:
    """Train. It never asks a pruner."""
    return train(suggest_width(trial))


def settings(**options: Any) -> dict[str, Any]:
    """Those of a guard with a budget of 1 MiB, a log in memory, and ``options``."""
    return {"gpu": BARE_A100, "memory_budget": "1MiB", "predictor": ReplayPredictor(), "log": False} | options


def make_guard(**options: Any) -> OptunaGuard:
    return OptunaGuard(**settings(**options))


def make_pruner(**options: Any) -> PerfGuardPruner:
    return PerfGuardPruner(**settings(**{"build": build} | options))


def study_of(*proposals: Mapping[str, Any] | int, **options: Any) -> GuardedStudy:
    """A guarded study that is going to propose these parameters, or widths, in order."""
    study = create_study(**options)
    for proposal in proposals:
        study.enqueue_trial({"width": proposal} if isinstance(proposal, int) else dict(proposal))
    return study


def run_study(
    *proposals: Mapping[str, Any] | int, objective: Callable[[optuna.Trial], Any] = objective, **options: Any
) -> GuardedStudy:
    """A guarded study that has proposed them, each once; ``options`` are those of its guard."""
    study = study_of(*proposals)
    study.optimize(objective, n_trials=len(proposals), count="proposed", pruner=make_pruner(**options))
    return study


def plain_study_of(*widths: int, **options: Any) -> optuna.Study:
    """A study of Optuna's own that is going to propose these widths, in order."""
    study = optuna.create_study(**options)
    for width in widths:
        study.enqueue_trial({"width": width})
    return study


def states(study: optuna.Study) -> list[TrialState]:
    return [trial.state for trial in study.trials]
