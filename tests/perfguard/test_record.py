"""One schema for a verdict: what is written into a log or a trial comes back, and its sentence is made from the numbers."""

from __future__ import annotations

from typing import Any

import pytest

from perfguard.budget import Limit
from perfguard.predictor import Estimate, Prediction
from perfguard.record import TrialRecord
from perfguard.repair import Repair
from perfguard.verdict import Verdict, chance_in_words

GIB = 2**30


def prediction(memory_gib: float, step_s: float = 0.5, sigma: float = 0.1) -> Prediction:
    step_time = Estimate(step_s, sigma)
    memory = Estimate(memory_gib * GIB, sigma)
    return Prediction(
        memory, step_time, step_time.scaled(100), "oracle-1", "toy", trained_on_device=True, widening={"memory": 2.0, "time": 1.0}
    )


def verdict(
    memory_gib: float, limit_gib: float = 10.0, *, time_limit_s: float = 60.0, accepted: float = 0.05, **changes: Any
) -> Verdict:
    predicted = prediction(memory_gib)
    assert predicted.total_time is not None
    limits = [Limit("memory", limit_gib * GIB, predicted.peak_memory), Limit("time", time_limit_s, predicted.total_time)]
    return Verdict.of(predicted, limits, accepted=accepted, **changes)


REPAIRED = Verdict(
    action="repair",
    predicted=verdict(5.0).predicted,
    limits=verdict(5.0).limits,
    repair=Repair(micro_batch_size=16, accumulation=4),
    as_proposed=verdict(20.0).limits[0],
)
VERDICTS = {
    "launched": verdict(5.0),
    "pruned for memory": verdict(20.0),
    "pruned for time": verdict(5.0, time_limit_s=10.0),
    "pruned by the bound": verdict(20.0, bound="at least 18.0 GiB (activations 18.0 GiB)"),
    "repaired": REPAIRED,
    "no remedy": Verdict(
        action="prune", predicted=verdict(20.0).predicted, limits=verdict(20.0).limits, remark="no remedy of precision helps"
    ),
    "launched all the same": Verdict(action="launch", predicted=verdict(20.0).predicted, limits=verdict(20.0).limits),
    "unguarded": Verdict(action="launch", unjudged="ValueError: no batches"),
}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("launched", "takes 50.0 s (42.4 s to 58.9 s), the budget is 60.0 s, exceeded with a chance of 3.4%"),
        (
            "pruned for memory",
            "needs 20.0 GiB (17.0 GiB to 23.6 GiB), the budget is 10.0 GiB, exceeded with a chance of over 99.9%",
        ),
        ("pruned for time", "takes 50.0 s (42.4 s to 58.9 s), the budget is 10.0 s, exceeded with a chance of over 99.9%"),
        ("pruned by the bound", "needs at least 18.0 GiB (activations 18.0 GiB), the budget is 10.0 GiB"),
        ("unguarded", "not judged: ValueError: no batches"),
    ],
)
def test_the_reason_is_made_from_the_numbers(name: str, reason: str) -> None:
    """STRANGERS.md A13: the chance and the accepted risk stand in every reason."""
    accepted = " (5.0% accepted)" if "chance" in reason else ""
    assert VERDICTS[name].reason == reason + accepted


def test_the_reasons_of_special_verdicts() -> None:
    assert REPAIRED.reason.startswith(
        "needs 20.0 GiB (17.0 GiB to 23.6 GiB), the budget is 10.0 GiB; with micro-batch 16 accumulated 4 times it "
    )
    assert VERDICTS["no remedy"].reason.endswith("accepted); no remedy of precision helps")
    assert VERDICTS["launched all the same"].reason.startswith("launched all the same: needs 20.0 GiB")


@pytest.mark.parametrize(("chance", "words"), [(0.0, "under 0.1%"), (0.413, "41.3%"), (1.0, "over 99.9%")])
def test_a_chance_never_claims_certainty(chance: float, words: str) -> None:
    assert chance_in_words(chance) == words


def record(name: str, **fields: Any) -> TrialRecord:
    return TrialRecord(number=0, verdict=VERDICTS[name], capacity_bytes=16 * GIB, **fields)


@pytest.mark.parametrize(
    ("name", "broken", "fails_at_once", "saved_s"),
    [
        ("launched", None, False, None),
        ("pruned for memory", "memory", True, None),
        ("pruned for time", "time", False, 50.0),
        ("pruned by the bound", "memory", True, None),
        ("unguarded", None, False, None),
    ],
)
def test_why_a_trial_was_pruned_has_one_answer(name: str, broken: str | None, fails_at_once: bool, saved_s: float | None) -> None:
    """STRANGERS.md A3: sentence, summary and picture gave three answers in one study."""
    found = record(name)
    assert found.broken_limit == broken
    assert (found.fails_at_once, found.saved_s) == (fails_at_once, saved_s)


def test_a_rejected_trial_that_ran_is_unguarded() -> None:
    ran = record("pruned for memory", status="oom", measured={"time": 3.0})
    assert (ran.in_words, ran.is_pruned, ran.violates, ran.is_measured) == ("unguarded", False, True, True)


@pytest.mark.parametrize(
    ("fields", "measured", "violates"),
    [
        ({}, False, False),  # still runs
        ({"status": "ok", "measured": {"memory": 9 * GIB}}, True, False),
        ({"status": "ok", "measured": {"memory": 11 * GIB}}, True, True),
        ({"status": "timeout"}, True, True),
        ({"status": "failed"}, False, False),
        ({"status": "ok", "not_measured": "it ran on a CPU"}, False, False),
    ],
)
def test_a_run_is_compared_with_its_limits(fields: Any, measured: bool, violates: bool) -> None:
    found = record("launched", **fields)
    assert (found.is_measured, found.violates) == (measured, violates)


def test_errors_are_those_of_whole_runs() -> None:
    assert record("launched", status="ok", measured={"time": 40.0}).error("time") == pytest.approx(0.25)
    assert record("launched", status="ok", measured={"time": 4.0}, stopped_early=True).error("time") is None
    assert record("launched", status="oom", measured={"memory": GIB}).error("memory") is None
