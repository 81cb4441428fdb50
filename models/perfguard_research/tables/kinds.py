"""Detects the kind of a table by its columns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from perfguard.exceptions import TableError
from perfguard_research.tables import collected as _collected
from perfguard_research.tables import mlps as _mlps
from perfguard_research.tables import operators as _operators
from perfguard_research.tables import runs as _runs
from perfguard_research.tables import transformers as _transformers
from perfguard_research.tables import workloads as _workloads
from perfguard_research.tables.csv import Row
from perfguard_research.tables.rows import MeasuredRow

Parser = Callable[[Row], MeasuredRow]
_NEEDED = {
    "collected": _collected.COLUMNS,
    "run": _runs.COLUMNS,
    "workload": _workloads.COLUMNS,
    "operator": _operators.COLUMNS,
    "transformer": _transformers.COLUMNS,
    "perceptron": _mlps.COLUMNS,
}


def kind_of_table(columns: Sequence[str]) -> str:
    """ "collected", "run", "workload", "operator", "transformer" or "perceptron".

    Raises:
        TableError: if it is none of them, with what the nearest one lacks.
    """
    lacking = {kind: [column for column in needed if column not in columns] for kind, needed in _NEEDED.items()}
    for kind, missing in lacking.items():
        if not missing:
            return kind
    nearest = min(lacking, key=lambda kind: len(lacking[kind]) / len(_NEEDED[kind]))
    raise TableError(
        f"PerfGuard does not know this kind of table. For {'an' if nearest == 'operator' else 'a'} {nearest} table it lacks the "
        f"columns {', '.join(lacking[nearest])}. It has {', '.join(columns)}."
    )


def parser_of(columns: Sequence[str], path: str | Path) -> Parser:
    """Parser of a row of the table at ``path``. It raises TableError for an invalid row.

    Raises:
        TableError: if the table is of no known kind.
    """
    kind = kind_of_table(columns)
    if kind == "transformer":
        configurations = _transformers.read_configurations(Path(path))
        return functools.partial(_transformers.transformer_row, configurations=configurations)
    parsers: dict[str, Parser] = {
        "collected": _collected.collected_row,
        "run": _runs.run_row,
        "workload": _workloads.workload_row,
        "operator": _operators.operator_row,
        "perceptron": _mlps.mlp_row,
    }
    return parsers[kind]
