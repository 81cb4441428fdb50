"""One configuration, really run and measured."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from perfguard.devices import Device
from perfguard.measure import Measurement, Run, status_of
from perfguard.workload import TensorSpec, Workload
from perfguard_research.collect.backend import Backend
from perfguard_research.tables.recipe import OPTIMIZERS, Recipe

_WARM_UP_STEPS = 3
"""The first makes the optimizer's state and chooses algorithms, the second finds the allocator's cache as the first left it."""
_TIMED_S = 0.2
_LONG_S = 1.5
"""The driver's counters of energy and utilisation move a few times a second."""
_STEPS = 4, 200
_AUTOCAST = {"amp-fp16": torch.float16, "amp-bf16": torch.bfloat16}
_MIB = 2**20

Row = dict[str, str]


def run_recipe(recipe: Recipe, device: Device, place: Backend, *, long: bool = False) -> Row:
    """Run ``recipe`` and return its cost as columns of a row. An error of the run is its status, never raised.

    Args:
        recipe: what to run.
        device: on which it runs.
        place: how to get at it.
        long: run it long enough for the driver to measure energy and utilisation. This matters only where there is a driver.
    """
    leftovers = place.start_afresh(recipe)
    run = Run(device, probe=place.probe())
    timed: Row = {}
    torch.manual_seed(0)
    try:
        with run:
            timed = _timed(_make_step(recipe, place.torch_device), run, place, long=long)
    except Exception as error:
        if run.measurement is None:  # it did not even begin; else the measurement has its status and the error's text
            return {"status": status_of(error), "note": f"{type(error).__name__}: {error}", "run_s": ""}
    if recipe.compiled:
        torch.compiler.reset()
    assert run.measurement is not None
    return _row(run.measurement, leftovers) | timed


def _timed(step: Callable[[], None], run: Run, place: Backend, *, long: bool) -> Row:
    window = place.window() if long else None
    for _ in range(_WARM_UP_STEPS):
        step()
    place.synchronize()
    start = time.perf_counter()
    step()
    place.synchronize()
    # A GPU's steps are launched faster than they run, so their number is settled beforehand.
    wanted = (_TIMED_S if window is None else _LONG_S) / max(time.perf_counter() - start, 1e-6)
    steps = int(min(max(wanted, _STEPS[0]), _STEPS[1] if window is None else math.inf))
    if window is not None:
        window.start()
    run.step()
    for _ in range(steps):
        step()
        run.step()
    place.synchronize()
    row = {"num_steps": str(steps)}
    if window is not None:
        reading = window.finish()
        row["gpu_util"] = _text(reading.sm_utilisation, 100)
        row["step_energy_j"] = _text(reading.energy_j, 1 / steps)
        row["sm_clock_mhz"] = _text(reading.sm_clock_hz, 1e-6)
    durations = run.step_durations_s
    if len(durations) > 1:
        low, _, high = statistics.quantiles(durations, n=4)
        row["step_time_iqr_ms"] = _text(high - low, 1e3)
    return row


def _row(measurement: Measurement, leftovers: str) -> Row:
    ok = measurement.status == "ok"
    return {
        "status": measurement.status,
        "peak_memory_mib": _text(measurement.peak_memory_bytes or None, 1 / _MIB),
        "allocated_peak_mib": _text(measurement.allocated_peak_bytes, 1 / _MIB),
        "reserved_peak_mib": _text(measurement.reserved_peak_bytes, 1 / _MIB),
        "step_time_ms": _text(measurement.step_time_s if ok else None, 1e3),
        "run_s": _text(measurement.total_time_s, 1),
        "sm_clock_mhz": _text(measurement.sm_clock_hz, 1e-6),
        "throttled": measurement.throttled or "",
        "oom_retries": "" if measurement.oom_retries is None else str(measurement.oom_retries),
        "method": measurement.method,
        "confidence": measurement.confidence or "",
        "framework": measurement.framework,
        "driver": measurement.driver or "",
        "note": "; ".join(filter(None, [measurement.note, leftovers])),
    }


def _text(value: float | None, scale: float) -> str:
    return "" if value is None else f"{value * scale:.6g}"


def _make_step(recipe: Recipe, device: torch.device) -> Callable[[], None]:
    """One training step, or one inference, of ``recipe``: what the trace of its workload says is launched."""
    with device:
        model = recipe.make_model()
    workload = recipe.workload(model)
    if recipe.layout == "nhwc":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.train(recipe.mode == "train")
    called: Callable[..., Any] = torch.compile(model) if recipe.compiled else model
    tensors = functools.partial(_tensors, high=recipe.num_indices, device=device, layout=recipe.layout)
    inputs, targets = tensors(workload.inputs), tensors(workload.targets)
    if recipe.mode == "train":
        return _training(recipe, workload, model, called, (inputs, targets), device)

    def infer() -> None:
        with torch.no_grad(), _autocast(recipe, device):
            _call(called, inputs)

    return infer


def _training(
    recipe: Recipe, workload: Workload, model: nn.Module, called: Callable[..., Any], batch: Any, device: torch.device
) -> Callable[[], None]:
    inputs, targets = batch
    optimizer: torch.optim.Optimizer = OPTIMIZERS[recipe.optimizer or ""](model.parameters())
    scales = recipe.precision == "amp-fp16" and device.type == "cuda"
    scaler = torch.amp.GradScaler(device.type, enabled=scales)

    def train() -> None:
        optimizer.zero_grad()
        with _autocast(recipe, device):
            output = _call(called, inputs)
            loss = _loss(workload, output, targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return train


def _loss(workload: Workload, output: Any, targets: Any) -> torch.Tensor:
    if workload.loss is None:
        loss: torch.Tensor = output["loss"] if isinstance(output, Mapping) else output.loss
        return loss
    return workload.loss(output) if targets is None else workload.loss(output, targets)


def _call(called: Callable[..., Any], inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return called(**inputs)
    return called(*inputs) if isinstance(inputs, list) else called(inputs)


def _autocast(recipe: Recipe, device: torch.device) -> torch.autocast:
    dtype = _AUTOCAST.get(recipe.precision)
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def _tensors(spec: Any, *, high: int, device: torch.device, layout: str) -> Any:
    """Random tensors as a Workload describes them: zeros would cost less power, and on some cards less time."""
    again = functools.partial(_tensors, high=high, device=device, layout=layout)
    if spec is None:
        return None
    if isinstance(spec, dict):
        return {name: again(value) for name, value in spec.items()}
    if isinstance(spec, list):
        return [again(value) for value in spec]
    if isinstance(spec, TensorSpec):
        return torch.randint(high, spec.shape, dtype=getattr(torch, spec.dtype), device=device)
    tensor = torch.randn(spec, device=device)
    return tensor.to(memory_format=torch.channels_last) if layout == "nhwc" and tensor.dim() == 4 else tensor
