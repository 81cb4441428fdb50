"""The guard decides by the budget and the risk, explains itself, and never stops a study by a failure of its own."""

from __future__ import annotations

import math
import os
import pickle
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from perfguard.devices import Device
from perfguard.exceptions import (
    BudgetWarning,
    ConfigurationError,
    LogWarning,
    TraceError,
    UnguardedTrialWarning,
    UntrainedDeviceWarning,
)
from perfguard.graph import OpGraph, trace
from perfguard.guard import Guard
from perfguard.guard_time import GuardClock
from perfguard.log import MeasurementStore
from perfguard.measure import Measurement
from perfguard.predictor import Estimate, Observation, Prediction, Predictor
from perfguard.risk_budget import MOST_DOUBTFUL
from perfguard.verdict import ALIKE, Verdict
from perfguard.workload import CapturedTrial, Workload
from tests.doubles import TOY_GPU

GIB = 2**30
DEVICE = replace(TOY_GPU, name="Toy 10G", memory_bytes=10 * GIB, peak_flops={"fp32": 1e12}, context_bytes=2**28)
MEASUREMENT = Measurement(
    status="ok", device_id="toy", device_name="Toy 10G", peak_memory_bytes=9 * GIB, step_time_s=0.3, total_time_s=30.0,
    num_steps=100, method="double", framework="torch",
)  # fmt: skip


