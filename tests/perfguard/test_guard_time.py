"""The guard's own time is counted once, on all threads, and compared with what it saves."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest

from perfguard.guard_time import GuardClock, GuardCost, on_guard_time


class ByHand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.clock = GuardClock(lambda: self.now_s)

    @on_guard_time
    def work(self, seconds: float) -> float:
        self.now_s += seconds
        return seconds


def test_a_block_in_a_block_counts_once_and_a_pause_does_not() -> None:
    hand = ByHand()
    hand.now_s += 100  # nobody waits
    with hand.clock.running():
        hand.work(1.0)
        with hand.clock.paused():  # the user's sampler
            hand.now_s += 10
            assert hand.work(2.0) == 2.0  # which asks the guard
            hand.now_s += 10
        hand.now_s += 4.0
        assert hand.clock.take() == 7.0, "the block that goes on counts until now"
        hand.now_s += 8.0
    assert hand.clock.take() == 8.0
    assert hand.clock.take() == 0.0


def test_an_error_ends_a_block() -> None:
    hand = ByHand()
    with suppress(KeyboardInterrupt), hand.clock.running():
        hand.now_s += 1
        raise KeyboardInterrupt
    hand.now_s += 100
    assert hand.clock.take() == 1.0


def test_threads_wait_for_themselves_and_add_up() -> None:
    hand = ByHand()
    with hand.clock.running():
        other = threading.Thread(target=hand.clock.take)  # which waits for nothing
        other.start()
        other.join()
        worker = threading.Thread(target=hand.work, args=(3.0,))
        worker.start()
        worker.join()
    assert hand.clock.take() == 6.0


@pytest.mark.parametrize(
    ("guard_s", "launched_s", "saved_s", "is_too_high", "words"),
    [
        (6.7, 25.2, 0.0, True, "6.70 s, 21% of the study; it has saved nothing so far"),
        (6.7, 25.2, 5.0, True, "6.70 s, 21% of the study; the pruned trials would have taken about 5.00 s (an estimate)"),
        (6.7, 25.2, 40.0, False, "6.70 s, 21% of the study; the pruned trials would have taken about 40.0 s (an estimate)"),
        (6.7, 25.2, None, False, "6.70 s, 21% of the study; how long the pruned trials would have taken is not known"),
        (6.7, 670.0, 0.0, False, "6.70 s, 1% of the study; it has saved nothing so far"),
        (0.5, 0.5, 0.0, False, "500 ms, 50% of the study; it has saved nothing so far"),
    ],
)
def test_cost_beside_what_it_saves(
    guard_s: float, launched_s: float, saved_s: float | None, is_too_high: bool, words: str
) -> None:
    cost = GuardCost(guard_s=guard_s, launched_s=launched_s, saved_s=saved_s)
    assert cost.is_too_high is is_too_high
    assert str(cost) == words


def test_share_is_unknown_where_the_time_of_trials_is() -> None:
    unknown = GuardCost(guard_s=6.7, launched_s=None, saved_s=0.0)
    assert (unknown.share, unknown.is_too_high) == (None, False)
    assert str(unknown) == "6.70 s; it has saved nothing so far"
    assert GuardCost(guard_s=0.0, launched_s=0.0, saved_s=0.0).share is None


def test_the_largest_part_of_the_dry_runs_is_named() -> None:
    cost = GuardCost(guard_s=6.0, launched_s=54.0, saved_s=0.0, dry_run_s={"set-up": 3.0, "steps": 1.0})
    assert str(cost).startswith("6.00 s, 10% of the study (dry runs 4.00 s, most of it set-up: 3.00 s); ")


def test_seconds_of_dry_runs_are_taken_once() -> None:
    clock = GuardClock()
    clock.note_dry_run({"set-up": 1.0})
    clock.note_dry_run({"set-up": 2.0, "steps": 0.5})
    assert clock.take_dry_runs() == {"set-up": 3.0, "steps": 0.5}
    assert clock.take_dry_runs() == {}
    assert clock.take() == 0.0
