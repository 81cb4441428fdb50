"""GuardNet predicts a graph alone as it does among others of its batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from perfguard import Device, Measurement, Observation, OpGraph, Prediction, Workload, load_predictor, resolve_device, trace
from perfguard.graph import GraphBatch
from perfguard.predictor import BatchPredictor
from perfguard_models.guardnet import GuardNet, load
from tests.doubles import TOY_CPU

SIZES = ((8, 16), (5, 33), (24, 24), (64, 7), (96, 128), (16, 4))
TOLERANCE = 1e-5
"""Sums of single precision are added in another order."""


class Mixed(nn.Module):
    """Convolutions of all kinds, a product, a pool, a concatenation."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, a, 3, padding=1)
        self.norm = nn.BatchNorm2d(a)
        self.deep = nn.Conv2d(a, a, 5, padding=2, groups=a)
        self.wide = nn.Conv2d(a, b, 7, stride=2, dilation=2, padding=3)
        self.point = nn.Conv2d(a + b, b, 1)
        self.up = nn.ConvTranspose2d(b, a, 2, stride=2)
        self.head = nn.Linear(a, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        y = nn.functional.avg_pool2d(self.deep(x), 2)
        z = self.wide(x)
        z = nn.functional.interpolate(z, y.shape[2:])
        out: torch.Tensor = self.head(self.up(self.point(torch.cat([y, z], 1))).mean((2, 3)))
        return out


def perceptron(a: int, b: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, a), nn.Tanh(), nn.Linear(a, b), nn.ReLU(), nn.Linear(b, 2))


def half_convolution(a: int, b: int) -> nn.Module:
    """More of the roofline is in the convolution or in the products, depending on the widths."""
    return nn.Sequential(
        nn.Conv2d(3, a, 3), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * a, 8 * b), nn.Linear(8 * b, 64 * b)
    )


MODELS = {"mixed": Mixed, "perceptron": perceptron, "half": half_convolution}


@functools.cache
def graphs_of(target: str, what: str = "mixed", **fields: Any) -> tuple[OpGraph, ...]:
    def traced(widths: Sequence[int]) -> OpGraph:
        with torch.device("meta"):
            model = MODELS[what](*widths)
        inputs = (64, 3) if what == "perceptron" else (4, 3, 32, 32)
        loss = {"loss": lambda y: y.float().mean()} if fields.get("mode") == "train" else {}
        return trace(Workload(model, inputs, **{"mode": "infer"} | fields | loss), target=resolve_device(target))

    return tuple(traced(widths) for widths in SIZES)


def assert_alike(found: Sequence[Prediction], expected: Sequence[Prediction], *, rel: float = TOLERANCE) -> None:
    for one, other in zip(found, expected, strict=True):
        for estimate, same in ((one.peak_memory, other.peak_memory), (one.step_time, other.step_time)):
            assert estimate.median == pytest.approx(same.median, rel=rel)
            assert estimate.log_sigma == pytest.approx(same.log_sigma, rel=rel)
        assert one.time_by_kind_s == pytest.approx(other.time_by_kind_s, rel=rel)
        assert one.time_parts_s == pytest.approx(other.time_parts_s, rel=rel)
        replayed, same_replayed = ({**made.memory_parts_bytes, "correction": 0.0} for made in (one, other))
        assert replayed == same_replayed
        assert (one.gpu_util is None) == (other.gpu_util is None)
        assert one.gpu_util is None or one.gpu_util == pytest.approx(other.gpu_util, rel=1e-5)
        rest = ("predictor", "device_id", "trained_on_device", "trained_quantities", "unmodelled", "total_time", "energy")
        assert [getattr(one, name) for name in rest] == [getattr(other, name) for name in rest]


SETTINGS = [
    ("cpu", "mixed", {}),
    ("cpu", "perceptron", {"mode": "train"}),
    ("t4", "mixed", {}),
    ("a100", "mixed", {"cudnn_benchmark": True}),
    ("h100-sxm-80gb", "half", {}),  # some times are those of single operators
    ("b200-sxm-180gb", "mixed", {"mode": "train"}),
    ("a100", "perceptron", {}),
    ("rtx3090", "mixed", {"precision": "amp-fp16"}),
    ("h100-sxm-80gb", "mixed", {"precision": "bf16"}),  # times of other GPUs are carried over
    ("rtx4090", "mixed", {"compiled": True}),
]


