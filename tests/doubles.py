"""What stands in for something large in several tests."""

from __future__ import annotations

from collections.abc import Sequence

from perfguard import Device, Estimate, Observation, OpGraph, Prediction


class ReplayPredictor:
    """A double: memory is the replay's peak and a step takes 10 ms, both known to 1%. Keeps what it was given to learn from."""

    name = "replay-1"

    def __init__(self) -> None:
        self.learnt: list[Observation] = []

    def predict(self, graph: OpGraph, device: Device, *, steps: int | None = None) -> Prediction:
        step_time = Estimate(0.01, 0.01)
        total_time = None if steps is None else step_time.scaled(steps)
        memory = Estimate(float(graph.peak_live_bytes), 0.01)
        return Prediction(memory, step_time, total_time, self.name, device.id, trained_on_device=True)

    def fine_tune(self, observations: Sequence[Observation]) -> None:
        self.learnt = list(observations)
