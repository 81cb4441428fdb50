"""The features, the roofline and live bytes of one graph as plain loops: slow, and easy to read.

The code under test computes the same with arrays. The weights were fitted to these numbers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from perfguard.devices import Device
from perfguard.graph import KIND_INDEX, OP_KINDS, Op, OpGraph, Phase, Storage, StorageKind
from perfguard_models.features import launches as launch_features
from perfguard_models.features.operators import FLAGS, NAMES, SIZES, THREADS
from perfguard_models.features.step import (
    ABSENT,
    CONVOLUTION_ALGORITHMS,
    CONVOLUTION_TRAITS,
    LARGEST_FFT,
    MATRIX_KINDS,
    NAMED_OPERATORS,
    PRODUCT_TRAITS,
    TILE,
)  # fmt: skip

_CONVOLUTIONS = ("conv", "conv_backward")
_LANES = {"cpu": 16, "cuda": 8}


def times_alive(storage: Storage, at: int, graph: OpGraph) -> int:
    """An operator of this step meets this step's storage, and that of the last one if it dies later than that."""
    end = len(graph.ops)
    of_this, of_last = range(storage.birth, storage.death + 1), range(-1, storage.death - end)
    return (at in of_this) + (storage.death > end and at in of_last)


def live_bytes(graph: OpGraph) -> list[int]:
    return [
        sum(times_alive(storage, at, graph) * storage.num_bytes for storage in graph.storages) for at in range(-1, len(graph.ops))
    ]


def peak_index(graph: OpGraph) -> int:
    live = live_bytes(graph)
    return live.index(max(live)) - 1


def bytes_by_kind(graph: OpGraph) -> dict[StorageKind, int]:
    at = peak_index(graph)
    return {kind: sum(times_alive(s, at, graph) * s.num_bytes for s in graph.storages if s.kind == kind) for kind in StorageKind}


def step_s_by_simulation(host_s: Sequence[float], device_s: Sequence[float]) -> float:
    """The end of the last operator, where the host launches one after the other and the device computes one at a time."""
    launched, free = 0.0, 0.0
    for host, device in zip(host_s, device_s, strict=True):
        launched += host
        free = max(free, launched) + device
    return free


def roofline(graph: OpGraph, device: Device) -> npt.NDArray[np.float64]:
    padding = channel_padding(graph, device)
    return np.array([_seconds(graph, op, device, *padding[:, index]) for index, op in enumerate(graph.ops)], dtype=np.float64)


def _seconds(graph: OpGraph, op: Op, device: Device, in_blocks: float, out_blocks: float) -> float:
    return max(*_parts_of_work(graph, op, device, in_blocks, out_blocks), device.launch_overhead_s)


def _parts_of_work(graph: OpGraph, op: Op, device: Device, in_blocks: float, out_blocks: float) -> tuple[float, float]:
    """Seconds of arithmetic and of traffic."""
    flops = float(op.flops) * (math.sqrt(in_blocks * out_blocks) if device.kind == "cpu" else 1.0)
    arithmetic = "fp32"
    if op.kind in MATRIX_KINDS:
        by_dtype = {"float16": "fp16", "bfloat16": "bf16"}
        arithmetic = by_dtype.get(op.dtype, "tf32" if op.kind in in_tf32(graph) else "fp32")
    traffic_s = float(op.bytes_read + op.bytes_written) / device.bandwidth_bytes_per_s
    return flops / device.flops_per_s(arithmetic), traffic_s


def channel_padding(graph: OpGraph, device: Device) -> npt.NDArray[np.float64]:
    lanes = _LANES[device.kind]
    padding = np.ones((2, len(graph.ops)))
    for index, op in enumerate(graph.ops):
        if op.kind not in ("conv", "conv_backward"):
            continue
        first, second = op.attributes["weight_shape"][:2]
        groups = op.attributes["groups"]
        inputs, outputs = (first, second * groups) if op.attributes["transposed"] else (second * groups, first)
        padding[:, index] = _in_blocks(inputs, lanes), _in_blocks(outputs, lanes)
    return padding


def _in_blocks(channels: int, lanes: int) -> float:
    return -(-channels // lanes) * lanes / channels if channels > 4 else 1.0


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


def step_features(graph: OpGraph, device: Device) -> dict[str, float]:
    seconds = roofline(graph, device)
    convolutions = [(index, op, _convolution(op)) for index, op in enumerate(graph.ops) if op.kind in _CONVOLUTIONS]
    return {
        **_memory(graph, device),
        **_workspaces(graph, convolutions),
        **_time(graph, device, seconds),
        **_traits(graph, seconds, convolutions),
        **_setting(graph, device),
    }


def _memory(graph: OpGraph, device: Device) -> dict[str, float]:
    peak = max(graph.peak_live_bytes, 1)
    reserved = peak if device.kind == "cpu" else graph.reserved_bytes
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
        "log_capacity_share": math.log(
            (reserved + device.context_bytes) / (2**34 if device.kind == "cpu" else device.memory_bytes)
        ),
    }


