"""The workload table: one row a measured run of a timm model (docs/tables.md)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import nn

from perfguard.workload import Layout, Mode, Precision, TensorSpec, Workload
from perfguard_research.tables.csv import Row, is_true, one_of, positive, scaled, text
from perfguard_research.tables.rows import MIB, MeasuredRow
from perfguard_research.tables.zoo import timm_model

COLUMNS = ("model", "mode", "gpu", "batch_size", "img_size")
"""Required columns of a workload table."""
OPTIMIZERS: dict[str, Any] = {
    "sgd-momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRow(MeasuredRow):
    """One measured run of a timm model."""

    precision: Precision
    layout: Layout
    compiled: bool
    before_torch2: bool
    """Attention was not fused then, and optimizers went from parameter to parameter."""
    optimizer: str
    img_size: int

    @property
    def structure(self) -> tuple[Any, ...]:
        """Key of the row without the batch and the GPU."""
        return (
            self.model, self.img_size, self.mode, self.precision, self.layout, self.optimizer, self.compiled, self.before_torch2,
        )  # fmt: skip

    def make_model(self) -> nn.Module:
        """timm's network."""
        return timm_model(self.model, self.img_size, fused_attention=not self.before_torch2)

    def workload(self, model: nn.Module) -> Workload:
        """Forward, cross-entropy, backward and the optimizer's step, or forward alone."""
        train = self.mode == "train"
        optimizer = functools.partial(OPTIMIZERS[self.optimizer], foreach=not self.before_torch2)
        return Workload(
            model,
            inputs=(self.batch_size, 3, self.img_size, self.img_size),
            targets=TensorSpec((self.batch_size,), "int64") if train else None,
            loss=_cross_entropy if train else None,
            optimizer=optimizer if train else None,
            mode=self.mode,
            precision=self.precision,
            layout=self.layout,
            cudnn_benchmark=True,
            retain="nothing",
            batch_on="device",
            compiled=self.compiled,
        )


def workload_row(row: Row) -> WorkloadRow:
    """One row of a workload table, checked.

    Raises:
        TableError: naming the column that cannot be right.
    """
    return WorkloadRow(
        source=row.get("source") or "",
        model=text(row, "model"),
        family=row.get("family") or row["model"].partition("_")[0],
        mode=one_of(row, "mode", get_args(Mode)),
        gpu=text(row, "gpu"),
        precision=one_of(row, "precision", get_args(Precision), "fp32"),
        layout=one_of(row, "layout", get_args(Layout), "nchw"),
        compiled=is_true(row, "compiled"),
        framework=row.get("framework") or "",
        before_torch2=(row.get("framework") or "").startswith(("torch0.", "torch1.")),
        optimizer=one_of(row, "optimizer", tuple(OPTIMIZERS), "sgd-momentum"),
        batch_size=positive(row, "batch_size"),
        img_size=positive(row, "img_size"),
        step_time_s=scaled(row, "step_time_ms", 1e-3),
        peak_memory_bytes=scaled(row, "peak_memory_mib", MIB),
        status=(row.get("status") or "ok").lower(),
    )


def _cross_entropy(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the first output, if a network has several (distillation, auxiliary heads)."""
    while not isinstance(output, torch.Tensor):
        output = next(iter(output.values())) if isinstance(output, Mapping) else output[0]
    return F.cross_entropy(output.flatten(1), target)
