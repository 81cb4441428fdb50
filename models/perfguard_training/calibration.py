"""Fits calibrations to the errors of runs that were held out; see `perfguard_models.calibration`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from perfguard.predictor import COVERAGE, HALF_INTERVAL
from perfguard_models.calibration import NEW_GPU, OPERATOR, Calibration, difficulty

_FEWEST = 100
_LOWEST_FLOOR = 0.01


class Error(NamedTuple):
    """One prediction of a run that was held out."""

    target: str
    group: str
    residual: float
    """log(measured / predicted)"""
    spread: float
    """Standard deviation between the predictor's members, in logarithms."""


def calibrated(errors: Iterable[Error]) -> Calibration:
    """Fit a calibration to the errors of held-out runs."""
    by_target: defaultdict[str, list[Error]] = defaultdict(list)
    for error in errors:
        if math.isfinite(error.residual) and math.isfinite(error.spread):
            by_target[error.target].append(error)
    floor: dict[str, float] = {}
    scale: dict[str, float] = {}
    for target, found in by_target.items():
        spreads = sorted(error.spread for error in found if error.spread > 0)  # 0: one member alone could say
        floor[target] = max(spreads[len(spreads) // 2], _LOWEST_FLOOR) if spreads else _LOWEST_FLOOR
        groups: defaultdict[str, list[float]] = defaultdict(list)
        for error in found:
            groups[error.group].append(abs(error.residual) / difficulty(error.spread, floor[target]))
        scale |= {f"{target}/{group}": quantile_scale(scores) for group, scores in groups.items() if len(scores) >= _FEWEST}
        known = [scores for group, scores in groups.items() if group != OPERATOR and not group.startswith(NEW_GPU)]
        if known:
            scale[target] = quantile_scale([score for scores in known for score in scores])
    return Calibration(floor, scale)


def quantile_scale(scores: list[float]) -> float:
    """The conformal quantile of the scores, as standard deviations of a normal distribution."""
    rank = min(len(scores) - 1, math.ceil((len(scores) + 1) * COVERAGE) - 1)
    return sorted(scores)[rank] / HALF_INTERVAL
