"""All predictors in one table: accuracy (from their cards), milliseconds for one graph, graphs a second in batches, size.

    python benchmarks/predictors.py

The graph is a training step of ResNet-50 at batch 64, traced before the clock starts. "see" is what turns the graph into the
arrays that the predictor reads, "say" the predictor itself; batches are of 64 such graphs, with as many threads as there are
cores.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from perfguard import TensorSpec, Workload
from perfguard.devices import resolve_device
from perfguard.graph import OpGraph, trace
from perfguard.tables import timm_model
from perfguard_models.trained import read_trained, steps_of
from perfguard_papers.served import FEATURE_SETS
from perfguard_training.registry import NAMES, learner_class

_BATCH = 64
_REPEATS = 15


def median_s(function: Callable[[], Any], repeats: int = _REPEATS) -> float:
    """Median seconds of one call, after one that is not counted."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def workload(batch_size: int) -> OpGraph:
    """The step that is judged."""
    with torch.device("meta"):
        model = timm_model("resnet50")
    return trace(
        Workload(
            model,
            (batch_size, 3, 224, 224),
            TensorSpec((batch_size,), "int64"),
            F.cross_entropy,
            torch.optim.AdamW,
            precision="amp-fp16",
            cudnn_benchmark=True,
        )
    )


def error_of(card: dict[str, Any], quantity: str) -> str:
    """Mean and median error on families that were held out, over all groups of runs, weighted by their rows."""
    lines = [line for line in card["errors"] if line["split"] == "family" and line["quantity"] == quantity]
    rows = sum(line["rows"] for line in lines)
    if not rows:
        return "-"
    mean, median = (sum(line[what] * line["rows"] for line in lines) / rows for what in ("mean", "median"))
    return f"{mean:.1%} / {median:.1%}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", default="rtx3090")
    arguments = parser.parse_args()
    device = resolve_device(arguments.gpu)
    graph = workload(64)
    folders = [files(package) / "weights" for package in ("perfguard_models", "perfguard_papers")]
    cores = os.cpu_count() or 1
    table = Table(
        title=f"A step of {len(graph.ops)} operators; {time.strftime('%Y-%m-%d')}, {cores} cores, {platform.processor()}"
    )
    for heading in ("predictor", "memory", "time", "see ms", "say ms", "graphs/s", "parameters", "MB"):
        table.add_column(heading, justify="left" if heading == "predictor" else "right")
    for name in NAMES:
        folder = next((folder for folder in folders if (folder / f"{name}.json").is_file()), None)
        if folder is None:
            continue  # it ships no weights
        tensors = folder / f"{name}.safetensors"
        learner, card, _ = read_trained(
            tensors, folder / f"{name}.json", name, learner_of=learner_class, feature_sets=FEATURE_SETS
        )
        torch.set_num_threads(1)
        see = median_s(lambda: steps_of(learner, graph.as_batch(), device, FEATURE_SETS))  # noqa: B023
        (run,) = steps_of(learner, graph.as_batch(), device, FEATURE_SETS)
        say = median_s(lambda: learner.predict([run]))  # noqa: B023
        torch.set_num_threads(cores)
        many = [run] * _BATCH
        batch = median_s(lambda: learner.predict(many), 5)  # noqa: B023
        size = sum(tensor.numel() for tensor in learner.state()[0].values())
        table.add_row(
            name,
            error_of(card, "memory"),
            error_of(card, "time"),
            f"{see * 1e3:.1f}",
            f"{say * 1e3:.1f}",
            f"{_BATCH / batch:,.0f}",
            f"{size:,}",
            f"{len(tensors.read_bytes()) / 1e6:.2f}",
        )
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
