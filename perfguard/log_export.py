"""Writes the rows of the measurement log as one table: CSV without any other package, Parquet with pandas and pyarrow."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

_CREATED_AT_NS = "created_at_ns"
_NS = 10**9


def write_csv(path: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Write ``rows`` to ``path``, with a first column "created_at" in UTC. A missing value is an empty field.

    Args:
        path: the file; an earlier one is replaced.
        columns: their names, "created_at_ns" among them.
        rows: None, int, float or str for each column.
    """
    at = list(columns).index(_CREATED_AT_NS)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["created_at", *columns])
        writer.writerows([_utc(row[at]), *row] for row in rows)


def write_parquet(path: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Write what :func:`write_csv` writes, as a Parquet file whose columns keep their types.

    Raises:
        ImportError: without pandas or pyarrow.
    """
    import pandas

    values = {name: [row[index] for row in rows] for index, name in enumerate(columns)}
    table = pandas.DataFrame({name: pandas.Series(column, dtype=_kind_of(column)) for name, column in values.items()})
    table.insert(0, "created_at", pandas.to_datetime(table[_CREATED_AT_NS], unit="ns", utc=True))
    table.to_parquet(path, index=False)


def _kind_of(column: Sequence[object]) -> str:
    """The type of a column in pandas. A count of bytes stays an integer, also where some are missing."""
    kinds = {type(value) for value in column if value is not None}
    if kinds == {int}:
        return "Int64"
    return "Float64" if kinds and kinds <= {int, float} else "object"


def _utc(created_at_ns: int) -> str:
    """The time as "2026-11-29 05:00:00.123456789+00:00"."""
    seconds, nanoseconds = divmod(created_at_ns, _NS)
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M:%S}.{nanoseconds:09d}+00:00"
