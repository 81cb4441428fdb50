"""`perfguard_models.operators` for graphs of one form: the same rows, computed for all of them at once.

Shapes: C graphs, N operators, R rows of all graphs together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from perfguard.graph import OpGraph, SizedGraphs, roofline_of_all
from perfguard.sized_features import operator_sizes_of_all
from perfguard_models.operators import (
    _FLAGS,
    _SIZES,
    _THREADS,
    COLUMNS,
    NAMES,
    _device,
    _flags,
    _surroundings,
)

if TYPE_CHECKING:
    from perfguard.devices import Device

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_VARYING = ("launch_bound", "depthwise", "pointwise", "strided", "dilated", "few_channels", "odd_in", "odd_out", "odd_product")
"""Flags that depend on numbers; all others are the form's."""


def operators_of_all(graphs: SizedGraphs, device: Device) -> list[dict[str, npt.NDArray[Any]]]:
    """:func:`perfguard_models.operators.operators_of` of each of ``graphs``, its rows in some order."""
    form, number = graphs.form, len(graphs)
    num_ops = len(form.ops)
    roofline = roofline_of_all(graphs, device)
    base = graphs.reserved_bytes + device.context_bytes
    sizes = _sizes(graphs, roofline, device).astype(np.float16)
    if form not in _fixed:
        _fixed[form] = _fixed_of(form, device)
    fixed, name, kind = _fixed[form]
    varying = _varying_flags(graphs, roofline, device)

    order, starts, count = _grouped(_hashed(sizes, varying, kind))
    first = order.ravel()[starts] + starts // num_ops * num_ops  # of each row, its place among all operators of all graphs
    live = (graphs.live_bytes[:, 1:] / base[:, None]).ravel()
    ordered = (order + num_ops * np.arange(number)[:, None]).ravel()
    most_live = np.maximum.reduceat(live[ordered], starts) if len(starts) else live
    op = first % num_ops
    x = np.empty((len(first), len(COLUMNS)), dtype=np.float16)
    x[:, : len(_SIZES)] = sizes.reshape(-1, len(_SIZES))[first]
    x[:, len(_SIZES) :] = fixed[op]
    for name_of_flag, values in zip(_VARYING, varying, strict=True):
        x[:, len(_SIZES) + _FLAGS.index(name_of_flag)] = values.ravel()[first]
    whole = {
        "x": x,
        "name": name[op],
        "count": count.astype(np.float32),
        "roofline": roofline.ravel()[first].astype(np.float32),
        "live": most_live.astype(np.float32),
    }
    ends = np.searchsorted(first // num_ops, np.arange(number), side="right").tolist()
    of_device, reserved = _device(device), np.log(base)[:, None]
    return [
        {key: values[begin:end] for key, values in whole.items()} | {"device": of_device, "reserved": reserved[at]}
        for at, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]


class _Fixed(NamedTuple):
    """What numbers do not change."""

    columns: npt.NDArray[np.float16]  # shape: (N, len(COLUMNS) - len(_SIZES))
    name: npt.NDArray[np.int16]  # shape: (N,)
    kind: Ints  # shape: (N,), equal where the other two are


_fixed: WeakKeyDictionary[OpGraph, _Fixed] = WeakKeyDictionary()


def _fixed_of(form: OpGraph, device: Device) -> _Fixed:
    name_index = {name: index for index, name in enumerate(NAMES)}
    name = np.array([name_index.get(op.name, len(NAMES)) for op in form.ops], dtype=np.int16)
    flags = _flags(form, np.zeros(len(form.ops)), device)
    flags[:, [_FLAGS.index(name) for name in _VARYING]] = 0
    columns = np.concatenate([flags, _surroundings(form)], axis=1).astype(np.float16)
    _, kind = np.unique(np.concatenate([columns.view(np.int16), name[:, None]], axis=1), axis=0, return_inverse=True)
    return _Fixed(columns, name, kind.reshape(-1))


def _sizes(graphs: SizedGraphs, roofline: Floats, device: Device) -> Floats:
    """Logarithms. Shape: (C, N, len(_SIZES))."""
    has_weight = np.array(["weight_shape" in op.attributes for op in graphs.form.ops], dtype=bool)
    own = operator_sizes_of_all(graphs)
    channels_in, channels_out, groups = _channels(graphs)
    convolution = [graphs.attribute_product("weight_shape", 2), channels_in // groups, channels_out]
    kernel, inputs, outputs = (np.where(has_weight, values, 0) for values in convolution)
    positions = np.where(has_weight, graphs.attribute_product("in_shape", 2), 0)
    products, m, n, k = (graphs.attribute_at("product", axis, 0) for axis in range(4))
    moved = own[1] + own[2]
    derived = (
        own[0] / device.flops_per_s("fp16") * 1e6,
        moved / device.bandwidth_bytes_per_s * 1e6,
        roofline * 1e6,
        moved / max(device.l2_bytes, 1),
        own[3] * own[4] * own[5] / (device.num_sms * _THREADS),
    )
    logs = [np.log(np.maximum(values, 1e-4)) for values in derived]
    plain = [np.log1p(values) for values in (*own, kernel, inputs, outputs, groups, positions, m, n, k, products)]
    return np.stack([*plain[:3], *logs, *plain[3:]], axis=-1)


def _channels(graphs: SizedGraphs) -> tuple[Ints, Ints, Ints]:
    """Of convolutions the channels of the input, those of the output in one group, and the groups. Shapes: (C, N)."""
    is_transposed = np.array([bool(op.attributes.get("transposed")) for op in graphs.form.ops], dtype=bool)
    first, second = (graphs.attribute_at("weight_shape", axis, 1) for axis in (0, 1))
    groups = graphs.attribute_at("groups", 0, 1)
    return graphs.attribute_at("in_shape", 1, 0), np.where(is_transposed, second, first // groups), groups


def _varying_flags(graphs: SizedGraphs, roofline: Floats, device: Device) -> list[npt.NDArray[np.bool_]]:
    """In the order of _VARYING. Shapes: (C, N)."""
    has_weight = np.array(["weight_shape" in op.attributes for op in graphs.form.ops], dtype=bool)
    channels_in, channels_out, groups = _channels(graphs)
    sizes = [graphs.attribute_at("product", axis, 0) for axis in (1, 2, 3)]
    return [
        roofline <= device.launch_overhead_s,
        has_weight & (groups > 1) & (groups == channels_in),
        has_weight & (graphs.attribute_product("weight_shape", 2) == 1),
        has_weight & (graphs.attribute_sizes("stride", 0).max(axis=2, initial=1) > 1),
        has_weight & (graphs.attribute_sizes("dilation", 0).max(axis=2, initial=1) > 1),
        has_weight & (channels_in <= 4),
        has_weight & (channels_in // groups % 8 != 0),
        has_weight & (channels_out % 8 != 0),
        (sizes[0] % 8 != 0) | (sizes[1] % 8 != 0) | (sizes[2] % 8 != 0),
    ]


def _hashed(sizes: npt.NDArray[np.float16], varying: list[npt.NDArray[np.bool_]], kind: Ints) -> Ints:
    """One number for each operator, equal where its whole row is, and elsewhere only by a chance of about 2^-60. Shape: (C, N).

    A sum of products with odd random numbers, modulo 2^64 (Dietzfelbinger et al. 1997).
    """
    factors = np.random.default_rng(0).integers(-(2**62), 2**62, size=sizes.shape[-1] + 1) * 2 + 1
    columns = sizes.view(np.int16)
    flags = kind.astype(np.int64) << len(varying)
    hashed: Ints = np.zeros(sizes.shape[:2], dtype=np.int64)
    for at, values in enumerate(varying):
        hashed |= values.astype(np.int64) << at
    hashed = (hashed + flags) * factors[-1]
    for at in range(sizes.shape[-1]):
        hashed += columns[:, :, at].astype(np.int64) * factors[at]
    return hashed


def _grouped(hashed: Ints) -> tuple[Ints, Ints, Ints]:
    """The operators of each graph in an order in which equal ones stand together, earlier ones first. Shape: (C, N).

    Then where each group begins in that order of all graphs one after the other, and how many it has. Shapes: (R,), (R,).
    """
    number, num_ops = hashed.shape
    order = np.argsort(hashed, axis=1, kind="stable")
    ordered = np.take_along_axis(hashed, order, axis=1)
    begins = np.ones((number, num_ops), dtype=bool)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    starts = np.flatnonzero(begins)
    return order, starts, np.diff(np.append(starts, number * num_ops))