@dataclass
class Oracle:
    """A predictor that says what it was told to, and remembers what it is taught."""

    memory: float = 8 * GIB
    step_time_s: float = 0.5
    log_sigma: float = 0.1
    trained_on_device: bool = True
    failure: str = ""
    taught: list[list[Observation]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return "oracle-1"

    def predict(self, graph: OpGraph, device: Device, *, steps: int | None = None) -> Prediction:
        if self.failure:
            raise RuntimeError(self.failure)
        step_time = Estimate(self.step_time_s, self.log_sigma)
        total_time = None if steps is None else step_time.scaled(steps)
        memory = Estimate(self.memory, self.log_sigma)
        return Prediction(memory, step_time, total_time, self.name, device.id, self.trained_on_device)

    def fine_tune(self, observations: Sequence[Observation]) -> None:
        self.taught.append(list(observations))


WORKLOAD = Workload(nn.Linear(8, 4, device="meta"), (2, 8), loss=lambda output: output.sum(), steps=100)
UNTRACEABLE = Workload(nn.Linear(8, 4, device="meta"), (2, 9), loss=lambda output: output.sum())


@pytest.fixture(scope="module")
def log() -> Iterator[MeasurementStore]:
    with MeasurementStore(":memory:") as store:
        yield store


@pytest.fixture
def own_log(tmp_path: Path) -> Iterator[MeasurementStore]:
    with MeasurementStore(tmp_path / "own.db") as store:
        yield store


def check(predictor: Predictor, log: MeasurementStore, **options: Any) -> Verdict:
    return Guard(DEVICE, predictor=predictor, log=log, **options).check(WORKLOAD)


#       P(memory > 10 GiB) by hand: 1 - Φ(ln(10 / median) / 0.1)
@pytest.mark.parametrize(
    ("median_gib", "risk", "action"),
    [
        (8.0, 0, "launch"),  # 0.013
        (9.0, 0, "prune"),  # 0.146: no failure can be afforded
        (9.0, 0.05, "launch"),
        (9.9, 0.001, "launch"),  # 0.46
        (10.1, 0.05, "prune"),  # 0.54: nothing is granted in advance
        (10.1, 0.2, "launch"),  # a failure costs some 10 s, a trial some 60 s
        (14.0, 0.9, "prune"),  # 0.9996
    ],
)
def test_guard_launches_what_fits_more_likely_than_not_or_is_worth_its_risk(
    median_gib: float, risk: float, action: str, own_log: MeasurementStore
) -> None:
    assert check(Oracle(memory=median_gib * GIB), own_log, risk=risk).action == action


@pytest.mark.parametrize(
    ("budget", "action", "quantities"),
    [
        ({}, "launch", ["memory"]),
        ({"memory_budget": "7.9GiB"}, "prune", ["memory"]),
        ({"memory_budget": 0.81}, "launch", ["memory"]),
        ({"memory_budget": 0.79}, "prune", ["memory"]),
        ({"time_budget": "51s"}, "launch", ["memory", "time"]),
        ({"time_budget": "49s"}, "prune", ["memory", "time"]),
        ({"step_time_budget": "501ms"}, "launch", ["memory", "step_time"]),
        ({"step_time_budget": "499ms"}, "prune", ["memory", "step_time"]),
        ({"cost_budget": "$0.051", "price_per_hour": 3.6}, "launch", ["memory", "cost"]),
        ({"cost_budget": 0.049, "price_per_hour": "3.60"}, "prune", ["memory", "cost"]),
        ({"time_budget": "49s", "step_time_budget": "489ms"}, "prune", ["memory", "time", "step_time"]),
    ],
)
def test_each_limit_of_the_budget_can_prune(budget: Any, action: str, quantities: list[str], log: MeasurementStore) -> None:
    guard = Guard(DEVICE, predictor=Oracle(), log=log, **budget)
    verdict = guard.check(WORKLOAD)
    assert verdict.action == action
    assert [limit.quantity for limit in verdict.limits] == list(verdict.margins) == quantities
    assert set(guard.budget.quantities) == set(quantities)


@pytest.mark.parametrize(("name", "near"), [("memory_buget", "memory_budget"), ("budget", "time_budget"), ("epoch", "epochs")])
def test_a_misspelled_setting_is_refused_with_a_name_that_exists(name: str, near: str) -> None:
    settings: Any = {name: 1}
    with pytest.raises(ConfigurationError, match=rf"There is no setting '{name}' \(did you mean '{near}'\?\)"):
        Guard(DEVICE, **settings)


medians = st.floats(0.5, 20).map(lambda gib: gib * GIB)
sigmas = st.floats(0.01, 1)
budgets = st.integers(GIB // 2, 10 * GIB)
risks = st.floats(0, 0.999)


@settings(max_examples=20)
@given(medians, sigmas, st.lists(risks, min_size=2, max_size=2), st.lists(budgets, min_size=2, max_size=2))
def test_more_budget_and_risk_never_prune_more(
    log: MeasurementStore, median: float, sigma: float, two_risks: list[float], two_budgets: list[int]
) -> None:
    oracle, (careful, bold), (small, large) = Oracle(memory=median, log_sigma=sigma), sorted(two_risks), sorted(two_budgets)
    if check(oracle, log, memory_budget=small, risk=careful).action == "launch":
        assert check(oracle, log, memory_budget=large, risk=careful).action == "launch"
        assert check(oracle, log, memory_budget=small, risk=bold).action == "launch"


@settings(max_examples=15)
@given(medians, sigmas, budgets, risks)
def test_margin_is_positive_iff_a_limit_is_more_likely_broken_than_is_accepted_for_free(
    log: MeasurementStore, median: float, sigma: float, budget: int, risk: float
) -> None:
    """Samplers get it as a constraint: log(median / limit), whatever the study can afford to lose."""
    guard = Guard(DEVICE, predictor=Oracle(memory=median, log_sigma=sigma), log=log, memory_budget=budget, risk=risk)
    verdict = guard.check(WORKLOAD)
    assume(abs(verdict.p_violation - guard.accepted) > 1e-9)
    assert (verdict.margins["memory"] > 0) == (verdict.p_violation > guard.accepted)
    assert (verdict.action == "prune") == (verdict.p_violation > verdict.accepted)
    if risk:
        assert verdict.margins["memory"] == pytest.approx(math.log(median / budget), abs=1e-9)


def test_a_doubtful_trial_is_launched_once_the_study_can_afford_its_failure(own_log: MeasurementStore) -> None:
    """The trade stands in the verdict. What runs is at stake, so it is not spent twice."""
    oracle = Oracle(memory=10.5 * GIB)  # 0.69 to exceed 10 GiB
    guard = Guard(DEVICE, predictor=oracle, log=own_log)
    first = guard.decide(WORKLOAD, study="s").verdict
    assert first.action == "prune"
    assert "chance of 68.7% (a failure would cost about 11.0 s, and 3.03 s are left to lose)" in first.reason
    oracle.memory = GIB
    for _ in range(4):
        cost = replace(MEASUREMENT, total_time_s=100.0, first_step_s=5.0, peak_memory_bytes=GIB)
        guard.learn(guard.decide(WORKLOAD, study="s"), cost)
    assert guard.decide(replace(WORKLOAD, inputs=(3, 8)), study="other").verdict.action == "launch"
    oracle.memory = 10.5 * GIB
    other = replace(WORKLOAD, inputs=(4, 8))
    doubtful = guard.decide(other, study="s")
    assert doubtful.verdict.action == "launch"
    assert doubtful.verdict.accepted == MOST_DOUBTFUL
    assert not doubtful.verdict.is_overruled
    assert "(a failure would cost about 5.50 s of the 25.0 s that are left to lose)" in doubtful.verdict.reason
    assert guard.preview(other, study="s").accepted == MOST_DOUBTFUL, "the others have 21 s left"
    assert guard.decide(other, study="new").verdict.action == "prune", "each study has its own account"
    guard.learn(doubtful, replace(MEASUREMENT, status="oom", total_time_s=24.0))
    again = guard.decide(replace(WORKLOAD, inputs=(5, 8)), study="s").verdict
    assert "a failure would cost about 24.0 s, and 2.20 s are left to lose" in again.reason


def test_processes_of_a_study_share_what_is_left_to_lose(tmp_path: Path) -> None:
    oracle = Oracle(memory=10.5 * GIB)
    guards = [Guard(DEVICE, predictor=oracle, log=str(tmp_path / "log.db"), risk=0.2) for _ in range(2)]
    actions = [guards[i % 2].decide(replace(WORKLOAD, inputs=(2 + i, 8)), study="s").verdict.action for i in range(4)]
    assert actions == ["launch", "prune", "prune", "prune"], "the first of 11 s of the 12 s that a fifth of a trial is"


def test_a_configuration_that_ran_to_its_end_is_pruned_by_its_own_readings_alone(own_log: MeasurementStore) -> None:
    """Whatever is learnt elsewhere, and however wide intervals become."""
    oracle = Oracle(memory=9 * GIB)
    guard = Guard(DEVICE, predictor=oracle, log=own_log, time_budget="60s")
    guard.learn(guard.decide(WORKLOAD, study="s"), MEASUREMENT)
    oracle.memory, oracle.step_time_s = 12 * GIB, 0.7
    verdict = guard.decide(WORKLOAD, study="s").verdict
    assert verdict.action == "launch"
    assert not verdict.is_overruled
    assert "but it ran to its end before, with 9.00 GiB and 30.0 s" in verdict.reason
    assert verdict.predicted["memory"].median == 12 * GIB, "what was predicted stays, for the intervals"
    assert guard.decide(replace(WORKLOAD, inputs=(3, 8)), study="s").verdict.action == "prune", "another one"
    assert guard.decide(replace(WORKLOAD, steps=300), study="s").verdict.action == "prune", "three times as long"
    careful = Guard(DEVICE, predictor=oracle, log=own_log, memory_budget="8.9GiB", time_budget="60s")
    assert careful.decide(WORKLOAD, study="s").verdict.action == "prune", "by its own reading"


def test_a_configuration_that_ran_out_of_memory_is_not_tried_again_while_it_is_doubtful(own_log: MeasurementStore) -> None:
    oracle = Oracle(memory=9 * GIB)
    guard = Guard(DEVICE, predictor=oracle, log=own_log, risk=0.9)
    guard.learn(guard.decide(WORKLOAD, study="s"), replace(MEASUREMENT, status="oom", total_time_s=1.0))
    oracle.memory = 10.1 * GIB
    assert guard.decide(replace(WORKLOAD, inputs=(3, 8)), study="s").verdict.action == "launch"
    verdict = guard.decide(WORKLOAD, study="s").verdict
    assert verdict.action == "prune"
    assert verdict.reason == "needs more than the 9.00 GiB at which it ran out of memory before, the budget is 10.0 GiB"


def test_grounds_launch_whatever_is_predicted_but_not_what_physics_rules_out(own_log: MeasurementStore) -> None:
    guard = Guard(DEVICE, predictor=Oracle(memory=500 * GIB), log=own_log)
    verdict = guard.decide(WORKLOAD, grounds="but a test asks for it").verdict
    assert verdict.action == "launch"
    assert verdict.reason.endswith("exceeded with a chance of over 99.9% (but a test asks for it)")
    huge = Workload(nn.Linear(8, 2**31, device="meta"), (2, 8), loss=lambda output: output.sum())
    assert guard.decide(huge, grounds="but a test asks for it").verdict.action == "prune"


def test_a_decision_is_logged_with_its_numbers(own_log: MeasurementStore) -> None:
    guard = Guard(DEVICE, predictor=Oracle(), log=own_log, memory_budget="4GiB")
    decision = guard.decide(WORKLOAD, study="tuning", trial=3, params={"width": 4})
    assert decision.verdict == guard.check(WORKLOAD)
    (logged,) = own_log.records("tuning")
    assert logged.verdict is not None
    assert (logged.decision_id, logged.number, logged.verdict.action, logged.params) == (decision.id, 3, "prune", {"width": 4})
    assert (logged.reason, logged.predictor, logged.device_id) == (decision.verdict.reason, "oracle-1", "toy")
    assert logged.predicted["memory"].median == 8 * GIB
    assert logged.limits == {"memory": 4 * GIB}


def test_predictor_failure_launches_with_one_warning(own_log: MeasurementStore) -> None:
    guard = Guard(DEVICE, predictor=Oracle(memory=99 * GIB, failure="weights on fire"), log=own_log)
    with pytest.warns(UnguardedTrialWarning, match="launches it unguarded .*RuntimeError: weights on fire") as caught:
        verdicts = [guard.decide(WORKLOAD, study="tuning", trial=trial).verdict for trial in range(3)]
    assert len(caught) == 1
    assert [verdict.action for verdict in verdicts] == ["launch"] * 3
    assert all(verdict.prediction is None for verdict in verdicts)
    assert [logged.reason for logged in own_log.records("tuning")] == ["not judged: RuntimeError: weights on fire"] * 3


def test_check_says_what_is_wrong_with_a_workload(log: MeasurementStore) -> None:
    with pytest.raises(TraceError, match="cannot be traced"):
        Guard(DEVICE, predictor=Oracle(), log=log).check(UNTRACEABLE)


def test_an_untrained_device_is_told_once(log: MeasurementStore) -> None:
    guard = Guard(DEVICE, predictor=Oracle(trained_on_device=False), log=log)
    with pytest.warns(UntrainedDeviceWarning, match="oracle-1 was not trained on such steps on Toy 10G"):
        guard.check(WORKLOAD)
    guard.check(WORKLOAD)  # a second warning would be an error here


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"risk": 1}, r"risk is the share of the device time .*, in \[0, 1\), for instance 0.05, but got 1"),
        ({"risk": -0.1}, "but got -0.1"),
        ({"risk": float("nan")}, "but got nan"),
        ({"risk": "5%"}, "but got '5%'"),
        ({"memory_budget": 40}, "memory_budget=40 is 40 bytes. Write '40GiB', or a fraction of the device such as 0.9"),
        ({"memory_budget": "12GiB"}, r"memory budget of 12.0 GiB is more than Toy 10G has \(10.0 GiB\).*fraction"),
        ({"memory_budget": "200MiB"}, r"memory budget of 200 MiB is too small.* context alone takes 256 MiB on Toy 10G"),
        ({"memory_budget": 0.025}, r"memory budget of 256 MiB is too small for any trial"),
        ({"cost_budget": "$2"}, "cost_budget needs price_per_hour, the price of an hour on the device"),
        ({"gpu": "a1000000"}, "gpu must be a name from the catalog, 'auto' or 'cpu', but got 'a1000000'"),
        ({"log": 5}, "log must be a path or URL, a MeasurementStore, None .* but got 5"),
        ({"log": ""}, "log must be a path or URL, .* but got ''"),
    ],
)
def test_an_argument_that_cannot_be_right_is_named(options: Any, message: str, log: MeasurementStore) -> None:
    arguments = {"gpu": DEVICE, "predictor": Oracle(), "log": log, **options}
    with pytest.raises(ConfigurationError, match=message):
        Guard(**arguments)


