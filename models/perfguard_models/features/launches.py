"""Features of a step's operators in launch order: what the host launches and what the device computes.

Equal operators are one row. `order` has the row of each launch, because the time of a step depends on the order of its launches.

Shapes: C graphs of a batch, N operators, d different operators of one graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from perfguard.graph import KIND_INDEX, OP_KINDS, GraphBatch, OpGraph, Phase, StorageKind, batch_work_s, kinds_in_tf32
from perfguard_models.features import operators
from perfguard_models.features.convolutions import HALF_DTYPES

if TYPE_CHECKING:
    from perfguard.devices import Device

COLUMNS = (*operators.COLUMNS, "tf32", "bf16", "benchmark", "log_idle_waves")
"""Columns of ``x``. The first are those of `operators`, with times at the rates of the arithmetic that is used. "tf32" is 0 on
devices that gain nothing by it, and "bf16" on those that are as fast in float16. The last is how much longer a product takes
because its last wave of tiles leaves multiprocessors idle, as a logarithm."""
NAMES = (
    *operators.NAMES, "fused_rms_norm", "fused_rms_norm_backward", "silu_mul", "rope", "fused_rnn", "fused_rnn_backward",
)  # fmt: skip
"""Operators with a row of their own in the embedding. Of all others, those of a kind share one."""
NUM_NAMES = len(NAMES) + len(OP_KINDS)
DEVICE_COLUMNS = (
    "log_half_over_float", "log_float_over_bandwidth", "log_l2", "log_sms", "log_clock", "log_tf32_over_float",
)  # fmt: skip
"""The device's figures, as natural logarithms, each roughly within ±2."""
HOST_KINDS = len(OP_KINDS) * len(Phase)
"""Classes of host cost: the kind of the operator in each phase."""
_SAME_KERNEL = {"mm": "addmm", "baddbmm": "bmm"}
"""A bias takes no kernel of its own."""
_SHORTEST_S = 1e-7
_COMPILED = COLUMNS.index("compiled")
_TILE = 128
"""Rows and columns of the part of a product that one multiprocessor computes: cuBLAS's commonest kernels."""
_TIMED: dict[str, tuple[bool, bool]] = {"operator": (True, False), "kernel": (False, False)}
"""Options of graphs that are no steps, with what their clock holds: the host's launches, and the start of the step."""


class _Fixed:
    """What is the same for all graphs with one skeleton."""

    def __init__(self, skeleton: OpGraph) -> None:
        ops, in_tf32 = skeleton.ops, kinds_in_tf32(skeleton)
        self.host = np.array([KIND_INDEX[op.kind] * len(Phase) + op.phase for op in ops], dtype=np.int16)
        tried = "cudnn_benchmark" in skeleton.options
        flags = [(op.dtype not in HALF_DTYPES and op.kind in in_tf32, op.dtype == "bfloat16", tried) for op in ops]
        self.flags = np.array(flags, dtype=np.float16).reshape(len(ops), 3)
        timed = [found for option, found in _TIMED.items() if option in skeleton.options]
        self.timed = np.array(timed[0] if timed else (True, True), dtype=np.float32)
        copied = not timed and "batch-on-device" not in skeleton.options
        inputs = [at for at, storage in enumerate(skeleton.storages) if storage.kind is StorageKind.INPUT and copied]
        self.inputs = np.array(inputs, dtype=np.int64)
        known = {name: at for at, name in enumerate(NAMES)}
        names = [known.get(_SAME_KERNEL.get(op.name, op.name), len(NAMES) + KIND_INDEX[op.kind]) for op in ops]
        self.name = np.array(names, dtype=np.int16)  # shape: (N,)
        self.products = np.array([at for at, op in enumerate(ops) if "product" in op.attributes], dtype=np.int64)
        self.recurrent = np.array([at for at, op in enumerate(ops) if "steps" in op.attributes], dtype=np.int64)
        self.has_views = np.array([at for at, op in enumerate(ops) if "views" in op.attributes], dtype=np.int64)


_known_fixed: WeakKeyDictionary[OpGraph, _Fixed] = WeakKeyDictionary()


