"""A step as hand-made sums: what trees read.

Sums over the operators of their roofline times, by kind and by what makes a kernel slow; the replay's peak by kind of storage;
and the peaks that the replay would have if each convolution took the workspace of one of cuDNN's algorithms. Everything is a
logarithm or a share.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from perfguard.devices import resolve_device
from perfguard.graph import KIND_INDEX, OP_KINDS, Op, OpGraph, Phase, Storage, StorageKind, roofline_s

if TYPE_CHECKING:
    from perfguard.devices import Device

_CONVOLUTIONS = ("conv", "conv_backward")
_ALGORITHMS = ("gemm", "columns", "fft", "fft_pointwise", "fft_grouped", "fft_tiling", "winograd", "nhwc")
_TILE = 32
_LARGEST_FFT = 256
_NAMED = (
    "_to_copy", "copy_", "cat", "clone", "add", "mul", "native_batch_norm", "native_layer_norm", "mean", "sum", "gelu", "silu",
    "silu_", "relu", "relu_", "sigmoid", "_softmax", "max_pool2d_with_indices", "index", "constant_pad_nd", "avg_pool2d",
)  # fmt: skip
_CONVOLUTION_TRAITS = ("depthwise", "grouped", "pointwise", "three", "large", "image", "odd", "strided", "narrow")
_PRODUCT_TRAITS = ("batched", "odd", "narrow", "short")
_ABSENT = -10.0


class _Convolution(NamedTuple):
    batch: int
    channels_in: int
    channels_out: int
    groups: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: int
    dilation: int


def sums_of(graph: OpGraph, device: Device) -> npt.NDArray[np.float32]:
    """The sums of ``graph`` on ``device``, in the order of SUMS."""
    return np.array(list(summary_of(graph, device).values()), dtype=np.float32)


def summary_of(graph: OpGraph, device: Device) -> dict[str, float]:
    """The sums by name."""
    roofline = roofline_s(graph, device)
    convolutions = [(index, op, _convolution(op)) for index, op in enumerate(graph.ops) if op.kind in _CONVOLUTIONS]
    return {
        **_memory(graph, device),
        **_workspaces(graph, convolutions),
        **_time(graph, device, roofline),
        **_traits(graph, roofline, convolutions),
        **_setting(graph, device),
    }


def _memory(graph: OpGraph, device: Device) -> dict[str, float]:
    peak, reserved = max(graph.peak_live_bytes, 1), graph.reserved_bytes
    at, end = graph.peak_index, max(len(graph.ops), 1)
    by_kind = graph.bytes_by_kind()
    sizes = sorted((storage.num_bytes for storage in graph.storages), reverse=True)
    passing = [storage.num_bytes for storage in graph.storages if storage.birth >= 0 and storage.death < len(graph.ops)]
    return {
        "log_reserved": math.log(reserved + device.context_bytes),
        "log_live": math.log(peak),
        "log_slack": math.log(reserved / peak),
        **{f"share_{kind.name.lower()}": num_bytes / peak for kind, num_bytes in by_kind.items()},
        "log_parameters": math.log1p(by_kind[StorageKind.PARAMETER]),
        "log_activations": math.log1p(by_kind[StorageKind.ACTIVATION]),
        **{f"storage_{rank}": (sizes[rank] if len(sizes) > rank else 0) / peak for rank in (0, 1, 3, 10)},
        "largest_passing": max(passing, default=0) / peak,
        "peak_position": at / end,
        "peak_phase": float(graph.ops[at].phase) if at >= 0 else -1.0,
        "live_at_start": float(graph.live_bytes[0]) / peak,
        "live_at_end": float(graph.live_bytes[-1]) / peak,
        "log_capacity_share": math.log((reserved + device.context_bytes) / device.memory_bytes),
    }


def _workspaces(graph: OpGraph, convolutions: list[tuple[int, Op, _Convolution]]) -> dict[str, float]:
    """The peak if each convolution ran by one algorithm, and the largest workspace, both over the replay's peak."""
    peak = max(graph.peak_live_bytes, 1)
    highest, largest = dict.fromkeys(_ALGORITHMS, 0.0), dict.fromkeys(_ALGORITHMS, 0.0)
    for index, op, shapes in convolutions:
        live = float(graph.live_bytes[index + 1])
        for algorithm, num_bytes in _workspace_bytes(op, shapes).items():
            highest[algorithm] = max(highest[algorithm], live + num_bytes)
            largest[algorithm] = max(largest[algorithm], num_bytes)
    return {
        **{f"peak_{name}": math.log(max(value / peak, 1.0)) for name, value in highest.items()},
        **{f"workspace_{name}": math.log(value / peak) if value else _ABSENT for name, value in largest.items()},
    }


