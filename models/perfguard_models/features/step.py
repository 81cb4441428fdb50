"""Step features: a step as one row of hand-made columns, which trees read.

The first are sums of the operators' roofline times, by kind and by causes of slow kernels. The next are the replay's peak by
kind of storage. The last are the replay's peaks if each convolution took the workspace of one of cuDNN's algorithms. Each
feature is a logarithm or a share.

Shapes: N operators, V convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from perfguard.devices import Device
from perfguard.graph import KIND_INDEX, OP_KINDS, OpGraph, Phase, StorageKind, roofline_s
from perfguard_models.features import Arrays, FeatureSet
from perfguard_models.features.convolutions import CONVOLUTION_KINDS, Convolutions, operators_with

CONVOLUTION_ALGORITHMS = ("gemm", "columns", "fft", "fft_pointwise", "fft_grouped", "fft_tiling", "winograd", "nhwc")
"""cuDNN's, by what their workspaces hold; see :func:`workspace_bytes`."""
TILE = 32
"""Tile size of the tiled FFT, in pixels."""
LARGEST_FFT = 256
"""Pixels along an image, beyond which cuDNN has no FFT that is not tiled."""
CONVOLUTION_TRAITS = ("depthwise", "grouped", "pointwise", "three", "large", "image", "odd", "strided", "narrow")
PRODUCT_TRAITS = ("batched", "odd", "narrow", "short")
NAMED_OPERATORS = (
    "_to_copy", "copy_", "cat", "clone", "add", "mul", "native_batch_norm", "native_layer_norm", "mean", "sum", "gelu", "silu",
    "silu_", "relu", "relu_", "sigmoid", "_softmax", "max_pool2d_with_indices", "index", "constant_pad_nd", "avg_pool2d",
)  # fmt: skip
"""Operators with a column of their own."""
MATRIX_KINDS = (*CONVOLUTION_KINDS, "matmul", "attention", "rnn")
STORAGE_RANKS = (0, 1, 3, 10)
"""Ranks of the storages by size that have a column, from the largest."""
ABSENT = -10.0
"""Stands for the logarithm of a workspace that no convolution needs."""
_COUNTED_KINDS = OP_KINDS[:12]
_MEANS = ("conv_log_in", "conv_log_out", "conv_log_positions")
STEP_FEATURES = (
    "log_reserved", "log_live", "log_slack",
    *(f"share_{kind.name.lower()}" for kind in StorageKind),
    "log_parameters", "log_activations",
    *(f"storage_{rank}" for rank in STORAGE_RANKS),
    "largest_passing", "peak_position", "peak_phase", "live_at_start", "live_at_end", "log_capacity_share",
    *(f"peak_{name}" for name in CONVOLUTION_ALGORITHMS),
    *(f"workspace_{name}" for name in CONVOLUTION_ALGORITHMS),
    "log_roofline", "log_operators", "log_mean_operator", "launch_share", "launch_count",
    *(f"time_{kind}" for kind in OP_KINDS),
    *(f"count_{kind}" for kind in _COUNTED_KINDS),
    *(f"phase_{phase.name.lower()}" for phase in Phase),
    *(f"name_{name}" for name in NAMED_OPERATORS),
    "traffic_share", "matrix_traffic_share", "log_flops", "log_bytes", "log_intensity",
    *(f"conv_{name}" for name in CONVOLUTION_TRAITS),
    *(f"product_{name}" for name in PRODUCT_TRAITS),
    *_MEANS,
    "log_batch", "train", "half", "nhwc", "compiled", "log_bandwidth", "log_device_flops", "log_matrix_flops", "log_sms",
    "log_l2", "log_memory", "log_clock",
)  # fmt: skip
"""The names of the columns, the same for every graph. Weights depend on their order."""
_CPU_BYTES = 2**34
"""Stands for the memory of any machine: how much there is does not change what a process takes."""
Floats = npt.NDArray[np.float64]
Columns = Mapping[str, float]
"""Columns by name."""


