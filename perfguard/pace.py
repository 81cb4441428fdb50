"""Pace: how long a running trial will take, from the steps that it has made."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from perfguard.predictor import Estimate

_WARM_UP_STEPS = 5
_BLOCKS = 10
_STEPS_A_BLOCK = 2
LEAST_STEPS = _WARM_UP_STEPS + _BLOCKS * _STEPS_A_BLOCK
"""Steps until a pace is known: one slow step proves nothing."""
_STUDENT = 1.11
"""0.95 quantile of Student's t with nine degrees of freedom over that of the normal distribution."""
_LEAST_LOG_SIGMA = 0.01


@dataclass(frozen=True, slots=True)
class Pace:
    """The mean duration of a step, and how sure it is. Two numbers, so that a worker can report them."""

    mean_s: float
    error_s: float
    """Standard error of the mean, with slow drift and few blocks accounted for."""

    @staticmethod
    def of(step_durations_s: Sequence[float]) -> Pace | None:
        """The pace of the steps so far, in order.

        The interval comes from batch means: the steps after the first five form ten blocks in order. The spread of the blocks'
        means carries slow drift that single steps would hide. Source: Law and Carson 1979, "A sequential procedure for
        determining the length of a steady-state simulation".

        Returns:
            None while fewer than 25 steps are done: one slow step proves nothing.
        """
        warm = step_durations_s[_WARM_UP_STEPS:]
        if len(step_durations_s) < LEAST_STEPS:
            return None
        size = len(warm) // _BLOCKS
        recent = warm[len(warm) - size * _BLOCKS :]
        means = [statistics.fmean(recent[start : start + size]) for start in range(0, len(recent), size)]
        return Pace(statistics.fmean(means), statistics.stdev(means) / math.sqrt(_BLOCKS) * _STUDENT)

    def total_time(self, *, elapsed_s: float, steps_left: int) -> Estimate:
        """The time of a trial that has run for ``elapsed_s`` and has ``steps_left`` to go."""
        total_s = max(elapsed_s + steps_left * self.mean_s, 1e-9)
        return Estimate(total_s, max(steps_left * self.error_s / total_s, _LEAST_LOG_SIGMA))


class Running(Protocol):
    """A trial that runs: a :class:`perfguard.Run`, or what a worker has reported of its own."""

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""

    @property
    def num_steps(self) -> int:
        """Steps so far."""

    @property
    def pace(self) -> Pace | None:
        """The pace of the steps. None: too few are done."""

    @property
    def is_elsewhere(self) -> bool:
        """Whether it has used another device than the guarded one."""
