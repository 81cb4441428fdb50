"""A once-for-all network on this machine's CPU: trained once, then cut down to several latency limits without training again.

    python examples/nas_elastic.py

The network is a stack of residual blocks. Any of them can be left out (elastic depth), and each can be run with fewer hidden
channels (elastic width), as in Once-for-All (Cai et al. 2020). Every training step takes the whole network and two random cuts of
it (the sandwich rule, Yu and Huang 2019). A few random cuts are then measured, and the constraint learns from them. For each
limit the best of some random cuts that pass is chosen on a validation set, measured, and tested (out/nas_elastic.png).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from perfguard.nas import LatencyConstraint

BATCH = 64
SHAPE = (BATCH, 1, 8, 8)
CHANNELS = 24
HIDDEN = (8, 24, 72)
BLOCKS = 6
WARMUP, RUNS = 3, 15

Cut = tuple[int, ...]
"""Of each block the hidden channels; 0: left out."""


class Block(nn.Module):
    """x + W₂ relu(W₁ relu(x)) with convolutions, of which the first ``hidden`` channels are used."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(CHANNELS, hidden, 3, padding=1)
        self.second = nn.Conv2d(hidden, CHANNELS, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.second(F.relu(self.first(F.relu(x))))
        return out

    def cut(self, x: torch.Tensor, hidden: int) -> torch.Tensor:
        """As a block of ``hidden`` channels would, with the gradient to the shared weights."""
        inner = F.conv2d(F.relu(x), self.first.weight[:hidden], self.first.bias[:hidden], padding=1)  # type: ignore[index]
        return x + F.conv2d(F.relu(inner), self.second.weight[:, :hidden], self.second.bias, padding=1)


def head() -> list[nn.Module]:
    """What follows the blocks."""
    return [nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * CHANNELS, 10)]


class Elastic(nn.Module):
    """The whole network, which runs any cut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, CHANNELS, 3, padding=1)
        self.blocks = nn.ModuleList(Block(max(HIDDEN)) for _ in range(BLOCKS))
        self.head = nn.Sequential(*head())

    def forward(self, x: torch.Tensor, cut: Cut) -> torch.Tensor:
        x = self.stem(x)
        for block, hidden in zip(self.blocks, cut, strict=True):
            if hidden:
                assert isinstance(block, Block)
                x = block.cut(x, hidden)
        out: torch.Tensor = self.head(x)
        return out

    def subnet(self, cut: Cut) -> nn.Sequential:
        """The cut as a network of its own, with its share of the weights."""
        network = plain(cut)
        blocks = [block for block, hidden in zip(self.blocks, cut, strict=True) if hidden]
        with torch.no_grad():
            network[0].load_state_dict(self.stem.state_dict())
            network[-1].load_state_dict(self.head[-1].state_dict())
            for small, large in zip(list(network)[1:], blocks, strict=False):
                assert isinstance(small, Block)
                assert isinstance(large, Block)
                hidden = small.first.out_channels
                small.first.weight.copy_(large.first.weight[:hidden])
                small.first.bias.copy_(large.first.bias[:hidden])  # type: ignore[union-attr, index]
                small.second.weight.copy_(large.second.weight[:, :hidden])
                small.second.bias.copy_(large.second.bias)  # type: ignore[union-attr, arg-type]
        return network.eval()


class Chosen(NamedTuple):
    """The best cut under one limit."""

    limit_s: float
    cut: Cut
    accuracy: float
    predicted_s: float
    measured_s: float


def plain(cut: Cut) -> nn.Sequential:
    """A network of the shape of ``cut``."""
    return nn.Sequential(nn.Conv2d(1, CHANNELS, 3, padding=1), *(Block(hidden) for hidden in cut if hidden), *head())


def described(cut: Cut) -> nn.Sequential:
    """The same without memory, to be predicted."""
    with torch.device("meta"):
        return plain(cut)


def random_cut(rng: random.Random) -> Cut:
    """Any cut with at least one block."""
    cut = tuple(rng.choice((0, *HIDDEN)) for _ in range(BLOCKS))
    return cut if any(cut) else random_cut(rng)


def train(elastic: Elastic, images: torch.Tensor, labels: torch.Tensor, *, epochs: int, rng: random.Random) -> None:
    """The sandwich rule: the whole network and two random cuts in every step."""
    optimizer = torch.optim.Adam(elastic.parameters(), lr=2e-3)
    whole = (max(HIDDEN),) * BLOCKS
    for _ in range(epochs):
        for picked in torch.randperm(len(images)).split(BATCH):
            optimizer.zero_grad()
            for cut in (whole, random_cut(rng), random_cut(rng)):
                F.cross_entropy(elastic(images[picked], cut), labels[picked]).backward()
            optimizer.step()


def accuracy(elastic: Elastic, cut: Cut, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of ``images`` that the cut gets right."""
    with torch.inference_mode():
        return float((elastic(images, cut).argmax(1) == labels).float().mean())


