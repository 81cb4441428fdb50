"""NvmlProbe: what the driver says of one GPU, sampled in a thread.

Every figure may be missing. There may be no NVML, no permission or no such sensor (NOT_SUPPORTED). A container may hide or
renumber the processes, and a GPU may fall off the bus. Whatever fails is left out of the reading and named in its notes.
"""

from __future__ import annotations

import importlib
import os
import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from perfguard.exceptions import why_not_imported

_T = TypeVar("_T")

_SAMPLE_INTERVAL_S = 0.1

# Bits of nvmlDeviceGetCurrentClocksThrottleReasons (nvml.h) that slow a busy GPU down against its user's will.
_THROTTLE_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
    0x200: "board limit",
    0x400: "reliability",
}


class Nvml(Protocol):
    """The part of the module ``pynvml`` that measuring uses. Handles are opaque; an NVMLError has its code in ``value``."""

    NVMLError: type[Exception]
    NVML_CLOCK_SM: int
    NVML_ERROR_NOT_SUPPORTED: int
    NVML_ERROR_NO_PERMISSION: int
    NVML_ERROR_GPU_IS_LOST: int

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlSystemGetDriverVersion(self) -> str | bytes: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any: ...
    def nvmlDeviceGetHandleByPciBusId(self, pci_bus_id: str) -> Any: ...
    def nvmlDeviceIsMigDeviceHandle(self, handle: Any) -> int: ...
    def nvmlDeviceGetMigMode(self, handle: Any) -> Any: ...
    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int: ...
    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...
    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> Any: ...
    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any: ...
    def nvmlDeviceGetProcessUtilization(self, handle: Any, last_seen_us: int) -> Any: ...
    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> int: ...
    def nvmlDeviceGetClockInfo(self, handle: Any, clock: int) -> int: ...
    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int: ...


@dataclass(frozen=True, slots=True)
class CudaIdentity:
    """Identifies a CUDA device in NVML. NVML has another order of cards and ignores CUDA_VISIBLE_DEVICES."""

    uuid: str | None
    """UUID without the prefix."""
    pci_bus_id: str | None
    """For instance "00000000:3B:00.0"."""


@dataclass(frozen=True, slots=True)
class DriverReading:
    """The driver's readings during one run. None: there is none."""

    process_peak_bytes: int | None = None
    """Largest sample of this process."""
    process_overhead_bytes: int | None = None
    """Memory of this process outside PyTorch's allocator: the context, and libraries with their own allocations."""
    card_overhead_bytes: int | None = None
    """The same for the whole card (or MIG instance), while at most one process was on it."""
    num_others: int = 0
    """Most processes that were seen beside this one."""
    sm_utilisation: float | None = None
    energy_j: float | None = None
    sm_clock_hz: float | None = None
    throttled: str | None = None
    driver: str | None = None
    notes: tuple[str, ...] = ()


