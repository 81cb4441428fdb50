"""The measurement log keeps every row, whatever happens to its file."""

from __future__ import annotations

import gc
import json
import os
import pickle
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfguard.exceptions import ConfigurationError, LogCorruptError, LogError, LogVersionError, LogWarning
from perfguard.graph import OpGraph
from perfguard.log import MeasurementStore
from tests.perfguard.store.rows import DEVICE, MEASUREMENT, PREDICTION, make_graph, record


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return make_graph()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.db"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        yield
        connection.execute("ROLLBACK")


@contextmanager
def one_warning() -> Iterator[None]:
    with pytest.warns(LogWarning, match=r"cannot be used now \(database is locked\)") as caught:
        yield
    assert len(caught) == 1


def trials(path: Path) -> list[int | None]:
    with MeasurementStore(path) as store:
        return [decision.trial for decision in store.decisions()]


def spools(path: Path) -> list[Path]:
    return list(path.parent.glob("*.spool.jsonl"))


def test_decision_and_measurement_round_trip(path: Path, graph: OpGraph) -> None:
    before = datetime.now(timezone.utc)
    with MeasurementStore(path) as store:
        kwargs: dict[str, Any] = {"graph": graph, "device": DEVICE, "prediction": PREDICTION}
        decision_id = record(store, trial=3, params={"lr": 0.1, "path": Path("x")}, **kwargs)
        store.record_measurement(decision_id, MEASUREMENT)
    with MeasurementStore(path) as store:
        (decision,) = store.decisions("s")
        (observation,) = store.observations("toy")
        assert store.observations("toy")[0].graph is observation.graph
        assert store.decisions("another") == []
        assert store.observations("another") == []
    assert before <= decision.created_at <= datetime.now(timezone.utc)
    assert (decision.decision_id, decision.study, decision.trial, decision.action) == (decision_id, "s", 3, "launch")
    assert (decision.reason, decision.params) == ("fits", {"lr": 0.1, "path": "x"})
    assert (decision.device_id, decision.predictor) == ("toy", "double-1")
    assert decision.predicted_peak_memory_bytes == 1000.0
    interval = (decision.predicted_peak_memory_low_bytes, decision.predicted_peak_memory_high_bytes)
    assert interval == pytest.approx((848.3, 1178.8), abs=0.1)
    assert (decision.predicted_step_time_s, decision.predicted_total_time_s) == (0.25, 25.0)
    measured = (decision.measured_peak_memory_bytes, decision.measured_step_time_s, decision.measured_total_time_s)
    assert (measured, decision.status) == ((1100, 0.3, 30.0), "ok")
    assert observation.graph.content_hash == graph.content_hash
    assert observation.device == DEVICE
    assert observation.measurement == MEASUREMENT


def test_what_is_not_known_comes_back_as_none(path: Path) -> None:
    with MeasurementStore(path) as store:
        record(store, trial=None)
        (decision,) = store.decisions()
    assert (decision.trial, decision.device_id, decision.predicted_peak_memory_low_bytes, decision.status) == (None,) * 4


def test_a_graph_is_stored_once(path: Path, graph: OpGraph) -> None:
    for _ in range(2):
        with MeasurementStore(path) as store:
            for trial in range(2):
                record(store, trial, graph=graph, device=DEVICE)
    with closing(sqlite3.connect(path)) as connection:
        counts = [
            connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("graphs", "devices", "decisions")
        ]
    assert counts == [1, 1, 4]


def test_observations_are_newest_runs_oldest_first(graph: OpGraph) -> None:
    """Only runs on the device that teach something."""
    with MeasurementStore(":memory:") as store:
        for total_time_s in range(5):
            measurement = replace(MEASUREMENT, total_time_s=float(total_time_s))
            store.record_measurement(record(store, graph=graph, device=DEVICE), measurement)
        for status in ("oom", "timeout", "failed"):
            store.record_measurement(record(store, graph=graph, device=DEVICE), replace(MEASUREMENT, status=status))
        store.record_measurement(record(store, graph=graph, device=DEVICE), replace(MEASUREMENT, device_id="cpu"))
        store.record_measurement(record(store, graph=None, device=DEVICE), MEASUREMENT)
        found = [observation.measurement for observation in store.observations("toy", limit=3)]
    assert [(measurement.status, measurement.total_time_s) for measurement in found] == [("ok", 3.0), ("ok", 4.0), ("oom", 30.0)]


