"""Fusion: what compiling saves on this CPU, predicted and measured.

    OMP_NUM_THREADS=1 python benchmarks/fusion.py
    python benchmarks/fusion.py --models resnet18,mlp

Each network runs eagerly and under torch.compile, on one thread, in turns. The processor time of one inference is measured, so
that a busy machine hardly matters. Predicted is GuardNet's time for the CPU of the same two, and the plain roofline of both
graphs. Compiling takes a C++ compiler and some minutes.

With labels (`python -m perfguard_research.fusion.labels`), the table shows how many edges are judged as the compiler did, by the
rule that is served and by LILOU's network. An edge is fused if its ends are in one kernel. The network has learnt from networks
like these.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from _record import parser_of, show
from torch import nn

from perfguard import Workload, trace
from perfguard.devices import resolve_device
from perfguard.graph import roofline_s
from perfguard.predictor import load_predictor
from perfguard_models.compiled import as_compiled
from perfguard_models.compiled import kernels_of as by_the_rule
from perfguard_research.fusion.labels import LabelledGraph, read_labels
from perfguard_research.fusion.network import kernels_of
from perfguard_research.fusion.network import shipped as lilou
from perfguard_research.fusion.train import score_of

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
    found = as_compiled(known_compiled)
    assert found is not None
    eager_s, compiled_s = (predictor.predict(seen, device).step_time.median for seen in (graph, known_compiled))
    traffic = [sum(op.bytes_read + op.bytes_written for op in seen.ops) for seen in (graph, found.graph)]
    alone_s = roofline_s(graph, device)
    return {
        "network": name,
        "operators": len(graph.ops),
        "kernels": len(set(found.kernel.tolist())),
        "traffic": traffic[1] / traffic[0],
        "eager_ms": 1e3 * seconds["eager"],
        "compiled_ms": 1e3 * seconds["compiled"],
        "ratio": seconds["compiled"] / seconds["eager"],
        "predicted_ratio": compiled_s / eager_s,
        "roofline_ratio": float((found.time_shares(device) * alone_s).sum() / alone_s.sum()),
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


COLUMNS = ("network", "operators", "kernels", "bytes kept", "eager, ms", "compiled, ms", "measured ratio", "predicted",
           "by the roofline alone")  # fmt: skip
ESTIMATES = {"predicted": "predicted_ratio", "by the roofline alone": "roofline_ratio", "taken as eager (ratio 1)": None}


def row_of(one: Mapping[str, Any]) -> list[str]:
    """Return the line of one network."""
    sizes = str(one["operators"]), str(one["kernels"]), f"{one['traffic']:.0%}"
    times = (f"{one[name]:.2f}" for name in ("eager_ms", "compiled_ms", "ratio", "predicted_ratio", "roofline_ratio"))
    return [one["network"], *sizes, *times]


def errors_of(found: Sequence[Mapping[str, Any]], name: str | None) -> list[str]:
    """Return mean and median error of the ratio; without a name, of a ratio of one."""
    errors = [abs((one[name] if name else 1.0) / one["ratio"] - 1) for one in found]
    return [f"{statistics.fmean(errors):.1%}", f"{statistics.median(errors):.1%}"]


def agreement(paths: Sequence[Path]) -> list[list[str]]:
    """Precision, recall and accuracy of the kernels of each method, and their number over the compiler's."""
    rows, network = [row for path in paths for row in read_labels(path)], lilou()
    methods: dict[str, Callable[[LabelledGraph], npt.NDArray[np.int64]]] = {
        "the rule": lambda row: by_the_rule(row.graph),
        "GAT-LSTM": lambda row: numbered(network.kernels(row.graph, row.compiler), len(row.graph.ops)),
    }
    lines = []
    for compiler in dict.fromkeys(row.compiler for row in rows):
        own = [row for row in rows if row.compiler == compiler]
        labels = [row.edge_labels() for row in own]
        real = [len(kernels_of(row.graph, np.flatnonzero(label == 1))) for row, label in zip(own, labels, strict=True)]
        for name, method in methods.items():
            found = [method(row) for row in own]
            ends = (kernel[row.graph.edges] for row, kernel in zip(own, found, strict=True))
            score = score_of(np.concatenate([first == second for first, second in ends]), np.concatenate(labels))
            ratio = statistics.median(len(set(kernel.tolist())) / number for kernel, number in zip(found, real, strict=True))
            shares = (f"{share:.1%}" for share in (score["precision"], score["recall"], score["accuracy"]))
            lines.append([name, compiler, str(len(own)), *shares, f"{ratio:.2f}"])
    return lines


def numbered(kernels: Sequence[Sequence[int]], number: int) -> npt.NDArray[np.int64]:
    """The kernel of each of ``number`` operators."""
    kernel = np.zeros(number, dtype=np.int64)
    for at, operators in enumerate(kernels):
        kernel[operators] = at
    return kernel


def main() -> None:
    """Measure the networks and show the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--models", default=",".join(NETWORKS))
    parser.add_argument("--labels", nargs="+", type=Path)
    arguments = parser.parse_args()
    if arguments.labels:
        columns = ["method", "compiler", "graphs", "precision", "recall", "accuracy", "kernels, of the compiler's"]
        show("fusion-rule", columns, agreement(arguments.labels), record=arguments.record)
        return
    torch.set_num_threads(1)
    found = []
    for name in arguments.models.split(","):
        found.append(measured(name))
        print(f"{name}: {found[-1]['ratio']:.2f}, compiled in {found[-1]['compile_s']:.0f} s", file=sys.stderr)
    show("compiled", COLUMNS, [row_of(one) for one in found], record=arguments.record)
    rows = [[label, *errors_of(found, name)] for label, name in ESTIMATES.items()]
    show("compiled-errors", ["error of the ratio", "mean", "median"], rows, record=arguments.record)


if __name__ == "__main__":
    main()
