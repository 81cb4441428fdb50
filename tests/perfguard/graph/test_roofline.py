"""The third roof: what the multiprocessors issue, and how many of them an operator keeps busy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from torch import nn

from perfguard import OpGraph, Workload, resolve_device, trace
from perfguard.devices import Device
from perfguard.graph import roofline_s
from perfguard.graph.roofline import issue_s
from tests.doubles import TOY_CPU

DEVICE = replace(resolve_device("a100"), num_sms=100, boost_clock_hz=1e9)
"""It issues 10¹¹ times an operator's rate in a second."""


def graph_of(model: nn.Module, shape: tuple[int, ...]) -> OpGraph:
    """A training step of a model with parameters, the forward pass of one without."""
    model = model.to("meta")
    if not list(model.parameters()):
        return trace(Workload(model, shape, mode="infer"))
    return trace(Workload(model, shape, loss=lambda y: y.float().mean()))


def seconds_of(graph: OpGraph, name: str, device: Device = DEVICE) -> float:
    (found,) = [seconds for op, seconds in zip(graph.ops, issue_s(graph, device), strict=True) if op.name == name]
    return float(found)


def test_elements_are_issued_at_the_rate_of_their_operator() -> None:
    assert seconds_of(graph_of(nn.GELU(), (1000, 2300)), "gelu") == pytest.approx(1e-5)
    assert not issue_s(graph_of(nn.ReLU(), (1000, 2300)), DEVICE).any()  # it reaches the bandwidth of every card


def test_few_rows_keep_few_multiprocessors_busy() -> None:
    """A layer norm has a block for each row. So 10 rows on 100 multiprocessors take ten times as long as their elements do."""
    for rows, width, expected_s in ((1000, 120, 1e-6), (10, 12_000, 1e-5)):
        graph = graph_of(nn.LayerNorm(width), (rows, width))
        assert seconds_of(graph, "native_layer_norm") == pytest.approx(expected_s)


def test_rows_of_a_norm_of_several_dimensions_are_counted() -> None:
    graph = graph_of(nn.LayerNorm((30, 40, 10)), (10, 30, 40, 10))
    assert seconds_of(graph, "native_layer_norm") == pytest.approx(1e-5)


@pytest.mark.parametrize("name", ["native_batch_norm", "native_batch_norm_backward"])
def test_batch_norm_has_a_block_for_each_channel(name: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 10, 1), nn.BatchNorm2d(10))
    assert seconds_of(graph_of(model, (12, 3, 100, 10)), name) == pytest.approx(1e-5)


def test_rows_of_softmax_are_blocks() -> None:
    assert seconds_of(graph_of(nn.Softmax(-1), (10, 12_000)), "_softmax") == pytest.approx(1e-5)


def test_batch_norm_of_an_evaluation_reduces_nothing() -> None:
    """An instance norm has no statistics but those of its images: a block for each image and channel."""
    evaluated, instances = (
        trace(Workload(model.eval(), (2, 10, 120, 10), mode="infer")) for model in (nn.BatchNorm2d(10), nn.InstanceNorm2d(10))
    )
    assert seconds_of(evaluated, "native_batch_norm") == 0
    assert seconds_of(instances, "native_batch_norm") == pytest.approx(1e-6)


@pytest.mark.parametrize("model", [nn.LayerNorm(64), nn.Softmax(-1), nn.GELU(), nn.BatchNorm1d(64)])
def test_larger_batch_is_never_faster(model: nn.Module) -> None:
    seconds = [issue_s(graph_of(model, (batch, 64)), DEVICE).sum() for batch in (2, 3, 64, 99, 100, 101, 1000, 20_000)]
    assert np.diff(seconds).min() >= 0


def test_bound_on_what_a_step_needs_does_not_know_this_roof() -> None:
    """Another kernel may be faster than PyTorch's. So `perfguard.physics` must not say that it is impossible."""
    graph = graph_of(nn.LayerNorm(12_000), (10, 12_000))
    at = [op.name for op in graph.ops].index("native_layer_norm")
    assert roofline_s(graph, DEVICE)[at] < issue_s(graph, DEVICE)[at]


def test_nothing_is_said_of_processors() -> None:
    assert not issue_s(graph_of(nn.GELU(), (1000, 2300)), TOY_CPU).any()
