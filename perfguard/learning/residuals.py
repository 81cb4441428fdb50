"""Runs beside what had been predicted of them.

Notation, for each run and target:
    residual  log(measured / predicted median)
    z         residual / log_sigma
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING

from perfguard.predictor import Observation, Target

if TYPE_CHECKING:
    from perfguard.graph import OpGraph

NOUNS: dict[Target, str] = {"memory": "peaks of memory", "time": "step times"}


def residual_of(observation: Observation, target: Target) -> float | None:
    """Return how far a complete run was from its prediction, as a logarithm; None if there is nothing to compare."""
    value, estimate = observation.measured(target), observation.predicted.get(target)
    if observation.measurement.status != "ok" or value is None or estimate is None:
        return None
    return math.log(value / estimate.median)


def unwidened_log_sigma(observation: Observation, target: Target) -> float:
    """Return the sigma that was predicted, before it was widened."""
    return observation.predicted[target].log_sigma / observation.widening.get(target, 1.0)


def step_type(graph: OpGraph) -> Hashable:
    """Return a key that is equal for steps that one mistake of a predictor would concern alike."""
    return graph.mode, graph.precision, graph.options, graph.kinds
