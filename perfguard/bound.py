"""What a step needs at least: a bound that asks no allocator, no table and no network, so that the hopeless is known at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perfguard.predictor import Estimate, Prediction
from perfguard.quantities import format_bytes

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.exceptions import TooLargeError
    from perfguard.graph import OpGraph

NAME = "lower-bound"
"""Of the predictor, where the bound alone answers."""
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
"""Of the whole: smaller parts are not spoken of."""
HOPELESS = 4
"""So many times over the budget the bound alone answers. Nearer to it, where searchers learn from how far a proposal is from
feasible, the predictor gives the numbers, and the bound only overrules a launch."""
_LOG_SIGMA, _SIGMAS_ABOVE = 0.2, 3.1
"""The peak is above the bound with probability 0.999, and 1.9 times the bound in the middle. 62 published runs of timm models on
an A100 (GPUMemNet) took at least 1.15 times the bound, and 1.8 times in the middle."""
_TIME_FACTOR, _TIME_LOG_SIGMA = 2.0, 0.6
"""Of the time at the device's peak rates: a step takes one to four times as long."""


@dataclass(frozen=True, slots=True)
class LeastMemory:
    """The memory that a step holds at once, whoever hands it out: without an allocator's slack, workspaces and the context."""

    num_bytes: int
    in_words: str
    """What it is made of."""
    step_time_s: float
    """What the step takes at the peak rates of the device, seconds."""

    @staticmethod
    def of(graph: OpGraph, device: Device) -> LeastMemory:
        """Of ``graph``; see :attr:`OpGraph.least_bytes_by_kind`."""
        from perfguard.graph import roofline_s

        parts = graph.least_bytes_by_kind
        total = sum(parts.values())
        largest = sorted((kind for kind in parts if parts[kind] > _MENTIONED * total), key=lambda kind: -parts[kind])
        in_words = ", ".join(f"{_NOUNS[kind.name]} {format_bytes(parts[kind])}" for kind in largest)
        return LeastMemory(total, in_words, float(roofline_s(graph, device).sum()))

    @staticmethod
    def behind(error: TooLargeError, device: Device) -> LeastMemory:
        """Of a workload that cannot even be described: one of its tensors, written once."""
        return LeastMemory(error.num_bytes, "one tensor alone", error.num_bytes / device.bandwidth_bytes_per_s)

    def __str__(self) -> str:
        return f"at least {format_bytes(self.num_bytes)} ({self.in_words})"

    def prediction(self, device: Device, *, steps: int | None) -> Prediction:
        """What can be said of a step that needs more than the device has: finite, and surely above the bound."""
        step_time = Estimate(max(self.step_time_s, 1e-9) * _TIME_FACTOR, _TIME_LOG_SIGMA)
        return Prediction(
            peak_memory=Estimate(self.num_bytes * math.exp(_SIGMAS_ABOVE * _LOG_SIGMA), _LOG_SIGMA),
            step_time=step_time,
            total_time=None if steps is None else step_time.scaled(steps),
            predictor=NAME,
            device_id=device.id,
            trained_on_device=True,
        )
