"""The features of a graph are those that the oracle's loops find for it."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from perfguard.devices import resolve_device
from perfguard.graph import OpGraph, TraceCache, roofline_s, trace
from perfguard.workload import Workload
from perfguard_models.features.launches import launches
from perfguard_models.features.operators import operator_features
from perfguard_models.features.step import STEP_FEATURES, step_features
from perfguard_research.tables import parser_of
from tests.models import oracle

DEVICES = ("a100", "rtx3090", "t4", "cpu")
MANY = 6


def convolutions(a: int = 16, b: int = 30) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, a, 3, padding=1), nn.BatchNorm2d(a), nn.ReLU(), nn.Conv2d(a, a, 5, 2, 2, groups=a),
        nn.Conv2d(a, b, 1), nn.GELU(), nn.Conv2d(b, 24, 3, padding=2, dilation=2), nn.ConvTranspose2d(24, 12, 2, 2, groups=2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, b), nn.Linear(b, 10),
    )  # fmt: skip


def sequences(a: int = 4, b: int = 60) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8 * a, 4, b, batch_first=True)
    return nn.Sequential(nn.Linear(32, 8 * a), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


def one_and_three_dimensions(a: int = 4, b: int = 2) -> nn.Module:
    return nn.Sequential(nn.Conv1d(4, 2 * a, 3), nn.Unflatten(1, (a, 2, 1)), nn.Conv3d(a, b, 1))


NETWORKS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "convolutions": (convolutions, (3, 32, 32)),
    "one dimension": (lambda a=8, b=8: nn.Sequential(nn.Conv1d(4, a, 3), nn.ReLU(), nn.Conv1d(a, b, 3, stride=2)), (4, 40)),
    "one and three": (one_and_three_dimensions, (4, 40)),
    "sequences": (sequences, (16, 32)),
    "a perceptron": (lambda a=12, b=4: nn.Sequential(nn.Linear(8, a), nn.Tanh(), nn.Linear(a, b)), (8,)),
    "nothing but elementwise": (lambda a=1, b=1: nn.PReLU(), (8,)),
}


def assert_equal_to_oracle(graph: OpGraph) -> None:
    for device in map(resolve_device, DEVICES):
        steps = step_features(graph, device)
        assert steps.dtype == np.float32
        assert roofline_s(graph, device).tolist() == oracle.roofline(graph, device).tolist()
        expected = {name: float(np.float32(value)) for name, value in oracle.step_features(graph, device).items()}
        # The oracle adds up one after the other, NumPy in another order.
        assert dict(zip(STEP_FEATURES, steps.tolist(), strict=True)) == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert_same(operator_features(graph, device), oracle.operator_features(graph, device), beside=("device",))
        # Rows may come in any order: that of a hash. The oracle has that of the first launch.
        assert_same(by_first_launch(launches(graph, device)), oracle.launches(graph, device), beside=("device",))


def by_first_launch(view: dict[str, Any]) -> dict[str, Any]:
    """The launches with rows in the order of their first launch."""
    _, first = np.unique(view["order"], return_index=True)
    rows = np.argsort(first)
    moved = {key: view[key][rows] for key in ("x", "name", "host", "roofline", "steps")}
    return view | moved | {"order": np.argsort(rows)[view["order"]].astype(view["order"].dtype)}


def assert_same(found: dict[str, Any], expected: dict[str, Any], *, beside: tuple[str, ...]) -> None:
    assert found.keys() == {*expected, *beside}
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        np.testing.assert_array_equal(found[key], value, err_msg=key)


def test_step_features_have_the_oracle_names() -> None:
    # Weights depend on the order.
    graph = trace(Workload(nn.ReLU(), (2, 3), mode="infer"))
    assert tuple(oracle.step_features(graph, resolve_device("a100"))) == STEP_FEATURES


@pytest.mark.parametrize("precision", ["fp32", "amp-fp16", "bf16"])
@pytest.mark.parametrize("network", NETWORKS)
def test_features_equal_oracle(network: str, precision: Any) -> None:
    make, sample = NETWORKS[network]
    model, cache = make(), TraceCache()
    for batch in (8, 64, 32):
        for optimizer in (torch.optim.SGD, torch.optim.AdamW):
            workload = Workload(
                model, (batch, *sample), loss=lambda output: output.float().sum(), optimizer=optimizer, precision=precision
            )
            assert_equal_to_oracle(cache.trace(workload))


@functools.cache
def many_graphs(network: str, mode: Any) -> list[OpGraph]:
    """Graphs that differ in their widths and batch sizes."""
    make, sample = NETWORKS[network]
    rng, graphs = random.Random(network), []
    for _ in range(MANY):
        with torch.device("meta"):
            model = make(rng.randint(2, 40), rng.randint(2, 140))
        batch = rng.randint(2, 300)
        loss: dict[str, Any] = {"loss": lambda output: output.float().sum()} if mode == "train" else {}
        graphs.append(trace(Workload(model, (batch, *sample), mode=mode, **loss)))
    return graphs


@pytest.mark.parametrize(
    ("network", "mode"),
    [("convolutions", "train"), ("sequences", "infer"), ("a perceptron", "train"), ("one and three", "infer")],
)
def test_features_of_many_sizes_equal_oracle(network: str, mode: str) -> None:
    for graph in many_graphs(network, mode):
        assert_equal_to_oracle(graph)


@pytest.mark.parametrize("network", ["convolutions", "sequences"])
@pytest.mark.parametrize(
    "switches",
    [{"tf32": "on"}, {"tf32": "off", "batch_on": "device"}, {"tf32": "default", "cudnn_benchmark": True}, {"compiled": True}],
)
def test_launches_under_switches_equal_oracle(network: str, switches: dict[str, Any]) -> None:
    make, sample = NETWORKS[network]
    workload = Workload(make(), (4, *sample), loss=lambda output: output.float().sum(), **switches)
    assert_equal_to_oracle(trace(workload))


def test_launches_of_recurrent_layers_equal_oracle() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(16, 8, batch_first=True), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.lstm(x)[0][:, -1])
            return out

    device = resolve_device("a100")
    for mode in ("train", "infer"):
        loss: dict[str, Any] = {"loss": lambda output: output.float().sum()} if mode == "train" else {}
        graph = trace(Workload(Last(), (4, 50, 16), mode=mode, **loss))
        assert any(op.attributes.get("steps") == 50 for op in graph.ops)
        assert_same(by_first_launch(launches(graph, device)), oracle.launches(graph, device), beside=("device",))


@pytest.mark.parametrize(
    ("op", "direction"),
    [("conv", "backward_weight"), ("lstm", "backward_input"), ("lstm", ""), ("linear", "forward"), ("linear", "")],
)
def test_launches_of_single_operators_equal_oracle(op: str, direction: str) -> None:
    sizes = dict.fromkeys(("b", "c_in", "c_out", "kernel", "stride", "h", "steps", "m", "n", "k"), "130") | {"img": "200"}
    row = {"op": op, "gpu": "a100", "dtype": "float16", "direction": direction, **sizes}
    graph = parser_of(list(row), "table.csv")(row).graph(None, TraceCache(), resolve_device("a100"))
    assert_equal_to_oracle(graph)


def test_launches_have_views_and_copied_bytes() -> None:
    # Else the oracle would be compared on zeros alone.
    view = launches(many_graphs("sequences", "infer")[0], resolve_device("a100"))
    assert view["views"].max() > 0
    assert view["copied"][0] > 0
    assert len(view["x"]) < len(view["order"])  # blocks repeat


def test_batch_is_not_copied_to_a_cpu() -> None:
    graph = many_graphs("sequences", "infer")[0]
    on_cpu, on_gpu = (launches(graph, resolve_device(name)) for name in ("cpu", "a100"))
    assert on_cpu["copied"][0] == 0 < on_gpu["copied"][0]
    assert (on_cpu["is_cpu"].tolist(), on_gpu["is_cpu"].tolist()) == ([1], [0])


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


@pytest.mark.parametrize("device", ["a100", "cpu"])
@pytest.mark.parametrize(("network", "mode"), [("convolutions", "train"), ("sequences", "infer")])
def test_launches_ignore_numbering_and_names(network: str, mode: str, device: str) -> None:
    graph = many_graphs(network, mode)[0]
    other = relabelled(graph, random.Random(0))
    found, expected = (by_first_launch(launches(one, resolve_device(device))) for one in (other, graph))
    assert_same(found, expected, beside=())


def test_stored_and_inference_features_equal_oracle() -> None:
    graph = TraceCache().trace(Workload(convolutions(), (4, 3, 32, 32), mode="infer", layout="nhwc"))
    assert_equal_to_oracle(graph)
    assert_equal_to_oracle(OpGraph.from_bytes(graph.to_bytes()))


def test_features_without_operators_equal_oracle() -> None:
    assert_equal_to_oracle(trace(Workload(nn.Identity(), (2, 3), mode="infer")))


def test_features_of_sizes_beyond_64_bits_equal_oracle() -> None:
    with torch.device("meta"):
        model = nn.Linear(2**21, 2**21, bias=False)
    graph = TraceCache().trace(Workload(model, (2**21, 2**21), mode="infer"))
    assert graph.flops == 2 * 2**63
    assert_equal_to_oracle(graph)


def test_workspaces_beyond_64_bits_equal_oracle() -> None:
    # An FFT of this convolution would hold 2^66 bytes.
    with torch.device("meta"):
        model = nn.Conv2d(2**14, 2**14, 3, padding=1)
    graph = trace(Workload(model, (2**22, 2**14, 64, 64), mode="infer"))
    assert graph.peak_live_bytes > 2**50
    assert_equal_to_oracle(graph)
