"""GpuProbe: a run on a CUDA device, by PyTorch's allocator and by the samples of the driver (`driver.py`).

The peak is what the driver counts for this process, its context included. That decides whether a run fits a card, and predictors
are trained on it. The driver can only be sampled, but the allocator keeps its own exact peak. So the peak is the allocator's
peak plus what the process had beside the allocator. In order of trust, that comes from NVML's figure for this process, from the
whole card's memory, if what is beside PyTorch's could be one context, or from the catalog.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from perfguard.measure.driver import DriverSamples
from perfguard.measure.measurement import CudaUse, RanOn, Reading


class GpuProbe:
    """Watches the CUDA device on which the run takes most memory, or the thread's current device if that is unknown.

    Never initialises CUDA: a trial that forks its own workers could not use it any more. Until the trial does, there is
    nothing to measure. A thread samples the driver, of which every figure may be missing: no NVML, no permission, no such sensor,
    a container that hides or renumbers processes, a GPU that falls off the bus. Whatever fails is left out of the reading and
    named in its notes.

    Args:
        context_bytes: what the driver counts for the process beside the allocator, as the catalog has it.
        cuda: stands in for the module ``torch.cuda``.
        nvml: stands in for the module ``pynvml``.
        pid: this process, as NVML shows it.
        interval_s: between two samples of the driver. Memory outside the allocator that lives for less time is missed.
    """

    def __init__(
        self, context_bytes: int, *, cuda: Any = None, nvml: Any = None, pid: int | None = None, interval_s: float = 0.1
    ) -> None:
        import torch

        self._cuda: Any = torch.cuda if cuda is None else cuda
        self._can_use_cuda = cuda is not None or torch.backends.cuda.is_built()
        self._context_bytes = context_bytes
        self._index: int | None = None
        self._events_failed = False
        self._use = CudaUse(self._cuda)
        self._notes: list[str] = []
        self._driver = DriverSamples(nvml=nvml, pid=pid)
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._sampler: threading.Thread | None = None

    def start(self) -> None:
        if not self._can_use_cuda:
            return
        try:
            if self._cuda.is_initialized():
                # An earlier trial's leftovers are given back, so that they do not count, and new peaks begin.
                gc.collect()
                self._cuda.empty_cache()
                for index in range(self._cuda.device_count()):
                    self._cuda.reset_peak_memory_stats(index)
                self._use.start()
        except RuntimeError as error:
            self._notes.append(f"CUDA's statistics could not be reset ({error})")
        self._take()
        self._sampler = threading.Thread(target=self._watch, name="perfguard-nvml", daemon=True)
        self._sampler.start()

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
        if not self._can_use_cuda:
            note = "this PyTorch has no CUDA, so the GPU's memory was not measured"
            return Reading("none", notes=(note,), ran_on=RanOn.without_cuda())
        try:
            self._settle_index()
            if self._index is None:
                return self._reading({}, None, "the trial did not use CUDA in this process")
            stats = self._cuda.memory_stats(self._index)
            return self._reading(stats, self._overhead(stats))
        except RuntimeError as error:
            return self._reading({}, None, f"CUDA's statistics could not be read ({error})")

    def finish(self) -> Reading:
        with suppress(RuntimeError):  # the reading says so
            self._settle_index()
        self._stop.set()
        if self._sampler is not None:
            self._sampler.join()
        if self._can_use_cuda:
            self._take()
        self._driver.close()
        return self.read()

    def _find_index(self) -> bool:
        """Whether it is known by now which device the run uses."""
        if self._index is None and self._cuda.is_initialized():
            self._index = 0 if self._cuda.device_count() == 1 else self._use.index()
        return self._index is not None

    def _settle_index(self) -> None:
        """Take the current device where it is not known which one the run uses."""
        if not self._find_index() and self._cuda.is_initialized():
            self._index = self._cuda.current_device()

    def _overhead(self, stats: Mapping[str, Any]) -> tuple[int, str, str]:
        """Bytes of the process outside the allocator, where the figure comes from, and a note."""
        if self._driver.process_overhead_bytes is not None:
            return self._driver.process_overhead_bytes, "nvml-process", ""
        free, total = self._cuda.mem_get_info(self._index)
        beside = total - free - int(stats.get("reserved_bytes.all.current", 0))
        # More than two contexts beside PyTorch's memory are other processes'.
        if self._driver.num_others == 0 and 0 < beside <= 2 * self._context_bytes:
            return beside, "cuda-card", "the context is the whole card's memory less PyTorch's"
        return self._context_bytes, "catalog-context", "the context is the catalog's figure"

    def _reading(self, stats: Mapping[str, Any], overhead: tuple[int, str, str] | None, *notes: str) -> Reading:
        reserved = int(stats.get("reserved_bytes.all.peak", 0)) or None
        before = self._use.before.get(self._index or 0, {})
        words = [*self._notes, *self._driver.notes(), *notes]
        left_mib = int(before.get("allocated_bytes.all.current", 0)) / 2**20
        if left_mib > 64:  # a model that is kept for the next trial, and not the few blocks of a library
            words.append(f"{left_mib:.0f} MiB of the GPU were allocated in this process before the run and are counted")
        method = "none"
        peak = None
        if overhead is not None and reserved is not None:
            beside_bytes, source, note = overhead
            peak = max(reserved + beside_bytes, self._driver.process_peak_bytes or 0)
            method = f"{source}+allocator"
            words += [note] if note else []
        elif self._driver.process_peak_bytes is not None:  # cudaMallocAsync keeps no statistics
            method = "nvml-process"
            peak = self._driver.process_peak_bytes
            words.append("PyTorch's allocator keeps no statistics; peaks between two samples are missed")
        return Reading(
            method,
            peak_memory_bytes=peak,
            allocated_peak_bytes=int(stats.get("allocated_bytes.all.peak", 0)) or None,
            reserved_peak_bytes=reserved,
            notes=tuple(words),
            ran_on=self._use.ran_on(),
            energy_j=self._driver.energy_j,
            driver=self._driver.version,
        )

    def _watch(self) -> None:
        while not self._driver.is_over and not self._stop.wait(self._interval_s):
            self._take()

    def _take(self) -> None:
        """Take a sample, if it is known which GPU it is."""
        if self._driver.is_over:
            return
        try:
            # Of several devices the run's own thread finds out which, at the end of its first step: this may be the sampler's.
            if self._index is None and self._cuda.is_initialized() and self._cuda.device_count() == 1:
                self._index = 0
            if self._index is not None:
                self._driver.take(self._uuid, self._reserved_bytes)
        except Exception as error:  # whatever a driver does, the trial goes on
            self._driver.give_up(f"NVML failed ({type(error).__name__}: {error})")

    def _uuid(self) -> str:
        return str(self._cuda.get_device_properties(self._index).uuid)

    def _reserved_bytes(self) -> int | None:
        try:
            # The nested figures come straight from the allocator; to flatten and sort them takes longer than all else here.
            return int(self._cuda.memory_stats_as_nested_dict(self._index or 0)["reserved_bytes"]["all"]["current"])
        except (RuntimeError, KeyError):
            return None
