"""The seam between a run and what measures it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from perfguard.measure._measurement import Confidence
from perfguard.measure._ran_on import RanOn


@dataclass(frozen=True, slots=True)
class Reading:
    """Readings of a probe for one run. The fields of a Measurement have the same names and units. None: not measured."""

    method: str
    peak_memory_bytes: int | None = None
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    sm_utilisation: float | None = None
    energy_j: float | None = None
    sm_clock_hz: float | None = None
    throttled: str | None = None
    oom_retries: int | None = None
    driver: str | None = None
    confidence: Confidence | None = None
    notes: tuple[str, ...] = ()
    """Readings that are missing or unreliable, with the reasons."""
    ran_on: RanOn | None = None
    """The device that the run used. None: unknown, and the named device is assumed."""


class Probe(Protocol):
    """Watches one device for the length of one run. Its calls never raise for what the hardware or the driver does."""

    @property
    def method(self) -> str:
        """Method of the memory reading."""

    def start(self) -> None:
        """Forget what was before, and begin to watch."""

    def stamp(self) -> Any:
        """A time stamp on the device, for ``earlier.elapsed_time(later)`` in milliseconds. None: use the CPU's clock."""

    def read(self) -> Reading:
        """Readings so far. The measurement goes on."""

    def finish(self) -> Reading:
        """Stop watching and return the readings. Called once; also without :meth:`start`."""
