"""Several trials on one GPU (``share_device``): in threads of one process, and in processes of one study."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import optuna
import pytest

from perfguard import Estimate
from perfguard.device_room import DeviceRoom
from perfguard.measure import run
from perfguard_optuna import create_study
from tests.doubles import PretendedGpuProbe, ReplayPredictor
from tests.integrations.one_layer import COMPLETE, SMALL, make_pruner, train
from tests.warm import processes

pytestmark = pytest.mark.usefixtures("pretended_gpu")

TWO_FIT = ReplayPredictor(memory=Estimate(400 * 2**10, 0.01))
"""Of a budget of 1 MiB, each trial needs 400 KiB."""


@pytest.fixture(autouse=True)
def _own_rooms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_four_threads_run_as_many_trials_at_once_as_fit() -> None:
    lock = threading.Lock()
    two_run = threading.Event()
    running = 0
    most = 0

    def objective(trial: optuna.Trial) -> float:
        nonlocal running, most
        width = trial.suggest_int("width", SMALL, SMALL)
        trial.should_prune()
        with lock:
            running += 1
            most = max(most, running)
            if running == 2:
                two_run.set()
        two_run.wait(60)
        value = train(width)
        with lock:
            running -= 1
        return value

    study = create_study()
    pruner = make_pruner(predictor=TWO_FIT, share_device=True)
    study.optimize(objective, n_trials=8, n_jobs=4, pruner=pruner)
    assert most == 2
    assert len(study.get_trials(states=(COMPLETE,))) == 8
    assert pruner.guard.guard.room is not None
    assert pruner.guard.guard.room.num_reserved() == 0


def test_trials_do_not_wait_unless_they_share_the_device() -> None:
    four_run = threading.Barrier(4)

    def objective(trial: optuna.Trial) -> float:
        width = trial.suggest_int("width", SMALL, SMALL)
        trial.should_prune()
        four_run.wait(60)
        return train(width)

    create_study().optimize(objective, n_trials=4, n_jobs=4, pruner=make_pruner(predictor=TWO_FIT))


def test_a_trial_that_fails_gives_its_room_back() -> None:
    def objective(trial: optuna.Trial) -> float:
        trial.suggest_int("width", SMALL, SMALL)
        trial.should_prune()
        raise ValueError("a mistake")

    pruner = make_pruner(predictor=TWO_FIT, share_device=True)
    create_study().optimize(objective, n_trials=2, catch=ValueError, pruner=pruner)
    assert pruner.guard.guard.room is not None
    assert pruner.guard.guard.room.num_reserved() == 0


def _work(folder: str) -> None:
    """What one process does: two trials that do not fit beside another, each alone in the folder `running`."""
    import tempfile

    tempfile.tempdir = folder
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    run.GpuProbe = PretendedGpuProbe  # type: ignore[assignment, attr-defined]
    alone = Path(folder) / "running"

    def objective(trial: optuna.Trial) -> float:
        width = trial.suggest_int("width", SMALL, SMALL)
        trial.should_prune()
        alone.mkdir()  # fails if another runs
        value = train(width)
        alone.rmdir()
        return value

    storage = f"sqlite:///{folder}/study.db"
    study = create_study(study_name="shared", storage=storage, load_if_exists=True)
    one_fits = ReplayPredictor(memory=Estimate(800 * 2**10, 0.01))
    study.optimize(objective, n_trials=3, pruner=make_pruner(predictor=one_fits, share_device=True))


def test_processes_of_one_study_wait_for_each_other(tmp_path: Path) -> None:
    create_study(study_name="shared", storage=f"sqlite:///{tmp_path}/study.db")
    workers = [processes().Process(target=_work, args=(str(tmp_path),)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(200)
    assert [worker.exitcode for worker in workers] == [0, 0]
    study = optuna.load_study(study_name="shared", storage=f"sqlite:///{tmp_path}/study.db")
    assert [trial.state for trial in study.trials] == [COMPLETE] * 6


def test_processes_with_another_gpu_have_another_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def room() -> DeviceRoom | None:
        return make_pruner(predictor=TWO_FIT, share_device=True).guard.guard.room

    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    first = room()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    second = room()
    assert first is not None
    assert second is not None
    assert first.name != second.name
