"""Nothing that was acknowledged is lost, and nothing is there twice: killed processes, many at once, no server, a full disk."""

from __future__ import annotations

import gc
import json
import resource
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from perfguard.exceptions import LogWarning
from perfguard.graph import OpGraph
from perfguard.log import MeasurementStore
from perfguard.verdict import Verdict
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
            assert store.records() == []
            assert len(beside(data_folder)) == 2 * 79
        assert len(caught) == 1
        store.record_measurement(record(store, 80, **known), MEASUREMENT)
        end = time.monotonic() + 60
        while not store.records() and time.monotonic() < end:  # on a busy machine the server is back a little later
            time.sleep(0.2)
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
