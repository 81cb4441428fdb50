"""Real training runs of random networks on this machine's CPU, to train and calibrate the shipped weights on.

    python -m perfguard_training.cpu_corpus --out corpus.jsonl.gz --minutes 12 --seed 0
    python -m perfguard_training.cpu_corpus --out studies.jsonl.gz --minutes 5 --seed 3 --study-rows 25

With ``--study-rows`` the structure stays the same for that many rows while the sizes vary, as in a study.
One JSON object a line: the graph (base64 of `OpGraph.to_bytes`), the device, the family and the measurement. Interrupt it when
you like: every line is flushed.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import functools
import gzip
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import Progress
from torch import nn

from perfguard.devices import Device, cpu
from perfguard.exceptions import PerfGuardError
from perfguard.graph import OpGraph, roofline_s, trace
from perfguard.measure import Measurement, Run
from perfguard.predictor import Observation
from perfguard.workload import TensorSpec, Workload

_MAX_LIVE_BYTES = 1200 * 2**20
_MAX_ROOFLINE_S = 0.12
_RUN_S = 1.0
_STEPS = (10, 60)
_NUM_CLASSES = 10
STUDY = "study-"
"""Prefix of the family of rows that belong to one study."""


class Case(NamedTuple):
    """One random configuration."""

    family: str
    make_model: Callable[[], nn.Module]
    sample_shape: tuple[int, ...]
    batch_size: int
    optimizer: Callable[..., torch.optim.Optimizer]


def _log_int(rng: random.Random, low: int, high: int) -> int:
    return round(low * math.exp(math.log(high / low) * rng.random()))


def _optimizer(rng: random.Random) -> Callable[..., torch.optim.Optimizer]:
    makers: list[Callable[..., torch.optim.Optimizer]] = [
        functools.partial(torch.optim.SGD, lr=1e-3),
        functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
        functools.partial(torch.optim.Adam, lr=1e-3),
        functools.partial(torch.optim.AdamW, lr=1e-3),
        functools.partial(torch.optim.RMSprop, lr=1e-3),
    ]
    return rng.choice(makers)


class _ConvBlock(nn.Module):
    def __init__(self, cin: int, cout: int, kernel: int, stride: int, norm: str, act: type[nn.Module], style: str) -> None:
        super().__init__()
        groups = cin if style == "depthwise" else 1
        middle = cin if style == "depthwise" else cout
        layers: list[nn.Module] = [nn.Conv2d(cin, middle, kernel, stride, kernel // 2, groups=groups, bias=norm == "none")]
        if style == "depthwise":
            layers.append(nn.Conv2d(middle, cout, 1))
        if norm == "batch":
            layers.append(nn.BatchNorm2d(cout))
        elif norm == "group":
            layers.append(nn.GroupNorm(2, cout))
        layers.append(act())
        self.body = nn.Sequential(*layers)
        self.residual = style == "residual" and cin == cout and stride == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.body(x)
        return x + y if self.residual else y


def _random_cnn(structure: random.Random, sizes: random.Random) -> Case:
    width, depth, kernel = 2 * _log_int(sizes, 4, 64), sizes.randint(1, 8), sizes.choice((1, 3, 3, 5, 7))
    norm, style = structure.choice(("batch", "batch", "group", "none")), structure.choice(("plain", "residual", "depthwise"))
    act = structure.choice((nn.ReLU, nn.ReLU, nn.GELU, nn.SiLU))
    channels, size = structure.choice((1, 3)), structure.choice((8, 8, 12, 16, 24, 32))
    down = structure.choice(("none", "stride", "pool"))

    def make() -> nn.Module:
        layers: list[nn.Module] = []
        cin = channels
        for index in range(depth):
            halve = index > 0 and index % 2 == 0 and size >> (index // 2) >= 4
            layers.append(
                _ConvBlock(cin, width, kernel, 2 if halve and down == "stride" else 1, norm, act, style if index else "plain")
            )
            if halve and down == "pool":
                layers.append(nn.MaxPool2d(2))
            cin = width
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(cin, _NUM_CLASSES))

    return Case(f"cnn-{style}-{norm}", make, (channels, size, size), _log_int(sizes, 8, 1024), _optimizer(sizes))


def _random_mlp(structure: random.Random, sizes: random.Random) -> Case:
    width, depth, inputs = _log_int(sizes, 32, 2048), sizes.randint(1, 8), _log_int(structure, 16, 2048)
    norm, dropout, act = structure.random() < 0.3, structure.random() < 0.3, structure.choice((nn.ReLU, nn.GELU, nn.Tanh))

    def make() -> nn.Module:
        layers: list[nn.Module] = []
        size = inputs
        for _ in range(depth):
            layers += [nn.Linear(size, width), *([nn.BatchNorm1d(width)] if norm else []), act()]
            layers += [nn.Dropout(0.1)] if dropout else []
            size = width
        return nn.Sequential(*layers, nn.Linear(size, _NUM_CLASSES))

    return Case("mlp-norm" if norm else "mlp", make, (inputs,), _log_int(sizes, 16, 4096), _optimizer(sizes))


class _Encoder(nn.Module):
    def __init__(self, width: int, heads: int, depth: int, length: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, _NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x + self.position).mean(1))
        return out


def _random_encoder(structure: random.Random, sizes: random.Random) -> Case:
    heads = structure.choice((2, 4))
    width, depth, length = heads * 8 * _log_int(sizes, 1, 8), sizes.randint(1, 4), _log_int(structure, 8, 128)
    return Case(
        "encoder", lambda: _Encoder(width, heads, depth, length), (length, width), _log_int(sizes, 2, 64), _optimizer(sizes)
    )


_SPACES: tuple[Callable[[random.Random, random.Random], Case], ...] = (
    _random_cnn,
    _random_cnn,
    _random_cnn,
    _random_mlp,
    _random_encoder,
)


def random_cases(seed: int) -> Iterator[Case]:
    """An endless, seeded stream of configurations: three convolutional networks for one MLP and one encoder."""
    rng = random.Random(seed)
    while True:
        for space in _SPACES:
            yield space(rng, rng)


def study_cases(seed: int, rows: int) -> Iterator[Case]:
    """An endless, seeded stream of studies: ``rows`` configurations of one structure, then of the next."""
    sizes = random.Random(seed)
    for study in itertools.count():
        space = _SPACES[study % len(_SPACES)]
        for _ in range(rows):
            yield space(random.Random(f"{seed}-{study}"), sizes)._replace(family=f"{STUDY}{study}")


def measure(case: Case, device: Device) -> Observation | None:
    """Trace and really run ``case``; None if it is too large for a quick row or cannot be traced."""
    inputs = (case.batch_size, *case.sample_shape)
    with torch.device("meta"):
        model = case.make_model()
    workload = Workload(
        model, inputs=inputs, targets=TensorSpec(inputs[:1], "int64"), loss=nn.functional.cross_entropy, optimizer=case.optimizer
    )
    try:
        graph = trace(workload, target="cpu")
    except PerfGuardError:
        return None
    if graph.peak_live_bytes > _MAX_LIVE_BYTES or roofline_s(graph, device).sum() > _MAX_ROOFLINE_S:
        return None
    data, labels = torch.randn(2 * inputs[0], *case.sample_shape), torch.randint(0, _NUM_CLASSES, (2 * inputs[0],))
    return Observation(graph, device, _train(case, device, data, labels))


def _train(case: Case, device: Device, data: torch.Tensor, labels: torch.Tensor) -> Measurement:
    with Run(device) as run:
        model = case.make_model()
        optimizer = case.optimizer(model.parameters())
        start = time.perf_counter()
        while run.num_steps < _STEPS[0] or (run.num_steps < _STEPS[1] and time.perf_counter() - start < _RUN_S):
            rows = torch.randint(0, len(data), (case.batch_size,))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(data[rows]), labels[rows])
            loss.backward()
            optimizer.step()
    assert run.measurement is not None
    return run.measurement


def to_json(observation: Observation, family: str) -> dict[str, Any]:
    """One line of the corpus."""
    return {
        "family": family,
        "graph": base64.b64encode(observation.graph.to_bytes()).decode(),
        "device": dataclasses.asdict(observation.device),
        "measurement": dataclasses.asdict(observation.measurement),
    }


def read_corpus(path: str | Path) -> Iterator[tuple[str, Observation]]:
    """(family, observation) of each complete line; a line cut short by an interruption ends the reading."""
    with gzip.open(path, "rt") as file:
        try:
            for line in file:
                row = json.loads(line)
                graph = OpGraph.from_bytes(base64.b64decode(row["graph"]))
                yield row["family"], Observation(graph, Device(**row["device"]), Measurement(**row["measurement"]))
        except (EOFError, json.JSONDecodeError):
            return


def main() -> None:
    """Collect until the minutes are over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--study-rows", type=int, default=0)
    arguments = parser.parse_args()
    device = cpu()
    torch.manual_seed(arguments.seed)
    end = time.monotonic() + 60 * arguments.minutes
    num_rows = 0
    with gzip.open(arguments.out, "at") as file, Progress(transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("rows", total=None)
        for case in study_cases(arguments.seed, arguments.study_rows) if arguments.study_rows else random_cases(arguments.seed):
            if time.monotonic() > end:
                break
            if (observation := measure(case, device)) is not None:
                file.write(json.dumps(to_json(observation, case.family)) + "\n")
                file.flush()
                num_rows += 1
                progress.update(task, completed=num_rows, description=f"{num_rows} rows")
    print(f"{num_rows} rows in {arguments.out}")


if __name__ == "__main__":
    main()
