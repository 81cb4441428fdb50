"""Step features: a step as one row of hand-made columns, which trees read.

The first are sums of the operators' roofline times, by kind and by causes of slow kernels. The next are the replay's peak by
kind of storage. The last are the replay's peaks if each convolution took the workspace of one of cuDNN's algorithms. Each
feature is a logarithm or a share.

Shapes: C graphs of a batch, N operators, V convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from perfguard.graph import KIND_INDEX, OP_KINDS, GraphBatch, OpGraph, Phase, StorageKind, batch_roofline_s
from perfguard_models.features.convolutions import CONVOLUTION_KINDS, Convolutions
from perfguard_models.features.exact import Floats, log, log1p, sum_of, sum_where

if TYPE_CHECKING:
    from perfguard.devices import Device

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
Columns = Mapping[str, Floats | float]
"""Columns by name. A single number holds for all graphs. Shapes: (C,)"""


def step_features(graphs: GraphBatch, device: Device) -> npt.NDArray[np.float32]:
    """Return the features of each of ``graphs`` on ``device``, in the order of STEP_FEATURES. Shape: (C, len(STEP_FEATURES))."""
    parts = _parts_of(graphs.skeleton)
    convolutions = Convolutions(graphs, parts.convolutions)
    roofline = batch_roofline_s(graphs, device)
    columns: Columns = {
        **_memory(graphs, device, parts),
        **_workspaces(graphs, parts, convolutions),
        **_time(graphs, device, parts, roofline),
        **_traits(graphs, parts, roofline, convolutions),
        **_setting(graphs, device, parts),
    }
    found = np.empty((len(graphs), len(STEP_FEATURES)), dtype=np.float32)
    for at, name in enumerate(STEP_FEATURES):
        found[:, at] = columns[name]
    return found


class _Parts:
    """Indices of a skeleton's operators by kind, phase and name."""

    def __init__(self, skeleton: OpGraph) -> None:
        ops = skeleton.ops
        self.number = len(ops)
        kinds = np.array([KIND_INDEX[op.kind] for op in ops], dtype=np.int64)
        self.of_kind = [np.flatnonzero(kinds == index) for index in range(len(OP_KINDS))]
        self.matrix = np.flatnonzero(np.isin(kinds, [KIND_INDEX[kind] for kind in MATRIX_KINDS]))
        self.phases = np.array([*(op.phase for op in ops), -1], dtype=np.float64)
        """The last one is that of index -1: before the first operator."""
        self.of_phase = [np.flatnonzero(self.phases[:-1] == phase) for phase in Phase]
        known = {name: at for at, name in enumerate(NAMED_OPERATORS)}
        self.named = np.array([known.get(op.name, len(known)) for op in ops], dtype=np.int64)
        """Indices into NAMED_OPERATORS, or its length."""
        self.convolutions = np.array([at for at, op in enumerate(ops) if op.kind in CONVOLUTION_KINDS], dtype=np.int64)
        self.products = np.array([at for at, op in enumerate(ops) if "product" in op.attributes], dtype=np.int64)
        self.first_batch = next((at for at, op in enumerate(ops) if len(op.shape) > 1), None)
        """The first operator whose output has a batch dimension."""


_known_parts: WeakKeyDictionary[OpGraph, _Parts] = WeakKeyDictionary()


def _parts_of(skeleton: OpGraph) -> _Parts:
    if skeleton not in _known_parts:
        _known_parts[skeleton] = _Parts(skeleton)
    return _known_parts[skeleton]


def _memory(graphs: GraphBatch, device: Device, parts: _Parts) -> Columns:
    peak = np.maximum(graphs.peak_live_bytes, 1)
    on_cpu = device.kind == "cpu"
    reserved = peak if on_cpu else graphs.reserved_bytes  # a CPU has no caching allocator
    num_bytes = graphs.storage_bytes
    by_kind = dict(zip(StorageKind, graphs.bytes_by_kind().T, strict=True))
    _, births, deaths = graphs.skeleton.lifetimes
    passing = num_bytes[:, (births >= 0) & (deaths < parts.number)]
    missing = max(0, STORAGE_RANKS[-1] + 1 - num_bytes.shape[1])
    places = [-1 - rank for rank in STORAGE_RANKS]
    largest = np.partition(np.pad(num_bytes, ((0, 0), (missing, 0))), places, axis=1)[:, places]
    return {
        "log_reserved": log(reserved + device.context_bytes),
        "log_live": log(peak),
        "log_slack": log(reserved / peak),
        **{f"share_{kind.name.lower()}": of_kind / peak for kind, of_kind in by_kind.items()},
        "log_parameters": log1p(by_kind[StorageKind.PARAMETER]),
        "log_activations": log1p(by_kind[StorageKind.ACTIVATION]),
        **{f"storage_{rank}": largest[:, at] / peak for at, rank in enumerate(STORAGE_RANKS)},
        "largest_passing": passing.max(axis=1, initial=0) / peak,
        "peak_position": graphs.peak_index / max(parts.number, 1),
        "peak_phase": parts.phases[graphs.peak_index],
        "live_at_start": graphs.live_bytes[:, 0] / peak,
        "live_at_end": graphs.live_bytes[:, -1] / peak,
        "log_capacity_share": log((reserved + device.context_bytes) / (_CPU_BYTES if on_cpu else device.memory_bytes)),
    }


