"""Architecture search under a latency limit on this machine's CPU: random search and regularised evolution.

    python examples/nas_evolution.py                     # about a minute on two cores
    python examples/nas_evolution.py --limit-ms 3

A few random cells are measured to tell the constraint about this machine; the limit is their median, unless you give one. From
then on no candidate is run before it is chosen: those that are predicted to be too slow are never trained. In the end every
trained network is measured, and accuracy is drawn against what it really takes (out/nas_evolution.html).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import plotly.graph_objects as go
import torch
import torch.nn.functional as F
from nas_space import Cell, mutated, network, random_cell
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from perfguard.nas import LatencyConstraint

BATCH = 64
SHAPE = (BATCH, 1, 8, 8)
WIDTH, DEPTH = 8, 1
POPULATION, SAMPLE = 6, 3
WARMUP, RUNS = 3, 15


class Trained(NamedTuple):
    """A candidate that was worth training."""

    search: str
    cell: Cell
    accuracy: float
    predicted_s: float
    measured_s: float


class Data(NamedTuple):
    """scikit-learn's digits."""

    images: torch.Tensor  # shape: (n, 1, 8, 8)
    labels: torch.Tensor  # shape: (n,)
    test_images: torch.Tensor
    test_labels: torch.Tensor


def make(cell: Cell) -> nn.Module:
    """The network of ``cell`` for digits."""
    return network(cell, width=WIDTH, depth=DEPTH, channels=1)


def described(cell: Cell) -> nn.Module:
    """The same without memory, to be predicted."""
    with torch.device("meta"):
        return make(cell)


def digits(seed: int) -> Data:
    """Half to train, half to test."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images.reshape(-1, 1, 8, 8) / 16, labels, test_size=0.5, random_state=seed, stratify=labels)
    train, test, train_labels, test_labels = (torch.as_tensor(part) for part in parts)
    return Data(train.float(), train_labels, test.float(), test_labels)


def latency_s(model: nn.Module) -> float:
    """Median seconds of one batch."""
    model.eval()
    batch = torch.randn(SHAPE)
    times = []
    with torch.inference_mode():
        for index in range(WARMUP + RUNS):
            start = time.perf_counter()
            model(batch)
            if index >= WARMUP:
                times.append(time.perf_counter() - start)
    return statistics.median(times)


def accuracy(model: nn.Module, data: Data, epochs: int) -> float:
    """After ``epochs`` of training, on the test half."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.train()
    for _ in range(epochs):
        for picked in torch.randperm(len(data.images)).split(BATCH):
            loss = F.cross_entropy(model(data.images[picked]), data.labels[picked])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()
    with torch.inference_mode():
        right = model(data.test_images).argmax(1) == data.test_labels
    return float(right.float().mean())


class Search:
    """Trains what the constraint lets through, and keeps account."""

    def __init__(self, name: str, constraint: LatencyConstraint, data: Data, epochs: int) -> None:
        self.name = name
        self.trained: list[Trained] = []
        self.refused = 0
        self._constraint = constraint
        self._data = data
        self._epochs = epochs

    def propose(self, draw: Callable[[], Cell]) -> Trained:
        """Draw until a candidate passes, and train it."""
        while True:
            cell = draw()
            verdict = self._constraint(described(cell))
            if verdict.action == "launch":
                break
            self.refused += 1
        assert verdict.prediction is not None
        model = make(cell)
        reached = accuracy(model, self._data, self._epochs)
        self.trained.append(Trained(self.name, cell, reached, verdict.prediction.step_time.median, latency_s(model)))
        return self.trained[-1]


def evolve(search: Search, rng: random.Random, trials: int) -> None:
    """Regularised evolution (Real et al. 2019): the child of the best of a sample takes the place of the oldest."""
    population: deque[Trained] = deque(maxlen=POPULATION)
    for trial in range(trials):
        if trial < POPULATION:
            population.append(search.propose(lambda: random_cell(rng)))
        else:
            parent = max(rng.sample(list(population), SAMPLE), key=lambda candidate: candidate.accuracy)
            population.append(search.propose(lambda parent=parent: mutated(parent.cell, rng)))  # type: ignore[misc]


