"""The table of single operators: one row the latency of one kernel (docs/tables.md).

Their graphs have one operator; they are written down here, not traced, because such tables have hundreds of thousands of rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from perfguard.exceptions import TableError
from perfguard.graph import Op, OpGraph, Phase, Storage, StorageKind
from perfguard.graph.costs import attention_flops, convolution_attributes, product_flops
from perfguard.workload import Mode, Precision
from perfguard_research.csv_rows import Row, is_true, one_of, positive

_POINTWISE = {  # aten's name, its kind, inputs, weights as long as a row, FLOPs of an element
    "add": ("add", "elementwise", 2, 0, 1),
    "mul": ("mul", "elementwise", 2, 0, 1),
    "div": ("div", "elementwise", 2, 0, 1),
    "pow": ("pow", "elementwise", 2, 0, 1),
    "relu": ("relu", "activation", 1, 0, 4),
    "gelu": ("gelu", "activation", 1, 0, 4),
    "tanh": ("tanh", "activation", 1, 0, 4),
    "silu_mul": ("silu_mul", "activation", 2, 0, 5),
    "rope": ("rope", "elementwise", 1, 0, 3),
    "softmax": ("_softmax", "softmax", 1, 0, 5),
    "ln": ("native_layer_norm", "norm", 1, 2, 8),
    "layer_norm": ("native_layer_norm", "norm", 1, 2, 8),
    "rms_norm": ("fused_rms_norm", "norm", 1, 1, 8),
}
_GATES = {"vanilla": 1, "gru": 3, "lstm": 4}
_SIZES = {
    **dict.fromkeys(_POINTWISE, ("b", "h")),
    **dict.fromkeys(_GATES, ("b", "h", "steps")),
    "linear": ("b", "m", "n", "k"),
    "bmm": ("b", "m", "n", "k"),
    "matmul": ("m", "n", "k"),
    "embedding": ("b", "h", "vocab"),
    "attention": ("b", "heads", "kv_heads", "seq", "head_dim"),
    "conv": ("b", "c_in", "c_out", "kernel_h", "kernel_w", "img_h", "img_w", "stride_h", "stride_w", "padding_h", "padding_w"),
}
"""Columns of each operator's sizes. The two of a square convolution's are one: "kernel", "img", "stride", "padding"."""
_PRECISIONS: dict[str, Precision] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


class _Work(NamedTuple):
    """What one kernel computes and moves."""

    name: str
    kind: str
    flops: int
    inputs: tuple[int, ...]  # elements of each
    weights: tuple[int, ...]
    shape: tuple[int, ...]  # of the output
    attributes: Mapping[str, Any] = {}
    read: int | None = None
    """Elements that it reads; None: all inputs and weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """A single operator, as a table has it."""

    name: str
    sizes: tuple[int, ...]
    """(b, h) of a matrix; (b, m, n, k) of a product; the others as _SIZES has them."""
    dtype: str = "float32"
    direction: str = "forward"
    launched: bool = True
    """Whether the latency includes the host's launch. If not, it is the kernel's alone."""
    kernel: str = field(default="", compare=False)
    """Name of the CUDA kernel that ran; empty where the table does not say."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What all rows of one kind share, whatever their sizes, because nothing is traced."""
        return self.name, self.dtype, self.direction, self.launched

    @property
    def precision(self) -> Precision:
        """The arithmetic, as a workload names it."""
        return _PRECISIONS[self.dtype]

    def graph(self, mode: Mode) -> OpGraph:
        """One operator between its inputs and its output."""
        if self.name in _GATES:
            work = self._recurrent()
        elif self.name == "conv":
            work = self._convolution()
        elif self.name == "embedding":
            rows, width, vocab = self.sizes
            work = _Work("embedding", "embedding", 0, (), (vocab * width,), (rows, width), read=rows * width)
        elif self.name == "attention":
            work = self._attention()
        else:
            work = self._pointwise() if self.name in _POINTWISE else self._product()
        return self._graph(work, mode)

    def _pointwise(self) -> _Work:
        name, kind, inputs, weights, flops = _POINTWISE[self.name]
        elements = math.prod(self.sizes)
        width = self.sizes[1]
        return _Work(name, kind, flops * elements, (elements,) * inputs, (weights * width,) * (weights > 0), self.sizes)

    def _product(self) -> _Work:
        b, m, n, k = self.sizes if self.name != "matmul" else (1, *self.sizes)
        if self.name == "bmm":
            return _Work("bmm", "matmul", 2 * b * m * n * k, (b * m * k, b * k * n), (), (b, m, n), {"product": (b, m, n, k)})
        bias = n * (self.name == "linear")
        name = "addmm" if bias else "mm"
        attributes = {"product": (1, b * m, n, k)}
        return _Work(name, "matmul", 2 * b * m * n * k, (b * m * k,), (n * k + bias,), (b * m, n), attributes)

    def _attention(self) -> _Work:
        """FlashAttention without a mask. Several heads of the query may share one of the key and the value."""
        b, heads, kv_heads, length, width = self.sizes
        query = (b, heads, length, width)
        key = (b, kv_heads, length, width)
        inputs = (math.prod(query), math.prod(key), math.prod(key))
        return _Work("_scaled_dot_product_flash_attention", "attention", attention_flops(query, query, query), inputs, (), query)

    def _convolution(self) -> _Work:
        b, c_in, c_out, *pairs = self.sizes
        kernel, image, stride, padding = (tuple(pairs[at : at + 2]) for at in (0, 2, 4, 6))
        in_shape = (b, c_in, *image)
        weight = (c_out, c_in, *kernel)
        out = (b, c_out, *((i + 2 * p - k) // s + 1 for i, p, k, s in zip(image, padding, kernel, stride, strict=True)))
        attributes = convolution_attributes(
            in_shape, weight, stride=stride, padding=padding, dilation=(1, 1), groups=1, transposed=False
        )
        flops = product_flops(in_shape, weight, out, transposed=False)
        if self.direction == "forward":
            return _Work("convolution", "conv", flops, (math.prod(in_shape),), (math.prod(weight),), out, attributes)
        others, made = (weight, in_shape) if self.direction == "backward_input" else (in_shape, weight)
        read = math.prod(out), math.prod(others)
        return _Work("convolution_backward", "conv_backward", flops, read, (), made, attributes)

    def _recurrent(self) -> _Work:
        """One layer without the product of its input, which cuDNN computes for all time steps at once."""
        b, h, steps = self.sizes
        gates = _GATES[self.name] * h
        rows = steps * b
        weights = gates * h
        flops = 2 * steps * b * gates * h
        if self.direction == "backward_weight":  # one product of all time steps
            return _Work("mm", "matmul", flops, (rows * gates, rows * h), (), (gates, h), {"product": (1, gates, h, rows)})
        if self.direction == "forward":
            return _Work("fused_rnn", "rnn", flops, (rows * h,), (weights,), (steps, b, h), {"steps": steps})
        read = rows * h, rows * h, rows * gates  # the gradient, the output, and the gates that were kept
        return _Work("fused_rnn_backward", "rnn", flops, read, (weights,), (steps, b, h), {"steps": steps})

    def _graph(self, work: _Work, mode: Mode) -> OpGraph:
        width = 4 if self.dtype == "float32" else 2
        written = math.prod(work.shape) * width
        storages = [
            *(Storage(size * width, StorageKind.INPUT, -1, 1, "") for size in work.inputs),
            *(Storage(size * width, StorageKind.PARAMETER, -1, 1, "") for size in work.weights),
            Storage(written, StorageKind.TEMPORARY, 0, 1, ""),
        ]
        last = len(storages) - 1
        read = width * (sum(work.inputs) + sum(work.weights) if work.read is None else work.read)
        phase = Phase.FORWARD if self.direction == "forward" else Phase.BACKWARD
        op = Op(
            work.name, work.kind, phase, work.flops, read, written, tuple(range(last)), (last,), "", work.shape, self.dtype,
            work.attributes,
        )  # fmt: skip
        options = ("operator",) if self.launched else ("kernel",)
        return OpGraph((op,), tuple(storages), mode, self.precision, "nchw", options)


def operator_of(row: Row) -> Operator:
    """The operator of a row.

    Raises:
        TableError: naming the column that cannot be right.
    """
    op = one_of(row, "op", tuple(_SIZES))
    direction = one_of(row, "direction", ("forward", "backward_input", "backward_weight"), "forward")
    with_backward = ("conv", *_GATES)
    if direction != "forward" and op not in with_backward:
        raise TableError(f"column 'direction' is {direction!r}, which {op} does not have. Only {', '.join(with_backward)} do")
    sizes = tuple(_size(row, op, column) for column in _SIZES[op])
    if op == "attention" and (is_true(row, "causal") or (row.get("window") or "0") not in ("0", "0.0")):
        raise TableError("attention with a mask or a window is not read: graphs do not say which products a kernel leaves out")
    if max(sizes) > 2**40:
        raise TableError(f"a size of {max(sizes):.3g} is too large for any device")
    if op == "conv" and any(sizes[5 + at] + 2 * sizes[9 + at] < sizes[3 + at] for at in (0, 1)):
        raise TableError(f"a kernel of {sizes[3]} x {sizes[4]} does not fit an image of {sizes[5]} x {sizes[6]} with its padding")
    return Operator(
        name=op,
        sizes=sizes,
        dtype=one_of(row, "dtype", tuple(_PRECISIONS), "float32"),
        direction=direction,
        launched=not row.get("direction"),
        kernel="" if op == "conv" else row.get("kernel") or "",
    )


def _size(row: Row, op: str, column: str) -> int:
    """A size. Both sides of a square have one column, named without the side."""
    of_both = column.removesuffix("_h").removesuffix("_w")
    name = of_both if row.get(of_both) and not row.get(column) else column
    if op == "linear" and column == "b" and not row.get(name):
        return 1
    return positive(row, name, or_zero=column.startswith("padding"))
