"""Lower bound of each operator's time on a device (Williams et al. 2009): the slower of its arithmetic and its traffic.

Shapes: C graphs of a batch, N operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from perfguard.graph._graph_batch import GraphBatch
from perfguard.graph._schema import OpGraph

if TYPE_CHECKING:
    from perfguard.devices import Device

_CONVOLUTIONS = ("conv", "conv_backward")
_MATRIX_KINDS = frozenset({*_CONVOLUTIONS, "matmul", "attention", "rnn"})
_ARITHMETIC_BY_DTYPE = {"float16": "fp16", "bfloat16": "bf16"}
_CUDNN_KINDS = frozenset({*_CONVOLUTIONS, "rnn"})
"""By default these compute float32 in TF32; matrix products do not."""
_LANES = {"cpu": 16, "cuda": 8}
"""Channels in one block of a convolution kernel: the floats of an AVX-512 register, and the multiple that tensor cores use."""
_WITHOUT_BLOCKS = 4
"""Up to this number of channels (images, sound), special kernels work without blocks."""
_K = TypeVar("_K", OpGraph, GraphBatch)
_Floats = npt.NDArray[np.float64]


def roofline_s(graph: OpGraph, device: Device) -> _Floats:
    """Return :func:`batch_roofline_s` of one graph. Shape: (N,)."""
    return np.asarray(batch_roofline_s(graph.as_batch(), device)[0])


def batch_roofline_s(graphs: GraphBatch, device: Device) -> _Floats:
    """Return the seconds of each operator at the device's peak rates, never less than one launch. Shape: (C, N).

    On a CPU a convolution computes whole blocks of channels, so it is charged for the lanes that it leaves empty: 17 channels
    take as long as 32. A decision needs the result several times, so the results for each batch are kept; do not write into
    them.
    """
    return _kept(_known_times, graphs, device, lambda: _computed(graphs, device))


_known_times: WeakKeyDictionary[GraphBatch, dict[str, tuple[Device, _Floats]]] = WeakKeyDictionary()
_known_rates: WeakKeyDictionary[OpGraph, dict[str, tuple[Device, _Floats]]] = WeakKeyDictionary()


def _kept(
    known: WeakKeyDictionary[_K, dict[str, tuple[Device, _Floats]]], key: _K, device: Device, make: Callable[[], _Floats]
) -> _Floats:
    by_device = known.setdefault(key, {})
    of, computed = by_device.get(device.id, (None, None))
    if of is not device or computed is None:  # local, since another thread may store another device of this id
        computed = make()
        by_device[device.id] = device, computed
    return computed


def batch_work_s(graphs: GraphBatch, device: Device) -> tuple[_Floats, _Floats]:
    """Return the seconds of each operator's arithmetic and of its traffic at the device's peak rates. Shapes: (C, N)."""
    flops, num_bytes = graphs.costs[0].astype(np.float64), (graphs.costs[1] + graphs.costs[2]).astype(np.float64)
    if device.kind == "cpu":
        flops = flops * np.sqrt(np.prod(channel_padding(graphs, device), axis=0))
    return flops / _rates(graphs.skeleton, device), num_bytes / device.bandwidth_bytes_per_s


def _computed(graphs: GraphBatch, device: Device) -> _Floats:
    return np.asarray(np.maximum(np.maximum(*batch_work_s(graphs, device)), device.launch_overhead_s), dtype=np.float64)


def _rates(skeleton: OpGraph, device: Device) -> _Floats:
    """Peak FLOPs a second of each operator. Shape: (N,)."""

    def rates() -> _Floats:
        in_tf32 = kinds_in_tf32(skeleton)
        return np.array([_rate(op.kind, op.dtype, device, in_tf32) for op in skeleton.ops], dtype=np.float64)

    return _kept(_known_rates, skeleton, device, rates)


def channel_padding(graphs: GraphBatch, device: Device) -> _Floats:
    """Ratio of the channels in whole blocks to the channels of each convolution, for its input and its output. 1 for other
    operators. Shape: (2, C, N).

    Shape: (2, C, N).
    """
    ops = graphs.skeleton.ops
    padding = np.ones((2, len(graphs), len(ops)))
    convolutions = np.array([index for index, op in enumerate(ops) if op.kind in _CONVOLUTIONS], dtype=np.int64)
    if len(convolutions):
        lanes, weight = _LANES[device.kind], graphs.attribute("weight_shape", ops=convolutions)
        first, second = weight[..., 0], weight[..., 1] * graphs.attribute("groups", ops=convolutions)[..., 0]
        transposed = np.array([bool(ops[index].attributes["transposed"]) for index in convolutions])
        channels = np.where(transposed, (first, second), (second, first))
        in_blocks = (-(-channels // lanes) * lanes / np.maximum(channels, 1)).astype(np.float64)
        padding[:, :, convolutions] = np.where(channels > _WITHOUT_BLOCKS, in_blocks, 1.0)
    return padding


def kinds_in_tf32(skeleton: OpGraph) -> frozenset[str]:
    """Return the kinds of operators that compute float32 in TF32 on GPUs that have it (`torch.backends.cudnn.allow_tf32`)."""
    if "no-tf32" in skeleton.options:
        return frozenset()
    return _MATRIX_KINDS if "tf32" in skeleton.options else _CUDNN_KINDS


def _rate(kind: str, dtype: str, device: Device, in_tf32: frozenset[str]) -> float:
    if kind not in _MATRIX_KINDS:
        return device.flops_per_s("fp32")
    return device.flops_per_s(_ARITHMETIC_BY_DTYPE.get(dtype, "tf32" if kind in in_tf32 else "fp32"))