def test_a_pickled_guard_judges_the_same(own_log: MeasurementStore) -> None:
    guard = Guard(DEVICE, predictor=Oracle(), log=own_log, memory_budget="4GiB")
    verdict = guard.check(WORKLOAD)
    twin = pickle.loads(pickle.dumps(guard))
    assert twin.check(WORKLOAD) == verdict
    twin.decide(WORKLOAD, study="from the twin")
    assert len(own_log.records("from the twin")) == 1


def test_guard_without_log_writes_nothing_but_learns() -> None:
    oracle = Oracle()
    guard = Guard(DEVICE, predictor=oracle, log=False)
    guard.learn(guard.decide(WORKLOAD), MEASUREMENT)
    assert [len(observations) for observations in oracle.taught] == [0, 1]
    assert not Path(os.environ["PERFGUARD_LOG"]).exists()
    guard.log.close()


def test_guard_learn_feeds_log_to_predictor(own_log: MeasurementStore) -> None:
    oracle = Oracle()
    guard = Guard(DEVICE, predictor=oracle, log=own_log)
    for _ in range(2):
        guard.learn(guard.decide(WORKLOAD), MEASUREMENT)
    guard.decide(WORKLOAD)  # still running: nothing to learn from it
    assert [len(observations) for observations in oracle.taught] == [0, 1, 2]
    (observation, _) = oracle.taught[-1]
    assert observation.graph.content_hash == guard.trace(WORKLOAD).content_hash
    assert (observation.device, observation.measurement) == (DEVICE, MEASUREMENT)


