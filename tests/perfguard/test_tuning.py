"""A predictor that follows the log, weights that are better before they are used, and the way back."""

from __future__ import annotations

import functools
import math
import random
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

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
    TensorSpec,
    Verdict,
    Workload,
    trace,
)
from perfguard.exceptions import ConfigurationError, DriftWarning, LogWarning, MeasurementWarning
from perfguard.learning import FineTuneProcess, Learner, assess, tune_weights
from perfguard_models import guardnet
from perfguard_models.guardnet import GuardNet
from tests.doubles import TOY_CPU as CPU
from tests.doubles import ReplayPredictor


@functools.cache
def graphs() -> tuple[OpGraph, ...]:
    """Steps of forty perceptrons, half of them with batch norm."""
    return tuple(perceptron(width, batch, norm) for width in range(64, 384, 32) for batch in (32, 128) for norm in (False, True))


@functools.cache
def shipped() -> tuple[Prediction, ...]:
    """What the shipped weights say of each."""
    net = guardnet.load()
    return tuple(net.predict(graph, CPU) for graph in graphs())


def perceptron(width: int, batch: int, norm: bool) -> OpGraph:
    with torch.device("meta"):
        middle = [nn.BatchNorm1d(width)] if norm else [nn.Tanh()]
        model = nn.Sequential(nn.Linear(32, width), *middle, nn.ReLU(), nn.Linear(width, 10))
    return trace(Workload(model, (batch, 32), TensorSpec((batch,), "int64"), F.cross_entropy), target="cpu")


def by_chance(_graph: OpGraph, index: int) -> float:
    """A pattern that nothing about a step explains."""
    return random.Random(index).choice((0.5, 2.0))


def by_width(graph: OpGraph, _index: int) -> float:
    """A pattern that trees learn better than the process, because it is not smooth."""
    return 4.0 if graph.ops[0].shape[1] > 200 else 1.0


def by_all(graph: OpGraph, index: int) -> float:
    """One more pattern: another factor of 3 for large batches without a batch norm, and for small ones with it."""
    has_norm = any("batch_norm" in op.name for op in graph.ops)
    return by_width(graph, index) * (3.0 if (graph.ops[0].shape[0] == 128) != has_norm else 1.0)


def fill(
    log: MeasurementStore, pattern: Callable[[OpGraph, int], float], *, repeats: int = 4, framework: str = "torch"
) -> GuardNet:
    """Log runs that take ``pattern`` times what the shipped weights say; returns the shipped predictor."""
    net, generator = guardnet.load(), random.Random(0)
    rows = [(graph, index) for index, graph in enumerate(graphs() * repeats)]
    generator.shuffle(rows)
    for graph, index in rows:
        prediction = shipped()[index % len(graphs())]
        step_s = prediction.step_time.median * pattern(graph, index) * math.exp(generator.gauss(0, 0.03))
        verdict = Verdict.of(prediction, [Limit("memory", 2**34, prediction.peak_memory)], accepted=0.05)
        decision_id = log.record_decision(verdict, graph=graph, device=CPU, study="s", trial=index, params={})
        log.record_measurement(decision_id, measurement(int(prediction.peak_memory.median), step_s, framework))
    return net


def measurement(memory: int, step_s: float, framework: str = "torch") -> Measurement:
    return Measurement("ok", "cpu", "Toy", memory, step_s, 120 * step_s, 100, "double", framework)


def error(predictor: GuardNet, pattern: Callable[[OpGraph, int], float]) -> float:
    """Mean |log(measured / predicted)| of the step times, without noise."""
    found = []
    for graph, before in zip(graphs(), shipped(), strict=True):
        measured_s = before.step_time.median * pattern(graph, 0)
        found.append(abs(math.log(measured_s / predictor.predict(graph, CPU).step_time.median)))
    return sum(found) / len(found)


