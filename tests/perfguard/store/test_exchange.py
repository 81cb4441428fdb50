"""The log goes out as files and comes back, whole, once, and without names where that is asked."""

from __future__ import annotations

import csv
import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import BigInteger, Double, LargeBinary, Text
from torch import nn

from perfguard import TensorSpec, Workload, trace
from perfguard.exceptions import ConfigurationError, LogError, LogVersionError
from perfguard.graph import OpGraph
from perfguard.log import MeasurementStore, Selection, export_log, import_log
from perfguard.store._exchange import _from_field, _to_field, anonymous_graph
from tests.perfguard.store.rows import DEVICE, MEASUREMENT, PREDICTION, make_graph, record

TABLES = ("graphs", "devices", "decisions", "measurements", "weights")


class SecretBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.secret_projection = nn.Linear(8, 8)
        self.classified = nn.Linear(8, 2)

    def forward(self, x: Any) -> Any:
        return self.classified(self.secret_projection(x).relu())


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return make_graph()


@pytest.fixture(scope="module")
def secret_graph() -> OpGraph:
    return trace(Workload(SecretBlock(), (4, 8), TensorSpec((4,), "int64"), nn.functional.cross_entropy))


@pytest.fixture
def store(tmp_path: Path, graph: OpGraph) -> Iterator[MeasurementStore]:
    with MeasurementStore(tmp_path / "log.db") as store:
        fill(store, graph)
        yield store


def fill(store: MeasurementStore, graph: OpGraph) -> None:
    """Every table, every kind of value, NULLs and odd texts."""
    known: dict[str, Any] = {"graph": graph, "device": DEVICE, "prediction": PREDICTION}
    texts = ["", "\\N", "\\", 'a "quoted", text\nof two lines', "ß∂ 漢字", "  "]
    for trial, text in enumerate(texts):
        store.record_measurement(
            record(store, trial, reason=text, study=text, params={"lr": 0.1, "name": text}, **known), MEASUREMENT
        )
    record(store, None)
    first = store.record_weights(predictor="guardnet", data=bytes(range(256)), metrics={"error": 0.05})
    store.record_weights(predictor="guardnet", data=b"2", parent_id=first, keep_data=False)


def content(store: MeasurementStore) -> dict[str, list[dict[str, Any]]]:
    return {table: list(store.rows(table)) for table in TABLES}


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_what_goes_out_comes_back_equal_and_once(store: MeasurementStore, tmp_path: Path, format: Any) -> None:
    counts = export_log(store, tmp_path / "out", format=format)
    assert counts == {"graphs": 1, "devices": 1, "decisions": 7, "measurements": 6, "weights": 2}
    with MeasurementStore(tmp_path / "copy.db") as copy:
        assert import_log(copy, tmp_path / "out") == counts
        assert content(copy) == content(store)
        assert copy.observations("toy")[0].measurement == MEASUREMENT
        assert import_log(copy, tmp_path / "out") == dict.fromkeys(TABLES, 0)
        assert content(copy) == content(store)
    assert import_log(store, tmp_path / "out") == dict.fromkeys(TABLES, 0)


def test_an_export_replaces_an_earlier_one(store: MeasurementStore, tmp_path: Path) -> None:
    for _ in range(2):
        export_log(store, tmp_path / "out")
    with MeasurementStore(":memory:") as copy:
        assert sum(import_log(copy, tmp_path / "out").values()) == 17


def test_two_logs_become_one(store: MeasurementStore, tmp_path: Path, graph: OpGraph) -> None:
    with MeasurementStore(tmp_path / "other.db") as other:
        fill(other, graph)
        export_log(other, tmp_path / "out")
    assert import_log(store, tmp_path / "out") == {"graphs": 0, "devices": 0, "decisions": 7, "measurements": 6, "weights": 2}
    assert store.counts()["decisions"] == 14


columns: st.SearchStrategy[tuple[Any, Any]] = st.one_of(
    st.tuples(st.just(Text()), st.none() | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))),
    st.tuples(st.just(BigInteger()), st.none() | st.integers(-(2**63), 2**63 - 1)),
    st.tuples(st.just(Double()), st.none() | st.floats(allow_nan=False, allow_infinity=False)),
    st.tuples(st.just(LargeBinary()), st.none() | st.binary()),
)


@given(columns)
def test_any_value_is_the_same_after_csv(column: tuple[Any, Any]) -> None:
    type_, value = column
    assert _from_field(_to_field(value), type_) == value


