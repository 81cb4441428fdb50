"""When the loop ends by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perfguard import resolve_device
from perfguard_research.collect import Recipe, collect
from perfguard_research.collect.worker import Worker
from perfguard_research.tables import read_table


class _Scripted(Worker):
    """Answers at once, with what the test says."""

    status = "failed"

    def start(self) -> None:
        self.starts = 1

    def run(self, recipe: Recipe, **_: Any) -> dict[str, str]:
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
    assert (summary.num_rows, summary.ended_by) == (0, "1e-09 minutes are over")
    assert read_table(tmp_path / "rows.csv")[1] == []


def test_collect_counts_what_cannot_be_planned(
    scripted: type[_Scripted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next configuration is taken."""
    monkeypatch.setattr(scripted, "status", "ok")
    trace = __import__("perfguard_research.collect.plan", fromlist=["trace"]).trace
    asked: list[object] = []

    def sometimes(workload: Any, **options: Any) -> Any:
        asked.append(workload)
        if len(asked) == 1:
            raise RuntimeError("an operator without a kernel")
        return trace(workload, **options)

    monkeypatch.setattr("perfguard_research.collect.plan.trace", sometimes)
    summary = collect(tmp_path / "rows.csv", device=resolve_device("cpu"), spaces=["ops"], max_rows=2)
    assert summary.left_out == {"RuntimeError: an operator without a kernel": 1}
    assert [row["index"] for row in read_table(tmp_path / "rows.csv")[1]] == ["1", "2"]
