"""How long does a decision take, from the live module to the verdict?

    python benchmarks/decision_speed.py

A ResNet-50's training step. Cold: nothing of its structure was seen before. Warm: the same network again with another learning
rate; with a batch, or a batch and an image size, between those that were traced. Another optimizer or precision is traced. And
`Guard.max_batch_size`, with nothing known before. Medians of wall clock and of processor time, which does not count what others
take meanwhile.

Then whole studies from nothing: random batches, precisions, optimizers and learning rates, as a random search would ask.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import platform
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from perfguard import Guard, TensorSpec, Workload, trace
from perfguard.graph import TraceCache, _cache
from perfguard.measure import PeakResidentSet
from perfguard.tables import timm_model

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
TRACED = ((129, 224), (33, 128), (65, 160), (97, 192), (73, 224), (41, 160), (129, 192))
"""Batch and image size of what the study ran before."""
OPTIMIZERS = ("Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adadelta", "Adamax")
HALF = ("amp-bf16", "amp-fp16", "bf16", "fp16")
STUDY = {
    "batch": range(16, 257, 8),
    "precision": ("fp32", "amp-fp16", "amp-bf16", "bf16"),
    "optimizer": ("SGD", "Adam", "AdamW", "RMSprop"),
}


def workload(model: torch.nn.Module, batch: int, *, size: int = 224, optimizer: Any = SGD, precision: Any = "fp32") -> Workload:
    """A training step on images."""
    return Workload(
        model,
        inputs=(batch, 3, size, size),
        targets=TensorSpec((batch,), "int64"),
        loss=F.cross_entropy,
        optimizer=optimizer,
        precision=precision,
    )


class Times(NamedTuple):
    """Medians in milliseconds."""

    wall_ms: float
    cpu_ms: float


def times(call: Callable[[Any], Any], values: Iterable[Any]) -> Times:
    """How long ``call`` takes for one of ``values``."""
    walls, cpus = [], []
    for value in values:
        wall, cpu = time.perf_counter(), time.process_time()
        call(value)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return Times(statistics.median(walls) * 1e3, statistics.median(cpus) * 1e3)


class Study(NamedTuple):
    """Decisions of random searches: processor milliseconds, and whether a step was traced."""

    cpu_ms: list[float]
    traced: list[bool]

    @property
    def row(self) -> tuple[str, ...]:
        """Median and 90th percentile of all decisions, of those without a trace, and the share with one."""
        warm = [ms for ms, traced in zip(self.cpu_ms, self.traced, strict=True) if not traced]
        numbers = [np.percentile(some, share) for some in (self.cpu_ms, warm) for share in (50, 90)]
        return *(f"{number:.1f}" for number in numbers), f"{np.mean(self.traced):.0%}"


def searched(guard: Guard, model: torch.nn.Module, *, decisions: int, seeds: range) -> Study:
    """Random searches, each from nothing."""
    study, number = Study([], []), [0]

    def counting(*arguments: Any, **options: Any) -> Any:
        number[0] += 1
        return trace(*arguments, **options)

    with patch.object(_cache, "trace", counting):
        for seed in seeds:
            rng = random.Random(seed)
            guard._traces = TraceCache()
            for _ in range(decisions):
                drawn: dict[str, Any] = {name: rng.choice(values) for name, values in STUDY.items()}
                optimizer = functools.partial(getattr(torch.optim, drawn["optimizer"]), lr=10 ** rng.uniform(-4, -1))
                asked = workload(model, drawn["batch"], precision=drawn["precision"], optimizer=optimizer)
                before, cpu = number[0], time.process_time()
                guard.check(asked)
                study.cpu_ms.append((time.process_time() - cpu) * 1e3)
                study.traced.append(number[0] > before)
    return study


def main() -> None:
    """Time the decisions and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--gpu", default="a100")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--studies", type=int, default=5)
    parser.add_argument("--decisions", type=int, default=60)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    model = timm_model(arguments.model)
    guard = Guard(arguments.gpu, log=False)
    guard.check(workload(model, 64))  # what is loaded at first use

    def cold(options: dict[str, Any]) -> None:
        guard._traces = TraceCache()
        guard.check(workload(model, 64, **options))

    def check(options: dict[str, Any]) -> None:
        guard.check(workload(model, **options))

    rounds = range(arguments.rounds)
    memory = PeakResidentSet()
    memory.start()
    rows = {"cold, batch 64": times(cold, [{}] * arguments.rounds)}
    own = memory.peak_bytes() / 2**20
    half = [{"precision": precision} for precision in HALF]
    times(cold, half)  # what is loaded at first use
    rows["cold, half precision"] = times(cold, half * max(arguments.rounds // 4, 1))
    guard._traces = TraceCache()
    for batch, size in TRACED:
        check({"batch": batch, "size": size})
    rates = [functools.partial(torch.optim.SGD, lr=0.1 / (2 + index), momentum=0.9) for index in rounds]
    rows["warm, another learning rate"] = times(check, [{"batch": 129, "optimizer": rate} for rate in rates])
    between = [{"batch": 49 + 8 * (index // 2), "size": (160, 192)[index % 2]} for index in rounds]
    rows["warm, another batch and image size"] = times(check, between)
    kinds = [getattr(torch.optim, name) for name in OPTIMIZERS]
    rows["another optimizer"] = times(check, [{"batch": 129, "optimizer": kind} for kind in kinds])
    guard._traces = TraceCache()
    for batch in (32, 96, 64, 129):
        check({"batch": batch})
    rows["warm, another batch"] = times(check, [{"batch": 33 + index} for index in rounds])
    rows["another precision"] = times(check, [{"batch": 64, "precision": precision} for precision in HALF])

    def largest(_round: int) -> None:
        guard._traces = TraceCache()
        guard.max_batch_size(workload(model, 64))

    rows["the largest batch that fits"] = times(largest, range(3))
    table = Table(
        title=f"{arguments.model}, {datetime.date.today()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    table.add_column("decision")
    table.add_column("wall clock ms", justify="right")
    table.add_column("processor ms", justify="right")
    for name, row in rows.items():
        table.add_row(name, f"{row.wall_ms:.1f}", f"{row.cpu_ms:.1f}")
    Console(width=130).print(table)
    study = searched(guard, model, decisions=arguments.decisions, seeds=range(arguments.studies))
    table = Table(title=f"{arguments.studies} studies of {arguments.decisions} decisions, processor ms")
    for name in ("median", "90%", "median without a trace", "90% without a trace", "traced"):
        table.add_column(name, justify="right")
    table.add_row(*study.row)
    Console(width=130).print(table)
    print(f"memory of its own: {own:.1f} MiB")


if __name__ == "__main__":
    main()
