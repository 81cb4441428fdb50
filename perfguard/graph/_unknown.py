"""Widens intervals for operators that a graph does not model. Such operators have bytes, but no arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perfguard.graph._schema import OpGraph

_SLOWER = 30
"""An operator whose arithmetic is unknown may take this many times as long as it takes to move its bytes: a matrix product does
about as many operations for a byte beyond what a GPU's memory keeps up with."""
_LARGER = 4
"""It may hold this many times the bytes of its inputs and outputs while it runs."""


def unknown_operators(graph: OpGraph) -> dict[int, int]:
    """The opaque operators of ``graph``: by index, how many operators each may launch. Empty: there are none."""
    known = ((index, 1 if op.name == "opaque" else op.attributes.get("unknown", 0)) for index, op in enumerate(graph.ops))
    return {index: number for index, number in known if number}


def unknown_span(graph: OpGraph, op_time_s: Sequence[float], memory_bytes: float) -> dict[str, float]:
    """Upper end, as a logarithm, of the range above a prediction of ``graph`` that treats opaque operators as copies.

    A prediction moves to the middle of that span, and half of the span becomes half of its 90% interval. So both ends are
    equally likely. At the lower end the operator only moves its bytes. At the upper end it takes 30 times as long (times the
    operators that control flow may launch) and holds 4 times its bytes.

    Args:
        graph: traced, or read from a file.
        op_time_s: seconds of each operator. Shape: (len(ops),).
        memory_bytes: the predicted peak.

    Returns:
        For "memory" and "time" a number that is not negative; 0 where nothing is opaque.
    """
    opaque = unknown_operators(graph)
    if not opaque:
        return {"memory": 0.0, "time": 0.0}
    more_s = sum(op_time_s[index] * (_SLOWER * number - 1) for index, number in opaque.items())
    touched = max(graph.ops[index].bytes_read + graph.ops[index].bytes_written for index in opaque)
    return {
        "memory": math.log1p((_LARGER - 1) * touched / max(memory_bytes, 1.0)),
        "time": math.log1p(more_s / max(sum(op_time_s), 1e-12)),
    }
