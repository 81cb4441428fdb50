"""A log of any older version is brought to the present schema, and loses nothing."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine

from perfguard.exceptions import LogError, LogWarning
from perfguard.graph import OpGraph
from perfguard.store import MeasurementStore, _migrations
from perfguard.store._schema import SCHEMA_VERSION, metadata
from tests.perfguard.store.rows import DEVICE, LOGS_OF_OLD, MEASUREMENT, make_graph, make_spool_of_schema_1, record


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return make_graph()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'log.db'}" if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


def test_every_version_has_a_way_to_the_next_and_a_log_to_test_it_on() -> None:
    assert sorted(LOGS_OF_OLD) == list(range(1, SCHEMA_VERSION))
    assert sorted(_migrations._STEPS) == list(range(2, SCHEMA_VERSION + 1))


@pytest.mark.parametrize("version", LOGS_OF_OLD)
def test_an_old_log_is_brought_to_the_present_schema_with_every_row(version: int, url: str, graph: OpGraph) -> None:
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


def test_several_that_open_an_old_log_at_once_migrate_it_once(url: str, graph: OpGraph) -> None:
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


def test_a_migration_that_fails_leaves_the_log_as_it_was(tmp_path: Path, graph: OpGraph, monkeypatch: pytest.MonkeyPatch) -> None:
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