def frontier(trained: list[Trained]) -> list[Trained]:
    """Those that no other one beats in both accuracy and measured latency, the fastest first."""
    best: list[Trained] = []
    for candidate in sorted(trained, key=lambda row: (row.measured_s, -row.accuracy)):
        if not best or candidate.accuracy > best[-1].accuracy:
            best.append(candidate)
    return best


def draw(trained: list[Trained], limit_s: float, path: Path) -> None:
    """Accuracy against measured latency, with the limit and the frontier, as a page for a browser."""
    figure = go.Figure()
    for search, symbol in (("random", "circle"), ("evolution", "triangle-up")):
        rows = [row for row in trained if row.search == search]
        latency_ms, accuracies = [1e3 * row.measured_s for row in rows], [row.accuracy for row in rows]
        figure.add_scatter(x=latency_ms, y=accuracies, mode="markers", marker={"symbol": symbol, "size": 10}, name=search)
    best = frontier(trained)
    figure.add_scatter(x=[1e3 * row.measured_s for row in best], y=[row.accuracy for row in best], mode="lines", name="frontier")
    figure.add_vline(x=1e3 * limit_s, line_dash="dash", annotation_text="limit")
    figure.update_layout(
        template="plotly_white", xaxis_title=f"measured latency of {BATCH} images, ms", yaxis_title="test accuracy"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.write_html(path)


def main() -> None:
    """Measure a few, search twice, measure all that were trained, print and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--limit-ms", type=float, help="latency of a batch of 64 (default: the median of the measured cells)")
    parser.add_argument("--measured", type=int, default=12, help="random cells to measure in the beginning")
    parser.add_argument("--trials", type=int, default=12, help="networks to train in each search")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of torch; one gives the steadiest latencies")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"))
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    console = Console()

    measured = [(cell, latency_s(make(cell))) for cell in (random_cell(rng) for _ in range(arguments.measured))]
    limit_s = statistics.median(seconds for _, seconds in measured) if arguments.limit_ms is None else arguments.limit_ms / 1e3
    constraint = LatencyConstraint("cpu", max_latency_ms=1e3 * limit_s, inputs=SHAPE)
    for cell, seconds in measured:
        constraint.learn(described(cell), seconds)
    console.print(f"limit {1e3 * limit_s:.2f} ms; {len(measured)} random cells measured")

    data = digits(arguments.seed)
    searches = [Search(name, constraint, data, arguments.epochs) for name in ("random", "evolution")]
    for _ in range(arguments.trials):
        searches[0].propose(lambda: random_cell(rng))
    evolve(searches[1], rng, arguments.trials)

    table = Table(title=f"{arguments.trials} networks trained in each search")
    for heading in ("search", "refused untrained", "too slow when measured", "best accuracy within the limit", "its cell"):
        table.add_column(heading)
    for search in searches:
        slow = sum(row.measured_s > limit_s for row in search.trained)
        best = max((row for row in search.trained if row.measured_s <= limit_s), key=lambda row: row.accuracy, default=None)
        reached = ("-", "-") if best is None else (f"{best.accuracy:.3f}", " ".join(best.cell))
        table.add_row(search.name, str(search.refused), str(slow), *reached)
    console.print(table)
    trained = [row for search in searches for row in search.trained]
    errors = [abs(row.predicted_s / row.measured_s - 1) for row in trained]
    console.print(f"error of the predicted latencies: {statistics.median(errors):.1%} (median)")
    draw(trained, limit_s, arguments.out / "nas_evolution.html")
    console.print(f"frontier: {arguments.out / 'nas_evolution.html'}")


if __name__ == "__main__":
    main()
