"""Run: one launched trial being measured."""

from __future__ import annotations

import functools
import platform
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from perfguard.measure._cpu import CpuProbe
from perfguard.measure._gpu import GpuProbe
from perfguard.measure._measurement import Measurement, Status
from perfguard.measure._probe import Probe, Reading
from perfguard.measure._ran_on import RanOn
from perfguard.measure._steps import StepTimer

if TYPE_CHECKING:
    from perfguard.devices import Device

T = TypeVar("T")

_OUT_OF_MEMORY_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "std::bad_alloc",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)


class Run:
    """Measures one trial from :meth:`start` to :meth:`finish`. Also a context manager.

    The measurement names the device that really ran: the CUDA device on which this process made tensors, else the processor. See
    :meth:`Measurement.is_of`.

    :meth:`step` marks a step. If the trial never calls it, every ``optimizer.step()`` of the thread marks one.

    Several runs of one process on the same device cannot be separated, so their memory and energy are not measured. Runs in
    several processes are separated by NVML's figures for each process.

    Example:
        >>> from perfguard.devices import cpu
        >>> with Run(cpu()) as run:
        ...     for batch in range(3):
        ...         run.step()
        >>> run.measurement.num_steps
        3

    Args:
        device: where the trial is meant to run.
        probe: what measures it. None: the resident set on a CPU; PyTorch's allocator and NVML on a GPU.
    """

    def __init__(self, device: Device, *, probe: Probe | None = None) -> None:
        self._device = device
        self._probe: Probe = probe or (CpuProbe() if device.kind == "cpu" else GpuProbe(device.context_bytes))
        self._timer = StepTimer(self._probe.stamp)
        self._marked_by_hand = False
        self._overlapped = False
        self._started_at = 0.0
        self._thread = threading.get_ident()
        self.measurement: Measurement | None = None

    def start(self) -> Run:
        """Begin; the calling thread's optimizer steps are this run's from now on."""
        _install_optimizer_hook()
        _load_kernels()
        self._thread = threading.get_ident()
        with _lock:
            alive = {thread.ident for thread in threading.enumerate()}
            for thread in [thread for thread in _active if thread not in alive]:
                del _active[thread]  # its thread ended without finishing it
            # A run that this thread has begun before waits, or was abandoned, while this one lasts.
            self._overlapped = any(self._shares_with(other) for thread, other in _active.items() if thread != self._thread)
            for other in _active.values():
                other._overlapped |= other._shares_with(self)
            _active[self._thread] = self
        if not self._overlapped:
            self._probe.start()
        self._started_at = time.perf_counter()
        return self

    def _shares_with(self, other: Run) -> bool:
        """Whether what ``other`` uses shows in this run's reading: on a CPU all that the process holds does."""
        return self._device.kind == "cpu" or other._device.kind != "cpu"

    def step(self) -> None:
        """Mark the end of one training step."""
        if not self._marked_by_hand:
            self._marked_by_hand = True
            self._timer = StepTimer(self._probe.stamp)
        self._timer.step()

    def loading(self) -> AbstractContextManager[None]:
        """Mark that the ``with`` block waits for data: it is no part of the step's time, and is reported as ``data_wait_s``."""
        return self._timer.waiting()

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """The items of ``loader``; waiting for each is marked as :meth:`loading`."""
        iterator = iter(loader)
        while True:
            with self.loading():
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    @property
    def num_steps(self) -> int:
        """Steps marked so far."""
        return self._timer.num_steps

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started_at

    @property
    def step_durations_s(self) -> list[float]:
        """Seconds between the ends of consecutive steps, in order, waits for data included."""
        return self._timer.durations_s

    def finish(self, status: Status = "ok", *, note: str = "", at_last_step: bool = False) -> Measurement:
        """End the run, now or ``at_last_step``, and return what it cost."""
        last = self._timer.last_step_at_s if at_last_step else None
        step_time_s, data_wait_s = self._timer.step_time_s(), self._timer.data_wait_s()
        total_time_s = (time.perf_counter() if last is None else last) - self._started_at
        with _lock:
            if _active.get(self._thread) is self:
                del _active[self._thread]
        self.measurement = self._measured(status, self._probe.finish(), step_time_s, data_wait_s, total_time_s, note)
        return self.measurement

    @property
    def is_elsewhere(self) -> bool:
        """Whether the run has used another device than the named one so far."""
        used = self._probe.read().ran_on
        return used is not None and not used.is_a(self._device)

    def so_far(self) -> Measurement:
        """Cost of the run until now. After its end: the final cost."""
        if self.measurement is not None:
            return self.measurement
        timer = self._timer
        return self._measured("ok", self._probe.read(), timer.step_time_s(), timer.data_wait_s(), self.elapsed_s, "")

    def _measured(
        self,
        status: Status,
        reading: Reading,
        step_time_s: float | None,
        data_wait_s: float | None,
        total_time_s: float,
        note: str,
    ) -> Measurement:
        notes = [note] if note else []
        if self._overlapped:
            notes.append("other trials ran in this process, so its memory cannot be attributed")
            reading = Reading(reading.method, driver=reading.driver, ran_on=reading.ran_on)
        if self._timer.device_time_lost:
            notes.append("the GPU's clock could not be read, so steps are timed by the processor's")
        used: Device | RanOn = self._device
        says_where = self.num_steps > 0 or status in ("ok", "oom")  # one that failed before its first step used nothing yet
        if says_where and reading.ran_on is not None and not reading.ran_on.is_a(self._device):
            used = reading.ran_on
            if used.kind != self._device.kind:  # the probe watched the wrong memory
                reading = Reading("none", driver=reading.driver, notes=reading.notes)
        return Measurement(
            status=status,
            device_id=used.id,
            device_name=used.name,
            peak_memory_bytes=reading.peak_memory_bytes,
            step_time_s=step_time_s,
            total_time_s=total_time_s,
            num_steps=self.num_steps,
            method=reading.method,
            framework=_framework(),
            note="; ".join([*notes, *reading.notes]),
            allocated_peak_bytes=reading.allocated_peak_bytes,
            reserved_peak_bytes=reading.reserved_peak_bytes,
            sm_utilisation=reading.sm_utilisation,
            energy_j=reading.energy_j,
            sm_clock_hz=reading.sm_clock_hz,
            throttled=reading.throttled,
            data_wait_s=data_wait_s,
            oom_retries=reading.oom_retries,
            driver=reading.driver,
            confidence=reading.confidence,
            host=platform.node(),
        )

    def __enter__(self) -> Run:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.finish(status_of(error), note="" if error is None else f"{type(error).__name__}: {error}"[:200])


