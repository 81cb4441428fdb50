"""LILOU's other heads: which kernel a device runs, and how long the kernel takes.

    python -m perfguard_research.fusion.kernels OPERATORS.csv.gz --out models/perfguard_research/weights

The network is from the paper's section 3.2.2. The operators of a kernel are an undirected graph. Each has its features and those
of the device. The network has three blocks of GAT, GraphSizeNorm and ReLU, a mean over the operators, and two linear outputs.
The loss is the root of the mean squared error (of logarithms here) plus cross-entropy. Tables of single operators have one
operator per kernel, so attention sees only the operator itself. The columns are those of GuardNet's operators, and seven figures
of the device.

Kernels are named by their family. This is the name of the function without template arguments and without the architecture that
the library was built for. So `volta_sgemm_128x64_nn` and `ampere_sgemm_128x64_nn` are one family, and the name means the same on
a new card.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import nn
from torch_geometric.nn import GATConv, GraphSizeNorm
from torch_geometric.utils import scatter

from perfguard.devices import Device
from perfguard.graph import OpGraph, roofline_s
from perfguard_models.features.operators import COLUMNS, NAMES, operator_columns
from perfguard_models.learner import fitting, read_pair
from perfguard_research.dataset import drawn, usable_rows
from perfguard_research.learners import write_pair
from perfguard_research.operators import Operator
from perfguard_research.tables import MeasuredRow

FORMAT = 1
_COLUMNS = (*COLUMNS, "log_flops", "log_matrix_flops", "log_bandwidth", "log_sms", "log_clock", "log_l2", "log_launch")
"""The operator's, and those of the device."""
_HIDDEN = 64
_BLOCKS = 3
_BATCH = 512
_EPOCHS = 12
_LEARNING_RATE = 3e-3
_MOST_ROWS = 60_000
_ARCHITECTURES = re.compile(r"^(maxwell|volta|turing|ampere|pascal)_")


def kernel_family(name: str) -> str:
    """The kernel without templates, arguments and architecture.

    Example:
        >>> kernel_family("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, X>(int, X)")
        'vectorized_elementwise_kernel CUDAFunctor_add'
        >>> kernel_family("volta_sgemm_128x64_nn")
        'sgemm_128x64_nn'
    """
    bare = name.strip().removeprefix("void ").replace("(anonymous namespace)::", "").replace("at::native::", "")
    function = re.split(r"[<(]", bare, maxsplit=1)[0].split("::")[-1]
    functor = ""
    if function.endswith("elementwise_kernel"):
        found = re.search(r"<\d+, *([A-Za-z_]+)", bare)
        functor = f" {found[1]}" if found else ""
    return _ARCHITECTURES.sub("", function) + functor


class KernelBlocks(nn.Module):
    """Three blocks of GAT, GraphSizeNorm and ReLU on the undirected graph of each kernel, and the mean over its operators."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.attention = nn.ModuleList(GATConv(a, b) for a, b in itertools.pairwise([width, *[hidden] * _BLOCKS]))
        self.norm = GraphSizeNorm()

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, kernel: torch.Tensor, number: int) -> torch.Tensor:
        """Shapes: (n, width), (2, m), (n,) → (number of kernels, hidden)."""
        both = torch.cat([edge_index, edge_index.flip(0)], dim=1)
        for layer in self.attention:
            x = torch.relu(self.norm(layer(x, both), kernel))
        pooled: torch.Tensor = scatter(x, kernel, dim_size=number, reduce="mean")
        return pooled


class KernelHeads(nn.Module):
    """Kernels of one operator each → their latencies as logarithms, and a logit for each family of kernels."""

    def __init__(self, num_families: int, hidden: int = _HIDDEN) -> None:
        super().__init__()
        self.name = nn.Embedding(len(NAMES) + 1, 12)
        self.blocks = KernelBlocks(len(_COLUMNS) + 12, hidden)
        self.latency = nn.Linear(hidden, 1)
        self.family = nn.Linear(hidden, num_families)
        nn.init.zeros_(self.latency.weight)

    def forward(
        self,
        x: torch.Tensor,  # shape: (b, len(_COLUMNS)), standardised
        name: torch.Tensor,  # shape: (b,), indices into NAMES, or len(NAMES)
        log_roofline: torch.Tensor,  # shape: (b,)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Shapes: (b,), (b, num_families). The latency is a factor on the roofline."""
        alone = torch.arange(len(x)), len(x)
        pooled = self.blocks(torch.cat([x, self.name(name)], dim=1), torch.zeros(2, 0, dtype=torch.long), *alone)
        return log_roofline + self.latency(pooled)[:, 0], self.family(pooled)


