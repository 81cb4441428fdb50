"""Pace: a running trial's total time from the steps it has made, with an interval."""

from __future__ import annotations

import random

import pytest

from perfguard import Estimate
from perfguard.pace import Pace


def total_time_at_pace(step_durations_s: list[float], *, elapsed_s: float, steps: int) -> Estimate | None:
    pace = Pace.of(step_durations_s)
    return None if pace is None else pace.total_time(elapsed_s=elapsed_s, steps_left=steps - len(step_durations_s))


def test_one_slow_step_proves_nothing() -> None:
    assert total_time_at_pace([60.0], elapsed_s=60, steps=1000) is None
    assert total_time_at_pace([0.1] * 24, elapsed_s=2.4, steps=1000) is None


def test_a_steady_pace_is_extrapolated() -> None:
    total = total_time_at_pace([0.1] * 100, elapsed_s=12.0, steps=1000)
    assert total is not None
    assert total.median == pytest.approx(12.0 + 900 * 0.1)
    assert total.log_sigma == pytest.approx(0.01)
    warmed_up = total_time_at_pace([10.0] * 5 + [0.1] * 50, elapsed_s=55.0, steps=155)
    assert warmed_up is not None
    assert warmed_up.median == pytest.approx(55.0 + 100 * 0.1), "the warm-up does not count for what is left"


def test_slow_drift_widens_the_interval() -> None:
    drifting = [0.1 + 0.1 * (step // 20 % 2) for step in range(205)]
    mixed = [0.1 + 0.1 * (step % 2) for step in range(205)]
    wide = total_time_at_pace(drifting, elapsed_s=30, steps=10_000)
    narrow = total_time_at_pace(mixed, elapsed_s=30, steps=10_000)
    assert wide is not None
    assert narrow is not None
    assert wide.log_sigma > 3 * narrow.log_sigma


def test_the_interval_holds_what_it_says() -> None:
    """Of 400 trials whose steps scatter by 50%, nine in ten end within the interval that was given after 60 steps."""
    draw = random.Random(0)
    held = 0
    for _ in range(400):
        steps = [draw.lognormvariate(-2, 0.5) for _ in range(400)]
        total = total_time_at_pace(steps[:60], elapsed_s=sum(steps[:60]), steps=400)
        assert total is not None
        low, high = total.interval(0.9)
        held += low <= sum(steps) <= high
    assert 0.8 <= held / 400 <= 0.97
