"""How long does a decision take, from the live module to the verdict?

    python benchmarks/decision_speed.py

A ResNet-50's training step. Cold: nothing of its structure was seen before. Warm: the same network again with another learning
rate, or with a batch size between three that were traced. And `Guard.max_batch_size`, with nothing known before. Medians.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from perfguard import Guard, TensorSpec, Workload
from perfguard.graph import TraceCache
from perfguard.measure import PeakResidentSet
from perfguard.tables import timm_model


def workload(model: torch.nn.Module, batch: int, lr: float = 0.1) -> Workload:
    """A training step with SGD."""
    return Workload(
        model,
        inputs=(batch, 3, 224, 224),
        targets=TensorSpec((batch,), "int64"),
        loss=F.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=lr, momentum=0.9),
    )


def median_ms(call: Callable[[Any], Any], values: Iterable[Any]) -> float:
    """Median time of ``call`` over ``values``, in milliseconds."""
    times = []
    for value in values:
        start = time.perf_counter()
        call(value)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def main() -> None:
    """Time the decisions and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--gpu", default="a100")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    model = timm_model(arguments.model)
    guard = Guard(arguments.gpu, log=False)
    guard.check(workload(model, 64))  # what is loaded at first use

    def cold(batch: int) -> None:
        guard._traces = TraceCache()
        guard.check(workload(model, batch))

    memory = PeakResidentSet()
    memory.start()
    rows = {"cold, batch 64": median_ms(cold, [64] * arguments.rounds)}
    own = memory.peak_bytes() / 2**20
    for batch in (32, 96, 64, 129):
        guard.check(workload(model, batch))
    rates = [0.1 / (1 + index) for index in range(arguments.rounds)]
    rows["warm, another learning rate"] = median_ms(lambda lr: guard.check(workload(model, 64, lr)), rates)
    between = [33 + index for index in range(arguments.rounds)]
    rows["warm, another batch"] = median_ms(lambda batch: guard.check(workload(model, batch)), between)

    def largest(_round: int) -> None:
        guard._traces = TraceCache()
        guard.max_batch_size(workload(model, 64))

    rows["the largest batch that fits"] = median_ms(largest, range(3))
    table = Table(
        title=f"{arguments.model}, {datetime.date.today()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    table.add_column("decision")
    table.add_column("median ms", justify="right")
    for name, value in rows.items():
        table.add_row(name, f"{value:.1f}")
    Console().print(table)
    print(f"memory of its own: {own:.1f} MiB")


if __name__ == "__main__":
    main()
