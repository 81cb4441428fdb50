"""What a study must never do: learn of an absent GPU from a laptop's processor, or be ended by an objective that does nothing."""

from __future__ import annotations

import copy
import functools
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState
from torch import nn

from perfguard import Guard, Workload
from perfguard.exceptions import MeasurementWarning
from perfguard.predictor import Predictor, load_predictor
from perfguard_optuna import OptunaGuard, record_of

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU"),
    pytest.mark.filterwarnings("ignore::perfguard.exceptions.MeasurementWarning"),
    pytest.mark.filterwarnings("ignore::perfguard.exceptions.DriftWarning"),
]
A100 = "a100-pcie-40gb"
BUDGETS = {"a100": "4GiB", "cpu": "512MiB"}
WIDTHS = [256, 512, 768, 1024, 384, 640, 896, 320]


def make_model(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(512, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))


def build(params: Mapping[str, Any]) -> Workload:
    return Workload(make_model(params["width"]), (256, 512), loss=torch.mean, optimizer=torch.optim.Adam, steps=10)


def train(width: int) -> None:
    model, batch = make_model(width), torch.ones(256, 512)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(10):
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()


def run_inline(guard: OptunaGuard, trials: int = 8) -> optuna.Study:
    """Really train, on the processor."""
    study = optuna.create_study()

    def objective(trial: optuna.Trial) -> float:
        width = trial.suggest_categorical("width", WIDTHS)
        with guard.trial(trial, build({"width": width})):
            train(width)
        return float(width)

    for width in WIDTHS[:trials]:
        study.enqueue_trial({"width": width})
    study.optimize(objective, n_trials=trials)
    return study


@functools.cache
def shipped() -> Predictor:
    return load_predictor()


def unlearnt() -> Predictor:
    """As a new process loads it."""
    return copy.deepcopy(shipped())


@functools.cache
def fresh_verdicts(gpu: str) -> list[tuple[Any, ...]]:
    return verdicts(gpu, log=False)


def verdicts(gpu: str, log: str | bool) -> list[tuple[Any, ...]]:
    """What a guard of a new process says of steps of every width."""
    guard = Guard(gpu, log=log, memory_budget=BUDGETS[gpu], time_budget="2min", predictor=unlearnt())  # type: ignore[arg-type]
    checked = [guard.check(build({"width": width})) for width in WIDTHS]
    guard.log.close()
    return [(verdict.action, verdict.reason, verdict.p_violation) for verdict in checked]


def test_laptop_smoke_test_teaches_a100_nothing(tmp_path: Path) -> None:
    """Finding 1: steps of a CPU were learnt as an A100's, and a later process pruned 3 of 3 on 16.9 to 32 min."""
    log = str(tmp_path / "log.db")
    fresh = fresh_verdicts("a100")
    guard = OptunaGuard("a100", log=log, predictor=unlearnt(), memory_budget=BUDGETS["a100"], time_budget="2min")
    with pytest.warns(MeasurementWarning, match="no NVIDIA A100.*Verdicts are given.*nothing is learnt.*gpu='auto'") as caught:
        study = run_inline(guard)
    assert len([warning for warning in caught if warning.category is MeasurementWarning]) == 1
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 8
    for trial in study.trials:
        assert "this process has no NVIDIA A100" in trial.user_attrs["perfguard:not_measured"]
        assert not [name for name in trial.user_attrs if "_measured_" in name]
    assert guard.log.observations(A100) == []
    logged = [record for record in guard.log.records() if record.status is not None]
    assert len(logged) == 8  # what it cost is kept, as the processor's
    guard.log.close()
    assert verdicts("a100", log) == fresh


def test_out_of_memory_trial_of_an_absent_gpu_has_a_status() -> None:
    """It says why the trial was pruned, but is no violation of the GPU's budget: this machine's memory ran out."""
    guard = OptunaGuard("a100", log=False, predictor=unlearnt())

    def objective(trial: optuna.Trial) -> float:
        with guard.trial(trial, build({"width": trial.suggest_int("width", 8, 8)})):
            raise MemoryError("this machine's")

    study = optuna.create_study()
    study.optimize(objective, n_trials=1)
    (trial,) = study.trials
    record = record_of(trial)
    assert (trial.state, record.status) == (TrialState.PRUNED, "oom")
    assert "this process has no NVIDIA A100" in record.not_measured
    assert not record.is_measured
    assert not record.violates


def test_laptop_pace_does_not_stop_an_a100_trial(tmp_path: Path) -> None:
    """30 steps of 20 ms would break 100 ms; on an A100 they would not."""
    guard = OptunaGuard("a100", log=False, predictor=unlearnt(), time_budget="100ms")
    study = optuna.create_study()

    def objective(trial: optuna.Trial) -> float:
        with guard.trial(trial, build({"width": 256})) as run:
            for _ in range(30):
                time.sleep(0.02)
                run.step()
        return 0.0

    study.optimize(objective, n_trials=1)
    assert study.trials[0].state == TrialState.COMPLETE


def returns_at_once(_run: Any) -> None:
    """A mock."""


def marks_steps(run: Any) -> None:
    for _ in range(10):
        run.step()


def sleeps_in_steps(run: Any) -> None:
    for _ in range(4):
        time.sleep(0.0005)
        run.step()


def holds_a_little(run: Any) -> None:
    kept = torch.ones(2**16 + int(time.perf_counter() * 1e6) % 2**17)
    marks_steps(run)
    del kept


def runs_in_a_process_that_grows(run: Any) -> None:
    """Another thread, a cache, a library: the growth is as much as the steps would need."""
    marks_steps(run)
    _GROWN.append(bytearray(random.randbytes(4 * 2**20)))


_GROWN: list[bytearray] = []
MOCKS = [
    (returns_at_once, "cpu"), (sleeps_in_steps, "cpu"), (holds_a_little, "cpu"), (runs_in_a_process_that_grows, "cpu"),
    (marks_steps, "a100"),
]  # fmt: skip


@pytest.mark.parametrize(("mock", "gpu"), MOCKS)
def test_mocked_objective_teaches_nothing(mock: Callable[[Any], None], gpu: str, tmp_path: Path) -> None:
    """Finding 2: readings near zero widened intervals to (107 B to 11.7 TiB), 300 prunes in a row, "Nothing fits"."""
    log = str(tmp_path / "log.db")
    fresh = fresh_verdicts(gpu)
    guard = OptunaGuard(gpu, log=log, predictor=unlearnt(), memory_budget=BUDGETS[gpu], time_budget="2min")
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))

    def objective(trial: optuna.Trial) -> float:
        width = trial.suggest_categorical("width", WIDTHS)
        with guard.trial(trial, build({"width": width})) as run:
            mock(run)
        return float(width)

    study.optimize(objective, n_trials=12)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 12
    guard.log.close()
    assert verdicts(gpu, log) == fresh
