"""Lower bound of each operator's time on a device (Williams et al. 2009): the slower of its arithmetic and its traffic."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from perfguard.graph._schema import OpGraph

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.graph._sized import SizedGraphs

_MATRIX_KINDS = frozenset({"conv", "conv_backward", "matmul", "attention", "rnn"})
_ARITHMETIC_BY_DTYPE = {"float16": "fp16", "bfloat16": "bf16"}
_CUDNN_KINDS = frozenset({"conv", "conv_backward", "rnn"})
"""In float32 these take TF32 where there is any (`torch.backends.cudnn.allow_tf32`); matrix products do not, by default."""


_LANES = {"cpu": 16, "cuda": 8}
"""Channels that a convolution kernel takes at once: the floats of an AVX-512 register, the multiple that tensor cores want."""


def roofline_s(graph: OpGraph, device: Device) -> npt.NDArray[np.float64]:
    """Seconds of each operator at the device's peak rates, never less than one launch. Shape: (len(graph.ops),).

    On a CPU a convolution computes whole blocks of channels, so it is charged for the lanes that it leaves empty: 17 channels
    take as long as 32. A decision asks several times, so the answers for each graph are kept; do not write into them.
    """
    return _kept(_known_times, graph, device, lambda: _computed(graph, device))


_Kept = WeakKeyDictionary[OpGraph, dict[str, tuple["Device", npt.NDArray[np.float64]]]]
_known_times: _Kept = WeakKeyDictionary()
_known_rates: _Kept = WeakKeyDictionary()


def _kept(known: _Kept, graph: OpGraph, device: Device, make: Callable[[], npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    by_device = known.setdefault(graph, {})
    if device.id not in by_device or by_device[device.id][0] is not device:
        by_device[device.id] = device, make()
    return by_device[device.id][1]


def _computed(graph: OpGraph, device: Device) -> npt.NDArray[np.float64]:
    flops, read, written = graph.costs
    flops, num_bytes = flops.astype(np.float64), (read + written).astype(np.float64)
    if device.kind == "cpu":
        flops *= np.sqrt(np.prod(channel_padding(graph, device), axis=0))
    slower = np.maximum(flops / _rates(graph, device), num_bytes / device.bandwidth_bytes_per_s) if len(flops) else flops
    return np.asarray(np.maximum(slower, device.launch_overhead_s), dtype=np.float64)


def _rates(graph: OpGraph, device: Device) -> npt.NDArray[np.float64]:
    """Peak FLOPs a second of each operator. Shape: (len(graph.ops),)."""
    first = graph.twin or graph

    def rates() -> npt.NDArray[np.float64]:
        return np.array([_rate(op.kind, op.dtype, device) for op in first.ops], dtype=np.float64)

    return _kept(_known_rates, first, device, rates)


def channel_padding(graph: OpGraph, device: Device) -> npt.NDArray[np.float64]:
    """How much larger the channels of each convolution are in whole blocks: of its input, and of its output. 1 for all else.

    Shape: (2, len(graph.ops)).
    """
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


def roofline_of_all(graphs: SizedGraphs, device: Device) -> npt.NDArray[np.float64]:
    """:func:`roofline_s` of each of ``graphs``. Shape: (C, N)."""
    known = _last_of_all.get(graphs)
    if known is None or known[0] is not device:
        known = _last_of_all[graphs] = device, _computed_for_all(graphs, device)
    return known[1]


_last_of_all: WeakKeyDictionary[SizedGraphs, tuple[Device, npt.NDArray[np.float64]]] = WeakKeyDictionary()


def _computed_for_all(graphs: SizedGraphs, device: Device) -> npt.NDArray[np.float64]:
    flops = graphs.op_numbers[0].astype(np.float64)
    if device.kind == "cpu":
        flops *= np.sqrt(np.prod(channel_padding_of_all(graphs, device), axis=0))
    num_bytes = (graphs.op_numbers[1] + graphs.op_numbers[2]).astype(np.float64)
    rate = np.array([_rate(op.kind, op.dtype, device) for op in graphs.form.ops], dtype=np.float64)
    slower = np.maximum(flops / rate, num_bytes / device.bandwidth_bytes_per_s)
    return np.asarray(np.maximum(slower, device.launch_overhead_s))


def channel_padding_of_all(graphs: SizedGraphs, device: Device) -> npt.NDArray[np.float64]:
    """:func:`channel_padding` of each of ``graphs``. Shape: (2, C, N)."""
    lanes = _LANES[device.kind]
    is_convolution = np.array([op.kind in ("conv", "conv_backward") for op in graphs.form.ops], dtype=bool)
    is_transposed = np.array([bool(op.attributes.get("transposed")) for op in graphs.form.ops], dtype=bool)
    first, second = (graphs.attribute_at("weight_shape", axis, 1) for axis in (0, 1))
    second = second * graphs.attribute_at("groups", 0, 1)
    inputs, outputs = np.where(is_transposed, first, second), np.where(is_transposed, second, first)
    channels = np.stack([inputs, outputs])
    blocks = -(-channels // lanes) * lanes / np.maximum(channels, 1)
    return np.where(is_convolution & (channels > 4), blocks, 1.0)


def _in_blocks(channels: int, lanes: int) -> float:
    """Up to four channels (images, sound) have kernels of their own, without blocks."""
    return -(-channels // lanes) * lanes / channels if channels > 4 else 1.0


def _rate(kind: str, dtype: str, device: Device) -> float:
    if kind not in _MATRIX_KINDS:
        return device.flops_per_s("fp32")
    return device.flops_per_s(_ARITHMETIC_BY_DTYPE.get(dtype, "tf32" if kind in _CUDNN_KINDS else "fp32"))
