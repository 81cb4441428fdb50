"""DriverSamples: what the driver (NVML) shows of one CUDA device while a run goes on."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from perfguard.exceptions import why_not_imported

_T = TypeVar("_T")
_THROTTLED = {
    0x4: "power cap", 0x8: "hardware slowdown", 0x20: "thermal", 0x40: "hardware thermal", 0x80: "power brake",
    0x200: "board limit", 0x400: "reliability",
}  # fmt: skip
"""Bits of nvmlDeviceGetCurrentClocksThrottleReasons (nvml.h) that slow a busy GPU down against its user's will."""


class DriverSamples:
    """Takes samples of a device, and keeps the peaks. Whatever fails becomes a note, and is not asked for again.

    Args:
        nvml: stands in for the module ``pynvml``.
        pid: this process, as NVML shows it.
    """

    def __init__(self, *, nvml: Any = None, pid: int | None = None) -> None:
        self._given = nvml
        self._nvml: Any = None  # with an open session
        self._pid = os.getpid() if pid is None else pid
        self._handle: Any = None
        self._is_mig = False
        self.is_over = False
        """Whether the driver cannot be asked at all."""
        self._refused: dict[str, str] = {}
        """Note for each query that failed and is not repeated."""
        self.version: str | None = None
        self.process_peak_bytes: int | None = None
        """Largest sample of this process."""
        self.process_overhead_bytes: int | None = None
        """Memory of this process outside PyTorch's allocator: the context, and libraries with their own allocations."""
        self._sees_itself = False
        self.num_others = 0
        """Most processes that were seen beside this one."""
        self._energy_mj: list[int] = []
        self._reasons = 0

    def take(self, uuid: Callable[[], str], reserved_bytes: Callable[[], int | None]) -> None:
        """Take a sample.

        Args:
            uuid: returns the device's. NVML has another order of cards, and ignores CUDA_VISIBLE_DEVICES.
            reserved_bytes: returns what PyTorch's allocator holds now. None: unknown.
        """
        if self._handle is None and self._open():
            self._handle = self._find(uuid())
        if self._handle is not None:
            self._sample(self._nvml, self._handle, reserved_bytes)

    def close(self) -> None:
        """End the session with the driver. What the samples have shown stays."""
        if self._nvml is None:
            return
        with suppress(self._nvml.NVMLError):  # it is gone anyway
            self._nvml.nvmlShutdown()
        self._nvml = None

    @property
    def energy_j(self) -> float | None:
        """Joules between the first sample and the last. None: unknown, or other processes used the device."""
        if not self._energy_mj or self.num_others:
            return None
        energy_mj = self._energy_mj[-1] - self._energy_mj[0]
        return energy_mj / 1e3 if energy_mj >= 0 else None  # a reload of the driver sets the counter back

    def notes(self) -> list[str]:
        """What is missing so far, and why."""
        notes = list(self._refused.values())
        if self.num_others:
            notes.append(f"{self.num_others} other processes used the GPU, so its energy cannot be attributed")
        if self._handle is not None and not self._sees_itself and "processes" not in self._refused and not self.is_over:
            notes.append("NVML does not show this process by its id (a container?)")
        if self._is_mig:
            notes.append("on a MIG instance, energy is the whole card's and is left out")
        if self._reasons:
            notes.append(f"clocks were reduced: {', '.join(text for bit, text in _THROTTLED.items() if self._reasons & bit)}")
        return notes

    def _open(self) -> bool:
        if self._nvml is not None:
            return True
        try:
            nvml = self._given or importlib.import_module("pynvml")
        except ImportError as error:
            self.give_up(why_not_imported(error, "pynvml", "pynvml is not installed"))
            return False
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            self.give_up(f"NVML cannot be used ({error})")
            return False
        self._nvml = nvml
        version = self._query("driver version", nvml.nvmlSystemGetDriverVersion)
        self.version = version.decode() if isinstance(version, bytes) else version
        return True

    def _find(self, uuid: str) -> Any:
        """The handle of the card, or of the MIG instance that this process runs on. None: NVML does not have it."""
        nvml = self._nvml
        reason = ""
        for prefix in ("GPU", "MIG"):
            try:
                handle = nvml.nvmlDeviceGetHandleByUUID(f"{prefix}-{uuid}")
            except nvml.NVMLError as error:
                reason = f"NVML does not know this CUDA device ({error})"
            else:
                self._is_mig = prefix == "MIG"
                return handle
        self.give_up(reason)
        return None

    def _sample(self, nvml: Any, handle: Any, reserved_bytes: Callable[[], int | None]) -> None:
        before = reserved_bytes()
        processes = self._query("processes", lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        # Between two readings the trial goes on: what the allocator took or gave back meanwhile is no overhead.
        reserved = before if reserved_bytes() == before else None
        self._see_memory(processes or [], reserved)
        if self._is_mig:
            return  # the other sensors are the whole card's
        energy_mj = self._query("energy", lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        if energy_mj is not None:
            self._energy_mj = [*self._energy_mj[:1], energy_mj]
        reasons = self._query("throttle reasons", lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        self._reasons |= (reasons or 0) & sum(_THROTTLED)

    def _see_memory(self, processes: Sequence[Any], reserved: int | None) -> None:
        # usedGpuMemory is None where the driver may not tell, for instance under WDDM on Windows.
        own = [process for process in processes if process.pid == self._pid and process.usedGpuMemory is not None]
        self._sees_itself |= bool(own)
        # In another namespace of process ids one of the strangers is this process.
        num_others = len(processes) - (1 if self._sees_itself else min(1, len(processes)))
        self.num_others = max(self.num_others, num_others)
        if own:
            used = int(own[0].usedGpuMemory)
            self.process_peak_bytes = max(self.process_peak_bytes or 0, used)
            if reserved is not None:
                self.process_overhead_bytes = max(self.process_overhead_bytes or 0, used - reserved)

    def _query(self, name: str, query: Callable[[], _T]) -> _T | None:
        """The result of ``query``; None, and a note, if the driver fails. A refused query is not repeated."""
        if name in self._refused or self.is_over:
            return None
        try:
            return query()
        except self._nvml.NVMLError as error:
            self._refused[name] = f"NVML could not read its {name} ({error})"
            return None

    def give_up(self, reason: str) -> None:
        """Take no more samples, because of ``reason``."""
        self.is_over = True
        self._refused["NVML"] = reason
