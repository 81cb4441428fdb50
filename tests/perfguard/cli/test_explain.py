"""Times of operators, whatever the predictor knows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from perfguard import Workload, resolve_device, trace
from perfguard.cli.predict import operator_times_s
from perfguard.graph import OpGraph, roofline_s
from perfguard.predictor import OperatorTimes, load_predictor
from tests.doubles import ReplayPredictor

A100 = resolve_device("a100")


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return trace(Workload(model, (4096, 512), mode="infer"), target=A100)


def test_operators_of_a_predictor_that_knows_none_follow_the_roofline(graph: OpGraph) -> None:
    predictor = ReplayPredictor()
    assert not isinstance(predictor, OperatorTimes)
    prediction = predictor.predict(graph, A100)
    seconds, roofline = operator_times_s(predictor, prediction, graph, A100), roofline_s(graph, A100)
    assert seconds.sum() == pytest.approx(prediction.step_time.median)
    assert seconds / seconds.sum() == pytest.approx(roofline / roofline.sum())


@pytest.mark.parametrize("compiled", [False, True])
def test_operators_of_guardnet_take_what_its_kinds_take(compiled: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))
    graph = trace(Workload(model, (4096, 512), mode="infer", compiled=compiled), target=A100)
    predictor = load_predictor()
    prediction = predictor.predict(graph, A100)
    seconds = operator_times_s(predictor, prediction, graph, A100)
    for kind in graph.kinds:
        of_kind = sum(time for op, time in zip(graph.ops, seconds.tolist(), strict=True) if op.kind == kind)
        assert of_kind == pytest.approx(prediction.time_by_kind_s[kind])
