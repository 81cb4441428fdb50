"""StepTimer: how long a step takes once a run is under way, and how long it waits for data."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

_WARM_UP_SHARE = 10
_MAX_WARM_UP = 10
_MAX_PENDING = 256

_Label = Literal["step", "wait begins", "wait ends"]


class _Mark(NamedTuple):
    label: _Label
    at_s: float
    stamp: Any


class StepTimer:
    """Turns the ends of steps, and the waits for data between them, into a time per step.

    A step is the time between two ends, less the waits that were marked in between. On a GPU, which works behind the
    processor's back, both are taken on the device: what it computes while the processor waits for data is no wait.

    The rule for the warm-up: the first step has no beginning and does not count; nor do the first tenth of the other steps, at
    most ten. The median of what is left.

    Args:
        stamp: a point in time on the device, or None; see ``Probe.stamp``.
    """

    def __init__(self, stamp: Callable[[], Any]) -> None:
        self._stamp = stamp
        self.num_steps = 0
        self.last_step_at_s: float | None = None
        """Time at which the last step ended, by ``time.perf_counter``."""
        self.device_time_lost = False
        """Whether the device's clock failed, so that the processor's was taken instead."""
        self._pending: deque[_Mark] = deque()
        self._previous: _Mark | None = None
        self._busy_s = self._wait_s = 0.0
        self._steps_s: list[float] = []
        self._waits_s: list[float] = []
        self._saw_wait = self._saw_step = False

    def step(self) -> None:
        """A step has ended."""
        self.last_step_at_s = self._mark("step")
        self.num_steps += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The block waits for data."""
        self._mark("wait begins")
        try:
            yield
        finally:
            self._mark("wait ends")

    @property
    def durations_s(self) -> list[float]:
        """Seconds between the ends of consecutive steps, in order, waits included; of a GPU's only those it has done."""
        while self._pending and (self._pending[0].stamp is None or self._has_passed()):
            self._fold(self._pending.popleft())
        return [busy_s + wait_s for busy_s, wait_s in zip(self._steps_s, self._waits_s, strict=True)]

    def step_time_s(self) -> float | None:
        """Median seconds of a step; None with fewer than two. Waits for the device."""
        steps = self._counted(self._steps_s)
        return statistics.median(steps) if steps else None

    def data_wait_s(self) -> float | None:
        """Mean seconds that a step waited; None if no wait was marked. Waits for the device."""
        waits = self._counted(self._waits_s)
        return statistics.fmean(waits) if waits and self._saw_wait else None

    def _counted(self, values: list[float]) -> list[float]:
        while self._pending:
            self._fold(self._pending.popleft())
        return values[min(_MAX_WARM_UP, len(values) // _WARM_UP_SHARE) :]

    def _mark(self, label: _Label) -> float:
        mark = _Mark(label, time.perf_counter(), self._stamp())
        self._pending.append(mark)
        # A device's marks are only known once it gets there; a long run must not keep all of them.
        while self._pending and (self._pending[0].stamp is None or (len(self._pending) > _MAX_PENDING and self._has_passed())):
            self._fold(self._pending.popleft())
        return mark.at_s

    def _has_passed(self) -> bool:
        try:
            return bool(self._pending[0].stamp.query())
        except RuntimeError:
            return True  # a lost device; _seconds will see it too

    def _fold(self, mark: _Mark) -> None:
        if self._previous is not None:
            elapsed_s = self._seconds(self._previous, mark)
            if mark.label == "wait ends":
                self._wait_s += elapsed_s
            else:
                self._busy_s += elapsed_s
        self._previous = mark
        self._saw_wait |= mark.label == "wait ends"
        if mark.label != "step":
            return
        if self._saw_step:
            self._steps_s.append(self._busy_s)
            self._waits_s.append(self._wait_s)
        self._saw_step = True
        self._busy_s = self._wait_s = 0.0

    def _seconds(self, earlier: _Mark, later: _Mark) -> float:
        if earlier.stamp is not None and later.stamp is not None:
            try:
                later.stamp.synchronize()
                return float(earlier.stamp.elapsed_time(later.stamp)) / 1e3
            except RuntimeError:
                self.device_time_lost = True
        return later.at_s - earlier.at_s
