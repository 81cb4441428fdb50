"""A step as the shapes of its operators and the figures of the card, for a model of unseen cards.

The operators' columns (`operators`) are logarithms in half precision. The number of a product's tiles, and how full its last
wave is, need exact sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from perfguard.graph import GraphBatch, batch_roofline_s
from perfguard_models.features.operators import NAMES

if TYPE_CHECKING:
    from perfguard.devices import Device

SUPPORTED_KINDS = ("linear", "bmm", "softmax", "norm", "pointwise")
"""Kinds of operators that single operators teach. `len(SUPPORTED_KINDS)`: any other."""
CARD = ("flops", "bandwidth", "l2", "sms", "watts", "launch", "nanometres", "generation")
STREAMING_KINDS = ("activation", "elementwise", "reduction", "copy", "random", "foreach", "loss", "norm_backward", "fill")
"""Kinds that take as long as their bytes do."""
_PROCESSES = {
    "Kepler": (28.0, 3.7), "Pascal": (16.0, 6.0), "Volta": (12.0, 7.0), "Turing": (12.0, 7.5), "Ampere": (7.0, 8.0),
    "Ada": (5.0, 8.9), "Hopper": (4.0, 9.0), "Blackwell": (4.0, 10.0),
}  # fmt: skip
"""Nanometres of the process that NVIDIA's whitepapers name, and the compute capability (CUDA C++ programming guide)."""
_UNKNOWN_PROCESS = (4.0, 10.0)


def kernel_shapes(graphs: GraphBatch, device: Device) -> list[dict[str, npt.NDArray[Any]]]:
    """Return the operators of each of ``graphs``, each different one once, in the order in which they run.

    Returns: For each graph of d different operators: ``kernel_kind`` (d,), ``kernel_name`` (d,), ``kernel_size`` (d, 4),
        ``kernel_bytes`` (d,), ``kernel_roofline`` (d,) in seconds, ``kernel_count`` (d,), ``card`` (len(CARD),). Entries of
        ``kernel_kind`` are indices into SUPPORTED_KINDS, or its length. Those of ``kernel_name`` are indices into
        `operators.NAMES`, or its length. Rows of ``kernel_size`` are batch, m, n, k of a product, else rows, columns, 0, 0.
    """
    ops, card = graphs.skeleton.ops, card_of(device)
    known = {name: at for at, name in enumerate(NAMES)}
    shape = graphs.attribute("shape", length=1)
    last = np.array([max(len(op.shape) - 1, 0) for op in ops], dtype=np.int64)
    is_last = np.arange(shape.shape[-1]) == last[:, None]
    products = np.array([at for at, op in enumerate(ops) if "product" in op.attributes], dtype=np.int64)
    rows = np.zeros((len(graphs), len(ops), 8))
    rows[..., 0] = kernel_kinds(graphs)
    rows[..., 1] = [known.get(op.name, len(NAMES)) for op in ops]
    rows[..., 2], rows[..., 3] = np.where(is_last, 1, shape).prod(axis=-1), np.where(is_last, shape, 1).prod(axis=-1)
    rows[:, products, 2:6] = graphs.attribute("product", ops=products, length=4)
    rows[..., 6], rows[..., 7] = graphs.costs[1] + graphs.costs[2], batch_roofline_s(graphs, device)
    found: list[dict[str, npt.NDArray[Any]]] = []
    for own in rows:
        _, first, count = np.unique(own, axis=0, return_index=True, return_counts=True)
        by_time = np.argsort(first)
        different = own[first[by_time]]
        found.append(
            {
                "kernel_kind": different[:, 0].astype(np.int16),
                "kernel_name": different[:, 1].astype(np.int16),
                "kernel_size": different[:, 2:6],
                "kernel_bytes": different[:, 6],
                "kernel_roofline": different[:, 7],
                "kernel_count": count[by_time].astype(np.float64),
                "card": card,
            }
        )
    return found


def kernel_kinds(graphs: GraphBatch) -> npt.NDArray[np.int64]:
    """Return the kind of each operator, an index into SUPPORTED_KINDS or its length. Shape: (C, N), N operators."""
    ops = graphs.skeleton.ops
    batch = graphs.attribute("product", length=1, default=0)[..., 0]
    product = np.where(batch == 1, SUPPORTED_KINDS.index("linear"), SUPPORTED_KINDS.index("bmm"))
    is_product = np.array(["product" in op.attributes for op in ops], dtype=np.bool_)
    return np.where(is_product, product, np.array([_kind_of(op.name, op.kind) for op in ops], dtype=np.int64))


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


def _kind_of(name: str, kind: str) -> int:
    """Index of the kind of an operator that is no matrix product."""
    if name == "_softmax":
        return SUPPORTED_KINDS.index("softmax")
    if name == "native_layer_norm":
        return SUPPORTED_KINDS.index("norm")
    return SUPPORTED_KINDS.index("pointwise") if kind in STREAMING_KINDS else len(SUPPORTED_KINDS)
