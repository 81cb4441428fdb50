"""The account of risk: what a study may lose in failed trials, where its times come from, and that the rule is worth it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfguard.risk_budget import EndedTrial, History, PredictedTimes, RiskBudget, RunningTrial, Shows, shows

#   p <= 1/2, or L + A + p f <= r (S + T), by hand
TRADES = [
    # r     S     L    A     f     T   accepted
    (0.05, 0.0, 0.0, 0.0, 10.0, 100.0, 0.5),  # 5 s left: half a failure
    (0.05, 0.0, 0.0, 0.0, 2.0, 100.0, 0.999),  # two failures and a half
    (0.05, 900.0, 0.0, 0.0, 100.0, 100.0, 0.5),  # 50 s of 100 s
    (0.05, 1300.0, 0.0, 0.0, 100.0, 100.0, 0.7),
    (0.05, 1300.0, 15.0, 0.0, 100.0, 100.0, 0.55),
    (0.05, 1300.0, 0.0, 15.0, 100.0, 100.0, 0.55),
    (0.05, 1300.0, 900.0, 0.0, 100.0, 100.0, 0.5),  # all is lost, and what more likely fits than not runs all the same
    (0.3, 0.0, 0.0, 0.0, 50.0, 100.0, 0.6),
    (0.0, 9e9, 0.0, 0.0, 1.0, 100.0, 0.05),  # no failure can be afforded
]


@pytest.mark.parametrize(("risk", "spent", "lost", "at_stake", "failure", "trial", "accepted"), TRADES)
def test_a_chance_is_accepted_up_to_what_is_left_over_what_a_failure_costs(
    risk: float, spent: float, lost: float, at_stake: float, failure: float, trial: float, accepted: float
) -> None:
    budget = RiskBudget(risk=risk, spent_s=spent, lost_s=lost, at_stake_s=at_stake)
    assert budget.accepted(failure_s=failure, trial_s=trial) == pytest.approx(accepted)


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (0.0, "a failure would cost about 20.0 s of the 50.0 s that are left to lose"),
        (48.0, "a failure would cost about 20.0 s, and 2.00 s are left to lose"),
        (60.0, "a failure would cost about 20.0 s, and nothing is left to lose"),
    ],
)
def test_the_trade_is_one_line(lost: float, words: str) -> None:
    assert RiskBudget(spent_s=900.0, lost_s=lost).trade(failure_s=20.0, trial_s=100.0) == words


def test_a_failure_shows_where_its_quantity_is_known() -> None:
    assert shows("memory") == shows("host_memory") == "in the step"
    assert shows("memory", phase="the evaluation") == "in a phase"
    assert shows("time") == shows("cost", phase="the evaluation") == "by the pace"
    assert shows("step_time") == shows("epoch_time") == shows("latency") == "at the end"


PREDICTED = PredictedTimes(step_s=1.0, epoch_s=50.0, trial_s=500.0)
FIRST: dict[Shows, float] = {"in the step": 12.0, "in a phase": 61.0, "by the pace": 36.0, "at the end": 511.0}
"""Seconds before a trial has ended: a set-up of 10 s by the prior, and the predicted steps."""


def test_times_come_from_the_prediction_before_a_trial_has_ended() -> None:
    history = History()
    assert history.trial_s(PREDICTED) == 511.0
    assert {when: history.failure_s(when, PREDICTED) for when in FIRST} == FIRST
    unknown = PredictedTimes(step_s=1.0)
    assert history.trial_s(unknown) == 110.0, "ten times the set-up with its first step"
    assert history.failure_s("in a phase", unknown) == 110.0
    short = PredictedTimes(step_s=1.0, trial_s=3.0)
    assert history.failure_s("by the pace", short) == 14.0, "never more than the trial"


def test_times_come_from_the_trials_of_the_study_once_there_are_some() -> None:
    ended = (EndedTrial(total_s=100.0, first_step_s=3.0), EndedTrial(total_s=300.0, first_step_s=5.0))
    history = History(ended=ended)
    assert history.trial_s(PREDICTED) == 200.0
    assert history.failure_s("in the step", PREDICTED) == 5.0, "the first step after 4 s, and a second one"
    assert history.failure_s("by the pace", PREDICTED) == 29.0
    failed = History(ended=(*ended, EndedTrial(total_s=30.0, exceeded="in the step")))
    assert failed.trial_s(PREDICTED) == 200.0
    soft = EndedTrial(total_s=300.0, exceeded="in the step", has_result=True)
    assert History(ended=(*ended, soft)).failure_s("in the step", PREDICTED) == 300.0, "nothing enforces the budget"
    assert History(ended=(*failed.ended, soft)).failure_s("in the step", PREDICTED) == 30.0
    assert failed.failure_s("in the step", PREDICTED) == 30.0
    assert failed.failure_s("by the pace", PREDICTED) == 29.0, "another kind of failure says nothing of it"
    slow = History(ended=(*ended, EndedTrial(total_s=30.0, exceeded="by the pace")))
    assert slow.failure_s("by the pace", PREDICTED) == 30.0
    long = PredictedTimes(step_s=60.0, trial_s=6000.0)
    assert slow.failure_s("by the pace", long) == 1504.0, "25 of its own steps, whatever shorter trials took"


def test_the_account_counts_ended_trials_and_what_may_still_fail() -> None:
    ended = (EndedTrial(total_s=100.0), EndedTrial(total_s=20.0, exceeded="in the step"))
    running = tuple(RunningTrial(chance=0.6, shows="in the step", age_s=age) for age in (1.0, 19.0, 21.0))
    budget = History(ended=ended, running=running).budget(0.05, PREDICTED)
    assert budget == RiskBudget(risk=0.05, spent_s=120.0, lost_s=20.0, at_stake_s=24.0), "what has run for 21 s has not failed"


trials = st.tuples(st.floats(0.5, 0.98), st.floats(0.5, 30.0), st.floats(31.0, 500.0), st.randoms(use_true_random=False))


@settings(max_examples=100)
@given(st.lists(trials, max_size=60), st.floats(0.01, 0.5))
def test_the_loss_passes_the_share_by_less_than_one_failure(
    proposed: list[tuple[float, float, float, object]], risk: float
) -> None:
    """Whatever fails. The expected loss stays within it."""
    spent = lost = 0.0
    for chance, failure_s, trial_s, random in proposed:
        budget = RiskBudget(risk=risk, spent_s=spent, lost_s=lost)
        if chance <= 0.5 or chance > budget.accepted(failure_s=failure_s, trial_s=trial_s):
            continue
        assert lost + chance * failure_s <= risk * (spent + trial_s) + 1e-9
        fails = random.random() < chance  # type: ignore[attr-defined]
        spent += failure_s if fails else trial_s
        lost += failure_s if fails else 0.0
        assert lost <= risk * (spent + trial_s) + (1 - chance) * failure_s + 1e-9


def simulated(rule: str, seed: int, *, failure: float, bias: float = 0.3, own: float = 0.15) -> tuple[float, float]:
    """A search by chance beside a limit: how far its best stays from the optimum, and the share of the time that failures took.

    A configuration has a size in (0, 1], and its gap is how far the size is from the limit of one half, from below. The predictor
    knows the logarithm of a size up to a bias of the machine and an error of each configuration. Readings and failures move
    its belief by Bayes' rule on a grid. A trial costs 1, and one that fails ``failure``. The study ends after a time of 60.
    """
    random = np.random.default_rng(seed)
    machine, grid = random.normal(0, bias), np.linspace(-4 * bias, 4 * bias, 201)
    log_belief = -0.5 * (grid / bias) ** 2
    clock = lost = 0.0
    best = 1.0
    for _ in range(600):
        if clock >= 60:
            break
        log_size = math.log(random.uniform(0.05, 1.0))
        error = machine + random.normal(0, own)
        margin = math.log(0.5) - (log_size - error)  # of the prediction
        belief = np.exp(log_belief - log_belief.max())
        exceeds = np.array([0.5 * math.erfc((margin - shift) / own / math.sqrt(2)) for shift in grid])
        chance = float(belief @ exceeds / belief.sum())
        accepted = {
            "share of time": RiskBudget(spent_s=clock, lost_s=lost).accepted(failure_s=failure, trial_s=1.0),
            "half": 0.5,
            "5%": 0.05,
        }[rule]
        if chance > accepted:
            continue
        if log_size <= math.log(0.5):
            clock += 1.0
            best = min(best, 0.5 - math.exp(log_size))
            log_belief = log_belief - 0.5 * ((error - grid) / own) ** 2
        else:
            clock += failure
            lost += failure
            log_belief = log_belief + np.log(np.maximum(exceeds, 1e-12))
    return best, lost / clock


@pytest.mark.parametrize("failure", [0.02, 0.1, 0.5])
def test_a_share_of_time_finds_more_than_a_chance_does(failure: float) -> None:
    """With a predictor that is 30% off for the machine. A chance of 5% stays far from the limit."""
    seeds = range(40)
    found = {
        rule: np.array([simulated(rule, seed, failure=failure) for seed in seeds]) for rule in ("share of time", "half", "5%")
    }
    gap, lost = found["share of time"].mean(0)
    assert gap < found["5%"].mean(0)[0]
    assert gap <= found["half"].mean(0)[0] + 0.001
    assert lost < 0.07