def step_features(graph: OpGraph, device: Device) -> npt.NDArray[np.float32]:
    """Return the features of ``graph`` on ``device``, in the order of STEP_FEATURES. Shape: (len(STEP_FEATURES),)."""
    parts = _Parts(graph)
    convolutions = Convolutions(graph, parts.convolutions)
    roofline = roofline_s(graph, device)
    columns: Columns = {
        **_memory(graph, device, parts),
        **_workspaces(graph, parts, convolutions),
        **_time(graph, device, parts, roofline),
        **_traits(graph, parts, roofline, convolutions),
        **_setting(graph, device),
    }
    return np.array([columns[name] for name in STEP_FEATURES], dtype=np.float32)


def sums(graph: OpGraph, device: Device) -> Arrays:
    """Return :func:`step_features` by the name "sums"."""
    return {"sums": step_features(graph, device)}


SUMS = FeatureSet(STEP_FEATURES, sums)


class _Parts:
    """Kinds, phases and names of a graph's operators, and which of them are convolutions and products."""

    def __init__(self, graph: OpGraph) -> None:
        ops = graph.ops
        known = {name: at for at, name in enumerate(NAMED_OPERATORS)}
        self.number = len(ops)
        self.kinds = np.array([KIND_INDEX[op.kind] for op in ops], dtype=np.int64)
        self.phases = np.array([*(op.phase for op in ops), -1], dtype=np.int64)
        """The last one is that of index -1: before the first operator."""
        self.named = np.array([known.get(op.name, len(known)) for op in ops], dtype=np.int64)
        """Indices into NAMED_OPERATORS, or its length."""
        self.convolutions = operators_with("weight_shape", graph)
        self.products = operators_with("product", graph)


def _memory(graph: OpGraph, device: Device, parts: _Parts) -> Columns:
    peak = max(graph.peak_live_bytes, 1)
    on_cpu = device.kind == "cpu"
    reserved = peak if on_cpu else graph.reserved_bytes(device)  # a CPU has no caching allocator
    num_bytes = graph.storage_bytes
    by_kind = graph.bytes_by_kind()
    _, births, deaths = graph.lifetimes
    passing = num_bytes[(births >= 0) & (deaths < parts.number)]
    largest = np.sort(num_bytes)[::-1]
    return {
        "log_reserved": math.log(reserved + device.context_bytes),
        "log_live": math.log(peak),
        "log_slack": math.log(reserved / peak),
        **{f"share_{kind.name.lower()}": of_kind / peak for kind, of_kind in by_kind.items()},
        "log_parameters": math.log1p(by_kind[StorageKind.PARAMETER]),
        "log_activations": math.log1p(by_kind[StorageKind.ACTIVATION]),
        **{f"storage_{rank}": largest[rank] / peak if rank < len(largest) else 0.0 for rank in STORAGE_RANKS},
        "largest_passing": passing.max(initial=0) / peak,
        "peak_position": graph.peak_index / max(parts.number, 1),
        "peak_phase": parts.phases[graph.peak_index],
        "live_at_start": graph.live_bytes[0] / peak,
        "live_at_end": graph.live_bytes[-1] / peak,
        "log_capacity_share": math.log((reserved + device.context_bytes) / (_CPU_BYTES if on_cpu else device.memory_bytes)),
    }


def _workspaces(graph: OpGraph, parts: _Parts, convolutions: Convolutions) -> Columns:
    """The peak if each convolution ran by one algorithm, and the largest workspace, both over the replay's peak."""
    peak = max(graph.peak_live_bytes, 1)
    live = graph.live_bytes[1:][parts.convolutions].astype(np.float64)
    found: dict[str, float] = {}
    for name, (num_bytes, holds) in workspace_bytes(convolutions).items():
        highest = np.where(holds, live + num_bytes, 0.0).max(initial=0.0)
        largest = np.where(holds, num_bytes, 0).max(initial=0)
        found[f"peak_{name}"] = math.log(max(highest / peak, 1.0))
        found[f"workspace_{name}"] = math.log(largest / peak) if largest > 0 else ABSENT
    return found


