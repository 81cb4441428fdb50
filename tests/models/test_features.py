"""Features of a graph. Their numbers are held by the golden predictions; here are their laws, and workspaces worked by hand."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from perfguard.devices import resolve_device
from perfguard.graph import OpGraph, trace
from perfguard.workload import Workload
from perfguard_models.features.launches import launches
from perfguard_models.features.step import ABSENT, STEP_FEATURES, step_features


def convolutions() -> OpGraph:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 5, 2, 2, groups=16),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip
    return trace(Workload(model, (8, 3, 32, 32), loss=lambda output: output.sum()))


def sequences() -> OpGraph:
    layer = nn.TransformerEncoderLayer(32, 4, 60, batch_first=True)
    model = nn.Sequential(nn.Linear(32, 32), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    return trace(Workload(model, (8, 16, 32), mode="infer"))


def of_step(graph: OpGraph) -> dict[str, float]:
    return dict(zip(STEP_FEATURES, step_features(graph, resolve_device("a100")).tolist(), strict=True))


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (
            nn.Conv2d(8, 16, 3, padding=1),
            {
                "gemm": 8 * 9 * 256 * 4,  # one image as columns
                "columns": 4 * 8 * 9 * 256 * 4,
                "fft": 2 * (4 * 8 + 8 * 16 + 4 * 16) * 32 * 17 * 8,  # spectra of 16 + 3 - 1 pixels, padded to 32
                "fft_tiling": (4 * 8 + 8 * 16 + 4 * 16) * 32 * 17 * 8,  # one tile holds the image
                "winograd": 36 * (4 * 8 * 16 + 8 * 16 + 4 * 16 * 16) * 4,  # 16 tiles of 4 x 4 outputs
                "nhwc": 4 * (4 * (8 * 256 + 16 * 256) + 8 * 16 * 9),
            },
        ),
        (nn.Conv2d(8, 16, 1), {"fft_pointwise": 2 * (4 * 8 + 8 * 16 + 4 * 16) * 16 * 9 * 8, "nhwc": 4 * (4 * 24 * 256 + 8 * 16)}),
        (nn.Conv2d(8, 16, 3, stride=2), {"gemm": 8 * 9 * 49 * 4, "columns": 4 * 8 * 9 * 49 * 4, "nhwc": None}),
    ],
)
def test_workspaces_are_those_of_cudnns_algorithms(layer: nn.Module, expected: dict[str, int | None]) -> None:
    graph = trace(Workload(layer, (4, 8, 16, 16), mode="infer"))
    found = {name.removeprefix("workspace_"): value for name, value in of_step(graph).items() if name.startswith("workspace_")}
    assert {name for name, value in found.items() if value != ABSENT} - {"fft_tiling"} == expected.keys() - {"fft_tiling"}
    for name, num_bytes in expected.items():
        assert num_bytes is None or found[name] == pytest.approx(math.log(num_bytes / graph.peak_live_bytes), abs=1e-4)


def relabelled(graph: OpGraph, rng: random.Random) -> OpGraph:
    """The same graph with its storages in another order and under other names."""
    order = rng.sample(range(len(graph.storages)), len(graph.storages))
    new_index = {old: new for new, old in enumerate(order)}
    storages = tuple(graph.storages[old]._replace(module="renamed") for old in order)
    ops = tuple(
        op._replace(
            inputs=tuple(rng.sample([new_index[s] for s in op.inputs], len(op.inputs))),
            outputs=tuple(new_index[s] for s in op.outputs),
            module="renamed",
        )
        for op in graph.ops
    )
    return replace(graph, ops=ops, storages=storages)


@pytest.mark.parametrize("gpu", ["a100", "cpu"])
@pytest.mark.parametrize("make", [convolutions, sequences])
def test_features_ignore_numbering_and_names(make: Any, gpu: str) -> None:
    graph, device = make(), resolve_device(gpu)
    other = relabelled(graph, random.Random(0))
    np.testing.assert_array_equal(step_features(other, device), step_features(graph, device))
    found = launches(other, device)
    for key, value in launches(graph, device).items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)


def test_batch_is_copied_to_a_gpu_and_not_to_a_cpu() -> None:
    on_cpu, on_gpu = (launches(sequences(), resolve_device(name)) for name in ("cpu", "a100"))
    assert on_cpu["copied"][0] == 0 < on_gpu["copied"][0] == 8 * 16 * 32 * 4
    assert (on_cpu["is_cpu"].tolist(), on_gpu["is_cpu"].tolist()) == ([1], [0])
    assert len(on_gpu["x"]) < len(on_gpu["order"])  # blocks repeat


def beyond_64_bits(kind: str) -> OpGraph:
    with torch.device("meta"):
        if kind == "FLOPs":
            return trace(Workload(nn.Linear(2**21, 2**21, bias=False), (2**21, 2**21), mode="infer"))
        # An FFT of this convolution would hold 2^66 bytes.
        return trace(Workload(nn.Conv2d(2**14, 2**14, 3, padding=1), (2**22, 2**14, 64, 64), mode="infer"))


@pytest.mark.parametrize("make", [lambda: trace(Workload(nn.Identity(), (2, 3), mode="infer")), *(
    lambda kind=kind: beyond_64_bits(kind) for kind in ("FLOPs", "workspace")
)], ids=["no operators", "FLOPs", "workspace"])  # fmt: skip
def test_features_of_extreme_steps_are_finite(make: Any) -> None:
    graph, device = make(), resolve_device("a100")
    assert np.isfinite(step_features(graph, device)).all()
    assert all(np.isfinite(value).all() for value in launches(graph, device).values() if value.dtype.kind == "f")
