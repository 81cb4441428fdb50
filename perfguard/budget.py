"""Budget: what a trial may use."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perfguard.exceptions import ConfigurationError
from perfguard.predictor import Estimate, Prediction
from perfguard.quantities import format_bytes, format_seconds, parse_bytes, parse_seconds

if TYPE_CHECKING:
    from perfguard.devices import Device


@dataclass(frozen=True, slots=True)
class Limit:
    """One predicted quantity beside the limit that it must stay under."""

    quantity: str
    """"memory", "time" (of the trial) or "step_time"."""
    limit: float
    """Bytes or seconds."""
    estimate: Estimate

    @property
    def p_violation(self) -> float:
        """The chance that the trial breaks this limit."""
        return self.estimate.p_exceeds(self.limit)

    def margin(self, risk: float) -> float:
        """How far the trial is from feasible, as a logarithm: negative where the limit holds with probability 1 - risk."""
        return math.log(self.estimate.quantile(1 - risk) / self.limit)

    def format(self, value: float) -> str:
        """``value`` of this quantity in words."""
        return format_bytes(value) if self.quantity == "memory" else format_seconds(value)


@dataclass(frozen=True, slots=True)
class Budget:
    """What a trial may use. None: no limit, but the device's own memory always is one.

    Example:
        >>> Budget.parse(memory="38GiB", time="2h").trial_time_s
        7200.0
    """

    memory_bytes: int | None = None
    memory_fraction: float | None = None
    """Of the device's memory, in (0, 1]."""
    trial_time_s: float | None = None
    step_time_s: float | None = None

    @staticmethod
    def parse(
        memory: int | float | str | None = None, time: int | float | str | None = None, step_time: int | float | str | None = None
    ) -> Budget:
        """A budget from what people write: bytes, "38GiB" or a fraction of the device; seconds, "250ms" or "2h".

        Raises:
            ConfigurationError: for a limit that is not positive or cannot be read.
        """
        fraction = memory if isinstance(memory, float) and memory <= 1 else None
        if fraction is not None and not 0 < fraction <= 1:
            raise ConfigurationError(f"memory_budget as a fraction must lie in (0, 1], but got {memory!r}.")
        return Budget(
            memory_bytes=None if memory is None or fraction is not None else parse_bytes(memory, what="memory_budget"),
            memory_fraction=fraction,
            trial_time_s=None if time is None else parse_seconds(time, what="time_budget"),
            step_time_s=None if step_time is None else parse_seconds(step_time, what="step_time_budget"),
        )

    def capacity_bytes(self, device: Device) -> int:
        """The memory that a trial may use on ``device``."""
        if self.memory_fraction is not None:
            return int(self.memory_fraction * device.memory_bytes)
        return device.memory_bytes if self.memory_bytes is None else min(self.memory_bytes, device.memory_bytes)

    def limits(self, prediction: Prediction, device: Device) -> Iterator[Limit]:
        """Each limit beside what is predicted for it."""
        yield Limit("memory", self.capacity_bytes(device), prediction.peak_memory)
        if self.trial_time_s is not None and prediction.total_time is not None:
            yield Limit("time", self.trial_time_s, prediction.total_time)
        if self.step_time_s is not None:
            yield Limit("step_time", self.step_time_s, prediction.step_time)
