"""What is drawn from the log, what leaves it, and the lineage of weights: the same on SQLite and on PostgreSQL."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import create_engine, text

from perfguard.exceptions import ConfigurationError, LogError, LogVersionError
from perfguard.graph import OpGraph
from perfguard.store import MeasurementStore, export_log, import_log
from perfguard.store import _retention as retention
from tests.perfguard.store.rows import DEVICE, MEASUREMENT, PREDICTION, make_graph, record


@pytest.fixture(scope="module")
def graphs() -> list[OpGraph]:
    return [make_graph(width) for width in (4, 8, 16)]


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'log.db'}" if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def store(url: str) -> Iterator[MeasurementStore]:
    with MeasurementStore(url, busy_timeout_s=10) as store:
        yield store


def run(store: MeasurementStore, trial: int, graph: OpGraph | None, **changes: Any) -> str:
    """A decision and its measurement, which has the trial's number as its number of steps."""
    device = replace(DEVICE, id=changes.get("device_id", "toy"))
    decision_id = record(store, trial, graph=graph, device=device, prediction=PREDICTION)
    store.record_measurement(decision_id, replace(MEASUREMENT, num_steps=trial, **changes))
    return decision_id


def test_a_run_comes_back_as_it_was_logged(store: MeasurementStore, graphs: list[OpGraph]) -> None:
    run(store, 7, graphs[0])
    (decision,), (observation,) = store.decisions("s"), store.observations("toy")
    assert (decision.trial, decision.status, decision.note) == (7, "ok", "a note")
    assert observation.measurement == replace(MEASUREMENT, num_steps=7)
    assert (observation.device, observation.graph.content_hash) == (DEVICE, graphs[0].content_hash)


def test_out_of_memory_is_observed_as_a_lower_bound_and_other_failures_are_not(
    store: MeasurementStore, graphs: list[OpGraph]
) -> None:
    for trial, status in enumerate(("ok", "oom", "timeout", "failed")):
        run(store, trial, graphs[0], status=status)
    found = [observation.measurement for observation in store.observations("toy")]
    assert [(measurement.status, measurement.peak_memory_bytes) for measurement in found] == [("ok", 1100), ("oom", 1100)]


def test_the_newest_decisions_are_shown_oldest_first(store: MeasurementStore) -> None:
    for trial in range(5):
        record(store, trial, study="even" if trial % 2 == 0 else "odd")
    assert [decision.trial for decision in store.decisions(newest=2)] == [3, 4]
    assert [decision.trial for decision in store.decisions("even", newest=2)] == [2, 4]
    assert [decision.trial for decision in store.decisions("even")] == [0, 2, 4]


def test_a_sample_is_random_without_repetition_and_by_device(store: MeasurementStore, graphs: list[OpGraph]) -> None:
    for trial in range(60):
        run(store, trial, graphs[trial % 3], device_id="toy" if trial % 2 == 0 else "other")
    run(store, 60, None)
    random = Random(0)
    drawn: Counter[int] = Counter()
    for _ in range(60):
        sample = [observation.measurement.num_steps for observation in store.sample(15, random)]
        assert len(set(sample)) == len(sample) >= 14  # the run whose graph is not known may have been drawn
        drawn.update(sample)
    assert set(drawn) == set(range(60))
    assert max(drawn.values()) <= 4 * min(drawn.values())
    of_toy = store.sample(16, random, device_id="toy")
    assert {observation.device.id for observation in of_toy} == {"toy"}
    assert store.sample(16, random, device_id="none") == []
    assert len(store.sample(1000, random)) == 60
    assert [o.measurement for o in store.sample(8, Random(3))] == [o.measurement for o in store.sample(8, Random(3))]


