"""The measurement log keeps every row, whatever happens to its file."""

from __future__ import annotations

import gc
import itertools
import json
import os
import pickle
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from hypothesis import given
from hypothesis import strategies as st

from perfguard import Estimate
from perfguard.budget import Limit
from perfguard.exceptions import ConfigurationError, LogError, LogWarning
from perfguard.graph import OpGraph
from perfguard.log import MeasurementStore
from perfguard.log_tables import WeightsRow
from perfguard.quantities import Quantity
from perfguard.verdict import Verdict
from tests.perfguard.log_rows import (
    DEVICE,
    LAUNCHED,
    MEASUREMENT,
    PREDICTION,
    PRUNED,
    beside,
    locked,
    make_graph,
    record,
    trials,
)
from tests.warm import run_fresh


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return make_graph()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.db"


@contextmanager
def one_warning() -> Iterator[None]:
    with pytest.warns(LogWarning, match=r"cannot be used now \(database is locked\)") as caught:
        yield
    assert len(caught) == 1


def test_decision_and_measurement_round_trip(path: Path, graph: OpGraph) -> None:
    before = datetime.now(timezone.utc)
    with MeasurementStore(path) as store:
        params = {"lr": 0.1, "path": Path("x")}
        decision_id = record(store, 3, LAUNCHED, graph=graph, device=DEVICE, params=params, trial_id="tune_3")
        store.record_measurement(decision_id, MEASUREMENT)
    with MeasurementStore(path) as store:
        (trial,) = store.records("s")
        (observation,) = store.observations("toy")
        assert store.observations("toy")[0].graph is observation.graph
        assert store.records("another") == []
        assert store.observations("another") == []
    assert trial.created_at is not None
    assert before <= trial.created_at <= datetime.now(timezone.utc)
    assert (trial.decision_id, trial.study, trial.number, trial.trial_id) == (decision_id, "s", 3, "tune_3")
    assert (trial.params, trial.host, trial.predictor) == ({"lr": 0.1, "path": "x"}, "node-7", "double-1")
    assert (trial.device_id, trial.device_name, trial.capacity_bytes) == ("toy", "Toy", 2**30)
    assert trial.verdict is not None
    assert (trial.reason, trial.limits) == (LAUNCHED.reason, {"memory": 2000.0, "step_time": 1.0})
    assert {quantity: estimate.median for quantity, estimate in trial.predicted.items()} == {
        "memory": 1000.0, "step_time": 0.25, "time": 25.0
    }  # fmt: skip
    assert trial.predicted["memory"].log_sigma == pytest.approx(0.1, rel=1e-12)
    assert (trial.measured, trial.status, trial.note) == ({"memory": 1100, "step_time": 0.3, "time": 30.0}, "ok", "a note")
    assert trial.is_measured
    assert not trial.violates
    assert observation.graph.content_hash == graph.content_hash
    assert (observation.device, observation.measurement, observation.predicted_by) == (DEVICE, MEASUREMENT, "double-1")
    assert observation.predicted["time"].median == 0.25


def test_measurement_of_another_device_measures_nothing(path: Path) -> None:
    """Promise 3: a reading belongs to the device that ran."""
    with MeasurementStore(path) as store:
        laptop = replace(MEASUREMENT, device_id="cpu", device_name="A processor")
        store.record_measurement(record(store, 0, LAUNCHED, device=DEVICE), laptop)
        store.record_measurement(record(store, 1, LAUNCHED, device=DEVICE), replace(laptop, status="failed"))
        silent = replace(MEASUREMENT, peak_memory_bytes=None, step_time_s=None)
        store.record_measurement(record(store, 2, LAUNCHED, device=DEVICE), silent)
        absent, failed, mute = store.records()
    assert absent.not_measured == "their workers used no Toy; they ran on A processor"
    assert (dict(absent.measured), absent.status, absent.is_measured, absent.is_pruned) == ({}, "ok", False, False)
    assert (dict(failed.measured), failed.status, failed.not_measured) == ({}, "failed", "")
    assert mute.not_measured == "they did not report what they cost"


@pytest.mark.parametrize(
    ("quantity", "estimate"),
    [("latency", PREDICTION.step_time), ("epoch_time", PREDICTION.step_time.scaled(10)), ("cost", PREDICTION.cost(72.0))],
)
def test_multiple_of_a_time_is_measured_by_it(path: Path, quantity: Quantity, estimate: Estimate) -> None:
    verdict = Verdict.of(PREDICTION, [Limit(quantity, 3 * estimate.median, estimate)], accepted=0.5)
    with MeasurementStore(path) as store:
        for trial, factor in enumerate((2, 4)):
            step_s, total_s = factor * PREDICTION.step_time.median, factor * 25.0
            slower = replace(MEASUREMENT, step_time_s=step_s, total_time_s=total_s)
            store.record_measurement(record(store, trial, verdict, device=DEVICE), slower)
        inside, over = store.records()
    assert inside.measured[quantity] == pytest.approx(2 * estimate.median)
    assert (inside.is_measured, inside.breaks(quantity), over.breaks(quantity)) == (True, False, True)