@pytest.mark.parametrize(("gpu", "what", "fields"), SETTINGS)
def test_prediction_in_a_batch_equals_prediction_alone(gpu: str, what: str, fields: dict[str, Any]) -> None:
    predictor, device = load_predictor(), resolve_device(gpu)
    assert isinstance(predictor, BatchPredictor)
    graphs = graphs_of(gpu, what, **fields)
    found = predictor.predict_all(GraphBatch.of(graphs), device)
    assert_alike(found, [predictor.predict(graph, device) for graph in graphs])


def test_predictions_for_an_unknown_processor_are_less_sure() -> None:
    predictor, graphs = load(), graphs_of("cpu")
    other, known = TOY_CPU, dataclasses.replace(TOY_CPU, name="AMD EPYC")
    expected = [predictor.predict(graph, other) for graph in graphs]
    for prediction, graph in zip(expected, graphs, strict=True):
        assert prediction.step_time.log_sigma > predictor.predict(graph, known).step_time.log_sigma
    assert_alike(predictor.predict_all(GraphBatch.of(graphs), other), expected)


def observed(graphs: Sequence[OpGraph], device: Device, predictor: GuardNet) -> list[Observation]:
    rows = []
    for at, graph in enumerate(graphs):
        prediction = predictor.predict(graph, device)
        seconds, num_bytes = prediction.step_time.median * (1.5 + 0.1 * at), round(1.2 * prediction.peak_memory.median)
        measurement = Measurement("ok", device.id, device.name, num_bytes, seconds, seconds, 1, method="told", framework="")
        rows.append(Observation(graph, device, measurement, decision_id=f"{at:032x}"))
    return rows


@pytest.mark.parametrize("gpu", ["cpu", "t4"])
def test_learnt_residuals_count_in_a_batch(gpu: str) -> None:
    predictor, device, graphs = load(), resolve_device(gpu), graphs_of(gpu)
    before = [prediction.step_time.median for prediction in predictor.predict_all(GraphBatch.of(graphs), device)]
    predictor.fine_tune(observed(graphs[:4], device, predictor))
    found = predictor.predict_all(GraphBatch.of(graphs), device)
    assert all(now.step_time.median > 1.1 * then for now, then in zip(found, before, strict=True))
    assert_alike(found, [predictor.predict(graph, device) for graph in graphs])


@pytest.mark.parametrize("gpu", ["cpu", "t4"])
def test_out_of_memory_counts_in_a_batch(gpu: str) -> None:
    predictor, device, graphs = load(), resolve_device(gpu), graphs_of(gpu)
    rows = observed(graphs[:4], device, predictor)
    least = 3 * predictor.predict(graphs[4], device).peak_memory.median
    failed = Measurement("oom", device.id, device.name, int(least), None, 1.0, 0, method="told", framework="")
    predictor.fine_tune([*rows, Observation(graphs[4], device, failed)])
    found = predictor.predict_all(GraphBatch.of(graphs), device)
    assert found[4].peak_memory.median > least
    assert_alike(found, [predictor.predict(graph, device) for graph in graphs])


def test_refined_weights_count_in_a_batch() -> None:
    predictor, device, graphs = load(), resolve_device("t4"), graphs_of("t4")
    rows = [
        Observation(row.graph, row.device, row.measurement, decision_id=f"{6 * turn + at:032x}")
        for turn in range(6)
        for at, row in enumerate(observed(graphs, device, predictor))
    ]
    predictor.use_refinement(predictor.refine(rows))
    assert predictor.name.endswith("+")
    found = predictor.predict_all(GraphBatch.of(graphs), device)
    # A column that is constant but for its last digit splits a tree by that digit.
    assert_alike(found, [predictor.predict(graph, device) for graph in graphs], rel=1e-4)