class NvmlProbe:
    """Watches one GPU from :meth:`start` to :meth:`finish`.

    Args:
        identity: returns the GPU's identity. None: it is not known yet. It is called at each sample.
        reserved_bytes: returns the bytes that PyTorch's allocator holds now. None: they are unknown.
        nvml: stands in for the module ``pynvml``.
        pid: this process.
        interval_s: between two samples. Memory that lives for less time is missed, but the allocator's own peak is exact.
    """

    def __init__(
        self,
        identity: Callable[[], CudaIdentity | None],
        reserved_bytes: Callable[[], int | None],
        *,
        nvml: Nvml | None = None,
        pid: int | None = None,
        interval_s: float = _SAMPLE_INTERVAL_S,
    ) -> None:
        self._identity = identity
        self._reserved_bytes = reserved_bytes
        self._given = nvml
        self._nvml: Nvml | None = None
        self._pid = os.getpid() if pid is None else pid
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._sampler: threading.Thread | None = None
        self._handle: Any = None
        self._is_mig = False
        self._refused: dict[str, str] = {}
        self._over = False
        self._driver: str | None = None
        self._process_peak: int | None = None
        self._process_overhead: int | None = None
        self._card_overhead: int | None = None
        self._sees_itself = False
        self._num_others = 0
        self._energy_mj: tuple[int, int] | None = None
        self._utilisation: list[float] = []
        self._own_utilisation: list[float] = []
        self._last_seen_us = 0
        self._clocks_mhz: list[int] = []
        self._reasons: int | None = None

    def start(self) -> None:
        """Take the first sample now and the others in a thread."""
        self._take()
        self._sampler = threading.Thread(target=self._watch, name="perfguard-nvml", daemon=True)
        self._sampler.start()

    def read(self) -> DriverReading:
        """Summary of the samples so far."""
        return self._reading()

    def finish(self) -> DriverReading:
        """Take the last sample and return the readings."""
        self._stop.set()
        if self._sampler is not None:
            self._sampler.join()
            self._sampler = None
        self._take()
        if self._nvml is not None:
            try:
                self._nvml.nvmlShutdown()
            except self._nvml.NVMLError:
                pass  # it is gone anyway
            self._nvml = None
        return self._reading()

    def _watch(self) -> None:
        while not self._over and not self._stop.wait(self._interval_s):
            self._take()

    def _take(self) -> None:
        if self._over:
            return
        try:
            if self._handle is None and not self._find():
                return
            self._sample()
        except Exception as error:  # whatever a driver does, the trial goes on
            self._give_up(f"NVML failed ({type(error).__name__}: {error})")

    def _find(self) -> bool:
        identity = self._identity()
        if identity is None:
            return False
        if not self._open():
            return False
        assert self._nvml is not None
        nvml = self._nvml
        reason = "CUDA does not say which card it uses"
        for find, name in ways_to_find(nvml, identity):
            try:
                handle = find(name)
                break
            except nvml.NVMLError as error:
                reason = f"NVML does not know this CUDA device ({error})"
        else:
            self._give_up(reason)
            return False
        self._is_mig = bool(self._query("MIG", lambda: nvml.nvmlDeviceIsMigDeviceHandle(handle), quiet=True))
        self._handle = handle if self._is_mig else self._own_instance(handle)
        return True

    def _open(self) -> bool:
        if self._nvml is not None:
            return True
        try:
            nvml = self._given or cast(Nvml, importlib.import_module("pynvml"))
        except ImportError as error:
            self._give_up(why_not_imported(error, "pynvml", "pynvml is not installed"))
            return False
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            self._give_up(f"NVML cannot be used ({error})")
            return False
        self._nvml = nvml
        version = self._query("driver version", nvml.nvmlSystemGetDriverVersion)
        self._driver = version.decode() if isinstance(version, bytes) else version
        return True

    def _own_instance(self, card: Any) -> Any:
        """The MIG instance of ``card`` that this process runs on; the card itself where it is not partitioned."""
        assert self._nvml is not None
        nvml = self._nvml
        mode = self._query("MIG mode", lambda: nvml.nvmlDeviceGetMigMode(card), quiet=True)
        if not mode or not mode[0]:
            return card
        self._is_mig = True
        for index in range(self._query("MIG instances", lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(card)) or 0):
            try:
                instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, index)
                if any(process.pid == self._pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(instance)):
                    return instance
            except nvml.NVMLError:
                continue  # no instance at this index
        return card

    def _sample(self) -> None:
        assert self._nvml is not None
        nvml, handle = self._nvml, self._handle
        before = self._reserved_bytes()
        processes = self._query("processes", lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        memory = self._query("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        # Between two readings the trial goes on: what the allocator took or gave back meanwhile is no overhead.
        reserved = before if self._reserved_bytes() == before else None
        self._see_memory(processes, memory, reserved)
        if self._is_mig:
            return  # the other sensors are the whole card's
        energy = self._query("energy", lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        if energy is not None:
            self._energy_mj = (energy if self._energy_mj is None else self._energy_mj[0], energy)
        rates = self._query("utilisation", lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        if rates is not None:
            self._utilisation.append(rates.gpu / 100)
        if self._num_others:
            self._see_own_utilisation()
        clock = self._query("clocks", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        if clock is not None:
            self._clocks_mhz.append(clock)
        reasons = self._query("throttle reasons", lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        if reasons is not None:
            self._reasons = (self._reasons or 0) | reasons

    def _see_memory(self, processes: Any, memory: Any, reserved: int | None) -> None:
        if processes is None:
            return
        own = [process for process in processes if process.pid == self._pid and process.usedGpuMemory is not None]
        self._sees_itself |= bool(own)
        # In another namespace of process ids one of the strangers is this process.
        num_others = len(processes) - (1 if self._sees_itself else min(1, len(processes)))
        self._num_others = max(self._num_others, num_others)
        if own:
            used = int(own[0].usedGpuMemory)
            self._process_peak = max(self._process_peak or 0, used)
            if reserved is not None:
                self._process_overhead = max(self._process_overhead or 0, used - reserved)
        if memory is not None and reserved is not None:
            self._card_overhead = max(self._card_overhead or 0, int(memory.used) - reserved)

    def _see_own_utilisation(self) -> None:
        assert self._nvml is not None
        nvml, handle, since = self._nvml, self._handle, self._last_seen_us
        samples = self._query("utilisation of processes", lambda: nvml.nvmlDeviceGetProcessUtilization(handle, since), quiet=True)
        for sample in samples or ():
            self._last_seen_us = max(self._last_seen_us, int(sample.timeStamp))
            if sample.pid == self._pid:
                self._own_utilisation.append(sample.smUtil / 100)

    def _query(self, name: str, query: Callable[[], _T], *, quiet: bool = False) -> _T | None:
        """The result of ``query``; None, and a note unless ``quiet``, if the driver fails. A failed query is not repeated."""
        assert self._nvml is not None
        if name in self._refused or self._over:
            return None
        try:
            return query()
        except self._nvml.NVMLError as error:
            code = getattr(error, "value", None)
            if code == self._nvml.NVML_ERROR_GPU_IS_LOST:
                self._give_up("the GPU was lost during the run")
            elif code == self._nvml.NVML_ERROR_NO_PERMISSION:
                self._refused[name] = "" if quiet else f"NVML forbids reading its {name}"
            elif code == self._nvml.NVML_ERROR_NOT_SUPPORTED:
                self._refused[name] = "" if quiet else f"this GPU does not report its {name}"
            elif not quiet:
                self._refused[name] = f"its {name} could not be read ({error})"
            return None

    def _give_up(self, reason: str) -> None:
        self._over = True
        self._refused["NVML"] = reason

    def _reading(self) -> DriverReading:
        notes = [note for note in self._refused.values() if note]
        alone = self._num_others == 0
        if not alone:
            notes.append(f"{self._num_others} other processes used the GPU, so its energy cannot be attributed")
        if self._handle is not None and not self._sees_itself and "processes" not in self._refused and not self._over:
            notes.append("NVML does not show this process by its id (a container?)")
        if self._is_mig:
            notes.append("on a MIG instance, energy, clocks and utilisation are the whole card's and are left out")
        energy = self._energy_mj
        utilisation = self._utilisation if alone else self._own_utilisation
        return DriverReading(
            process_peak_bytes=self._process_peak,
            process_overhead_bytes=self._process_overhead,
            card_overhead_bytes=self._card_overhead if alone else None,
            num_others=self._num_others,
            sm_utilisation=statistics.fmean(utilisation) if utilisation else None,
            energy_j=(energy[1] - energy[0]) / 1e3 if energy is not None and alone and energy[1] >= energy[0] else None,
            sm_clock_hz=statistics.fmean(self._clocks_mhz) * 1e6 if self._clocks_mhz else None,
            throttled=None if self._reasons is None else _throttle_text(self._reasons),
            driver=self._driver,
            notes=tuple(notes),
        )


def ways_to_find(nvml: Nvml, identity: CudaIdentity) -> list[tuple[Callable[[str], Any], str]]:
    """Functions of NVML that may find the device, each with the name to give it."""
    ways: list[tuple[Callable[[str], Any], str]] = []
    if identity.uuid is not None:
        ways += [(nvml.nvmlDeviceGetHandleByUUID, f"{prefix}-{identity.uuid}") for prefix in ("GPU", "MIG")]
    if identity.pci_bus_id is not None:
        ways.append((nvml.nvmlDeviceGetHandleByPciBusId, identity.pci_bus_id))
    return ways


def _throttle_text(reasons: int) -> str:
    return ", ".join(text for bit, text in _THROTTLE_REASONS.items() if reasons & bit)
