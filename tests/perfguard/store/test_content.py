"""What is drawn from the log, what leaves it, and the lineage of weights: the same on SQLite and on PostgreSQL."""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import create_engine, event, text

from perfguard.exceptions import ConfigurationError, LogError, LogVersionError
from perfguard.graph import OpGraph
from perfguard.log import MeasurementStore, Selection, export_log, import_log
from perfguard.log import _retention as retention
from tests.perfguard.store.rows import CPU, DEVICE, LOGS_OF_OLD, MEASUREMENT, PREDICTION, make_graph, record


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


def test_observations_take_oom_and_no_other_failures(store: MeasurementStore, graphs: list[OpGraph]) -> None:
    """Out of memory is a lower bound of the peak."""
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


def test_sample_is_random_distinct_and_by_device(store: MeasurementStore, graphs: list[OpGraph]) -> None:
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


def test_statements_keep_to_old_sqlite_variable_limit(url: str, graphs: list[OpGraph]) -> None:
    LOGS_OF_OLD[3](url, graphs[0], num_rows=1000)
    numbers: list[int] = []

    def count(connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool) -> None:
        numbers.extend(map(len, parameters if executemany else [parameters]))

    with MeasurementStore(url, busy_timeout_s=10) as store:
        event.listen(store._log.engine, "before_cursor_execute", count)
        assert len(store.sample(1000, Random(0))) == store.counts()["measurements"] > 900
        assert store.prune(keep_newest=10) == 990
        assert [decision.trial for decision in store.decisions()] == list(range(990, 1000))
        assert store.counts()["measurements"] < 10 + 1
    assert max(numbers) < 999


