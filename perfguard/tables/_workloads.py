"""The workload table: one row a measured run of a timm model (docs/tables.md)."""

from __future__ import annotations

import csv
import functools
import gzip
import io
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import nn

from perfguard.exceptions import TableError
from perfguard.tables._zoo import timm_model
from perfguard.workload import Layout, Mode, Precision, TensorSpec, Workload

COLUMNS = ("model", "mode", "gpu", "batch_size", "img_size")
"""What a workload table must have."""
_MIB = 2**20
_OPTIMIZERS: dict[str, Any] = {
    "sgd-momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
}
_MAX_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class WorkloadRow:
    """One measured run. None: not measured."""

    source: str
    model: str
    family: str
    mode: Mode
    gpu: str
    precision: Precision
    layout: Layout
    compiled: bool
    optimizer: str
    batch_size: int
    img_size: int
    step_time_s: float | None
    peak_memory_bytes: float | None
    status: str

    @property
    def structure(self) -> tuple[Any, ...]:
        """What rows share that differ in nothing but the batch and the GPU."""
        return self.model, self.img_size, self.mode, self.precision, self.layout, self.optimizer, self.compiled


def read_table(path: str | Path) -> tuple[list[str], list[dict[str, str]]]:
    """The columns and the rows of a CSV file, compressed or not.

    Raises:
        TableError: if it cannot be read or is no table.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            with gzip.open(io.BytesIO(data)) as file:
                data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise TableError(f"{path} is larger than {_MAX_BYTES} bytes; it is refused.")
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


def workload_row(row: Mapping[str, str]) -> WorkloadRow:
    """One row of a workload table, checked.

    Raises:
        TableError: naming the column that cannot be right.
    """
    return WorkloadRow(
        source=row.get("source") or "",
        model=_text(row, "model"),
        family=row.get("family") or row["model"].partition("_")[0],
        mode=_one_of(row, "mode", get_args(Mode)),
        gpu=_text(row, "gpu"),
        precision=_one_of(row, "precision", get_args(Precision), "fp32"),
        layout=_one_of(row, "layout", get_args(Layout), "nchw"),
        compiled=(row.get("compiled") or "").lower() in ("true", "1"),
        optimizer=_one_of(row, "optimizer", tuple(_OPTIMIZERS), "sgd-momentum"),
        batch_size=_positive(row, "batch_size"),
        img_size=_positive(row, "img_size"),
        step_time_s=None if (value := _number(row, "step_time_ms")) is None else value / 1e3,
        peak_memory_bytes=None if (value := _number(row, "peak_memory_mib")) is None else value * _MIB,
        status=(row.get("status") or "ok").lower(),
    )


def workload_of(row: WorkloadRow, model: nn.Module | None = None) -> Workload:
    """What the row ran: forward, cross-entropy, backward and the optimizer's step, or forward alone.

    Args:
        row: the run.
        model: its network on the meta device, if it is at hand.

    Raises:
        TableError: if timm cannot make the model.
    """
    if model is None:
        with torch.device("meta"):
            model = timm_model(row.model, row.img_size)
    train = row.mode == "train"
    return Workload(
        model,
        inputs=(row.batch_size, 3, row.img_size, row.img_size),
        targets=TensorSpec((row.batch_size,), "int64") if train else None,
        loss=_cross_entropy if train else None,
        optimizer=_OPTIMIZERS[row.optimizer] if train else None,
        mode=row.mode,
        precision=row.precision,
        layout=row.layout,
        cudnn_benchmark=True,
        compiled=row.compiled,
    )


def _cross_entropy(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Of the first output, where a network gives several (distillation, auxiliary heads)."""
    while not isinstance(output, torch.Tensor):
        output = next(iter(output.values())) if isinstance(output, Mapping) else output[0]
    return F.cross_entropy(output.flatten(1), target)


def _text(row: Mapping[str, str], column: str) -> str:
    if not row.get(column):
        raise TableError(f"column {column!r} is empty")
    return row[column]


def _one_of(row: Mapping[str, str], column: str, allowed: tuple[str, ...], default: str | None = None) -> Any:
    value = row.get(column) or default
    if value not in allowed:
        raise TableError(f"column {column!r} must be one of {', '.join(allowed)}, but is {value!r}")
    return value


def _number(row: Mapping[str, str], column: str) -> float | None:
    text = row.get(column)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise TableError(f"column {column!r} must be a number, but is {text!r}") from None
    if not 0 < value < float("inf"):
        raise TableError(f"column {column!r} must be positive and finite, but is {text!r}")
    return value


def _positive(row: Mapping[str, str], column: str) -> int:
    value = _number(row, column)
    if value is None or value != int(value):
        raise TableError(f"column {column!r} must be a positive integer, but is {row.get(column)!r}")
    return int(value)
