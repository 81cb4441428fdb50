"""Tables of results: printed, and kept as JSON. `python tools/results.py` fills the pages under docs/results from the JSON.

Each benchmark that feeds a page has the option ``--record docs/results/data``. A benchmark may have several tables.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from perfguard import resolve_device

_LOAD_AT_START = os.getloadavg()[0]
_OF_THIS_MACHINE = ("--record", "--cache", "--plot", "--measured", "--postgres")
"""Options whose paths say nothing to a reader."""


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option ``--record``. Its description is the first line of ``doc``."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="keep the tables there as NAME.json: docs/results/data")
    return parser


def show(name: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, record: Path | None) -> None:
    """Print a table. With ``record``, write it to RECORD/NAME.json, with the date, the machine and the command."""
    table = Table(title=name)
    for at, column in enumerate(columns):
        table.add_column(column, justify="right" if at else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    if record is not None:
        record.mkdir(parents=True, exist_ok=True)
        (record / f"{name}.json").write_text(as_json(name, columns, rows, _origin()), encoding="utf-8")


def as_json(name: str, columns: Sequence[str], rows: Sequence[Sequence[str]], origin: dict[str, str]) -> str:
    """Return the document, with one line for each row of the table."""
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in {"name": name, **origin}.items())
    body = ",\n".join(f"  {json.dumps(list(row), ensure_ascii=False)}" for row in rows)
    return f'{{\n{head} "columns": {json.dumps(list(columns), ensure_ascii=False)},\n "rows": [\n{body}\n ]\n}}\n'


def _origin() -> dict[str, str]:
    machine = f"{os.cpu_count()} cores of an {resolve_device('cpu').name}, load {_LOAD_AT_START:.1f} at the start"
    if torch.cuda.is_available():
        machine = f"{torch.cuda.get_device_name()}, {machine}"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return {"date": str(datetime.date.today()), "machine": f"{machine}, {versions}", "command": command_of(sys.argv)}


def command_of(arguments: Sequence[str]) -> str:
    """Return the command line for a reader: without paths of this machine, and with the number of threads if it was set."""
    script, *rest = arguments
    words = [f"benchmarks/{Path(script).name}"]
    for before, word in zip(["", *rest], rest, strict=False):
        if not {before, word} & {*_OF_THIS_MACHINE}:
            words.append("PATH" if Path(word).is_absolute() else word)
    threads = os.environ.get("OMP_NUM_THREADS")
    return " ".join([*([f"OMP_NUM_THREADS={threads}"] if threads else []), "python", shlex.join(words)])
