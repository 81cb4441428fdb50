"""Physical lower bounds on what a step needs on a device, independent of the predictor.

:func:`least_reading` is a lower bound on a measurement. No correct reading is below it, so it leaves out all that a run can save.
Recomputation saves activations, caches and fusion save traffic, and a faster algorithm saves FLOPs.

:class:`LeastMemory` is what the device must hold at once: the peak of live bytes, with activations. A step whose least memory is
over the budget is hopeless.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from perfguard.devices import catalog
from perfguard.predictor import HALF_INTERVAL, Estimate, Prediction
from perfguard.quantities import format_bytes

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.devices.catalog import DeviceKind
    from perfguard.exceptions import TooLargeError
    from perfguard.graph import OpGraph
    from perfguard.predictor import Target

_SHARE_OF_FLOPS = {"conv": 0.25, "conv_backward": 0.25, "attention": 0.5, "matmul": 1.0, "rnn": 1.0}
"""Share of an operator's FLOPs that the fastest algorithm computes, by kind of operator: a quarter of a convolution's (Winograd's
F(4x4, 3x3); Lavin and Gray 2016), half of an attention's (a causal mask that is a tensor; graphs count a kernel that
knows of it exactly)."""
NAME = "lower-bound"
"""Name of the predictor in a verdict by :class:`LeastMemory` alone."""
HOPELESS = 4
"""From this many times the budget, the bound alone decides. Below that, searchers need the distance from feasibility. So the
predictor gives the numbers, and the bound only overrules a launch."""

_RESIDENT_LOG_SIGMA = 0.05
"""Standard deviation of the logarithm of a resident set's peak, from one equal trial to the next in a process. The heap keeps
freed blocks between live ones, so the peak depends on what ran before. From `benchmarks/resident_set.py`."""
_RESIDENT_SIGMA_BYTES = 2.5 * 2**20
"""The most that this is in bytes: blocks of 32 MiB or more never come from the heap (mallopt(3), M_MMAP_THRESHOLD)."""

_NOUNS = {
    "PARAMETER": "parameters", "BUFFER": "buffers", "INPUT": "inputs", "GRADIENT": "gradients",
    "OPTIMIZER_STATE": "optimizer states", "ACTIVATION": "saved activations", "TEMPORARY": "temporary tensors",
}  # fmt: skip
"""In words, by the name of the StorageKind."""


def least_reading(target: Target, graph: OpGraph, device: Device, *, idle: bool = False) -> float:
    """Return the least that a measurement of ``graph`` on ``device`` can show: bytes at the peak, or seconds of a step.

    Args:
        target: "memory" or "time", as in a Measurement. On a GPU, memory is what the process takes. On a CPU, it is the growth
            of the resident set.
        graph: one step.
        device: on which it runs.
        idle: whether the memory reading shows that nothing ran. Then the bound on a CPU's time is higher.
    """
    from perfguard.graph import StorageKind  # imports torch

    updating = StorageKind.GRADIENT, StorageKind.OPTIMIZER_STATE
    if target == "memory" and device.kind == "cuda":
        # The allocator counts them exactly; recomputation saves most activations.
        return 0.9 * graph.most_alive_bytes(StorageKind.PARAMETER, StorageKind.BUFFER, *updating)
    if target == "memory":
        # The resident set grows by less than the step makes: the model and its data may be older than the run, and some
        # allocators use memory again that was mapped before.
        made_bytes = graph.most_alive_bytes(*updating, StorageKind.ACTIVATION, StorageKind.TEMPORARY)
        return max(0.5 * graph.most_alive_bytes(*updating), 0.1 * made_bytes)
    launch_s = 0.5 * device.launch_overhead_s  # a step launches at least one operator
    shares = [_SHARE_OF_FLOPS.get(op.kind, 0.0) for op in graph.ops]
    product_flops = float(graph.costs[0].astype(np.float64) @ np.array(shares)) if shares else 0.0
    if device.kind == "cpu":
        products_s = product_flops / device.peak_flops["fp32"] if graph.precision == "fp32" else 0.0
        # The rates are measured, at times while other work runs. Honest steps take half of their products at the measured rate
        # and more (2 busy cores, 10 networks, 2026-11-22).
        return max(launch_s, products_s / (3.0 if idle else 10.0))
    # A card may run 25% above its boost clock. Rates of a card that is not in the catalog are guesses.
    faster = 1.25 if device.id.partition(":")[0] in catalog() else 12.5
    products_s = product_flops / max(device.peak_flops.values())
    traffic_bytes = max(0.0, graph.most_alive_bytes(StorageKind.GRADIENT) - device.l2_bytes)
    return max(launch_s, products_s / faster, traffic_bytes / device.bandwidth_bytes_per_s / faster)


def within_bounds(prediction: Prediction, graph: OpGraph, device: Device, *, widening: Mapping[Target, float]) -> Prediction:
    """Return ``prediction`` as a guard issues it: as unsure as readings have shown, and never below what a reading can be.

    Args:
        prediction: of a predictor.
        graph: one step.
        device: on which it runs.
        widening: factors on its standard deviations, see :func:`perfguard.learning.interval_widening`. Empty: none.
    """
    scatter = scatter_of_readings(prediction.peak_memory.median, device.kind)
    widened = prediction.widened(widening, least_memory_log_sigma=scatter)
    return widened.at_least(least_reading("memory", graph, device), least_reading("time", graph, device))


def scatter_of_readings(memory_bytes: float, kind: DeviceKind) -> float:
    """Return the standard deviation of the logarithm of a reading of ``memory_bytes``, when equal trials run on a device.

    On a GPU, an allocator that is given equal requests gives equal answers: 0.
    """
    return min(_RESIDENT_LOG_SIGMA, _RESIDENT_SIGMA_BYTES / memory_bytes) if kind == "cpu" else 0.0


def least_exceeding(limit_bytes: float, kind: DeviceKind) -> float:
    """Return the bytes above which a reading of a trial that has its result exceeds ``limit_bytes`` with a chance of 95%."""
    return limit_bytes * math.exp(HALF_INTERVAL * scatter_of_readings(limit_bytes, kind))


@dataclass(frozen=True, slots=True)
class LeastMemory:
    """Lower bound on the memory of a step: its live bytes without an allocator's slack, workspaces and the context."""

    num_bytes: int
    parts: Mapping[str, int]
    """Its bytes by kind of tensor, in words. Empty: it is one tensor alone."""
    step_time_s: float
    """Time of the step at the device's peak rates, in seconds."""

    @staticmethod
    def of(graph: OpGraph, device: Device) -> LeastMemory:
        """The bound for ``graph``; see :attr:`OpGraph.least_bytes_by_kind`."""
        from perfguard.graph import roofline_s  # imports torch

        parts = {_NOUNS[kind.name]: num_bytes for kind, num_bytes in graph.least_bytes_by_kind.items()}
        return LeastMemory(sum(parts.values()), parts, float(roofline_s(graph, device).sum()))

    @staticmethod
    def behind(error: TooLargeError, device: Device) -> LeastMemory:
        """The bound for a workload with a tensor that is too large to describe: this tensor, written once."""
        return LeastMemory(error.num_bytes, {}, error.num_bytes / device.bandwidth_bytes_per_s)

    def __str__(self) -> str:
        largest = sorted((item for item in self.parts.items() if item[1] > self.num_bytes / 100), key=lambda item: -item[1])
        words = ", ".join(f"{noun} {format_bytes(num_bytes)}" for noun, num_bytes in largest) or "one tensor alone"
        return f"at least {format_bytes(self.num_bytes)} ({words})"

    def prediction(self, device: Device, *, steps: int | None, instead_of: Prediction | None = None) -> Prediction:
        """Prediction for a step that does not fit the device: finite, and above the bound with near certainty.

        Args:
            device: which it does not fit.
            steps: steps of the whole trial. None: unknown.
            instead_of: the prediction that the bound overrules, whose account goes on. None: there is none, and the account
                begins with the bound.
        """
        bound = "tensors that live at once do not fit"
        roofline_s = max(self.step_time_s, 1e-9)
        if instead_of is None:
            memory = Estimate.of_physics(self.num_bytes, 0.2, "tensors that live at once")
            step_time = Estimate.of_physics(roofline_s, 0.6, "at the device's peak rates")
        else:
            memory = instead_of.peak_memory
            step_time = instead_of.step_time
        # The peak is above the bound with probability 0.999 (3.1 sigmas), and 1.9 times the bound in the middle. 62 published
        # runs of timm models on an A100 (GPUMemNet) took at least 1.15 times the bound, and 1.8 times in the middle.
        peak_memory = memory.then("least memory", bound, median=self.num_bytes * math.exp(3.1 * 0.2), log_sigma=0.2)
        # One to four times as long as at the peak rates.
        step_time = step_time.then("least memory", bound, median=2.0 * roofline_s, log_sigma=0.6)
        return Prediction(
            peak_memory=peak_memory,
            step_time=step_time,
            total_time=None if steps is None else step_time.scaled(steps),
            predictor=NAME,
            device_id=device.id,
            trained_on_device=True,
        )
