"""The papers' view of a network: its operators, the tensors between them, and a few global features, in plain units.

Four of the papers learn all costs from the operators of the forward pass (LAYERS). DNNPerf also has those of the backward pass
and of the optimizer as nodes, with the sizes of temporaries and gradients (WHOLE_STEP). LILOU also reads which operators run as
one kernel (KERNELS). Each predictor scales the features in its own way.

The trace has no hyperparameters of pools. Their stride is the ratio of the heights of input and output, and the kernel is taken
to be as large as the stride, without padding: 2 for a 3 x 3 pool with stride 2.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import numpy as np

from perfguard.devices import Device
from perfguard.graph import KIND_INDEX, OP_KINDS, Op, OpGraph, Phase, StorageKind
from perfguard_models.features import Arrays, FeatureSet
from perfguard_research.fusion.network import shipped

NODE_COLUMNS = (
    "flops", "input_bytes", "output_bytes", "weight_bytes", "kernel_height", "kernel_width", "stride", "padding", "dilation",
    "groups", "in_channels", "out_channels", "out_batch", "out_dim1", "out_dim2", "out_dim3",
)  # fmt: skip
STEP_COLUMNS = (*NODE_COLUMNS, "temporary_bytes", "gradient_bytes")
EDGE_COLUMNS = ("bytes", "dim0", "dim1", "dim2", "dim3")
GLOBAL_COLUMNS = (
    "batch", "channels", "input_size", "layers", "flops", "parameters", "optimizer_states", "train", "half", "nhwc", "compiled",
    "device_flops", "device_matrix_flops", "device_bandwidth", "device_memory", "device_sms", "device_clock", "device_l2",
)  # fmt: skip
_DEVICE = GLOBAL_COLUMNS.index("device_flops")
DEVICE_COLUMNS = slice(_DEVICE, len(GLOBAL_COLUMNS))
"""Columns of `globals` for the device."""


def layers_of(graph: OpGraph, device: Device, *, whole: bool = False) -> Arrays:
    """The forward graph of ``graph``, or with ``whole`` all operators of the step, and the features of ``device``.

    Returns:
        Of n operators and m tensors between them, in plain units (FLOPs, bytes, Hz):
        ``kind`` (n,): indices into OP_KINDS, plus len(OP_KINDS) for each phase after the forward pass.
        ``nodes`` (n, len(NODE_COLUMNS)), or with ``whole`` (n, len(STEP_COLUMNS)).
        ``edge_index`` (2, m), ``edges`` (m, len(EDGE_COLUMNS)), and ``globals`` (len(GLOBAL_COLUMNS),).
    """
    chosen = [index for index, op in enumerate(graph.ops) if whole or op.phase is Phase.FORWARD]
    ops = [graph.ops[index] for index in chosen]
    position = np.full(len(graph.ops), -1)
    position[chosen] = np.arange(len(chosen))
    edge_index = position[graph.edges]
    edge_index = edge_index[:, (edge_index >= 0).all(axis=0)]
    read = {sink: ops[source].shape for source, sink in edge_index.T.tolist()}
    nodes = [(*_node(op, graph, read.get(at, op.shape)), *(_step_sizes(op, graph) if whole else ())) for at, op in enumerate(ops)]
    delivered = [(op.bytes_written, *_dims(op.shape)) for op in ops]
    forward = [op for op in ops if op.phase is Phase.FORWARD]
    return {
        "kind": np.array([KIND_INDEX[op.kind] + len(OP_KINDS) * op.phase for op in ops], dtype=np.int64),
        "nodes": np.array(nodes, dtype=np.float32).reshape(-1, len(STEP_COLUMNS if whole else NODE_COLUMNS)),
        "edge_index": edge_index,
        "edges": np.array([delivered[source] for source in edge_index[0]], dtype=np.float32).reshape(-1, len(EDGE_COLUMNS)),
        "globals": np.array(_globals(graph, forward, device), dtype=np.float32),
    }


def kernels(graph: OpGraph, device: Device) -> Arrays:
    """The kernel that each operator of an inference runs in; without a compiler each has its own. Shape: (n,)."""
    kernel = np.arange(len(graph.ops))
    if "compiled" in graph.options and graph.mode == "infer":
        for at, operators in enumerate(shipped().kernels(graph, f"inductor-{device.kind}")):
            kernel[operators] = at
    return {"kernel": kernel}


def trains(features: Arrays) -> bool:
    """Whether these are the features of a training step."""
    return bool(features["globals"][GLOBAL_COLUMNS.index("train")])


LAYERS = FeatureSet((NODE_COLUMNS, EDGE_COLUMNS, GLOBAL_COLUMNS), layers_of)
WHOLE_STEP = FeatureSet((STEP_COLUMNS, EDGE_COLUMNS, GLOBAL_COLUMNS), functools.partial(layers_of, whole=True))
KERNELS = FeatureSet("kernel", kernels)


def _bytes_of(graph: OpGraph, storages: Iterable[int], kind: StorageKind) -> int:
    return sum(graph.storages[index].num_bytes for index in storages if graph.storages[index].kind is kind)


def _step_sizes(op: Op, graph: OpGraph) -> tuple[float, ...]:
    used = {*op.inputs, *op.outputs}
    return _bytes_of(graph, op.outputs, StorageKind.TEMPORARY), _bytes_of(graph, used, StorageKind.GRADIENT)


def _node(op: Op, graph: OpGraph, in_shape: tuple[int, ...]) -> tuple[float, ...]:
    weight_bytes = _bytes_of(graph, op.inputs, StorageKind.PARAMETER)
    attributes = op.attributes
    weight_shape = attributes.get("weight_shape", ())
    kernel = (*weight_shape[2:], 1, 1)
    if op.kind == "pool" and len(in_shape) == len(op.shape) > 2:
        kernel = tuple(max(before // max(after, 1), 1) for before, after in zip(in_shape[2:], op.shape[2:], strict=True))
        attributes = {"stride": kernel}
        kernel = (*kernel, 1)
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