def test_trial_that_the_tuner_stopped_has_no_time_of_a_whole_trial(path: Path) -> None:
    assert PREDICTION.total_time is not None
    steps = round(PREDICTION.total_time.median / PREDICTION.step_time.median)
    with MeasurementStore(path) as store:
        for trial, share in enumerate((0.1, 0.9)):
            run = replace(MEASUREMENT, num_steps=int(share * steps))
            store.record_measurement(record(store, trial, LAUNCHED, device=DEVICE), run)
        stopped, whole = store.records()
    assert (stopped.stopped_early, stopped.error("time")) == (True, None)
    assert not whole.stopped_early


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


def test_interrupted_measurement_is_replaced_on_resume() -> None:
    """Ray Tune resumes a trial under its decision; what it costs in the end must not be lost to the row of its interruption."""
    with MeasurementStore(":memory:") as store:
        decision_id = record(store, graph=make_graph(), device=DEVICE)
        store.record_measurement(decision_id, replace(MEASUREMENT, status="interrupted", total_time_s=3.0))
        assert store.observations("toy") == [], "it says nothing about the trial"
        store.record_measurement(decision_id, replace(MEASUREMENT, status="interrupted", total_time_s=4.0))
        assert [(trial.status, trial.measured["time"]) for trial in store.records()] == [("interrupted", 4.0)]
        store.record_measurement(decision_id, replace(MEASUREMENT, total_time_s=9.0))
        store.record_measurement(decision_id, replace(MEASUREMENT, status="interrupted", total_time_s=10.0))
        store.record_measurement(decision_id, replace(MEASUREMENT, total_time_s=11.0))
        assert [(trial.status, trial.measured["time"]) for trial in store.records()] == [("ok", 9.0)]
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


@given(params=st.dictionaries(st.text(), json_values, max_size=4), remark=st.text())
def test_params_that_json_knows_come_back_equal(memory_store: MeasurementStore, params: dict[str, Any], remark: str) -> None:
    record(memory_store, 0, Verdict(action="prune", remark=remark), params=params, study=(study := os.urandom(8).hex()))
    (trial,) = memory_store.records(study)
    assert trial.params == params
    assert trial.reason == remark.replace("\0", "?")


def test_unstorable_params_and_text_stop_no_study() -> None:
    circle: dict[str, Any] = {}
    circle["self"] = circle
    with MeasurementStore(":memory:") as store:
        record(store, 0, Verdict(action="prune", remark="\udcff"), params={"a": {(1, 2): 3}})
        record(store, params=circle)
        record(store, trial=2**80)
        record(store, trial=4)
        found = store.records()
    assert [trial.number for trial in found] == [0, 0, None, 4]
    assert found[0].params == {"a": "{(1, 2): 3}"}
    assert found[0].reason == "?"


def not_sqlite(path: Path) -> None:
    path.write_bytes(b"mode,step\ntrain,1\n" * 100)


def another_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE studies (x)")


def damaged(path: Path) -> None:
    with MeasurementStore(path) as store:
        for trial in range(50):
            record(store, trial, Verdict(action="prune", remark="x" * 1000))
    path.write_bytes(path.read_bytes()[:4096] + os.urandom(8192) + path.read_bytes()[12288:])


def without_version(path: Path) -> None:
    MeasurementStore(path).close()
    set_version(path, None)


def set_version(path: Path, version: str | None) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE meta SET value = ?", (version,))


@pytest.mark.parametrize("make", [not_sqlite, another_database, damaged, without_version])
def test_unsound_log_file_is_named_and_left_alone(path: Path, make: Any) -> None:
    make(path)
    content = path.read_bytes()
    with pytest.raises(LogError, match=r"log\.db is no measurement log, or is damaged .* Move it away"):
        MeasurementStore(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("99", r"log\.db has format 99, this PerfGuard reads 3; .*\. Update perfguard\. "),
        ("1", r"log\.db has format 1, this PerfGuard reads 3; it is left as it is\. (?!Update)"),
    ],
)
def test_log_of_another_version_is_left_as_it_is(path: Path, version: str, message: str) -> None:
    MeasurementStore(path).close()
    set_version(path, version)
    content = path.read_bytes()
    with pytest.raises(LogError, match=message):
        MeasurementStore(path)
    assert path.read_bytes() == content


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


def another(graph: OpGraph, number: int) -> OpGraph:
    """A graph of another structure for each number."""
    return replace(graph, storages=(graph.storages[0]._replace(num_bytes=number), *graph.storages[1:]))


