"""A predictor that follows the log, weights that are better before they are used, and the way back."""

from __future__ import annotations

import functools
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from perfguard import (
    Device,
    Guard,
    Limit,
    Measurement,
    MeasurementStore,
    Observation,
    OpGraph,
    Prediction,
    Verdict,
    Workload,
    trace,
)
from perfguard.exceptions import ConfigurationError, DriftWarning, LogError, LogWarning, MeasurementWarning, PredictorError
from perfguard.learning import Learner, _why_forgetful, _why_not_better, assess, start_tuning, tune_weights
from perfguard.workload import TensorSpec
from tests.doubles import TOY_CPU as CPU
from tests.doubles import ReplayPredictor


class Tunable(ReplayPredictor):
    """A double with one weight: the factor on its step times, by the width of the first layer above 200 and below."""

    lineage = "tunable-1"
    shift_on_reference = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.factors = (1.0, 1.0)

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.lineage + ("+" if self.factors != (1.0, 1.0) else "")

    def predict(self, graph: OpGraph, device: Device, *, steps: int | None = None) -> Prediction:
        prediction = super().predict(graph, device, steps=steps)
        factor = self.factors[is_wide(graph)]
        return replace(prediction, step_time=prediction.step_time.scaled(factor, log_sigma=0.1), predictor=self.name)

    def refine(self, observations: Sequence[Observation]) -> bytes | None:
        sums: tuple[list[float], list[float]] = ([], [])
        for row in observations:
            sums[is_wide(row.graph)].append(math.log((row.measured("time") or 0.01) / 0.01))
        return None if len(observations) < 30 else repr([sum(one) / len(one) for one in sums]).encode()

    def use_refinement(self, data: bytes | None) -> None:
        try:
            logs = [0.0, 0.0] if data is None else [float(word) for word in data.decode().strip("[]").split(",")]
        except ValueError as error:
            raise PredictorError("no weights") from error
        self.factors = (math.exp(logs[0]), math.exp(logs[1]))


def is_wide(graph: OpGraph) -> bool:
    return graph.ops[0].shape[1] > 200


@functools.cache
def graphs() -> tuple[OpGraph, ...]:
    """Steps of twenty perceptrons."""
    return tuple(perceptron(width, batch) for width in range(64, 384, 32) for batch in (32, 128))


def perceptron(width: int, batch: int) -> OpGraph:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 10))
    return trace(Workload(model, (batch, 32), TensorSpec((batch,), "int64"), F.cross_entropy), target="cpu")


def fill(log: MeasurementStore, wide: float = 3.0, narrow: float = 1.0, *, repeats: int = 8, framework: str = "torch") -> None:
    """Log runs that take these factors of what the double says, by the width of their network."""
    shipped, generator = Tunable(), random.Random(0)
    for index, graph in enumerate(graphs() * repeats):
        prediction = shipped.predict(graph, CPU)
        step_s = 0.01 * (wide if is_wide(graph) else narrow) * math.exp(generator.gauss(0, 0.03))
        verdict = Verdict.of(prediction, [Limit("memory", 2**34, prediction.peak_memory)], accepted=0.05)
        decision_id = log.record_decision(verdict, graph=graph, device=CPU, study="s", trial=index, params={})
        log.record_measurement(decision_id, measurement(int(prediction.peak_memory.median), step_s, framework))


def measurement(memory: int, step_s: float, framework: str = "torch") -> Measurement:
    return Measurement("ok", "cpu", "Toy", memory, step_s, 120 * step_s, 100, "double", framework)


@pytest.fixture
def log(tmp_path: Path) -> MeasurementStore:
    return MeasurementStore(tmp_path / "log.db")


def test_better_weights_are_promoted_used_and_rolled_back(log: MeasurementStore) -> None:
    fill(log)
    generation = tune_weights(log, predictor=Tunable)
    assert generation is not None
    assert generation.promoted
    assert generation.metrics["recent time after"] < 0.1 * generation.metrics["recent time before"]
    assert str(generation).startswith("promoted; ")
    assert generation.why_rejected == ""
    net = Tunable()
    learner = Learner(net, log)
    learner.update(CPU)
    assert net.name == "tunable-1+"
    assert net.factors == pytest.approx((1.0, 3.0), rel=0.05)
    assert tune_weights(log, predictor=Tunable) is None, "nothing is new"
    assert log.roll_back("tunable-1") is None
    learner.update(CPU)
    assert net.factors == (1.0, 1.0)
    assert tune_weights(log, predictor=Tunable) is None, "the same runs do not undo a rollback"