def _workspaces(graph: OpGraph, convolutions: list[tuple[int, Op, _Convolution]]) -> dict[str, float]:
    """The peak if each convolution ran by one algorithm, and the largest workspace, both over the replay's peak."""
    peak = max(graph.peak_live_bytes, 1)
    highest, largest = dict.fromkeys(CONVOLUTION_ALGORITHMS, 0.0), dict.fromkeys(CONVOLUTION_ALGORITHMS, 0.0)
    for index, op, shapes in convolutions:
        live = float(graph.live_bytes[index + 1])
        for algorithm, num_bytes in _workspace_bytes(op, shapes).items():
            highest[algorithm] = max(highest[algorithm], live + num_bytes)
            largest[algorithm] = max(largest[algorithm], num_bytes)
    return {
        **{f"peak_{name}": math.log(max(value / peak, 1.0)) for name, value in highest.items()},
        **{f"workspace_{name}": math.log(value / peak) if value else ABSENT for name, value in largest.items()},
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
        if max(inputs) <= LARGEST_FFT:
            height, width = (2 ** math.ceil(math.log2(extent + tap - 1)) for extent, tap in zip(inputs, kernel, strict=True))
            which = "fft_grouped" if groups > 1 else "fft" if taps > 1 else "fft_pointwise"
            found[which] = 2 * sum(images) * height * (width // 2 + 1) * 8
        if groups == 1 and 1 < max(kernel) < TILE:
            tiles = math.prod(-(-extent // (TILE + 1 - tap)) for extent, tap in zip(outputs, kernel, strict=True))
            found["fft_tiling"] = (images[0] * tiles + images[1] + images[2] * tiles) * TILE * (TILE // 2 + 1) * 8
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
    matrix = np.isin(kinds, [KIND_INDEX[kind] for kind in MATRIX_KINDS])
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
        **{f"name_{name}": by_name[name] / total for name in NAMED_OPERATORS},
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
        **{f"conv_{name}": share[f"conv_{name}"] / total for name in CONVOLUTION_TRAITS},
        **{f"product_{name}": share[f"product_{name}"] / total for name in PRODUCT_TRAITS},
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


def operator_features(graph: OpGraph, device: Device) -> dict[str, npt.NDArray[Any]]:
    ops, seconds = graph.ops, roofline(graph, device)
    base, live = graph.reserved_bytes + device.context_bytes, live_bytes(graph)[1:]
    x = np.concatenate([_sizes(ops, seconds, device), _flags(graph, seconds, device)], axis=1).astype(np.float16)
    known = {name: index for index, name in enumerate(NAMES)}
    names = [known.get(op.name, len(NAMES)) for op in ops]
    members: dict[tuple[bytes, int], list[int]] = {}
    for index, name in enumerate(names):
        members.setdefault((x[index].tobytes(), name), []).append(index)
    members = dict(sorted(members.items(), key=lambda item: item[0][0] + np.int16(item[0][1]).tobytes()))
    first = [indices[0] for indices in members.values()]
    return {
        "x": x[first],
        "name": np.array([names[index] for index in first], dtype=np.int16),
        "count": np.array([len(indices) for indices in members.values()], dtype=np.float32),
        "roofline": seconds[first].astype(np.float32),
        "live": np.array([max(live[index] for index in indices) / base for indices in members.values()], dtype=np.float32),
        "reserved": np.array([math.log(base)]),
    }


def _sizes(ops: tuple[Op, ...], roofline: npt.NDArray[np.float64], device: Device) -> npt.NDArray[np.float64]:
    raw = np.array([_raw_sizes(op) for op in ops], dtype=np.float64).reshape(len(ops), len(SIZES) - 5)
    flops, read, written = raw[:, 0], raw[:, 1], raw[:, 2]
    traffic = (read + written) / device.bandwidth_bytes_per_s
    elements = raw[:, 3] * raw[:, 4] * raw[:, 5]
    derived = np.stack(
        [
            flops / device.flops_per_s("fp16") * 1e6,
            traffic * 1e6,
            roofline * 1e6,
            (read + written) / max(device.l2_bytes, 1),
            elements / (device.num_sms * THREADS),
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
        *_operator_sizes(op),
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
    train, nhwc, compiled = graph.mode == "train", graph.layout == "nhwc", "compiled" in graph.options
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
                any(graph.storages[storage].kind is StorageKind.PARAMETER for storage in op.inputs),
                min(len(op.inputs), 8) / 8,
            )
        )
    return np.array(rows, dtype=np.float64).reshape(len(graph.ops), len(FLAGS))


def _operator_sizes(op: Op) -> tuple[int, ...]:
    shape = op.shape
    return (
        op.flops,
        op.bytes_read,
        op.bytes_written,
        shape[0] if shape else 1,
        shape[1] if len(shape) > 1 else 1,
        math.prod(shape[2:]),
    )


SAME_KERNEL = {"mm": "addmm", "baddbmm": "bmm"}


def launches(graph: OpGraph, device: Device) -> dict[str, npt.NDArray[Any]]:
    """One operator after the other; equal ones have one row, that of the first."""
    ops, known = graph.ops, {name: index for index, name in enumerate(NAMES)}
    compute, roofline_s = work(graph, device)
    sizes = _sizes(ops, roofline_s, device)
    sizes[:, SIZES.index("log_compute_s")] = np.log(np.maximum(compute * 1e6, 1e-4))
    x = np.concatenate([sizes, _flags(graph, roofline_s, device)], axis=1).astype(np.float16)
    keys = [(x[at].tobytes(), op.name if op.name in known else "", op.kind) for at, op in enumerate(ops)]
    members: dict[Any, list[int]] = {}
    for at, key in enumerate(keys):
        members.setdefault(key, []).append(at)
    first = [some[0] for some in members.values()]
    if device.kind == "cpu":
        x[:, len(SIZES) + FLAGS.index("compiled")] = 0  # it is predicted as eager
    own = [(*_switches(graph, op, device), _log_idle_waves(op, device)) for op in ops]
    names = {name: index for index, name in enumerate(launch_features.NAMES)}
    row_of = {key: row for row, key in enumerate(members)}
    return {
        "x": np.concatenate([x, np.array(own, dtype=np.float16).reshape(len(ops), 4)], axis=1)[first],
        "name": np.array(
            [names.get(SAME_KERNEL.get(ops[at].name, ops[at].name), len(names) + KIND_INDEX[ops[at].kind]) for at in first],
            dtype=np.int16,
        ),
        "host": np.array([KIND_INDEX[ops[at].kind] * len(Phase) + ops[at].phase for at in first], dtype=np.int16),
        "roofline": roofline_s[first].astype(np.float32),
        "steps": np.array([ops[at].attributes.get("steps", 0) for at in first], dtype=np.float32),
        "order": np.array([row_of[key] for key in keys], dtype=np.int32),
        "views": np.array([op.attributes.get("views", 0) for op in ops], dtype=np.int16),
        "copied": np.array([_copied_bytes(graph, device)]),
        "is_cpu": np.array([device.kind == "cpu"], dtype=np.float32),
        "timed": np.array(_timed(graph), dtype=np.float32),
    }


def work(graph: OpGraph, device: Device) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Seconds of each operator's arithmetic, and of its arithmetic or traffic without a launch."""
    padding = channel_padding(graph, device)
    parts = [_parts_of_work(graph, op, device, *padding[:, at]) for at, op in enumerate(graph.ops)]
    longest = [max(*part, 1e-7) for part in parts]
    return np.array([part[0] for part in parts], dtype=np.float64), np.array(longest, dtype=np.float64)


def _timed(graph: OpGraph) -> tuple[bool, bool]:
    """Whether the time holds the host's launches, and the start of the step."""
    return "kernel" not in graph.options, "kernel" not in graph.options and "operator" not in graph.options


def _log_idle_waves(op: Op, device: Device) -> float:
    if "product" not in op.attributes:
        return 0.0
    batch, rows, columns, _ = op.attributes["product"]
    waves = batch * math.ceil(rows / 128) * math.ceil(columns / 128) / device.num_sms
    return math.log(math.ceil(waves) / waves)


def _switches(graph: OpGraph, op: Op, device: Device) -> tuple[bool, bool, bool]:
    """Those that make a difference on the device."""
    half = op.dtype in ("float16", "bfloat16")
    tf32 = op.kind in in_tf32(graph) and not half and device.flops_per_s("tf32") > device.flops_per_s("fp32")
    bf16 = op.dtype == "bfloat16" and device.flops_per_s("bf16") != device.flops_per_s("fp16")
    return tf32, bf16, "cudnn_benchmark" in graph.options


def in_tf32(graph: OpGraph) -> tuple[str, ...]:
    """Kinds that compute float32 in TF32."""
    if "no-tf32" in graph.options:
        return ()
    return tuple(MATRIX_KINDS) if "tf32" in graph.options else (*_CONVOLUTIONS, "rnn")


def _copied_bytes(graph: OpGraph, device: Device) -> float:
    if device.kind == "cpu" or "batch-on-device" in graph.options or not _timed(graph)[1]:
        return 0.0
    return float(sum(storage.num_bytes for storage in graph.storages if storage.kind is StorageKind.INPUT))
