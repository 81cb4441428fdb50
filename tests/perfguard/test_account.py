"""The account of an estimate: whatever changes it, its shifts add up to log(final / physics)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from functools import partial, reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfguard.account import PHYSICS, Account, account_as_json, accounts_from_json, physics_of
from perfguard.physics import LeastMemory
from perfguard.predictor import Estimate, Prediction
from tests.doubles import TOY_GPU

Change = Callable[[Prediction], Prediction]
positive = st.floats(1e-3, 1e12)
sigmas = st.floats(0.01, 2.0)


def predicted(memory_bytes: float = 1e9, step_s: float = 0.1) -> Prediction:
    """A prediction of physics alone."""
    step_time = Estimate.of_physics(step_s, 1.4, "at peak rates")
    memory = Estimate.of_physics(memory_bytes, 0.2, "tensors that live at once")
    return Prediction(memory, step_time, step_time.scaled(100), "double-1", "toy", True)


def learnt(prediction: Prediction, factor: float, log_sigma: float) -> Prediction:
    """A stage of a predictor."""
    step_time = prediction.step_time.then(
        "this device's runs", "learnt from 3 readings", median=prediction.step_time.median * factor, log_sigma=log_sigma
    )
    overhead = step_time.scaled(100).then("overhead", "set-up", median=130 * step_time.median, log_sigma=2 * log_sigma)
    return Prediction(prediction.peak_memory, step_time, overhead, "double-1", "toy", True)


def overruled(prediction: Prediction, num_bytes: float, step_s: float) -> Prediction:
    """The lower bound decides."""
    return LeastMemory(int(num_bytes) + 1, {}, step_s).prediction(TOY_GPU, steps=100, instead_of=prediction)


changes: st.SearchStrategy[Change] = st.one_of(
    st.builds(lambda a, b: lambda before: before.at_least(a, b), positive, positive),
    st.builds(
        lambda a, b, c: lambda before: before.widened({"memory": a, "time": b}, least_memory_log_sigma=c),
        st.floats(0.3, 30), st.floats(0.3, 30), sigmas,
    ),
    st.builds(lambda a, b: partial(learnt, factor=a, log_sigma=b), st.floats(0.01, 100), sigmas),
    st.builds(lambda a: lambda before: before.with_memory_of(predicted(a), phase="the evaluation"), positive),
    st.builds(lambda a, b: partial(overruled, num_bytes=a, step_s=b), positive, positive),
)  # fmt: skip


@given(positive, positive, st.lists(changes, max_size=6))
def test_shifts_add_up_whatever_changes_a_prediction(memory_bytes: float, step_s: float, changed_by: Iterable[Change]) -> None:
    prediction = reduce(lambda before, change: change(before), changed_by, predicted(memory_bytes, step_s))
    assert prediction.total_time is not None
    for estimate, physics in (
        (prediction.peak_memory, memory_bytes),
        (prediction.step_time, step_s),
        (prediction.total_time, 100 * step_s),
    ):
        shifts = sum(stage.shift for stage in estimate.stages)
        assert shifts == pytest.approx(math.log(estimate.median / physics), abs=1e-9)
        assert physics_of(estimate.median, estimate.stages) == pytest.approx(physics, rel=1e-9)
        assert estimate.stages[0].name == PHYSICS
        assert estimate.stages[-1].log_sigma == pytest.approx(estimate.log_sigma)
    assert prediction.account["memory"] == prediction.peak_memory.stages


def test_a_stage_that_changes_nothing_leaves_no_entry() -> None:
    for step_s in (0.1, 0.3, 0.7, 1 / 3):  # 100 steps of 1/3 s, times 1/3, over 1/3, are not 100 of 1/3 to the last bit
        prediction = predicted(step_s=step_s)
        same = prediction.at_least(1.0, 1e-9).widened({}).with_memory_of(prediction, phase="the evaluation")
        assert same.account == prediction.account
    assert "energy" not in same.account


def test_other_unit_keeps_the_account_and_an_unsure_factor_is_a_stage() -> None:
    step_time = predicted().step_time
    assert step_time.scaled(50).stages == step_time.stages
    unsure = step_time.scaled(50, log_sigma=0.3, name="number of steps", why="trials differ")
    assert [(stage.name, stage.shift) for stage in unsure.stages] == [(PHYSICS, 0.0), ("number of steps", 0.0)]
    assert physics_of(unsure.median, unsure.stages) == pytest.approx(5.0)


def test_accounts_come_back_from_their_text_and_equal_ones_are_written_once() -> None:
    step_time = predicted().at_least(1.0, 0.25).step_time
    bare = Estimate(1.0, 0.1)
    text = account_as_json({"step_time": step_time, "epoch_time": step_time.scaled(10), "cost": bare})
    assert json.loads(text)["epoch_time"] == "step_time"
    read = accounts_from_json(text)
    assert read.keys() == {"step_time", "epoch_time"}
    assert _rounded(read["epoch_time"]) == _rounded(step_time.stages)
    assert account_as_json({"cost": bare}) == ""
    assert accounts_from_json("") == {}


def _rounded(account: Account) -> list[tuple[str, float, float, str]]:
    return [(stage.name, round(stage.shift, 5), round(stage.log_sigma, 5), stage.why) for stage in account]
