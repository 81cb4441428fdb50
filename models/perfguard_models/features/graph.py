"""Graph features: columns of each operator and of the whole graph, which the graph network for CPUs reads.

Every quantity is a logarithm or a share, so that a network corrects physics by factors. The columns are named in
`NODE_FEATURES` and `GRAPH_FEATURES`; their order is part of the schema, and weights are refused if the version differs.

Shapes: C graphs of a batch, N operators, S storages.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from perfguard.graph import KIND_INDEX, GraphBatch, OpGraph, Phase, StorageKind, batch_roofline_s, channel_padding, summed_by
from perfguard_models.features.convolutions import HALF_DTYPES, convolutions_in
from perfguard_models.features.exact import Floats, log, log1p, sum_where

if TYPE_CHECKING:
    from torch_geometric.data import Data

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
WORKSPACE_KINDS = ("conv", "conv_backward", "matmul", "attention", "rnn")
SMALL_STORAGE_BYTES = 32 * 2**20
"""glibc keeps freed blocks below this size in its heap (M_MMAP_THRESHOLD's upper bound); CUDA's caching allocator splits them."""


class GraphFeatures(NamedTuple):
    """Inputs of the network for each graph of a batch, and the physics that it corrects."""

    x: npt.NDArray[np.float32]  # shape: (C, N, len(NODE_FEATURES))
    globals: npt.NDArray[np.float32]  # shape: (C, len(GRAPH_FEATURES))
    roofline: npt.NDArray[np.float32]  # shape: (C, N), seconds
    log_memory: npt.NDArray[np.float32]
    """Log bytes of the replay's peak (reserved bytes and context on a GPU). Shape: (C,)"""
    log_time: npt.NDArray[np.float32]
    """Log seconds of the summed roofline. Shape: (C,)"""


def featurize(graph: OpGraph, device: Device) -> Data:
    """Return :func:`graph_features` of one graph, as an example to train on.

    Returns:
        Data with the columns of :class:`GraphFeatures`, ``x`` and ``roofline`` without the dimension C, ``kind`` (N,) indices
        into OP_KINDS, and ``edge_index`` (2, num_edges).
    """
    from torch_geometric.data import Data  # for training alone: it takes as long to import as torch

    features = graph_features(graph.as_batch(), device)
    columns = {name: torch.from_numpy(values) for name, values in features._asdict().items()}
    columns |= {"x": columns["x"][0], "roofline": columns["roofline"][0]}
    return Data(kind=kinds_of(graph), edge_index=torch.from_numpy(graph.edges), num_nodes=len(graph.ops), **columns)


def kinds_of(graph: OpGraph) -> torch.Tensor:
    """Return the kind of each operator, an index into OP_KINDS. Shape: (N,)."""
    return torch.tensor([KIND_INDEX[op.kind] for op in graph.ops], dtype=torch.long)


def graph_features(graphs: GraphBatch, device: Device) -> GraphFeatures:
    """Return the network's view of ``graphs`` on ``device``."""
    skeleton = graphs.skeleton
    roofline, padding = batch_roofline_s(graphs, device), channel_padding(graphs, device)
    peak = np.maximum(graphs.peak_live_bytes, 1)
    total_s = np.maximum(roofline.sum(axis=1), 1e-9)
    launch_bound = roofline <= device.launch_overhead_s
    working = _working_bytes(graphs, padding)
    logs = _log_sizes(graphs)
    columns = [
        *logs[:3],
        np.log(np.maximum(roofline, 1e-9)) / 4 + 3,
        roofline / total_s[:, None],
        launch_bound,
        graphs.live_bytes[:, 1:] / peak[:, None],
        _kept_bytes(graphs) / peak[:, None],
        *(np.array([op.phase == phase for op in skeleton.ops], dtype=np.bool_) for phase in Phase),
        *logs[3:],
        _flags(skeleton, "transposed"),
        np.array([op.dtype in HALF_DTYPES for op in skeleton.ops], dtype=np.bool_),
        working / peak[:, None],
        *np.log(padding),
        _flags(skeleton, "winograd"),
        _flags(skeleton, "fft"),
    ]
    x = np.empty((*roofline.shape, len(NODE_FEATURES)), dtype=np.float32)
    for at, column in enumerate(columns):
        x[..., at] = column
    num_bytes = peak if device.kind == "cpu" else graphs.reserved_bytes
    return GraphFeatures(
        x,
        _globals(graphs, device, roofline, launch_bound, working),
        roofline.astype(np.float32),
        log(num_bytes + device.context_bytes).astype(np.float32),
        log(total_s).astype(np.float32),
    )


def _log_sizes(graphs: GraphBatch) -> Floats:
    """The sizes of each operator as logarithms, in the order of the columns. Shape: (10, C, N)."""
    shape, some = graphs.attribute("shape", length=2), convolutions_in(graphs.skeleton)
    dense = [*graphs.costs, shape[..., 0], shape[..., 1], shape[..., 2:].prod(axis=-1)]
    of_convolutions = [
        graphs.attribute("weight_shape", ops=some, length=2)[..., 2:].prod(axis=-1),
        graphs.attribute("groups", ops=some, length=1)[..., 0],
        graphs.attribute("in_shape", ops=some, length=2)[..., 1],
        graphs.attribute("stride", ops=some).max(axis=-1, initial=1),
    ]
    logs = np.full((10, *shape.shape[:2]), np.log1p(1.0) / 10)
    logs[:6] = [np.log1p(sizes.astype(np.float64)) / 10 for sizes in dense]
    logs[6:, :, some] = [np.log1p(sizes.astype(np.float64)) / 10 for sizes in of_convolutions]
    return logs


def _flags(skeleton: OpGraph, name: str) -> npt.NDArray[np.bool_]:
    return np.array([bool(op.attributes.get(name)) for op in skeleton.ops], dtype=np.bool_)


def _kept_bytes(graphs: GraphBatch) -> npt.NDArray[Any]:
    """Bytes made by each operator that are alive at the peak. Shape: (C, N)."""
    num_ops, births = len(graphs.skeleton.ops), graphs.skeleton.lifetimes[1]
    made = (births >= 0) & (births < num_ops)
    return summed_by(graphs.held_at_peak[:, made], births[made], num_ops)


def _working_bytes(graphs: GraphBatch, padding: Floats) -> Floats:
    """Bytes alive at each operator if its kernel copied inputs and outputs into whole blocks of channels. Shape: (C, N)."""
    copies = graphs.costs[1] * padding[0] + graphs.costs[2] * padding[1]
    has_workspace = np.array([op.kind in WORKSPACE_KINDS for op in graphs.skeleton.ops], dtype=np.bool_)
    return (graphs.live_bytes[:, 1:] + np.where(has_workspace, copies, 0)).astype(np.float64)


def _globals(
    graphs: GraphBatch, device: Device, roofline: Floats, launch_bound: npt.NDArray[np.bool_], working: Floats
) -> npt.NDArray[np.float32]:
    """Shape: (C, len(GRAPH_FEATURES))."""
    skeleton, storage_bytes = graphs.skeleton, graphs.storage_bytes
    peak = np.maximum(graphs.peak_live_bytes, 1)
    by_kind = dict(zip(StorageKind, graphs.bytes_by_kind().T, strict=True))
    total_s = np.maximum(roofline.sum(axis=1), 1e-9)
    num_ops = max(len(skeleton.ops), 1)
    small = np.where(storage_bytes < SMALL_STORAGE_BYTES, graphs.held_at_peak, 0).sum(axis=1)
    columns = [
        log(peak) / 10,
        (by_kind[StorageKind.PARAMETER] + by_kind[StorageKind.BUFFER]) / peak,
        by_kind[StorageKind.GRADIENT] / peak,
        by_kind[StorageKind.OPTIMIZER_STATE] / peak,
        by_kind[StorageKind.ACTIVATION] / peak,
        by_kind[StorageKind.TEMPORARY] / peak,
        storage_bytes.max(axis=1, initial=0) / peak,
        log(total_s) / 4 + 2,
        log1p(graphs.flops) / 10,
        math.log(num_ops) / 4,
        sum_where(roofline, launch_bound) / total_s,
        log(total_s / num_ops) / 4 + 3,
        *_setting(skeleton, device),
        log(np.maximum(working.max(axis=1, initial=0.0) / peak, 1.0)),
        small / peak,
        log(np.maximum(storage_bytes.sum(axis=1) / peak, 1.0)),
        float("cudnn_benchmark" in skeleton.options),
        float("compiled" in skeleton.options),
        0.0 if device.kind == "cpu" else log(graphs.reserved_bytes / peak),
    ]
    found = np.empty((len(graphs), len(GRAPH_FEATURES)), dtype=np.float32)
    for at, column in enumerate(columns):
        found[:, at] = column
    return found


def _setting(graph: OpGraph, device: Device) -> list[float]:
    """The GRAPH_FEATURES of the setting and the device, without sizes."""
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
