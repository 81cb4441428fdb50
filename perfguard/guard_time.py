"""The guard's own time: what a study waits for because of PerfGuard, by the clock, beside what that has saved.

    GuardClock    counts the seconds of one guard, on all threads
    GuardCost     compares them with the time of the study, and with what pruned trials would have taken

Counted are the guard's own start, dry runs, predictions, the start and end of a measurement, the writing of verdicts into the log
and the trial, and learning. The marks at the steps of a trial are not counted, nor is the import of the package.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from perfguard.quantities import format_seconds

P = ParamSpec("P")
T = TypeVar("T")


class GuardClock:
    """Counts the seconds that a study waits for its guard.

    Each thread waits for itself, and all seconds are added up. A block in a block counts once.

    Args:
        now: returns the time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._counted_s = 0.0
        self._dry_run_s: dict[str, float] = {}
        self._thread = threading.local()

    def running(self) -> AbstractContextManager[None]:
        """Count the time of a ``with`` block."""
        return self._during(runs=True)

    def paused(self) -> AbstractContextManager[None]:
        """Leave out a ``with`` block, such as the work of the user's sampler in the middle of a dry run."""
        return self._during(runs=False)

    @contextmanager
    def _during(self, *, runs: bool) -> Iterator[None]:
        ran = self._switch(runs=runs)
        try:
            yield
        finally:
            self._switch(runs=ran)

    def add(self, seconds: float) -> None:
        """Count ``seconds`` that another clock has measured."""
        with self._lock:
            self._counted_s += seconds

    def note_dry_run(self, seconds: Mapping[str, float]) -> None:
        """Note where the time of a dry run went, in ``seconds`` by part. They are counted already."""
        with self._lock:
            for part, part_s in seconds.items():
                self._dry_run_s[part] = self._dry_run_s.get(part, 0.0) + part_s

    def take_dry_runs(self) -> dict[str, float]:
        """Return the seconds of the dry runs since the call before, by part."""
        with self._lock:
            taken = self._dry_run_s
            self._dry_run_s = {}
        return taken

    def take(self) -> float:
        """Return the seconds since the call before, on all threads. Of blocks that go on, that of the calling thread counts."""
        self._switch(runs=self._began_s is not None)
        with self._lock:
            taken_s = self._counted_s
            self._counted_s = 0.0
        return taken_s

    @property
    def _began_s(self) -> float | None:
        """When this thread began to count. None: it does not."""
        began_s: float | None = getattr(self._thread, "began_s", None)
        return began_s

    def _switch(self, *, runs: bool) -> bool:
        """Add what this thread has counted, and count from now on if it ``runs``. Return whether it did before."""
        now_s = self._now()
        began_s = self._began_s
        self._thread.began_s = now_s if runs else None
        if began_s is None:
            return False
        self.add(now_s - began_s)
        return True


class _HasClock(Protocol):
    @property
    def clock(self) -> GuardClock: ...


C = TypeVar("C", bound=_HasClock)


def on_guard_time(method: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T]:
    """Decorate a method of an object that has a ``clock``: its calls count as time of the guard."""

    @functools.wraps(method)
    def timed(self: C, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.clock.running():
            return method(self, *args, **kwargs)

    return timed


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardCost:
    """What a guard has cost a study, beside what it has saved.

    Example:
        >>> print(GuardCost(guard_s=6.7, launched_s=25.2, saved_s=40.0))
        6.70 s, 21% of the study; the pruned trials would have taken about 40.0 s (an estimate)
    """

    guard_s: float
    """What the study waited for the guard."""
    launched_s: float | None
    """Time of the launched trials. None: unknown."""
    saved_s: float | None
    """Estimated time that the pruned trials would have taken. None: unknown for one of them at least. 0: none was pruned."""
    dry_run_s: Mapping[str, float] = field(default_factory=dict)
    """Of the guard's time, that of dry runs, by part (:mod:`perfguard.capture.stopwatch`). Empty: there were none."""
    most_share: float = 0.1
    """Share of the study's time up to which the guard's own is small, whatever it saves."""
    least_s: float = 1.0
    """Time of the guard that is worth a word."""

    @property
    def share(self) -> float | None:
        """The guard's share of the study's time. None: unknown."""
        if self.launched_s is None or not self.guard_s:
            return None
        return self.guard_s / (self.guard_s + self.launched_s)

    @property
    def is_too_high(self) -> bool:
        """Whether the guard costs more than it saves, and more than a small share of the study's time."""
        if self.share is None or self.saved_s is None or self.guard_s < self.least_s:
            return False
        return self.share > self.most_share and self.guard_s > self.saved_s

    @property
    def in_short(self) -> str:
        """The time and its share, such as "6.70 s, 21% of the study"."""
        return format_seconds(self.guard_s) + ("" if self.share is None else f", {self.share:.0%} of the study")

    def __str__(self) -> str:
        if self.saved_s is None:
            saved = "how long the pruned trials would have taken is not known"
        elif self.saved_s == 0:
            saved = "it has saved nothing so far"
        else:
            saved = f"the pruned trials would have taken about {format_seconds(self.saved_s)} (an estimate)"
        return f"{self.in_short}{self._of_dry_runs}; {saved}"

    @property
    def _of_dry_runs(self) -> str:
        if not self.dry_run_s:
            return ""
        part, part_s = max(self.dry_run_s.items(), key=lambda item: item[1])
        return f" (dry runs {format_seconds(sum(self.dry_run_s.values()))}, most of it {part}: {format_seconds(part_s)})"
