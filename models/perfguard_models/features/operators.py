"""Operator features: a step as its operators.

Equal operators are one row with a count. A network repeats its blocks, so a step of a thousand operators has two hundred rows,
and learning is five times as fast. An operator's neighbours are not features, because they do not reduce the error
(docs/decisions.md).

Shapes: N operators, d different operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from perfguard.graph import KIND_INDEX, OP_KINDS, OpGraph, Phase, StorageKind, roofline_s
from perfguard_models.features.convolutions import HALF_DTYPES, Convolutions, convolutions_in

if TYPE_CHECKING:
    from perfguard.devices import Device

NAMES = (
    "convolution", "convolution_backward", "addmm", "mm", "bmm", "baddbmm", "_to_copy", "add", "add_", "mul", "mul_",
    "mean", "sum",     "native_batch_norm", "native_batch_norm_backward", "native_layer_norm", "native_layer_norm_backward",
    "native_group_norm",     "clone", "cat", "copy_", "gelu", "gelu_backward", "sigmoid", "sigmoid_backward", "silu",
    "silu_", "silu_backward", "relu",     "relu_", "threshold_backward", "div", "sub", "pow", "sqrt", "rsqrt", "tanh",
    "_softmax", "_softmax_backward_data",     "avg_pool2d", "avg_pool2d_backward", "max_pool2d_with_indices",
    "max_pool2d_with_indices_backward", "constant_pad_nd", "index",     "index_put", "stack", "slice_backward",
    "select_backward", "new_zeros", "zeros", "where", "native_dropout",     "native_dropout_backward", "upsample_bicubic2d",
    "upsample_bilinear2d", "_foreach_add_", "_foreach_mul_",     "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",     "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward", "embedding", "linalg_vector_norm",
)  # fmt: skip
"""Operators with a row of their own in the embedding; all others are "other", known by their kind."""
SIZES = (
    "log_flops", "log_read", "log_written", "log_compute_s", "log_traffic_s", "log_roofline_s", "log_over_l2", "log_waves",
    "log_batch", "log_channels", "log_rest", "log_kernel", "log_in", "log_out", "log_groups", "log_positions",
    "log_m", "log_n", "log_k", "log_products",
)  # fmt: skip
FLAGS = (
    "launch_bound", "forward", "backward", "optimizer", "half", "train", "nhwc", "compiled", "depthwise", "pointwise", "strided",
    "dilated", "transposed", "few_channels", "odd_in", "odd_out", "odd_product", "has_weights", "num_inputs",
)  # fmt: skip
COLUMNS = (*SIZES, *FLAGS)
"""Columns of ``x``: natural logarithms, then flags within 0 and 1."""
DEVICE_COLUMNS = ("log_flops", "log_matrix_flops", "log_bandwidth", "log_sms", "log_clock", "log_l2", "log_launch")
Floats = npt.NDArray[np.float64]
THREADS = 2048
"""Threads that a multiprocessor holds: one wave of a kernel."""
_NUM_SIZES = len(SIZES)
_PLACE = {name: at for at, name in enumerate(COLUMNS)}
_VARYING = ("launch_bound", "depthwise", "pointwise", "strided", "dilated", "few_channels", "odd_in", "odd_out", "odd_product")
"""Flags that depend on sizes; all others follow from its kind, name and setting."""


def operator_features(graph: OpGraph, device: Device) -> dict[str, npt.NDArray[Any]]:
    """Return the rows of ``graph`` on ``device``, in the order of the bytes of their columns.

    Returns:
        ``x`` (d, len(COLUMNS)), ``name`` (d,), ``count`` (d,), ``roofline`` (d,), ``live`` (d,),
        ``device`` (len(DEVICE_COLUMNS),), ``reserved`` (1,). Entries of ``name`` are indices into NAMES, or len(NAMES). Those of
        ``roofline`` are seconds of one such operator. Those of ``live`` are the most bytes alive at one of them over the replay's
        reserved bytes. The number in ``reserved`` is log bytes of the replay, with the context.
    """
    roofline, fixed = roofline_s(graph, device), _Fixed(graph)
    base = graph.reserved_bytes + device.context_bytes
    compute_s = graph.costs[0].astype(np.float64) / device.flops_per_s("fp16")
    sizes, flags = _varying(graph, compute_s, roofline, device, fixed)
    _, first, row, count = np.unique(
        _hashed(sizes, flags, fixed.group), return_index=True, return_inverse=True, return_counts=True
    )
    most_live = np.zeros(len(first))
    np.maximum.at(most_live, row, graph.live_bytes[1:] / base)
    x, name = _columns_of(first, fixed, sizes, flags), fixed.name[first]
    order = np.argsort(_as_bytes(np.concatenate([x.view(np.int16), name[:, None]], axis=1)))
    return {
        "x": x[order],
        "name": name[order],
        "count": count[order].astype(np.float32),
        "roofline": roofline[first[order]].astype(np.float32),
        "live": most_live[order].astype(np.float32),
        "device": _device_features(device),
        "reserved": np.array([math.log(base)]),
    }


class _Fixed:
    """Values that do not depend on sizes."""

    def __init__(self, graph: OpGraph) -> None:
        ops, number = graph.ops, len(graph.ops)
        self.convolutions = convolutions_in(graph)
        self.products = np.array([at for at, op in enumerate(ops) if "product" in op.attributes], dtype=np.int64)
        kinds = np.array([KIND_INDEX[op.kind] for op in ops], dtype=np.int64)
        self.kind = kinds.astype(np.uint64)  # shape: (N,)
        phases = np.array([op.phase for op in ops], dtype=np.int64)
        is_weight = [storage.kind is StorageKind.PARAMETER for storage in graph.storages]
        x = np.zeros((number, len(COLUMNS)))
        for phase in Phase:
            x[:, _PLACE[phase.name.lower()]] = phases == phase
        x[:, _PLACE["half"]] = [op.dtype in HALF_DTYPES for op in ops]
        x[:, _PLACE["train"]] = graph.mode == "train"
        x[:, _PLACE["nhwc"]] = graph.layout == "nhwc"
        x[:, _PLACE["compiled"]] = "compiled" in graph.options
        x[:, _PLACE["transposed"]] = [bool(op.attributes.get("transposed")) for op in ops]
        x[:, _PLACE["has_weights"]] = [any(is_weight[storage] for storage in op.inputs) for op in ops]
        x[:, _PLACE["num_inputs"]] = [min(len(op.inputs), 8) / 8 for op in ops]
        self.columns: npt.NDArray[np.float16] = x.astype(np.float16)  # shape: (N, len(COLUMNS)), the varying ones are 0
        known = {name: at for at, name in enumerate(NAMES)}
        self.name = np.array([known.get(op.name, len(NAMES)) for op in ops], dtype=np.int16)  # shape: (N,)
        keys = _as_bytes(np.concatenate([self.columns.view(np.int16), self.name[:, None]], axis=1))
        _, group = np.unique(keys, return_inverse=True)
        self.group = group.astype(np.uint64)  # shape: (N,), equal where name and columns are


def _as_bytes(rows: npt.NDArray[np.int16]) -> npt.NDArray[np.void]:
    """Rows as single values that are compared byte by byte. Shapes: (n, columns) → (n,)."""
    return np.ascontiguousarray(rows).view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).ravel()


def columns_in_order(
    graph: OpGraph, device: Device, compute_s: Floats, roofline: Floats
) -> tuple[Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float16]], npt.NDArray[np.uint64]]:
    """Return the columns of every operator in launch order, with times of ``compute_s`` and ``roofline``, both (N,).

    Returns: A function that gives the columns of some operators, shape (n, len(COLUMNS)). A number for each operator that is
        equal where the columns, the name and the kind are equal. Shape: (N,).
    """
    fixed = _Fixed(graph)
    sizes, flags = _varying(graph, compute_s, roofline, device, fixed)
    group = _hashed(sizes, flags, fixed.group * np.uint64(len(OP_KINDS)) + fixed.kind)
    return lambda ops: _columns_of(ops, fixed, sizes, flags), group


def _columns_of(
    ops: npt.NDArray[np.int64], fixed: _Fixed, sizes: npt.NDArray[np.float16], flags: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float16]:
    """The columns of some operators. Shape: (n, len(COLUMNS))."""
    x = fixed.columns[ops]
    x[:, :_NUM_SIZES] = sizes[ops]
    for at, name in enumerate(_VARYING):
        x[:, _PLACE[name]] = (flags[ops] >> np.uint64(at)) & np.uint64(1)
    return x


def _varying(
    graph: OpGraph, compute_s: Floats, roofline: Floats, device: Device, fixed: _Fixed
) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.uint64]]:
    """The columns SIZES, and the flags _VARYING as bits from the lowest on. Shapes: (N, len(SIZES)), (N,)."""
    c, some = Convolutions(graph, fixed.convolutions), fixed.convolutions
    products = graph.attribute("product", ops=fixed.products, length=4)
    x = np.zeros((len(roofline), _NUM_SIZES), dtype=np.float16)
    for name, values in _logs(graph, compute_s, roofline, device).items():
        x[:, _PLACE[name]] = values
    of_convolutions = np.stack([c.taps, c.narrow_in, c.narrow_out, c.groups, c.positions_in], axis=-1)
    x[:, _PLACE["log_groups"]] = np.log1p(1.0)
    x[some, _PLACE["log_kernel"] : _PLACE["log_positions"] + 1] = np.log1p(of_convolutions.astype(np.float64))
    of_products = np.roll(products, -1, axis=-1)  # m, n, k and how many
    x[fixed.products, _PLACE["log_m"] : _PLACE["log_products"] + 1] = np.log1p(of_products.astype(np.float64))
    flags = np.zeros((len(_VARYING), len(roofline)), dtype=np.bool_)
    flags[0] = roofline <= device.launch_overhead_s
    flags[1:8, some] = [
        (c.groups > 1) & (c.groups == c.channels_in),
        c.taps == 1,
        c.stride > 1,
        c.dilation > 1,
        c.channels_in <= 4,
        c.narrow_in % 8 > 0,
        c.narrow_out % 8 > 0,
    ]
    flags[8, fixed.products] = (products[:, 1:] % 8 > 0).any(axis=-1)
    bits = np.zeros(len(roofline), dtype=np.uint64)
    for at, flag in enumerate(flags):
        bits |= flag.astype(np.uint64) << np.uint64(at)
    return x, bits


def _logs(graph: OpGraph, compute_s: Floats, roofline: Floats, device: Device) -> dict[str, Floats]:
    """The SIZES that every operator has. Shapes: (N,)."""
    shape = graph.attribute("shape", length=3)
    flops, read, written = graph.costs.astype(np.float64)
    batch, channels = shape[..., 0].astype(np.float64), shape[..., 1].astype(np.float64)
    rest, moved = shape[..., 2:].prod(axis=-1).astype(np.float64), read + written
    derived = {
        "log_compute_s": compute_s * 1e6,
        "log_traffic_s": moved / device.bandwidth_bytes_per_s * 1e6,
        "log_roofline_s": roofline * 1e6,
        "log_over_l2": moved / max(device.l2_bytes, 1),
        "log_waves": batch * channels * rest / (device.num_sms * THREADS),
    }
    plain = {
        "log_flops": flops, "log_read": read, "log_written": written,
        "log_batch": batch, "log_channels": channels, "log_rest": rest,
    }  # fmt: skip
    found = {name: np.log(np.maximum(values, 1e-4)) for name, values in derived.items()}
    return found | {name: np.log1p(values) for name, values in plain.items()}


def _device_features(device: Device) -> npt.NDArray[np.float32]:
    values = (
        device.flops_per_s("fp32") / 1e12,
        device.flops_per_s("fp16") / 1e12,
        device.bandwidth_bytes_per_s / 1e12,
        device.num_sms,
        device.boost_clock_hz / 1e9,
        device.l2_bytes / 2**20,
        device.launch_overhead_s * 1e6,
    )
    return np.log(np.array(values, dtype=np.float32))


def _hashed(
    sizes: npt.NDArray[np.float16], flags: npt.NDArray[np.uint64], group: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """A number for each operator, equal where its whole row is, and elsewhere only by a chance of about 2^-60. Shape: (N,)."""
    hashed = group << np.uint64(len(_VARYING)) | flags
    columns = sizes.view(np.uint64)  # four at once
    for at in range(columns.shape[-1] + 1):  # the finalizer of MurmurHash3 (Appleby 2008)
        hashed = (hashed ^ hashed >> np.uint64(33)) * np.uint64(0xFF51AFD7ED558CCD)
        hashed = (hashed ^ hashed >> np.uint64(33)) * np.uint64(0xC4CEB9FE1A85EC53)
        if at < columns.shape[-1]:
            hashed = hashed ^ columns[..., at]
    return hashed
