"""A study of a thousand structures remembers a bounded number of them, and judges the last as the first."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState
from torch import nn

import perfguard_optuna
from perfguard.capture import Answer
from perfguard.graph import OpGraph, trace
from perfguard.workload import CapturedTrial, Workload
from perfguard_optuna import OptunaGuard, PerfGuardPruner, record_of
from perfguard_optuna.capture import ObjectiveBuild
from perfguard_optuna.session import OptunaSession
from perfguard_optuna.study import GuardedObjective
from tests.doubles import BARE_A100, ReplayPredictor
from tests.perfguard.graph.parts import total

pytestmark = pytest.mark.filterwarnings("ignore::perfguard.exceptions.PerfGuardWarning")
GIB = 2**30


@cache
def step() -> OpGraph:
    return trace(Workload(nn.Linear(8, 8), inputs=(4, 8), loss=total, optimizer=torch.optim.SGD))


def run(build: ObjectiveBuild, answer: Callable[..., Answer], answers: dict[str, Answer], *, spares: bool) -> CapturedTrial:
    """Stand in for the process of a dry run: the trial's parameters take as many MiB as its width."""
    question = ("width", optuna.distributions.IntDistribution(1, 10_000))
    build._remembered.note_question(answers, question)
    answers["width"] = answer(*question)
    first, *others = step().storages
    return CapturedTrial(replace(step(), storages=(first._replace(num_bytes=answers["width"].value * 2**20), *others)), steps=100)


@pytest.fixture(autouse=True)
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ObjectiveBuild, "_run", run)
    monkeypatch.setattr(ObjectiveBuild, "start", lambda build: None)


def objective(trial: optuna.Trial) -> float:
    return float(trial.suggest_int("width", 1, 10_000))


def number_of(kind: type) -> int:
    gc.collect()
    return sum(isinstance(one, kind) for one in gc.get_objects())


def test_a_thousand_structures_keep_a_bounded_number_of_objects() -> None:
    before = {kind: number_of(kind) for kind in (CapturedTrial, OpGraph, OptunaSession)}
    pruner = PerfGuardPruner(BARE_A100, memory_budget="1GiB", log=False, predictor=ReplayPredictor())
    study = perfguard_optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for width in (5000, 500):
        study.enqueue_trial({"width": width})
    most: dict[type, int] = {}

    def look(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if trial.number % 250 == 249:
            most.update({kind: max(most.get(kind, 0), number_of(kind) - before[kind]) for kind in before})
        if trial.number == 997:  # those of the beginning once more
            for width in (5000, 500):
                study.enqueue_trial({"width": width})

    study.optimize(objective, 1000, pruner=pruner, count="proposed", callbacks=[look])
    assert most[CapturedTrial] <= 128
    assert most[OptunaSession] <= 128
    assert most[OpGraph] <= 2 * 128 + 500, "beside those of the log's 500 newest runs"
    for trial in study.trials:
        width = trial.params["width"]
        if not 900 < width < 1100:
            assert (trial.state == TrialState.PRUNED) == (width > 1024), width
    for early, late in ((0, 998), (1, 999)):
        one, other = (record_of(study.trials[number]).verdict for number in (early, late))
        assert one is not None
        assert other is not None
        assert (one.action, one.predicted) == (other.action, other.predicted)


def test_a_trial_that_runs_is_known_to_its_end_while_a_thousand_others_pass() -> None:
    # It is judged when it begins. If that was forgotten, it would be judged once more, or count as unguarded.
    guard = OptunaGuard(BARE_A100, memory_budget="1GiB", log=False, predictor=ReplayPredictor())
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    has_begun, may_end = threading.Event(), threading.Event()

    def wait(trial: optuna.Trial) -> float:
        if trial.suggest_int("width", 1, 10_000) == 1:
            has_begun.set()
            assert may_end.wait(60)
            assert not trial.should_prune()
        return 0.0

    guarded = GuardedObjective(wait, guard)
    study.enqueue_trial({"width": 1})
    thread = threading.Thread(target=lambda: study.optimize(guarded, 1))
    thread.start()
    assert has_begun.wait(60)
    study.optimize(guarded, 300)
    may_end.set()
    thread.join()
    verdict: Any = record_of(study.trials[0]).verdict
    assert (verdict.action, verdict.unjudged) == ("launch", "")
    assert verdict.predicted["memory"].median > 2**20
    assert [record.number for record in guard.log.records()].count(0) == 1