def test_weights_without_gain_are_rejected(log: MeasurementStore) -> None:
    fill(log, wide=1.0)
    generation = tune_weights(log, predictor=Tunable)
    assert generation is not None
    assert not generation.promoted
    assert str(generation).startswith("rejected: on the newest runs, the mean error fell by ")
    assert log.promoted("tunable-1") is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"kept back memory": 0.12}, "on older runs that were kept back, the mean error of memory rose from 0.100 to 0.120"),
        ({"recent time": 0.2, "recent memory": 0.2}, "on the newest runs, the mean error fell by 0.0000, and more than 0.0040"),
    ],
)
def test_rejection_names_its_condition(changes: dict[str, float], why: str) -> None:
    """`perfguard learn` printed "rejected" and eight numbers, and not which condition said no."""
    before = {"recent memory": [0.2] * 8, "recent time": [0.2] * 8, "kept back memory": [0.1], "kept back time": [0.1]}
    after = before | {"recent memory": [0.1] * 8} | {name: [error] * len(before[name]) for name, error in changes.items()}
    found = _why_not_better(before, after)
    assert found.startswith(why)
    assert bool(found) is bool(why)


def test_rejection_names_too_few_readings_and_what_is_forgotten() -> None:
    few = {"recent memory": [0.2], "recent time": [0.2], "kept back memory": [], "kept back time": []}
    assert _why_not_better(few, few) == "the newest runs have 2 readings to judge by, and 8 are needed"
    assert _why_forgetful(0.01) == ""
    assert _why_forgetful(0.034) == "on the reference data of the shipped weights, predictions moved by 3.4%, and 1% is accepted"


def test_predictor_without_weights_is_conditioned_only(log: MeasurementStore) -> None:
    with pytest.raises(ConfigurationError, match="cannot be fine-tuned"):
        tune_weights(log, predictor=ReplayPredictor)
    fill(log, repeats=2)
    replay = ReplayPredictor()
    Learner(replay, log).update(CPU)
    assert len(replay.learnt) == 40


def test_damaged_weights_are_refused_once_and_replaced(log: MeasurementStore) -> None:
    fill(log, repeats=1)
    log.promote("another-1", b"of another lineage", {})
    log.promote("tunable-1", b"no weights", {})
    net = Tunable()
    learner = Learner(net, log)
    with pytest.warns(LogWarning, match="are not used: no weights"):
        learner.update(CPU)
    learner.update(CPU)  # said once
    assert net.name == "tunable-1"
    fill(log)
    generation = tune_weights(log, predictor=Tunable)
    assert generation is not None
    assert generation.promoted


@pytest.mark.slow
def test_fine_tuning_is_a_process(log: MeasurementStore) -> None:
    """The real command on the real predictor; whether it promotes is the rules' affair."""
    fill(log)
    assert log.url is not None
    assert start_tuning(log.url, "guardnet").wait(120) == 0


WORKLOAD = Workload(nn.Linear(32, 10), (64, 32), TensorSpec((64,), "int64"), F.cross_entropy)


def launch(guard: Guard, framework: str = "torch", *, slower: float = 1.0, memory: int | None = None) -> None:
    """A trial that costs what is predicted, but for this factor of its time, or this memory."""
    decision = guard.decide(WORKLOAD)
    prediction = decision.verdict.prediction
    assert prediction is not None
    memory = int(prediction.peak_memory.median) if memory is None else memory
    guard.learn(decision, measurement(memory, prediction.step_time.median * slower, framework))


def test_guard_warns_of_drift_and_quarantine() -> None:
    guard = Guard(CPU, log=False)
    for _ in range(3):
        launch(guard, "torch 2.13")
    with pytest.warns(DriftWarning, match=r"framework: torch 2\.13 is now torch 2\.14"):
        launch(guard, "torch 2.14")
    with pytest.warns(MeasurementWarning, match="implausible"):
        launch(guard, "torch 2.14", slower=5000.0)
    guard.log.close()


@pytest.mark.filterwarnings("error::perfguard.exceptions.MeasurementWarning")
def test_small_reading_on_cpu_is_quarantined_quietly() -> None:
    """An allocator that reuses what the process holds reads too little in honest runs, too."""
    guard = Guard(CPU, log=False)
    launch(guard)
    launch(guard, memory=1)
    (found,) = assess(guard.log.observations("cpu")).doubts
    assert (found.target, found.observation.measurement.peak_memory_bytes) == ("memory", 1)
    guard.log.close()


def test_known_drift_is_not_warned_again(log: MeasurementStore) -> None:
    fill(log, repeats=2, framework="torch 2.13")
    fill(log, repeats=2, framework="torch 2.14")
    guard = Guard(CPU, log=log)
    rows = log.observations("cpu")
    for framework in ("torch 2.13", "torch 2.14", "torch 2.13"):  # warnings are errors here
        launch(guard, framework)
    assert len(guard._assessment.changes) == 1
    assert len(guard._assessment.observations) == len(rows) + 3


def test_guard_keeps_intervals_while_log_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(CPU, log=False)
    launch(guard, slower=4.0)
    widening = dict(guard._assessment.widening)
    assert widening["memory"] != 1.0

    def away(*_: object) -> list[Observation]:
        raise LogError("the log is away")

    monkeypatch.setattr(guard.log, "observations", away)
    launch(guard, slower=0.1)
    assert guard._assessment.widening == widening
    guard.log.close()


def test_fine_tuning_that_cannot_start(log: MeasurementStore, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(CPU, log=log, refine=True)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    guard._num_runs = 23
    launch(guard)
    with pytest.warns(LogWarning, match="could not start its learner"):
        launch(guard)
