"""Run: one launched trial being measured."""

from __future__ import annotations

import functools
import statistics
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from perfguard.measure._cpu import PeakResidentSet
from perfguard.measure._measurement import Measurement, Status

if TYPE_CHECKING:
    from perfguard.devices import Device

_OUT_OF_MEMORY_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "std::bad_alloc",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)


class Run:
    """Measures one trial from :meth:`start` to :meth:`finish`; also a context manager.

    Steps are marked by :meth:`step`. Where the trial never calls it, every ``optimizer.step()`` of the thread marks one.
    While several runs of one process overlap, the process's memory cannot be attributed to any of them: their memory is
    reported as not measured.

    Example:
        >>> from perfguard.devices import cpu
        >>> with Run(cpu()) as run:
        ...     for batch in range(3):
        ...         run.step()
        >>> run.measurement.num_steps
        3
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory = PeakResidentSet()
        self._steps_at: list[float] = []
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
            self._overlapped = any(thread != self._thread for thread in _active)
            for other in _active.values():
                other._overlapped = True
            _active[self._thread] = self
        if not self._overlapped:
            self._memory.start()
        self._started_at = time.perf_counter()
        return self

    def step(self) -> None:
        """Mark the end of one training step."""
        if not self._marked_by_hand:
            self._marked_by_hand = True
            self._steps_at.clear()
        self._mark()

    def _mark(self) -> None:
        self._steps_at.append(time.perf_counter())

    @property
    def num_steps(self) -> int:
        """Steps marked so far."""
        return len(self._steps_at)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started_at

    @property
    def step_durations_s(self) -> list[float]:
        """Seconds between the ends of consecutive steps, in order."""
        return [later - earlier for earlier, later in zip(self._steps_at, self._steps_at[1:], strict=False)]

    def finish(self, status: Status = "ok", *, note: str = "", at_last_step: bool = False) -> Measurement:
        """End the run, now or ``at_last_step``, and return what it cost."""
        ended_at = self._steps_at[-1] if at_last_step and self._steps_at else time.perf_counter()
        total_time_s = ended_at - self._started_at
        with _lock:
            if _active.get(self._thread) is self:
                del _active[self._thread]
        self.measurement = self._measured(status, total_time_s, note)
        self._memory.stop()
        return self.measurement

    def so_far(self) -> Measurement:
        """What the run has cost until now; it goes on. After the end: what it cost."""
        return self.measurement or self._measured("ok", time.perf_counter() - self._started_at, "")

    def _measured(self, status: Status, total_time_s: float, note: str) -> Measurement:
        notes = [note] if note else []
        if self._overlapped:
            notes.append("other trials ran in this process, so its memory cannot be attributed")
        return Measurement(
            status=status,
            device_id=self._device.id,
            device_name=self._device.name,
            peak_memory_bytes=None if self._overlapped else self._memory.peak_bytes(),
            step_time_s=self._step_time_s(),
            total_time_s=total_time_s,
            num_steps=len(self._steps_at),
            method=self._memory.method,
            framework=_framework(),
            note="; ".join(notes),
        )

    def _step_time_s(self) -> float | None:
        durations_s = self.step_durations_s
        return statistics.median(durations_s) if durations_s else None

    def __enter__(self) -> Run:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.finish(status_of(error), note="" if error is None else f"{type(error).__name__}: {error}"[:200])


def status_of(error: BaseException | None) -> Status:
    """The status of a run that ended with ``error``."""
    if error is None:
        return "ok"
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
        run._mark()


def _framework() -> str:
    import torch

    return f"torch{torch.__version__}"
