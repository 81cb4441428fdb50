"""GpuProbe: a run on a CUDA device, by PyTorch's allocator and by the driver.

The peak is what the driver counts for this process, its context included. That decides whether a run fits a card, and predictors
are trained on it. The driver can only be sampled, but the allocator keeps its own exact peak. So the peak is the allocator's
peak plus what the process had beside the allocator. In order of trust, that comes from NVML's figure for this process, from the
whole card's while nobody else was on it, or from the catalog.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from perfguard.measure._measurement import Confidence
from perfguard.measure._nvml import CudaIdentity, DriverReading, Nvml, NvmlProbe
from perfguard.measure._probe import Reading
from perfguard.measure._ran_on import Cuda as CudaOfUse
from perfguard.measure._ran_on import CudaUse, RanOn

_MiB = 2**20
_NOTABLE_LEFTOVER_BYTES = 64 * _MiB
_CONTEXT_TOLERANCE = 2
NO_CUDA = "this PyTorch has no CUDA, so the GPU's memory was not measured"
UNUSED = "the trial did not use CUDA in this process"


class Cuda(CudaOfUse, Protocol):
    """The part of the module ``torch.cuda`` that measuring uses."""

    @property
    def Event(self) -> Any: ...
    def is_current_stream_capturing(self) -> bool: ...
    def current_stream(self, device: int) -> Any: ...
    def empty_cache(self) -> None: ...
    def memory_stats_as_nested_dict(self, device: int) -> Mapping[str, Any]: ...
    def reset_peak_memory_stats(self, device: int) -> None: ...
    def mem_get_info(self, device: int) -> tuple[int, int]: ...


class _Overhead(NamedTuple):
    """Memory of the process outside the allocator."""

    num_bytes: int
    source: str
    confidence: Confidence
    note: str = ""


class GpuProbe:
    """Watches the CUDA device on which the run takes most memory, or the thread's current device if that is unknown.

    Never initialises CUDA: a trial that forks its own workers could not use it any more. Until the trial does, there is
    nothing to measure.

    Args:
        context_bytes: the driver's memory before the first tensor. The catalog has it.
        cuda: stands in for the module ``torch.cuda``.
        nvml: stands in for the module ``pynvml``.
        pid: this process, as NVML shows it.
        interval_s: between two samples of the driver.
    """

    def __init__(
        self,
        context_bytes: int,
        *,
        cuda: Cuda | None = None,
        nvml: Nvml | None = None,
        pid: int | None = None,
        interval_s: float = 0.1,
    ) -> None:
        import torch

        self._cuda: Cuda = torch.cuda if cuda is None else cuda
        self._can_use_cuda = cuda is not None or torch.backends.cuda.is_built()
        self._context_bytes = context_bytes
        self._index: int | None = None
        self._events_failed = False
        self._use = CudaUse(self._cuda)
        self._notes: list[str] = []
        self._driver = NvmlProbe(self._identity, self._reserved_bytes, nvml=nvml, pid=pid, interval_s=interval_s)

    @property
    def method(self) -> str:
        return "nvml+allocator"

    def start(self) -> None:
        if not self._can_use_cuda:
            return
        try:
            if self._cuda.is_initialized():
                self._forget()
        except RuntimeError as error:
            self._notes.append(f"CUDA's statistics could not be reset ({error})")
        self._driver.start()

    def stamp(self) -> Any:
        try:
            if self._events_failed or not self._find_index():
                return None
            if self._cuda.is_current_stream_capturing():  # an event would end up in, or break, the trial's CUDA graph
                return None
            event = self._cuda.Event(enable_timing=True)
            event.record(self._cuda.current_stream(self._index or 0))
            return event
        except RuntimeError:  # the device is lost, or in a state of error
            self._events_failed = True
            return None

    def read(self) -> Reading:
        return self._read(self._driver.read)

    def finish(self) -> Reading:
        return self._read(self._driver.finish)

    def _read(self, read_driver: Callable[[], DriverReading]) -> Reading:
        if not self._can_use_cuda:
            return Reading("none", notes=(NO_CUDA,), ran_on=RanOn.without_cuda())
        try:
            if not self._find_index() and self._cuda.is_initialized():
                self._index = self._cuda.current_device()
        except RuntimeError:
            pass  # reported below
        driver = read_driver()
        try:
            if self._index is None:
                return self._reading(driver, {}, None, UNUSED)
            stats = self._cuda.memory_stats(self._index)
            return self._reading(driver, stats, self._overhead(driver, stats))
        except RuntimeError as error:
            return self._reading(driver, {}, None, f"CUDA's statistics could not be read ({error})")

    def _find_index(self) -> bool:
        """Whether it is known by now which device the run uses."""
        if self._index is None and self._cuda.is_initialized():
            self._index = 0 if self._cuda.device_count() == 1 else self._use.index()
        return self._index is not None

    def _forget(self) -> None:
        """Give an earlier trial's leftovers back, so that they do not count, and begin new peaks."""
        gc.collect()
        self._cuda.empty_cache()
        for index in range(self._cuda.device_count()):
            self._cuda.reset_peak_memory_stats(index)
        self._use.start()

    def _identity(self) -> CudaIdentity | None:
        # Of several devices the run's own thread finds out which, at the end of its first step: this is the sampling thread.
        if self._index is None and self._cuda.is_initialized() and self._cuda.device_count() == 1:
            self._index = 0
        if self._index is None:
            return None
        properties = self._cuda.get_device_properties(self._index)
        uuid = getattr(properties, "uuid", None)
        bus = getattr(properties, "pci_bus_id", None)
        return CudaIdentity(
            uuid=None if uuid is None else str(uuid),
            pci_bus_id=None
            if bus is None
            else f"{getattr(properties, 'pci_domain_id', 0):08X}:{bus:02X}:{getattr(properties, 'pci_device_id', 0):02X}.0",
        )

    def _reserved_bytes(self) -> int | None:
        try:
            # The nested figures come straight from the allocator; to flatten and sort them takes longer than all else here.
            return int(self._cuda.memory_stats_as_nested_dict(self._index or 0)["reserved_bytes"]["all"]["current"])
        except (RuntimeError, KeyError):
            return None

    def _overhead(self, driver: DriverReading, stats: Mapping[str, Any]) -> _Overhead:
        if driver.process_overhead_bytes is not None:
            return _Overhead(driver.process_overhead_bytes, "nvml-process", "high")
        if driver.card_overhead_bytes is not None:
            return _Overhead(
                driver.card_overhead_bytes, "nvml-card", "medium", "the context is estimated from the whole card's memory"
            )
        assert self._index is not None
        free, total = self._cuda.mem_get_info(self._index)
        beside = total - free - int(stats.get("reserved_bytes.all.current", 0))
        if driver.num_others == 0 and 0 < beside <= _CONTEXT_TOLERANCE * self._context_bytes:
            return _Overhead(beside, "cuda-card", "low", "the context is the whole card's memory less PyTorch's")
        return _Overhead(self._context_bytes, "catalog-context", "low", "the context is the catalog's figure")

    def _reading(self, driver: DriverReading, stats: Mapping[str, Any], overhead: _Overhead | None, *notes: str) -> Reading:
        reserved = int(stats.get("reserved_bytes.all.peak", 0)) or None
        allocated = int(stats.get("allocated_bytes.all.peak", 0)) or None
        before = self._use.before.get(self._index or 0, {})
        left = int(before.get("allocated_bytes.all.current", 0))
        words = [*self._notes, *driver.notes, *notes]
        if left > _NOTABLE_LEFTOVER_BYTES:
            words.append(f"{left / _MiB:.0f} MiB of the GPU were allocated in this process before the run and are counted")
        method, confidence = "none", None
        peak: int | None = None
        if overhead is not None and reserved is not None:
            peak = max(reserved + overhead.num_bytes, driver.process_peak_bytes or 0)
            method, confidence = f"{overhead.source}+allocator", overhead.confidence
            words += [overhead.note] if overhead.note else []
        elif driver.process_peak_bytes is not None:  # cudaMallocAsync keeps no statistics
            peak, method, confidence = driver.process_peak_bytes, "nvml-process", "medium"
            words.append("PyTorch's allocator keeps no statistics; peaks between two samples are missed")
        return Reading(
            method,
            peak_memory_bytes=peak,
            allocated_peak_bytes=allocated,
            reserved_peak_bytes=reserved,
            sm_utilisation=driver.sm_utilisation,
            energy_j=driver.energy_j,
            sm_clock_hz=driver.sm_clock_hz,
            throttled=driver.throttled,
            oom_retries=int(stats["num_alloc_retries"]) - int(before.get("num_alloc_retries", 0))
            if "num_alloc_retries" in stats
            else None,
            driver=driver.driver,
            confidence=confidence,
            notes=tuple(words),
            ran_on=self._use.ran_on(),
        )
