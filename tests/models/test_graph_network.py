"""The graph network: its messages by a loop, and what neighbours may change."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from perfguard import OpGraph, Workload, resolve_device, trace
from perfguard_models import guardnet
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


def graph_of_batch(batch: int) -> OpGraph:
    """Two layers of 32 channels, of images of 32 pixels."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU())
    return trace(Workload(model, (batch, 3, 32, 32), mode="infer"))


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
        expected.append(conv.norm(z[v] + conv.update_net(torch.cat([z[v], m]))))
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
        alone = network.clocks(packed, read, torch.zeros(len(read), 48)).device_s[0]  # nothing changed
    assert not torch.allclose(with_messages, without, rtol=1e-3)
    difference = (with_messages / alone).log().abs()
    assert 0.01 < float(difference.max()) <= network.bound + 1e-4


def test_bound_has_a_gradient_far_from_its_middle() -> None:
    """A tanh of 50 has none in float32: a network that was there once stayed there, and its messages were a constant."""
    network = GraphNetwork(bound=1.5)
    nn.init.zeros_(network.out.weight)
    for far in (-50.0, 50.0):
        nn.init.constant_(network.out.bias, far)
        network.zero_grad()
        network.of_neighbours(torch.zeros(1, 48)).sum().backward()
        assert network.out.bias.grad is not None
        assert float(network.out.bias.grad) > 1e-6


def test_edges_know_what_is_still_in_the_cache() -> None:
    """A small step fits the cache of an A100, so all that its operators read is there. A large one's activations are not."""
    column, shares = EDGE_COLUMNS.index("in_cache"), EDGE_COLUMNS.index("log_share_read")
    small, large = (launches(graph_of_batch(batch), A100)["tensor_x"] for batch in (1, 4096))
    assert small[:, column].min() == 1
    assert large[:, column].mean() < 0.5
    assert (small[:, shares] <= 0.01).all()  # logarithms of shares


# The weights that ship. Five of them in a row had messages that were a constant, which no other test saw.


@pytest.fixture(scope="module")
def shipped() -> tuple[StepTime, list[Step]]:
    """The learner, and steps: those of the tables that ship with it, and two small networks."""
    learner = guardnet.read_weights(guardnet.WEIGHTS / "step-time").learner
    assert isinstance(learner, StepTime)
    return learner, [*learner.reference, step_of(convolutional(4)), step_of(graph_of_batch(64))]


def of_neighbours(learner: StepTime, steps: list[Step]) -> torch.Tensor:
    """What the neighbours add to the log inefficiency of each operator of all steps. Shape: (nodes,)."""
    with torch.inference_mode():
        _, changed = learner.network.encode(learner.pack(steps))
        return learner.network.of_neighbours(changed)


def test_shipped_messages_are_not_at_their_bound(shipped: tuple[StepTime, list[Step]]) -> None:
    found = of_neighbours(*shipped)
    assert len(found) > 1000
    assert float((found.abs() > 0.95 * shipped[0].network.bound).float().mean()) < 0.05


def test_shipped_messages_differ_from_operator_to_operator(shipped: tuple[StepTime, list[Step]]) -> None:
    """The quartiles too: the standard deviation alone may be that of a few operators beside a constant."""
    found = of_neighbours(*shipped)
    lower, upper = found.quantile(torch.tensor([0.25, 0.75])).tolist()
    assert float(found.std()) >= 0.03
    assert upper - lower >= 0.03


def test_shipped_messages_can_still_learn(shipped: tuple[StepTime, list[Step]]) -> None:
    """If every step took a tenth longer, the loss would have a gradient for all that makes messages, through most operators."""
    learner, steps = shipped
    network, packed = copy.deepcopy(learner.network), learner.pack(steps)
    read, changed = network.encode(packed)
    changed.retain_grad()
    times = network.clocks(packed, read, changed).log_step_s(torch.zeros(2))
    nn.functional.huber_loss(times, times.detach() + 0.1, delta=0.2).backward()
    of_messages = [p for name, p in network.named_parameters() if name.startswith(("out.", "rounds."))]
    assert len(of_messages) > 2
    assert all(p.grad is not None and float(p.grad.norm()) > 1e-6 for p in of_messages)
    assert changed.grad is not None
    reached = changed.grad.norm(dim=1) > 0
    assert float(reached.float().mean()) > 0.5  # the others are hidden behind the host


def test_shuffled_edges_change_the_shipped_predictions(shipped: tuple[StepTime, list[Step]]) -> None:
    """Most of them, by more than half a per cent: messages are of the neighbours, and not of the operator alone."""
    learner, steps = shipped
    packed = learner.pack(steps)
    source, sink = packed.edge_index
    order = torch.randperm(len(source), generator=torch.manual_seed(0))
    shuffled = packed._replace(edge_index=torch.stack([source[order], sink]))
    with torch.inference_mode():
        before, after = (learner.network(one).log_step_s(torch.zeros(2)) for one in (packed, shuffled))
    assert float((after - before).abs().median()) > 0.005
