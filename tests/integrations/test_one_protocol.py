"""The settings of a guard mean the same in both tuners: the same events leave the same rows in the log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import torch
from ray import cloudpickle
from ray.tune.experiment import Trial
from torch import nn

from perfguard import Guard, MeasurementStore, Workload
from perfguard.exceptions import BudgetWarning
from perfguard_optuna import guarded, repair_of
from perfguard_ray import PerfGuardCallback, PerfGuardVariantGenerator
from perfguard_ray.callback import metrics_of
from tests.doubles import BARE_A100, ReplayPredictor
from tests.integrations.one_layer import plain_study_of, suggest_width, train

pytestmark = pytest.mark.usefixtures("pretended_gpu")
Rows = list[tuple[str, str | None, str]]
"""What happened to each try, how it ended, and the note."""


def build(params: Mapping[str, Any]) -> Workload:
    return Workload(nn.Linear(64, params["width"]), inputs=(512, 64), loss=torch.mean, steps=3)


def settings(**options: Any) -> dict[str, Any]:
    return {"gpu": BARE_A100, "build": build, "predictor": ReplayPredictor(), "memory_budget": "8MiB"} | options


def rows_of(log: Path) -> Rows:
    with MeasurementStore(log) as store:
        return [(row.in_words, row.status, row.cut_short) for row in store.records()]


def optuna_rows(log: Path, num_failures: int, **options: Any) -> Rows:
    """Run a trial in a study of Optuna. It runs out of memory so often."""
    failures = iter(range(num_failures))

    def objective(trial: optuna.Trial) -> float:
        repair_of(trial)
        loss = train(suggest_width(trial))
        if next(failures, None) is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if trial.should_prune():
            raise optuna.TrialPruned
        return loss

    plain_study_of(128).optimize(guarded(objective, log=str(log), **settings(**options)), n_trials=1)
    return rows_of(log)


def ray_rows(log: Path, num_failures: int, **options: Any) -> Rows:
    """Play what Tune calls for a trial that runs out of memory so often. Tune would start it as often as it fails."""
    search = PerfGuardVariantGenerator(log=str(log), **settings(**options))
    callback, config = PerfGuardCallback(search), {"width": 128}
    error = log.with_suffix(".pkl")
    error.write_bytes(cloudpickle.dumps(RuntimeError("OutOfMemoryError: CUDA out of memory")))
    trial: Any = SimpleNamespace(
        trial_id="a",
        config=config,
        experiment_tag="0",
        latest_checkpoint_result=None,
        stopping_criterion={},
        status=Trial.RUNNING,
        max_failures=-1,
        pickled_error_file=str(error),
        should_stop=lambda result: False,
    )
    trial.set_config = lambda config: setattr(trial, "config", config)
    search.ledger.entries["a"] = search.ledger.judge(config)
    device = search.ledger.guard.device
    for failure in range(num_failures + 1):
        callback.on_trial_start(0, [], trial)
        run = SimpleNamespace(pace=None, so_far=lambda: search.ledger.measurement(search.ledger.entries["a"]))
        report = metrics_of(run) | {"perfguard/num_steps": 3, "perfguard/device_id": device.id, "perfguard/total_time_s": 1.0}  # type: ignore[arg-type]
        callback.on_trial_result(0, [], trial, {**report, "done": bool(trial.stopping_criterion)})
        if failure < num_failures:
            callback.on_trial_recover(0, [], trial)
        if trial.status == Trial.TERMINATED:
            break
    callback.on_trial_complete(0, [], trial)
    return rows_of(log)


@pytest.fixture(autouse=True)
def stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tune's controller ends a trial when the callback asks it to."""
    monkeypatch.setattr("perfguard_ray.callback._stop", lambda trial: setattr(trial, "status", Trial.TERMINATED))


@pytest.mark.parametrize("on_violation", ["prune", "repair"])
@pytest.mark.parametrize(
    ("on_oom", "num_failures", "rows"),
    [
        ("prune", 0, [("launched", "ok", "")]),
        ("prune", 1, [("launched", "oom", "")]),
        ("repair", 1, [("launched", "oom", ""), ("repaired", "ok", "")]),
        ("repair", 2, [("launched", "oom", ""), ("repaired", "oom", "")]),
    ],
)
def test_on_oom_decides_on_a_trial_out_of_memory(
    on_violation: str, on_oom: str, num_failures: int, rows: Rows, tmp_path: Path
) -> None:
    options = {"on_violation": on_violation, "on_oom": on_oom}
    for play in (optuna_rows, ray_rows):
        found = play(tmp_path / f"{play.__name__}.db", num_failures, **options)
        assert [(in_words, status) for in_words, status, _ in found] == [(in_words, status) for in_words, status, _ in rows]


@pytest.mark.parametrize(("on_violation", "cut_short"), [("prune", "too slow"), ("repair", "too slow"), ("warn", "")])
@pytest.mark.filterwarnings(f"ignore::{BudgetWarning.__module__}.BudgetWarning")
def test_pace_ends_a_trial_and_its_steps_are_learnt(
    on_violation: str, cut_short: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Guard, "breaks_time_budget", lambda *_, **__: "at the measured pace it takes 2 h")
    options = {"on_violation": on_violation, "time_budget": "1h"}
    for play in (optuna_rows, ray_rows):
        assert play(tmp_path / f"{play.__name__}.db", 0, **options) == [("launched", "ok", cut_short)]
