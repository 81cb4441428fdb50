"""What stands in for something large in several tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from perfguard import Device, Estimate, Observation, OpGraph, Prediction, resolve_device
from perfguard.measure import Reading

TOY_CPU = Device(
    id="cpu", name="Toy", kind="cpu", memory_bytes=2**34, bandwidth_bytes_per_s=2e10, peak_flops={"fp32": 1e11}, num_sms=2,
    boost_clock_hz=2e9, l2_bytes=2**21, tdp_w=0.0, architecture="toy", context_bytes=0, launch_overhead_s=5e-6, source="made up",
)  # fmt: skip

TOY_GPU = Device(
    id="toy", name="Toy", kind="cuda", memory_bytes=2**30, bandwidth_bytes_per_s=1e11, peak_flops={"fp32": 1e12, "fp16": 4e12},
    num_sms=8, boost_clock_hz=1e9, l2_bytes=2**20, tdp_w=50.0, architecture="toy", context_bytes=2**20, launch_overhead_s=5e-6,
    source="made up",
)  # fmt: skip

BARE_A100 = replace(resolve_device("a100"), context_bytes=0)
"""An A100 whose driver takes nothing for itself, for budgets of a few KiB: the guard refuses what a context alone exceeds."""


STEP_OF_10_MS = Estimate(0.01, 0.01)


@dataclass(eq=False)
class ReplayPredictor:
    """A double: memory is the replay's peak and a step takes 10 ms, both known to 1%. Keeps what it was given to learn from."""

    memory: Estimate | None = None
    """Of every step, in place of the replay's peak."""
    step_time: Estimate = STEP_OF_10_MS
    factor: float = 1.0
    """On the replay's peak."""
    num_asked: int = 0
    learnt: list[Observation] = field(default_factory=list)
    name: ClassVar[str] = "replay-1"

    def predict(self, graph: OpGraph, device: Device, *, steps: int | None = None) -> Prediction:
        self.num_asked += 1
        total_time = None if steps is None else self.step_time.scaled(steps)
        replayed = Estimate.of_physics(graph.peak_live_bytes, 0.01, "tensors that live at once")
        memory = self.memory or replayed.then("factor", "of the double", median=self.factor * replayed.median)
        return Prediction(memory, self.step_time, total_time, self.name, device.id, trained_on_device=True)

    def fine_tune(self, observations: Sequence[Observation]) -> None:
        self.learnt = list(observations)


class PretendedGpuProbe:
    """A double of GpuProbe: what runs on the processor counts as run on the GPU that was named. It measures no memory."""

    def __init__(self, context_bytes: int) -> None:
        self.context_bytes = context_bytes

    def start(self) -> None:
        pass

    def stamp(self) -> None:
        return None

    def read(self) -> Reading:
        return Reading("pretended")

    def finish(self) -> Reading:
        return self.read()
