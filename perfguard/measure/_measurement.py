"""Measurement: what one run really cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from perfguard.exceptions import ConfigurationError

Status = Literal["ok", "oom", "timeout", "failed"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One observed run, in the same units as a Prediction. None: not measured."""

    status: Status
    device_id: str
    device_name: str
    peak_memory_bytes: int | None
    """Peak device memory. On a CPU: the resident set's peak above what it was when the run began.
    With status "oom" a lower bound."""
    step_time_s: float | None
    """Median time between the ends of consecutive steps, warm-up excluded."""
    total_time_s: float
    """From the launch to the end of the run."""
    num_steps: int
    method: str
    """How it was taken, for instance "vmhwm" or "rss-sampled"."""
    framework: str
    note: str = ""
    """What limits the trust in it, in words."""

    def __post_init__(self) -> None:
        if self.status not in get_args(Status):
            raise ConfigurationError(f"Measurement.status must be one of {', '.join(get_args(Status))}, but got {self.status!r}.")