def _workspace_bytes(op: Op, shapes: _Convolution) -> dict[str, float]:
    """What cuDNN's algorithms set aside, by the sizes of their transformed tensors, in bytes.

    GEMM lowers one image to columns. FFT holds the spectra of input, filter and output, each twice, of images padded to a power
    of two; its tiled form those of 32 x 32 tiles. Winograd's F(4 x 4, 3 x 3) holds 36 numbers for each tile of 4 x 4 outputs.
    Tensor cores want NHWC: the tensors once more. FFT takes filters of one pixel too (a 1 x 1 convolution of 1,536 channels at
    32 x 32 pixels took 19 GiB on an A100), and groups as if they were dense.
    """
    batch, channels_in, channels_out, groups, inputs, outputs, kernel, stride, dilation = shapes
    size = 2 if op.dtype in ("float16", "bfloat16") else 4
    taps, positions_in, positions_out = math.prod(kernel), math.prod(inputs), math.prod(outputs)
    images = batch * channels_in, channels_in * channels_out, batch * channels_out
    found: dict[str, float] = {}
    if taps > 1 or stride > 1:
        found["gemm"] = channels_in // groups * taps * positions_out * 4
        found["columns"] = batch * found["gemm"]
    if len(inputs) == 2 and stride == 1 and dilation == 1:
        if max(inputs) <= _LARGEST_FFT:
            height, width = (2 ** math.ceil(math.log2(extent + tap - 1)) for extent, tap in zip(inputs, kernel, strict=True))
            which = "fft_grouped" if groups > 1 else "fft" if taps > 1 else "fft_pointwise"
            found[which] = 2 * sum(images) * height * (width // 2 + 1) * 8
        if groups == 1 and 1 < max(kernel) < _TILE:
            tiles = math.prod(-(-extent // (_TILE + 1 - tap)) for extent, tap in zip(outputs, kernel, strict=True))
            found["fft_tiling"] = (images[0] * tiles + images[1] + images[2] * tiles) * _TILE * (_TILE // 2 + 1) * 8
        if groups == 1 and kernel in ((3, 3), (5, 5)):
            tiles = math.prod(-(-extent // 4) for extent in outputs)
            found["winograd"] = (3 + kernel[0]) ** 2 * (images[0] * tiles + images[1] + images[2] * tiles) * 4
    padded_in, padded_out = -(-channels_in // 8) * 8, -(-channels_out // 8) * 8
    found["nhwc"] = size * (
        batch * (padded_in * positions_in + padded_out * positions_out) + padded_in * padded_out // groups * taps
    )
    return found


def _time(graph: OpGraph, device: Device, roofline: npt.NDArray[np.float64]) -> dict[str, float]:
    """Sums of the roofline by kind of operator and by phase, and what they are made of."""
    ops = graph.ops
    total = max(float(roofline.sum()), 1e-9)
    kinds = np.array([KIND_INDEX[op.kind] for op in ops], dtype=np.int64)
    phases = np.array([op.phase for op in ops], dtype=np.int64)
    num_bytes = np.array([op.bytes_read + op.bytes_written for op in ops], dtype=np.float64)
    traffic = num_bytes / device.bandwidth_bytes_per_s
    matrix = np.isin(kinds, [KIND_INDEX[kind] for kind in (*_CONVOLUTIONS, "matmul", "attention", "rnn")])
    launch_bound = roofline <= device.launch_overhead_s
    by_name: defaultdict[str, float] = defaultdict(float)
    for op, seconds in zip(ops, roofline.tolist(), strict=True):
        by_name[op.name] += seconds
    return {
        "log_roofline": math.log(total),
        "log_operators": math.log(max(len(ops), 1)),
        "log_mean_operator": math.log(total / max(len(ops), 1)),
        "launch_share": float(roofline[launch_bound].sum()) / total,
        "launch_count": float(launch_bound.mean()) if len(ops) else 0.0,
        **{f"time_{kind}": float(roofline[kinds == index].sum()) / total for index, kind in enumerate(OP_KINDS)},
        **{f"count_{kind}": math.log1p(int((kinds == index).sum())) for index, kind in enumerate(OP_KINDS[:12])},
        **{f"phase_{phase.name.lower()}": float(roofline[phases == phase].sum()) / total for phase in Phase},
        **{f"name_{name}": by_name[name] / total for name in _NAMED},
        "traffic_share": float(traffic.sum()) / total,
        "matrix_traffic_share": float(traffic[matrix].sum()) / total,
        "log_flops": math.log1p(graph.flops),
        "log_bytes": math.log1p(float(num_bytes.sum())),
        "log_intensity": math.log1p(graph.flops) - math.log1p(float(num_bytes.sum())),
    }


def _traits(
    graph: OpGraph, roofline: npt.NDArray[np.float64], convolutions: list[tuple[int, Op, _Convolution]]
) -> dict[str, float]:
    """What share of the roofline is spent in kernels that are known to be slow for their size."""
    total = max(float(roofline.sum()), 1e-9)
    share: defaultdict[str, float] = defaultdict(float)
    weight, sizes = 0.0, np.zeros(3)
    for index, _, shapes in convolutions:
        seconds = float(roofline[index])
        narrow_in, narrow_out = shapes.channels_in // shapes.groups, shapes.channels_out // shapes.groups
        taps = math.prod(shapes.kernel)
        traits = {
            "depthwise": shapes.groups > 1 and shapes.groups == shapes.channels_in,
            "grouped": 1 < shapes.groups < shapes.channels_in,
            "pointwise": shapes.groups == 1 and taps == 1,
            "three": shapes.groups == 1 and 1 < taps <= 9,
            "large": shapes.groups == 1 and taps > 9,
            "image": shapes.channels_in <= 4,
            "odd": bool(narrow_in % 8 or narrow_out % 8),
            "strided": shapes.stride > 1,
            "narrow": narrow_in < 64,
        }
        for name, holds in traits.items():
            share[f"conv_{name}"] += seconds * holds
        weight += seconds
        logs = math.log(max(narrow_in, 1)), math.log(max(narrow_out, 1)), math.log(max(math.prod(shapes.outputs), 1))
        sizes += seconds * np.array(logs)
    for index, op in enumerate(graph.ops):
        if "product" in op.attributes:
            products, m, n, k = op.attributes["product"]
            seconds = float(roofline[index])
            share["product_batched"] += seconds * (products > 1)
            share["product_odd"] += seconds * any(size % 8 for size in (m, n, k))
            share["product_narrow"] += seconds * (min(n, k) < 64)
            share["product_short"] += seconds * (m < 256)
    means = sizes / weight if weight else np.full(3, -1.0)
    return {
        **{f"conv_{name}": share[f"conv_{name}"] / total for name in _CONVOLUTION_TRAITS},
        **{f"product_{name}": share[f"product_{name}"] / total for name in _PRODUCT_TRAITS},
        **dict(zip(("conv_log_in", "conv_log_out", "conv_log_positions"), map(float, means), strict=True)),
    }


def _setting(graph: OpGraph, device: Device) -> dict[str, float]:
    batches = [op.shape[0] for op in graph.ops if len(op.shape) > 1]
    return {
        "log_batch": math.log(max(batches[0], 1)) if batches else 0.0,
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


def _convolution(op: Op) -> _Convolution:
    """The shapes of a convolution, whether it is traced forwards or backwards."""
    attributes = op.attributes
    batch, channels_in, *inputs = attributes["in_shape"]
    weight, groups, transposed = attributes["weight_shape"], attributes["groups"], attributes["transposed"]
    outputs = [
        (extent - 1) * stride - 2 * padding + dilation * (tap - 1) + 1
        if transposed
        else (extent + 2 * padding - dilation * (tap - 1) - 1) // stride + 1
        for extent, tap, stride, padding, dilation in zip(
            inputs, weight[2:], attributes["stride"], attributes["padding"], attributes["dilation"], strict=True
        )
    ]
    return _Convolution(
        batch,
        channels_in,
        weight[1] * groups if transposed else weight[0],
        groups,
        tuple(inputs),
        tuple(outputs),
        tuple(weight[2:]),
        max(attributes["stride"], default=1),
        max(attributes["dilation"], default=1),
    )


def _names() -> tuple[str, ...]:
    storages = Storage(4, StorageKind.INPUT, -1, 1, ""), Storage(4, StorageKind.TEMPORARY, 0, 1, "")
    op = Op("relu", "activation", Phase.FORWARD, 1, 4, 4, (0,), (1,), "", (1,), "float32", {})
    return tuple(summary_of(OpGraph((op,), storages, "infer", "fp32", "nchw"), resolve_device("a100")))


SUMS = _names()
"""The names of the sums; they are the same for every graph."""
