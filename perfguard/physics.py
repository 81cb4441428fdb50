"""Physical lower bounds on what a step needs on a device, independent of the predictor.

:func:`least_reading` is a lower bound on a measurement. No correct reading is below it, so it leaves out all that a run can
save:

    memory, GPU    The parameters, buffers, gradients and optimizer state that are alive at once, less a tenth. The allocator
                   counts them exactly. Activations are left out, because recomputation saves most of them.
    memory, CPU    The larger of two numbers. One is half of the gradients and optimizer state that are alive at once. The other
                   is a tenth of all that the step makes. A CPU's reading is the growth of the resident set since the run began.
                   It does not include older memory, often the model and its data. Some allocators also reuse memory that was
                   mapped before.
    time           The largest of these bounds. Half of one launch, because a step launches at least one operator. On a GPU, the
                   products at the card's fastest rate for any precision, 25% above its boost clock. Convolutions count a quarter
                   of their FLOPs (Winograd's F(4x4, 3x3); Lavin and Gray 2016), and attention counts half (a causal mask). On a
                   GPU, also the time to write the gradients once at the peak bandwidth, as far as the cache does not hold them.
                   Rates of a GPU that is not in the catalog are guesses, so its bounds are a tenth of that. On a CPU, a tenth of
                   the time of the float32 products. Its rates are measured, at times while other work runs, and caches are
                   faster than memory. The bound is a third of that time if the memory reading also shows that nothing ran.

No traffic of activations is counted: caches and fusion save it. Nothing here needs a replay of the allocator.

:class:`LeastMemory` is what the device must hold at once: the peak of live bytes, with activations. A step whose least memory is
over the budget is hopeless.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perfguard.devices import catalog
from perfguard.predictor import Estimate, Prediction
from perfguard.quantities import format_bytes

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.exceptions import TooLargeError
    from perfguard.graph import OpGraph
    from perfguard.predictor import Target

_COUNTED_MEMORY = 0.9
_NEWLY_MAPPED, _MAPPED_OF_ALL = 0.5, 0.1
_SHARE_OF_FLOPS = {"conv": 0.25, "conv_backward": 0.25, "attention": 0.5, "matmul": 1.0, "rnn": 1.0}
"""Share of an operator's FLOPs that the fastest algorithm computes, by kind of operator."""
_OVERCLOCKED = 1.25
_UNSURE_OF_RATES, _UNSURE_WHERE_IDLE = 10.0, 3.0
"""Honest steps take half of their products at the measured rate and more (2 busy cores, 10 networks, 2026-11-22)."""
_SHORTEST_LAUNCH = 0.5

NAME = "lower-bound"
"""Name of the predictor in a verdict by :class:`LeastMemory` alone."""
_NOUNS = {  # by the name of the StorageKind
    "PARAMETER": "parameters",
    "BUFFER": "buffers",
    "INPUT": "inputs",
    "GRADIENT": "gradients",
    "OPTIMIZER_STATE": "optimizer states",
    "ACTIVATION": "saved activations",
    "TEMPORARY": "temporary tensors",
}
_MENTIONED = 0.01
"""Smallest share of the whole that a message mentions."""
HOPELESS = 4
"""From this many times the budget, the bound alone decides. Below that, searchers need the distance from feasibility. So the
predictor gives the numbers, and the bound only overrules a launch."""
_LOG_SIGMA, _SIGMAS_ABOVE = 0.2, 3.1
"""The peak is above the bound with probability 0.999, and 1.9 times the bound in the middle. 62 published runs of timm models on
an A100 (GPUMemNet) took at least 1.15 times the bound, and 1.8 times in the middle."""
_TIME_FACTOR, _TIME_LOG_SIGMA = 2.0, 0.6
"""Median and sigma of the step time relative to the peak rates. A step takes one to four times as long."""


class _Needs(NamedTuple):
    """Lower bounds on a step's needs on any device."""

    held_bytes: float
    """Parameters, buffers, gradients and optimizer state, the most that are alive at once."""
    update_bytes: float
    """Gradients and optimizer state, the most that are alive at once."""
    gradient_bytes: float
    made_bytes: float
    """Peak of live bytes without parameters, buffers and inputs."""
    product_flops: float


