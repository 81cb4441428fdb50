"""The table of multilayer perceptrons: one row a measured training run (docs/tables.md)."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import nn

from perfguard.exceptions import TableError
from perfguard.workload import Precision, TensorSpec, Workload
from perfguard_research.tables.csv import Row, one_of, positive, scaled, share, text
from perfguard_research.tables.rows import MIB, MeasuredRow

COLUMNS = ("gpu", "batch_size", "input_size", "output_size", "layers")
"""Required columns of a table of perceptrons."""
_LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "batch_normalization": nn.BatchNorm1d,
    "dropout": lambda _: nn.Dropout(),
    "Softmax": lambda _: nn.Softmax(dim=1),
    **{
        name: functools.partial(lambda cls, _: cls(), getattr(nn, name))
        for name in (
            "ReLU",
            "Softplus",
            "PReLU",
            "SiLU",
            "Mish",
            "Identity",
            "SELU",
            "Tanh",
            "ELU",
            "LeakyReLU",
            "GELU",
            "Sigmoid",
        )
    },
}
_OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpRow(MeasuredRow):
    """One measured training run of a perceptron."""

    precision: Precision
    optimizer: str
    input_size: int
    output_size: int
    layers: tuple[tuple[str, int], ...]
    """Kind and number of features of each layer."""

    @property
    def structure(self) -> tuple[Any, ...]:
        """Key of the row without the batch and the GPU."""
        return self.precision, self.optimizer, self.input_size, self.layers

    def make_model(self) -> nn.Module:
        """The layers in their order."""
        modules: list[nn.Module] = []
        width = self.input_size
        for kind, features in self.layers:
            modules.append(nn.Linear(width, features) if kind == "linear" else _LAYERS[kind](features))
            width = features
        return nn.Sequential(*modules)

    def workload(self, model: nn.Module) -> Workload:
        """A training step with cross-entropy."""
        return Workload(
            model,
            inputs=(self.batch_size, self.input_size),
            targets=TensorSpec((self.batch_size,), "int64"),
            loss=F.cross_entropy,
            optimizer=_OPTIMIZERS[self.optimizer],
            precision=self.precision,
            cudnn_benchmark=True,
            retain="nothing",
            batch_on="device",
        )


def mlp_row(row: Row) -> MlpRow:
    """One row of a table of perceptrons, checked.

    Raises:
        TableError: naming the column that cannot be right.
    """
    layers = _layers(text(row, "layers"))
    return MlpRow(
        source=row.get("source") or "",
        model=f"mlp-{sum(kind == 'linear' for kind, _ in layers)}",
        family=row.get("activation") or "mlp",
        mode="train",
        gpu=text(row, "gpu"),
        precision=one_of(row, "precision", get_args(Precision), "fp32"),
        optimizer=one_of(row, "optimizer", tuple(_OPTIMIZERS), "adam"),
        batch_size=positive(row, "batch_size"),
        input_size=positive(row, "input_size"),
        output_size=positive(row, "output_size"),
        layers=layers,
        step_time_s=scaled(row, "step_time_ms", 1e-3),
        peak_memory_bytes=scaled(row, "peak_memory_mib", MIB),
        gpu_util=share(row, "gpu_util", 100),
        sm_active=share(row, "sm_active"),
        status=(row.get("status") or "ok").lower(),
    )


def _layers(written: str) -> tuple[tuple[str, int], ...]:
    try:
        layers = tuple((str(kind), int(features)) for kind, features, *_ in json.loads(written))
    except (ValueError, TypeError) as error:
        raise TableError(f"column 'layers' must be a JSON list of [kind, features, parameters]: {error}") from error
    unknown = sorted({kind for kind, _ in layers} - {"linear", *_LAYERS})
    if unknown or not layers:
        raise TableError(f"column 'layers' holds {', '.join(unknown) or 'nothing'}; known are linear, {', '.join(_LAYERS)}")
    return layers
