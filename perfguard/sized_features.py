"""`perfguard.features` for graphs of one form: the same columns, computed for all of them at once.

Shapes: C graphs, N operators.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from perfguard.features import HALF, SMALL_STORAGE_BYTES, WORKSPACE_KINDS, setting_columns
from perfguard.graph import Phase, SizedGraphs, StorageKind, channel_padding_of_all, roofline_of_all

if TYPE_CHECKING:
    from perfguard.devices import Device

Floats = npt.NDArray[np.float64]
_FLAGS = ("transposed", "winograd", "fft")


class SizedFeatures(NamedTuple):
    """The columns of :func:`perfguard.features.featurize`."""

    x: npt.NDArray[np.float32]  # shape: (C, N, len(NODE_FEATURES))
    globals: npt.NDArray[np.float32]  # shape: (C, len(GRAPH_FEATURES))
    roofline: Floats  # shape: (C, N)
    log_memory: Floats  # shape: (C,)
    log_time: Floats  # shape: (C,)


def operator_sizes_of_all(graphs: SizedGraphs) -> list[Floats]:
    """:func:`perfguard.features.operator_sizes` of each operator. Shapes: (C, N)."""
    shape = graphs.shape_at(0), graphs.shape_at(1), graphs.shape_product(2)
    return [numbers.astype(np.float64) for numbers in (*graphs.op_numbers, *shape)]


def featurize_all(graphs: SizedGraphs, device: Device) -> SizedFeatures:
    """:func:`perfguard.features.featurize` of each of ``graphs``."""
    ops = graphs.form.ops
    roofline, padding = roofline_of_all(graphs, device), channel_padding_of_all(graphs, device)
    peak = np.maximum(graphs.peak_live_bytes, 1)
    total_s = np.maximum(roofline.sum(axis=1), 1e-9)
    launch_bound = roofline <= device.launch_overhead_s
    working = _working_bytes(graphs, padding)
    sizes = [
        *operator_sizes_of_all(graphs),
        graphs.attribute_product("weight_shape", 2),
        graphs.attribute_at("groups", 0, 1),
        graphs.attribute_at("in_shape", 1, 1),
        graphs.attribute_sizes("stride", 0).max(axis=2, initial=1),
    ]
    logs = [np.log1p(numbers) / 10 for numbers in sizes]
    made = np.zeros((len(graphs.form.storages), len(ops)))
    for index, storage in enumerate(graphs.form.storages):
        if storage.birth >= 0 and storage.birth < len(ops):
            made[index, storage.birth] = 1
    flags = np.array(
        [
            [*(op.phase == phase for phase in Phase), *(bool(op.attributes.get(name)) for name in _FLAGS), op.dtype in HALF]
            for op in ops
        ],
        dtype=np.float64,
    ).T  # shape: (7, N)
    forward, backward, optimizer, transposed, winograd, fft, half = flags
    columns = [
        *logs[:3],
        np.log(np.maximum(roofline, 1e-9)) / 4 + 3,
        roofline / total_s[:, None],
        launch_bound,
        graphs.live_bytes[:, 1:] / peak[:, None],
        graphs.at_peak(made) / peak[:, None],
        forward,
        backward,
        optimizer,
        *logs[3:],
        transposed,
        half,
        working / peak[:, None],
        *np.log(padding),
        winograd,
        fft,
    ]
    x = np.empty((*roofline.shape, len(columns)), dtype=np.float32)
    for at, column in enumerate(columns):
        x[:, :, at] = column
    live_peak = peak if device.kind == "cpu" else graphs.reserved_bytes
    return SizedFeatures(
        x,
        _globals(graphs, device, roofline, launch_bound, working).astype(np.float32),
        roofline,
        np.log(device.context_bytes + live_peak),
        np.log(total_s),
    )


def _working_bytes(graphs: SizedGraphs, padding: Floats) -> Floats:
    copies = graphs.op_numbers[1] * padding[0] + graphs.op_numbers[2] * padding[1]
    has_workspace = np.array([op.kind in WORKSPACE_KINDS for op in graphs.form.ops], dtype=bool)
    return np.asarray(graphs.live_bytes[:, 1:] + np.where(has_workspace, copies, 0))


def _globals(
    graphs: SizedGraphs, device: Device, roofline: Floats, launch_bound: npt.NDArray[np.bool_], working: Floats
) -> Floats:
    form = graphs.form
    peak = np.maximum(graphs.peak_live_bytes, 1)
    kinds = dict(zip(StorageKind, graphs.bytes_by_kind.T, strict=True))
    total_s = np.maximum(roofline.sum(axis=1), 1e-9)
    num_ops = max(len(form.ops), 1)
    ones = np.ones((len(form.storages), 1))
    small = graphs.at_peak(ones, smaller_than=SMALL_STORAGE_BYTES)[:, 0]
    storage_bytes = graphs.storage_bytes
    columns = [
        np.log(peak) / 10,
        (kinds[StorageKind.PARAMETER] + kinds[StorageKind.BUFFER]) / peak,
        kinds[StorageKind.GRADIENT] / peak,
        kinds[StorageKind.OPTIMIZER_STATE] / peak,
        kinds[StorageKind.ACTIVATION] / peak,
        kinds[StorageKind.TEMPORARY] / peak,
        storage_bytes.max(axis=1, initial=0) / peak,
        np.log(total_s) / 4 + 2,
        np.log1p(graphs.flops) / 10,
        math.log(num_ops) / 4,
        np.where(launch_bound, roofline, 0).sum(axis=1) / total_s,
        np.log(total_s / num_ops) / 4 + 3,
        *setting_columns(form, device),
        np.log(np.maximum(working.max(axis=1, initial=0.0) / peak, 1.0)),
        small / peak,
        np.log(np.maximum(storage_bytes.sum(axis=1) / peak, 1.0)),
        float("cudnn_benchmark" in form.options),
        float("compiled" in form.options),
        0.0 if device.kind == "cpu" else np.log(graphs.reserved_bytes / peak),
    ]
    return np.stack([np.broadcast_to(column, len(graphs)) for column in columns], axis=1)
