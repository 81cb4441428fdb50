"""Features of a step's operators in launch order, and of the tensors between them.

Equal operators are one row. `order` has the row of each launch, because the time of a step depends on the order of its launches.

Shapes: N operators, d different operators.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from perfguard.devices import Device
from perfguard.graph import KIND_INDEX, OP_KINDS, Op, OpGraph, Phase, StorageKind, kinds_in_tf32, work_s
from perfguard.graph.roofline import issue_s
from perfguard_models.features import Arrays, FeatureSet, operators
from perfguard_models.features.convolutions import HALF_DTYPES, Convolutions, operators_with

COLUMNS = (*operators.COLUMNS, "tf32", "bf16", "benchmark", "log_idle_waves")
"""Columns of ``x``. The first are those of `operators`, with times at the rates of the arithmetic that is used. "tf32" is 0 on
devices that gain nothing by it, and "bf16" on those that are as fast in float16. The last is how much longer a product or
a convolution takes because its last wave of tiles leaves multiprocessors idle, as a logarithm."""
NAMES = (
    *operators.NAMES, "fused_rms_norm", "fused_rms_norm_backward", "silu_mul", "rope", "fused_rnn", "fused_rnn_backward",
)  # fmt: skip
"""Operators with a row of their own in the embedding. Of all others, those of a kind share one."""
NUM_NAMES = len(NAMES) + len(OP_KINDS)
DEVICE_COLUMNS = (
    "log_half_over_float", "log_float_over_bandwidth", "log_l2", "log_sms", "log_clock", "log_tf32_over_float",
)  # fmt: skip
"""The device's figures, as natural logarithms, each roughly within ±2."""
HALF_OVER_FLOAT = 8
"""What the rate of half precision over that of float32 usually is."""
EDGE_COLUMNS = ("log_over_l2", "log_reuse_over_l2", "log_distance", "crosses_phase", "log_share_read", "in_cache")
"""Columns of ``tensor_x``: natural logarithms of the producer's bytes over the L2 cache, of the bytes that are moved until the
tensor is read, over the cache too, and of the launches until then; whether it is read in another phase; the logarithm of the
producer's bytes over all that the consumer reads; and whether all that moved since the tensor was written, and the tensor, fit
the cache. The last two say how much of the consumer's traffic never reaches the memory."""
HOST_KINDS = len(OP_KINDS) * len(Phase)
"""Classes of host cost: the kind of the operator in each phase."""
_NAME_INDEX = {name: at for at, name in enumerate(NAMES)}
_SAME_KERNEL = {"mm": "addmm", "baddbmm": "bmm"}
"""A bias takes no kernel of its own."""
_SHORTEST_S = 1e-7
_LEAST = 1e-4
"""Of a cache: tensors below are alike."""
_COMPILED = COLUMNS.index("compiled")
_TILE = 128
"""Rows and columns of the part of a product that one multiprocessor computes: cuBLAS's commonest kernels."""
_TIMED: dict[str, tuple[bool, bool]] = {"operator": (True, False), "kernel": (False, False)}
"""Options of graphs that are no steps, with what their clock holds: the host's launches, and the start of the step."""


def launches(graph: OpGraph, device: Device) -> Arrays:
    """Return the launches of ``graph`` on ``device``.

    Returns:
        ``x`` (d, len(COLUMNS)).
        ``name`` (d,): indices into NAMES, or len(NAMES) + the index of the operator's kind.
        ``host`` (d,): classes of host cost, below HOST_KINDS.
        ``roofline`` (d,): seconds of one such operator on the device, without a launch.
        ``steps`` (d,): time steps of a recurrent layer, which depend on one another. 0 for other operators.
        ``order`` (N,): the row of each launch.
        ``views`` (N,): views before each launch.
        ``tensor_ends`` (2, E): the rows of a tensor's producer and consumer. Equal pairs are one edge.
        ``tensor_x`` (E, len(EDGE_COLUMNS)): the mean over the tensors of the pair.
        ``tensor_count`` (E,): how many they are.
        ``device`` (len(DEVICE_COLUMNS),). Zeros for a CPU: one was measured, so nobody knows what they change.
        ``copied`` (1,): bytes of the batch that the host copies to the device. A CPU is its own host.
        ``is_cpu`` (1,): 1 for a CPU, 0 for a GPU.
        ``timed`` (2,): 1 if the time holds the host's launches; 1 if it holds the start of the step. 0 if not.
    """
    ops = graph.ops
    in_tf32 = kinds_in_tf32(graph)
    on_cpu = device.kind == "cpu"
    compute_s, traffic_s = work_s(graph, device)
    roofline = np.maximum(np.maximum(compute_s, traffic_s), np.maximum(issue_s(graph, device), _SHORTEST_S))
    tried = "cudnn_benchmark" in graph.options
    flags = [(op.dtype not in HALF_DTYPES and op.kind in in_tf32, op.dtype == "bfloat16", tried) for op in ops]
    idle_waves = np.zeros((len(ops), 1), dtype=np.float16)
    for at, sizes in (_products(graph), _convolutions(graph)):
        idle_waves[at, 0] = _idle_waves(sizes, device)
    x = np.concatenate(
        [
            operators.operator_columns(graph, device, compute_s, roofline),
            np.array(flags, dtype=np.float16).reshape(len(ops), 3) * _differs(device),
            idle_waves,
        ],
        axis=1,
    )
    if on_cpu:
        x[:, _COMPILED] = 0  # no compiled step was measured on a CPU: it is predicted as eager
    name = np.array([_name_of(op) for op in ops], dtype=np.int16)
    host = np.array([KIND_INDEX[op.kind] * len(Phase) + op.phase for op in ops], dtype=np.int16)
    key = np.ascontiguousarray(np.column_stack([x.view(np.int16), name, host]))
    as_bytes = key.view(np.dtype((np.void, key.itemsize * key.shape[1]))).ravel()  # one value a row, which is fast to compare
    _, first, order = np.unique(as_bytes, return_index=True, return_inverse=True)
    timed = [found for option, found in _TIMED.items() if option in graph.options]
    copied = [
        storage.num_bytes
        for storage in graph.storages
        if storage.kind is StorageKind.INPUT and not (on_cpu or timed or "batch-on-device" in graph.options)
    ]
    return {
        "x": x[first],
        "name": name[first],
        "host": host[first],
        "roofline": roofline[first].astype(np.float32),
        "steps": np.array([ops[at].attributes.get("steps", 0) for at in first], dtype=np.float32),
        "order": order.astype(np.int32),
        "views": np.array([op.attributes.get("views", 0) for op in ops], dtype=np.int16),
        **_edges(graph, device, order),
        "device": np.zeros(len(DEVICE_COLUMNS), dtype=np.float32) if on_cpu else device_features(device),
        "copied": np.array([sum(copied)], dtype=np.float64),
        "is_cpu": np.array([on_cpu], dtype=np.float32),
        "timed": np.array(timed[0] if timed else (True, True), dtype=np.float32),
    }