def test_a_sample_of_a_long_log_comes_from_all_over_it(
    store: MeasurementStore, graphs: list[OpGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perfguard.store._store._MAX_LISTED", 100)
    ids = Random(0)  # a sample follows the ids: drawn anew, one in some hundreds of logs has a thin stretch
    monkeypatch.setattr("uuid.uuid4", lambda: UUID(int=ids.getrandbits(128)))
    for trial in range(300):
        run(store, trial, graphs[0], device_id="toy" if trial % 2 == 0 else "other")
    random = Random(0)
    drawn: Counter[int] = Counter()
    for _ in range(20):
        sample = [observation.measurement.num_steps for observation in store.sample(64, random)]
        assert len(set(sample)) == len(sample) > 32
        drawn.update(sample)
    assert len(drawn) > 250
    assert {observation.device.id for observation in store.sample(64, random, device_id="toy")} == {"toy"}


def test_old_and_surplus_decisions_leave_with_all_that_only_they_need(
    store: MeasurementStore, graphs: list[OpGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "ROWS_AT_ONCE", 2)
    monkeypatch.setattr("perfguard.store._store.ROWS_AT_ONCE", 2)
    for trial in range(10):
        run(store, trial, graphs[trial // 4])
    store.record_measurement("e" * 32, MEASUREMENT)
    assert store.prune() == 0
    assert store.prune(before=datetime.now(timezone.utc) - timedelta(hours=1)) == 0
    assert store.prune(keep_newest=10) == 0
    assert store.counts()["measurements"] == 11
    assert store.prune(keep_newest=5) == 5
    assert [decision.trial for decision in store.decisions()] == [5, 6, 7, 8, 9]
    assert store.counts() == {"decisions": 5, "measurements": 6, "graphs": 2, "devices": 1, "weights": 0}
    assert len(store.observations("toy")) == 5
    assert store.prune(before=datetime.now(timezone.utc) + timedelta(seconds=1)) == 5
    assert store.counts() == dict.fromkeys(("decisions", "measurements", "graphs", "devices", "weights"), 0)


def test_a_graph_that_another_process_pruned_comes_again(url: str, graphs: list[OpGraph]) -> None:
    with MeasurementStore(url) as store, MeasurementStore(url) as other:
        run(store, 0, graphs[0])
        assert other.prune(keep_newest=0) == 1
        assert other.counts()["graphs"] == 0
        run(store, 1, graphs[0])
        assert [observation.measurement.num_steps for observation in other.observations("toy")] == [1]


def test_keeping_less_than_nothing_is_refused(store: MeasurementStore) -> None:
    with pytest.raises(ConfigurationError, match="at least 0 or None, but got -1"):
        store.prune(keep_newest=-1)


def test_weights_keep_their_lineage(store: MeasurementStore) -> None:
    first = store.record_weights(predictor="guardnet", data=b"one", metrics={"error": 0.1})
    second = store.record_weights(predictor="guardnet", data=b"two", parent_id=first, keep_data=False)
    other = store.record_weights(predictor="another", data=b"three")
    for weights_id in (first, other, second):
        store.set_weights_state(weights_id, "promoted")
    states = {weights.weights_id: weights.state for weights in store.weights()}
    assert states == {first: "superseded", second: "promoted", other: "promoted"}
    store.set_weights_state(second, "rolled back")
    store.set_weights_state(first, "promoted")
    one, two = store.weights("guardnet")
    assert (one.state, two.state, two.parent_id, one.parent_id) == ("promoted", "rolled back", first, None)
    assert (one.metrics, one.sha256) == ({"error": 0.1}, hashlib.sha256(b"one").hexdigest())
    assert one.created_at < one.state_changed_at <= datetime.now(timezone.utc)
    assert (store.weights_data(first), store.weights_data(second), store.weights_data("none")) == (b"one", None, None)


def test_weights_that_there_are_not_cannot_be_promoted(store: MeasurementStore) -> None:
    with pytest.raises(LogError, match="has no weights 'none'"):
        store.set_weights_state("none", "promoted")
    store.record_weights(predictor="guardnet", data=b"one")  # the connection is as good as before


def test_a_log_moves_from_one_database_to_another(store: MeasurementStore, graphs: list[OpGraph], tmp_path: Path) -> None:
    for trial in range(3):
        run(store, trial, graphs[trial])
    export_log(store, tmp_path / "out")
    with MeasurementStore(":memory:") as copy:
        import_log(copy, tmp_path / "out")
        assert copy.decisions() == store.decisions()
        assert [o.measurement for o in copy.observations("toy")] == [o.measurement for o in store.observations("toy")]


def test_a_newer_log_is_refused_and_left_as_it_is(url: str) -> None:
    MeasurementStore(url).close()
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE meta SET value = '99'"))
        connection.execute(text("ALTER TABLE decisions ADD COLUMN novelty TEXT"))
    with pytest.raises(LogVersionError, match="has schema 99"):
        MeasurementStore(url)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT value FROM meta")).scalars().all() == ["99"]
    engine.dispose()
