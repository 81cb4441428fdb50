"""A step as the operators that it is made of, each with what surrounds it: GuardNet's view.

Equal operators in equal surroundings are one row with a count: a network repeats its blocks, so a step of a thousand operators
has two hundred rows, and learning is as much faster. What surrounds an operator is looked up before learning instead of by
message passing within it (Frasca et al. 2020, "SIGN: Scalable Inception Graph Neural Networks", equation 6 with r = 1): the
kinds of operators that made its inputs, the kinds that take its output, and how fresh its inputs are.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from perfguard.features import operator_sizes
from perfguard.graph import KIND_INDEX, OP_KINDS, Op, OpGraph, Phase, roofline_s

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
_SIZES = (
    "log_flops", "log_read", "log_written", "log_compute_s", "log_traffic_s", "log_roofline_s", "log_over_l2", "log_waves",
    "log_batch", "log_channels", "log_rest", "log_kernel", "log_in", "log_out", "log_groups", "log_positions",
    "log_m", "log_n", "log_k", "log_products",
)  # fmt: skip
_FLAGS = (
    "launch_bound", "forward", "backward", "optimizer", "half", "train", "nhwc", "compiled", "depthwise", "pointwise", "strided",
    "dilated", "transposed", "few_channels", "odd_in", "odd_out", "odd_product", "has_weights", "fresh", "recent", "num_inputs",
)  # fmt: skip
COLUMNS = (*_SIZES, *_FLAGS, *(f"from_{kind}" for kind in OP_KINDS), *(f"to_{kind}" for kind in OP_KINDS))
"""Columns of ``x``: natural logarithms, then flags and shares within 0 and 1."""
DEVICE_COLUMNS = ("log_flops", "log_matrix_flops", "log_bandwidth", "log_sms", "log_clock", "log_l2", "log_launch")
_THREADS = 2048
"""Threads that a multiprocessor holds: one wave of a kernel."""
_RECENT = 4


def operators_of(graph: OpGraph, device: Device) -> dict[str, npt.NDArray[Any]]:
    """The rows of ``graph`` on ``device``, d of them.

    Returns:
        ``x`` (d, len(COLUMNS)), ``name`` (d,) indices into NAMES or len(NAMES), ``count`` (d,), ``roofline`` (d,) seconds of
        one of them, ``live`` (d,) most bytes alive at one of them over the replay's reserved bytes, ``device``
        (len(DEVICE_COLUMNS),), ``reserved`` (1,) log bytes of the replay, with the context.
    """
    ops = graph.ops
    roofline = roofline_s(graph, device)
    base = graph.reserved_bytes + device.context_bytes
    x = np.concatenate([_sizes(ops, roofline, device), _flags(graph, roofline, device), _surroundings(graph)], axis=1)
    name_index = {name: index for index, name in enumerate(NAMES)}
    name = np.array([name_index.get(op.name, len(NAMES)) for op in ops], dtype=np.int16)
    x = x.astype(np.float16)
    keys = np.concatenate([x.view(np.int16), name[:, None]], axis=1)
    _, first, inverse, count = np.unique(
        np.ascontiguousarray(keys).view(np.dtype((np.void, keys.shape[1] * 2))).ravel(),
        return_index=True,
        return_inverse=True,
        return_counts=True,
    )
    live = np.zeros(len(first))
    np.maximum.at(live, inverse, graph.live_bytes[1:] / base)
    return {
        "x": x[first],
        "name": name[first],
        "count": count.astype(np.float32),
        "roofline": roofline[first].astype(np.float32),
        "live": live.astype(np.float32),
        "device": _device(device),
        "reserved": np.array([math.log(base)]),
    }


def _device(device: Device) -> npt.NDArray[np.float32]:
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


def _sizes(ops: tuple[Op, ...], roofline: npt.NDArray[np.float64], device: Device) -> npt.NDArray[np.float64]:
    """Logarithms. Shape: (num_ops, len(_SIZES))."""
    raw = np.array([_raw_sizes(op) for op in ops], dtype=np.float64).reshape(len(ops), len(_SIZES) - 5)
    flops, read, written = raw[:, 0], raw[:, 1], raw[:, 2]
    traffic = (read + written) / device.bandwidth_bytes_per_s
    elements = raw[:, 3] * raw[:, 4] * raw[:, 5]
    derived = np.stack(
        [
            flops / device.flops_per_s("fp16") * 1e6,
            traffic * 1e6,
            roofline * 1e6,
            (read + written) / max(device.l2_bytes, 1),
            elements / (device.num_sms * _THREADS),
        ],
        axis=1,
    )
    logs = np.log(np.maximum(derived, 1e-4))
    plain = np.log1p(raw)
    return np.concatenate([plain[:, :3], logs, plain[:, 3:]], axis=1)


def _raw_sizes(op: Op) -> tuple[float, ...]:
    attributes = op.attributes
    weight: tuple[int, ...] = attributes.get("weight_shape", ())
    groups = attributes.get("groups", 1)
    channels_in, channels_out, kernel, positions = 0, 0, 0, 0
    if weight:
        channels_in = attributes["in_shape"][1] // groups
        channels_out = weight[1] if attributes["transposed"] else weight[0] // groups
        kernel = math.prod(weight[2:])
        positions = math.prod(attributes["in_shape"][2:])
    products, m, n, k = attributes.get("product", (0, 0, 0, 0))
    return (
        *operator_sizes(op),
        kernel,
        channels_in,
        channels_out,
        groups,
        positions,
        m,
        n,
        k,
        products,
    )


def _flags(graph: OpGraph, roofline: npt.NDArray[np.float64], device: Device) -> npt.NDArray[np.float64]:
    """Shape: (num_ops, len(_FLAGS))."""
    train, nhwc, compiled = graph.mode == "train", graph.layout == "nhwc", "compiled" in graph.options
    made: dict[int, int] = {}
    rows = []
    for index, op in enumerate(graph.ops):
        attributes = op.attributes
        weight: tuple[int, ...] = attributes.get("weight_shape", ())
        groups = attributes.get("groups", 1)
        few, odd_in, odd_out = False, False, False
        if weight:
            channels_in = attributes["in_shape"][1]
            few = channels_in <= 4
            odd_in = bool(channels_in // groups % 8)
            odd_out = bool((weight[1] if attributes["transposed"] else weight[0] // groups) % 8)
        ages = [index - made[storage] for storage in op.inputs if storage in made]
        rows.append(
            (
                roofline[index] <= device.launch_overhead_s,
                op.phase is Phase.FORWARD,
                op.phase is Phase.BACKWARD,
                op.phase is Phase.OPTIMIZER,
                op.dtype in ("float16", "bfloat16"),
                train,
                nhwc,
                compiled,
                bool(weight) and groups > 1 and groups == attributes["in_shape"][1],
                bool(weight) and math.prod(weight[2:]) == 1,
                bool(weight) and max(attributes["stride"], default=1) > 1,
                bool(weight) and max(attributes["dilation"], default=1) > 1,
                bool(weight) and attributes["transposed"],
                few,
                odd_in,
                odd_out,
                any(size % 8 for size in attributes.get("product", ())[1:]),
                any(storage not in made for storage in op.inputs),
                sum(age == 1 for age in ages) / max(len(op.inputs), 1),
                sum(age <= _RECENT for age in ages) / max(len(op.inputs), 1),
                min(len(op.inputs), 8) / 8,
            )
        )
        made.update(dict.fromkeys(op.outputs, index))
    return np.array(rows, dtype=np.float64).reshape(len(graph.ops), len(_FLAGS))


def _surroundings(graph: OpGraph) -> npt.NDArray[np.float64]:
    """Shares of the kinds before and after each operator. Shape: (num_ops, 2 * len(OP_KINDS))."""
    number = len(OP_KINDS)
    kinds = np.array([KIND_INDEX[op.kind] for op in graph.ops], dtype=np.int64)
    source, sink = graph.edges
    around = np.zeros((len(graph.ops), 2 * number))
    np.add.at(around, (sink, kinds[source]), 1)
    np.add.at(around, (source, number + kinds[sink]), 1)
    totals = np.repeat([around[:, :number].sum(axis=1), around[:, number:].sum(axis=1)], number, axis=0).T
    return np.asarray(around / np.maximum(totals, 1))