def least_reading(target: Target, graph: OpGraph, device: Device, *, idle: bool = False) -> float:
    """Return the least that a measurement of ``graph`` on ``device`` can show: bytes at the peak, or seconds of a step.

    Args:
        target: "memory" or "time", as in a Measurement. On a GPU, memory is what the process takes. On a CPU, it is the growth
            of the resident set.
        graph: one step.
        device: on which it runs.
        idle: whether the memory reading shows that nothing ran. Then the bound on a CPU's time is higher.
    """
    needs = _needs(graph)
    if target == "memory":
        if device.kind == "cuda":
            return _COUNTED_MEMORY * needs.held_bytes
        return max(_NEWLY_MAPPED * needs.update_bytes, _MAPPED_OF_ALL * needs.made_bytes)
    launch_s = _SHORTEST_LAUNCH * device.launch_overhead_s
    if device.kind == "cpu":
        products_s = needs.product_flops / device.peak_flops["fp32"] if graph.precision == "fp32" else 0.0
        return max(launch_s, products_s / (_UNSURE_WHERE_IDLE if idle else _UNSURE_OF_RATES))
    faster = _OVERCLOCKED * (1.0 if device.id.partition(":")[0] in catalog() else _UNSURE_OF_RATES)
    products_s = needs.product_flops / max(device.peak_flops.values())
    traffic_s = max(0.0, needs.gradient_bytes - device.l2_bytes) / device.bandwidth_bytes_per_s
    return max(launch_s, products_s / faster, traffic_s / faster)


def _needs(graph: OpGraph) -> _Needs:
    from perfguard.graph import StorageKind  # imports torch

    update = StorageKind.GRADIENT, StorageKind.OPTIMIZER_STATE
    shares = [_SHARE_OF_FLOPS.get(op.kind, 0.0) for op in graph.ops]
    return _Needs(
        graph.most_alive_bytes(StorageKind.PARAMETER, StorageKind.BUFFER, *update),
        graph.most_alive_bytes(*update),
        graph.most_alive_bytes(StorageKind.GRADIENT),
        graph.most_alive_bytes(*update, StorageKind.ACTIVATION, StorageKind.TEMPORARY),
        float(graph.costs[0].astype(np.float64) @ np.array(shares)) if shares else 0.0,
    )


@dataclass(frozen=True, slots=True)
class LeastMemory:
    """Lower bound on the memory of a step: its live bytes without an allocator's slack, workspaces and the context."""

    num_bytes: int
    in_words: str
    """Its parts, in words."""
    step_time_s: float
    """Time of the step at the device's peak rates, in seconds."""

    @staticmethod
    def of(graph: OpGraph, device: Device) -> LeastMemory:
        """The bound for ``graph``; see :attr:`OpGraph.least_bytes_by_kind`."""
        from perfguard.graph import roofline_s  # imports torch

        parts = graph.least_bytes_by_kind
        total = sum(parts.values())
        largest = sorted((kind for kind in parts if parts[kind] > _MENTIONED * total), key=lambda kind: -parts[kind])
        in_words = ", ".join(f"{_NOUNS[kind.name]} {format_bytes(parts[kind])}" for kind in largest)
        return LeastMemory(total, in_words, float(roofline_s(graph, device).sum()))

    @staticmethod
    def behind(error: TooLargeError, device: Device) -> LeastMemory:
        """The bound for a workload with a tensor that is too large to describe: this tensor, written once."""
        return LeastMemory(error.num_bytes, "one tensor alone", error.num_bytes / device.bandwidth_bytes_per_s)

    def __str__(self) -> str:
        return f"at least {format_bytes(self.num_bytes)} ({self.in_words})"

    def prediction(self, device: Device, *, steps: int | None) -> Prediction:
        """Prediction for a step that does not fit the device: finite, and above the bound with near certainty."""
        step_time = Estimate(max(self.step_time_s, 1e-9) * _TIME_FACTOR, _TIME_LOG_SIGMA)
        return Prediction(
            peak_memory=Estimate(self.num_bytes * math.exp(_SIGMAS_ABOVE * _LOG_SIGMA), _LOG_SIGMA),
            step_time=step_time,
            total_time=None if steps is None else step_time.scaled(steps),
            predictor=NAME,
            device_id=device.id,
            trained_on_device=True,
        )
