"""Pace: how long a running trial will take, from the steps that it has made."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from perfguard.predictor import Estimate

_WARM_UP_STEPS = 5
_BLOCKS = 10
_STEPS_A_BLOCK = 2
_STUDENT = 1.11
"""0.95 quantile of Student's t with nine degrees of freedom over that of the normal distribution."""
_LEAST_LOG_SIGMA = 0.01


def total_time_at_pace(step_durations_s: Sequence[float], *, elapsed_s: float, steps: int) -> Estimate | None:
    """The time of a trial of ``steps`` steps, of which some are done.

    What is left takes the mean duration a step. How sure that is comes from batch means: the steps after the first five form
    ten blocks in order, and the spread of the blocks' means carries slow drift that single steps would hide (Law and Carson
    1979, "A sequential procedure for determining the length of a steady-state simulation").

    Args:
        step_durations_s: of the steps so far, in order.
        elapsed_s: since the trial's launch.
        steps: of the whole trial.

    Returns:
        None while fewer than 25 steps are done: one slow step proves nothing.
    """
    warm = step_durations_s[_WARM_UP_STEPS:]
    if len(warm) < _BLOCKS * _STEPS_A_BLOCK:
        return None
    size = len(warm) // _BLOCKS
    recent = warm[len(warm) - size * _BLOCKS :]
    means = [statistics.fmean(recent[start : start + size]) for start in range(0, len(recent), size)]
    steps_left = max(0, steps - len(step_durations_s))
    total_s = elapsed_s + steps_left * statistics.fmean(means)
    error_s = steps_left * statistics.stdev(means) / math.sqrt(_BLOCKS) * _STUDENT
    return Estimate(max(total_s, 1e-9), max(error_s / max(total_s, 1e-9), _LEAST_LOG_SIGMA))
