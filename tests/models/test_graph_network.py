"""The graph network: its messages by a loop, and what neighbours may change."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from perfguard import OpGraph, Workload, resolve_device, trace
from perfguard_models.features.launches import EDGE_COLUMNS, launches
from perfguard_models.graph_network import GraphNetwork, OperatorConv
from perfguard_models.learner import Step
from perfguard_models.step_time import StepTime
from perfguard_research.step_time import TrainableStepTime

A100 = resolve_device("a100")


def step_of(graph: OpGraph) -> Step:
    return Step(False, launches(graph, A100))


def network_of(rounds: int, seed: int = 0) -> tuple[StepTime, GraphNetwork]:
    """A learner, and one network of it with random weights everywhere."""
    torch.manual_seed(seed)
    learner = TrainableStepTime(rounds=rounds, trees=0)
    learner.scale[1] = 1.0
    network = learner.network
    for parameter in (network.own.weight, network.out.weight):
        nn.init.normal_(parameter)
    return learner, network


def convolutional(depth: int) -> OpGraph:
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1)]
    for _ in range(depth):
        layers += [nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)]
    with torch.device("meta"):
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return trace(Workload(model, (8, 3, 32, 32), loss=lambda y: y.float().mean()))


def test_messages_are_those_of_the_formula() -> None:
    torch.manual_seed(0)
    channels, messages, number = 5, 3, 4
    conv = OperatorConv(channels, messages)
    z, attr = torch.randn(number, channels), torch.randn(6, len(EDGE_COLUMNS) + 1)
    edges = torch.tensor([[0, 1, 2, 0, 3, 3], [1, 2, 1, 3, 0, 1]])
    weight = torch.tensor([0.5, 1.0, 0.2, 1.0, 1.0, 0.3])
    expected = []
    for v in range(number):
        m = torch.zeros(messages)
        for (u, sink), e, w in zip(edges.T.tolist(), attr, weight, strict=True):
            if sink == v:
                a, b = conv.of_ends(z[v])[:messages], conv.of_ends(z[u])[messages:]
                m = m + w * nn.functional.silu(a + b + conv.of_edge(e))
        expected.append(z[v] + conv.update_net(torch.cat([z[v], m])))
    torch.testing.assert_close(conv(z, edges, attr, weight), torch.stack(expected))


def test_edges_are_the_tensors_of_the_step() -> None:
    graph = convolutional(3)
    view = launches(graph, A100)
    pairs = {(int(view["order"][a]), int(view["order"][b])) for a, b in graph.edges.T}
    assert {(a, b) for a, b in view["tensor_ends"].T.tolist()} == pairs
    assert view["tensor_count"].sum() == graph.edges.shape[1]
    crosses = [graph.ops[a].phase != graph.ops[b].phase for a, b in graph.edges.T]
    column = EDGE_COLUMNS.index("crosses_phase")
    assert (view["tensor_x"][:, column] * view["tensor_count"]).sum() == pytest.approx(sum(crosses), rel=1e-2)


def test_neighbours_change_the_inefficiency_within_the_bound() -> None:
    learner, network = network_of(2)
    packed = learner.pack([step_of(convolutional(3))])
    apart = packed._replace(edge_weight=torch.zeros_like(packed.edge_weight))
    with torch.inference_mode():
        with_messages, without = (network(one).device_s[0] for one in (packed, apart))
        read, _ = network.encode(packed)
        alone = network.clocks(packed, read, torch.zeros(len(read), 48)).device_s[0]
    assert not torch.allclose(with_messages, without, rtol=1e-3)
    difference = (with_messages / alone).log().abs()
    assert 0.01 < float(difference.max()) <= 2 * network.bound + 1e-4  # of both around the middle
