"""One operator and one storage of a step; `opgraph.py` describes how they make a graph."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple


class Phase(IntEnum):
    """The part of the step in which an operator runs."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2


class StorageKind(IntEnum):
    """Role of a storage."""

    PARAMETER = 0
    BUFFER = 1
    INPUT = 2
    GRADIENT = 3
    OPTIMIZER_STATE = 4
    ACTIVATION = 5
    """Made in the forward pass and kept for the backward pass."""
    TEMPORARY = 6
    """Made and freed within one phase, or passed along within the backward pass."""


class Op(NamedTuple):
    """One operator as it would be launched."""

    name: str
    """The aten operator, for instance "convolution"."""
    kind: str
    """One of `perfguard.graph.OP_KINDS`."""
    phase: Phase
    flops: int
    """Floating-point operations; a multiply-add counts as two."""
    bytes_read: int
    bytes_written: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    module: str
    """Dotted path of the module whose forward launched it; empty in the backward and optimizer phases."""
    shape: tuple[int, ...]
    """Shape of the first output; empty for a scalar."""
    dtype: str
    attributes: Mapping[str, Any]
    """Hyperparameters that decide the kernel. Of a convolution: its shapes, stride, padding, dilation, groups, transposed, and
    whether the algorithms "winograd" and "fft" are possible. Of a matrix product: "product", (batch, m, n, k). Of
    recurrent layers: "steps", the number of time steps that wait for one another. Of a collective: "ranks", how many there
    are in its group and how many of them share a node. Of any operator: "stream", 1 if FSDP runs it beside the computation;
    "views", the number of views made since the operator before. A view launches no kernel, but takes the host's time."""


class Storage(NamedTuple):
    """One allocation."""

    num_bytes: int
    kind: StorageKind
    birth: int
    death: int
    module: str
    """Module that allocated it, or the name of the parameter."""


class Life(NamedTuple):
    """What was written down of one storage. Its birth and death are those of :class:`Storage`, over all that was recorded."""

    num_bytes: int
    kind: StorageKind | None
    """None: its lifetime decides."""
    birth: int
    death: int | None
    """None: it is still alive."""
    name: str
    birth_phase: Phase
