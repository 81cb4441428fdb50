"""Intervals from the errors of runs that were held out; see `perfguard_models.calibration`."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from perfguard.predictor import COVERAGE, HALF_INTERVAL
from perfguard_models.calibration import CPU, NEW_GPU, OPERATOR, Calibration, difficulty, on_new_gpu
from perfguard_models.learner import Predicted
from perfguard_research.dataset import Fold, Run

_FEWEST = 100
_LOWEST_FLOOR = 0.01
FoldPredictions = list[tuple[Fold, Predicted]]
"""The folds of a split with the predictions for their test runs. "spread TARGET" is the members' standard deviation."""
SplitPredictions = dict[tuple[str, str], FoldPredictions]
"""Predictions by split and predictor."""
CALIBRATED = ("memory", "time")
"""Quantities that have intervals."""


class Error(NamedTuple):
    """One prediction of a run that was held out."""

    target: str
    group: str
    residual: float
    """log(measured / predicted)"""
    spread: float
    """Standard deviation between the predictor's members, in logarithms."""
    source: str = ""
    """Who measured the run. A source of n runs weighs as the square root of n, so that no large one decides alone."""


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
        groups: defaultdict[str, list[Error]] = defaultdict(list)
        for error in found:
            groups[error.group].append(error)
        scale |= {f"{target}/{group}": _scale_of(own, floor[target]) for group, own in groups.items() if len(own) >= _FEWEST}
        known = [error for error in found if error.group != OPERATOR and not error.group.startswith(NEW_GPU)]
        of_cpus, of_gpus = ([error for error in known if error.group.startswith(CPU) == one] for one in (True, False))
        if of_cpus:
            scale[f"{target}/{CPU}"] = _scale_of(of_cpus, floor[target])
        if of_gpus:
            scale[target] = _scale_of(of_gpus, floor[target])
            if (new := f"{target}/{NEW_GPU}") in scale:  # its machine is as unknown as that of a new source
                scale[new] = max(scale[new], scale[target])
    return Calibration(floor, scale)


def _scale_of(errors: list[Error], floor: float) -> float:
    number = Counter(error.source for error in errors)
    scores = [abs(error.residual) / difficulty(error.spread, floor) for error in errors]
    return quantile_scale(scores, [number[error.source] ** -0.5 for error in errors])


def quantile_scale(scores: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """The conformal quantile of the scores, as standard deviations of a normal distribution.

    Weights are those of Tibshirani et al. 2019, "Conformal Prediction Under Covariate Shift", equation 7. A new run weighs as
    much as a score does on average. By default all weights are equal.
    """
    order = np.argsort(scores)
    weight = np.ones(len(order)) if weights is None else np.asarray(weights)[order] / np.mean(weights)
    rank = int(np.searchsorted(np.cumsum(weight), (len(order) + 1) * COVERAGE - 1e-9))
    return float(np.asarray(scores)[order[min(rank, len(order) - 1)]]) / HALF_INTERVAL


def errors_of(runs: Sequence[Run], split: str, predictions: FoldPredictions) -> list[Error]:
    """Errors for the calibration: every test run, predicted by a learner without its family, or without its GPU."""
    return [
        Error(
            target,
            on_new_gpu(runs[index].group) if split == "gpu" else runs[index].group,
            runs[index].labels[target] - float(predicted[target][position]),
            float(predicted[f"spread {target}"][position]) if f"spread {target}" in predicted else 0.0,
            runs[index].source,
        )
        for fold, predicted in predictions
        for position, index in enumerate(fold.judge)
        for target in CALIBRATED
        if target in runs[index].labels
    ]


def log_sigmas_of(runs: Sequence[Run], split: str, predictions: FoldPredictions) -> list[dict[str, npt.NDArray[np.float64]]]:
    """Standard deviations (of logarithms) for each fold, by a calibration on the errors of the other folds.

    Returns:
        By quantity, shape: (test runs,); NaN where the other folds have too few runs to calibrate on.
    """
    errors = [errors_of(runs, split, [part]) for part in predictions]
    found = []
    for at, (fold, predicted) in enumerate(predictions):
        calibration = calibrated(itertools.chain.from_iterable(errors[:at] + errors[at + 1 :]))
        sigmas = {}
        for target in CALIBRATED:
            sigmas[target] = np.full(len(fold.judge), math.nan)
            spreads = predicted.get(f"spread {target}", np.zeros(len(fold.judge)))
            for position, index in enumerate(fold.judge):
                group, known_gpu = runs[index].group, split != "gpu"
                if calibration.scale_of(target, group, known_gpu=known_gpu) is not None:
                    sigmas[target][position] = calibration.log_sigma(target, group, float(spreads[position]), known_gpu=known_gpu)
        found.append(sigmas)
    return found