def test_an_anonymous_export_holds_no_name(
    store: MeasurementStore, tmp_path: Path, secret_graph: OpGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: dict[str, Any] = {"graph": secret_graph, "device": DEVICE, "prediction": PREDICTION}
    for trial in range(2):
        kwargs = known | {"study": "project-icarus", "reason": "not judged: KeyError: 'icarus'", "params": {"icarus": "icarus"}}
        decision_id = record(store, trial, **kwargs, trial_id="icarus_00001")
        store.record_measurement(decision_id, replace(MEASUREMENT, host="icarus.local"))
        if trial == 0:
            store.set_aside(Selection(study="project-icarus"), "icarus was a test")
    store.record_weights(predictor="guardnet", data=b"3", metrics={"note": "icarus"})
    export_log(store, tmp_path / "out", anonymize=True)
    with MeasurementStore(tmp_path / "copy.db") as copy:
        import_log(copy, tmp_path / "out")
        everything = repr([list(copy.rows(table)) for table in TABLES if table != "graphs"])
        assert "icarus" not in everything
        assert "a note" not in everything
        assert f"'{platform.node()}'" not in everything
        last = copy.decisions()[-2:]
        assert last[0].study == last[1].study
        assert last[0].study in {f"study-{number}" for number in range(1, 8)}
        assert (last[0].reason, last[0].params, last[0].trial) == ("", {}, 0)
        graph = copy.observations("toy")[-1].graph
        assert copy.counts() == store.counts()
    text = graph._to_json().decode()
    assert "secret" not in text
    assert "classified" not in text
    assert [op.flops for op in graph.ops] == [op.flops for op in secret_graph.ops]
    assert graph.peak_live_bytes == secret_graph.peak_live_bytes


def test_anonymous_graphs_differing_in_names_are_one(secret_graph: OpGraph) -> None:
    class Other(SecretBlock):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = self.secret_projection, self.classified
            del self.secret_projection, self.classified

        def forward(self, x: Any) -> Any:
            return self.second(self.first(x).relu())

    other = trace(Workload(Other(), (4, 8), TensorSpec((4,), "int64"), nn.functional.cross_entropy))
    assert other.content_hash != secret_graph.content_hash
    assert anonymous_graph(other).content_hash == anonymous_graph(secret_graph).content_hash
    assert anonymous_graph(anonymous_graph(other)).content_hash == anonymous_graph(other).content_hash


def test_parquet_without_pyarrow_names_the_pip_line(
    store: MeasurementStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'perfguard\[parquet\]'"):
        export_log(store, tmp_path / "out", format="parquet")
    assert not (tmp_path / "out").exists()


def test_a_format_that_there_is_not_is_named(store: MeasurementStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="must be one of csv, parquet, but got 'xlsx'"):
        export_log(store, tmp_path, format="xlsx")  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_written_is_an_error(store: MeasurementStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LogError, match="cannot be exported"):
        export_log(store, tmp_path / "file")


def without_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def of_a_newer_version(folder: Path) -> None:
    change_manifest(folder, schema=99)


def of_another_format(folder: Path) -> None:
    change_manifest(folder, format="xlsx")


def change_manifest(folder: Path, **changes: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit(table: str, row: int, column: str, value: str) -> Any:
    def change(folder: Path) -> None:
        path = folder / f"{table}.csv"
        with path.open(newline="") as file:
            rows = list(csv.reader(file))
        rows[row][rows[0].index(column)] = value
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(rows)

    return change


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (without_manifest, LogError, "is no complete export"),
        (of_a_newer_version, LogVersionError, "was exported with schema 99, this PerfGuard reads up to"),
        (of_another_format, LogError, "format must be one of csv, parquet, but is 'xlsx'"),
        (
            edit("measurements", 2, "peak_memory_bytes", "many"),
            LogError,
            r"measurements.csv, row 2: peak_memory_bytes cannot be 'many'",
        ),
        (edit("measurements", 2, "step_time_s", "nan"), LogError, r"measurements.csv, row 2: step_time_s must be finite"),
        (edit("measurements", 1, "status", "fine"), LogError, r"row 1: status must be one of ok, oom.*Mend or remove the row"),
        (edit("decisions", 1, "action", "go"), LogError, r"decisions.csv, row 1: action must be one of launch"),
        (edit("decisions", 1, "decision_id", ""), LogError, r"row 1: decision_id is missing"),
        (edit("decisions", 1, "params", "[1]"), LogError, r"row 1: params must be a JSON object"),
        (edit("decisions", 1, "params", "{"), LogError, r"decisions.csv, row 1: "),
        (edit("decisions", 0, "reason", "why"), LogError, r"columns that the log does not know: why"),
        (edit("graphs", 1, "data", "!"), LogError, r"graphs.csv, row 1: data cannot be"),
        (edit("graphs", 1, "data", "AAAA"), LogError, r"graphs.csv, row 1: A stored graph is damaged"),
        (lambda folder: (folder / "weights.csv").write_text("weights_id,state\na\n"), LogError, "row 1: it must have 2 fields"),
    ],
)
def test_a_wrong_import_names_the_file_and_the_row(
    damage: Any, error: type[LogError], message: str, store: MeasurementStore, tmp_path: Path
) -> None:
    export_log(store, tmp_path / "out")
    damage(tmp_path / "out")
    with MeasurementStore(":memory:") as copy, pytest.raises(error, match=message):
        import_log(copy, tmp_path / "out")


def test_a_parquet_file_that_is_none_is_named(store: MeasurementStore, tmp_path: Path) -> None:
    export_log(store, tmp_path / "out", format="parquet")
    (tmp_path / "out" / "decisions.parquet").write_bytes(b"PAR1 nonsense PAR1")
    with MeasurementStore(":memory:") as copy, pytest.raises(LogError, match=r"decisions\.parquet is not what an export"):
        import_log(copy, tmp_path / "out")


def test_weights_of_another_log_do_not_come_into_use(tmp_path: Path) -> None:
    with MeasurementStore(tmp_path / "theirs.db") as theirs, MeasurementStore(tmp_path / "ours.db") as ours:
        theirs.set_weights_state(theirs.record_weights(predictor="p", data=b"theirs"), "promoted")
        mine = ours.record_weights(predictor="p", data=b"ours")
        ours.set_weights_state(mine, "promoted")
        export_log(theirs, tmp_path / "out")
        import_log(ours, tmp_path / "out")
        assert ours.promoted_weights("p") == mine
        assert sorted(weights.state for weights in ours.weights()) == ["promoted", "superseded"]