def test_largest_phase_of_a_captured_trial_decides_its_memory(own_log: MeasurementStore) -> None:
    """A guard of the training step launched trials that died in their first evaluation, and the log has that step's graph."""
    graph, larger = (trace(replace(WORKLOAD, inputs=(size, 8))) for size in (2, 4))
    captured = CapturedTrial(graph, {"the evaluation": larger}, steps=100)

    class ByBatch(Oracle):
        def predict(self, graph: OpGraph, device: Device, *, steps: int | None = None) -> Prediction:
            self.memory = (20 if graph is larger else 5) * GIB
            return super().predict(graph, device, steps=steps)

    guard = Guard(DEVICE, memory_budget="10GiB", predictor=ByBatch(), log=own_log, on_violation="warn")
    with pytest.warns(BudgetWarning, match="needs 20.0 GiB .*; most memory is needed by the evaluation"):
        decision = guard.decide(captured, study="s")
    assert decision.verdict.source == "captured"
    assert decision.verdict.predicted["time"].median == pytest.approx(50.0)  # that of training
    guard.learn(decision, MEASUREMENT)
    record = own_log.records()[0]
    assert record.verdict is not None
    assert record.verdict.phase == "the evaluation"
    assert set(record.measured) == {"time", "step_time"}


def test_median_is_never_below_what_the_step_holds(log: MeasurementStore) -> None:
    """Whatever was learnt: 256 MiB of parameters do not fit in one byte."""
    large = Workload(nn.Linear(8192, 8192, bias=False, device="meta"), (2, 8192), loss=lambda output: output.sum(), steps=100)
    prediction = Guard(DEVICE, predictor=Oracle(memory=1.0, step_time_s=1e-12), log=log).check(large).prediction
    assert prediction is not None
    assert prediction.peak_memory.median >= 0.9 * 2 * 256 * 2**20
    assert prediction.step_time.median >= 2.5e-6
    assert prediction.total_time is not None
    assert prediction.total_time.median == pytest.approx(100 * prediction.step_time.median)


