"""The guard decides by the budget and the risk, explains itself, and never stops a study by a failure of its own."""

from __future__ import annotations

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
from perfguard.exceptions import BudgetWarning, ConfigurationError, TraceError, UnguardedTrialWarning, UntrainedDeviceWarning
from perfguard.graph import OpGraph, trace
from perfguard.guard import Guard
from perfguard.log import MeasurementStore
from perfguard.measure import Measurement
from perfguard.predictor import Estimate, Observation, Prediction, Predictor
from perfguard.verdict import Verdict
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


def check(predictor: Predictor, log: MeasurementStore, **options: Any) -> Verdict:
    return Guard(DEVICE, predictor=predictor, log=log, **options).check(WORKLOAD)


#       P(memory > 10 GiB) by hand: 1 - Φ(ln(10 / median) / 0.1)
@pytest.mark.parametrize(
    ("median_gib", "risk", "action"),
    [
        (8.0, 0.05, "launch"),  # 0.013
        (8.0, 0.001, "prune"),
        (9.0, 0.01, "prune"),  # 0.146
        (9.0, 0.05, "prune"),  # STRANGERS.md A12: nothing is granted in advance
        (9.0, 0.15, "launch"),
        (12.0, 0.05, "prune"),  # 0.966
        (12.0, 0.97, "launch"),
    ],
)
def test_guard_prunes_above_the_risk_threshold(median_gib: float, risk: float, action: str, log: MeasurementStore) -> None:
    assert check(Oracle(memory=median_gib * GIB), log, risk=risk).action == action


@pytest.mark.parametrize(
    ("budget", "action", "quantities"),
    [
        ({}, "launch", ["memory"]),
        ({"memory_budget": "9GiB"}, "prune", ["memory"]),
        ({"memory_budget": 0.99}, "launch", ["memory"]),
        ({"memory_budget": 0.9}, "prune", ["memory"]),
        ({"time_budget": "1min"}, "launch", ["memory", "time"]),
        ({"time_budget": "55s"}, "prune", ["memory", "time"]),
        ({"step_time_budget": "600ms"}, "launch", ["memory", "step_time"]),
        ({"step_time_budget": "500ms"}, "prune", ["memory", "step_time"]),
        ({"cost_budget": "$0.06", "price_per_hour": 3.6}, "launch", ["memory", "cost"]),
        ({"cost_budget": 0.055, "price_per_hour": "3.60"}, "prune", ["memory", "cost"]),
        ({"time_budget": "55s", "step_time_budget": "600ms"}, "prune", ["memory", "time", "step_time"]),
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
risks = st.floats(0.001, 0.999)


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
def test_margin_is_positive_iff_guard_prunes(
    log: MeasurementStore, median: float, sigma: float, budget: int, risk: float
) -> None:
    guard = Guard(DEVICE, predictor=Oracle(memory=median, log_sigma=sigma), log=log, memory_budget=budget, risk=risk)
    verdict = guard.check(WORKLOAD)
    assume(abs(verdict.p_violation - guard.threshold) > 1e-9)
    assert (verdict.margins["memory"] > 0) == (verdict.p_violation > guard.threshold) == (verdict.action == "prune")


def test_guard_spends_spare_risk_on_doubtful_trial(log: MeasurementStore) -> None:
    """Clear trials leave it over; nothing is granted in advance."""
    oracle = Oracle(memory=9.8 * GIB)  # 0.42 to break 10 GiB
    guard = Guard(DEVICE, predictor=oracle, log=log, risk=0.05)
    assert guard.threshold == 0.05
    assert [guard.decide(WORKLOAD).verdict.action for _ in range(2)] == ["prune", "prune"]
    oracle.memory = GIB
    assert all(guard.decide(WORKLOAD).verdict.action == "launch" for _ in range(8))
    assert guard.threshold == pytest.approx(0.45)
    oracle.memory = 9.8 * GIB
    assert [guard.decide(WORKLOAD).verdict.action for _ in range(2)] == ["launch", "prune"]


@settings(max_examples=15)
@given(st.lists(medians, min_size=1, max_size=12), sigmas, st.floats(0.001, 0.5))
def test_the_expected_violations_stay_within_the_risk(
    log: MeasurementStore, proposed: list[float], sigma: float, risk: float
) -> None:
    oracle = Oracle(log_sigma=sigma)
    guard = Guard(DEVICE, predictor=oracle, log=log, risk=risk)
    accepted = []
    for median in proposed:
        oracle.memory = median
        verdict = guard.decide(WORKLOAD).verdict
        accepted += [verdict.p_violation] if verdict.action == "launch" else []
    assert sum(accepted) <= risk * max(1, len(accepted)) + 1e-9
    assert max(accepted, default=0.0) <= 0.5


@pytest.fixture
def own_log(tmp_path: Path) -> Iterator[MeasurementStore]:
    with MeasurementStore(tmp_path / "own.db") as store:
        yield store


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
        ({"risk": 0}, r"risk must lie in \(0, 1\), for instance 0.05, but got 0"),
        ({"risk": float("nan")}, "risk must lie in"),
        ({"risk": "5%"}, "risk must lie in .* but got '5%'"),
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
        assert guard.watch(trial) is not None
        assert guard.watch(trial) is None
        assert guard.trace(trial) is trial.graph
    assert len(guard._real_steps) == 1024
    assert not [found for _, found in guard._real_steps.newest_first() if found.graph is not None]
    assert guard.watch(trials[0]) is not None
