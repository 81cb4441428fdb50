"""The papers' view of a network: the operators of the forward pass, the tensors between them, and a few global features.

None of the five papers uses the backward pass, the optimizer's kernels or the time at which memory is freed. They learn all
costs from the forward graph. So this view has only that graph, in plain units. Each predictor scales it in its own way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from perfguard.graph import KIND_INDEX, Op, OpGraph, Phase, StorageKind
from perfguard_models import trained
from perfguard_models.trained import FeatureSet

if TYPE_CHECKING:
    from perfguard.devices import Device

NODE_COLUMNS = (
    "flops", "input_bytes", "output_bytes", "weight_bytes", "kernel_height", "kernel_width", "stride", "padding", "dilation",
    "groups", "in_channels", "out_channels", "out_batch", "out_dim1", "out_dim2", "out_dim3",
)  # fmt: skip
EDGE_COLUMNS = ("bytes", "dim0", "dim1", "dim2", "dim3")
GLOBAL_COLUMNS = (
    "batch", "channels", "input_size", "layers", "flops", "parameters", "optimizer_states", "train", "half", "nhwc", "compiled",
    "device_flops", "device_matrix_flops", "device_bandwidth", "device_memory", "device_sms", "device_clock", "device_l2",
)  # fmt: skip
_DEVICE = GLOBAL_COLUMNS.index("device_flops")
DEVICE_COLUMNS = slice(_DEVICE, len(GLOBAL_COLUMNS))
"""Columns of `globals` for the device."""


class Layers(NamedTuple):
    """A forward graph with n operators and m tensors between them. All quantities in plain units (FLOPs, bytes, Hz)."""

    kind: npt.NDArray[np.int64]  # shape: (n,), indices into OP_KINDS
    nodes: npt.NDArray[np.float32]  # shape: (n, len(NODE_COLUMNS))
    edge_index: npt.NDArray[np.int64]  # shape: (2, m)
    edges: npt.NDArray[np.float32]  # shape: (m, len(EDGE_COLUMNS))
    globals: npt.NDArray[np.float32]  # shape: (len(GLOBAL_COLUMNS),)


def layers_of(graph: OpGraph, device: Device) -> Layers:
    """The forward graph of ``graph`` and the facts of ``device``."""
    chosen = [index for index, op in enumerate(graph.ops) if op.phase is Phase.FORWARD]
    ops = [graph.ops[index] for index in chosen]
    position = np.full(len(graph.ops), -1)
    position[chosen] = np.arange(len(chosen))
    edge_index = position[graph.edges]
    edge_index = edge_index[:, (edge_index >= 0).all(axis=0)]
    weights = {index: s.num_bytes for index, s in enumerate(graph.storages) if s.kind is StorageKind.PARAMETER}
    nodes = np.array([_node(op, weights) for op in ops], dtype=np.float32).reshape(len(ops), len(NODE_COLUMNS))
    delivered = [(op.bytes_written, *_dims(op.shape)) for op in ops]
    return Layers(
        kind=np.array([KIND_INDEX[op.kind] for op in ops], dtype=np.int64),
        nodes=nodes,
        edge_index=edge_index,
        edges=np.array([delivered[source] for source in edge_index[0]], dtype=np.float32).reshape(-1, len(EDGE_COLUMNS)),
        globals=np.array(_globals(graph, ops, device), dtype=np.float32),
    )


FEATURE_SETS: Mapping[str, FeatureSet] = {
    **trained.FEATURE_SETS,
    "layers": FeatureSet((NODE_COLUMNS, EDGE_COLUMNS, GLOBAL_COLUMNS), lambda graph, device: layers_of(graph, device)._asdict()),
}
"""GuardNet's feature sets, and the network as the papers see it."""


def _node(op: Op, weights: dict[int, int]) -> tuple[float, ...]:
    weight_bytes = sum(weights.get(index, 0) for index in op.inputs)
    attributes = op.attributes
    weight_shape = attributes.get("weight_shape", ())
    kernel = (*weight_shape[2:], 1, 1)
    return (
        op.flops,
        max(op.bytes_read - weight_bytes, 0),
        op.bytes_written,
        weight_bytes,
        kernel[0],
        kernel[1],
        max(attributes.get("stride", (1,)), default=1),
        max(attributes.get("padding", (0,)), default=0),
        max(attributes.get("dilation", (1,)), default=1),
        attributes.get("groups", 1),
        attributes["in_shape"][1] if weight_shape else attributes.get("product", (0, 0, 0, 0))[3],
        op.shape[1] if weight_shape else attributes.get("product", (0, 0, 0, 0))[2],
        *_dims(op.shape),
    )


def _dims(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Four of them: the last ones of a longer shape are multiplied, the missing ones of a shorter one are 1."""
    padded = (*shape, 1, 1, 1, 1)
    return (*padded[:3], math.prod(shape[3:]) if len(shape) > 3 else 1)


def _globals(graph: OpGraph, ops: list[Op], device: Device) -> tuple[float, ...]:
    first = next((op for op in ops if len(op.shape) > 1), None)
    convolution = next((op.attributes["in_shape"] for op in ops if op.kind == "conv"), None)
    shape = convolution or (first.shape if first is not None else (1, 1))
    parameters = sum(s.num_bytes for s in graph.storages if s.kind is StorageKind.PARAMETER)
    states = sum(s.num_bytes for s in graph.storages if s.kind is StorageKind.OPTIMIZER_STATE)
    return (
        shape[0],
        shape[1],
        max(shape[2:], default=1),
        len(ops),
        sum(op.flops for op in ops),
        parameters / 4,
        states / max(parameters, 1),
        graph.mode == "train",
        graph.precision != "fp32",
        graph.layout == "nhwc",
        "compiled" in graph.options,
        device.flops_per_s("fp32"),
        device.flops_per_s("fp16" if graph.precision != "fp32" else "tf32"),
        device.bandwidth_bytes_per_s,
        device.memory_bytes,
        device.num_sms,
        device.boost_clock_hz,
        device.l2_bytes,
    )
