"""The summary of what the weights were fitted to: what is in it, and that learning does not cost what it says."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from perfguard.devices import resolve_device
from perfguard.exceptions import PredictorError
from perfguard.graph import OpGraph, trace
from perfguard.measure import Measurement
from perfguard.predictor import Observation
from perfguard.workload import TensorSpec, Workload
from perfguard_models import guardnet
from perfguard_models.guardnet import GuardNet
from perfguard_models.raw_prediction import Weights, physics_of
from perfguard_models.refinement import rows_of
from perfguard_models.summary import NAME, Summary, read_summary
from perfguard_models.trained import FittedModel, read_trained
from perfguard_research.summary import STEPS_A_SETTING, summary_of, write_summary

WEIGHTS = files("perfguard_models") / "weights"
A100 = resolve_device("a100")


@functools.cache
def trained(name: str = "memory-forest") -> FittedModel:
    return read_trained(WEIGHTS / f"{name}.safetensors", WEIGHTS / f"{name}.json", name)


def without_summary() -> Weights:
    return Weights(trained(), trained("two-clocks"))


def shipped(weights: str = "") -> Summary:
    """As it is read for weights of this hash; for those that it was made for, if none is given."""
    return read_summary(WEIGHTS / f"{NAME}.safetensors", WEIGHTS / f"{NAME}.json", weights or trained().card["sha256"])


@functools.cache
def perceptron(width: int, batch: int) -> OpGraph:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    return trace(Workload(model, (batch, 256), TensorSpec((batch,), "int64"), F.cross_entropy))


@functools.cache
def convnet(width: int, batch: int) -> OpGraph:
    with torch.device("meta"):
        layers = [nn.Conv2d(3, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU()]
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    return trace(Workload(model, (batch, 3, 64, 64), TensorSpec((batch,), "int64"), F.cross_entropy, cudnn_benchmark=True))


def perceptrons() -> list[OpGraph]:
    return [perceptron(width, batch) for width in range(512, 8192, 768) for batch in (64, 512, 4096)]


def convnets() -> list[OpGraph]:
    return [convnet(width, batch) for width in (32, 64, 128) for batch in (8, 32, 128)]


def memory_of(net: GuardNet, graphs: Sequence[OpGraph]) -> list[float]:
    return [math.log(net.predict(graph, A100).peak_memory.median) for graph in graphs]


def trending(net: GuardNet) -> list[Observation]:
    """Perceptrons that took the more than predicted, the larger they are: 0.9 to 1.5 times."""
    said = memory_of(net, perceptrons())
    return [
        Observation(
            graph, A100, Measurement("ok", A100.id, A100.name, int(math.exp(log_bytes + factor)), None, 1.0, 10, "nvml", "")
        )
        for graph, log_bytes, factor in zip(perceptrons(), said, np.linspace(-0.1, 0.4, len(said)).tolist(), strict=True)
    ]


def test_summary_covers_the_gpus_of_the_weights() -> None:
    summary = shipped()
    assert set(summary.device_ids.tolist()) <= set(trained().card["trained_devices"])
    steps = summary.of("a100-pcie-40gb")
    assert STEPS_A_SETTING <= len(steps.sums) <= 4 * STEPS_A_SETTING
    assert np.isfinite(steps.log_value).all()
    assert (steps.log_sigma > 0).all()
    assert len(summary.of("h100-sxm-80gb").sums) == 0


def test_summary_round_trips_and_refuses_damage(tmp_path: Path) -> None:
    backend = without_summary()
    summary = summary_of((A100.id, backend.predict(graph, A100)) for graph in convnets())
    write_summary(tmp_path / NAME, summary, "some weights", "a test")
    tensors, card = tmp_path / f"{NAME}.safetensors", tmp_path / f"{NAME}.json"
    again = read_summary(tensors, card, "some weights")
    np.testing.assert_array_equal(again.sums, summary.sums)
    np.testing.assert_array_equal(again.device_ids, summary.device_ids)
    np.testing.assert_allclose(again.log_value, summary.log_value, rtol=1e-6)
    assert len(again.of(A100.id).sums) == len(convnets())
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"?")
    with pytest.raises(PredictorError, match="do not match the hash"):
        read_summary(tensors, card, "some weights")
    card.unlink()
    with pytest.raises(PredictorError, match=r"GuardNet's summary cannot be read.*make it again"):
        read_summary(tensors, card, "some weights")


def test_refinement_nearly_keeps_the_fitted_steps() -> None:
    strayed = []
    for net in (guardnet.load(), GuardNet(dict.fromkeys(("cpu", "cuda"), without_summary()))):
        assert net.shift_on_reference == 0.0
        rows = [replace(row, decision_id=f"{index:032x}") for index, row in enumerate(trending(net))]
        data = net.refine(rows)
        assert data is not None
        net.use_refinement(data)
        steps = shipped().of(A100.id)
        values = steps.log_value
        assert net._refinement is not None
        x = rows_of(steps.sums, physics_of("memory", steps.sums, values), values)
        corrections = net._refinement.corrections("memory", A100.id, x)
        strayed.append((net.shift_on_reference, np.mean(np.abs(corrections))))
    (said, mindful), (nothing, forgetful) = strayed
    assert mindful < 0.2 * forgetful
    assert mindful < said < 0.02  # of trees that had not seen them
    assert nothing == 0.0  # there was no summary
