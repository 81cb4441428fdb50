"""Threads, processes and studies that share a guard, a study or a log: every trial is judged and measured once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import optuna
import pytest
import torch
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from torch import nn

from perfguard import MeasurementStore
from perfguard.measure import run
from perfguard_optuna import PerfGuardSampler, create_study, record_of
from tests.doubles import PretendedGpuProbe
from tests.integrations.one_layer import COMPLETE, make_pruner
from tests.warm import processes

pytestmark = pytest.mark.usefixtures("pretended_gpu")

PROCESSES, TRIALS = 3, 4


def objective(trial: optuna.Trial) -> float:
    """Widths above about 1,700 need more than the budget of 1 MiB."""
    weight = nn.Parameter(torch.zeros(trial.suggest_int("width", 8, 4096)))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
    return float(weight.detach().mean())


@contextmanager
def opened(place: str) -> Iterator[BaseStorage]:
    """The storage, whose connections are closed at the end."""
    storage = JournalStorage(JournalFileBackend(place)) if place.endswith(".journal") else RDBStorage(place)
    yield storage
    storage.remove_session()
    if isinstance(storage, RDBStorage):
        storage.engine.dispose()


def work(storage: str, log: str) -> None:
    """What one process does."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    run.GpuProbe = PretendedGpuProbe  # type: ignore[assignment, attr-defined]
    pruner = make_pruner(log=log)
    sampler = PerfGuardSampler(optuna.samplers.RandomSampler(), pruner)
    with opened(storage) as own:
        study = create_study(study_name="shared", storage=own, load_if_exists=True, sampler=sampler)
        study.optimize(objective, n_trials=TRIALS, pruner=pruner)


def assert_each_trial_once(study: optuna.Study, log: MeasurementStore, launched: int) -> None:
    """In the study and in the log: as many launched trials as were asked for, each judged once and measured once."""
    records = log.records(study.study_name)
    by_trial = Counter(record.number for record in records)
    assert set(by_trial.values()) == {1}
    assert set(by_trial) == {trial.number for trial in study.trials}
    completed = study.get_trials(states=(COMPLETE,))
    assert len(completed) == launched
    assert {record.number for record in records if record.status == "ok"} == {trial.number for trial in completed}
    assert all(record.status is None for record in records if record.verdict is not None and record.verdict.action == "prune")
    assert all("time" in record_of(trial).measured for trial in completed)


def test_eight_threads_share_a_guard(tmp_path: Path) -> None:
    log = str(tmp_path / "log.db")
    study = create_study(study_name="threads")
    study.optimize(objective, n_trials=24, n_jobs=8, pruner=make_pruner(log=log))
    assert_each_trial_once(study, MeasurementStore(log), 24)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "journal", "postgresql"])
def test_processes_share_a_study_and_a_log(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    places = {"sqlite": f"sqlite:///{tmp_path / 'study.db'}", "journal": str(tmp_path / "study.journal")}
    storage = places[kind] if kind in places else request.getfixturevalue("postgres_url")
    log = storage if kind == "postgresql" else str(tmp_path / "log.db")  # one database for both
    with opened(storage) as own, MeasurementStore(log) as shared:
        optuna.create_study(study_name="shared", storage=own)
        running = [processes().Process(target=work, args=(storage, log)) for _ in range(PROCESSES)]
        for process in running:
            process.start()
        for process in running:
            process.join(240)
            assert process.exitcode == 0, "its traceback stands above"
        assert_each_trial_once(optuna.load_study(study_name="shared", storage=own), shared, PROCESSES * TRIALS)
