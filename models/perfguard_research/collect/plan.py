"""Turns a draft into a configuration: finds the batch that takes the wanted share of the memory, by tracing."""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from perfguard.devices import Device
from perfguard.exceptions import PerfGuardError
from perfguard.graph import roofline_s, trace
from perfguard_research.collect.spaces import Draft
from perfguard_research.tables.recipe import Recipe

_PROBED_BATCHES = 2, 8
"""The first batches of the search. A batch of one is too small for a batch norm."""
_MOST_SAMPLES = 2**20
_TOLERANCE = 0.05
_MOST_TRACES = 5
_ROUND = 16
"""Batches are rounded to this multiple, which suits tensor cores and is a common choice."""
_LONGEST_STEP_S = {"cuda": 0.25, "cpu": 0.03}
"""Longest step by the roofline, in seconds. Longer steps take the time of many rows. Runs that should not fit a card are exempt,
because they end early."""


class Plan(NamedTuple):
    """A configuration to run, or the reason why it is left out."""

    draft: Draft
    recipe: Recipe | None
    reason: str = ""


def planned(draft: Draft, device: Device, capacity_bytes: int) -> Plan:
    """``draft`` with the batch whose predicted peak is its share of ``capacity_bytes`` (the driver's context included).

    The batch is smaller if its step would be too long. On a CPU, most steps are short.
    """
    try:
        with torch.device("meta"):
            model = draft.recipe.make_model()
        cost = functools.cache(functools.partial(_cost, draft.recipe, model, device))
        target = draft.memory_share * capacity_bytes - device.context_bytes
        batch_size = batch_at(target, lambda batch_size: cost(batch_size)[0])
        on_cpu, longest_s = device.kind == "cpu", _LONGEST_STEP_S[device.kind]
        if on_cpu:
            if cost(_PROBED_BATCHES[0])[1] > longest_s:
                return Plan(draft, None, "a step would take too long on a CPU")
            longest_s *= min(draft.memory_share, 1.0)
        if (on_cpu or draft.memory_share < 1) and cost(batch_size)[1] > longest_s:
            batch_size = min(batch_size, batch_at(longest_s, lambda batch_size: cost(batch_size)[1]))
    except Exception as error:  # one configuration that cannot be traced is no reason to stop
        text = str(error) if isinstance(error, PerfGuardError) else f"{type(error).__name__}: {error}"
        return Plan(draft, None, " ".join(text.split()))
    if draft.round_batch and batch_size > _ROUND:
        batch_size -= batch_size % _ROUND
    return Plan(draft, dataclasses.replace(draft.recipe, batch_size=batch_size))


def batch_at(target: float, cost_of: Callable[[int], float]) -> int:
    """The batch whose cost is within 5% of ``target``, or near it: where a batch of 2 costs more, 2.

    The cost rises with the batch and bends upwards: small batches are all weights, large ones all activations. So the line
    through the two nearest known points is followed, and what is found there is one more point.
    """
    known = sorted({batch_size: cost_of(batch_size) for batch_size in _PROBED_BATCHES}.items())
    for _ in range(_MOST_TRACES - len(known)):
        batch_size = _on_the_line(target, known)
        cost = cost_of(batch_size)
        if abs(cost / target - 1) < _TOLERANCE or batch_size in dict(known):
            return batch_size
        bisect.insort(known, (batch_size, cost))
    return _on_the_line(target, known)


def _on_the_line(target: float, known: list[tuple[int, float]]) -> int:
    right = min(max(bisect.bisect([cost for _, cost in known], target), 1), len(known) - 1)
    (low, small), (high, large) = known[right - 1], known[right]
    slope = (large - small) / (high - low)
    wanted = low + (target - small) / slope if slope > 0 else _MOST_SAMPLES if target > large else low
    return int(min(max(wanted, _PROBED_BATCHES[0]), _MOST_SAMPLES))


def _cost(recipe: Recipe, model: torch.nn.Module, device: Device, batch_size: int) -> tuple[float, float]:
    """Bytes alive at the peak, and seconds by the roofline."""
    graph = trace(dataclasses.replace(recipe, batch_size=batch_size).workload(model), target=device)
    return graph.peak_live_bytes, float(roofline_s(graph, device).sum())
