"""Calibration: steps of PerfGuard's own, run on this machine's device, from which every guard of the device learns.

They are trials of a study like any other, in the same log.
"""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import nn

from perfguard.exceptions import MeasuringError
from perfguard.guard import Guard
from perfguard.learning import CALIBRATION
from perfguard.measure import Measurement, Run
from perfguard.measure.step import run_steps, step_of
from perfguard.predictor import DEFAULT_PREDICTOR, Predictor
from perfguard.workload import Workload

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.log import MeasurementStore
    from perfguard.record import TrialRecord


def calibrate(
    device: Device, log: MeasurementStore, *, seconds: float = 60.0, predictor: str | Predictor = DEFAULT_PREDICTOR
) -> list[TrialRecord]:
    """Run steps for ``seconds``, and return the records of their trials. Ctrl-C ends it early.

    A step is left out if it probably takes more than a quarter of a second, or half of the free memory.

    Raises:
        MeasuringError: if no step could be measured.
    """
    free_bytes = psutil.virtual_memory().available if device.kind == "cpu" else torch.cuda.mem_get_info()[0]
    budget_bytes = free_bytes // 2 + device.context_bytes
    guard = Guard(device, memory_budget=budget_bytes, step_time_budget=0.25, predictor=predictor, log=log, refine=False)
    steps = list(candidates(device))
    random.Random(0).shuffle(steps)  # the first few are of all networks and sizes
    decided = 0
    ends_at = time.monotonic() + seconds
    with suppress(KeyboardInterrupt):  # the log has what was measured
        for number, params in enumerate(steps):
            if time.monotonic() > ends_at:
                break
            decision = guard.decide(guard.describe(build, params), study=CALIBRATION, trial=number, params=params)
            decided += 1
            if decision.verdict.action == "launch":
                guard.learn(decision, measured_step(functools.partial(build, params), device))
    records = log.records(CALIBRATION, newest=decided)
    if not any(record.status == "ok" for record in records):
        problem = next((record.note or record.reason for record in records), "there was no time for one")
        raise MeasuringError(f"No step was measured on {device.name}: {problem}.")
    return records


def measured_step(make: Callable[[], Workload], device: Device) -> Measurement:
    """Make a workload on ``device``, and measure its step. What fails is in the measurement's note."""
    run = Run(device)
    on_gpu = device.kind == "cuda"
    with suppress(Exception), run:
        with torch.device("cuda" if on_gpu else "cpu"):
            workload = make()
        run_steps(step_of(workload), run, seconds=1.0, synchronize=torch.cuda.synchronize if on_gpu else lambda: None)
    measurement = run.measurement or run.finish("failed")
    # Most of so short a trial is building and warming up. From that, guards would learn a wrong overhead and power of trials.
    steps_s = measurement.num_steps * (measurement.step_time_s or 0.0)
    return replace(measurement, total_time_s=steps_s or measurement.total_time_s, energy_j=None)


# --- The steps ------------------------------------------------------------------------------------------------------------------


def candidates(device: Device) -> Iterator[dict[str, Any]]:
    """The parameters of every step that may run on ``device``. The smallest are all launches, the largest are all arithmetic."""
    half = next((f"amp-{name}" for name in ("bf16", "fp16") if device.kind == "cuda" and name in device.peak_flops), None)
    for network, (_, _, sizes) in _NETWORKS.items():
        for (width, batch_size), mode, precision in itertools.product(sizes, ("train", "infer"), filter(None, ("fp32", half))):
            yield {"network": network, "width": width, "batch_size": batch_size, "mode": mode, "precision": precision}


def build(params: Mapping[str, Any]) -> Workload:
    """The step of ``params``, as a study's `build` describes it."""
    make, optimizer, _ = _NETWORKS[params["network"]]
    network, sample = make(params["width"])
    return Workload(
        network,
        inputs=(params["batch_size"], *sample),
        loss=_mean_square,
        optimizer=optimizer,
        mode=params["mode"],
        precision=params["precision"],
        retain="nothing",
        batch_on="device",
    )


def _mean_square(output: Any) -> torch.Tensor:
    first: torch.Tensor = output[0] if isinstance(output, tuple) else output  # nn.LSTM returns its state, too
    return first.float().square().mean()


_Made = tuple[nn.Module, tuple[int, ...]]
"""A network, and the shape of one sample of its input."""


def _perceptron(width: int) -> _Made:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU()))), (width,)


def _convolution(inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1) -> nn.Module:
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU())


def _convolutional(width: int) -> _Made:
    stages = ((_convolution(n, 2 * n, 3, stride=2), _convolution(2 * n, 2 * n, 3)) for n in (width, 2 * width, 4 * width))
    return nn.Sequential(_convolution(3, width, 7, stride=2), *itertools.chain(*stages)), (3, 64, 64)


def _depthwise(width: int) -> _Made:
    stages = (
        (_convolution(n, 4 * n, 1), _convolution(4 * n, 4 * n, 5, stride=2, groups=4 * n), _convolution(4 * n, 2 * n, 1))
        for n in (width, 2 * width, 4 * width)
    )
    return nn.Sequential(_convolution(3, width, 3, stride=2), *itertools.chain(*stages)), (3, 96, 96)


class _Block(nn.Module):
    """A transformer's block. PyTorch's own runs another kernel in inference than its trace shows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, -1, 32)).permute(2, 0, 3, 1, 4)
        y: torch.Tensor = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        z: torch.Tensor = y + self.mlp(y)
        return z


def _transformer(width: int) -> _Made:
    return nn.Sequential(*(_Block(width) for _ in range(4))), (64, width)


def _recurrent(width: int) -> _Made:
    return nn.LSTM(width, width, num_layers=2, batch_first=True), (32, width)


_SGD = functools.partial(torch.optim.SGD, lr=1e-4, momentum=0.9)
_ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4)
_NETWORKS: dict[str, tuple[Callable[[int], _Made], Callable[..., torch.optim.Optimizer], tuple[tuple[int, int], ...]]] = {
    "perceptron": (_perceptron, _ADAMW, ((128, 8), (512, 256), (2048, 32), (8192, 1024))),
    "convolutional": (_convolutional, _SGD, ((8, 4), (16, 32), (64, 8), (128, 128))),
    "depthwise": (_depthwise, _SGD, ((8, 4), (16, 16), (32, 2), (64, 128))),
    "transformer": (_transformer, _ADAMW, ((64, 2), (128, 8), (512, 2), (1024, 128))),
    "recurrent": (_recurrent, _ADAMW, ((64, 4), (128, 32), (512, 8), (1024, 256))),
}
"""How each is made from its width, its optimizer, and its widths with their batches."""