def test_log_in_memory_keeps_the_graphs_that_may_be_learnt_from(graph: OpGraph) -> None:
    # 16 KiB for 500 operators: a study of thousands of structures without a log would grow by them.
    with MeasurementStore(":memory:") as store:
        ids = [
            record(store, trial, LAUNCHED if trial < 2 else PRUNED, graph=another(graph, trial), device=DEVICE)
            for trial in range(400)
        ]
        assert store.counts()["decisions"] == 400
        assert store.counts()["graphs"] <= 2 + 2 * 128
        for decision_id in ids[:2]:  # they have run all the while
            store.record_measurement(decision_id, MEASUREMENT)
        for trial in range(400, 800):
            record(store, trial, PRUNED, graph=another(graph, trial), device=DEVICE)
        found = [run.graph.content_hash for run in store.observations("toy")]
        assert found == [another(graph, trial).content_hash for trial in range(2)]


def test_log_in_a_file_keeps_all_graphs(path: Path, graph: OpGraph) -> None:
    with MeasurementStore(path) as store:
        for trial in range(140):
            record(store, trial, PRUNED, graph=another(graph, trial), device=DEVICE)
        assert store.counts()["graphs"] == 140


def test_default_log_is_environments_or_users(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFGUARD_LOG", str(path))
    MeasurementStore().close()
    assert path.exists()
    monkeypatch.delenv("PERFGUARD_LOG")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_DATA_HOME", str(path.parent))
    MeasurementStore().close()
    assert (path.parent / "perfguard" / "log.db").exists()


def test_rows_wait_for_lock_and_arrive_in_order(path: Path, graph: OpGraph) -> None:
    with MeasurementStore(path, busy_timeout_s=0.05) as store:
        with locked(path), one_warning():
            ids = [record(store, trial, graph=graph, device=DEVICE) for trial in range(3)]
            store.record_measurement(ids[0], MEASUREMENT)
            store.flush()
            with pytest.raises(LogError, match="locked"):
                store.records()
        record(store, 3)
        found = store.records()
        assert [trial.number for trial in found] == [0, 1, 2, 3]
        assert [trial.decision_id for trial in found[:3]] == ids
        assert len(store.observations("toy")) == 1
    assert not beside(path.parent)


def test_rows_wait_beside_the_log_until_opening(path: Path, graph: OpGraph) -> None:
    """The next opening delivers them."""
    MeasurementStore(path).close()
    with locked(path), one_warning():
        store = MeasurementStore(path, busy_timeout_s=0.05)
        store.record_measurement(record(store, 0, graph=graph, device=DEVICE), MEASUREMENT)
        store.close()
        record(store, 1)
        store.close()
    assert len(beside(path.parent)) == 3, "one for each call, and the first process could open nothing"
    content = [(file, file.read_bytes()) for file in beside(path.parent)]
    for _ in range(2):
        with MeasurementStore(path) as store:
            assert [trial.number for trial in store.records()] == [0, 1]
            (observation,) = store.observations("toy")
            assert observation.graph.content_hash == graph.content_hash
        assert not beside(path.parent)
        for file, data in content:  # as if it had died after it had written the rows, before it removed the files
            file.write_bytes(data)


def test_rows_that_a_database_has_refused_to_write_wait_beside_it(path: Path, graph: OpGraph) -> None:
    """Their graphs have been made into bytes by then."""
    store = MeasurementStore(path)
    record(store, 0)
    engine = store._database.engine
    sqlalchemy.event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA query_only=ON"))
    engine.dispose()  # as if the file was made read-only
    with pytest.warns(LogWarning, match="readonly database"):
        record(store, 1, graph=graph, device=DEVICE)
    store.close()
    assert len(beside(path.parent)) == 1
    assert trials(path) == [0, 1]


def test_another_version_at_writing_spares_the_study(path: Path) -> None:
    MeasurementStore(path).close()
    store = pickle.loads(pickle.dumps(MeasurementStore(path)))
    set_version(path, "99")
    with pytest.warns(LogWarning, match="format 99"):
        record(store)
    store.close()
    assert len(beside(path.parent)) == 1


def test_forgotten_or_outlived_store_leaves_its_rows(path: Path) -> None:
    MeasurementStore(path).close()
    with locked(path):
        with pytest.warns(LogWarning):
            record(MeasurementStore(path, busy_timeout_s=0.05), 1)
        gc.collect()
        assert len(beside(path.parent)) == 1
        run_fresh("-c", SCRIPT + "store = MeasurementStore(path, busy_timeout_s=0.05); record(store, 2)", path)
        assert len(beside(path.parent)) == 2
    assert trials(path) == [1, 2]


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        json.dumps({"table": "decisions", "row": {"nonsense": 1}}),
        json.dumps({"table": "devices", "row": {"content_hash": "a", "device_id": 3, "data": "{}"}}),
        json.dumps(
            {"table": "weights", "row": dict.fromkeys(WeightsRow.__table__.columns.keys(), "a") | {"created_at_ns": 10**30}}
        ),
    ],
)
def test_damaged_rows_beside_the_log_are_set_aside(path: Path, line: str) -> None:
    MeasurementStore(path).close()
    with locked(path), one_warning():
        store = MeasurementStore(path, busy_timeout_s=0.05)
        record(store, 7, device=DEVICE)
    (waiting,) = beside(path.parent)
    rows = waiting.read_text().splitlines()
    waiting.write_text("\n".join([rows[0], line, *rows[1:]]) + "\n")
    with pytest.warns(LogWarning, match=r"1 rows .* are damaged .* set aside as .*\.damaged") as caught:
        store.close()
    assert len(caught) == 1
    assert trials(path) == [7]
    assert not beside(path.parent)
    assert waiting.with_suffix(".damaged").read_text() == line + "\n"