def _name_of(op: Op) -> int:
    """Index into NAMES, or len(NAMES) + the index of the operator's kind."""
    return _NAME_INDEX.get(_SAME_KERNEL.get(op.name, op.name), len(NAMES) + KIND_INDEX[op.kind])


def _edges(graph: OpGraph, device: Device, order: npt.NDArray[np.int64]) -> Arrays:
    """``tensor_ends``, ``tensor_x`` and ``tensor_count`` of ``graph``, whose operators have the rows ``order`` (N,)."""
    source, sink = graph.edges
    _, read, written = graph.costs.astype(np.float64)
    moved = np.cumsum(read + written)
    phase = np.array([op.phase for op in graph.ops], dtype=np.int64)
    cache = max(device.l2_bytes, 2**20)
    x = np.stack(
        [
            np.log(written[source] / cache + _LEAST),
            np.log((moved[sink] - moved[source]) / cache + _LEAST),
            np.log(sink - source),
            phase[sink] != phase[source],
            np.log(np.minimum(written[source] / np.maximum(read[sink], 1), 1) + _LEAST),
            moved[sink] - moved[source] + written[source] <= cache,
        ],
        axis=1,
    )
    pairs, place, count = np.unique(np.stack([order[source], order[sink]]), axis=1, return_inverse=True, return_counts=True)
    mean = np.zeros((pairs.shape[1], len(EDGE_COLUMNS)))
    np.add.at(mean, place.ravel(), x)
    return {
        "tensor_ends": pairs.astype(np.int32),
        "tensor_x": (mean / count[:, None]).astype(np.float16),
        "tensor_count": count.astype(np.float32),
    }


def _differs(device: Device) -> npt.NDArray[np.float16]:
    """1 for the flags that make a difference on ``device``, else 0. Shape: (3,)."""
    has_tf32 = device.flops_per_s("tf32") > device.flops_per_s("fp32")
    has_two_halves = device.flops_per_s("bf16") != device.flops_per_s("fp16")
    return np.array([has_tf32, has_two_halves, True], dtype=np.float16)


def _products(graph: OpGraph) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """The products among the operators, and their sizes: batch, m, n, k. Shapes: (n,), (n, 4)."""
    at = operators_with("product", graph)
    return at, graph.attribute("product", ops=at, length=4)


def _convolutions(graph: OpGraph) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """The convolutions among the operators, and the sizes of the products that they are: a group each. Shapes: (n,), (n, 4)."""
    at = operators_with("weight_shape", graph)
    c = Convolutions(graph, at)
    return at, np.stack([c.groups, c.batch * c.positions_out, c.narrow_out, c.narrow_in * c.taps], axis=-1)


def _idle_waves(products: npt.NDArray[np.int64], device: Device) -> npt.NDArray[np.float64]:
    """Log of the waves of tiles, rounded up, over the waves. Shapes: (n, 4), as batch, m, n, k → (n,)."""
    batch, rows, columns, _ = np.maximum(products.astype(np.float64), 1).T
    waves = batch * np.ceil(rows / _TILE) * np.ceil(columns / _TILE) / max(device.num_sms, 1)
    return np.asarray(np.log(np.ceil(waves) / waves))


def device_features(device: Device) -> npt.NDArray[np.float32]:
    """The figures of ``device``. Shape: (len(DEVICE_COLUMNS),)."""
    fp32 = device.flops_per_s("fp32")
    values = (
        device.flops_per_s("fp16") / fp32 / HALF_OVER_FLOAT,
        fp32 / device.bandwidth_bytes_per_s / 20,
        device.l2_bytes / 5e6 + 0.1,
        max(device.num_sms, 1) / 60,
        max(device.boost_clock_hz, 1e8) / 1.5e9,
        device.flops_per_s("tf32") / fp32,
    )
    return np.log(np.array(values, dtype=np.float32))


LAUNCHES = FeatureSet((COLUMNS, NAMES, DEVICE_COLUMNS, EDGE_COLUMNS), launches)
