"""Measurement: what one run really cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from perfguard.exceptions import ConfigurationError

if TYPE_CHECKING:
    from perfguard.devices import Device

Status = Literal["ok", "oom", "timeout", "failed", "interrupted"]
"""How a run ended. "interrupted": something outside of it ended it (Ctrl-C, a driver that went away), so it says nothing about
the trial: it is logged, never learnt, and counts neither as ok nor as a violation. A trial that a scheduler stops early is "ok":
it cost what it cost."""
Confidence = Literal["high", "medium", "low"]
NOT_A_NUMBER = "{} was {}"
"""Note of a measurement with a NaN or infinite reading: the field's name, and the value."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One observed run, in the same units as a Prediction. None: not measured."""

    status: Status
    device_id: str
    """Id of the device that the run really used; "cpu" for any processor."""
    device_name: str
    peak_memory_bytes: int | None
    """Peak device memory. On a GPU: what the driver counts for this process, its context included. On a CPU: the resident set's
    peak above what it was when the run began. With status "oom" a lower bound."""
    step_time_s: float | None
    """Median time of a step, from the end of the one before, warm-up and marked waits for data excluded; see StepTimer."""
    total_time_s: float
    """Time from the launch to the end of the run."""
    num_steps: int
    method: str
    """Method of the memory reading, for instance "vmhwm", "rss-sampled" or "nvml-process+allocator"."""
    framework: str
    note: str = ""
    """Limits of its reliability, in words."""
    allocated_peak_bytes: int | None = None
    """Most bytes that PyTorch's CUDA allocator had handed out at once."""
    reserved_peak_bytes: int | None = None
    """Most bytes that PyTorch's CUDA allocator held at once, its cache included."""
    sm_utilisation: float | None = None
    """Share of the time in which a kernel ran, 0 to 1, as the driver reports it; mean of the run."""
    energy_j: float | None = None
    """Energy of the whole card from the run's start (or from its first use of CUDA) to its end."""
    sm_clock_hz: float | None = None
    """Mean clock of the multiprocessors."""
    throttled: str | None = None
    """Reasons for reduced clocks at any time, for instance "power cap, thermal"; empty: none."""
    data_wait_s: float | None = None
    """Mean time that a step waited for data, where the trial marks it (``Run.loading``, ``Run.batches``)."""
    oom_retries: int | None = None
    """Number of times that the allocator returned its cache to the driver to get memory."""
    driver: str | None = None
    """Version of the GPU's driver."""
    confidence: Confidence | None = None
    """How sure the memory is: "high" (counted by the kernel, or by the driver for this process), "medium" (sampled, or of the
    whole card), "low" (a part of it is a figure of the catalog)."""
    host: str | None = None
    """Name of the machine that ran it."""

    def __post_init__(self) -> None:
        if self.status not in get_args(Status):
            raise ConfigurationError(f"Measurement.status must be one of {', '.join(get_args(Status))}, but got {self.status!r}.")
        if self.confidence is not None and self.confidence not in get_args(Confidence):
            allowed = ", ".join(get_args(Confidence))
            raise ConfigurationError(f"Measurement.confidence must be one of {allowed} or None, but got {self.confidence!r}.")

    def is_of(self, device: Device) -> bool:
        """Return whether this is a reading of ``device``: whether the run really used it, and not another card or the processor.

        Example:
            >>> from perfguard.devices import catalog
            >>> measurement = Measurement("ok", "cpu", "AMD EPYC 7763", 2**20, 0.1, 1.0, 10, "vmhwm", "torch2.9")
            >>> measurement.is_of(catalog()["a100-pcie-40gb"])
            False
        """
        from perfguard.measure._ran_on import RanOn

        return self.device_id == device.id or RanOn("cpu" if self.device_id == "cpu" else "cuda", self.device_name).is_a(device)