def _workspaces(graphs: GraphBatch, parts: _Parts, convolutions: Convolutions) -> Columns:
    """The peak if each convolution ran by one algorithm, and the largest workspace, both over the replay's peak."""
    peak = np.maximum(graphs.peak_live_bytes, 1)
    live = graphs.live_bytes[:, 1:][:, parts.convolutions].astype(np.float64)
    found: dict[str, Floats] = {}
    for name, (num_bytes, holds) in workspace_bytes(convolutions).items():
        highest = np.where(holds, live + num_bytes, 0.0).max(axis=1, initial=0.0)
        largest = np.where(holds, num_bytes, 0).max(axis=1, initial=0)
        found[f"peak_{name}"] = log(np.maximum(highest / peak, 1.0))
        found[f"workspace_{name}"] = np.where(largest > 0, log(np.maximum(largest, 1) / peak), ABSENT)
    return found


def workspace_bytes(c: Convolutions) -> dict[str, tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]]:
    """What cuDNN's algorithms set aside, by the sizes of their transformed tensors, in bytes; and for which they are possible.

    GEMM lowers one image to columns. FFT holds the spectra of input, filter and output, each twice, of images padded to a power
    of two; its tiled form those of 32 x 32 tiles. Winograd's F(4 x 4, 3 x 3) holds 36 numbers for each tile of 4 x 4 outputs.
    Tensor cores need NHWC: a second copy of the tensors. FFT also handles filters of one pixel: a 1 x 1 convolution of 1,536
    channels at 32 x 32 pixels took 19 GiB on an A100. It handles groups as if they were dense.

    Returns:
        By the names of CONVOLUTION_ALGORITHMS. Shapes: (C, V), (C, V).
    """
    gemm = c.narrow_in * c.taps * c.positions_out * 4
    lowers = (c.taps > 1) | (c.stride > 1)
    plane = (c.rank == 2) & (c.stride == 1) & (c.dilation == 1)
    dense = plane & (c.groups == 1)
    inputs, between, outputs = c.batch * c.channels_in, c.channels_in * c.channels_out, c.batch * c.channels_out
    padded = 1 << np.frexp((c.inputs + c.kernel - 2).astype(np.float64))[1].astype(np.int64)  # the next power of two
    height, width = padded[..., 0], padded[..., min(1, padded.shape[-1] - 1)]
    fft = 2 * (inputs + between + outputs) * height * (width // 2 + 1) * 8
    has_fft = plane & (c.inputs.max(axis=-1, initial=0) <= LARGEST_FFT)
    kernel = c.kernel.max(axis=-1, initial=1)
    tiles = (-(-c.outputs // np.maximum(TILE + 1 - c.kernel, 1))).prod(axis=-1)
    tiling = (inputs * tiles + between + outputs * tiles) * TILE * (TILE // 2 + 1) * 8
    quads = (-(-c.outputs // 4)).prod(axis=-1)
    winograd = (3 + c.kernel[..., 0]) ** 2 * (inputs * quads + between + outputs * quads) * 4
    square = (c.kernel == c.kernel[..., :1]).all(axis=-1) & ((kernel == 3) | (kernel == 5))
    padded_in, padded_out = -(-c.channels_in // 8) * 8, -(-c.channels_out // 8) * 8
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


def _time(graphs: GraphBatch, device: Device, parts: _Parts, roofline: Floats) -> Columns:
    """Sums of the roofline by kind of operator and by phase, and what they are made of."""
    number, total = parts.number, np.maximum(roofline.sum(axis=1), 1e-9)
    num_bytes = (graphs.costs[1] + graphs.costs[2]).astype(np.float64)
    traffic = num_bytes / device.bandwidth_bytes_per_s
    launch_bound = roofline <= device.launch_overhead_s
    num_names = len(NAMED_OPERATORS) + 1
    bins = parts.named + num_names * np.arange(len(graphs))[:, None]
    by_name = np.bincount(bins.ravel(), weights=roofline.ravel(), minlength=num_names * len(graphs)).reshape(-1, num_names)
    log_flops, log_bytes = log1p(graphs.flops), log1p(num_bytes.sum(axis=1))
    return {
        "log_roofline": log(total),
        "log_operators": math.log(max(number, 1)),
        "log_mean_operator": log(total / max(number, 1)),
        "launch_share": sum_where(roofline, launch_bound) / total,
        "launch_count": launch_bound.mean(axis=1) if number else 0.0,
        **{f"time_{kind}": sum_of(roofline, some) / total for kind, some in zip(OP_KINDS, parts.of_kind, strict=True)},
        **{f"count_{kind}": math.log1p(len(some)) for kind, some in zip(_COUNTED_KINDS, parts.of_kind, strict=False)},
        **{f"phase_{phase.name.lower()}": sum_of(roofline, parts.of_phase[phase]) / total for phase in Phase},
        **{f"name_{name}": by_name[:, at] / total for at, name in enumerate(NAMED_OPERATORS)},
        "traffic_share": traffic.sum(axis=1) / total,
        "matrix_traffic_share": sum_of(traffic, parts.matrix) / total,
        "log_flops": log_flops,
        "log_bytes": log_bytes,
        "log_intensity": log_flops - log_bytes,
    }


def _traits(graphs: GraphBatch, parts: _Parts, roofline: Floats, c: Convolutions) -> Columns:
    """Shares of the roofline in kernels that are known to be slow for their size."""
    total = np.maximum(roofline.sum(axis=1), 1e-9)
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
    logs = [log(np.maximum(sizes, 1)) for sizes in (c.narrow_in, c.narrow_out, c.positions_out)]
    seconds = roofline[:, parts.convolutions]
    *shares, weight, first, second, third = _weighted_sums(seconds, [*of_convolutions.values(), np.ones(seconds.shape), *logs])
    means = [np.where(weight > 0, sizes / np.where(weight > 0, weight, 1.0), -1.0) for sizes in (first, second, third)]
    products, m, n, k = np.moveaxis(graphs.attribute("product", ops=parts.products, length=4), -1, 0)
    of_products = {
        "batched": products > 1,
        "odd": (m % 8 > 0) | (n % 8 > 0) | (k % 8 > 0),
        "narrow": np.minimum(n, k) < 64,
        "short": m < 256,
    }
    shares_of_products = _weighted_sums(roofline[:, parts.products], list(of_products.values()))
    return {
        **{f"conv_{name}": share / total for name, share in zip(of_convolutions, shares, strict=True)},
        **{f"product_{name}": share / total for name, share in zip(of_products, shares_of_products, strict=True)},
        **dict(zip(_MEANS, means, strict=True)),
    }


def _weighted_sums(seconds: Floats, factors: Sequence[npt.NDArray[Any]]) -> list[Floats]:
    """The seconds times each of ``factors``, added up one after the other, as a loop would. Shapes: (C, n) → (C,)."""
    if not seconds.shape[1]:
        return [np.zeros(len(seconds)) for _ in factors]
    return list(np.cumsum(seconds * np.stack(factors), axis=2)[:, :, -1])


def _setting(graphs: GraphBatch, device: Device, parts: _Parts) -> Columns:
    skeleton = graphs.skeleton
    batch = np.ones(len(graphs), dtype=np.int64)
    if parts.first_batch is not None:
        batch = graphs.attribute("shape", ops=np.array([parts.first_batch]))[:, 0, 0]
    return {
        "log_batch": log(np.maximum(batch, 1)),
        "train": float(skeleton.mode == "train"),
        "half": float(skeleton.precision != "fp32"),
        "nhwc": float(skeleton.layout == "nhwc"),
        "compiled": float("compiled" in skeleton.options),
        "log_bandwidth": math.log(device.bandwidth_bytes_per_s),
        "log_device_flops": math.log(device.flops_per_s("fp32")),
        "log_matrix_flops": math.log(device.flops_per_s("fp16")),
        "log_sms": math.log(device.num_sms),
        "log_l2": math.log(max(device.l2_bytes, 1)),
        "log_memory": math.log(device.memory_bytes),
        "log_clock": math.log(device.boost_clock_hz),
    }
