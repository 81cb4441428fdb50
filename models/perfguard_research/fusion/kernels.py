"""LILOU's other heads: which kernel a device runs, and how long the kernel takes.

    python -m perfguard_research.fusion.kernels OPERATORS.csv.gz --out models/perfguard_research/weights

The network is from the paper's section 3.2.2. The operators of a kernel are an undirected graph. Each has its features and those
of the device. The network has three blocks of GAT, GraphSizeNorm and ReLU, a mean over the operators, and two linear outputs.
The loss is the root of the mean squared error (of logarithms here) plus cross-entropy. Tables of single operators have one
operator per kernel, so attention sees only the operator itself. The columns are those of GuardNet's operators.

Kernels are named by their family. This is the name of the function without template arguments and without the architecture that
the library was built for. So `volta_sgemm_128x64_nn` and `ampere_sgemm_128x64_nn` are one family, and the name means the same on
a new card.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import platform
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import nn
from torch_geometric.nn import GATConv, GraphSizeNorm
from torch_geometric.utils import scatter

from perfguard.exceptions import PerfGuardError, PredictorError
from perfguard.graph import OpGraph
from perfguard_models.features.operators import COLUMNS, DEVICE_COLUMNS, NAMES, operator_features
from perfguard_models.weight_files import check_hash, read_pair, write_pair
from perfguard_research.csv_rows import read_table
from perfguard_research.operators import Operator
from perfguard_research.tables import parser_of

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from perfguard.devices import Device

FORMAT = 1
_HIDDEN = 64
_BLOCKS = 3
_BATCH = 512
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


class Kernels(NamedTuple):
    """n operators in b kernels."""

    x: torch.Tensor  # shape: (n, len(COLUMNS) + len(DEVICE_COLUMNS))
    name: torch.Tensor  # shape: (n,), indices into NAMES
    roofline: torch.Tensor  # shape: (b,), log seconds
    edge_index: torch.Tensor  # shape: (2, m)
    kernel: torch.Tensor  # shape: (n,), which kernel


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
    """Kernel → its latency as a logarithm, and a logit for each family of kernels."""

    def __init__(self, num_families: int, hidden: int = _HIDDEN) -> None:
        super().__init__()
        self.name = nn.Embedding(len(NAMES) + 1, 12)
        self.blocks = KernelBlocks(len(COLUMNS) + len(DEVICE_COLUMNS) + 12, hidden)
        self.latency, self.family = nn.Linear(hidden, 1), nn.Linear(hidden, num_families)
        nn.init.zeros_(self.latency.weight)

    def forward(self, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor]:
        """Shapes: (b,), (b, num_families). The latency is a factor on the roofline."""
        x = torch.cat([kernels.x, self.name(kernels.name)], dim=1)
        pooled = self.blocks(x, kernels.edge_index, kernels.kernel, len(kernels.roofline))
        return kernels.roofline + self.latency(pooled)[:, 0], self.family(pooled)


class KernelRow(NamedTuple):
    """One measured operator."""

    operator: str
    gpu: str
    sizes: tuple[int, ...]
    family: str
    seconds: float
    x: npt.NDArray[np.float32]  # shape: (len(COLUMNS) + len(DEVICE_COLUMNS),)
    name: int
    roofline_s: float


def read_rows(table: Path, *, most: int = _MOST_ROWS, seed: int = 0) -> list[KernelRow]:
    """Rows of a table of operators whose kernel is known, drawn with ``seed`` where there are more than ``most``.

    Raises:
        TableError: if the table cannot be read.
    """
    columns, raw = read_table(table)
    parse = parser_of(columns, table)
    raw = [row for row in raw if not (row.get("kernel") or "").strip().isdigit()]
    if len(raw) > most:
        raw = random.Random(seed).sample(raw, most)
    rows = []
    for item in raw:
        try:
            row = parse(item)
        except PerfGuardError:
            continue
        operator = row.network
        if isinstance(operator, Operator) and operator.kernel and row.step_time_s and row.status == "ok":
            own = _row_of(operator.graph(row.mode), row.device)._replace(
                operator=operator.name, gpu=row.gpu, sizes=operator.sizes
            )
            rows.append(own._replace(family=kernel_family(operator.kernel), sizes=operator.sizes, seconds=row.step_time_s))
    return rows


def _row_of(graph: OpGraph, device: Device) -> KernelRow:
    """A graph of one operator, not measured."""
    view = operator_features(graph, device)
    x = np.concatenate([view["x"][0].astype(np.float32), view["device"]])
    return KernelRow("", device.id, (), "", 0.0, x, int(view["name"][0]), float(view["roofline"][0]))


class KernelModel:
    """Trained weights.

    Args:
        network: the weights.
        families: what its logits stand for.
        scale: mean and width of the columns. Shape: (2, columns).
    """

    def __init__(self, network: KernelHeads, families: Sequence[str], scale: torch.Tensor) -> None:
        self.network, self.families, self.scale = network.eval(), tuple(families), scale

    def packed(self, rows: Sequence[KernelRow]) -> Kernels:
        """Rows as kernels, one for each row's operator."""
        x = torch.from_numpy(np.stack([row.x for row in rows]))
        return Kernels(
            (x - self.scale[0]) / self.scale[1],
            torch.tensor([row.name for row in rows]),
            torch.tensor([row.roofline_s for row in rows]).log(),
            torch.zeros(2, 0, dtype=torch.long),
            torch.arange(len(rows)),
        )

    def answers(self, rows: Sequence[KernelRow]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Seconds, shape (b,), and families from the most likely one on, as indices, shape (b, number of families)."""
        with torch.inference_mode():
            latency, logits = self.network(self.packed(rows))
        return latency.double().exp().numpy(), logits.argsort(dim=1, descending=True).numpy()

    def of_operator(self, graph: OpGraph, device: Device, *, most: int = 5) -> list[str]:
        """The families of kernels that a graph of one operator most likely runs, the likeliest first."""
        return [self.families[at] for at in self.answers([_row_of(graph, device)])[1][0, :most]]


def fitted(rows: Sequence[KernelRow], *, epochs: int = 12, seed: int = 0) -> KernelModel:
    """Heads that have learnt from ``rows``."""
    torch.manual_seed(seed)
    families = sorted({row.family for row in rows})
    x = np.stack([row.x for row in rows])
    scale = torch.from_numpy(np.stack([x.mean(0), np.maximum(x.std(0), 0.05)]).astype(np.float32))
    network = KernelHeads(len(families))
    model = KernelModel(network, families, scale)
    number = {family: at for at, family in enumerate(families)}
    family = torch.tensor([number[row.family] for row in rows])
    seconds = torch.tensor([row.seconds for row in rows]).log()
    packed = model.packed(rows)
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=1e-3)
    steps = epochs * -(-len(rows) // _BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, total_steps=steps)
    network.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(rows)).split(_BATCH):
            alone = torch.arange(len(chosen))
            latency, logits = network(
                Kernels(packed.x[chosen], packed.name[chosen], packed.roofline[chosen], packed.edge_index, alone)
            )
            loss = (latency - seconds[chosen]).square().mean().sqrt() + nn.functional.cross_entropy(logits, family[chosen])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    network.eval()
    return model


class KernelScore(NamedTuple):
    """Shares of the rows whose family was the likeliest, and among the five likeliest; relative errors of the latency."""

    rows: int
    top1: float
    top5: float
    mean_error: float
    median_error: float


def score_of(model: KernelModel, rows: Sequence[KernelRow]) -> KernelScore:
    """A family that the model has never seen counts as wrong."""
    seconds, order = model.answers(rows)
    number = {family: at for at, family in enumerate(model.families)}
    true = np.array([number.get(row.family, -1) for row in rows])
    errors = np.abs(seconds / np.array([row.seconds for row in rows]) - 1)
    first, five = order[:, 0] == true, (order[:, :5] == true[:, None]).any(axis=1)
    return KernelScore(len(rows), float(first.mean()), float(five.mean()), float(errors.mean()), float(np.median(errors)))


def cross_validated(rows: Sequence[KernelRow]) -> dict[str, dict[str, KernelScore]]:
    """Scores by split ("shape": a fifth of all shapes, on every card; "gpu": each card) and operator ("all", and "products":
    linear and bmm, whose kernel is a choice)."""

    def fifth_of_shapes(row: KernelRow) -> bool:
        return hashlib.sha256(repr((row.operator, row.sizes)).encode()).digest()[0] % 5 == 0

    gpus = sorted({row.gpu for row in rows})
    splits = {
        "shape": [[row for row in rows if fifth_of_shapes(row)]],
        "gpu": [[row for row in rows if row.gpu == gpu] for gpu in gpus],
    }
    found: dict[str, dict[str, KernelScore]] = {}
    for split, folds in splits.items():
        parts: dict[str, list[KernelScore]] = {}
        for judged in folds:
            held_out = set(map(id, judged))
            model = fitted([row for row in rows if id(row) not in held_out])
            parts.setdefault("all", []).append(score_of(model, judged))
            parts.setdefault("products", []).append(score_of(model, [row for row in judged if row.operator in ("linear", "bmm")]))
            for operator in sorted({row.operator for row in judged}):
                parts.setdefault(operator, []).append(score_of(model, [row for row in judged if row.operator == operator]))
        found[split] = {name: _together(scores) for name, scores in parts.items()}
    return found


def _together(scores: Sequence[KernelScore]) -> KernelScore:
    """Weighted by rows; the median is the mean of the folds' medians."""
    total = sum(score.rows for score in scores)
    columns = list(zip(*scores, strict=True))[1:]
    means = [sum(value * score.rows for value, score in zip(column, scores, strict=True)) / total for column in columns]
    return KernelScore(total, *means)


def read_kernel_model(tensors: Traversable, card: Traversable) -> KernelModel:
    """Read the files of :func:`main`.

    Raises:
        PredictorError: if a file is missing, damaged, of another version, or they do not belong together.
    """
    mend = "train them with `python -m perfguard_research.fusion.kernels TABLE --out DIR`"
    data, document = read_pair(tensors, card, "The weights of kernels", mend)
    if document.get("format") != FORMAT or document.get("columns") != [*COLUMNS, *DEVICE_COLUMNS]:
        raise PredictorError("The weights of kernels were made for another version of PerfGuard. Train them again.")
    check_hash(data, document, "kernels")
    try:
        tensors_read = load_tensors(data)
        scale = tensors_read.pop("scale")
        network = KernelHeads(len(document["families"]), document["hidden"])
        network.load_state_dict(tensors_read)
    except (RuntimeError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise PredictorError(f"The weights of kernels do not fit the network: {type(error).__name__}: {error}") from error
    return KernelModel(network, document["families"], scale)


def shipped() -> KernelModel:
    """The weights that come with the package."""
    folder = files("perfguard_research") / "weights"
    return read_kernel_model(folder / "kernels.safetensors", folder / "kernels.json")


def main() -> None:
    """Judge, fit, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("table", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--most-rows", type=int, default=_MOST_ROWS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    rows = read_rows(arguments.table, most=arguments.most_rows)
    scores = {split: {name: score._asdict() for name, score in by.items()} for split, by in cross_validated(rows).items()}
    model = fitted(rows)
    card: dict[str, Any] = {
        "format": FORMAT,
        "version": 1,
        "families": list(model.families),
        "columns": [*COLUMNS, *DEVICE_COLUMNS],
        "hidden": _HIDDEN,
        "rows": dict(sorted(Counter(f"{row.operator} {row.gpu}" for row in rows).items())),
        "source": "NeuSight's operators (sitar-lab/NeuSight, MIT)",
        "scores": scores,
        "made": f"{time.strftime('%Y-%m-%d')}, {platform.processor() or platform.machine()}, {time.monotonic() - started:.0f} s",
    }
    write_pair(arguments.out / "kernels", {**model.network.state_dict(), "scale": model.scale}, card)
    print(json.dumps(scores, indent=1))


if __name__ == "__main__":
    main()