def test_predictor_that_cannot_learn_warns_once(own_log: MeasurementStore) -> None:
    """It stops nothing."""

    class Stubborn(Oracle):
        def fine_tune(self, observations: Sequence[Observation]) -> None:
            raise ValueError("too old to learn")

    with pytest.warns(UnguardedTrialWarning, match=r"could not learn from its log \(shown once\): ValueError: too old to learn"):
        guard = Guard(DEVICE, predictor=Stubborn(), log=own_log)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guard.learn(guard.decide(WORKLOAD), MEASUREMENT)
    assert own_log.records()[0].measured["step_time"] == 0.3


def test_real_steps_of_hundreds_of_structures_are_bounded() -> None:
    # A launched trial is held against its dry run once. What agrees needs no graph, and what is forgotten is watched again.
    guard, one = Guard(DEVICE, log=False, predictor=Oracle()), trace(Workload(nn.Linear(8, 8), inputs=(4, 8), mode="infer"))
    trials = [CapturedTrial(replace(one, ops=(one.ops[0]._replace(flops=number), *one.ops[1:]))) for number in range(1500)]
    for trial in trials:
        assert guard.wants_real_step(trial)
        assert not guard.wants_real_step(trial)
        assert guard.trace(trial) is trial.graph
    assert len(guard._real_steps) == 1024
    assert not [found for _, found in guard._real_steps.newest_first() if found.graph is not None]
    assert guard.wants_real_step(trials[0])