def workspace_bytes(c: Convolutions) -> dict[str, tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]]:
    """What cuDNN's algorithms set aside, by the sizes of their transformed tensors, in bytes; and for which they are possible.

    GEMM lowers one image to columns. FFT holds the spectra of input, filter and output, each twice, of images padded to a power
    of two; its tiled form those of 32 x 32 tiles. Winograd's F(4 x 4, 3 x 3) holds 36 numbers for each tile of 4 x 4 outputs.
    Tensor cores need NHWC: a second copy of the tensors. FFT also handles filters of one pixel: a 1 x 1 convolution of 1,536
    channels at 32 x 32 pixels took 19 GiB on an A100. It handles groups as if they were dense.

    Returns:
        By the names of CONVOLUTION_ALGORITHMS. Shapes: (V,), (V,).
    """
    gemm = c.narrow_in * c.taps * c.positions_out * 4
    lowers = (c.taps > 1) | (c.stride > 1)
    plane = (c.rank == 2) & (c.stride == 1) & (c.dilation == 1)
    dense = plane & (c.groups == 1)
    inputs = c.batch * c.channels_in
    between = c.channels_in * c.channels_out
    outputs = c.batch * c.channels_out
    padded = 1 << np.frexp((c.inputs + c.kernel - 2).astype(np.float64))[1].astype(np.int64)  # the next power of two
    height = padded[..., 0]
    width = padded[..., min(1, padded.shape[-1] - 1)]
    fft = 2 * (inputs + between + outputs) * height * (width // 2 + 1) * 8
    has_fft = plane & (c.inputs.max(axis=-1, initial=0) <= LARGEST_FFT)
    kernel = c.kernel.max(axis=-1, initial=1)
    tiles = (-(-c.outputs // np.maximum(TILE + 1 - c.kernel, 1))).prod(axis=-1)
    tiling = (inputs * tiles + between + outputs * tiles) * TILE * (TILE // 2 + 1) * 8
    quads = (-(-c.outputs // 4)).prod(axis=-1)
    winograd = (3 + c.kernel[..., 0]) ** 2 * (inputs * quads + between + outputs * quads) * 4
    square = (c.kernel == c.kernel[..., :1]).all(axis=-1) & ((kernel == 3) | (kernel == 5))
    padded_in = -(-c.channels_in // 8) * 8
    padded_out = -(-c.channels_out // 8) * 8
    nhwc = c.element_bytes * (
        c.batch * (padded_in * c.positions_in + padded_out * c.positions_out) + padded_in * padded_out // c.groups * c.taps
    )
    return {
        "gemm": (gemm, lowers),
        "columns": (c.batch * gemm, lowers),
        "fft": (fft, has_fft & (c.groups == 1) & (c.taps > 1)),
        "fft_pointwise": (fft, has_fft & (c.groups == 1) & (c.taps == 1)),
        "fft_grouped": (fft, has_fft & (c.groups > 1)),
        "fft_tiling": (tiling, dense & (kernel > 1) & (kernel < TILE)),
        "winograd": (winograd, dense & square),
        "nhwc": (nhwc, np.ones(nhwc.shape, dtype=np.bool_)),
    }


def _time(graph: OpGraph, device: Device, parts: _Parts, roofline: Floats) -> Columns:
    """Sums of the roofline by kind of operator and by phase, and what they are made of."""
    number = parts.number
    total = max(float(roofline.sum()), 1e-9)
    num_bytes = (graph.costs[1] + graph.costs[2]).astype(np.float64)
    traffic = num_bytes / device.bandwidth_bytes_per_s
    launch_bound = roofline <= device.launch_overhead_s
    by_name = np.bincount(parts.named, weights=roofline, minlength=len(NAMED_OPERATORS) + 1)
    by_kind = np.bincount(parts.kinds, weights=roofline, minlength=len(OP_KINDS))
    by_phase = np.bincount(parts.phases[:-1], weights=roofline, minlength=len(Phase))
    counts = np.bincount(parts.kinds, minlength=len(OP_KINDS))
    is_matrix = np.isin(parts.kinds, [KIND_INDEX[kind] for kind in MATRIX_KINDS])
    log_flops = math.log1p(graph.flops)
    log_bytes = math.log1p(num_bytes.sum())
    return {
        "log_roofline": math.log(total),
        "log_operators": math.log(max(number, 1)),
        "log_mean_operator": math.log(total / max(number, 1)),
        "launch_share": roofline[launch_bound].sum() / total,
        "launch_count": launch_bound.mean() if number else 0.0,
        **{f"time_{kind}": by_kind[KIND_INDEX[kind]] / total for kind in OP_KINDS},
        **{f"count_{kind}": math.log1p(counts[KIND_INDEX[kind]]) for kind in _COUNTED_KINDS},
        **{f"phase_{phase.name.lower()}": by_phase[phase] / total for phase in Phase},
        **{f"name_{name}": by_name[at] / total for at, name in enumerate(NAMED_OPERATORS)},
        "traffic_share": traffic.sum() / total,
        "matrix_traffic_share": traffic[is_matrix].sum() / total,
        "log_flops": log_flops,
        "log_bytes": log_bytes,
        "log_intensity": log_flops - log_bytes,
    }


def _traits(graph: OpGraph, parts: _Parts, roofline: Floats, c: Convolutions) -> Columns:
    """Shares of the roofline in kernels that are known to be slow for their size."""
    total = max(float(roofline.sum()), 1e-9)
    single = c.groups == 1
    of_convolutions = {
        "depthwise": (c.groups > 1) & (c.groups == c.channels_in),
        "grouped": (c.groups > 1) & (c.groups < c.channels_in),
        "pointwise": single & (c.taps == 1),
        "three": single & (c.taps > 1) & (c.taps <= 9),
        "large": single & (c.taps > 9),
        "image": c.channels_in <= 4,
        "odd": (c.narrow_in % 8 > 0) | (c.narrow_out % 8 > 0),
        "strided": c.stride > 1,
        "narrow": c.narrow_in < 64,
    }
    seconds = roofline[parts.convolutions]
    weight = seconds.sum()
    sizes = (np.log(np.maximum(one, 1).astype(np.float64)) for one in (c.narrow_in, c.narrow_out, c.positions_out))
    means = [(seconds * logs).sum() / weight if weight > 0 else -1.0 for logs in sizes]
    products, m, n, k = graph.attribute("product", ops=parts.products, length=4).T
    of_products = {
        "batched": products > 1,
        "odd": (m % 8 > 0) | (n % 8 > 0) | (k % 8 > 0),
        "narrow": np.minimum(n, k) < 64,
        "short": m < 256,
    }
    return {
        **{f"conv_{name}": seconds[chosen].sum() / total for name, chosen in of_convolutions.items()},
        **{f"product_{name}": roofline[parts.products][chosen].sum() / total for name, chosen in of_products.items()},
        **dict(zip(_MEANS, means, strict=True)),
    }


def _setting(graph: OpGraph, device: Device) -> Columns:
    batch = next((op.shape[0] for op in graph.ops if len(op.shape) > 1), 1)
    return {
        "log_batch": math.log(max(batch, 1)),
        "train": float(graph.mode == "train"),
        "half": float(graph.precision != "fp32"),
        "nhwc": float(graph.layout == "nhwc"),
        "compiled": float("compiled" in graph.options),
        "log_bandwidth": math.log(device.bandwidth_bytes_per_s),
        "log_device_flops": math.log(device.flops_per_s("fp32")),
        "log_matrix_flops": math.log(device.flops_per_s("fp16")),
        "log_sms": math.log(device.num_sms),
        "log_l2": math.log(max(device.l2_bytes, 1)),
        "log_memory": math.log(device.memory_bytes),
        "log_clock": math.log(device.boost_clock_hz),
    }
