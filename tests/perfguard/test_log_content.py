"""What the log holds and gives out, and which weights are in use: the same on SQLite and on PostgreSQL."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pandas
import pytest

from perfguard.budget import Limit
from perfguard.devices import Device
from perfguard.exceptions import ConfigurationError, LogError
from perfguard.graph import OpGraph
from perfguard.log import MeasurementStore, Selection
from perfguard.measure import Status
from perfguard.record import columns_of
from perfguard.repair import Repair
from perfguard.summary import summarize
from perfguard.verdict import Verdict
from tests.perfguard.log_rows import CPU, DEVICE, LAUNCHED, MEASUREMENT, PREDICTION, PRUNED, make_graph, record


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
    decision_id = record(store, trial, LAUNCHED, graph=graph, device=device)
    store.record_measurement(decision_id, replace(MEASUREMENT, num_steps=trial, **changes))
    return decision_id


@pytest.mark.parametrize(
    "verdict",
    [
        LAUNCHED,
        PRUNED,
        replace(PRUNED, bound="at least 1.0 GiB for its tensors"),
        replace(PRUNED, action="launch", remark="on_violation is 'warn'"),
        replace(LAUNCHED, action="repair", repair=Repair(precision="bf16"), as_proposed=PRUNED.limits[0]),
        Verdict(action="launch", unjudged="build failed"),
    ],
)
def test_verdict_is_stored_once_and_in_one_schema(store: MeasurementStore, verdict: Verdict) -> None:
    """Its numbers and limits are columns, and the sentence is made from them when it is shown."""
    record(store, 0, verdict)
    (trial,) = store.records()
    assert trial.verdict is not None
    assert trial.reason == verdict.reason
    written, read = columns_of(verdict), columns_of(trial.verdict)
    assert written.pop("predictor", "") == trial.predictor
    for name, value in written.items():
        assert read[name] == (pytest.approx(value, rel=1e-12) if isinstance(value, float) else value)
    assert set(read) == set(written)


def test_history_is_what_risk_is_accounted_by(store: MeasurementStore, graphs: list[OpGraph]) -> None:
    """Of one study: what ended on the guarded device, how it showed that it exceeds a budget, and what may still fail."""
    doubtful = replace(LAUNCHED, limits=(Limit("memory", 950.0, PREDICTION.peak_memory),), accepted=0.98)
    ended: list[tuple[Verdict, dict[str, Any]]] = [
        (LAUNCHED, {"first_step_s": 2.0}),
        (LAUNCHED, {"status": "oom", "total_time_s": 1.0}),
        (replace(LAUNCHED, phase="the evaluation"), {"status": "oom", "total_time_s": 3.0}),
        (LAUNCHED, {"peak_memory_bytes": 3000}),
        (LAUNCHED, {"status": "timeout"}),
        (LAUNCHED, {"cut_short": "too slow"}),
        (LAUNCHED, {"step_time_s": 2.0}),
        (LAUNCHED, {"status": "failed"}),
        (LAUNCHED, {"total_time_s": float("nan")}),
        (LAUNCHED, {"device_id": "cpu"}),  # it took no time of the device
    ]
    for number, (verdict, changes) in enumerate(ended):
        decision_id = record(store, number, verdict, graph=graphs[number == 3], device=DEVICE)
        store.record_measurement(decision_id, replace(MEASUREMENT, **changes))
    for verdict in (PRUNED, LAUNCHED, doubtful):
        record(store, 20, verdict, device=DEVICE)
    record(store, 21, doubtful, device=DEVICE, study="other")
    history = store.history("s")
    assert [(trial.total_s, trial.exceeded) for trial in history.ended] == [
        (30.0, None), (1.0, "in the step"), (3.0, "in a phase"), (30.0, "in the step"), (30.0, "by the pace"),
        (30.0, "by the pace"), (30.0, "at the end"), (30.0, None), (0.0, None),
    ]  # fmt: skip
    assert history.ended[0].first_step_s == 2.0
    (running,) = history.running
    assert running.chance == pytest.approx(doubtful.p_violation)
    assert running.shows == "in the step"
    assert 0 <= running.age_s < 60
    for number in range(2):
        store.record_measurement(record(store, 30 + number, LAUNCHED, graph=graphs[1], device=DEVICE), MEASUREMENT)
    assert store.history("s").ended[3].exceeded is None, "one reading of three is above the limit, by chance"


@pytest.mark.parametrize(
    ("device", "grown", "exceeded"), [(CPU, 1.05, None), (CPU, 1.2, "in the step"), (DEVICE, 1.05, "in the step")]
)
def test_a_result_is_not_lost_for_what_equal_readings_scatter_by(
    store: MeasurementStore, device: Device, grown: float, exceeded: str | None
) -> None:
    limited = replace(LAUNCHED, limits=(Limit("memory", 1000.0, PREDICTION.peak_memory),))
    measured = replace(MEASUREMENT, device_id=device.id, device_name=device.name, peak_memory_bytes=round(1000 * grown))
    store.record_measurement(record(store, 0, limited, device=device), measured)
    store.record_measurement(record(store, 1, limited, device=device), replace(measured, status="oom"))
    assert [trial.exceeded for trial in store.history("s").ended] == [exceeded, "in the step"]


def test_prune_removes_all_that_only_its_rows_need(store: MeasurementStore, graphs: list[OpGraph]) -> None:
    for trial in range(10):
        run(store, trial, graphs[trial // 4])
    assert store.prune(Selection(before=datetime.now(timezone.utc) - timedelta(hours=1))) == 0
    assert store.counts()["measurements"] == 10
    assert store.prune(Selection(before=store.records()[5].created_at)) == 5
    assert [trial.number for trial in store.records()] == [5, 6, 7, 8, 9]
    assert store.counts() == {"decisions": 5, "measurements": 5, "graphs": 2, "devices": 1, "weights": 0}
    assert len(store.observations("toy")) == 5
    assert store.prune(Selection(before=datetime.now(timezone.utc) + timedelta(seconds=1))) == 5
    assert store.counts() == dict.fromkeys(("decisions", "measurements", "graphs", "devices", "weights"), 0)


def several(store: MeasurementStore, graph: OpGraph) -> dict[str, str]:
    """A log of four decisions; their ids by what each is the only one of."""
    laptop = replace(MEASUREMENT, host="laptop")
    ids = {
        "a": record(store, 0, LAUNCHED, study="a", graph=graph, device=DEVICE),
        "b": record(store, 1, study="b", graph=graph, device=CPU, trial_id="tune_00001"),
        "oom": record(store, 2, study="c", graph=graph, device=DEVICE),
        "pruned": record(store, 3, PRUNED, study="c", graph=graph, device=DEVICE),
    }
    store.record_measurement(ids["a"], laptop)
    store.record_measurement(ids["b"], replace(MEASUREMENT, device_id="cpu", host="node-1"))
    store.record_measurement(ids["oom"], replace(MEASUREMENT, status="oom", host="node-1"))
    return ids


def test_selection_means_the_same_rows_in_both_databases(store: MeasurementStore, graphs: list[OpGraph]) -> None:
    # Finding 1: `log prune` could choose neither a device nor a study, so a poisoned stretch could not be got rid of.
    several(store, graphs[0])
    middle = store.records()[2].created_at
    assert middle is not None
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
    for selection, trials in selections.items():
        assert [trial.number for trial in store.records(selection)] == trials


def test_set_aside_rows_are_not_learnt_until_undone(store: MeasurementStore, graphs: list[OpGraph]) -> None:
    several(store, graphs[0])
    before = [row.decision_id for row in store.observations("toy")]
    assert len(before) == 2
    assert store.set_aside(Selection(device="toy"), "a test") == 2
    assert store.set_aside(Selection(device="toy"), "another reason") == 0
    aside = [trial for trial in store.records(Selection(device="toy")) if trial.set_aside]
    assert {(trial.set_aside, trial.not_measured, trial.is_measured) for trial in aside} == {("a test", "a test", False)}
    assert len(aside) == 2
    assert store.observations("toy") == []
    assert store.take_back(Selection(status="oom")) == 1
    assert store.take_back(Selection(device="toy")) == 1
    assert [row.decision_id for row in store.observations("toy")] == before


def test_what_is_set_aside_has_a_reason_and_a_time_has_a_zone(store: MeasurementStore) -> None:
    with pytest.raises(ConfigurationError, match="reason is empty"):
        store.set_aside(Selection(study="s"), "")
    with pytest.raises(ConfigurationError, match="must have a time zone"):
        Selection(since=datetime(2026, 1, 1))


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


def test_newest_weights_are_in_use_until_rolled_back(store: MeasurementStore) -> None:
    assert store.promoted("guardnet") is None
    first = store.promote("guardnet", b"one", {"error": 0.1})
    other = store.promote("another", b"three")
    second = store.promote("guardnet", b"two")
    assert store.promoted("guardnet") == (second, b"two")
    states = {weights.weights_id: weights.state for weights in store.weights()}
    assert states == {first: "superseded", second: "promoted", other: "promoted"}
    assert store.roll_back("guardnet") == first
    assert store.promoted("guardnet") == (first, b"one")
    one, two = store.weights("guardnet")
    assert (one.state, two.state) == ("promoted", "rolled back")
    assert (one.metrics, one.sha256) == ({"error": 0.1}, hashlib.sha256(b"one").hexdigest())
    assert one.created_at == one.state_changed_at < two.created_at < two.state_changed_at <= datetime.now(timezone.utc)
    third = store.promote("guardnet", b"four")
    assert store.roll_back("guardnet") == first, "what was rolled back does not come again"
    assert store.roll_back("guardnet") is None
    assert store.promoted("guardnet") is None
    with pytest.raises(LogError, match="No fine-tuned weights of 'guardnet' are in use"):
        store.roll_back("guardnet")
    assert [weights.state for weights in store.weights("guardnet")] == ["rolled back"] * 3
    assert store.promoted("another") == (other, b"three")
    assert third != first


def test_export_is_one_table_with_a_row_for_each_decision(store: MeasurementStore, tmp_path: Path) -> None:
    several(store, make_graph())
    path = tmp_path / "folder" / "log.csv"
    assert store.export(path) == 4
    table = pandas.read_csv(path)
    assert list(table["trial"]) == [0, 1, 2, 3]
    assert list(table["verdict"]) == ["launch", "launch", "launch", "prune"]
    assert table["measured_status"].fillna("").tolist() == ["ok", "ok", "oom", ""]
    assert table["measured_peak_memory_bytes"].dropna().tolist() == [1100, 1100, 1100]
    assert (table["memory_limit_bytes"][0], table["memory_predicted_bytes"][0]) == (2000.0, 1000.0)
    assert table["device_id"].tolist() == ["toy", "cpu", "toy", "toy"]
    assert json.loads(table["params"][0]) == {}
    created = pandas.to_datetime(table["created_at"], format="ISO8601")
    assert abs(created[0] - store.records()[0].created_at) < timedelta(milliseconds=1)
    assert store.export(path, Selection(study="a")) == 1, "an earlier file is replaced"
    assert store.export(path.with_suffix(".parquet")) == 4
    assert pandas.read_parquet(path.with_suffix(".parquet"))["measured_num_steps"].dtype == "Int64"


def test_export_says_what_cannot_be_written(store: MeasurementStore, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LogError, match="cannot be exported to"):
        store.export(tmp_path / "file" / "log.csv")
    assert store.export(tmp_path / "empty.csv") == 0


@pytest.mark.parametrize("status", ["interrupted", "failed"])
def test_run_that_was_cut_off_is_no_violation_and_no_measurement(store: MeasurementStore, status: Status) -> None:
    too_much = replace(MEASUREMENT, status=status, peak_memory_bytes=10**9, total_time_s=float("nan"))
    store.record_measurement(record(store, 0, LAUNCHED, device=DEVICE), too_much)
    (trial,) = store.records()
    assert (trial.status, trial.is_measured, trial.error("memory")) == (status, False, None)
    assert "time" not in trial.measured
    assert trial.note == "a note; total_time_s was nan"
    assert summarize([trial]).num_violations is None
