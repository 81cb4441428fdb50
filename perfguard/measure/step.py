"""The step of a Workload, run for real on random data: what `perfguard calibrate` and `perfguard collect` measure."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from perfguard.workload import TensorSpec, Workload, mapped

if TYPE_CHECKING:
    from perfguard.measure.run import Run

AUTOCAST = {"amp-fp16": torch.float16, "amp-bf16": torch.bfloat16}


def step_of(workload: Workload, *, high: int = 2) -> Callable[[], None]:
    """Return a function that runs one step of ``workload`` on the device of its model, with the same batch each time.

    Args:
        workload: a model with parameters, one optimizer, and a micro-batch of shapes or TensorSpecs. Its ``step``,
            ``accumulation``, ``ema``, ``ddp`` and pure half precision are not for it.
        high: the integers of the batch lie in [0, high).
    """
    model = workload.model
    loss_of = workload.loss
    device = next(model.parameters()).device
    if workload.layout == "nhwc":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.train(workload.mode == "train")
    called: Callable[..., Any] = torch.compile(model) if workload.compiled else model

    def random(spec: TensorSpec) -> torch.Tensor:  # zeros would cost less power, and on some cards less time
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if not dtype.is_floating_point:
            return torch.randint(high, spec.shape, dtype=dtype, device=device)
        tensor = torch.randn(spec.shape, dtype=dtype, device=device)
        return tensor.to(memory_format=torch.channels_last) if workload.layout == "nhwc" and tensor.dim() == 4 else tensor

    inputs, targets = (None if batch is None else mapped(batch, random) for batch in (workload.inputs, workload.targets))
    dtype = AUTOCAST.get(workload.precision)
    autocast = functools.partial(torch.autocast, device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)

    def forward() -> Any:
        if isinstance(inputs, dict):
            return called(**inputs)
        return called(*inputs) if isinstance(inputs, list) else called(inputs)

    def infer() -> None:
        with torch.no_grad(), autocast():
            forward()

    if workload.mode == "infer":
        return infer
    make: Any = workload.optimizer or torch.optim.SGD
    optimizer: torch.optim.Optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler(device.type, enabled=workload.precision == "amp-fp16" and device.type == "cuda")

    def loss() -> torch.Tensor:  # what it returns is all that the backward pass gets, as in Workload(retain="nothing")
        output = forward()
        if loss_of is None:  # the model's own
            own: torch.Tensor = output["loss"] if isinstance(output, Mapping) else output.loss
            return own
        made: torch.Tensor = loss_of(output) if targets is None else loss_of(output, targets)
        return made

    def train() -> None:
        optimizer.zero_grad()
        with autocast():
            value = loss()
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()

    return train


def run_steps(step: Callable[[], None], run: Run, *, seconds: float, synchronize: Callable[[], object]) -> int:
    """Warm up, mark steps of ``run`` for about ``seconds``, at least 4 and at most 200, and return their number.

    ``synchronize`` waits until the device has done all that was launched.
    """
    # The first makes the optimizer's state and chooses algorithms, the second finds the cache as the first left it.
    for _ in range(3):
        step()
    synchronize()
    start = time.perf_counter()
    step()
    synchronize()
    # A GPU's steps are launched faster than they run, so their number is settled beforehand.
    number = int(min(max(seconds / max(time.perf_counter() - start, 1e-6), 4), 200))
    run.step()
    for _ in range(number):
        step()
        run.step()
    synchronize()
    return number