def test_only_first_measurement_of_decision_counts() -> None:
    with MeasurementStore(":memory:") as store:
        decision_id = record(store)
        store.record_measurement(decision_id, MEASUREMENT)
        store.record_measurement(decision_id, replace(MEASUREMENT, status="failed"))
        assert [decision.status for decision in store.decisions()] == ["ok"]


def test_interrupted_measurement_is_replaced_on_resume() -> None:
    """Ray Tune resumes a trial under its decision; what it costs in the end must not be lost to the row of its interruption."""
    with MeasurementStore(":memory:") as store:
        decision_id = record(store, graph=make_graph(), device=DEVICE)
        store.record_measurement(decision_id, replace(MEASUREMENT, status="interrupted", total_time_s=3.0))
        assert store.observations("toy") == [], "it says nothing about the trial"
        store.record_measurement(decision_id, replace(MEASUREMENT, status="interrupted", total_time_s=4.0))
        assert [(row.status, row.measured_total_time_s) for row in store.decisions()] == [("interrupted", 4.0)]
        store.record_measurement(decision_id, replace(MEASUREMENT, total_time_s=9.0))
        store.record_measurement(decision_id, replace(MEASUREMENT, status="interrupted", total_time_s=10.0))
        store.record_measurement(decision_id, replace(MEASUREMENT, total_time_s=11.0))
        assert [(row.status, row.measured_total_time_s) for row in store.decisions()] == [("ok", 9.0)]
        assert [observation.measurement.total_time_s for observation in store.observations("toy")] == [9.0]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def memory_store() -> Iterator[MeasurementStore]:
    with MeasurementStore(":memory:") as store:
        yield store


@given(params=st.dictionaries(st.text(), json_values, max_size=4), reason=st.text())
def test_params_that_json_knows_come_back_equal(memory_store: MeasurementStore, params: dict[str, Any], reason: str) -> None:
    record(memory_store, params=params, reason=reason, study=(study := os.urandom(8).hex()))
    (decision,) = memory_store.decisions(study)
    assert decision.params == params
    assert decision.reason == reason.replace("\0", "?")


def test_unstorable_params_and_text_stop_no_study() -> None:
    circle: dict[str, Any] = {}
    circle["self"] = circle
    with MeasurementStore(":memory:") as store:
        record(store, params={"a": {(1, 2): 3}}, reason="\udcff")
        record(store, params=circle)
        with pytest.warns(LogWarning, match="is dropped"):
            record(store, trial=2**80)
        record(store, trial=4)
        decisions = store.decisions()
    assert [decision.trial for decision in decisions] == [0, 0, 4]
    assert decisions[0].params == {"a": "{(1, 2): 3}"}
    assert decisions[0].reason == "?"


def not_sqlite(path: Path) -> None:
    path.write_bytes(b"mode,step\ntrain,1\n" * 100)


def a_few_bytes(path: Path) -> None:
    path.write_bytes(b"no")


def another_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE studies (x)")


def damaged(path: Path) -> None:
    with MeasurementStore(path) as store:
        for trial in range(50):
            record(store, trial, reason="x" * 1000)
    path.write_bytes(path.read_bytes()[:4096] + os.urandom(8192) + path.read_bytes()[12288:])


def truncated(path: Path) -> None:
    MeasurementStore(path).close()
    path.write_bytes(path.read_bytes()[:5000])


def without_version(path: Path) -> None:
    MeasurementStore(path).close()
    set_version(path, None)


def set_version(path: Path, version: str | None) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE meta SET value = ?", (version,))


@pytest.mark.parametrize("make", [not_sqlite, a_few_bytes, another_database, damaged, truncated, without_version])
def test_unsound_log_file_is_named_and_left_alone(path: Path, make: Any) -> None:
    make(path)
    content = path.read_bytes()
    with pytest.raises(LogCorruptError, match=r"log\.db is no measurement log, or is damaged .* Move it away"):
        MeasurementStore(path)
    assert path.read_bytes() == content


def test_a_log_of_a_newer_perfguard_is_left_as_it_is(path: Path) -> None:
    MeasurementStore(path).close()
    set_version(path, "99")
    content = path.read_bytes()
    with pytest.raises(LogVersionError, match=r"log\.db has schema 99, this PerfGuard reads up to 4.* Update perfguard"):
        MeasurementStore(path)
    assert path.read_bytes() == content


