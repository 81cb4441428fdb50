"""How long does a decision take, from the live module to the verdict?

    OMP_NUM_THREADS=1 python benchmarks/decision_speed.py

A ResNet-50's training step. Cold: nothing of it was seen before. Equal: the same network again with another learning rate, which
needs no trace. Another batch, optimizer or precision is traced. And `Guard.max_batch_size`, with nothing known before. Medians of
processor time, which does not count what other processes take.
"""

from __future__ import annotations

import functools
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from _record import parser_of, show

from perfguard import Guard, TensorSpec, Workload
from perfguard.graph import TraceCache
from perfguard_research.networks import timm_model

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
OPTIMIZERS = ("Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adadelta", "Adamax")
HALF = ("amp-bf16", "amp-fp16", "bf16", "fp16")


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


def median_ms(call: Callable[[Any], Any], values: Iterable[Any]) -> float:
    """Return the median processor time of ``call`` for one of ``values``, in milliseconds."""
    times = []
    for value in values:
        start = time.process_time()
        call(value)
        times.append(time.process_time() - start)
    return 1e3 * statistics.median(times)


def main() -> None:
    """Time the decisions and show the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--gpu", default="a100")
    parser.add_argument("--rounds", type=int, default=20)
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
    rows = {"cold, batch 64": median_ms(cold, [{}] * arguments.rounds)}
    half = [{"precision": precision} for precision in HALF]
    median_ms(cold, half)  # what is loaded at first use
    rows["cold, half precision"] = median_ms(cold, half * max(arguments.rounds // 4, 1))
    check({"batch": 64})
    rates = [functools.partial(torch.optim.SGD, lr=0.1 / (2 + index), momentum=0.9) for index in rounds]
    rows["equal, another learning rate"] = median_ms(check, [{"batch": 64, "optimizer": rate} for rate in rates])
    rows["another batch"] = median_ms(check, [{"batch": 65 + index} for index in rounds])
    rows["another optimizer"] = median_ms(check, [{"batch": 64, "optimizer": getattr(torch.optim, name)} for name in OPTIMIZERS])
    rows["another precision"] = median_ms(check, [{"batch": 64, "precision": precision} for precision in HALF])

    def largest(_round: int) -> None:
        guard._traces = TraceCache()
        guard.max_batch_size(workload(model, 64))

    rows["the largest batch that fits"] = median_ms(largest, range(3))
    show("decisions", ["decision", "ms"], [[name, f"{ms:.1f}"] for name, ms in rows.items()], record=arguments.record)


if __name__ == "__main__":
    main()
