"""A step as the shapes of its operators and the figures of the card: what a model needs that crosses to cards it has not seen.

The operators' columns (`operators`) are logarithms in half precision; how many tiles a product has, and how full its last wave
is, needs the sizes themselves.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from perfguard.graph import OpGraph, roofline_s
from perfguard_models.operators import NAMES

if TYPE_CHECKING:
    from perfguard.devices import Device

TAUGHT = ("linear", "bmm", "softmax", "norm", "pointwise")
"""Kinds of operators that single operators teach. `len(TAUGHT)`: any other."""
CARD = ("flops", "bandwidth", "l2", "sms", "watts", "launch", "nanometres", "generation")
_STREAMING = ("activation", "elementwise", "reduction", "copy", "random", "foreach", "loss", "norm_backward", "fill")
"""Kinds that take as long as their bytes do."""
_PROCESSES = {
    "Pascal": (16.0, 6.0), "Volta": (12.0, 7.0), "Turing": (12.0, 7.5), "Ampere": (7.0, 8.0), "Ada": (5.0, 8.9),
    "Hopper": (4.0, 9.0), "Blackwell": (4.0, 10.0),
}  # fmt: skip
"""Nanometres of the process that NVIDIA's whitepapers name, and the compute capability (CUDA C++ programming guide)."""
_UNKNOWN_PROCESS = (4.0, 10.0)


def kernel_shapes_of(graph: OpGraph, device: Device) -> dict[str, npt.NDArray[Any]]:
    """The operators of ``graph``, each different one once, d of them.

    Returns:
        ``kernel_kind`` (d,) indices into TAUGHT or len(TAUGHT), ``kernel_name`` (d,) indices into `operators.NAMES` or its
        length, ``kernel_size`` (d, 4): batch, m, n, k of a product, else rows, columns, 0, 0, ``kernel_bytes`` (d,),
        ``kernel_roofline`` (d,) seconds, ``kernel_count`` (d,), ``card`` (len(CARD),).
    """
    names = {name: index for index, name in enumerate(NAMES)}
    counts: Counter[tuple[float, ...]] = Counter()
    for op, seconds in zip(graph.ops, roofline_s(graph, device).tolist(), strict=True):
        product = op.attributes.get("product")
        kind = _kind_of(op.name, op.kind, product)
        columns = op.shape[-1] if op.shape else 1
        size = product if product else (math.prod(op.shape[:-1]), columns, 0, 0)
        counts[(kind, names.get(op.name, len(NAMES)), *size, op.bytes_read + op.bytes_written, seconds)] += 1
    rows = np.array(list(counts), dtype=np.float64).reshape(len(counts), 8)
    return {
        "kernel_kind": rows[:, 0].astype(np.int16),
        "kernel_name": rows[:, 1].astype(np.int16),
        "kernel_size": rows[:, 2:6],
        "kernel_bytes": rows[:, 6],
        "kernel_roofline": rows[:, 7],
        "kernel_count": np.array(list(counts.values()), dtype=np.float64),
        "card": card_of(device),
    }


def card_of(device: Device) -> npt.NDArray[np.float64]:
    """The figures named in CARD; rates are per second, of float32."""
    figures = (
        device.flops_per_s("fp32"),
        device.bandwidth_bytes_per_s,
        max(device.l2_bytes, 1),
        device.num_sms,
        max(device.tdp_w, 1.0),
        device.launch_overhead_s,
        *_PROCESSES.get(device.architecture, _UNKNOWN_PROCESS),
    )
    return np.array(figures, dtype=np.float64)


def _kind_of(name: str, kind: str, product: Any) -> int:
    if product:
        return TAUGHT.index("linear" if product[0] == 1 else "bmm")
    if name == "_softmax":
        return TAUGHT.index("softmax")
    if name == "native_layer_norm":
        return TAUGHT.index("norm")
    return TAUGHT.index("pointwise") if kind in _STREAMING else len(TAUGHT)