def latency_s(model: nn.Module) -> float:
    """Median seconds of one batch."""
    batch = torch.randn(SHAPE)
    times = []
    with torch.inference_mode():
        for index in range(WARMUP + RUNS):
            start = time.perf_counter()
            model(batch)
            if index >= WARMUP:
                times.append(time.perf_counter() - start)
    return statistics.median(times)


def draw(chosen: list[Chosen], path: Path) -> None:
    """Accuracy against measured latency, each with its limit."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    axes.plot(
        [1e3 * row.measured_s for row in chosen], [row.accuracy for row in chosen], "o-", label="cut of one trained network"
    )
    for row in chosen:
        axes.axvline(1e3 * row.limit_s, color="tab:red", linestyle="--", linewidth=0.8)
    axes.set(xlabel=f"measured latency of {BATCH} images, ms (limits dashed)", ylabel="test accuracy")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    """Train once, choose a cut for each limit, measure it, print and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--measured", type=int, default=12, help="random cuts to measure in the beginning")
    parser.add_argument("--candidates", type=int, default=200, help="random cuts to choose from")
    parser.add_argument("--threads", type=int, default=1, help="of torch; one gives the steadiest latencies")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"))
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)

    pixels, labels = load_digits(return_X_y=True)
    images, labels = torch.as_tensor(pixels).float().reshape(-1, 1, 8, 8) / 16, torch.as_tensor(labels)
    rest, test = train_test_split(torch.arange(len(labels)), test_size=0.3, random_state=arguments.seed, stratify=labels)
    fit, validation = rest[: len(rest) * 3 // 4], rest[len(rest) * 3 // 4 :]
    elastic = Elastic()
    train(elastic, images[fit], labels[fit], epochs=arguments.epochs, rng=rng)

    told = [(cut, latency_s(elastic.subnet(cut))) for cut in (random_cut(rng) for _ in range(arguments.measured))]
    limits_s = statistics.quantiles([seconds for _, seconds in told], n=4)
    constraint = LatencyConstraint("cpu", max_latency_ms=1e3 * max(limits_s), inputs=SHAPE)
    for cut, seconds in told:
        constraint.learn(described(cut), seconds)
    cuts = {random_cut(rng) for _ in range(arguments.candidates)}
    predicted_s = {cut: constraint.predict(described(cut)).step_time.median for cut in cuts}
    chosen = []
    for limit_s in limits_s:
        some = [cut for cut, seconds in predicted_s.items() if seconds <= limit_s]
        if not some:
            continue
        best = max(some, key=lambda cut: accuracy(elastic, cut, images[validation], labels[validation]))
        measured_s = latency_s(elastic.subnet(best))
        chosen.append(Chosen(limit_s, best, accuracy(elastic, best, images[test], labels[test]), predicted_s[best], measured_s))

    table = Table(title=f"cuts of one network, trained once ({arguments.epochs} epochs)")
    for heading in ("limit, ms", "predicted, ms", "measured, ms", "test accuracy", "hidden channels of each block"):
        table.add_column(heading, justify="right")
    for row in chosen:
        times = (f"{1e3 * seconds:.2f}" for seconds in (row.limit_s, row.predicted_s, row.measured_s))
        table.add_row(*times, f"{row.accuracy:.3f}", " ".join(map(str, row.cut)))
    console = Console()
    console.print(table)
    draw(chosen, arguments.out / "nas_elastic.png")
    console.print(f"frontier: {arguments.out / 'nas_elastic.png'}")


if __name__ == "__main__":
    main()
