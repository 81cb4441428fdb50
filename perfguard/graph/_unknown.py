"""Widens intervals for what a graph does not model: operators without arithmetic, and sizes that depend on the data."""

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

EVEN_CHOICES = "experts and other choices by index: tokens are assumed to be spread evenly"
HALF_CHOSEN = "selections whose size depends on the data: half of the elements is assumed"
GROUPED_PRODUCTS = "grouped products of experts: tokens are assumed to be spread evenly"
"""Entries in a graph's ``unmodelled`` (`_selections.py`). A grouped product has the same bytes for any spread."""
_LOG_SIGMAS = {
    EVEN_CHOICES: {"memory": 0.15, "time": 0.1},
    HALF_CHOSEN: {"memory": 0.42, "time": 0.42},
    GROUPED_PRODUCTS: {"memory": 0.0, "time": 0.1},
}
"""Standard deviation of a logarithm that an assumption adds; guesses. Half: with a probability of 90% the step needs between half
and twice as much. An even spread: only the size of the largest expert is unknown."""


def has_assumed_sizes(graph: OpGraph) -> bool:
    """Whether sizes in ``graph`` depend on an assumption about the data."""
    return EVEN_CHOICES in graph.unmodelled or HALF_CHOSEN in graph.unmodelled


def assumed_log_sigma(graph: OpGraph, target: str) -> float:
    """Standard deviation of log("memory" or "time") that the assumptions about the data add to a prediction of ``graph``."""
    return math.hypot(*(_LOG_SIGMAS[text][target] for text in graph.unmodelled if text in _LOG_SIGMAS))


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