def read_rows(table: Path) -> pd.DataFrame:
    """Rows of a table of operators whose kernel is known, drawn where there are more than _MOST_ROWS.

    Returns:
        The columns of :func:`features_of`, and operator, gpu, sizes, family and seconds.

    Raises:
        TableError: if the table cannot be read.
    """
    rows = []
    for row in drawn([row for row in usable_rows(table)[0] if row.step_time_s and _kernel_of(row)], _MOST_ROWS):
        measured = {"operator": row.model, "gpu": row.gpu, "family": kernel_family(_kernel_of(row)), "seconds": row.step_time_s}
        assert isinstance(row.network, Operator)
        rows.append(measured | {"sizes": row.network.sizes} | features_of(row.network.graph(row.mode), row.device))
    return pd.DataFrame(rows)


def _kernel_of(row: MeasuredRow) -> str:
    """The name of the kernel that ran; empty: it is not known. Some rows have a number."""
    return row.network.kernel if isinstance(row.network, Operator) and not row.network.kernel.strip().isdigit() else ""


def features_of(graph: OpGraph, device: Device) -> dict[str, Any]:
    """``x`` (len(_COLUMNS),), ``name`` (an index into NAMES, or len(NAMES)) and ``roofline_s`` of a graph of one operator."""
    roofline = roofline_s(graph, device)
    name = graph.ops[0].name
    compute_s = graph.costs[0].astype(np.float64) / device.flops_per_s("fp16")
    x = operator_columns(graph, device, compute_s, roofline)[0].astype(np.float32)
    of_device = (
        device.flops_per_s("fp32") / 1e12,
        device.flops_per_s("fp16") / 1e12,
        device.bandwidth_bytes_per_s / 1e12,
        device.num_sms,
        device.boost_clock_hz / 1e9,
        device.l2_bytes / 2**20,
        device.launch_overhead_s * 1e6,
    )
    return {
        "x": np.concatenate([x, np.log(np.array(of_device, dtype=np.float32))]),
        "name": NAMES.index(name) if name in NAMES else len(NAMES),
        "roofline_s": float(roofline[0]),
    }


