"""The table of single operators: one row the latency of one forward kernel in float32 (docs/tables.md).

Their graphs have one operator; they are written down here, not traced, because such tables have hundreds of thousands of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from perfguard.devices import Device
from perfguard.exceptions import TableError
from perfguard.graph import Op, OpGraph, Phase, Storage, StorageKind, TraceCache
from perfguard.tables._csv import Row, one_of, positive, scaled, text
from perfguard.tables._rows import MeasuredRow
from perfguard.workload import Workload

COLUMNS = ("op", "gpu", "b")
"""Required columns of a table of operators."""
_BYTES = 4
_POINTWISE = {  # aten's name, its kind, inputs, FLOPs of an element
    "add": ("add", "elementwise", 2, 1),
    "mul": ("mul", "elementwise", 2, 1),
    "div": ("div", "elementwise", 2, 1),
    "pow": ("pow", "elementwise", 2, 1),
    "relu": ("relu", "activation", 1, 4),
    "gelu": ("gelu", "activation", 1, 4),
    "tanh": ("tanh", "activation", 1, 4),
    "softmax": ("_softmax", "softmax", 1, 5),
    "ln": ("native_layer_norm", "norm", 1, 8),
}
_PRODUCTS = {"linear": "addmm", "bmm": "bmm"}
OPERATORS = (*_POINTWISE, *_PRODUCTS, "conv")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow(MeasuredRow):
    """One measured operator."""

    kernel: str
    """Name of the CUDA kernel that ran; empty where the table does not say."""
    sizes: tuple[int, ...]
    """(b, h) of a matrix; (b, m, n, k) of a product; (b, c_in, c_out, kernel, img, stride, padding) of a convolution."""

    @property
    def structure(self) -> tuple[Any, ...]:
        """Key of the row. All rows of one kind share it, because nothing is traced."""
        return (self.model,)

    def make_model(self) -> None:
        """There is none."""

    def workload(self, model: nn.Module) -> Workload:
        """There is none."""
        raise TableError("A single operator is no workload.")

    def graph(self, model: nn.Module | None, traces: TraceCache, device: Device) -> OpGraph:
        """One operator between its inputs and its output."""
        if self.model in _POINTWISE:
            return self._pointwise()
        return self._convolution() if self.model == "conv" else self._product()

    def _pointwise(self) -> OpGraph:
        name, kind, inputs, flops = _POINTWISE[self.model]
        shape = self.sizes
        size = math.prod(shape) * _BYTES
        extra = 2 * shape[1] * _BYTES if self.model == "ln" else 0
        return _graph(name, kind, flops * math.prod(shape), [size] * inputs, [extra] if extra else [], size, shape, {})

    def _product(self) -> OpGraph:
        b, m, n, k = self.sizes
        flops = 2 * b * m * n * k
        if self.model == "bmm":
            sizes = [b * m * k * _BYTES, b * k * n * _BYTES]
            return _graph("bmm", "matmul", flops, sizes, [], b * m * n * _BYTES, (b, m, n), {"product": (b, m, n, k)})
        rows = b * m
        weights = [(n * k + n) * _BYTES]
        product = {"product": (1, rows, n, k)}
        return _graph("addmm", "matmul", flops, [rows * k * _BYTES], weights, rows * n * _BYTES, (rows, n), product)

    def _convolution(self) -> OpGraph:
        b, c_in, c_out, kernel, img, stride, padding = self.sizes
        out = (img + 2 * padding - kernel) // stride + 1
        dense = stride == 1
        attributes = {
            "in_shape": (b, c_in, img, img),
            "weight_shape": (c_out, c_in, kernel, kernel),
            "stride": (stride, stride),
            "padding": (padding, padding),
            "dilation": (1, 1),
            "groups": 1,
            "transposed": False,
            "winograd": dense and kernel in (3, 5),
            "fft": dense and kernel > 1 and img <= 256,
        }
        weight = c_out * c_in * kernel * kernel
        shape = (b, c_out, out, out)
        flops = 2 * b * out * out * weight
        sizes = [b * c_in * img * img * _BYTES]
        return _graph("convolution", "conv", flops, sizes, [weight * _BYTES], math.prod(shape) * _BYTES, shape, attributes)


def _graph(
    name: str,
    kind: str,
    flops: int,
    inputs: list[int],
    weights: list[int],
    output: int,
    shape: tuple[int, ...],
    attributes: dict[str, Any],
) -> OpGraph:
    storages = [
        *(Storage(size, StorageKind.INPUT, -1, 1, "") for size in inputs),
        *(Storage(size, StorageKind.PARAMETER, -1, 1, "") for size in weights),
        Storage(output, StorageKind.TEMPORARY, 0, 1, ""),
    ]
    last = len(storages) - 1
    op = Op(
        name, kind, Phase.FORWARD, flops, sum(inputs) + sum(weights), output, tuple(range(last)), (last,), "", shape, "float32",
        attributes,
    )  # fmt: skip
    return OpGraph((op,), tuple(storages), "infer", "fp32", "nchw")


def operator_row(row: Row) -> OperatorRow:
    """One row of a table of operators, checked.

    Raises:
        TableError: naming the column that cannot be right.
    """
    op = one_of(row, "op", OPERATORS)
    is_conv = op == "conv"
    if is_conv:
        columns = ("b", "c_in", "c_out", "kernel", "img", "stride")
        sizes = (*(positive(row, column) for column in columns), int(float(row.get("padding") or 0)))
        if sizes[4] + 2 * sizes[6] < sizes[3]:
            raise TableError(f"a kernel of {sizes[3]} does not fit an image of {sizes[4]} with padding {sizes[6]}")
    else:
        sizes = tuple(positive(row, column) for column in (("b", "m", "n", "k") if op in _PRODUCTS else ("b", "h")))
    return OperatorRow(
        source=row.get("source") or "operators",
        model=op,
        family=op,
        mode="infer",
        gpu=text(row, "gpu"),
        batch_size=sizes[0],
        kernel="" if is_conv else row.get("kernel") or "",
        sizes=sizes,
        step_time_s=scaled(row, "latency_ms", 1e-3),
        status=(row.get("status") or "ok").lower(),
    )