def status_of(error: BaseException | None) -> Status:
    """The status of a run that ended with ``error``.

    KeyboardInterrupt and the like (a cancelled task, ``sys.exit(0)``) are no errors of the trial: "interrupted". A trial that
    exits with another code than 0 has failed.
    """
    if error is None:
        return "ok"
    if not isinstance(error, Exception):
        return "failed" if isinstance(error, SystemExit) and error.code else "interrupted"
    if isinstance(error, MemoryError) or any(sign in str(error).lower() for sign in _OUT_OF_MEMORY_SIGNS):
        return "oom"
    return "timeout" if isinstance(error, TimeoutError) else "failed"


_lock = threading.Lock()
_active: WeakValueDictionary[int, Run] = WeakValueDictionary()  # a run that was dropped unfinished is over
_hook_installed = False


def _install_optimizer_hook() -> None:
    global _hook_installed
    with _lock:
        if _hook_installed:
            return
        _hook_installed = True
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(_after_optimizer_step)


@functools.cache
def _load_kernels() -> None:
    """Let torch load its kernels and start its threads now, so that the first trial is not charged for them."""
    import torch

    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        network = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3), torch.nn.Flatten(), torch.nn.Linear(1568, 8))
        optimizer = torch.optim.Adam(network.parameters())
        network(torch.ones(4, 8, 16, 16)).sum().backward()
        optimizer.step()


def _after_optimizer_step(optimizer: Any, *_: Any) -> None:
    run = _active.get(threading.get_ident())
    if run is None or run._marked_by_hand:
        return
    if not any(parameter.is_meta for group in optimizer.param_groups for parameter in group["params"][:1]):  # being traced
        run._timer.step()


def _framework() -> str:
    import torch

    return f"torch{torch.__version__}"
