"""Laws of the two clocks with the shipped weights. None depends on exact times, which change with each training."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from perfguard import OpGraph, TensorSpec, Workload, resolve_device, trace
from perfguard_models import guardnet
from perfguard_models.graph_network import Clocks, longest_of
from perfguard_models.learner import FittedModel, Step
from perfguard_models.step_time import StepTime
from perfguard_research.step_time import smooth_longest_of
from tests.models.oracle import step_s_by_simulation

CARDS = ("a100", "t4", "rtx4090", "h100-sxm-80gb")
TOLERANCE = 1e-4
"""Of logarithms: sums of single precision over hundreds of launches."""


@functools.cache
def weights() -> FittedModel:
    return guardnet.read_weights(guardnet.WEIGHTS / "step-time")


def shipped() -> StepTime:
    learner = weights().learner
    assert isinstance(learner, StepTime)
    return learner


def convolutional(width: int, depth: int) -> tuple[nn.Module, tuple[int, ...]]:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(depth):
        layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)), (3, 32, 32)


def transformer(width: int, depth: int) -> tuple[nn.Module, tuple[int, ...]]:
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    return nn.Sequential(nn.Linear(32, width), nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)), (32, 32)


NETWORKS = {"convolutional": convolutional, "transformer": transformer}


@functools.cache
def graph_of(network: str, *, batch: int = 32, width: int = 128, depth: int = 2, **fields: Any) -> OpGraph:
    with torch.device("meta"):
        model, sample = NETWORKS[network](width, depth)
    return trace(Workload(model, (batch, *sample), loss=lambda y: y.float().mean(), **fields))


def step_of(graph: OpGraph, card: str) -> Step:
    return weights().step(graph, resolve_device(card))


def log_step_s(graph: OpGraph, card: str) -> npt.NDArray[np.float64]:
    """On a usual machine, with a slower host, a faster one, a slower device, a faster one. Shape: (5,)."""
    return shipped().log_step_s([step_of(graph, card)])[:, 0]


# Laws of the weights beside those of test_coherence.py


@pytest.mark.parametrize("card", ["v100", "rtx2080ti", "rtx3090", "rtx4090"])
@pytest.mark.parametrize("network", NETWORKS)
def test_tf32_changes_nothing_on_cards_that_gain_nothing_by_it(network: str, card: str) -> None:
    on, off = (log_step_s(graph_of(network, batch=256, width=512, tf32=tf32), card) for tf32 in ("on", "off"))
    np.testing.assert_array_equal(on, off)


@pytest.mark.parametrize("card", CARDS)
def test_no_product_is_faster_than_any_was_measured(card: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(16384, 16384, dtype=torch.float16) for _ in range(4)))
    graph, device = trace(Workload(model, TensorSpec((16384, 16384), "float16"), mode="infer")), resolve_device(card)
    seconds = math.exp(shipped().log_step_s([step_of(graph, card)])[0, 0])
    fastest = 1.2 if card == "rtx4090" else 0.9
    assert graph.flops / seconds <= (fastest + 0.01) * device.flops_per_s("fp16")  # columns are rounded to half precision


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("network", NETWORKS)
def test_slow_host_slows_small_steps_and_hardly_large_ones(network: str, card: str) -> None:
    small, large = graph_of(network, batch=2, width=32), graph_of(network, batch=1024, width=512)
    for graph, least, most in ((small, 0.4, 0.5 + TOLERANCE), (large, 0.0, 0.1)):
        usual, slow_host, fast_host, slow_device, fast_device = log_step_s(graph, card)
        assert least <= slow_host - usual <= most
        assert fast_host <= usual <= slow_host
        assert fast_device <= usual <= slow_device


# The computation


def clocks_of(host_s: list[list[float]], device_s: list[list[float]], *, is_cpu: bool = False) -> tuple[Clocks, torch.Tensor]:
    """Steps of different lengths, padded. With 100 and 7 microseconds before the first launch."""
    longest = max(map(len, host_s))
    padded = [torch.tensor([row + [0.0] * (longest - len(row)) for row in rows]) for rows in (host_s, device_s)]
    is_launch = torch.tensor([[1.0] * len(row) + [0.0] * (longest - len(row)) for row in host_s])
    start, copy, kind = (torch.full((len(host_s),), value) for value in (100e-6, 7e-6, float(is_cpu)))
    return Clocks(padded[1], padded[0], start, copy, kind), is_launch


@pytest.mark.parametrize("seed", range(5))
def test_step_time_equals_simulation(seed: int) -> None:
    """The device starts an operator when it is launched and the one before has ended."""
    random = np.random.default_rng(seed)
    host_s, device_s = (
        [(10.0 ** random.uniform(-6, -3, size=length)).tolist() for length in (1, 2, 7, 50, 200)] for _ in range(2)
    )
    clocks, _ = clocks_of(host_s, device_s)
    machines = torch.from_numpy(random.normal(0, 0.5, size=(5, 2))).float()
    found = clocks.log_step_s(machines).exp()
    for at, (host, device) in enumerate(machines.exp().tolist()):
        ends = step_s_by_simulation([host * one for one in host_s[at]], [device * one for one in device_s[at]])
        assert float(found[at]) == pytest.approx(ends + 100e-6 * host + 7e-6, rel=1e-5)


@pytest.mark.parametrize("smooth", [False, True])
def test_step_on_cpu_takes_the_sum_of_all_times(smooth: bool) -> None:
    """A CPU is its own host: nothing overlaps."""
    host_s, device_s = [[1e-5, 2e-5], [3e-5]], [[4e-5, 5e-5], [1e-6]]
    clocks, is_launch = clocks_of(host_s, device_s, is_cpu=True)
    longest = functools.partial(smooth_longest_of, is_launch=is_launch) if smooth else longest_of
    found = clocks.log_step_s(torch.tensor([math.log(2), 0.0]), longest_of=longest).exp()
    expected = [2 * (sum(host) + 100e-6) + sum(device) + 7e-6 for host, device in zip(host_s, device_s, strict=True)]
    assert found.tolist() == pytest.approx(expected)
    path = clocks.longest_path()
    assert path.total_s.tolist() == pytest.approx(clocks.log_step_s(torch.zeros(2)).exp().tolist())


def test_step_in_a_batch_equals_step_alone() -> None:
    """Padding is no launch."""
    steps = [
        step_of(graph_of(network, batch=batch, depth=depth), card)
        for network, batch, depth, card in (
            ("convolutional", 2, 1, "a100"), ("transformer", 512, 8, "t4"), ("transformer", 2, 1, "h100-sxm-80gb"),
        )
    ]  # fmt: skip
    times, op_s, _ = shipped().clocks(steps)
    for at, step in enumerate(steps):
        alone, op_s_alone, _ = shipped().clocks([step])
        np.testing.assert_allclose(times[:, at], alone[:, 0], atol=1e-5)
        length = op_s_alone.shape[1]
        np.testing.assert_allclose(op_s[at, :length], op_s_alone[0], rtol=1e-4)
        assert not op_s[at, length:].any()


def test_step_without_operators_has_a_time() -> None:
    """A network may do nothing. The host still takes its constant time."""
    graph = trace(Workload(nn.Identity(), (2, 3), mode="infer"))
    assert not graph.ops
    alone = log_step_s(graph, "a100")
    assert np.isfinite(alone).all()
    steps = [step_of(graph, "a100"), step_of(graph_of("convolutional"), "a100")]
    np.testing.assert_allclose(shipped().log_step_s(steps)[:, 0], alone, atol=1e-5)


# The account
