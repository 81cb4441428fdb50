"""The sweeper of Hydra, with real Hydra: applications in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

pytest.importorskip("hydra", reason="the group dev of pyproject.toml has hydra-core")

from perfguard.exceptions import ConfigurationError
from perfguard.predictor import Estimate
from perfguard_hydra.space import SearchSpace
from perfguard_hydra.sweep import SweepSettings, in_launch_order, values_of

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
defaults:
  - override hydra/sweeper: perfguard
  - _self_
width: 64
ends: well
hydra:
  output_subdir: null
  sweep: {dir: runs}
  sweeper:
    gpu: a100
    storage: sqlite:///study.db
    study_name: sweep
    guard: {memory_budget: 1GiB, log: false}
"""
APPLICATION = """
import hydra, optuna, torch
from torch import nn


@hydra.main(version_base=None, config_path=".", config_name="config")
def main(config):
    model = nn.Linear(64, config.width)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(1280, 64)).square().mean()
        loss.backward()
        optimizer.step()
    print("trained", config.width, flush=True)
    if not loss.is_meta and config.ends == "pruned":
        raise optuna.TrialPruned("it diverges")
    if config.ends == "out of memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if config.ends == "failed":
        raise ValueError("a mistake of the task")
    return loss.item()


main()
"""
SEEDED = ("hydra/sweeper/sampler=random", "hydra.sweeper.sampler.seed=1")
WIDE = 400_000
"""A width that needs about 4 GiB."""


