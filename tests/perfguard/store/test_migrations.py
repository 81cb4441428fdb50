"""A log of any older version is brought to the present schema, and loses nothing."""

from __future__ import annotations

import csv
import json
import sqlite3
import threading
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, text

from perfguard.exceptions import LogError, LogWarning
from perfguard.graph import OpGraph
from perfguard.log import MeasurementStore, _migrations, export_log, import_log
from perfguard.log import _schema as schema
from perfguard.store._schema import SCHEMA_VERSION, metadata
from tests.perfguard.store.rows import CPU, DEVICE, LOGS_OF_OLD, MEASUREMENT, make_graph, make_spool_of_schema_1, record


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return make_graph()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'log.db'}" if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


def test_every_version_has_a_step_and_an_old_log() -> None:
    assert sorted(LOGS_OF_OLD) == list(range(1, SCHEMA_VERSION))
    assert sorted(_migrations._STEPS) == list(range(2, SCHEMA_VERSION + 1))


@pytest.mark.parametrize("version", LOGS_OF_OLD)
def test_old_log_is_migrated_with_every_row(version: int, url: str, graph: OpGraph) -> None:
    LOGS_OF_OLD[version](url, graph, num_rows=10)
    for _ in range(2):  # the second time there is nothing to do
        with MeasurementStore(url) as store:
            decisions = store.decisions("old")
            observations = store.observations("toy")
    assert [decision.trial for decision in decisions] == list(range(10))
    assert [decision.measured_peak_memory_bytes for decision in decisions] == [*range(1000, 1009), None]
    assert [observation.measurement.peak_memory_bytes for observation in observations] == list(range(1000, 1009))
    assert observations[0].graph.content_hash == graph.content_hash
    assert (observations[0].measurement.driver, observations[0].measurement.energy_j) == (None, None)


@pytest.mark.parametrize("version", [*LOGS_OF_OLD, None])
def test_a_migrated_log_is_as_a_new_one(version: int | None, url: str, graph: OpGraph) -> None:
    if version is not None:
        LOGS_OF_OLD[version](url, graph, num_rows=3)
    with MeasurementStore(url) as store:
        store.record_measurement(record(store, graph=graph, device=DEVICE), MEASUREMENT)
        assert store.observations("toy")[-1].measurement == MEASUREMENT
        assert store.record_weights(predictor="p", data=b"1")
    engine = create_engine(url)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection, opts={"compare_type": True}), metadata) == []
    engine.dispose()


ABSENT = ("this PyTorch has no CUDA, so the GPU's memory was not measured", "a note; the trial did not use CUDA in this process")
"""How an older PerfGuard ended the note of a reading that it booked to a GPU that was not there."""


def poison(url: str) -> None:
    """Make two readings of an old log such as a smoke test on a laptop left them."""
    engine = create_engine(url)
    with engine.begin() as connection:
        for trial, note in enumerate(ABSENT):
            connection.execute(
                text("UPDATE measurements SET method = 'none', note = :note WHERE decision_id = :id"),
                {"note": note, "id": f"{trial:032x}"},
            )
    engine.dispose()


@pytest.mark.parametrize("version", LOGS_OF_OLD)
def test_migration_sets_aside_absent_device_readings(
    version: int, url: str, graph: OpGraph, recwarn: pytest.WarningsRecorder
) -> None:
    # Finding 1: what a laptop wrote as readings of an A100 spoilt the predictions of later processes for good.
    LOGS_OF_OLD[version](url, graph, num_rows=10)
    poison(url)
    with pytest.warns(LogWarning, match="2 readings in the measurement log .* booked to a device that was not there"):
        store = MeasurementStore(url)
    with store:
        assert [row.measurement.peak_memory_bytes for row in store.observations("toy")] == list(range(1002, 1009))
        assert [row.set_aside is not None for row in store.decisions("old")] == [True, True, *[False] * 8]
    recwarn.clear()
    MeasurementStore(url).close()
    assert not recwarn, "it is said once"


def test_import_sets_aside_absent_device_readings(tmp_path: Path, graph: OpGraph) -> None:
    """Those of an older export or spool."""
    path = tmp_path / "log.db"
    with MeasurementStore(path) as store:
        ids = [record(store, trial, graph=graph, device=DEVICE) for trial in range(3)]
        measured = replace(MEASUREMENT, method="none", note=ABSENT[0])
        store.record_measurement(ids[0], measured)
        store.record_measurement(ids[1], MEASUREMENT)
        assert len(store.observations("toy")) == 2  # of the present schema: judged by who wrote it
        export_log(store, tmp_path / "out")
    for table, columns in (("decisions", ("host", "trial_id")), ("measurements", ("host", "set_aside"))):
        file = tmp_path / "out" / f"{table}.csv"
        with file.open(newline="") as source:
            rows = [{name: value for name, value in row.items() if name not in columns} for row in csv.DictReader(source)]
        with file.open("w", newline="") as target:
            writer = csv.DictWriter(target, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    manifest = tmp_path / "out" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f'"schema": {SCHEMA_VERSION}', '"schema": 3'))
    with MeasurementStore(tmp_path / "copy.db") as copy:
        import_log(copy, tmp_path / "out")
        assert [row.set_aside is not None for row in copy.decisions()] == [True, False, False]
        assert [row.host for row in copy.decisions()] == [None, None, None]
    row = schema.measurement_entry(measured, decision_id=ids[2], recorded_at_ns=10**18).row
    del row["host"]
    spool = path.with_name(f"{path.name}.{'b' * 32}.spool.jsonl")
    spool.write_text(json.dumps({"schema": 3, "table": "measurements", "row": row}) + "\n")
    with MeasurementStore(path) as store:
        assert [row.set_aside is not None for row in store.decisions()] == [False, False, True]


