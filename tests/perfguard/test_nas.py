"""A latency constraint judges candidates as its predictor does, filters, guides Optuna, and has a gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from perfguard import Device, Estimate, OpGraph, Prediction, Verdict, Workload
from perfguard.exceptions import ConfigurationError
from perfguard.nas import LatencyConstraint
from tests.doubles import ReplayPredictor

INPUTS = (2, 3, 16, 16)


def conv(width: int) -> nn.Module:
    with torch.device("meta"):
        return nn.Conv2d(3, width, 3)


class FlopsPredictor(ReplayPredictor):
    """A double: one nanosecond for each FLOP, and 1 GiB beside the live bytes; known to 10%."""

    def predict(self, graph: OpGraph, device: Device, *, steps: int | None = None) -> Prediction:
        memory, time = Estimate(2**30 + graph.peak_live_bytes, 0.1), Estimate(1e-9 * graph.flops, 0.1)
        return Prediction(memory, time, None, "flops-1", device.id, trained_on_device=True)


@pytest.fixture
def predictor() -> FlopsPredictor:
    return FlopsPredictor()


def flops_of(width: int) -> int:
    return 2 * 2 * 14 * 14 * width * 27


def test_a_candidate_passes_up_to_the_limit(predictor: FlopsPredictor) -> None:
    limit_ms = 1e-6 * flops_of(32)
    constraint = LatencyConstraint("a100", max_latency_ms=1.001 * limit_ms, inputs=INPUTS, predictor=predictor)
    assert constraint(conv(32)).action == "launch"
    verdict = constraint(conv(33))
    assert verdict.action == "prune"
    assert verdict.margins["latency"] > 0 > verdict.margins["memory"]
    assert "the budget is" in verdict.reason
    assert verdict.reason.startswith("takes ")


def test_less_risk_lets_less_through(predictor: FlopsPredictor) -> None:
    limits: dict[str, Any] = {"max_latency_ms": 1.05e-6 * flops_of(32), "inputs": INPUTS, "predictor": predictor}
    assert LatencyConstraint("a100", **limits)(conv(32)).action == "launch"
    assert LatencyConstraint("a100", risk=0.05, **limits)(conv(32)).action == "prune"


def test_memory_and_energy_are_limits_too(predictor: FlopsPredictor) -> None:
    def action(**limits: Any) -> str:
        return LatencyConstraint("a100", inputs=INPUTS, predictor=predictor, **limits)(conv(32)).action

    joules = 250 * 1e-9 * flops_of(32)
    assert (action(max_energy_j=1.01 * joules), action(max_energy_j=0.99 * joules)) == ("launch", "prune")
    assert (action(max_memory="1.1GiB"), action(max_memory="0.9GiB")) == ("launch", "prune")
    assert action(max_memory="1.1GiB", max_energy_j=0.5 * joules) == "prune"


def test_hopeless_candidate_is_pruned_by_its_least_memory(predictor: FlopsPredictor) -> None:
    def verdict_on(channels: int) -> Verdict:
        workload = Workload(nn.Conv1d(1, 1, 1, device="meta"), (channels, 1, 2**30), mode="infer")
        return LatencyConstraint("a100", max_latency_ms=1e9, predictor=predictor)(workload)

    assert verdict_on(2).action == "launch"
    for channels in (2**10, 2**40):
        verdict = verdict_on(channels)
        assert verdict.action == "prune"
        assert verdict.reason.startswith("needs at least ")
        assert verdict.margins["memory"] > 0


def test_modules_workloads_and_graphs_are_judged_alike(predictor: FlopsPredictor) -> None:
    constraint = LatencyConstraint("a100", max_latency_ms=1, inputs=INPUTS, predictor=predictor)
    graph = constraint.graph_of(conv(8))
    times = [constraint.predict(model).step_time.median for model in (conv(8), Workload(conv(8), INPUTS, mode="infer"), graph)]
    assert times == pytest.approx([1e-9 * flops_of(8)] * 3)


def test_guardnet_follows_measured_cpu_times() -> None:
    constraint = LatencyConstraint("cpu", max_latency_ms=1000, inputs=INPUTS)
    before = constraint.predict(conv(48)).step_time
    told = {width: 2 * constraint.predict(conv(width)).step_time.median for width in (8, 16, 24, 32, 64, 96)}
    for width, seconds in told.items():
        constraint.learn(conv(width), seconds)
    after = constraint.predict(conv(48)).step_time
    assert 1.4 < after.median / before.median < 2.6
    assert after.log_sigma < before.log_sigma
    for wrong in (0, -1, float("nan"), True, "1ms", torch.tensor(0.1)):
        with pytest.raises(ConfigurationError, match="measured_s must be a positive number"):
            constraint.learn(conv(8), wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="peak_memory_bytes must be a positive number"):
        constraint.learn(conv(8), 0.1, peak_memory_bytes="1GiB")  # type: ignore[arg-type]


def test_constrain_tells_optuna_distance_to_limit(predictor: FlopsPredictor) -> None:
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    constraint = LatencyConstraint("a100", max_latency_ms=1.01e-6 * flops_of(40), inputs=INPUTS, predictor=predictor)

    def objective(trial: Any) -> float:
        width = trial.suggest_int("width", 1, 128)
        verdict = constraint.constrain(trial, conv(width))
        if verdict.action == "prune":
            raise optuna.TrialPruned(verdict.reason)
        return float(width)

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(objective, n_trials=40)
    assert study.best_trial.params["width"] in range(30, 41)
    for trial in study.trials:
        margin = trial.constraints["perfguard:latency"]
        assert (margin > 0) == (trial.params["width"] > 40)


def test_penalty_is_zero_within_limit(predictor: FlopsPredictor) -> None:
    """Beyond it, the penalty pulls towards faster choices."""
    constraint = LatencyConstraint("a100", max_latency_ms=1, inputs=INPUTS, predictor=predictor)
    seconds = [torch.tensor([1e-4, 8e-4]), torch.tensor([2e-4, 9e-4])]
    logits = [torch.zeros(2, requires_grad=True) for _ in seconds]
    slow = constraint.penalty([torch.softmax(4 * (logit + torch.tensor([0.0, 1.0])), 0) for logit in logits], seconds)
    slow.backward()
    assert slow.item() > 0
    assert all(logit.grad is not None and logit.grad[0] < 0 < logit.grad[1] for logit in logits)
    assert constraint.penalty([torch.tensor([1.0, 0.0])] * 2, seconds).item() == 0
    exact = constraint.penalty([torch.tensor([0.0, 1.0])] * 2 + [torch.ones(1)], [*seconds, torch.tensor([1e-3])])
    assert exact.item() == pytest.approx(torch.log(torch.tensor(2.7)).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({}, "Give at least one of"),
        ({"max_latency_ms": 0}, "max_latency_ms must be a positive number"),
        ({"max_latency_ms": "5ms"}, "max_latency_ms must be a positive number"),
        ({"max_energy_j": -1}, "max_energy_j must be a positive number"),
        ({"max_memory": "lots"}, "max_memory must look like"),
        ({"max_memory": "10MiB"}, "is too small for any trial"),
        ({"max_latency_ms": 1, "risk": 1}, r"risk must lie in \(0, 1\)"),
    ],
)
def test_limits_that_cannot_be_right_are_refused(kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        LatencyConstraint("a100", predictor=ReplayPredictor(), **kwargs)


def test_what_is_missing_is_asked_for(predictor: FlopsPredictor) -> None:
    with pytest.raises(ConfigurationError, match="Modules need LatencyConstraint"):
        LatencyConstraint("a100", max_latency_ms=1, predictor=predictor)(conv(8))
    with pytest.raises(ConfigurationError, match=r"power of .* is unknown"):
        LatencyConstraint("cpu", max_energy_j=1, predictor=predictor)
    with pytest.raises(ConfigurationError, match="penalty needs"):
        LatencyConstraint("a100", max_memory="1GiB", predictor=predictor).penalty([], [])
