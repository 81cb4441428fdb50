"""OpGraph × Device → torch_geometric Data: what a network sees of a step.

Every quantity is a logarithm or a share, so that a network corrects physics by factors. The columns are named in
`NODE_FEATURES` and `GRAPH_FEATURES`; their order is part of the schema, and weights are refused if the version differs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch_geometric.data import Data

from perfguard.graph import KIND_INDEX, Op, OpGraph, Phase, StorageKind, channel_padding, roofline_s

if TYPE_CHECKING:
    from perfguard.devices import Device

FEATURE_VERSION = 2
"""Columns are only ever added at the end within a version, so that older weights read the first of them."""
NODE_FEATURES = (
    "log_flops", "log_bytes_read", "log_bytes_written", "log_roofline", "roofline_share", "launch_bound",
    "live_share", "kept_share", "forward", "backward", "optimizer", "log_batch", "log_channels", "log_positions",
    "conv_log_kernel", "conv_log_groups", "conv_log_in_channels", "conv_log_stride", "conv_transposed", "half",
    "working_share", "log_padding_in", "log_padding_out", "conv_winograd", "conv_fft",
)  # fmt: skip
GRAPH_FEATURES = (
    "log_live_peak", "parameter_share", "gradient_share", "optimizer_share", "activation_share", "temporary_share",
    "largest_storage_share", "log_roofline_total", "log_flops", "log_num_ops", "launch_bound_share", "log_mean_op",
    "train", "half", "nhwc", "cpu", "log_device_flops", "log_device_bandwidth", "log_device_sms", "log_device_memory",
    "log_matrix_speedup", "log_working_peak", "small_share", "log_churn",
    "cudnn_benchmark", "compiled", "log_reserved_share",
)  # fmt: skip
HALF = ("float16", "bfloat16")
_NUM_SIZES, _NUM_FLAGS = 10, 5
WORKSPACE_KINDS = ("conv", "conv_backward", "matmul", "attention", "rnn")
SMALL_STORAGE_BYTES = 32 * 2**20
"""glibc keeps freed blocks below this size in its heap (M_MMAP_THRESHOLD's upper bound); CUDA's caching allocator splits them."""


def featurize(graph: OpGraph, device: Device) -> Data:
    """The network's view of ``graph`` on ``device``.

    Returns:
        Data with ``x`` (num_ops, len(NODE_FEATURES)), ``kind`` (num_ops,) indices into OP_KINDS, ``edge_index``
        (2, num_edges), ``globals`` (1, len(GRAPH_FEATURES)), ``roofline`` (num_ops,) seconds, and the physics to correct:
        ``log_memory`` (1,) log bytes of the replay's peak (reserved bytes and context on a GPU), ``log_time`` (1,) log seconds of
        the summed roofline.
    """
    roofline = roofline_s(graph, device)
    padding = channel_padding(graph, device)
    ops = graph.ops
    peak = max(graph.peak_live_bytes, 1)
    total_s = max(float(roofline.sum()), 1e-9)
    launch_bound = roofline <= device.launch_overhead_s
    working = _working_bytes(graph, padding)
    sizes = np.array([_sizes(op) for op in ops], dtype=np.float64).reshape(len(ops), _NUM_SIZES)
    flags = np.array([_flags(op) for op in ops], dtype=np.float64).reshape(len(ops), _NUM_FLAGS)
    logs = np.log1p(sizes) / 10
    columns = [
        *logs[:, :3].T,
        np.log(np.maximum(roofline, 1e-9)) / 4 + 3,
        roofline / total_s,
        launch_bound.astype(np.float64),
        graph.live_bytes[1:] / peak,
        _kept_bytes(graph) / peak,
        *(flags[:, 0] == phase for phase in Phase),
        *logs[:, 3:].T,
        *flags[:, 1:3].T,
        working / peak,
        *np.log(padding),
        *flags[:, 3:].T,
    ]
    return Data(
        x=torch.from_numpy(np.stack(columns, axis=1).astype(np.float32)),
        kind=torch.tensor([KIND_INDEX[op.kind] for op in ops], dtype=torch.long),
        edge_index=torch.from_numpy(graph.edges),
        globals=torch.from_numpy(_globals(graph, device, roofline, launch_bound, working)[None].astype(np.float32)),
        roofline=torch.from_numpy(roofline.astype(np.float32)),
        log_memory=torch.tensor(
            [math.log(device.context_bytes + (peak if device.kind == "cpu" else graph.reserved_bytes))], dtype=torch.float32
        ),
        log_time=torch.tensor([math.log(total_s)], dtype=torch.float32),
        num_nodes=len(ops),
    )


def operator_sizes(op: Op) -> tuple[int, ...]:
    """What every operator has: FLOPs, bytes read and written, and its first output as samples, channels and positions."""
    shape = op.shape
    return (
        op.flops,
        op.bytes_read,
        op.bytes_written,
        shape[0] if shape else 1,
        shape[1] if len(shape) > 1 else 1,
        math.prod(shape[2:]),
    )


def _sizes(op: Op) -> tuple[float, ...]:
    """What is seen as a logarithm, in the order of the columns."""
    attributes = op.attributes
    weight = attributes.get("weight_shape", (1, 1))
    return (
        *operator_sizes(op),
        math.prod(weight[2:]),
        attributes.get("groups", 1),
        attributes.get("in_shape", (1, 1))[1],
        max(attributes.get("stride", (1,)), default=1),
    )


def _flags(op: Op) -> tuple[float, ...]:
    """The phase, and what is true or false, in the order of the columns."""
    get = op.attributes.get
    return op.phase, bool(get("transposed")), op.dtype in HALF, bool(get("winograd")), bool(get("fft"))


def _kept_bytes(graph: OpGraph) -> npt.NDArray[np.float64]:
    """Bytes made by each operator that are alive at the peak. Shape: (num_ops,)."""
    kept = np.zeros(len(graph.ops))
    peak = graph.peak_index
    for storage in graph.storages:
        if 0 <= storage.birth <= peak <= storage.death:
            kept[storage.birth] += storage.num_bytes
    return kept


def _working_bytes(graph: OpGraph, padding: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Bytes alive at each operator if its kernel copied inputs and outputs into whole blocks of channels. Shape: (num_ops,)."""
    copies = np.zeros(len(graph.ops))
    for index, op in enumerate(graph.ops):
        if op.kind in WORKSPACE_KINDS:
            copies[index] = op.bytes_read * padding[0, index] + op.bytes_written * padding[1, index]
    return np.asarray(graph.live_bytes[1:] + copies, dtype=np.float64)


def _globals(
    graph: OpGraph,
    device: Device,
    roofline: npt.NDArray[np.float64],
    launch_bound: npt.NDArray[np.bool_],
    working: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    peak = max(graph.peak_live_bytes, 1)
    by_kind = graph.bytes_by_kind()
    total_s = max(float(roofline.sum()), 1e-9)
    num_ops = max(len(graph.ops), 1)
    at = graph.peak_index
    small = sum(s.num_bytes for s in graph.storages if s.birth <= at <= s.death and s.num_bytes < SMALL_STORAGE_BYTES)
    churn = sum(s.num_bytes for s in graph.storages)
    return np.array(
        [
            math.log(peak) / 10,
            (by_kind[StorageKind.PARAMETER] + by_kind[StorageKind.BUFFER]) / peak,
            by_kind[StorageKind.GRADIENT] / peak,
            by_kind[StorageKind.OPTIMIZER_STATE] / peak,
            by_kind[StorageKind.ACTIVATION] / peak,
            by_kind[StorageKind.TEMPORARY] / peak,
            max((storage.num_bytes for storage in graph.storages), default=0) / peak,
            math.log(total_s) / 4 + 2,
            math.log1p(graph.flops) / 10,
            math.log(num_ops) / 4,
            float(roofline[launch_bound].sum()) / total_s,
            math.log(total_s / num_ops) / 4 + 3,
            *setting_columns(graph, device),
            math.log(max(float(working.max(initial=0.0)) / peak, 1.0)),
            small / peak,
            math.log(max(churn / peak, 1.0)),
            float("cudnn_benchmark" in graph.options),
            float("compiled" in graph.options),
            0.0 if device.kind == "cpu" else math.log(graph.reserved_bytes / peak),
        ]
    )


def setting_columns(graph: OpGraph, device: Device) -> list[float]:
    """Those of GRAPH_FEATURES that say how a step runs and on what, whatever its sizes."""
    arithmetic = {"fp16": "fp16", "amp-fp16": "fp16", "bf16": "bf16", "amp-bf16": "bf16"}.get(graph.precision, "tf32")
    return [
        float(graph.mode == "train"),
        float(graph.precision != "fp32"),
        float(graph.layout == "nhwc"),
        float(device.kind == "cpu"),
        math.log(device.flops_per_s("fp32") / 1e12) / 4,
        math.log(device.bandwidth_bytes_per_s / 1e12) / 4,
        math.log(device.num_sms) / 4,
        math.log(device.memory_bytes / 2**30) / 4,
        math.log(device.flops_per_s(arithmetic) / device.flops_per_s("fp32")) / 4,
    ]