def sweep(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run the application with ``--multirun``, and return its exit status and all that it printed."""
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "app.py").write_text(APPLICATION)
    path = ":".join(str(ROOT / part) for part in ("", "integrations", "models"))
    command = [sys.executable, "app.py", "--multirun", *arguments]
    environment = {"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False)
    return done.returncode, done.stdout + done.stderr


def trials_of(folder: Path) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name="sweep", storage=f"sqlite:///{folder}/study.db").trials


@pytest.mark.slow
def test_what_does_not_fit_takes_no_slot_and_is_replaced(tmp_path: Path) -> None:
    status, printed = sweep(tmp_path, f"width=choice(64,128,{WIDE})", "hydra.sweeper.n_trials=4", *SEEDED)
    assert status == 0, printed
    trials = trials_of(tmp_path)
    pruned = [trial for trial in trials if trial.state == TrialState.PRUNED]
    completed = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    assert len(completed) == 4
    assert printed.count("Launching 2 jobs") == 2, "each batch is full"
    assert pruned
    assert all(trial.params["width"] == WIDE and trial.constraints["perfguard:memory"] > 0 for trial in pruned)
    assert f"trained {WIDE}" not in printed
    assert "best_value" in (tmp_path / "runs" / "optimization_results.yaml").read_text()


@pytest.mark.slow
def test_neither_a_pruned_job_nor_one_out_of_memory_ends_the_sweep(tmp_path: Path) -> None:
    status, printed = sweep(tmp_path, "ends=choice(well,pruned,'out of memory')", "hydra/sweeper/sampler=grid")
    assert status == 0, printed
    ended = {trial.params["ends"].strip("'"): trial.state for trial in trials_of(tmp_path)}
    assert ended == {"well": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "out of memory": TrialState.PRUNED}


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "status"), [(0.0, 1), (1.0, 0)])
def test_a_mistake_of_the_task_ends_the_sweep_as_max_failure_rate_says(rate: float, status: int, tmp_path: Path) -> None:
    found, printed = sweep(tmp_path, "ends=failed", "hydra.sweeper.n_trials=2", f"hydra.sweeper.max_failure_rate={rate}")
    assert found == status, printed
    assert {trial.state for trial in trials_of(tmp_path)} == {TrialState.FAIL}
    assert ("a mistake of the task" in printed) or not status


@pytest.mark.slow
def test_a_sweep_in_which_nothing_fits_ends(tmp_path: Path) -> None:
    status, printed = sweep(tmp_path, f"width=choice({WIDE},{2 * WIDE})", "hydra.sweeper.guard.memory_budget=460MiB")
    assert status == 0, printed
    assert "Nothing fits" in printed
    assert "Launching" not in printed


@pytest.mark.parametrize(
    ("override", "distribution"),
    [
        ("x=choice(1,2.5,true)", CategoricalDistribution([1, 2.5, True])),
        ("x=range(1,8)", IntDistribution(1, 8)),
        ("x=range(1,8,step=2)", IntDistribution(1, 7, step=2)),
        ("x=range(0,1,step=0.25)", FloatDistribution(0, 1, step=0.25)),
        ("x=interval(1,8)", FloatDistribution(1, 8)),
        ("x=interval(0.0,1)", FloatDistribution(0, 1)),
        ("x=int(interval(1.0,8.0))", IntDistribution(1, 8)),
        ("x=tag(log,interval(1e-5,1e-2))", FloatDistribution(1e-5, 1e-2, log=True)),
        ("+x=tag(log,int(interval(1,64)))", IntDistribution(1, 64, log=True)),
    ],
)
def test_an_override_that_sweeps_is_a_distribution(override: str, distribution: BaseDistribution) -> None:
    assert SearchSpace.parse([override]).distributions == {override.partition("=")[0]: distribution}


def test_the_last_override_of_a_key_counts() -> None:
    space = SearchSpace.parse(["x=interval(0.0,1.0)", "y=1", "x=0.5", "y=choice(1,2)"])
    assert space.fixed == {"x": "x=0.5"}
    assert space.distributions == {"y": CategoricalDistribution([1, 2])}


def test_the_overrides_of_a_job_are_its_parameters_and_what_is_fixed() -> None:
    space = SearchSpace.parse(["x=choice('a b',c)", "~y", "z=1"])
    params = space.suggest(optuna.create_study(sampler=optuna.samplers.GridSampler(space.grid())).ask())
    assert space.overrides(params) in {("x='a b'", "~y", "z=1"), ("x=c", "~y", "z=1")}


def test_more_parameters_are_suggested_by_a_function() -> None:
    space = SearchSpace.parse(["x=choice(1)"], extend=lambda trial: trial.suggest_int("y", 2, 2))
    assert space.overrides(space.suggest(optuna.create_study().ask())) == ("x=1", "y=2")


def test_a_grid_of_something_continuous_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="A grid needs a choice or a range for 'x'"):
        SearchSpace.parse(["x=interval(0.0,1.0)"]).grid()


def test_a_grid_holds_both_ends_of_a_range() -> None:
    grid = SearchSpace.parse(["x=range(1,3)", "y=range(0,1,step=0.5)"]).grid()
    assert {name: list(values) for name, values in grid.items()} == {"x": [1, 2, 3], "y": [0.0, 0.5, 1.0]}


def _job(**medians: float) -> Any:
    predicted = {quantity: Estimate(median, 0.1) for quantity, median in medians.items()}
    return SimpleNamespace(verdict=SimpleNamespace(predicted=predicted))


def test_the_longest_job_of_a_batch_begins_first() -> None:
    jobs = [_job(time=20, step_time=3), _job(time=90, step_time=1), _job(time=50, step_time=2)]
    assert in_launch_order(jobs) == [jobs[1], jobs[2], jobs[0]]


def test_jobs_are_compared_by_their_steps_where_the_time_of_one_is_not_known() -> None:
    jobs = [_job(), _job(time=90, step_time=1), _job(step_time=2)]
    assert in_launch_order(jobs) == [jobs[2], jobs[1], jobs[0]]


def test_what_a_task_returns_is_checked() -> None:
    assert values_of("1.5", num_objectives=1) == [1.5]
    assert values_of((1, 2), num_objectives=2) == [1.0, 2.0]
    with pytest.raises(ConfigurationError, match="must return a number, one for each direction, but it returned None"):
        values_of(None, num_objectives=1)
    with pytest.raises(ConfigurationError, match="a list of 2 numbers"):
        values_of([1.0], num_objectives=2)


def test_settings_that_cannot_be_right_are_errors() -> None:
    with pytest.raises(ConfigurationError, match=r"hydra\.sweeper\.n_jobs must be at least 1"):
        SweepSettings(n_jobs=0)
    with pytest.raises(ConfigurationError, match="max_failure_rate must lie in"):
        SweepSettings(max_failure_rate=2)
    with pytest.raises(ConfigurationError, match="needs a description of the trials"):
        SweepSettings(guard={"on_violation": "repair"})
