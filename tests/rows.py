"""Rows of tables of measured runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from perfguard_models.calibration import Setting
from perfguard_research.dataset import Run
from perfguard_research.networks import Network
from perfguard_research.tables import MeasuredRow

SIZES = {"inputs": 64, "width": 128, "depth": 2, "norm": False, "dropout": False, "activation": "relu", "classes": 10}
MLP = MeasuredRow(
    table="collected", source="collected", family="mlp", network=Network(name="perfguard:mlp", config=SIZES), mode="train",
    gpu="t4", batch_size=8, optimizer="sgd-momentum",
)  # fmt: skip
"""A perceptron as `perfguard collect` draws it."""
RUN_COLUMNS = [
    "source", "model", "config", "family", "mode", "gpu", "num_gpus", "parallel", "precision", "layout", "compiled", "optimizer",
    "checkpointing", "accumulation", "cudnn_benchmark", "zero_grad", "batch_size", "input", "step_time_ms", "peak_memory_mib",
    "memory_kind", "status", "framework", "includes", "note",
]  # fmt: skip
"""Of a table of runs."""


def mlp(**sizes: object) -> MeasuredRow:
    """MLP with other sizes."""
    return replace(MLP, network=Network(name="perfguard:mlp", config=SIZES | sizes))


def step_on(gpu: str = "t4", mode: str = "train", *, is_single: bool = False) -> Setting:
    """A step in float32, without convolutions and recurrent layers."""
    return Setting(gpu, mode, "fp32", "fp32", "nchw", False, False, False, is_single)


def run_on(setting: Setting, **fields: Any) -> Run:
    """A run in ``setting``, which fitted and has no readings; ``fields`` are what else it has."""
    usual: dict[str, Any] = {
        "table": "run", "source": "", "family": "f", "model": "m", "structure": "s", "batch_size": 8, "labels": {},
        "capacity_bytes": 10**10, "fits": True, "view": {},
    }  # fmt: skip
    return Run(setting=setting, **usual | fields)


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """The table of ``rows``, compressed if ``path`` says so."""
    pd.DataFrame(rows).to_csv(path, index=False)
    return path
