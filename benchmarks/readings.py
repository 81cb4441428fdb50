"""How wide the intervals of a guard are on this CPU after like readings, after an outlier among them, and across sizes.

    python benchmarks/readings.py

A guard with an empty log judges perceptrons and learns from readings that are made up: what it predicts without any, times the
same factor, with the scatter of equal runs of that size (`perfguard/physics.py`). So the truth is known. Shown are the
90% intervals of the peak memory and the step time, of a perceptron that was read, and of one like those that were read. "Widest"
is of some draws of the scatter.
The last rows are of a network a thousand times as large as eight tiny ones that were read: these grew by 3 to 10 MiB, which no
layer explains.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from _record import parser_of, show
from torch import nn

from perfguard import Estimate, Guard, TensorSpec, Workload, resolve_device
from perfguard.measure import Measurement
from perfguard.quantities import Quantity
from perfguard.verdict import Decision

_FACTOR: Mapping[Quantity, float] = {"memory": 1.1, "step_time": 1.2}
"""Truth by prediction: this machine is not the one that the weights know."""
_SCATTER: Mapping[Quantity, float] = {"memory": 0.01, "step_time": 0.03}
"""Standard deviation of the logarithm of equal readings."""
_OUTLIER = 1.4
_MIB = 2**20


def perceptron(*widths: int, batch: int = 64) -> Workload:
    """Training of a perceptron by Adam."""
    with torch.device("meta"):
        sizes = [256, *widths]
        layers = [each for one, other in itertools.pairwise(sizes) for each in (nn.Linear(one, other), nn.ReLU())]
        model = nn.Sequential(*layers, nn.Linear(sizes[-1], 10))
    return Workload(model, (batch, 256), TensorSpec((batch,), "int64"), F.cross_entropy, torch.optim.Adam)


class Widths(NamedTuple):
    """Half the 90% interval, as a share of the median."""

    memory: float
    step_time: float


def width_of(estimate: Estimate) -> float:
    """How far the upper end of the 90% interval is above the median."""
    return estimate.interval()[1] / estimate.median - 1


class Study:
    """A guard of this CPU with an empty log, and what it has learnt so far."""

    def __init__(self, seed: int = 0) -> None:
        self._guard = Guard("cpu", memory_budget=0.9, log=False)
        self._unlearnt = Guard("cpu", memory_budget=0.9, log=False)
        self._random = random.Random(seed)

    def widths(self, workload: Workload) -> Widths:
        """The intervals of ``workload``."""
        predicted = self._decide(workload).verdict.predicted
        return Widths(width_of(predicted["memory"]), width_of(predicted["step_time"]))

    def read(self, workload: Workload, *, times: float = 1.0) -> None:
        """Learn from a reading that is ``times`` the truth."""
        decision = self._decide(workload)
        predicted = self._unlearnt.decide(workload).verdict.predicted
        memory, step_s = (
            predicted[name].median * _FACTOR[name] * times * math.exp(self._random.gauss(0, _SCATTER[name])) for name in _FACTOR
        )
        self._learn(decision, memory, step_s)

    def read_memory(self, workload: Workload, num_bytes: float) -> None:
        """Learn from a reading of memory, in a step of a millisecond."""
        self._learn(self._decide(workload), num_bytes, 1e-3)

    def _decide(self, workload: Workload) -> Decision:
        return self._guard.decide(workload, study="readings")

    def _learn(self, decision: Decision, memory: float, step_s: float) -> None:
        device = resolve_device("cpu")
        measurement = Measurement(
            status="ok",
            device_id=device.id,
            device_name=device.name,
            peak_memory_bytes=round(memory),
            step_time_s=step_s,
            total_time_s=100 * step_s,
            num_steps=100,
            method="vmhwm",
            framework=f"torch{torch.__version__}",
        )
        self._guard.learn(decision, measurement)


def row(name: str, found: Sequence[Widths]) -> list[str]:
    """A row of the table."""
    cells = [f"±{value:.1%}" for values in zip(*found, strict=True) for value in (statistics.median(values), max(values))]
    return [name, *cells]


def after(times: Sequence[float], *, seed: int, is_same: bool) -> Widths:
    """The intervals of a network after readings of it, or of others like it, each so many ``times`` the truth."""
    study = Study(seed)
    asked = perceptron(1184, 1024)
    for at, each in enumerate(times):
        study.read(asked if is_same else perceptron(1024 + 64 * at, 1024), times=each)
    return study.widths(asked)


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--draws", type=int, default=5)
    arguments = parser.parse_args()
    draws = range(arguments.draws)
    like, outlier = [1.0] * 5, [1.0, 1.0, _OUTLIER, 1.0, 1.0]
    tiny, large = Study(), perceptron(4096, 4096)
    before = tiny.widths(large)
    for number, mib in enumerate((6.2, 9.2, 9.2, 6.2, 3.3, 3.3, 6.2, 6.2)):
        tiny.read_memory(perceptron(8 + number), mib * _MIB)
    rows = [
        row("none", [after([], seed=0, is_same=True)]),
        row("five of the same network", [after(like, seed=seed, is_same=True) for seed in draws]),
        row("the same, one of them +40%", [after(outlier, seed=seed, is_same=True) for seed in draws]),
        row("five of other networks like it", [after(like, seed=seed, is_same=False) for seed in draws]),
        row("the same, one of them +40%", [after(outlier, seed=seed, is_same=False) for seed in draws]),
        row("a large network: none", [before]),
        row("a large network: eight of tiny ones", [tiny.widths(large)]),
    ]
    show("readings", ["readings", "memory, median", "widest", "step time, median", "widest"], rows, record=arguments.record)


if __name__ == "__main__":
    main()