def test_migration_makes_cpu_processes_one_device(url: str, graph: OpGraph) -> None:
    # Part of finding 1: the key of a device held the rates that each process measured for itself.
    LOGS_OF_OLD[3](url, graph, num_rows=4)
    engine = create_engine(url)
    with engine.begin() as connection:
        for number in range(3):
            data = json.dumps(asdict(replace(CPU, bandwidth_bytes_per_s=1e9 + number)), sort_keys=True)
            connection.execute(
                text("INSERT INTO devices (content_hash, device_id, data) VALUES (:key, 'cpu', :data)"),
                {"key": str(number) * 64, "data": data},
            )
            connection.execute(
                text("UPDATE decisions SET device_hash = :key WHERE decision_id = :id"),
                {"key": str(number) * 64, "id": f"{number:032x}"},
            )
            connection.execute(
                text("UPDATE measurements SET device_id = 'cpu' WHERE decision_id = :id"), {"id": f"{number:032x}"}
            )
    engine.dispose()
    with MeasurementStore(url) as store:
        assert store.counts()["devices"] == 2
        assert [row.device_id for row in store.decisions()] == ["cpu", "cpu", "cpu", "toy"]
        record(store, 4, graph=graph, device=replace(CPU, bandwidth_bytes_per_s=7e9))
        assert store.counts()["devices"] == 2
        assert len(store.observations("cpu")) == 3


def test_damaged_devices_do_not_stop_migration(url: str, graph: OpGraph) -> None:
    LOGS_OF_OLD[3](url, graph, num_rows=4)
    sound = json.dumps(asdict(CPU), sort_keys=True)
    damaged = [sound[:20], '{"kind": "cpu", "id": "cpu"}', '["cpu"]', "3", "", None]
    engine = create_engine(url)
    with engine.begin() as connection:
        for number, data in enumerate([*damaged, sound]):
            connection.execute(
                text("INSERT INTO devices (content_hash, device_id, data) VALUES (:key, 'cpu', :data)"),
                {"key": str(number) * 64, "data": data},
            )
        connection.execute(text("UPDATE decisions SET device_hash = :key"), {"key": "0" * 64})
    with MeasurementStore(url) as store:
        assert [row.device_id for row in store.decisions()] == ["cpu"] * 4
    with engine.connect() as connection:
        rows = {row.content_hash: row.data for row in connection.execute(text("SELECT content_hash, data FROM devices"))}
    engine.dispose()
    assert [rows[str(number) * 64] for number in range(len(damaged))] == damaged, "they are left as they are"
    assert str(len(damaged)) * 64 not in rows, "the sound one is not"


def test_concurrent_openings_migrate_an_old_log_once(url: str, graph: OpGraph) -> None:
    LOGS_OF_OLD[1](url, graph, num_rows=500)
    counts: list[int] = []

    def open_it() -> None:
        with MeasurementStore(url, busy_timeout_s=30) as store:
            counts.append(len(store.decisions()))

    threads = [threading.Thread(target=open_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [500] * 8


def test_failed_migration_leaves_log_as_it_was(tmp_path: Path, graph: OpGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.db"
    LOGS_OF_OLD[1](f"sqlite:///{path}", graph, num_rows=3)
    original = _migrations._STEPS[2]

    def half_way(operations: object) -> None:
        original(operations)  # type: ignore[arg-type]
        raise OSError("No space left on device")

    steps = dict(_migrations._STEPS)
    monkeypatch.setattr(_migrations, "_STEPS", {**steps, 2: half_way})
    with pytest.raises(LogError, match="No space left"):
        MeasurementStore(path)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT value FROM meta").fetchall() == [("1",)]
        assert "driver" not in [row[1] for row in connection.execute("PRAGMA table_info(measurements)")]
    monkeypatch.setattr(_migrations, "_STEPS", steps)
    with MeasurementStore(path) as store:
        assert len(store.decisions()) == 3


def test_a_spool_of_an_old_version_is_delivered(tmp_path: Path, graph: OpGraph) -> None:
    path = tmp_path / "log.db"
    LOGS_OF_OLD[1](f"sqlite:///{path}", graph, num_rows=2)
    spool = make_spool_of_schema_1(path)
    with MeasurementStore(path) as store:
        assert [decision.trial for decision in store.decisions()] == [0, 1, 99]
    assert not spool.exists()


def test_a_spool_of_a_newer_version_waits_for_it(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    spool = make_spool_of_schema_1(path)
    content = spool.read_text().replace('"schema": 1', '"schema": 99')
    spool.write_text(content)
    with pytest.warns(LogWarning, match=r"waits for a newer PerfGuard \(it has schema 99"), MeasurementStore(path) as store:
        assert store.decisions() == []
    assert spool.read_text() == content
