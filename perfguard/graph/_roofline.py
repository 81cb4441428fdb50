"""Lower bound of each operator's time on a device (Williams et al. 2009): the slower of its arithmetic and its traffic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from perfguard.graph._schema import OpGraph

if TYPE_CHECKING:
    from perfguard.devices import Device

_MATRIX_KINDS = frozenset({"conv", "conv_backward", "matmul", "attention", "rnn"})
_ARITHMETIC_BY_DTYPE = {"float16": "fp16", "bfloat16": "bf16"}


def roofline_s(graph: OpGraph, device: Device) -> npt.NDArray[np.float64]:
    """Seconds of each operator at the device's peak rates, never less than one launch. Shape: (len(graph.ops),)."""
    flops = np.array([op.flops for op in graph.ops], dtype=np.float64)
    num_bytes = np.array([op.bytes_read + op.bytes_written for op in graph.ops], dtype=np.float64)
    rate = np.array([_rate(op.kind, op.dtype, device) for op in graph.ops], dtype=np.float64)
    slower = np.maximum(flops / rate, num_bytes / device.bandwidth_bytes_per_s) if len(graph.ops) else flops
    return np.maximum(slower, device.launch_overhead_s)


def _rate(kind: str, dtype: str, device: Device) -> float:
    if kind not in _MATRIX_KINDS:
        return device.flops_per_s("fp32")
    return device.flops_per_s(_ARITHMETIC_BY_DTYPE.get(dtype, "fp32"))
