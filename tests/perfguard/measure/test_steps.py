"""The time of a step, by hand."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from perfguard import Measurement, Run, resolve_device
from perfguard.exceptions import ConfigurationError
from perfguard.measure import StepTimer, _steps


class Clock:
    """A processor's clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(_steps, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    return clock


def run_steps(clock: Clock, seconds: list[float]) -> StepTimer:
    timer = StepTimer(lambda: None)
    for step_s in seconds:
        clock.now_s += step_s
        timer.step()
    return timer


@pytest.mark.parametrize(
    ("seconds", "step_time_s"),
    [
        ([], None),
        ([9.0], None),
        ([9.0, 1.0], 1.0),
        ([9.0, 1.0, 2.0, 1.0, 16.0], 1.5),
        ([9.0, *[8.0] * 1, *[1.0] * 4, *[2.0] * 5], 2.0),  # of ten, one is warm-up; the median of 1 1 1 1 2 2 2 2 2
        ([9.0, *[8.0] * 10, *[1.0] * 11, *[2.0] * 179], 2.0),  # of two hundred, ten
        ([9.0, *[8.0] * 10, *[1.0] * 60, *[3.0] * 50], 1.0),
    ],
)
def test_warm_up_is_first_step_and_tenth_of_others(clock: Clock, seconds: list[float], step_time_s: float | None) -> None:
    timer = run_steps(clock, seconds)
    assert timer.step_time_s() == step_time_s
    assert timer.num_steps == len(seconds)
    assert timer.durations_s == seconds[1:]


def test_marked_waits_are_no_part_of_a_step(clock: Clock) -> None:
    timer = StepTimer(lambda: None)
    for wait_s in (7.0, 1.0, 0.0, 2.0):
        with timer.waiting():
            clock.now_s += wait_s
        clock.now_s += 3.0
        timer.step()
    assert timer.step_time_s() == 3.0
    assert timer.data_wait_s() == 1.0
    assert timer.durations_s == [4.0, 3.0, 5.0]


def test_a_wait_that_was_not_marked_is_not_known(clock: Clock) -> None:
    assert run_steps(clock, [1.0] * 5).data_wait_s() is None


def test_a_run_tells_its_loaders_wait(clock: Clock) -> None:
    def loader() -> itertools.chain[int]:
        def slow() -> int:
            clock.now_s += 5.0
            return 1

        return itertools.chain(slow() for _ in range(6))

    run = Run(resolve_device("cpu")).start()
    seen = []
    for batch in run.batches(loader()):
        seen.append(batch)
        clock.now_s += 2.0
        run.step()
    measurement = run.finish()
    assert seen == [1] * 6
    assert (measurement.step_time_s, measurement.data_wait_s, measurement.num_steps) == (2.0, 5.0, 6)


def test_a_wait_that_raises_is_closed(clock: Clock) -> None:
    timer = run_steps(clock, [1.0])

    def fail() -> None:
        clock.now_s += 4.0
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"), timer.waiting():
        fail()
    clock.now_s += 1.0
    timer.step()
    assert (timer.step_time_s(), timer.data_wait_s()) == (1.0, 4.0)


def test_measurement_refuses_unknown_confidence() -> None:
    with pytest.raises(ConfigurationError, match="must be one of high, medium, low or None, but got 'sure'"):
        Measurement("ok", "cpu", "CPU", None, None, 1.0, 0, "vmhwm", "torch", confidence="sure")  # type: ignore[arg-type]
