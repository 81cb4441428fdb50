"""Nothing that was acknowledged is lost, and nothing is there twice: killed processes, many at once, no server, a full disk."""

from __future__ import annotations

import gc
import json
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from perfguard.exceptions import LogError, LogWarning
from perfguard.graph import OpGraph
from perfguard.guard import Guard
from perfguard.log import MeasurementStore
from perfguard.verdict import Verdict
from perfguard.workload import Workload
from tests.doubles import ReplayPredictor
from tests.perfguard.graph.parts import total
from tests.perfguard.log_rows import DEVICE, MEASUREMENT, beside, locked, make_graph, record, trials
from tests.postgres import Postgres
from tests.warm import run_fresh

CROWD = Path(__file__).with_name("log_crowd.py")


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return make_graph()


def crowd(*words: object) -> Any:
    """What a run of ``log_crowd.py`` printed."""
    return json.loads(run_fresh(CROWD, *words))


def complete_rows(location: object) -> list[str]:
    """The ids of all decisions, each of which must have its measurement."""
    with MeasurementStore(str(location)) as store:
        return [trial.decision_id for trial in store.records() if trial.status == "ok"]


@pytest.mark.slow
def test_killed_writers_lose_no_acknowledged_row(tmp_path: Path) -> None:
    """One generation of weights is promoted."""
    path = tmp_path / "log.db"
    acknowledged = crowd("kill_writers", path, 100)
    assert len(acknowledged) == len(set(acknowledged)) > 50  # a busy machine writes fewer
    assert set(acknowledged) <= set(complete_rows(path))
    with MeasurementStore(path) as store:
        generations = store.weights("crowd")
        assert [weights.state for weights in generations].count("promoted") == 1
        assert store.promoted("crowd") == (generations[-1].weights_id, b"x" * 1000)


