"""Features: columns that are named, finite, and free of how the graph happens to be numbered."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from perfguard.devices import Device, resolve_device
from perfguard.graph import OP_KINDS, OpGraph, Storage, roofline_s, trace
from perfguard.workload import TensorSpec, Workload
from perfguard_models.features.graph import GRAPH_FEATURES, NODE_FEATURES, featurize

GPU = resolve_device("a100")
CPU = Device(
    id="cpu", name="Toy", kind="cpu", memory_bytes=2**34, bandwidth_bytes_per_s=2e10, peak_flops={"fp32": 1e11}, num_sms=2,
    boost_clock_hz=2e9, l2_bytes=2**21, tdp_w=0.0, architecture="toy", context_bytes=0, launch_overhead_s=5e-6, source="made up",
)  # fmt: skip
LAYERS: dict[str, Any] = {
    "conv": lambda: nn.Conv2d(8, 8, 3, padding=1),
    "depthwise": lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8),
    "transposed": lambda: nn.ConvTranspose2d(8, 8, 3, padding=1),
    "norm": lambda: nn.GroupNorm(2, 8),
    "gelu": nn.GELU,
    "pool": lambda: nn.AvgPool2d(3, 1, 1),
}


def net(names: list[str], *, batch: int = 2, **options: Any) -> Workload:
    with torch.device("meta"):
        body = [LAYERS[name]() for name in names]
        model = nn.Sequential(nn.Conv2d(3, 8, 1), *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    return Workload(model, (batch, 3, 8, 8), TensorSpec((batch,), "int64"), F.cross_entropy, **options)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    return net(
        draw(st.lists(st.sampled_from(sorted(LAYERS)), max_size=5)),
        batch=draw(st.integers(1, 64)),
        mode=draw(st.sampled_from(["train", "infer"])),
        precision=draw(st.sampled_from(["fp32", "bf16", "amp-fp16"])),
        layout=draw(st.sampled_from(["nchw", "nhwc"])),
        optimizer=draw(st.sampled_from([None, torch.optim.Adam])),
    )


devices = st.sampled_from([GPU, CPU])


@settings(max_examples=30)
@given(workloads(), devices)
def test_features_are_finite_and_columns_named(workload: Workload, device: Device) -> None:
    graph = trace(workload, target=device.kind)
    data = featurize(graph, device)
    assert data.x.shape == (len(graph.ops), len(NODE_FEATURES))
    assert data.globals.shape == (1, len(GRAPH_FEATURES))
    assert data.kind.shape == data.roofline.shape == (len(graph.ops),)
    assert data.edge_index.shape == graph.edges.shape
    for values in (data.x, data.globals, data.roofline, data.log_memory, data.log_time):
        assert torch.isfinite(values).all()
    shares = [index for index, name in enumerate(NODE_FEATURES) if name in ("roofline_share", "live_share", "kept_share")]
    assert data.x[:, shares].min() >= 0
    assert data.x[:, shares].max() <= 1 + 1e-6


@settings(max_examples=20)
@given(workloads(), devices)
def test_base_prediction_is_replay_and_roofline(workload: Workload, device: Device) -> None:
    """They are the physics that the learnt part corrects."""
    graph = trace(workload, target=device.kind)
    data = featurize(graph, device)
    replayed = graph.peak_live_bytes if device.kind == "cpu" else graph.reserved_bytes
    assert float(data.log_memory) == pytest.approx(math.log(replayed + device.context_bytes), rel=1e-5)
    assert float(data.log_time) == pytest.approx(math.log(roofline_s(graph, device).sum()), rel=1e-5)


def relabelled(graph: OpGraph, rng: random.Random) -> OpGraph:
    """The same graph with its storages in another order and under other names."""
    order = rng.sample(range(len(graph.storages)), len(graph.storages))
    new_index = {old: new for new, old in enumerate(order)}
    storages: tuple[Storage, ...] = tuple(graph.storages[old]._replace(module="renamed") for old in order)
    ops = tuple(
        op._replace(
            inputs=tuple(rng.sample([new_index[s] for s in op.inputs], len(op.inputs))),
            outputs=tuple(new_index[s] for s in op.outputs),
            module="renamed",
        )
        for op in graph.ops
    )
    return replace(graph, ops=ops, storages=storages)


@settings(max_examples=20)
@given(workloads(), devices, st.randoms(use_true_random=False))
def test_features_ignore_numbering_and_names(workload: Workload, device: Device, rng: random.Random) -> None:
    """Only the order of allocation matters, since the allocator's fragmentation depends on it."""
    graph = trace(workload, target=device.kind)
    data, other = featurize(graph, device), featurize(relabelled(graph, rng), device)
    for key in ("x", "kind", "globals", "roofline", "log_time"):
        torch.testing.assert_close(data[key], other[key])
    tolerance = 0.0 if device.kind == "cpu" else 0.3  # the allocator's fragments depend on the order
    assert abs(float(data.log_memory - other.log_memory)) <= tolerance
    assert set(map(tuple, data.edge_index.T.tolist())) == set(map(tuple, other.edge_index.T.tolist()))


