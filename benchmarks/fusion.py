"""Fusion: what compiling saves on this CPU, predicted and measured; and the tables of the fusion and kernel weights.

    python benchmarks/fusion.py
    python benchmarks/fusion.py --json fusion.json --models resnet18,mlp

Each network runs eagerly and under torch.compile, on one thread, in turns; the processor time of one inference is measured, so
that a busy machine hardly matters. Predicted is GuardNet's time for the CPU of the same two, and the plain roofline of both
graphs. Above, the tables that are in the cards of the shipped weights: unseen families of models for fusion, unseen shapes and
cards for kernels. Compiling takes a C++ compiler and some minutes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from perfguard import Workload, trace
from perfguard.devices import resolve_device
from perfguard.graph import roofline_s
from perfguard.predictor import load_predictor
from perfguard_models.fusion import as_compiled
from perfguard_papers import kernels
from perfguard_training import train_fusion

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from nas_space import network, random_cell

ROUNDS = 15
IMAGES = (4, 3, 96, 96)


def _timm(name: str, **settings: Any) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, **settings)
    return model


class Attention(nn.Module):
    """Two encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(192, 3, 768, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out


def _mlp() -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.GELU())

    return nn.Sequential(block(), block(), block(), nn.Linear(256, 10))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (_mlp, (512, 256)),
    "encoder": (Attention, (8, 64, 192)),
    "nas cell": (lambda: network(random_cell(random.Random(1)), depth=2), (32, 3, 32, 32)),
    "resnet18": (lambda: _timm("resnet18"), IMAGES),
    "mobilenetv3_small_100": (lambda: _timm("mobilenetv3_small_100"), IMAGES),
    "ghostnet_100": (lambda: _timm("ghostnet_100"), IMAGES),
    "convnext_atto": (lambda: _timm("convnext_atto"), IMAGES),
    "efficientnet_b0": (lambda: _timm("efficientnet_b0"), IMAGES),
    "vit_tiny_patch16_224": (lambda: _timm("vit_tiny_patch16_224", img_size=96), IMAGES),
    "hgnetv2_b0": (lambda: _timm("hgnetv2_b0"), IMAGES),
}


def measured(name: str) -> dict[str, Any]:
    """Seconds of one inference, eager and compiled, beside what is predicted."""
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    model = make().eval()
    x = torch.randn(shape)
    compiled = torch.compile(model)
    started = time.perf_counter()
    with torch.no_grad():
        difference = (model(x) - compiled(x)).abs().max()
        compile_s = time.perf_counter() - started
        seconds = _in_turns({"eager": lambda: model(x), "compiled": lambda: compiled(x)})
    workload = Workload(model, shape, mode="infer")
    graph = trace(workload, target="cpu")
    known_compiled = trace(replace(workload, compiled=True), target="cpu")
    device, predictor = resolve_device("cpu"), load_predictor()
    kernels_of = as_compiled(known_compiled, device)
    assert kernels_of is not None
    fused = kernels_of.graph
    eager_s, compiled_s = (predictor.predict(seen, device).step_time.median for seen in (graph, known_compiled))
    traffic = [sum(op.bytes_read + op.bytes_written for op in seen.ops) for seen in (graph, fused)]
    return {
        "network": name,
        "operators": len(graph.ops),
        "kernels": len(fused.ops),
        "traffic": traffic[1] / traffic[0],
        "eager_ms": 1e3 * seconds["eager"],
        "compiled_ms": 1e3 * seconds["compiled"],
        "ratio": seconds["compiled"] / seconds["eager"],
        "predicted_ratio": compiled_s / eager_s,
        "roofline_ratio": float(roofline_s(fused, device).sum() / roofline_s(graph, device).sum()),
        "compile_s": compile_s,
        "difference": float(difference),
    }


def _in_turns(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median processor seconds of each call."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            call()
            started = time.process_time()
            call()
            found[name].append(time.process_time() - started)
    return {name: statistics.median(values) for name, values in found.items()}


def print_cards() -> None:
    """The tables of the shipped weights."""
    of_fusion, of_kernels = (files(package) / "weights" for package in ("perfguard_models", "perfguard_papers"))
    train_fusion.print_scores(json.loads((of_fusion / "fusion.json").read_text(encoding="utf-8"))["scores"])
    card = json.loads((of_kernels / "kernels.json").read_text(encoding="utf-8"))
    kernels.print_scores(card["scores"], card["guardnet"])


def print_measured(rows: list[dict[str, Any]]) -> None:
    """Eager against compiled."""
    console = Console(width=150)
    columns = (
        "operators",
        "kernels",
        "bytes kept",
        "eager, ms",
        "compiled, ms",
        "measured ratio",
        "predicted ratio",
        "roofline's",
    )
    table = Table("network", *columns, title=f"one thread, {platform.processor() or platform.machine()}, {datetime.date.today()}")
    for row in rows:
        table.add_row(
            row["network"],
            str(row["operators"]),
            str(row["kernels"]),
            f"{100 * row['traffic']:.0f}%",
            f"{row['eager_ms']:.2f}",
            f"{row['compiled_ms']:.2f}",
            *(f"{row[name]:.2f}" for name in ("ratio", "predicted_ratio", "roofline_ratio")),
        )
    console.print(table)
    for name, label in (("predicted_ratio", "predicted"), ("roofline_ratio", "roofline"), (None, "no fusion (ratio 1)")):
        errors = [abs((row[name] if name else 1.0) / row["ratio"] - 1) for row in rows]
        console.print(f"{label}: mean error {100 * statistics.fmean(errors):.1f}%, median {100 * statistics.median(errors):.1f}%")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default=",".join(NETWORKS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print_cards()
    rows = []
    for name in arguments.models.split(","):
        rows.append(measured(name))
        print(f"{name}: {rows[-1]['ratio']:.2f}, compiled in {rows[-1]['compile_s']:.0f} s", file=sys.stderr)
    print_measured(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
