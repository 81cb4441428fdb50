"""Fine-tuning with the shipped weights: what gradient steps learn, what they leave, and what is refused."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from perfguard import OpGraph, Workload, resolve_device, trace
from perfguard.exceptions import PredictorError
from perfguard_models import guardnet
from perfguard_models.fine_tuning import CONFIG, FineTuned, LearntRun, fine_tune
from perfguard_models.learner import FittedModel
from perfguard_models.step_time import StepTime

T4 = resolve_device("t4")


@functools.cache
def weights() -> FittedModel:
    return guardnet.read_weights(guardnet.WEIGHTS / "step-time")


def learner() -> StepTime:
    found = weights().learner
    assert isinstance(found, StepTime)
    return found


@functools.cache
def graph_of(kind: str, width: int, batch: int) -> OpGraph:
    with torch.device("meta"):
        model: nn.Module
        sample: tuple[int, ...]
        if kind == "perceptron":
            model, sample = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)]), (width,)
        else:
            model, sample = nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3)), (3, 32, 32)
    return trace(Workload(model, (batch, *sample), loss=lambda y: y.float().mean()))


def run_of(kind: str, width: int, batch: int, factor: float) -> LearntRun:
    """A run that takes ``factor`` times as long as predicted."""
    step = weights().step(graph_of(kind, width, batch), T4)
    predicted = float(learner().predict([step])["time"][0])
    return LearntRun(f"{kind} {width} {batch}", T4.id, step, predicted, predicted + math.log(factor))


def runs(factors: dict[str, float]) -> list[LearntRun]:
    sizes = [(width, batch) for width in (64, 256, 1024) for batch in (8, 64, 512, 4096)]
    return [run_of(kind, width, batch, factor) for kind, factor in factors.items() for width, batch in sizes]


@functools.cache
def tuned() -> FineTuned:
    """On this card, convolutions take half as long again."""
    found = fine_tune("weights", learner(), runs({"perceptron": 1.0, "convolutional": 1.5}))
    assert found is not None
    return found


def test_few_runs_change_nothing() -> None:
    assert fine_tune("weights", learner(), runs({"perceptron": 1.5})[: CONFIG.fewest_runs - 1]) is None


def test_steps_of_a_kind_are_learnt_and_others_stay() -> None:
    slow, usual = (
        tuned().corrections(learner(), [run_of(kind, 512, batch, 1.0).step for batch in (32, 256, 2048)], T4.id)
        for kind in ("convolutional", "perceptron")
    )
    assert slow.mean() > 0.5 * math.log(1.5)
    assert np.abs(usual).mean() < 0.5 * slow.mean()


def test_device_without_runs_keeps_its_predictions() -> None:
    steps = [run_of("convolutional", 512, 32, 1.0).step]
    assert not tuned().corrections(learner(), steps, "a100-sxm-80gb").any()


def test_steps_of_the_training_tables_hardly_change() -> None:
    assert learner().reference
    assert tuned().shift < 0.03  # a promotion asks for 0.01; these runs are of one kind and far off


def test_a_learnt_run_has_a_prediction_without_it() -> None:
    own = runs({"perceptron": 1.0, "convolutional": 1.5})
    assert set(tuned().held_out) == {run.decision_id for run in own}
    learnt = tuned().corrections(learner(), [run.step for run in own], T4.id)
    held_out = np.array([tuned().held_out[run.decision_id] for run in own])
    wanted = np.array([run.measured - run.predicted for run in own])
    assert np.abs(learnt - wanted).mean() < np.abs(held_out - wanted).mean() < np.abs(wanted).mean()


def test_what_is_written_is_read() -> None:
    steps = [run.step for run in runs({"convolutional": 1.0})]
    again = FineTuned.from_bytes(tuned().to_bytes(), learner())
    np.testing.assert_allclose(again.corrections(learner(), steps, T4.id), tuned().corrections(learner(), steps, T4.id))
    assert again.held_out == pytest.approx(tuned().held_out)
    assert again.made_for == "weights"
    assert again.shift == pytest.approx(tuned().shift)


def with_header(data: bytes, **fields: object) -> bytes:
    size = int.from_bytes(data[:8], "little")
    document = json.loads(data[8 : 8 + size])
    header = json.loads(document["__metadata__"]["perfguard"]) | fields
    document["__metadata__"]["perfguard"] = json.dumps(header)
    spoilt = json.dumps(document).encode()
    return len(spoilt).to_bytes(8, "little") + spoilt + data[8 + size :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-9],
        lambda data: b"",
        lambda data: b"\xff" * 100,
        lambda data: with_header(data, shift=math.nan),
        lambda data: with_header(data, shift=10**400),
        lambda data: with_header(data, held_out={"a": math.inf}),
    ],
)
def test_damaged_weights_are_refused(damage: Callable[[bytes], bytes]) -> None:
    with pytest.raises(PredictorError, match="Fine-tuned weights do not fit"):
        FineTuned.from_bytes(damage(tuned().to_bytes()), learner())


def test_absurd_weights_change_predictions_within_bounds() -> None:
    spoilt = FineTuned.from_bytes(tuned().to_bytes(), learner())
    spoilt.network.machine.latency.data.fill_(1e30)
    again = FineTuned.from_bytes(spoilt.to_bytes(), learner())
    corrections = again.corrections(learner(), [run_of("perceptron", 64, 8, 1.0).step], T4.id)
    assert np.abs(corrections) <= 3.0


def test_weights_that_are_not_finite_are_refused() -> None:
    network = FineTuned.from_bytes(tuned().to_bytes(), learner())
    network.network.own.bias.data.fill_(math.nan)
    with pytest.raises(PredictorError, match="not finite"):
        FineTuned.from_bytes(network.to_bytes(), learner())
