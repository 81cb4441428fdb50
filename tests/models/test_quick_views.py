"""The views for decisions are those that predictors are trained on, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from perfguard.devices import resolve_device
from perfguard.graph import OpGraph, TraceCache
from perfguard.workload import Workload
from perfguard_models import operators, sums
from perfguard_models.quick_views import quick_operators_of, quick_sums_of

DEVICES = ("a100", "rtx3090", "t4")


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 5, 2, 2, groups=16),
        nn.Conv2d(16, 30, 1), nn.GELU(), nn.Conv2d(30, 24, 3, padding=2, dilation=2), nn.ConvTranspose2d(24, 12, 2, 2, groups=2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 10),
    )  # fmt: skip


def sequences() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 60, batch_first=True), 2, enable_nested_tensor=False)


NETWORKS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "convolutions": (convolutions, (3, 32, 32)),
    "one dimension": (lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.ReLU(), nn.Conv1d(8, 8, 3, stride=2)), (4, 40)),
    "one and three": (lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.Unflatten(1, (2, 2, 2)), nn.Conv3d(2, 2, 1)), (4, 40)),
    "sequences": (sequences, (16, 32)),
    "a perceptron": (lambda: nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4)), (8,)),
    "nothing but elementwise": (nn.PReLU, (8,)),
}


def assert_same(graph: OpGraph) -> None:
    for device in map(resolve_device, DEVICES):
        expected, found = operators.operators_of(graph, device), quick_operators_of(graph, device)
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            assert value.dtype == found[key].dtype
            np.testing.assert_array_equal(found[key], value, err_msg=key)
        assert dict(zip(sums.SUMS, quick_sums_of(graph, device), strict=True)) == dict(
            zip(sums.SUMS, sums.sums_of(graph, device), strict=True)
        )


@pytest.mark.parametrize("precision", ["fp32", "amp-fp16", "bf16"])
@pytest.mark.parametrize("network", NETWORKS)
def test_a_traced_step_and_those_computed_from_it_are_seen_alike(network: str, precision: Any) -> None:
    make, sample = NETWORKS[network]
    model, cache, computed = make(), TraceCache(), 0
    for batch in (8, 64, 32, 16, 48):
        for optimizer in (torch.optim.SGD, torch.optim.AdamW):
            workload = Workload(
                model, (batch, *sample), loss=lambda output: output.float().sum(), optimizer=optimizer, precision=precision
            )
            graph = cache.trace(workload)
            computed += graph.twin is not None
            assert_same(graph)
    assert computed >= 2


def test_an_inference_and_a_graph_from_a_log_are_seen_alike() -> None:
    graph = TraceCache().trace(Workload(convolutions(), (4, 3, 32, 32), mode="infer", layout="nhwc"))
    assert_same(graph)
    assert_same(OpGraph.from_bytes(graph.to_bytes()))


def test_numbers_beyond_64_bits_are_seen_operator_by_operator() -> None:
    with torch.device("meta"):
        model = nn.Linear(2**21, 2**21, bias=False)
    graph = TraceCache().trace(Workload(model, (2**21, 2**21), mode="infer"))
    assert graph.flops == 2 * 2**63
    assert_same(graph)
