"""``perfguard evaluate``: a predictor held against a table of measured runs."""

from __future__ import annotations

import argparse
import csv
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfguard.exceptions import ConfigurationError, TableError
from perfguard.predictor import DEFAULT_PREDICTOR, load_predictor

if TYPE_CHECKING:
    from rich.table import Table

    from perfguard.tables import Evaluated

_WIDTH = 160
"""Width of a table that is not printed to a terminal. Its columns need no line breaks."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words that ``perfguard evaluate`` takes."""
    parser.add_argument("table", metavar="TABLE", help="a table of measured runs: CSV, compressed or not")
    parser.add_argument("--predictor", default=DEFAULT_PREDICTOR, help=f"name of the predictor (default: {DEFAULT_PREDICTOR})")
    parser.add_argument("--out", metavar="FILE.csv", help="write the table with the predictions")
    parser.add_argument("--json", metavar="FILE.json", help="write the report as JSON")


def evaluate_table(arguments: argparse.Namespace) -> None:
    """Read, predict, write and print.

    Raises:
        PerfGuardError: for a table or a predictor that cannot be right.
    """
    if not Path(arguments.table).is_file():
        raise TableError(f"{arguments.table} cannot be read as a CSV table: there is no such file.")
    from rich.console import Console
    from rich.progress import Progress

    from perfguard.tables import evaluate, read_table, report

    columns, rows = read_table(arguments.table)
    for path in filter(None, (arguments.out, arguments.json)):
        _write(path, "")  # a wrong path is better known before an hour of work
    predictor = load_predictor(arguments.predictor)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else _WIDTH)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as progress, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other libraries' words on each of a thousand models
        task = progress.add_task("rows", total=len(rows))
        results = evaluate(columns, rows, arguments.table, predictor, on_row=lambda: progress.advance(task))
    groups = report(results)
    if arguments.out:
        _write_predictions(arguments.out, columns, rows, results)
    if arguments.json:
        document = {"predictor": predictor.name, "table": Path(arguments.table).name, "groups": groups}
        _write(arguments.json, json.dumps(document, indent=2) + "\n")
    console.print(_as_table(predictor.name, groups))
    errors = sum(bool(result.error) for result in results)
    if errors:
        first = next(result.error for result in results if result.error)
        console.print(f"{errors} of {len(results)} rows could not be predicted; the first: {first}", markup=False)


def _write_predictions(
    path: str, columns: Sequence[str], rows: Sequence[Mapping[str, str]], results: Sequence[Evaluated]
) -> None:
    from perfguard.tables import predicted_columns

    added = predicted_columns(columns)
    try:
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*(column for column in columns if column not in added), *added], extrasaction="ignore")
            writer.writeheader()
            writer.writerows({**row, **result.columns()} for row, result in zip(rows, results, strict=True))
    except OSError as error:
        raise ConfigurationError(f"The predictions cannot be written to {path!r}: {error}") from error


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"The result cannot be written to {path!r}: {error}") from error


def _as_table(predictor: str, groups: Sequence[Mapping[str, Any]]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"{predictor}: mean / median / 90th percentile of the relative error, coverage of the 90% interval")
    for heading in ("source", "mode", "gpu", "rows", "memory", "time", "GPU utilisation", "OOM caught", "fitting pruned"):
        table.add_column(heading, justify="left" if heading in ("source", "mode", "gpu") else "right")
    for group in groups:
        table.add_row(
            *(escape(group[name]) for name in ("source", "mode", "gpu")),
            str(group["rows"]),
            _score(group["memory"]),
            _score(group["time"]),
            _score(group["gpu_util"]),
            _share(group["oom_caught"]),
            _share(group["fitting_pruned"]),
        )
    return table


def _score(score: Mapping[str, float] | None) -> str:
    if score is None:
        return "-"
    text = f"{score['mean']:.1%} / {score['median']:.1%}"
    return text if "p90" not in score else f"{text} / {score['p90']:.1%}, {score['coverage']:.0%}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
