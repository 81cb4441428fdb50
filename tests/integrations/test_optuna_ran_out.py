"""A trial that runs out of memory all the same runs once more, repaired, and one that hangs is ended with its cause."""

from __future__ import annotations

import functools
import gc
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from torch import nn

from perfguard import MeasurementStore, Workload
from perfguard.exceptions import ConfigurationError, MeasurementWarning, UnguardedTrialWarning
from perfguard.leftovers import largest_tensors
from perfguard.measure import Reading
from perfguard_optuna import PerfGuardPruner, guarded, record_of, repair_of
from tests.doubles import PretendedGpuProbe
from tests.integrations.one_layer import COMPLETE, PRUNED, SMALL, build, make_guard, settings, states, study_of, suggest_width

pytestmark = pytest.mark.usefixtures("pretended_gpu")
BATCH = 512


class Greedy:
    """Trains with micro-batches as the repair says. It runs out of memory in the second step of its first tries."""

    def __init__(self, dies: int = 1) -> None:
        self.dies = dies
        self.tries: list[tuple[int, int]] = []
        """Number of the try within its trial, and size of the micro-batch."""
        self.error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        self.model: weakref.ref[nn.Module] | None = None

    def __call__(self, trial: optuna.Trial) -> float:
        assert self.model is None or self.model() is None, "the try before holds its model"
        width, repair = suggest_width(trial), repair_of(trial)
        micro_batch = repair.micro_batch_size or BATCH
        assert micro_batch * repair.accumulation == BATCH
        self.tries.append((trial.user_attrs.get("perfguard:try", 1), micro_batch))
        model = nn.Linear(64, width)
        self.model = weakref.ref(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            for _ in range(repair.accumulation):
                (model(torch.ones(micro_batch, 64)).mean() / repair.accumulation).backward()
                if len(self.tries) <= self.dies and step:
                    raise self.error  # which keeps the frames
            optimizer.step()
            trial.report(float(len(self.tries)), step)
        return 1.0


def wide_batch(params: Any) -> Workload:
    return Workload(nn.Linear(64, params["width"]), inputs=(BATCH, 64), loss=torch.mean)


def repairing(objective: Callable[[optuna.Trial], float], **options: Any) -> Any:
    return guarded(objective, **settings(**{"memory_budget": "8MiB", "build": wide_batch, "on_oom": "repair"} | options))


def test_trial_out_of_memory_runs_once_more_with_smaller_batches(tmp_path: Path) -> None:
    objective, study = Greedy(), study_of(128, 128)
    study.optimize(repairing(objective, log=str(tmp_path / "log.db")), n_trials=2)
    assert states(study) == [COMPLETE, COMPLETE]
    assert objective.tries == [(1, 512), (2, 256), (1, 512)]
    assert study.trials[0].intermediate_values == {0: 2.0, 1: 2.0}, "those of the second try"
    record = record_of(study.trials[0])
    assert (record.status, record.in_words) == ("ok", "repaired")
    assert "; with micro-batch 256 accumulated 2 times it needs " in record.reason
    assert record.reason.endswith("; its first try (as proposed) ran out of memory")
    rows = [row for row in MeasurementStore(tmp_path / "log.db").records() if row.number == 0]
    assert {(row.status, row.in_words) for row in rows} == {("oom", "launched"), ("ok", "repaired")}
    assert all("time" in row.measured for row in rows)


def test_second_out_of_memory_prunes() -> None:
    objective, study = Greedy(dies=2), study_of(128, 128)
    guarding = repairing(objective)
    study.optimize(guarding, n_trials=2)
    assert states(study) == [PRUNED, COMPLETE]
    assert objective.tries == [(1, 512), (2, 256), (1, 512)]
    assert study.trials[0].constraints["perfguard:memory"] > 0
    assert sorted(row.status for row in guarding.guard.log.records()) == ["ok", "oom", "oom"]


def test_block_around_the_training_leaves_the_repair_to_its_objective() -> None:
    objective, guard = Greedy(), make_guard(memory_budget="8MiB", build=wide_batch, on_oom="repair")

    def inline(trial: optuna.Trial) -> float:
        suggest_width(trial)
        with guard.trial(trial):
            return objective(trial)

    study = study_of(128)
    study.optimize(inline, n_trials=1, pruner=PerfGuardPruner(guard=guard))
    assert states(study) == [COMPLETE]
    assert [row.status for row in guard.log.records()] == ["oom", "ok"]


class AbsurdProbe(PretendedGpuProbe):
    """Reads 1 PiB, which no guard believes."""

    def read(self) -> Reading:
        return Reading("pretended", peak_memory_bytes=2**50)


def test_repair_does_not_wait_until_the_guard_believes_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first try is repaired already. Judged again, it would run as before, and crash as before."""
    monkeypatch.setattr("perfguard.measure.run.GpuProbe", AbsurdProbe)
    objective, study = Greedy(), study_of(128)
    study.optimize(repairing(objective, memory_budget="600KiB", on_violation="repair"), n_trials=1)
    assert states(study) == [COMPLETE]
    assert objective.tries == [(1, 256), (2, 128)]


def test_trial_that_no_remedy_makes_smaller_is_pruned() -> None:
    def mostly_weights(params: Any) -> Workload:
        return Workload(nn.Linear(64, 2**16), inputs=(2, 64), loss=torch.mean)

    objective, study = Greedy(), study_of(128)
    study.optimize(repairing(objective, memory_budget="1GiB", build=mostly_weights), n_trials=1)
    assert states(study) == [PRUNED]
    assert objective.tries == [(1, 512)]


def test_objective_that_reads_no_repair_is_pruned_with_one_warning() -> None:
    def unrepaired(trial: optuna.Trial) -> float:
        raise torch.OutOfMemoryError(f"CUDA out of memory at {suggest_width(trial)}")

    study = study_of(SMALL, SMALL)
    with pytest.warns(UnguardedTrialWarning, match=r"before its objective called `repair_of\(trial\)`") as caught:
        study.optimize(repairing(unrepaired), n_trials=2)
    assert (states(study), len(caught)) == ([PRUNED, PRUNED], 1)


_history: list[torch.Tensor] = []


def test_what_the_first_try_still_holds_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"is_initialized": True, "memory_allocated": 9 * 2**30, "empty_cache": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    on_cpu = functools.partial(largest_tensors, "cpu", 1)
    monkeypatch.setattr("perfguard.leftovers.largest_tensors", lambda _: on_cpu())
    monkeypatch.setattr(f"{__name__}._history", [torch.ones(2**22)])
    gc.unfreeze()  # conftest.py has hidden this module from the garbage collector
    with pytest.warns(MeasurementWarning, match=rf"9\.00 GiB are still .* \(4194304,\) of 16\.0 MiB in {__name__}\._history"):
        study_of(128).optimize(repairing(Greedy()), n_trials=1)
    gc.freeze()


def test_settings_that_cannot_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="on_oom must be one of prune, repair, but got 'retry'"):
        make_guard(on_oom="retry")
    with pytest.raises(ConfigurationError, match="hard_time_limit must look like"):
        make_guard(hard_time_limit="soon")
    with pytest.raises(ConfigurationError, match="on_oom='repair' needs build="):
        repairing(Greedy(), build=None)
    pruner = PerfGuardPruner(**settings(build=build, hard_time_limit="1h"))
    with pytest.raises(ConfigurationError, match="work where PerfGuard calls the objective"):
        optuna.create_study(pruner=pruner).optimize(lambda trial: suggest_width(trial) + trial.should_prune(), n_trials=1)
    monkeypatch.setattr("perfguard_optuna.study.leads_ranks", lambda: True)
    with pytest.raises(ConfigurationError, match="for trials of one process"):
        study_of(SMALL).optimize(suggest_width, n_trials=1, pruner=pruner)


def sleeps(trial: optuna.Trial) -> float:
    time.sleep(60)
    raise AssertionError


def loops(trial: optuna.Trial) -> float:
    while True:
        try:
            sum(range(100))
        except Exception:  # an interrupt is none
            continue


@pytest.mark.parametrize(("hangs", "n_jobs"), [(sleeps, 1), (loops, 1), (loops, 2)])
def test_trial_that_hangs_is_pruned_with_the_line_where_it_stood(hangs: Callable[[optuna.Trial], float], n_jobs: int) -> None:
    def objective(trial: optuna.Trial) -> float:
        width = suggest_width(trial)
        return hangs(trial) if trial.number == 0 else float(width)

    study, pruner = study_of(SMALL, SMALL, SMALL), PerfGuardPruner(**settings(build=build, hard_time_limit="1s"))
    pruner.guard.check(build({"width": SMALL}))  # which imports what a verdict needs
    study.optimize(objective, n_trials=3, n_jobs=n_jobs, pruner=pruner)
    assert states(study) == [PRUNED, COMPLETE, COMPLETE]
    reason = study.trials[0].user_attrs["perfguard:stopped"]
    assert reason.startswith(f"ran for 1.00 s, hard_time_limit; it stood at {__file__}:")
    assert reason.endswith(f"({hangs.__name__})")
    assert record_of(study.trials[0]).breaks("time")
    assert sorted(row.status or "" for row in pruner.guard.log.records()) == ["ok", "ok", "timeout"]


def test_timeout_of_a_socket_is_an_error_of_the_trial() -> None:
    def times_out(trial: optuna.Trial) -> float:
        raise TimeoutError(f"the server did not answer {suggest_width(trial)}")

    pruner = PerfGuardPruner(**settings(build=build, hard_time_limit="1h"))
    with pytest.raises(TimeoutError, match="did not answer"):
        study_of(SMALL).optimize(times_out, n_trials=1, pruner=pruner)
    assert [row.status for row in pruner.guard.log.records()] == ["failed"]
