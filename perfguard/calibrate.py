"""Calibration: steps of PerfGuard's own, run on this machine's device, from which every guard of the device learns.

They are trials of a study like any other, in the same log. The next one is the step from which most can be learnt about the
times of all of them, by the predictor's own variance.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import nn

from perfguard.exceptions import MeasuringError
from perfguard.guard import Guard
from perfguard.learning import CALIBRATION, assess
from perfguard.measure import Measurement, Run
from perfguard.measure.step import run_steps, step_of
from perfguard.predictor import DEFAULT_PREDICTOR, Observation, Prediction, Predictor
from perfguard.workload import Workload, build_workload

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.graph import OpGraph
    from perfguard.log import MeasurementStore


@dataclass(slots=True, eq=False)
class CalibrationStep:
    """A step that may run, and its cost if it did."""

    params: Mapping[str, Any]
    """Network, width, batch, mode and precision."""
    workload: Workload
    """On the meta device."""
    graph: OpGraph
    before: Prediction
    """From before the calibration."""
    problem: str = ""
    """Why it was left out. Empty: it ran, or there was no time for it."""
    measurement: Measurement | None = None
    """None: it did not run."""
    after: Prediction | None = None
    """From the runs of all other steps. None: it did not run to its end."""


def calibrate(
    device: Device, log: MeasurementStore, *, seconds: float = 60.0, predictor: str | Predictor = DEFAULT_PREDICTOR
) -> list[CalibrationStep]:
    """Run steps for ``seconds``, log what each costs, and return all that might have run. Ctrl-C ends it early.

    A step is left out if it may take a quarter of a second, or half of the free memory.

    Raises:
        MeasuringError: if no step could be measured.
    """
    free_bytes = psutil.virtual_memory().available if device.kind == "cpu" else torch.cuda.mem_get_info()[0]
    budget_bytes = free_bytes // 2 + device.context_bytes
    guard = Guard(device, memory_budget=budget_bytes, step_time_budget=0.25, predictor=predictor, log=log, refine=False)
    workloads = ((params, build_workload(build, params)) for params in candidates(device))
    graphs = ((params, workload, guard.trace(workload)) for params, workload in workloads)
    steps = [CalibrationStep(params, workload, graph, guard.predict(graph)) for params, workload, graph in graphs]
    believed: Sequence[Observation] = assess(log.observations(device), study=CALIBRATION).observations
    supposes = copy.deepcopy(guard.predictor)  # the guard's own learns what was measured, and nothing else

    def variance_after(step: CalibrationStep) -> float:
        """Variance of the times of all steps, if ``step`` ran and took what is predicted."""
        predicted = guard.predict(step.graph)
        memory_bytes, time_s = int(predicted.peak_memory.median), predicted.step_time.median
        measurement = Measurement("ok", device.id, device.name, memory_bytes, time_s, time_s, 1, "", "")
        regime = max((run.regime for run in believed), default=0)  # what the next run has, if nothing changes
        supposes.fine_tune([*believed, Observation(step.graph, device, measurement, regime=regime)])
        return sum(supposes.predict(other.graph, device).step_time.log_sigma ** 2 for other in steps)

    def fits(step: CalibrationStep) -> bool:
        verdict = guard.preview(step.workload, study=CALIBRATION)
        step.problem = verdict.reason if verdict.action == "prune" else ""
        return not step.problem

    waiting, launched, generator = list(steps), dict[str, CalibrationStep](), random.Random(0)
    ends_at = time.monotonic() + seconds
    with suppress(KeyboardInterrupt):  # the log has what was measured
        while (fitting := list(filter(fits, waiting))) and time.monotonic() < ends_at:
            # The best of four drawn is nearly as good as the best of all, in a tenth of the time (Mirzasoleiman et al. 2015).
            step = min(generator.sample(fitting, min(4, len(fitting))), key=variance_after)
            waiting.remove(step)
            propose = functools.partial(build_workload, build, step.params)
            decision = guard.decide(propose, study=CALIBRATION, trial=len(launched), params=step.params)
            launched[decision.id] = step
            step.measurement = measured_step(functools.partial(build, step.params), device)
            guard.learn(decision, step.measurement)
            believed = assess(log.observations(device), study=CALIBRATION).observations
    for run in believed:
        if run.decision_id in launched and run.measurement.status == "ok":
            step = launched[run.decision_id]
            others = [other for other in believed if other.graph.content_hash != run.graph.content_hash]
            supposes.fine_tune(others)
            step.after = supposes.predict(run.graph, device) if others else step.before
    if not any(step.after for step in steps):
        problems = (step.problem or (step.measurement.note if step.measurement else "") for step in steps)
        problem = next(filter(None, problems), "there was no time for one")
        raise MeasuringError(f"No step was measured on {device.name}: {problem}.")
    return steps


def measured_step(make: Callable[[], Workload], device: Device) -> Measurement:
    """Make a workload on ``device``, and measure its step. What fails is in the measurement's note."""
    run, on_gpu = Run(device), device.kind == "cuda"
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
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
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