def test_prune_removes_all_that_only_its_rows_need(
    store: MeasurementStore, graphs: list[OpGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "ROWS_AT_ONCE", 2)
    for trial in range(10):
        run(store, trial, graphs[trial // 4])
    store.record_measurement("e" * 32, MEASUREMENT)
    assert store.prune(Selection(before=datetime.now(timezone.utc) - timedelta(hours=1))) == 0
    assert store.prune(keep_newest=10) == 0
    assert store.counts()["measurements"] == 11
    assert store.prune(keep_newest=5) == 5
    assert [decision.trial for decision in store.decisions()] == [5, 6, 7, 8, 9]
    assert store.counts() == {"decisions": 5, "measurements": 6, "graphs": 2, "devices": 1, "weights": 0}
    assert len(store.observations("toy")) == 5
    assert store.prune(Selection(before=datetime.now(timezone.utc) + timedelta(seconds=1))) == 5
    assert store.counts() == dict.fromkeys(("decisions", "measurements", "graphs", "devices", "weights"), 0)


def several(store: MeasurementStore, graph: OpGraph) -> dict[str, str]:
    """A log of four decisions; their ids by what each is the only one of."""
    laptop = replace(MEASUREMENT, host="laptop")
    ids = {
        "a": record(store, 0, study="a", graph=graph, device=DEVICE, prediction=PREDICTION),
        "b": record(store, 1, study="b", graph=graph, device=CPU, trial_id="tune_00001"),
        "oom": record(store, 2, study="c", graph=graph, device=DEVICE),
        "pruned": record(store, 3, study="c", graph=graph, device=DEVICE, action="prune"),
    }
    store.record_measurement(ids["a"], laptop)
    store.record_measurement(ids["b"], replace(MEASUREMENT, device_id="cpu", host="node-1"))
    store.record_measurement(ids["oom"], replace(MEASUREMENT, status="oom", host="node-1"))
    return ids


def chosen(store: MeasurementStore, **fields: Any) -> list[int | None]:
    return [decision.trial for decision in store.decisions(Selection(**fields))]


def test_selection_means_same_rows_for_all_commands(store: MeasurementStore, graphs: list[OpGraph], tmp_path: Path) -> None:
    # Finding 1: `log prune` could choose neither a device nor a study, so a poisoned stretch could not be got rid of.
    several(store, graphs[0])
    middle = store.decisions()[2].created_at
    selections = {
        Selection(): [0, 1, 2, 3],
        Selection(study="c"): [2, 3],
        Selection(device="toy"): [0, 2, 3],
        Selection(device="cpu"): [1],
        Selection(status="oom"): [2],
        Selection(verdict="prune"): [3],
        Selection(host="laptop"): [0],
        Selection(host=platform.node()): [3],  # never measured: where it was decided
        Selection(since=middle): [2, 3],
        Selection(before=middle): [0, 1],
        Selection(device="toy", host="node-1", status="oom", since=middle): [2],
        Selection(study="c", device="cpu"): [],
    }
    for number, (selection, trials) in enumerate(selections.items()):
        assert [row.trial for row in store.decisions(selection)] == trials
        counts = export_log(store, tmp_path / f"out-{number}", selection)
        assert counts["decisions"] == len(trials)
        assert counts["measurements"] == len(set(trials) - {3})
        assert (counts["graphs"], counts["devices"]) == (min(1, len(trials)), len({trial == 1 for trial in trials}))
        if selection.is_everything:
            continue
        with MeasurementStore(":memory:") as copy:
            import_log(copy, tmp_path / "out-0")
            assert copy.set_aside(selection, "a test") == len(set(trials) - {3})
            assert {row.trial for row in copy.decisions() if row.set_aside} == set(trials) - {3}
            assert copy.prune(selection) == len(trials)
            assert [row.trial for row in copy.decisions()] == [trial for trial in range(4) if trial not in trials]


def test_set_aside_rows_are_not_learnt_until_undone(store: MeasurementStore, graphs: list[OpGraph]) -> None:
    several(store, graphs[0])
    before = [row.decision_id for row in store.observations("toy")]
    assert len(before) == 2
    assert store.num_measured(since_ns=0) == 3
    assert store.set_aside(Selection(device="toy"), "a test") == 2
    assert store.set_aside(Selection(device="toy"), "another reason") == 0
    assert {row.set_aside for row in store.decisions(Selection(device="toy"))} == {"a test", None}
    assert store.observations("toy") == []
    assert store.num_measured(since_ns=0) == 1
    assert {row.device.id for row in store.sample(10, Random(0))} == {"cpu"}
    assert store.take_back(Selection(status="oom")) == 1
    assert store.take_back(Selection(device="toy")) == 1
    assert [row.decision_id for row in store.observations("toy")] == before


def test_nobody_sets_all_aside_by_saying_nothing(store: MeasurementStore) -> None:
    with pytest.raises(ConfigurationError, match="Say which measurements"):
        store.set_aside(Selection(), "why")
    with pytest.raises(ConfigurationError, match="Say which measurements"):
        store.take_back(Selection())
    with pytest.raises(ConfigurationError, match="reason is empty"):
        store.set_aside(Selection(study="s"), "")
    with pytest.raises(ConfigurationError, match="Say what to remove"):
        store.prune()
    with pytest.raises(ConfigurationError, match="must have a time zone"):
        Selection(since=datetime(2026, 1, 1))
    now = datetime.now(timezone.utc)
    with pytest.raises(ConfigurationError, match="since must be earlier than before"):
        Selection(since=now, before=now)


def test_prune_by_age_and_number_keeps_to_selection(store: MeasurementStore, graphs: list[OpGraph]) -> None:
    several(store, graphs[0])
    assert store.prune(Selection(study="c"), keep_newest=1) == 1
    assert [row.trial for row in store.decisions()] == [0, 1, 3]
    assert store.prune(Selection(device="toy", before=datetime.now(timezone.utc)), keep_newest=5) == 2
    assert [row.trial for row in store.decisions()] == [1]


def test_the_tuner_s_id_and_the_host_are_logged(store: MeasurementStore, graphs: list[OpGraph]) -> None:
    ids = several(store, graphs[0])
    rows = {row.decision_id: row for row in store.decisions()}
    assert (rows[ids["b"]].trial_id, rows[ids["b"]].host) == ("tune_00001", "node-1")
    assert (rows[ids["pruned"]].trial_id, rows[ids["pruned"]].host) == (None, platform.node())


def test_weights_since_are_in_rollback_order(store: MeasurementStore) -> None:
    begin = datetime.now(timezone.utc)
    first = store.record_weights(predictor="guardnet", data=b"1")
    store.set_weights_state(first, "promoted")
    middle = datetime.now(timezone.utc)
    second = store.record_weights(predictor="guardnet", data=b"2", parent_id=first)
    store.set_weights_state(second, "promoted")
    store.set_weights_state(store.record_weights(predictor="guardnet", data=b"3", parent_id=second), "rejected")
    assert [weights.weights_id for weights in store.weights_since(begin)] == [second, first]
    assert [weights.weights_id for weights in store.weights_since(middle)] == [second]
    assert store.weights_since(datetime.now(timezone.utc)) == []
    for weights in store.weights_since(begin):
        store.roll_back_weights(weights.weights_id)
    assert store.promoted_weights("guardnet") is None


def test_cpu_processes_are_one_device_with_own_rates(store: MeasurementStore, graphs: list[OpGraph]) -> None:
    """Each learns by its own rates."""
    # Part of finding 1: twelve processes on one CPU left twelve rows of devices, because each measured other rates.
    for trial in range(12):
        device = replace(CPU, bandwidth_bytes_per_s=1e9 + trial, peak_flops={"fp32": 1e10 + trial}, boost_clock_hz=2e9 + trial)
        decision_id = record(store, trial, graph=graphs[0], device=device)
        store.record_measurement(decision_id, replace(MEASUREMENT, device_id="cpu"))
    assert store.counts()["devices"] == 1
    here = replace(CPU, bandwidth_bytes_per_s=5e9)
    assert [row.device for row in store.observations(here)] == [here] * 12
    other = replace(here, num_sms=2 * CPU.num_sms)  # with another number of threads it is another device
    assert all(row.device.bandwidth_bytes_per_s == 1e9 for row in store.observations(other))
    record(store, 12, device=other)
    assert store.counts()["devices"] == 2


def test_graph_pruned_by_another_process_comes_again(url: str, graphs: list[OpGraph]) -> None:
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
