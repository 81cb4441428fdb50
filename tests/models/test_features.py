"""Features of a graph are finite, whatever it is. Their numbers are held by the golden predictions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from perfguard.devices import resolve_device
from perfguard.graph import OpGraph, trace
from perfguard.workload import Workload
from perfguard_models.features.launches import launches
from perfguard_models.features.operators import operator_features
from perfguard_models.features.step import step_features


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
    for features in (launches, operator_features):
        assert all(np.isfinite(value).all() for value in features(graph, device).values() if value.dtype.kind == "f")
