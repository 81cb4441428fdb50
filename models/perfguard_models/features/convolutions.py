"""The sizes of the convolutions in a graph.

Shapes: V convolutions, d spatial dimensions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from perfguard.graph import OpGraph

CONVOLUTION_KINDS = ("conv", "conv_backward")
HALF_DTYPES = ("float16", "bfloat16")
_FEWER_BYTES = 2**50
"""A transform of a convolution's inputs takes a few hundred times their bytes at most, so up to here 64 bits are enough."""

Ints = npt.NDArray[Any]
"""int64, or Python's integers where these would not fit."""


def operators_with(attribute: str, graph: OpGraph) -> npt.NDArray[np.int64]:
    """Return the operators that have an attribute, such as the "weight_shape" of convolutions: indices."""
    return np.array([index for index, op in enumerate(graph.ops) if attribute in op.attributes], dtype=np.int64)


class Convolutions:
    """The sizes of convolutions, forwards or backwards. Shapes: (V,), and (V, d) along the spatial dimensions.

    A convolution of fewer dimensions than others is filled up with dimensions of one element.

    Args:
        graph: a step.
        index: the convolutions among its operators. Shape: (V,).
    """

    def __init__(self, graph: OpGraph, index: npt.NDArray[np.int64]) -> None:
        ops = [graph.ops[at] for at in index]
        self.rank = np.array([len(op.attributes["stride"]) for op in ops], dtype=np.int64)  # shape: (V,)
        self.transposed = np.array([bool(op.attributes["transposed"]) for op in ops], dtype=np.bool_)  # shape: (V,)
        self.element_bytes = np.array([2 if op.dtype in HALF_DTYPES else 4 for op in ops], dtype=np.int64)  # shape: (V,)
        num_dimensions = int(self.rank.max(initial=1))
        fits = graph.peak_live_bytes < _FEWER_BYTES

        def sizes(name: str, first: int = 0, default: int = 1) -> Ints:
            found = graph.attribute(name, ops=index, length=first + num_dimensions, default=default)
            return found if fits else found.astype(object)

        in_shape = sizes("in_shape", 2)
        weight_shape = sizes("weight_shape", 2)
        stride = sizes("stride")
        padding = sizes("padding", default=0)
        dilation = sizes("dilation")
        self.groups = sizes("groups")[..., 0]
        self.batch = in_shape[..., 0]
        self.channels_in = in_shape[..., 1]
        self.channels_out = np.where(self.transposed, weight_shape[..., 1] * self.groups, weight_shape[..., 0])
        self.inputs = in_shape[..., 2:]
        self.kernel = weight_shape[..., 2:]
        extent = dilation * (self.kernel - 1)
        self.outputs = np.where(
            self.transposed[:, None],
            (self.inputs - 1) * stride - 2 * padding + extent + 1,
            (self.inputs + 2 * padding - extent - 1) // stride + 1,
        )
        self.stride = stride.max(axis=-1)
        self.dilation = dilation.max(axis=-1)

    @property
    def taps(self) -> Ints:
        """Elements of a kernel's window. Shape: (V,)."""
        return np.asarray(self.kernel.prod(axis=-1))

    @property
    def positions_in(self) -> Ints:
        """Elements of a channel of the input. Shape: (V,)."""
        return np.asarray(self.inputs.prod(axis=-1))

    @property
    def positions_out(self) -> Ints:
        """Elements of a channel of the output. Shape: (V,)."""
        return np.asarray(self.outputs.prod(axis=-1))

    @property
    def narrow_in(self) -> Ints:
        """Input channels of one group. Shape: (V,)."""
        return self.channels_in // self.groups

    @property
    def narrow_out(self) -> Ints:
        """Output channels of one group. Shape: (V,)."""
        return self.channels_out // self.groups
