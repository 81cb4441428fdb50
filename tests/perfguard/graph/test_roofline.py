"""The account adds up."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from perfguard.devices import resolve_device
from perfguard.graph import OpGraph, Phase, bytes_by_module, cost_by_operator, roofline_s, timeline, trace
from perfguard.workload import TensorSpec, Workload


def graph() -> OpGraph:
    with torch.device("meta"):
        body = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
        model = nn.Sequential()
        model.add_module("body", body)
        model.add_module("head", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)))
    return trace(Workload(model, (32, 3, 32, 32), TensorSpec((32,), "int64"), F.cross_entropy, torch.optim.Adam))


def test_the_timeline_by_kind_sums_to_the_live_bytes() -> None:
    step = graph()
    assert np.array_equal(np.sum(list(timeline(step).values()), axis=0), step.live_bytes)


def test_the_modules_at_the_peak_sum_to_the_peak() -> None:
    step = graph()
    by_module = bytes_by_module(step)
    assert sum(by_module.values()) == step.peak_live_bytes
    assert {"body.0", "body.1"} <= set(by_module)
    assert set(bytes_by_module(step, depth=1)) <= {"body", "head", "inputs", "targets", ""}


def test_operators_by_name_sum_to_the_step() -> None:
    step, device = graph(), resolve_device("a100")
    costs = cost_by_operator(step, device)
    assert sum(cost.flops for cost in costs) == step.flops
    assert sum(cost.calls for cost in costs) == len(step.ops)
    assert abs(sum(cost.seconds for cost in costs) - roofline_s(step, device).sum()) < 1e-9
    assert [cost.seconds for cost in costs] == sorted((cost.seconds for cost in costs), reverse=True)


def test_backward_operators_know_their_module() -> None:
    backward = {op.name: op.module for op in graph().ops if op.phase is Phase.BACKWARD}
    assert backward["convolution_backward"] == "body.0"
    assert backward["native_batch_norm_backward"] == "body.1"
    assert backward["threshold_backward"] == "body.2"
    assert backward["mm"] == "head.2"