class KernelModel(NamedTuple):
    """Trained weights."""

    network: KernelHeads
    families: list[str]
    """What its logits stand for."""
    scale: torch.Tensor
    """Mean and width of the columns. Shape: (2, len(_COLUMNS))."""

    def inputs(self, rows: pd.DataFrame) -> tuple[torch.Tensor, ...]:
        """Those of the network."""
        x = torch.from_numpy(np.stack(rows["x"].tolist()))
        name = torch.tensor(rows["name"].to_numpy())
        roofline = torch.tensor(rows["roofline_s"].to_numpy(), dtype=torch.float32)
        return (x - self.scale[0]) / self.scale[1], name, roofline.log()

    def answers(self, rows: pd.DataFrame) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Seconds, shape (b,), and families from the most likely one on, as indices, shape (b, number of families)."""
        with torch.inference_mode():
            latency, logits = self.network(*self.inputs(rows))
        return latency.double().exp().numpy(), logits.argsort(dim=1, descending=True).numpy()

    def of_operator(self, graph: OpGraph, device: Device, *, most: int = 5) -> list[str]:
        """The families of kernels that a graph of one operator most likely runs, the likeliest first."""
        return [self.families[at] for at in self.answers(pd.DataFrame([features_of(graph, device)]))[1][0, :most]]


def fitted(rows: pd.DataFrame) -> KernelModel:
    """Heads that have learnt from ``rows``."""
    torch.manual_seed(0)
    numbers, families = pd.factorize(rows["family"], sort=True)
    x = np.stack(rows["x"].tolist())
    scale = torch.from_numpy(np.stack([x.mean(0), np.maximum(x.std(0), 0.05)]).astype(np.float32))
    network = KernelHeads(len(families))
    model = KernelModel(network, list(families), scale)
    family = torch.tensor(numbers)
    seconds = torch.tensor(rows["seconds"].to_numpy(), dtype=torch.float32).log()
    inputs = model.inputs(rows)
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=1e-3)
    steps = _EPOCHS * -(-len(rows) // _BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, total_steps=steps)
    network.train()
    for _ in range(_EPOCHS):
        for chosen in torch.randperm(len(rows)).split(_BATCH):
            latency, logits = network(*(values[chosen] for values in inputs))
            loss = (latency - seconds[chosen]).square().mean().sqrt() + nn.functional.cross_entropy(logits, family[chosen])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    network.eval()
    return model


def cross_validated(rows: pd.DataFrame) -> dict[str, dict[str, dict[str, float]]]:
    """Scores by split ("shape": a fifth of all shapes, on every card; "gpu": each card) and operator ("all", and "products":
    linear and bmm, whose kernel is a choice)."""
    shapes = zip(rows["operator"], rows["sizes"], strict=True)
    is_fifth = np.array([hashlib.sha256(repr(shape).encode()).digest()[0] % 5 == 0 for shape in shapes])
    splits = {"shape": [is_fifth], "gpu": [rows["gpu"] == gpu for gpu in sorted(rows["gpu"].unique())]}
    found = {}
    for split, folds in splits.items():
        judged = pd.concat([_judged(fitted(rows[~held_out]), rows[held_out]) for held_out in folds])
        products = judged[judged["operator"].isin(("linear", "bmm"))]
        lines = pd.concat([judged.assign(operator="all"), products.assign(operator="products"), judged.sort_values("operator")])
        scores = lines.groupby("operator", sort=False).agg(
            rows=("error", "size"),
            top1=("top1", "mean"),
            top5=("top5", "mean"),
            mean_error=("error", "mean"),
            median_error=("error", "median"),
        )
        found[split] = scores.to_dict("index")
    return found


def _judged(model: KernelModel, rows: pd.DataFrame) -> pd.DataFrame:
    """Of each row whether its family was the likeliest, and among the five likeliest; and the relative error of its latency.

    A family that the model has never seen counts as wrong.
    """
    seconds, order = model.answers(rows)
    is_right = np.array(model.families)[order[:, :5]] == rows["family"].to_numpy()[:, None]
    errors = np.abs(seconds / rows["seconds"] - 1)
    return pd.DataFrame({"operator": rows["operator"], "top1": is_right[:, 0], "top5": is_right.any(axis=1), "error": errors})


def read_kernel_model(path: Path) -> KernelModel:
    """Read PATH.safetensors and PATH.json, the files of :func:`main`.

    Raises:
        PredictorError: if a file is missing, damaged, of another version, or they do not belong together.
    """
    hint = "python -m perfguard_research.fusion.kernels TABLE --out DIR"
    state, document = read_pair(path, hint=hint, made_for={"format": FORMAT, "columns": [*_COLUMNS]})
    with fitting("The weights 'kernels'"):
        scale = state.pop("scale")
        network = KernelHeads(len(document["families"]), document["hidden"])
        network.load_state_dict(state)
        return KernelModel(network.eval(), document["families"], scale)


def shipped() -> KernelModel:
    """The weights that come with the package."""
    return read_kernel_model(Path(__file__).parents[1] / "weights" / "kernels")


def main() -> None:
    """Judge, fit, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("table", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = read_rows(arguments.table)
    scores = cross_validated(rows)
    model = fitted(rows)
    card: dict[str, Any] = {
        "format": FORMAT,
        "version": 1,
        "families": model.families,
        "columns": [*_COLUMNS],
        "hidden": _HIDDEN,
        "rows": dict(sorted(Counter(rows["operator"] + " " + rows["gpu"]).items())),
        "source": "NeuSight's operators (sitar-lab/NeuSight, MIT)",
        "scores": scores,
    }
    write_pair(arguments.out / "kernels", {**model.network.state_dict(), "scale": model.scale}, card)
    print(json.dumps(scores, indent=1))


if __name__ == "__main__":
    main()