def test_missing_directory_is_made(tmp_path: Path) -> None:
    """An impossible one is an error."""
    MeasurementStore(tmp_path / "a" / "b" / "log.db").close()
    (tmp_path / "file").write_text("")
    for impossible in (tmp_path / "file" / "log.db", tmp_path):
        with pytest.raises(LogError, match=r"cannot be opened: .* PERFGUARD_LOG"):
            MeasurementStore(impossible)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgresql+nodriver://host/db", "needs a driver"),
        ("oracle://host/db", "SQLite or PostgreSQL"),
        ("://", "must look like"),
    ],
)
def test_unusable_url_is_a_configuration_error(url: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MeasurementStore(url)


def test_an_sqlite_url_and_a_path_name_the_same_log(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    for location in (f"sqlite:///{path}", "sqlite:///log.db", "log.db"):
        with MeasurementStore(location) as store:
            record(store)
    assert trials(path) == [0, 0, 0]


def test_path_may_have_odd_characters(tmp_path: Path) -> None:
    path = tmp_path / "a ?b#c%20[x].db"
    with MeasurementStore(path, busy_timeout_s=0.05) as store:
        record(store)
        with locked(path), one_warning():
            record(store, 1)
            store.close()
    assert trials(path) == [0, 1]
    assert path.exists()
    assert not spools(path)


def test_default_log_is_environments_or_users(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFGUARD_LOG", str(path))
    MeasurementStore.default().close()
    assert path.exists()
    monkeypatch.delenv("PERFGUARD_LOG")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_DATA_HOME", str(path.parent))
    MeasurementStore.default().close()
    assert (path.parent / "perfguard" / "log.db").exists()


def test_rows_wait_for_lock_and_arrive_in_order(path: Path, graph: OpGraph) -> None:
    with MeasurementStore(path, busy_timeout_s=0.05) as store:
        with locked(path), one_warning():
            ids = [record(store, trial, graph=graph, device=DEVICE) for trial in range(3)]
            store.record_measurement(ids[0], MEASUREMENT)
            store.flush()
            assert store.decisions() == []
        record(store, 3)
        decisions = store.decisions()
        assert [decision.trial for decision in decisions] == [0, 1, 2, 3]
        assert [decision.decision_id for decision in decisions[:3]] == ids
        assert len(store.observations("toy")) == 1
    assert not spools(path)


def test_reading_goes_on_while_another_process_writes(path: Path, graph: OpGraph) -> None:
    with MeasurementStore(path, busy_timeout_s=0.05) as store:
        store.record_measurement(record(store, graph=graph, device=DEVICE), MEASUREMENT)
        with locked(path), MeasurementStore(path, busy_timeout_s=0.05) as other:
            assert len(other.observations("toy")) == len(other.decisions()) == 1


def test_undelivered_rows_are_spooled_until_opening(path: Path, graph: OpGraph) -> None:
    """The next opening delivers them."""
    MeasurementStore(path).close()
    with locked(path), one_warning():
        store = MeasurementStore(path, busy_timeout_s=0.05)
        store.record_measurement(record(store, 0, graph=graph, device=DEVICE), MEASUREMENT)
        store.close()
        record(store, 1)
        store.close()
    assert len(spools(path)) == 2
    content = [(spool, spool.read_bytes()) for spool in spools(path)]
    for _ in range(2):
        with MeasurementStore(path) as store:
            assert [decision.trial for decision in store.decisions()] == [0, 1]
            (observation,) = store.observations("toy")
            assert observation.graph.content_hash == graph.content_hash
        assert not spools(path)
        for spool, data in content:  # as if it had died between delivering and removing
            spool.write_bytes(data)


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.touch()])
def test_a_new_log_opens_under_a_lock(path: Path, make: Any) -> None:
    make(path)
    with locked(path), one_warning():
        store = MeasurementStore(path, busy_timeout_s=0.05)
        record(store, 7)
        assert store.decisions() == []
        assert store.observations("toy") == []
    store.close()
    assert trials(path) == [7]


def test_newer_schema_at_delivery_spares_the_study(path: Path) -> None:
    MeasurementStore(path).close()
    store = pickle.loads(pickle.dumps(MeasurementStore(path)))
    set_version(path, "99")
    with pytest.warns(LogWarning, match="schema 99"):
        record(store)
    store.close()
    assert len(spools(path)) == 1


def test_forgotten_or_outlived_store_spools_its_rows(path: Path) -> None:
    MeasurementStore(path).close()
    with locked(path):
        with pytest.warns(LogWarning):
            record(MeasurementStore(path, busy_timeout_s=0.05), 1)
        gc.collect()
        assert len(spools(path)) == 1
        run_python(path, "store = MeasurementStore(path, busy_timeout_s=0.05); record(store, 2)")
        assert len(spools(path)) == 2
    assert trials(path) == [1, 2]


def test_a_damaged_spool_is_set_aside(path: Path) -> None:
    MeasurementStore(path).close()
    spool = path.with_name(f"log.db.{'0' * 32}.spool.jsonl")
    spool.write_text(json.dumps({"schema": 1, "table": "decisions", "row": {"nonsense": 1}}))
    with pytest.warns(LogWarning, match="is damaged .* set aside"):
        assert trials(path) == []
    assert trials(path) == []
    assert not spools(path)


def test_unwritable_spool_says_how_much_is_lost(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    store = MeasurementStore(path, busy_timeout_s=0.05)
    with locked(path):
        monkeypatch.setattr(Path, "open", no_space)
        with one_warning():
            record(store)
        with pytest.warns(LogWarning, match=r"1 rows of the measurement log .* are lost: .* \(No space left on device\)"):
            store.close()


def test_a_log_that_is_deleted_under_way_is_made_again(path: Path, graph: OpGraph) -> None:
    with MeasurementStore(path) as store:
        record(store, 0, graph=graph)
        path.unlink()
        with pytest.warns(LogWarning, match="was moved or removed; another is begun"):
            record(store, 1, graph=graph, device=DEVICE)
        store.record_measurement(record(store, 2, graph=graph, device=DEVICE), MEASUREMENT)
        assert [decision.trial for decision in store.decisions()] == [1, 2]
        assert len(store.observations("toy")) == 1


@pytest.mark.parametrize("location", [":memory:", "log.db"])
def test_threads_share_a_store(location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with MeasurementStore(location) as store:

        def work(worker: int) -> None:
            for trial in range(10):
                store.record_measurement(record(store, worker * 100 + trial, device=DEVICE), MEASUREMENT)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        decisions = store.decisions()
        assert all(decision.status == "ok" for decision in decisions)
        for worker in range(4):
            mine = [decision.trial for decision in decisions if decision.trial is not None and decision.trial // 100 == worker]
            assert mine == [worker * 100 + trial for trial in range(10)]


SCRIPT = """
import sys, warnings
from pathlib import Path
from perfguard.log import MeasurementStore
path = Path(sys.argv[1])
def record(store, trial):
    store.record_decision(
        study="s", trial=trial, graph=None, device=None, action="launch", reason="", prediction=None, params={}
    )
"""


def start_python(path: Path, code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT + code, str(path)], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )


def run_python(path: Path, code: str) -> None:
    assert start_python(path, code).wait(timeout=60) == 0


def test_processes_share_a_log_from_its_making(path: Path) -> None:
    code = (
        "warnings.simplefilter('error'); store = MeasurementStore(path, busy_timeout_s=30)\nfor i in range(30): record(store, i)"
    )
    processes = [start_python(path, code) for _ in range(2)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0]
    assert sorted(trial for trial in trials(path) if trial is not None) == sorted([*range(30), *range(30)])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_neither_repeats_nor_loses_rows(path: Path) -> None:
    code = """
import os, sqlite3
store = MeasurementStore(path, busy_timeout_s=0.05)
lock = sqlite3.connect(path, isolation_level=None)
lock.execute("BEGIN EXCLUSIVE")
warnings.simplefilter("ignore")
record(store, 0)
lock.execute("ROLLBACK"); lock.close()
store._log.lock.acquire()   # as a thread that is busy while another one forks
if (child := os.fork()) == 0:
    record(store, 1)
    store.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
store._log.lock.release()
assert [decision.trial for decision in store.decisions()] == [0, 1]   # the child found the parent's spool
store.close()
"""
    run_python(path, code)
    assert trials(path) == [0, 1]


def test_store_pickles_by_address_and_opens_on_use(path: Path) -> None:
    with MeasurementStore(path) as store:
        record(store, 1)
        data = pickle.dumps(store)
    path.rename(path.with_name("moved.db"))
    copy = pickle.loads(data)
    assert not path.exists()
    path.with_name("moved.db").rename(path)
    record(copy, 2)
    copy.close()
    assert trials(path) == [1, 2]
    assert repr(copy) == f"MeasurementStore({str(path)!r})"
