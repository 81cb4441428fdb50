"""From a draft to a configuration that can be run: the batch that takes the wanted share of the memory, as PerfGuard predicts it."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from perfguard.collect._recipe import Recipe
from perfguard.collect._spaces import Draft
from perfguard.devices import Device
from perfguard.exceptions import PerfGuardError
from perfguard.graph import roofline_s, trace

_PROBED_BATCHES = 2, 8
"""Memory and time of larger batches are extrapolated from these; one is too few for a batch norm."""
_MOST_SAMPLES = 2**20
_LONGEST_STEP_S = {"cuda": 0.5, "cpu": 0.02}
"""By the roofline. A longer step costs a row's worth of others; runs that should not fit are exempt, they end early."""


class Plan(NamedTuple):
    """A configuration to run, or the reason why it is left out."""

    draft: Draft
    recipe: Recipe | None
    reason: str = ""


def planned(draft: Draft, device: Device, capacity_bytes: int) -> Plan:
    """``draft`` with the batch whose predicted peak is its share of ``capacity_bytes`` (the driver's context included)."""
    try:
        with torch.device("meta"):
            model = draft.recipe.make_model()
        small, large = (_cost(draft.recipe, model, batch_size, device) for batch_size in _PROBED_BATCHES)
    except PerfGuardError as error:
        return Plan(draft, None, " ".join(str(error).split()))
    target = draft.memory_share * capacity_bytes - device.context_bytes
    batch_size = _batch_at(target, small[0], large[0])
    if draft.memory_share < 1:
        batch_size = min(batch_size, _batch_at(_LONGEST_STEP_S[device.kind], small[1], large[1]))
    return Plan(draft, dataclasses.replace(draft.recipe, batch_size=batch_size))


def _cost(recipe: Recipe, model: torch.nn.Module, batch_size: int, device: Device) -> tuple[float, float]:
    graph = trace(dataclasses.replace(recipe, batch_size=batch_size).workload(model), target=device)
    return graph.peak_live_bytes, float(roofline_s(graph, device).sum())


def _batch_at(target: float, small: float, large: float) -> int:
    """The batch at which what is ``small`` and ``large`` at the probed batches reaches ``target``; at least the first of them."""
    low, high = _PROBED_BATCHES
    slope = (large - small) / (high - low)
    wanted = low + (target - small) / slope if slope > 0 else _MOST_SAMPLES
    return int(min(max(wanted, low), _MOST_SAMPLES))
