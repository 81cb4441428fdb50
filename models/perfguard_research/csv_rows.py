"""CSV files, and the columns of their rows, checked."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pandas as pd

from perfguard.exceptions import TableError

Row = Mapping[str, str]


def read_table(path: str | Path) -> tuple[list[str], list[dict[str, str]]]:
    """The columns and the rows of a CSV file, compressed or not.

    Raises:
        TableError: if it cannot be read or is no table.
    """
    try:
        table = pd.read_csv(path, dtype=str, na_filter=False, encoding="utf-8-sig")
    except (OSError, EOFError, zlib.error, ValueError) as error:  # what pandas raises itself are ValueErrors
        raise TableError(f"{path} cannot be read as a CSV table: {error}") from error
    return list(table.columns), table.to_dict("records")


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


def number(row: Row, column: str, unit: float = 1.0, *, or_zero: bool = False) -> float | None:
    """A positive number in units of ``unit``, ``or_zero``; None where it was not measured."""
    written = row.get(column)
    if not written:
        return None
    try:
        value = float(written)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf or (or_zero and value == 0)):
        raise TableError(f"column {column!r} must be positive and finite, but is {written!r}")
    return value * unit


def positive(row: Row, column: str, *, or_zero: bool = False) -> int:
    """A positive integer, which must be there; ``or_zero``, also where the column is empty."""
    value = number(row, column, or_zero=or_zero)
    if value is None and or_zero:
        return 0
    if value is None or value != int(value):
        raise TableError(f"column {column!r} must be a positive integer, but is {row.get(column)!r}")
    return int(value)


def share(row: Row, column: str, all_of_it: float = 1.0) -> float | None:
    """A number between 0 and ``all_of_it``, as a share of it; None where it was not measured."""
    value = number(row, column, 1 / all_of_it, or_zero=True)
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