@pytest.fixture(autouse=True)
def same_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which runs are kept back follows the ids of decisions: with random ones a promotion is a matter of luck."""
    generator = random.Random(0)
    ids = SimpleNamespace(uuid4=lambda: uuid.UUID(int=generator.getrandbits(128)))
    monkeypatch.setattr("perfguard.log.uuid", ids)


@pytest.fixture
def log(tmp_path: Path) -> MeasurementStore:
    return MeasurementStore(tmp_path / "log.db")


def test_better_weights_are_promoted_used_and_rolled_back(log: MeasurementStore) -> None:
    net = fill(log, by_width)
    learner = Learner(net, log)
    learner.update(CPU)
    before = error(net, by_width)
    generation = tune_weights(log)
    assert generation is not None
    assert generation.promoted
    assert generation.metrics["recent time after"] < 0.9 * generation.metrics["recent time before"]
    assert "promoted" in str(generation)
    learner.update(CPU)
    assert net.name == f"{net.lineage}+"
    assert error(net, by_width) < 0.8 * before
    assert tune_weights(log) is None, "nothing is new"
    again = guardnet.load()
    Learner(again, log).update(CPU)
    assert [net.predict(graph, CPU) for graph in graphs()[:5]] == [again.predict(graph, CPU) for graph in graphs()[:5]]
    log.roll_back(net.lineage)
    learner.update(CPU)
    assert net.name == net.lineage
    assert tune_weights(log) is None, "the same runs do not undo a rollback"


def test_weights_without_gain_are_rejected(log: MeasurementStore) -> None:
    net = fill(log, by_chance)
    generation = tune_weights(log)
    assert generation is not None
    assert not generation.promoted
    assert log.promoted(net.lineage) is None


def test_weights_far_from_shipped_are_rejected(log: MeasurementStore, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(log, by_width)
    monkeypatch.setattr(GuardNet, "shift_on_reference", 0.05)
    generation = tune_weights(log)
    assert generation is not None
    assert generation.metrics["recent time after"] < 0.9 * generation.metrics["recent time before"]
    assert not generation.promoted


def test_tuning_for_one_device_leaves_others(log: MeasurementStore) -> None:
    net = fill(log, by_width)
    other = Device(**{name: getattr(CPU, name) for name in CPU.__slots__} | {"id": "other"})
    before = [net.predict(graph, other) for graph in graphs()]
    tune_weights(log)
    Learner(net, log).update(CPU)
    after = [net.predict(graph, other) for graph in graphs()]
    assert [one.step_time for one in before] == [one.step_time for one in after]
    assert [one.peak_memory for one in before] == [one.peak_memory for one in after]


def test_few_runs_make_no_generation(log: MeasurementStore) -> None:
    fill(log, by_width, repeats=1)
    assert tune_weights(log, min_new=41) is None
    assert tune_weights(log, max_rows=10) is None
    assert log.weights() == []


def test_predictor_without_weights_is_conditioned_only(log: MeasurementStore) -> None:
    with pytest.raises(ConfigurationError, match="cannot be fine-tuned"):
        tune_weights(log, predictor=ReplayPredictor)
    with pytest.raises(ConfigurationError, match="min_new"):
        tune_weights(log, min_new=0)
    fill(log, by_width, repeats=1)
    replay = ReplayPredictor()
    Learner(replay, log).update(CPU)
    assert len(replay.learnt) == 40


def test_damaged_weights_are_refused_once_and_replaced(log: MeasurementStore) -> None:
    net = fill(log, by_width, repeats=1)
    log.promote(net.lineage, b"no weights", {})
    log.promote("guardnet-0", b"of another lineage", {})
    learner = Learner(net, log)
    with pytest.warns(LogWarning, match="are not used"):
        learner.update(CPU)
    learner.update(CPU)  # said once
    assert net.name == net.lineage
    fill(log, by_width)
    generation = tune_weights(log)
    assert generation is not None
    assert generation.promoted


def test_guard_warns_of_drift_and_quarantine() -> None:
    guard = Guard(CPU, log=False)
    workload = Workload(nn.Linear(32, 10), (64, 32), TensorSpec((64,), "int64"), F.cross_entropy)

    def launch(framework: str, factor: float) -> None:
        decision = guard.decide(lambda: workload)
        prediction = decision.verdict.prediction
        assert isinstance(prediction, Prediction)
        memory, step_s = int(prediction.peak_memory.median), prediction.step_time.median * factor
        guard.learn(decision, measurement(memory, step_s, framework))

    for _ in range(3):
        launch("torch 2.13", 1.0)
    with pytest.warns(DriftWarning, match=r"framework: torch 2\.13 is now torch 2\.14"):
        launch("torch 2.14", 1.0)
    with pytest.warns(MeasurementWarning, match="implausible"):
        launch("torch 2.14", 5000.0)
    guard.log.close()


@pytest.mark.filterwarnings("error::perfguard.exceptions.MeasurementWarning")
def test_small_reading_on_cpu_is_quarantined_quietly() -> None:
    """An allocator that reuses what the process holds reads too little in honest runs, too."""
    guard = Guard(CPU, log=False)
    workload = Workload(nn.Linear(1024, 1024), (64, 1024), loss=torch.mean, optimizer=torch.optim.Adam)
    for memory in (2**24, 2**19):  # gradients and states are 12 MiB
        decision = guard.decide(lambda: workload)
        prediction = decision.verdict.prediction
        assert isinstance(prediction, Prediction)
        guard.learn(decision, measurement(memory, prediction.step_time.median, "torch 2.13"))
    found = assess(guard.log.observations("cpu")).doubts
    assert [(quarantined.target, quarantined.observation.measurement.peak_memory_bytes) for quarantined in found] == [
        ("memory", 2**19)
    ]
    guard.log.close()


def test_known_drift_is_not_warned_again(log: MeasurementStore) -> None:
    fill(log, by_width, repeats=1, framework="torch 2.13")
    fill(log, by_width, repeats=1, framework="torch 2.14")
    guard = Guard(CPU, log=log)
    rows = log.observations("cpu")
    workload = Workload(nn.Linear(32, 10), (64, 32), TensorSpec((64,), "int64"), F.cross_entropy)
    for framework in ("torch 2.13", "torch 2.14", "torch 2.13"):  # warnings are errors here
        decision = guard.decide(lambda: workload)
        prediction = decision.verdict.prediction
        assert prediction is not None
        guard.learn(decision, measurement(int(prediction.peak_memory.median), prediction.step_time.median, framework))
    assert len(guard._assessment.changes) == 1
    assert len(guard._assessment.observations) == len(rows) + 3


@pytest.mark.slow
def test_fine_tune_process_starts_after_enough_runs(log: MeasurementStore) -> None:
    net = fill(log, by_width)
    assert log.url is not None
    process = FineTuneProcess(log.url, "guardnet", every=2)
    process.wake()
    assert process._child is None
    process.wake()
    assert process._child is not None
    assert process._child.wait(120) == 0
    assert log.promoted(net.lineage) is not None


def test_refine_learns_from_all_devices() -> None:
    net = guardnet.load()
    other = Device(**{name: getattr(CPU, name) for name in CPU.__slots__} | {"id": "other"})

    def rows(device: Device) -> Sequence[Observation]:
        return [
            Observation(graph, device, measurement(2**20, net.predict(graph, device).step_time.median), decision_id=f"{i:032x}")
            for i, graph in enumerate(graphs())
        ]

    assert net.refine(rows(CPU)[:20]) is None
    data = net.refine([*rows(CPU), *rows(other)])
    assert data is not None
    net.use_refinement(data)
    assert net.name.endswith("+")
    net.use_refinement(None)
    assert net.name == net.lineage


def test_guard_keeps_intervals_while_log_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(CPU, log=False)
    workload = Workload(nn.Linear(32, 10), (64, 32), TensorSpec((64,), "int64"), F.cross_entropy)
    decision = guard.decide(lambda: workload)
    prediction = decision.verdict.prediction
    assert prediction is not None
    guard.learn(decision, measurement(int(prediction.peak_memory.median), 4.0 * prediction.step_time.median))
    widening = dict(guard._assessment.widening)
    assert widening["memory"] != 1.0
    monkeypatch.setattr(guard.log, "observations", lambda *_: [])  # what a log that is away answers
    guard.learn(guard.decide(lambda: workload), measurement(2**20, 0.1))
    assert guard._assessment.widening == widening
    guard.log.close()


def test_fine_tune_process_that_cannot_start(log: MeasurementStore, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(CPU, log=log, refine=True)
    workload = Workload(nn.Linear(32, 10), (64, 32), TensorSpec((64,), "int64"), F.cross_entropy)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert guard._fine_tuning is not None
    guard._fine_tuning._every = 1
    decision = guard.decide(lambda: workload)
    prediction = decision.verdict.prediction
    assert prediction is not None
    with pytest.warns(LogWarning, match="could not start its learner"):
        guard.learn(decision, measurement(int(prediction.peak_memory.median), prediction.step_time.median))
