"""A time budget is checked for trials of unknown length too: by the steps of finished trials, as unsure as these disagree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfguard.exceptions import ConfigurationError, UnguardedTrialWarning
from perfguard.graph import trace
from perfguard.guard import Guard
from perfguard.log import MeasurementStore
from perfguard.predictor import HALF_INTERVAL, Observation
from perfguard.steps import Steps, steps_of_finished
from perfguard.verdict import Verdict
from perfguard.workload import CapturedTrial
from tests.perfguard.test_guard import DEVICE, MEASUREMENT, WORKLOAD, Oracle

GRAPH = trace(WORKLOAD)
CAPTURED = CapturedTrial(GRAPH, steps_per_epoch=50, unseen="it was in a hurry")


def finished(*counts: int, per_epoch: float | None = None, study: str = "s", **fields: Any) -> list[Observation]:
    measurements = [replace(MEASUREMENT, num_steps=count, **fields) for count in counts]
    return [Observation(GRAPH, DEVICE, measured, study=study, steps_per_epoch=per_epoch) for measured in measurements]


def steps_of(runs: Sequence[Observation], per_epoch: int | None = None, study: str = "s") -> Steps | None:
    return steps_of_finished(runs, study=study, steps_per_epoch=per_epoch)


@pytest.mark.parametrize(
    ("counts", "median", "factor"),  # the 90% interval is the median times and over the factor
    [
        ([100], 100, 2.0),
        ([100] * 4, 100, 2 ** (1 / 4)),
        ([50, 200], 100, 2**3 * 2 ** (1 / 2)),  # 3/1 of a factor of two
        ([50, 100, 200], 100, 2**2 * 2 ** (1 / 3)),  # 4/2
        ([100] * 19 + [1], 100, 2 ** (1 / 20)),  # the nineteenth of twenty distances: one that stopped at once widens nothing
    ],
)
def test_interval_of_steps_worked_by_hand(counts: list[int], median: int, factor: float) -> None:
    found = steps_of(finished(*counts))
    assert found is not None
    assert found.number == median
    assert math.exp(HALF_INTERVAL * found.log_sigma) == pytest.approx(factor)


@given(st.lists(st.integers(2, 10**6), min_size=1, max_size=30), st.integers(2, 10))
def test_interval_grows_with_disagreement_and_not_with_the_unit(counts: list[int], factor: int) -> None:
    found, scaled, spread = (
        steps_of(finished(*others)) for others in (counts, [factor * n for n in counts], [n**factor for n in counts])
    )
    assert found is not None
    assert scaled is not None
    assert spread is not None
    assert scaled.log_sigma == pytest.approx(found.log_sigma)
    assert spread.log_sigma >= found.log_sigma * (1 - 1e-9)


@pytest.mark.parametrize(("last", "number"), [(400, 1600), (100, 100)], ids=["they count epochs", "they count steps"])
def test_trials_show_what_they_count_with_another_batch(last: int, number: int) -> None:
    found = steps_of(finished(100, 100, per_epoch=10) + finished(last, per_epoch=40), per_epoch=160)
    assert found is not None
    assert found.number == pytest.approx(number, rel=0.1)
    assert found.remark == f"steps: about {found.number:,}, from 3 finished trials"


def test_interval_holds_both_units_until_one_of_them_shows() -> None:
    """Ten equal trials do not say whether the next, with batches a thousandth as large, makes 100 steps or 100,000."""
    found = steps_of(finished(*[100] * 10, per_epoch=10), per_epoch=10_000)
    assert found is not None
    reach = math.exp(HALF_INTERVAL * found.log_sigma)
    assert found.number / reach < 100 < 100_000 < found.number * reach
    same = steps_of(finished(*[100] * 10, per_epoch=10), per_epoch=10)
    assert same is not None
    assert math.exp(HALF_INTERVAL * same.log_sigma) == pytest.approx(2 ** (1 / 10))


def test_only_whole_trials_of_the_own_study_count() -> None:
    others = finished(7, study="another") + finished(7, status="oom") + finished(7, cut_short="by the tuner") + finished(0)
    assert steps_of(others) is None
    assert steps_of(finished(100) + others) == steps_of(finished(100))
    assert steps_of(finished(100, study=""), study="") is None


def verdict_after(counts: Sequence[int], log: MeasurementStore, **settings: Any) -> Verdict:
    guard = Guard(DEVICE, predictor=Oracle(), log=log, **{"time_budget": "1h", **settings})
    for count in counts:
        decision = guard.decide(CAPTURED, study="s")
        guard.learn(decision, replace(MEASUREMENT, step_time_s=0.5, num_steps=count, total_time_s=count))
    return guard.decide(CAPTURED, study="s").verdict


@pytest.mark.filterwarnings("ignore::perfguard.exceptions.UnguardedTrialWarning")
def test_verdict_is_as_unsure_as_finished_trials_disagree() -> None:
    log = MeasurementStore(":memory:")
    same = verdict_after([100, 100, 100], MeasurementStore(":memory:"))
    other = verdict_after([50, 100, 200], log)
    assert [verdict.predicted["time"].median for verdict in (same, other)] == pytest.approx([50.0, 50.0])
    assert same.predicted["time"].log_sigma < 0.2 < 0.8 < other.predicted["time"].log_sigma
    assert other.reason.endswith("; steps: about 100, from 3 finished trials")
    # What another process reads from the log comes to the same.
    assert verdict_after([], log).predicted["time"].median == pytest.approx(50.0)


def test_first_trial_of_unknown_length_is_not_checked_and_says_so() -> None:
    with pytest.warns(UnguardedTrialWarning, match="in a hurry. They follow from epochs=..., or from the first trial"):
        verdict = verdict_after([], MeasurementStore(":memory:"))
    assert "time" not in verdict.predicted
    assert verdict.remark == ""


@pytest.mark.filterwarnings("ignore::perfguard.exceptions.UnguardedTrialWarning")
def test_wild_disagreement_is_judged_by_the_risk_as_any_other_doubt() -> None:
    """At 1 to 10,000 epochs, 50 s predicted fit a minute more likely than not, and are far from sure to."""
    for risk, action in ((0.05, "launch"), (0, "prune")):
        verdict = verdict_after([1, 100, 10_000], MeasurementStore(":memory:"), time_budget="1min", risk=risk)
        (limit,) = [limit for limit in verdict.limits if limit.quantity == "time"]
        assert 0.4 < limit.p_violation < 0.5
        assert verdict.action == action


@pytest.mark.parametrize(("epochs", "steps"), [(3, 150), ("epochs", 350), ("Epochs", None), (None, None)])
def test_epochs_give_the_steps_unless_they_are_stated(epochs: Any, steps: int | None) -> None:
    guard = Guard(DEVICE, predictor=Oracle(), log=False, epochs=epochs)
    assert guard.with_steps(CAPTURED, {"epochs": 7}).steps == steps
    assert guard.decide(CAPTURED, study="s", params={"epochs": 7}).steps == steps
    seen = replace(CAPTURED, steps=5)  # which may be wrong: values are 0 in a dry run, so a loop may stop early
    assert guard.with_steps(seen, {"epochs": 7}).steps == (steps or 5)
    stated = replace(WORKLOAD, steps=5, steps_per_epoch=50)
    assert guard.with_steps(stated, {"epochs": 7}) is stated


@pytest.mark.parametrize("epochs", [0, -1, 1.5, True, [3]])
def test_epochs_that_cannot_be_right_are_named(epochs: Any) -> None:
    with pytest.raises(ConfigurationError, match="epochs must be at least 1, or the name of a hyperparameter, but got"):
        Guard(DEVICE, predictor=Oracle(), log=False, epochs=epochs)
