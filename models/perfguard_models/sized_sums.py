"""`perfguard_models.sums` for graphs of one form: the same numbers, computed for all of them at once.

Shapes: C graphs, N operators, V convolutions with the same number of spatial dimensions d.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from perfguard.graph import KIND_INDEX, OP_KINDS, Phase, SizedGraphs, StorageKind, roofline_of_all
from perfguard_models.sums import (
    _ABSENT,
    _ALGORITHMS,
    _CONVOLUTION_TRAITS,
    _CONVOLUTIONS,
    _LARGEST_FFT,
    _NAMED,
    _PRODUCT_TRAITS,
    _TILE,
    SUMS,
)
from perfguard_models.sums import (
    _setting as _setting_of_form,
)

if TYPE_CHECKING:
    from perfguard.devices import Device

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Columns = dict[str, "Floats | float"]
_RANKS = (0, 1, 3, 10)
_MATRIX_KINDS = (*_CONVOLUTIONS, "matmul", "attention", "rnn")


class _Convolutions(NamedTuple):
    """The convolutions of one number of spatial dimensions; sizes have the shape (C, V) or (C, V, d)."""

    place: Ints  # shape: (V,)
    batch: Ints
    channels_in: Ints
    channels_out: Ints
    groups: Ints
    inputs: Ints
    outputs: Ints
    kernel: Ints
    stride: Ints
    dilation: Ints
    element_bytes: Ints  # shape: (V,)


def sums_of_all(graphs: SizedGraphs, device: Device) -> npt.NDArray[np.float32]:
    """:func:`perfguard_models.sums.sums_of` of each of ``graphs``. Shape: (C, len(SUMS))."""
    roofline = roofline_of_all(graphs, device)
    convolutions = list(_convolutions(graphs))
    columns: Columns = {
        **_memory(graphs, device),
        **_workspaces(graphs, convolutions),
        **_time(graphs, device, roofline),
        **_traits(graphs, roofline, convolutions),
        **_setting(graphs, device),
    }
    return np.stack([np.broadcast_to(columns[name], len(graphs)) for name in SUMS], axis=1).astype(np.float32)


def _memory(graphs: SizedGraphs, device: Device) -> Columns:
    form = graphs.form
    peak, reserved = np.maximum(graphs.peak_live_bytes, 1), graphs.reserved_bytes
    at, num_ops = graphs.peak_index, len(form.ops)
    by_kind = dict(zip(StorageKind, graphs.bytes_by_kind.T, strict=True))
    storage_bytes = graphs.storage_bytes
    ranks = min(_RANKS[-1] + 1, storage_bytes.shape[1])
    largest = -np.sort(np.partition(-storage_bytes, ranks - 1, axis=1)[:, :ranks], axis=1) if ranks else storage_bytes
    passing = [index for index, storage in enumerate(form.storages) if storage.birth >= 0 and storage.death < num_ops]
    phases = np.array([*(op.phase for op in form.ops), -1], dtype=np.float64)  # the last one: before the first operator
    return {
        "log_reserved": np.log(reserved + device.context_bytes),
        "log_live": np.log(peak),
        "log_slack": np.log(reserved / peak),
        **{f"share_{kind.name.lower()}": num_bytes / peak for kind, num_bytes in by_kind.items()},
        "log_parameters": np.log1p(by_kind[StorageKind.PARAMETER]),
        "log_activations": np.log1p(by_kind[StorageKind.ACTIVATION]),
        **{f"storage_{rank}": largest[:, rank] / peak if rank < ranks else 0.0 for rank in _RANKS},
        "largest_passing": storage_bytes[:, passing].max(axis=1, initial=0) / peak,
        "peak_position": at / max(num_ops, 1),
        "peak_phase": phases[at],
        "live_at_start": graphs.live_bytes[:, 0] / peak,
        "live_at_end": graphs.live_bytes[:, -1] / peak,
        "log_capacity_share": np.log((reserved + device.context_bytes) / device.memory_bytes),
    }


def _convolutions(graphs: SizedGraphs) -> Iterator[_Convolutions]:
    by_dimensions: defaultdict[int, list[int]] = defaultdict(list)
    for index, op in enumerate(graphs.form.ops):
        if op.kind in _CONVOLUTIONS:
            by_dimensions[len(op.attributes["in_shape"]) - 2].append(index)
    for dimensions, members in by_dimensions.items():
        place = np.array(members, dtype=np.int64)
        ops = [graphs.form.ops[at] for at in members]

        def at(name: str, axis: int, place: Ints = place) -> Ints:
            return graphs.attribute_at(name, axis, 1)[:, place]

        def along(name: str, first: int, dimensions: int = dimensions, place: Ints = place) -> Ints:
            return np.stack([graphs.attribute_at(name, first + axis, 1)[:, place] for axis in range(dimensions)], axis=-1)

        is_transposed = np.array([op.attributes["transposed"] for op in ops], dtype=bool)
        inputs, kernel = along("in_shape", 2), along("weight_shape", 2)
        stride, padding, dilation = along("stride", 0), along("padding", 0), along("dilation", 0)
        widened = dilation * (kernel - 1)
        outputs = np.where(
            is_transposed[:, None],
            (inputs - 1) * stride - 2 * padding + widened + 1,
            (inputs + 2 * padding - widened - 1) // stride + 1,
        )
        groups = at("groups", 0)
        yield _Convolutions(
            place,
            at("in_shape", 0),
            at("in_shape", 1),
            np.where(is_transposed, at("weight_shape", 1) * groups, at("weight_shape", 0)),
            groups,
            inputs,
            outputs,
            kernel,
            stride.max(axis=-1, initial=1),
            dilation.max(axis=-1, initial=1),
            np.array([2 if op.dtype in ("float16", "bfloat16") else 4 for op in ops]),
        )


def _workspaces(graphs: SizedGraphs, convolutions: list[_Convolutions]) -> Columns:
    peak = np.maximum(graphs.peak_live_bytes, 1)
    highest, largest = ({name: np.zeros(len(graphs)) for name in _ALGORITHMS} for _ in range(2))
    for shapes in convolutions:
        live = graphs.live_bytes[:, shapes.place + 1]
        for algorithm, num_bytes in _workspace_bytes(shapes).items():
            possible = num_bytes > 0
            highest[algorithm] = np.maximum(highest[algorithm], np.where(possible, live + num_bytes, 0).max(axis=1))
            largest[algorithm] = np.maximum(largest[algorithm], num_bytes.max(axis=1))
    return {
        **{f"peak_{name}": np.log(np.maximum(value / peak, 1.0)) for name, value in highest.items()},
        **{
            f"workspace_{name}": np.where(value > 0, np.log(np.maximum(value, 1) / peak), _ABSENT)
            for name, value in largest.items()
        },
    }


def _workspace_bytes(shapes: _Convolutions) -> dict[str, Floats]:
    """Of each algorithm the bytes, 0 where it cannot be. Shapes: (C, V)."""
    batch, channels_in, channels_out, groups, inputs, outputs, kernel, stride, dilation = shapes[1:10]
    size, dimensions = shapes.element_bytes, inputs.shape[-1]
    taps, positions_in, positions_out = (sizes.prod(axis=-1) for sizes in (kernel, inputs, outputs))
    images = batch * channels_in, channels_in * channels_out, batch * channels_out
    gemm = np.where((taps > 1) | (stride > 1), channels_in // groups * taps * positions_out * 4, 0)
    found = {"gemm": gemm, "columns": batch * gemm}
    if dimensions == 2:
        plain, dense = (stride == 1) & (dilation == 1), groups == 1
        padded = 2 ** np.ceil(np.log2(inputs + kernel - 1)).astype(np.int64)
        spectra = 2 * sum(images) * padded[..., 0] * (padded[..., 1] // 2 + 1) * 8
        is_small = plain & (inputs.max(axis=-1) <= _LARGEST_FFT)
        found["fft_grouped"] = np.where(is_small & ~dense, spectra, 0)
        found["fft"] = np.where(is_small & dense & (taps > 1), spectra, 0)
        found["fft_pointwise"] = np.where(is_small & dense & (taps == 1), spectra, 0)
        largest_tap = kernel.max(axis=-1)
        tiles = np.prod(-(-outputs // np.maximum(_TILE + 1 - kernel, 1)), axis=-1)
        tiled = (images[0] * tiles + images[1] + images[2] * tiles) * _TILE * (_TILE // 2 + 1) * 8
        found["fft_tiling"] = np.where(plain & dense & (largest_tap > 1) & (largest_tap < _TILE), tiled, 0)
        square = (kernel[..., 0] == kernel[..., 1]) & ((kernel[..., 0] == 3) | (kernel[..., 0] == 5))
        tiles = np.prod(-(-outputs // 4), axis=-1)
        transformed = (3 + kernel[..., 0]) ** 2 * (images[0] * tiles + images[1] + images[2] * tiles) * 4
        found["winograd"] = np.where(plain & dense & square, transformed, 0)
    padded_in, padded_out = -(-channels_in // 8) * 8, -(-channels_out // 8) * 8
    found["nhwc"] = size * (
        batch * (padded_in * positions_in + padded_out * positions_out) + padded_in * padded_out // groups * taps
    )
    return {name: num_bytes.astype(np.float64) for name, num_bytes in found.items()}


def _time(graphs: SizedGraphs, device: Device, roofline: Floats) -> Columns:
    ops = graphs.form.ops
    num_ops = len(ops)
    total = np.maximum(roofline.sum(axis=1), 1e-9)
    kinds = np.array([KIND_INDEX[op.kind] for op in ops], dtype=np.int64)
    phases = np.array([op.phase for op in ops], dtype=np.int64)
    names = np.array([op.name for op in ops], dtype=object)
    num_bytes = (graphs.op_numbers[1] + graphs.op_numbers[2]).astype(np.float64)
    traffic = num_bytes / device.bandwidth_bytes_per_s
    matrix = np.isin(kinds, [KIND_INDEX[kind] for kind in _MATRIX_KINDS])
    launch_bound = roofline <= device.launch_overhead_s

    def share(chosen: npt.NDArray[np.bool_]) -> Floats:
        return np.asarray(roofline[:, chosen].sum(axis=1) / total)

    log_flops, log_bytes = np.log1p(graphs.flops), np.log1p(num_bytes.sum(axis=1))
    return {
        "log_roofline": np.log(total),
        "log_operators": math.log(max(num_ops, 1)),
        "log_mean_operator": np.log(total / max(num_ops, 1)),
        "launch_share": np.where(launch_bound, roofline, 0).sum(axis=1) / total,
        "launch_count": launch_bound.mean(axis=1) if num_ops else 0.0,
        **{f"time_{kind}": share(kinds == index) for index, kind in enumerate(OP_KINDS)},
        **{f"count_{kind}": math.log1p(int((kinds == index).sum())) for index, kind in enumerate(OP_KINDS[:12])},
        **{f"phase_{phase.name.lower()}": share(phases == phase) for phase in Phase},
        **{f"name_{name}": share(names == name) for name in _NAMED},
        "traffic_share": traffic.sum(axis=1) / total,
        "matrix_traffic_share": traffic[:, matrix].sum(axis=1) / total,
        "log_flops": log_flops,
        "log_bytes": log_bytes,
        "log_intensity": log_flops - log_bytes,
    }


def _traits(graphs: SizedGraphs, roofline: Floats, convolutions: list[_Convolutions]) -> Columns:
    total = np.maximum(roofline.sum(axis=1), 1e-9)
    share = {name: np.zeros(len(graphs)) for name in (*(f"conv_{name}" for name in _CONVOLUTION_TRAITS), *_PRODUCTS)}
    weight, means = np.zeros(len(graphs)), np.zeros((3, len(graphs)))
    for shapes in convolutions:
        seconds = roofline[:, shapes.place]
        for name, holds in _convolution_traits(shapes).items():
            share[f"conv_{name}"] += (seconds * holds).sum(axis=1)
        weight += seconds.sum(axis=1)
        sizes = shapes.channels_in // shapes.groups, shapes.channels_out // shapes.groups, shapes.outputs.prod(axis=-1)
        means += [(seconds * np.log(np.maximum(size, 1))).sum(axis=1) for size in sizes]
    index = np.array([at for at, op in enumerate(graphs.form.ops) if "product" in op.attributes], dtype=np.int64)
    if len(index):
        seconds = roofline[:, index]
        products, m, n, k = (graphs.attribute_at("product", axis, 1)[:, index] for axis in range(4))
        holds_of: Mapping[str, npt.NDArray[np.bool_]] = {
            "product_batched": products > 1,
            "product_odd": (m % 8 != 0) | (n % 8 != 0) | (k % 8 != 0),
            "product_narrow": np.minimum(n, k) < 64,
            "product_short": m < 256,
        }
        for name, holds in holds_of.items():
            share[name] += (seconds * holds).sum(axis=1)
    means = means / np.maximum(weight, 1e-30) if convolutions else np.full_like(means, -1.0)
    return {
        **{name: seconds / total for name, seconds in share.items()},
        **dict(zip(("conv_log_in", "conv_log_out", "conv_log_positions"), means, strict=True)),
    }


_PRODUCTS = tuple(f"product_{name}" for name in _PRODUCT_TRAITS)


def _convolution_traits(shapes: _Convolutions) -> dict[str, npt.NDArray[np.bool_]]:
    """Shapes: (C, V)."""
    groups, channels_in = shapes.groups, shapes.channels_in
    narrow_in, narrow_out = channels_in // groups, shapes.channels_out // groups
    taps = shapes.kernel.prod(axis=-1)
    return {
        "depthwise": (groups > 1) & (groups == channels_in),
        "grouped": (groups > 1) & (groups < channels_in),
        "pointwise": (groups == 1) & (taps == 1),
        "three": (groups == 1) & (taps > 1) & (taps <= 9),
        "large": (groups == 1) & (taps > 9),
        "image": channels_in <= 4,
        "odd": (narrow_in % 8 != 0) | (narrow_out % 8 != 0),
        "strided": shapes.stride > 1,
        "narrow": narrow_in < 64,
    }


def _setting(graphs: SizedGraphs, device: Device) -> Columns:
    first = next((index for index, op in enumerate(graphs.form.ops) if len(op.shape) > 1), None)
    log_batch = 0.0 if first is None else np.log(np.maximum(graphs.shape_at(0)[:, first], 1))
    return _setting_of_form(graphs.form, device) | {"log_batch": log_batch}
