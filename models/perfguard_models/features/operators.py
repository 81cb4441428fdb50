"""The columns of a step's operators: what the graph network reads of each, and LILOU's choice of a kernel.

Shapes: N operators.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from perfguard.devices import Device
from perfguard.graph import OpGraph, Phase, StorageKind
from perfguard_models.features.convolutions import HALF_DTYPES, Convolutions, operators_with

NAMES = (
    "convolution", "convolution_backward", "addmm", "mm", "bmm", "baddbmm", "_to_copy", "add", "add_", "mul", "mul_",
    "mean", "sum", "native_batch_norm", "native_batch_norm_backward", "native_layer_norm", "native_layer_norm_backward",
    "native_group_norm", "clone", "cat", "copy_", "gelu", "gelu_backward", "sigmoid", "sigmoid_backward", "silu",
    "silu_", "silu_backward", "relu", "relu_", "threshold_backward", "div", "sub", "pow", "sqrt", "rsqrt", "tanh",
    "_softmax", "_softmax_backward_data", "avg_pool2d", "avg_pool2d_backward", "max_pool2d_with_indices",
    "max_pool2d_with_indices_backward", "constant_pad_nd", "index", "index_put", "stack", "slice_backward",
    "select_backward", "new_zeros", "zeros", "where", "native_dropout", "native_dropout_backward", "upsample_bicubic2d",
    "upsample_bilinear2d", "_foreach_add_", "_foreach_mul_", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_efficient_attention",
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
Floats = npt.NDArray[np.float64]
THREADS = 2048
"""Threads that a multiprocessor holds: one wave of a kernel."""
_PLACE = {name: at for at, name in enumerate(COLUMNS)}
_OF_CONVOLUTIONS = slice(_PLACE["log_kernel"], _PLACE["log_positions"] + 1)
_OF_PRODUCTS = slice(_PLACE["log_m"], _PLACE["log_products"] + 1)


def operator_columns(graph: OpGraph, device: Device, compute_s: Floats, roofline: Floats) -> npt.NDArray[np.float16]:
    """Return the columns of every operator of ``graph`` on ``device``, in launch order. Shape: (N, len(COLUMNS)).

    Args:
        graph: a step.
        device: its figures.
        compute_s: seconds of each operator's arithmetic. Shape: (N,).
        roofline: seconds of each operator. Shape: (N,).
    """
    ops = graph.ops
    x = np.zeros((len(graph.ops), len(COLUMNS)), dtype=np.float16)
    is_weight = [storage.kind is StorageKind.PARAMETER for storage in graph.storages]
    of_all = {
        **_logs(graph, compute_s, roofline, device),
        "log_groups": np.log1p(1.0),
        "launch_bound": roofline <= device.launch_overhead_s,
        **{phase.name.lower(): [op.phase == phase for op in ops] for phase in Phase},
        "half": [op.dtype in HALF_DTYPES for op in ops],
        "train": graph.mode == "train",
        "nhwc": graph.layout == "nhwc",
        "compiled": "compiled" in graph.options,
        "transposed": [bool(op.attributes.get("transposed")) for op in ops],
        "has_weights": [any(is_weight[storage] for storage in op.inputs) for op in ops],
        "num_inputs": [min(len(op.inputs), 8) / 8 for op in ops],
    }
    for name, values in of_all.items():
        x[:, _PLACE[name]] = values
    convolutions = operators_with("weight_shape", graph)
    c = Convolutions(graph, convolutions)
    sizes = np.stack([c.taps, c.narrow_in, c.narrow_out, c.groups, c.positions_in], axis=-1)
    x[convolutions, _OF_CONVOLUTIONS] = np.log1p(sizes.astype(np.float64))
    flags = {
        "depthwise": (c.groups > 1) & (c.groups == c.channels_in),
        "pointwise": c.taps == 1,
        "strided": c.stride > 1,
        "dilated": c.dilation > 1,
        "few_channels": c.channels_in <= 4,
        "odd_in": c.narrow_in % 8 > 0,
        "odd_out": c.narrow_out % 8 > 0,
    }
    for name, flag in flags.items():
        x[convolutions, _PLACE[name]] = flag
    products = operators_with("product", graph)
    batch_m_n_k = graph.attribute("product", ops=products, length=4)
    x[products, _OF_PRODUCTS] = np.log1p(np.roll(batch_m_n_k, -1, axis=-1).astype(np.float64))
    x[products, _PLACE["odd_product"]] = (batch_m_n_k[:, 1:] % 8 > 0).any(axis=-1)
    return x


def _logs(graph: OpGraph, compute_s: Floats, roofline: Floats, device: Device) -> dict[str, Floats]:
    """The SIZES that every operator has. Shapes: (N,)."""
    shape = graph.attribute("shape", length=3)
    flops, read, written = graph.costs.astype(np.float64)
    batch = shape[..., 0].astype(np.float64)
    channels = shape[..., 1].astype(np.float64)
    rest = shape[..., 2:].prod(axis=-1).astype(np.float64)
    moved = read + written
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
