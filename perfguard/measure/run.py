"""Run: one launched trial being measured. StepTimer: how long its steps take."""

from __future__ import annotations

import functools
import platform
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from types import TracebackType
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from perfguard.devices import Device
from perfguard.measure.cpu import CpuProbe, note_trained
from perfguard.measure.gpu import GpuProbe
from perfguard.measure.measurement import CutShort, Measurement, Probe, RanOn, Reading, Status
from perfguard.pace import Pace
from perfguard.pytorch import hook_optimizers_of_fastai

_lock = threading.Lock()
_active: WeakValueDictionary[int, Run] = WeakValueDictionary()
"""The running Run of each thread. A run that was dropped unfinished is over, so the references are weak."""


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
        on_step: called with the optimizer after each of its steps. It may raise, which ends the trial there.
    """

    def __init__(self, device: Device, *, probe: Probe | None = None, on_step: Callable[[Any], object] | None = None) -> None:
        self._device = device
        self._on_step = on_step
        self._probe: Probe = probe or (CpuProbe() if device.kind == "cpu" else GpuProbe(device.context_bytes))
        self._timer = StepTimer(self._probe.stamp)
        self._marked_by_hand = False
        self._overlapped = False
        self._started_at = 0.0
        self._thread = threading.get_ident()
        self.measurement: Measurement | None = None

    def start(self) -> Run:
        """Begin; the calling thread's optimizer steps are this run's from now on."""
        _load_kernels()
        self._thread = threading.get_ident()
        with _lock:
            _install_optimizer_hook()
            hook_optimizers_of_fastai()
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

    @contextmanager
    def left_out(self, *, after_s: float) -> Iterator[None]:
        """Take the block, and the ``after_s`` seconds before it, for no part of the trial: it waits for its verdict."""
        began_s = time.perf_counter()
        with self._probe.left_out() if isinstance(self._probe, CpuProbe) else nullcontext():
            yield
        self._started_at += after_s + time.perf_counter() - began_s

    @property
    def num_steps(self) -> int:
        """Steps marked so far."""
        return self._timer.num_steps

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started_at

    @property
    def pace(self) -> Pace | None:
        """The pace of the steps so far. None: fewer than 25 are done."""
        return Pace.of(self._timer.durations_s)

    def finish(
        self, status: Status = "ok", *, note: str = "", cut_short: CutShort = "", at_last_step: bool = False
    ) -> Measurement:
        """End the run, now or ``at_last_step``, and return what it cost. ``cut_short`` says who has stopped it before its end."""
        self._timer.catch_up()  # a GPU that lags behind is still at work for this run
        last = self._timer.last_step_at_s if at_last_step else None
        total_time_s = (time.perf_counter() if last is None else last) - self._started_at
        with _lock:
            if _active.get(self._thread) is self:
                del _active[self._thread]
        measured = self._measured(status, self._probe.finish(), total_time_s, note)
        self.measurement = replace(measured, cut_short=cut_short)
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
        self._timer.catch_up()
        return self._measured("ok", self._probe.read(), self.elapsed_s)

    def _measured(self, status: Status, reading: Reading, total_time_s: float, note: str = "") -> Measurement:
        import torch

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
        first_step_at_s = self._timer.first_step_at_s
        readings = {one.name: getattr(reading, one.name) for one in fields(reading) if one.name not in ("notes", "ran_on")}
        return Measurement(
            status=status,
            device_id=used.id,
            device_name=used.name,
            step_time_s=self._timer.step_time_s(),
            total_time_s=total_time_s,
            num_steps=self.num_steps,
            framework=f"torch{torch.__version__}",
            note="; ".join([*notes, *reading.notes]),
            host=platform.node(),
            first_step_s=None if first_step_at_s is None else first_step_at_s - self._started_at,
            **readings,
        )

    def __enter__(self) -> Run:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.finish(status_of(error), note="" if error is None else f"{type(error).__name__}: {error}"[:200])


def status_of(error: BaseException | None) -> Status:
    """The status of a run that ended with ``error``.

    KeyboardInterrupt and the like (a cancelled task, ``sys.exit(0)``) are no errors of the trial: "interrupted". A trial that
    exits with another code than 0 has failed. So has one with a TimeoutError: a socket or a collective waited too long, which
    says nothing about the trial's time. The status "timeout" is for whoever stops a trial for its time.
    """
    if error is None:
        return "ok"
    if not isinstance(error, Exception):
        return "failed" if isinstance(error, SystemExit) and error.code else "interrupted"
    # The last sign is cuBLAS's and cuDNN's.
    signs = ("out of memory", "can't allocate memory", "std::bad_alloc", "status_alloc_failed")
    is_oom = isinstance(error, MemoryError) or any(sign in str(error).lower() for sign in signs)
    return "oom" if is_oom else "failed"


@functools.cache
def _install_optimizer_hook() -> None:
    """Let every optimizer of the process mark a step. The caller holds the lock: a second hook would count each step twice."""
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
    if run is None:
        return
    note_trained(optimizer)
    if run._marked_by_hand:
        return
    if not any(parameter.is_meta for group in optimizer.param_groups for parameter in group["params"][:1]):  # being traced
        run._timer.step()
        if run._on_step is not None:
            run._on_step(optimizer)


class _Mark(NamedTuple):
    at_s: float
    stamp: Any


class StepTimer:
    """Turns the ends of steps into a time per step.

    A step is the time between two ends. On a GPU, which works behind the processor's back, the ends are taken on the device.

    The rule for the warm-up: the first step has no beginning and does not count; nor do the first tenth of the other steps, at
    most ten. The median of what is left. ``stamp`` is that of the Probe.
    """

    def __init__(self, stamp: Callable[[], Any]) -> None:
        self._stamp = stamp
        self.num_steps = 0
        self.first_step_at_s: float | None = None
        """Time at which the first step ended, by ``time.perf_counter``."""
        self.last_step_at_s: float | None = None
        """Time at which the last step ended."""
        self.device_time_lost = False
        """Whether the device's clock failed, so that the processor's was taken instead."""
        self._pending: deque[_Mark] = deque()
        self._previous: _Mark | None = None
        self._steps_s: list[float] = []

    def step(self) -> None:
        """A step has ended."""
        mark = _Mark(time.perf_counter(), self._stamp())
        self.last_step_at_s = mark.at_s
        if self.first_step_at_s is None:
            self.first_step_at_s = mark.at_s
        self.num_steps += 1
        self._pending.append(mark)
        if mark.stamp is None or len(self._pending) > 256:  # a long run must not keep all marks of a device
            self._fold()

    @property
    def durations_s(self) -> list[float]:
        """Seconds between the ends of consecutive steps, in order; of a GPU's only those it has done."""
        self._fold()
        return list(self._steps_s)

    def catch_up(self) -> None:
        """Wait until the device has reached the last mark."""
        self._fold(wait=True)

    def step_time_s(self) -> float | None:
        """Median seconds of a step; None with fewer than two. Waits for the device."""
        self.catch_up()
        steps = self._steps_s[min(10, len(self._steps_s) // 10) :]
        return statistics.median(steps) if steps else None

    def _fold(self, *, wait: bool = False) -> None:
        """Turn the marks that the device has reached into seconds; if it is to ``wait``, all of them."""
        while self._pending and (wait or (stamp := self._pending[0].stamp) is None or self._has_passed(stamp)):
            mark = self._pending.popleft()
            if self._previous is not None:
                self._steps_s.append(self._seconds(self._previous, mark))
            self._previous = mark

    @staticmethod
    def _has_passed(stamp: Any) -> bool:
        try:
            return bool(stamp.query())
        except RuntimeError:
            return True  # a lost device; _seconds will see it too

    def _seconds(self, earlier: _Mark, later: _Mark) -> float:
        if earlier.stamp is not None and later.stamp is not None:
            try:
                later.stamp.synchronize()
                return float(earlier.stamp.elapsed_time(later.stamp)) / 1e3
            except RuntimeError:
                self.device_time_lost = True
        return later.at_s - earlier.at_s
