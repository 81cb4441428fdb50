"""When the loop ends by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perfguard import resolve_device
from perfguard.exceptions import ConfigurationError
from perfguard_research.collect import collect
from perfguard_research.collect.worker import Worker
from perfguard_research.csv_rows import read_table
from perfguard_research.tables import MeasuredRow


class _Scripted(Worker):
    """Answers at once, with what the test says."""

    status = "failed"

    def start(self) -> None:
        self.starts = 1

    def run(self, row: Any, **_: Any) -> dict[str, str]:
        return {"status": self.status, "note": "no kernel image is available for execution on the device"}


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[_Scripted]:
    monkeypatch.setattr("perfguard_research.collect.loop.Worker", _Scripted)
    return _Scripted


def test_collect_ends_after_25_failures_in_a_row(scripted: type[_Scripted], tmp_path: Path) -> None:
    """A card on which everything fails is not tried for ever."""
    summary = collect(tmp_path / "rows.csv", device=resolve_device("cpu"), spaces=["ops"])
    assert summary.ended_by == "25 configurations in a row failed"
    assert summary.rows == {("ops", "failed"): 25}
    rows = read_table(tmp_path / "rows.csv")[1]
    assert {row["note"] for row in rows} == {"no kernel image is available for execution on the device"}


def test_time_that_is_over_begins_nothing(scripted: type[_Scripted], tmp_path: Path) -> None:
    summary = collect(tmp_path / "rows.csv", device=resolve_device("cpu"), spaces=["ops"], minutes=1e-9)
    assert (summary.rows.total(), summary.ended_by) == (0, "1e-09 minutes are over")
    assert read_table(tmp_path / "rows.csv")[1] == []


def test_collect_counts_what_cannot_be_planned(
    scripted: type[_Scripted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next configuration is taken."""
    monkeypatch.setattr(scripted, "status", "ok")
    graph, asked = MeasuredRow.graph, list[object]()

    def sometimes(row: MeasuredRow, *arguments: Any) -> Any:
        asked.append(row)
        if len(asked) == 1:
            raise RuntimeError("an operator without a kernel")
        return graph(row, *arguments)

    monkeypatch.setattr(MeasuredRow, "graph", sometimes)
    summary = collect(tmp_path / "rows.csv", device=resolve_device("cpu"), spaces=["ops"], max_rows=2)
    assert summary.left_out == {"RuntimeError: an operator without a kernel": 1}
    assert [row["index"] for row in read_table(tmp_path / "rows.csv")[1]] == ["1", "2"]


@pytest.fixture
def table(scripted: type[_Scripted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two rows of the space "ops"."""
    monkeypatch.setattr(scripted, "status", "ok")
    collect(tmp_path / "rows.csv", device=resolve_device("cpu"), spaces=["ops"], max_rows=2)
    return tmp_path / "rows.csv"


def indices(table: Path) -> list[str]:
    return [row["index"] for row in read_table(table)[1]]


def test_collecting_goes_on_where_it_was(table: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"is there already. Continue it with --resume"):
        collect(table, device=resolve_device("cpu"), spaces=["ops"])
    collect(table, device=resolve_device("cpu"), spaces=["ops"], max_rows=1, resume=True)
    first = [int(index) for index in indices(table)]
    assert first == sorted(set(first))
    collect(table, device=resolve_device("cpu"), spaces=["ops"], max_rows=1, resume=True, memory_limit=2**27)
    assert indices(table)[-1] == indices(table)[0]  # another limit is another order


def test_a_line_that_was_cut_short_is_measured_again(table: Path) -> None:
    """A program that is killed while it writes leaves such a line."""
    before = indices(table)
    table.write_text(table.read_text()[:-40])
    collect(table, device=resolve_device("cpu"), spaces=["ops"], max_rows=1, resume=True)
    assert indices(table) == before


@pytest.mark.parametrize(
    ("name", "message"), [("file/rows.csv", "The rows cannot be written to"), ("rows.csv.gz", "end in .csv")]
)
def test_a_table_that_cannot_be_written_fails_before_anything_is_measured(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=message):
        collect(tmp_path / name, device=resolve_device("cpu"), spaces=["ops"])
