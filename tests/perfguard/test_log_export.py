"""The table of an export, in both formats."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas
import pytest

from perfguard import MeasurementStore
from perfguard.exceptions import LogError
from perfguard.log_export import write_csv, write_parquet
from tests.perfguard.log_rows import record

COLUMNS = ["created_at_ns", "study", "num_steps", "limit"]
ROWS = [(1_764_000_000_123_456_789, 'a, "b"', 2**60 + 1, 0.1), (0, "c", None, 2000.0)]


def test_a_csv_file_has_a_time_in_utc_and_an_empty_field_for_a_missing_value(tmp_path: Path) -> None:
    write_csv(tmp_path / "log.csv", COLUMNS, ROWS)
    assert (tmp_path / "log.csv").read_text(encoding="utf-8") == (
        "created_at,created_at_ns,study,num_steps,limit\n"
        '2025-11-24 16:00:00.123456789+00:00,1764000000123456789,"a, ""b""",1152921504606846977,0.1\n'
        "1970-01-01 00:00:00.000000000+00:00,0,c,,2000.0\n"
    )


def test_a_parquet_file_keeps_the_types_of_its_columns(tmp_path: Path) -> None:
    write_parquet(tmp_path / "log.parquet", COLUMNS, ROWS)
    table = pandas.read_parquet(tmp_path / "log.parquet")
    assert list(table) == ["created_at", *COLUMNS]
    assert table["num_steps"].dtype == "Int64"
    assert table["num_steps"][0] == 2**60 + 1, "no digit is lost"
    assert table["limit"].tolist() == [0.1, 2000.0]
    assert str(table["created_at"].dt.tz) == "UTC"


def test_an_export_without_rows_is_a_table_without_rows(tmp_path: Path) -> None:
    write_parquet(tmp_path / "log.parquet", COLUMNS, [])
    write_csv(tmp_path / "log.csv", COLUMNS, [])
    assert len(pandas.read_parquet(tmp_path / "log.parquet")) == 0
    assert len(pandas.read_csv(tmp_path / "log.csv")) == 0


def test_parquet_without_its_packages_is_an_error_with_the_pip_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MeasurementStore(tmp_path / "log.db") as store:
        record(store)
        monkeypatch.setitem(sys.modules, "pandas", None)
        assert store.export(tmp_path / "log.csv") == 1
        with pytest.raises(LogError, match=r"pip install 'perfguard\[export\]'"):
            store.export(tmp_path / "log.parquet")