def launches(graphs: GraphBatch, device: Device) -> list[dict[str, npt.NDArray[Any]]]:
    """Return the launches of each of ``graphs`` on ``device``.

    Returns: For each graph a dictionary.
        ``x`` (d, len(COLUMNS)).
        ``name`` (d,): indices into NAMES, or len(NAMES) + the index of the operator's kind.
        ``host`` (d,): classes of host cost, below HOST_KINDS.
        ``roofline`` (d,): seconds of one such operator on the device, without a launch.
        ``steps`` (d,): time steps of a recurrent layer, which depend on one another. 0 for other operators.
        ``order`` (N,): the row of each launch.
        ``views`` (N,): views before each launch.
        ``device`` (len(DEVICE_COLUMNS),). Zeros for a CPU: one was measured, so nobody knows what they change.
        ``copied`` (1,): bytes of the batch that the host copies to the device. A CPU is its own host.
        ``is_cpu`` (1,): 1 for a CPU, 0 for a GPU.
        ``timed`` (2,): 1 if the time holds the host's launches; 1 if it holds the start of the step. 0 if not.
    """
    skeleton, number = graphs.skeleton, len(graphs)
    fixed = _known_fixed.get(skeleton)
    if fixed is None:
        fixed = _known_fixed[skeleton] = _Fixed(skeleton)
    compute_s, traffic_s = batch_work_s(graphs, device)
    roofline = np.maximum(np.maximum(compute_s, traffic_s), _SHORTEST_S)
    steps = np.zeros(roofline.shape, dtype=np.float32)
    steps[:, fixed.recurrent] = graphs.attribute("steps", ops=fixed.recurrent, length=1)[..., 0]
    idle_waves = np.zeros(roofline.shape, dtype=np.float16)
    idle_waves[:, fixed.products] = _idle_waves(graphs.attribute("product", ops=fixed.products, length=4), device)
    columns, group = operators.columns_in_order(graphs, device, compute_s, roofline)
    views = np.zeros((number, len(skeleton.ops)), dtype=np.int16)
    views[:, fixed.has_views] = graphs.attribute("views", ops=fixed.has_views, length=1, default=0)[..., 0]
    copied = fixed.inputs if device.kind == "cuda" else fixed.inputs[:0]
    input_bytes = graphs.storage_bytes[:, copied].astype(np.float64).sum(axis=1)
    on_cpu = device.kind == "cpu"
    of_device = np.zeros(len(DEVICE_COLUMNS), dtype=np.float32) if on_cpu else device_features(device)
    is_cpu = np.array([on_cpu], dtype=np.float32)
    flags = fixed.flags * _differs(device)
    found = []
    for at in range(number):
        _, first, order = np.unique(group[at], return_index=True, return_inverse=True)
        x = np.concatenate([columns(at, first), flags[first], idle_waves[at, first, None]], axis=1)
        if on_cpu:
            x[:, _COMPILED] = 0  # no compiled step was measured on a CPU: it is predicted as eager
        found.append(
            {
                "x": x,
                "name": fixed.name[first],
                "host": fixed.host[first],
                "roofline": roofline[at, first].astype(np.float32),
                "steps": steps[at, first],
                "order": order.astype(np.int32),
                "views": views[at],
                "device": of_device,
                "copied": input_bytes[at : at + 1],
                "is_cpu": is_cpu,
                "timed": fixed.timed,
            }
        )
    return found


def _differs(device: Device) -> npt.NDArray[np.float16]:
    """1 for the flags that make a difference on ``device``, else 0. Shape: (3,)."""
    has_tf32 = device.flops_per_s("tf32") > device.flops_per_s("fp32")
    has_two_halves = device.flops_per_s("bf16") != device.flops_per_s("fp16")
    return np.array([has_tf32, has_two_halves, True], dtype=np.float16)


def _idle_waves(products: npt.NDArray[np.int64], device: Device) -> npt.NDArray[np.float64]:
    """Log of the waves of tiles, rounded up, over the waves. Shapes: (C, n, 4), as batch, m, n, k → (C, n)."""
    batch, rows, columns, _ = np.moveaxis(np.maximum(products.astype(np.float64), 1), -1, 0)
    waves = batch * np.ceil(rows / _TILE) * np.ceil(columns / _TILE) / max(device.num_sms, 1)
    return np.asarray(np.log(np.ceil(waves) / waves))


def device_features(device: Device) -> npt.NDArray[np.float32]:
    """The figures of ``device``. Shape: (len(DEVICE_COLUMNS),)."""
    fp32 = device.flops_per_s("fp32")
    values = (
        device.flops_per_s("fp16") / fp32 / 8,
        fp32 / device.bandwidth_bytes_per_s / 20,
        device.l2_bytes / 5e6 + 0.1,
        max(device.num_sms, 1) / 60,
        max(device.boost_clock_hz, 1e8) / 1.5e9,
        device.flops_per_s("tf32") / fp32,
    )
    return np.log(np.array(values, dtype=np.float32))


__all__ = ["COLUMNS", "DEVICE_COLUMNS", "HOST_KINDS", "NAMES", "NUM_NAMES", "device_features", "launches"]