def test_nothing_is_unpickled(path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(path.parent / "sprung"),)

    MeasurementStore(path).close()
    path.with_name(f"log.db.{'0' * 32}.rows.jsonl").write_bytes(pickle.dumps(Trap()))
    with pytest.warns(LogWarning, match="are damaged"):
        store = MeasurementStore(path)
    store.promote("guardnet", pickle.dumps(Trap()))
    assert store.promoted("guardnet") is not None
    store.close()
    assert not (path.parent / "sprung").exists()


def test_a_log_that_is_deleted_under_way_is_made_again(path: Path, graph: OpGraph) -> None:
    with MeasurementStore(path) as store:
        record(store, 0, graph=graph)
        path.unlink()
        with pytest.warns(LogWarning, match="was moved or removed; another is begun"):
            record(store, 1, graph=graph, device=DEVICE)
        store.record_measurement(record(store, 2, graph=graph, device=DEVICE), MEASUREMENT)
        assert [trial.number for trial in store.records()] == [1, 2]
        assert len(store.observations("toy")) == 1


@pytest.mark.parametrize(
    ("other", "num_after"),
    # An older copy is noticed by the pages that do not fit, which one row after it need not touch.
    [*itertools.product(["garbage", "another log", "nothing"], [1, 60]), ("an older copy", 60)],
)
def test_log_overwritten_in_the_middle_of_a_run_warns_and_keeps_rows(
    path: Path, tmp_path: Path, other: str, num_after: int
) -> None:
    # STRANGERS A8: the rows of the rest of the run went into a file that nobody could open any more, without a warning.
    copy = tmp_path / "copy.db"

    def fill(log: Path, trials: range) -> None:
        with MeasurementStore(log) as store:
            for trial in trials:
                record(store, trial, Verdict(action="prune", remark="x" * (500 + 7 * trial)), study=f"{log.name} {trial % 7}")

    fill(copy, range(1000, 1100))
    if other == "an older copy":
        fill(path, range(30))
        shutil.copy(path, copy)
    fill(path, range(200))
    with MeasurementStore(path) as store:
        for trial in range(200, 200 + num_after):
            record(store, trial)
        path.write_bytes({"garbage": b"mode,step\n" * 5000, "nothing": b""}.get(other, copy.read_bytes()))
        with pytest.warns(LogWarning, match=r"is damaged .* Rows wait in files beside it|was moved or removed") as caught:
            record(store, 1)
        assert len(caught) == 1
        record(store, 2)
        with suppress(LogError):
            store.records()
    if beside(path.parent):
        with pytest.raises(LogError, match=r"Move it away"):
            MeasurementStore(path)
        path.unlink()
    assert trials(path)[-2:] == [1, 2]
    assert not beside(path.parent)


def test_own_checkpoints_do_not_count_as_an_overwritten_log(path: Path) -> None:
    with MeasurementStore(path) as store, MeasurementStore(path) as other:
        for trial in range(10):
            record(store, trial)
            with closing(sqlite3.connect(path)) as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            record(other, trial)
        assert len(store.records()) == 20
    assert not beside(path.parent)


SCRIPT = """
import sys, warnings
from pathlib import Path
from perfguard.log import MeasurementStore
from perfguard.verdict import Verdict
path = Path(sys.argv[1])
def record(store, trial):
    store.record_decision(Verdict(action="launch"), graph=None, device=None, study="s", trial=trial, params={})
"""


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
store._lock.acquire()   # as a thread that is busy while another one forks
if (child := os.fork()) == 0:
    record(store, 1)
    store.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
store._lock.release()
assert [trial.number for trial in store.records()] == [0, 1]   # once each, whoever brought in the rows beside the log
store.close()
"""
    run_fresh("-c", SCRIPT + code, path)
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
