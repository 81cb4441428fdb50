"""A call that does not end is ended, and what the user does with signals goes on."""

from __future__ import annotations

import functools
import signal
import threading
import time

import pytest

from perfguard.time_limit import TimeLimitReached, call_within, uninterrupted


def test_handlers_and_timers_of_the_user_stay() -> None:
    got: list[int] = []
    before, timer = signal.signal(signal.SIGALRM, lambda number, _: got.append(number)), signal.getitimer(signal.ITIMER_REAL)
    other = signal.signal(signal.SIGURG, lambda number, _: got.append(number))
    own = signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGURG)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(TimeLimitReached, match=r"ran for 300 ms, hard_time_limit; it stood at .*test_time_limit\.py:\d+"):
            call_within(0.3, lambda: time.sleep(60))
        assert got == [signal.SIGALRM], "the user's, during the call"
        assert (signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGURG)) == own
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.signal(signal.SIGURG, other)
        signal.setitimer(signal.ITIMER_REAL, *timer)  # pytest-timeout's


def test_error_that_takes_the_place_of_the_interrupt_counts_as_it() -> None:
    def wraps() -> None:
        try:
            time.sleep(60)
        except BaseException as error:
            raise RuntimeError("training has ended") from error

    with pytest.raises(TimeLimitReached, match="stood at"):
        call_within(0.2, wraps)
    with pytest.raises(ValueError, match="its own"):
        call_within(60.0, lambda: int("its own"))


@pytest.mark.parametrize("in_main", [True, False])
def test_no_interrupt_comes_late_or_where_it_must_wait(in_main: bool) -> None:
    ends: list[str] = []

    def shielded(number: int) -> None:
        with uninterrupted():
            ends.append("begins")
            time.sleep(0.003)
            ends.append("ends")
        time.sleep(number * 5e-6)  # so that some of the calls end when they are interrupted

    def race() -> None:
        for number in range(100):
            try:
                call_within(0.002, functools.partial(shielded, number))
            except TimeLimitReached:
                pass
        sum(range(10**5))  # an interrupt that is left would come here
        ends.append("all")

    thread = threading.Thread(target=race)
    (race if in_main else thread.start)()
    if not in_main:
        thread.join()
    assert ends == ends.count("begins") * ["begins", "ends"] + ["all"]
    assert len(ends) > 20
