"""The table that collecting writes: its columns, and a file that survives whatever ends the program."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from perfguard.devices import Device, catalog
from perfguard.exceptions import ConfigurationError
from perfguard_research.collect.plan import Plan
from perfguard_research.tables import read_table

COLUMNS = (
    # The workload table's own.
    "source", "model", "family", "mode", "gpu", "precision", "layout", "compiled", "optimizer", "batch_size", "img_size",
    "seq_len", "framework", "peak_memory_mib", "step_time_ms", "status",
    # What was chosen beside it.
    "space", "tf32", "cudnn_benchmark", "checkpointing", "memory_share", "memory_limit_mib",
    # What was measured beside it.
    "allocated_peak_mib", "reserved_peak_mib", "step_time_iqr_ms", "num_steps", "run_s", "gpu_util", "step_energy_j",
    "sm_clock_mhz", "throttled", "oom_retries",
    # How far to trust it.
    "method", "confidence", "trouble", "note", "rows_in_process",
    # Where and as what.
    "gpu_name", "device", "driver", "versions", "order", "index", "recipe",
)  # fmt: skip
"""docs/collect.md has the meaning of each."""


def columns_of(plan: Plan) -> dict[str, str]:
    """The configuration columns of a row."""
    recipe = plan.recipe
    assert recipe is not None
    return {
        "source": "collected",
        "model": recipe.model,
        "family": recipe.family,
        "mode": recipe.mode,
        "precision": recipe.precision,
        "layout": recipe.layout,
        "compiled": str(recipe.compiled),
        "optimizer": recipe.optimizer or "",
        "batch_size": str(recipe.batch_size),
        "img_size": str(recipe.sizes.get("img_size", "")),
        "seq_len": str(recipe.sizes.get("seq_len", "")),
        "space": recipe.space,
        "tf32": recipe.tf32,
        "cudnn_benchmark": str(recipe.cudnn_benchmark),
        "checkpointing": str(recipe.checkpointing),
        "memory_share": f"{plan.draft.memory_share:.4f}",
        "index": str(plan.draft.number),
        "recipe": recipe.to_json(),
    }


def figures_of(device: Device) -> str:
    """The figures of a device that the catalog does not have, as JSON; empty for a card of the catalog."""
    return "" if device.id in catalog() else json.dumps(dataclasses.asdict(device), separators=(",", ":"))


class Journal:
    """Rows, safe as soon as they are written: plain text beside the table, one line each, until :meth:`finish` compresses it.

    Args:
        path: of the table, ``.csv`` or ``.csv.gz``.
        resume: keep the rows of an earlier session; otherwise there must be none.

    Raises:
        ConfigurationError: if the table is there and ``resume`` is False, or it cannot be written.
        TableError: if what is there is no table.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self._path = path
        self._partial = path.with_name(f"{path.name}.partial")
        there = [file for file in (path, self._partial) if file.exists()]
        if there and not resume:
            raise ConfigurationError(f"{there[0]} is there already. Continue it with --resume, or give --out another name.")
        # A session that was killed leaves the rows before it in both files.
        rows = {(row["order"], row["index"]): row for file in there for row in _complete_rows(file)}
        self.earlier = list(rows.values())
        with _as_our_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(self._partial, _text(self.earlier).encode())
            self._file = self._partial.open("a", newline="", encoding="utf-8")

    def write(self, row: Mapping[str, str]) -> None:
        """Add ``row``; it is on disk when this returns, as far as the kernel is concerned."""
        with _as_our_errors(self._path):
            csv.DictWriter(self._file, COLUMNS, restval="").writerow(row)
            self._file.flush()

    def close(self) -> None:
        """Leave the rows where they are, as a program does that is killed."""
        self._file.close()

    def finish(self) -> None:
        """Put the table in its place, compressed if its name ends in ``.gz``."""
        with _as_our_errors(self._path):
            self._file.close()
            data = self._partial.read_bytes()
            _replace(self._path, gzip.compress(data, mtime=0) if self._path.suffix == ".gz" else data)
            self._partial.unlink()


def _complete_rows(path: Path) -> Iterator[dict[str, str]]:
    """The last line may have been cut short; a row is whole when its last column is there."""
    rows = read_table(path)[1] if path.stat().st_size else []
    yield from (
        {column: row.get(column) or "" for column in COLUMNS} for row in rows if (row.get(COLUMNS[-1]) or "").endswith("}")
    )


def _text(rows: Sequence[Mapping[str, str]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    temporary.replace(path)


@contextmanager
def _as_our_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"The rows cannot be written to {path}: {error}") from error