@pytest.mark.slow
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_sixteen_processes_write_every_row_once(database: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = str(tmp_path / "log.db") if database == "sqlite" else request.getfixturevalue("postgres_url")
    written = crowd("write_together", url, 16, 25)
    assert len(set(written)) == 16 * 25
    assert sorted(complete_rows(url)) == sorted(written)


@pytest.fixture
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the rows of a server that is away wait."""
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path / "perfguard"


@contextmanager
def away(postgres: Postgres) -> Iterator[None]:
    postgres.stop()
    try:
        yield
    finally:
        postgres.start()


def await_answer(store: MeasurementStore) -> None:
    """Wait until the log can be read: on a busy machine, a server is back a little later."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with suppress(LogError):
            store.records()
            return
        time.sleep(0.2)


def test_server_away_rows_arrive_later_once(postgres: Postgres, data_folder: Path, graph: OpGraph) -> None:
    """Trials run on meanwhile."""
    url = postgres.new_database()
    known: dict[str, Any] = {"graph": graph, "device": DEVICE}
    with MeasurementStore(url) as store:
        store.record_measurement(record(store, 0, **known), MEASUREMENT)
        with away(postgres):
            start = time.monotonic()
            with pytest.warns(LogWarning, match="cannot be used now") as caught:
                decision_id = record(store, 1, **known)
            store.record_measurement(decision_id, MEASUREMENT)
            for trial in range(2, 80):
                store.record_measurement(record(store, trial, **known), MEASUREMENT)
            assert time.monotonic() - start < 15
            with pytest.raises(LogError, match="cannot be used now"):
                store.records()
            assert len(beside(data_folder)) == 2 * 79
        assert len(caught) == 1
        store.record_measurement(record(store, 80, **known), MEASUREMENT)
        await_answer(store)
        assert [trial.number for trial in store.records()] == list(range(81))
        assert len(store.observations("toy")) == 81
        assert beside(data_folder) == []


def test_server_away_rows_of_dead_process_arrive(postgres: Postgres, data_folder: Path) -> None:
    """Another process delivers them."""
    url = postgres.new_database()
    MeasurementStore(url).close()
    with away(postgres):
        code = (
            "import os, sys, warnings; warnings.simplefilter('ignore')\n"
            "from perfguard.log import MeasurementStore; from tests.perfguard.log_crowd import write\n"
            f"store = MeasurementStore({url!r})\n"
            "print(write(store, 1), write(store, 2), flush=True); os.kill(os.getpid(), 9)"
        )
        written = run_fresh("-c", code, status=-9).split()
        assert beside(data_folder)
    assert complete_rows(url) == written
    assert complete_rows(url) == written
    assert beside(data_folder) == []


def test_a_slow_failure_is_not_repeated_at_each_call(tmp_path: Path) -> None:
    """A server behind a dead network makes a call wait for its timeout; a trial must not wait so each time."""
    path = tmp_path / "log.db"
    MeasurementStore(path).close()
    store = MeasurementStore(path, busy_timeout_s=0.5)
    with locked(path):
        with pytest.warns(LogWarning, match="locked"):
            record(store, 0)
        start = time.monotonic()
        for trial in range(1, 20):
            record(store, trial)
        assert time.monotonic() - start < 5
    store.close()
    assert len(trials(path)) == 20


def slow_trouble(store: MeasurementStore, seconds: float) -> Callable[[], None]:
    """Let each attempt to reach the log take ``seconds`` and fail, until the returned function is called."""
    database: Any = store._database
    own = database.open

    def open() -> None:
        time.sleep(seconds)
        raise OSError("no route to host")

    def mend() -> None:
        database.open = own

    database.open = open
    return mend


def test_one_success_ends_the_pause_after_a_slow_failure(tmp_path: Path, graph: OpGraph) -> None:
    # The pause is ten times as long as the attempt. So it outlived the trouble, and the log looked empty meanwhile.
    with MeasurementStore(tmp_path / "log.db") as store:
        record(store, 0, graph=graph, device=DEVICE)
        mend = slow_trouble(store, 0.3)
        with pytest.warns(LogWarning, match="no route to host"):
            store.record_measurement(record(store, 1, graph=graph, device=DEVICE), MEASUREMENT)
        mend()
        assert store._database.is_away
        store.flush()
        assert not store._database.is_away
        assert len(store.observations("toy")) == 1
        assert [trial.number for trial in store.records()] == [0, 1]


def test_whoever_reads_a_log_tries_it_at_once_and_ends_the_pause(tmp_path: Path) -> None:
    with MeasurementStore(tmp_path / "log.db") as store:
        mend = slow_trouble(store, 0.3)
        with pytest.warns(LogWarning, match="no route to host"):
            record(store, 0)
        mend()
        assert [trial.number for trial in store.records()] == [0]
        assert not store._database.is_away


@pytest.mark.parametrize(
    "read",
    [
        MeasurementStore.records,
        MeasurementStore.device_ids,
        MeasurementStore.weights,
        MeasurementStore.counts,
        lambda store: store.observations("toy"),
        lambda store: store.promoted("guardnet"),
    ],
)
def test_reader_of_a_log_that_is_away_gets_an_error_and_no_empty_list(
    tmp_path: Path, read: Callable[[MeasurementStore], object]
) -> None:
    with MeasurementStore(tmp_path / "log.db") as store:
        mend = slow_trouble(store, 0.3)
        with pytest.warns(LogWarning, match="no route to host"):
            record(store, 0)
        for _ in range(2):
            with pytest.raises(
                LogError, match=r"log\.db (cannot be used now: no route to host|could not be reached a moment ago)"
            ):
                read(store)
        mend()


def test_study_makes_no_attempt_during_the_pause(tmp_path: Path) -> None:
    # What a guard asks after each trial must not wait for the timeout of a server each time.
    attempts = []
    with MeasurementStore(tmp_path / "log.db") as store:
        mend = slow_trouble(store, 0.3)
        with pytest.warns(LogWarning, match="no route to host"):
            record(store, 0)
        database: Any = store._database
        database.open = lambda: attempts.append("one")
        for trial in range(1, 20):
            with pytest.raises(LogError, match="a moment ago"):
                store.observations("toy")
            record(store, trial)
        assert not attempts
        mend()
    assert len(trials(tmp_path / "log.db")) == 20


def test_guard_goes_on_with_what_it_has_learnt_while_the_log_is_away(tmp_path: Path) -> None:
    # The log has warned already, so the guard says nothing more: warnings are errors here.
    workload = Workload(nn.Linear(8, 8), inputs=(4, 8), loss=total, optimizer=torch.optim.SGD)
    with MeasurementStore(tmp_path / "log.db") as store:
        guard = Guard(DEVICE, memory_budget="1GiB", log=store, predictor=ReplayPredictor())
        mend = slow_trouble(store, 0.3)
        with pytest.warns(LogWarning, match="no route to host"):
            decision = guard.decide(workload, study="s", trial=0)
        guard.learn(decision, MEASUREMENT)
        guard.decide(workload, study="another", trial=1)
        mend()
    assert trials(tmp_path / "log.db") == [0, 1]


@contextmanager
def full_disk(free_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond ``free_bytes``; the error is another than a full disk's, the effect is the same."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("free_bytes", [1, 200_000])
def test_full_disk_rows_arrive_when_there_is_room(tmp_path: Path, free_bytes: int) -> None:
    """Trials run on meanwhile."""
    path = tmp_path / "log.db"
    with MeasurementStore(path) as store:
        record(store, 0)
        with full_disk(free_bytes), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for trial in range(1, 40):
                record(store, trial, Verdict(action="prune", remark="x" * 20_000))
        assert ["cannot be used now" in str(warning.message) for warning in caught] == [True]
        store.flush()
        assert [trial.number for trial in store.records()] == list(range(40))
    assert list(tmp_path.glob("*.rows*")) == []


def test_full_disk_warns_of_lost_rows_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    store = MeasurementStore(path)
    record(store, 0)
    with full_disk(1):
        with pytest.warns(LogWarning, match="cannot be used now"):
            record(store, 1)
        with pytest.warns(LogWarning, match=r"1 rows of the measurement log .* are lost"):
            store.close()
    gc.collect()
    assert trials(path) == [0]