def test_guard_time_is_kept_with_verdicts_and_reported_when_it_is_too_much(
    own_log: MeasurementStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("perfguard.guard.log_once", lambda topic, message: said.append(message))
    oracle = Oracle(memory=GIB)
    guard = Guard(DEVICE, predictor=oracle, log=own_log, risk=0)
    said.clear()
    guard.clock = GuardClock(lambda: 0.0)
    for _ in range(8):
        guard.clock.add(2.0)  # of a dry run
        decision = guard.decide(WORKLOAD, study="short")
        assert decision.verdict.guard_s == 2.0
        assert not said
        guard.learn(decision, replace(MEASUREMENT, peak_memory_bytes=GIB, total_time_s=3.0))
    assert [record.guard_s for record in own_log.records()] == [2.0] * 8
    (message,) = said
    assert "dry run" not in message, "these trials are described"
    stands_in = guard.stand_ins("short")
    assert stands_in is not None
    assert said[1:] == ["From now on, no trial of 'short' is dry-run that is like one before, where all budgets have room."]
    assert stands_in(CapturedTrial(guard.trace(WORKLOAD), steps=100))
    oracle.memory = 8 * GIB
    assert not stands_in(CapturedTrial(guard.trace(WORKLOAD), steps=100)), "it fits, without room"
    oracle.memory = math.nan
    with pytest.warns(LogWarning, match="could not compare a trial with one before"):
        assert not stands_in(CapturedTrial(guard.trace(WORKLOAD), steps=100))
    assert guard.stand_ins("another") is None
    guard.strict = True
    assert guard.stand_ins("short") is None
    assert message.startswith(
        "The guard costs the study 'short' more than it saves: 16.0 s, 40% of the study; it has saved nothing so far."
    )


def test_guard_that_saves_more_than_it_costs_is_silent(own_log: MeasurementStore, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("perfguard.guard.log_once", lambda topic, message: said.append(message))
    oracle = Oracle(memory=99 * GIB)
    guard = Guard(DEVICE, predictor=oracle, log=own_log, risk=0)
    said.clear()
    guard.clock = GuardClock(lambda: 0.0)
    for number in range(20):  # a trial that crashes loses the five seconds until its first step
        guard.decide(replace(WORKLOAD, inputs=(3 + number, 8)), study="short")
    oracle.memory = GIB
    for _ in range(8):
        guard.clock.add(2.0)
        cost = replace(MEASUREMENT, peak_memory_bytes=GIB, total_time_s=3.0, first_step_s=5.0)
        guard.learn(guard.decide(WORKLOAD, study="short"), cost)
    assert not said


def test_start_of_a_guard_is_its_time(own_log: MeasurementStore) -> None:
    guard = Guard(DEVICE, predictor=Oracle(), log=own_log)
    assert guard.clock.take() > 0
    assert pickle.loads(pickle.dumps(guard)).clock.take() == 0, "another process did not wait for it"


def test_nothing_is_learnt_of_a_trial_that_another_one_stands_in_for(own_log: MeasurementStore) -> None:
    guard = Guard(DEVICE, predictor=Oracle(memory=GIB), log=own_log)
    captured = CapturedTrial(guard.trace(WORKLOAD), steps=100, source=ALIKE)
    assert not guard.wants_real_step(captured)
    decision = guard.decide(captured, study="s")
    assert (decision.verdict.action, decision.verdict.source) == ("launch", ALIKE)
    guard.learn(decision, MEASUREMENT)
    (record,) = own_log.records()
    assert record.measured["memory"] == MEASUREMENT.peak_memory_bytes
    assert own_log.observations(DEVICE) == []
