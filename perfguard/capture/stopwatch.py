"""Stopwatch: where the seconds of a dry run went, by the clock.

set-up     from the first line of the objective to the first forward pass of a model: imports, data, the model
batches    reading samples and making batches of them
steps      what was recorded, and what ran between: evaluations, metrics, checkpoints
counting   the loop without its model
graphs     making graphs of what was recorded
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, get_args

Part = Literal["set-up", "batches", "steps", "counting", "graphs"]


class Stopwatch:
    """Counts the seconds of each part of a dry run. It begins with the set-up.

    Args:
        now: returns the time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._part: Part = "set-up"
        self._since = now()
        self._seconds: dict[Part, float] = dict.fromkeys(get_args(Part), 0.0)

    def enter(self, part: Part) -> Part:
        """Count for ``part`` from now on. Return for which it was counted before."""
        before = self._part
        now = self._now()
        self._seconds[before] += now - self._since
        self._part = part
        self._since = now
        return before

    @contextmanager
    def within(self, part: Part) -> Iterator[None]:
        """Count the block for ``part``."""
        before = self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of each part so far, in their order."""
        self.enter(self._part)
        return {str(part): seconds for part, seconds in self._seconds.items()}
