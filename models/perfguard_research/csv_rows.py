"""CSV files, and the columns of their rows, checked."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from perfguard.exceptions import TableError

Row = Mapping[str, str]


def read_table(path: str | Path) -> tuple[list[str], list[dict[str, str]]]:
    """The columns and the rows of a CSV file, compressed or not.

    Raises:
        TableError: if it cannot be read or is no table.
    """
    path, most_bytes = Path(path), 2**30  # a small compressed file could fill the memory
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            with gzip.open(io.BytesIO(data)) as file:
                data = file.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise TableError(f"{path} is larger than {most_bytes} bytes; it is refused.")
        reader = csv.DictReader(io.StringIO(data.decode("utf-8-sig"), newline=""))
        rows = list(reader)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise TableError(f"{path} cannot be read as a CSV table: {error}") from error
    if not reader.fieldnames:
        raise TableError(f"{path} is empty.")
    twice = {column for column in reader.fieldnames if reader.fieldnames.count(column) > 1}
    if twice:
        raise TableError(f"{path} has the column {', '.join(sorted(twice))} twice.")
    return list(reader.fieldnames), rows


def text(row: Row, column: str) -> str:
    if not row.get(column):
        raise TableError(f"column {column!r} is empty")
    return row[column]


def one_of(row: Row, column: str, allowed: Sequence[str], default: str | None = None) -> Any:
    """One of ``allowed``; ``default`` where the column is empty or missing."""
    value = row.get(column) or default
    if value not in allowed:
        raise TableError(f"column {column!r} must be one of {', '.join(allowed)}, but is {value!r}")
    return value


def is_true(row: Row, column: str) -> bool:
    return (row.get(column) or "").lower() in ("true", "1")


def number(row: Row, column: str, unit: float = 1.0) -> float | None:
    """A positive number in units of ``unit``; None where it was not measured."""
    written = row.get(column)
    if not written:
        return None
    try:
        value = float(written)
    except ValueError:
        raise TableError(f"column {column!r} must be a number, but is {written!r}") from None
    if not 0 < value < float("inf"):
        raise TableError(f"column {column!r} must be positive and finite, but is {written!r}")
    return value * unit


def positive(row: Row, column: str) -> int:
    """A positive integer, which must be there."""
    value = number(row, column)
    if value is None or value != int(value):
        raise TableError(f"column {column!r} must be a positive integer, but is {row.get(column)!r}")
    return int(value)


def whole(row: Row, column: str) -> int:
    """An integer that is not negative; 0 where the column is empty."""
    with suppress(ValueError):
        if float(row.get(column) or 0) == 0:
            return 0
    return positive(row, column)


def share(row: Row, column: str, all_of_it: float = 1.0) -> float | None:
    """A number between 0 and ``all_of_it``, as a share of it; None where it was not measured."""
    with suppress(ValueError):
        if float(row.get(column) or 1) == 0:
            return 0.0
    value = number(row, column, 1 / all_of_it)
    if value is not None and value > 1:
        raise TableError(f"column {column!r} must lie between 0 and {all_of_it:g}, but is {row[column]!r}")
    return value


def json_object(row: Row, column: str) -> Mapping[str, Any]:
    try:
        found = json.loads(row.get(column) or "{}")
    except ValueError as error:
        raise TableError(f"column {column!r} must be a JSON object: {error}") from error
    if not isinstance(found, dict):
        raise TableError(f"column {column!r} must be a JSON object, but is {row[column]!r}")
    return cast("Mapping[str, Any]", found)