def test_a_graph_that_was_stored_has_the_same_features() -> None:
    graph = trace(net(["conv", "depthwise", "norm"]))
    data, again = featurize(graph, GPU), featurize(OpGraph.from_bytes(graph.to_bytes()), GPU)
    for key in ("x", "kind", "edge_index", "globals", "roofline"):
        assert torch.equal(data[key], again[key])


def test_columns_hold_what_they_are_called() -> None:
    graph = trace(net(["depthwise"], batch=4))
    data = featurize(graph, GPU)
    (index,) = (i for i, op in enumerate(graph.ops) if op.kind == "conv" and op.attributes["groups"] == 8)
    row = dict(zip(NODE_FEATURES, data.x[index].tolist(), strict=True))
    op = graph.ops[index]
    assert OP_KINDS[int(data.kind[index])] == "conv"
    assert (row["forward"], row["backward"], row["optimizer"]) == (1, 0, 0)
    assert row["log_flops"] == pytest.approx(math.log1p(2 * 4 * 64 * 8 * 9) / 10)
    assert row["log_bytes_written"] == pytest.approx(math.log1p(4 * 4 * 8 * 64) / 10)
    assert row["log_batch"] == pytest.approx(math.log1p(4) / 10)
    assert row["log_channels"] == pytest.approx(math.log1p(8) / 10)
    assert row["log_positions"] == pytest.approx(math.log1p(64) / 10)
    assert row["conv_log_kernel"] == pytest.approx(math.log1p(9) / 10)
    assert row["conv_log_groups"] == pytest.approx(math.log1p(8) / 10)
    assert row["live_share"] == pytest.approx(graph.live_bytes[index + 1] / graph.peak_live_bytes)
    assert row["working_share"] == pytest.approx(
        (graph.live_bytes[index + 1] + op.bytes_read + op.bytes_written) / graph.peak_live_bytes
    )
    assert data.x[:, NODE_FEATURES.index("roofline_share")].sum() == pytest.approx(1.0)


def test_shares_of_the_peak_add_up() -> None:
    graph = trace(net(["conv", "norm"], optimizer=torch.optim.Adam))
    values = dict(zip(GRAPH_FEATURES, featurize(graph, GPU).globals[0].tolist(), strict=True))
    names = ("parameter_share", "gradient_share", "optimizer_share", "activation_share", "temporary_share")
    inputs = 4 * 2 * 3 * 64 + 8 * 2
    assert sum(values[name] for name in names) == pytest.approx(1 - inputs / graph.peak_live_bytes)
    assert (values["train"], values["half"], values["nhwc"], values["cpu"]) == (1, 0, 0, 0)


def test_features_of_a_step_without_kernels() -> None:
    graph = trace(Workload(nn.Identity(), (2, 3), mode="infer"))
    data = featurize(graph, GPU)
    assert data.x.shape == (0, len(NODE_FEATURES))
    assert torch.isfinite(data.globals).all()
