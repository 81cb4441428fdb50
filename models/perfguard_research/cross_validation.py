"""Cross-validation: the errors of predictions for held-out runs, and intervals by calibrations without those runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from perfguard_models.calibration import on_new_gpu
from perfguard_models.learner import Predicted
from perfguard_research.calibration import Error, calibrated
from perfguard_research.dataset import Fold, Run

FoldPredictions = list[tuple[Fold, Predicted]]
"""The folds of a split with the predictions for their test runs. "spread TARGET" is the members' standard deviation."""
SplitPredictions = dict[tuple[str, str], FoldPredictions]
"""Predictions by split and predictor."""
CALIBRATED = ("memory", "time")
"""Quantities that have intervals."""


def errors_of(runs: Sequence[Run], split: str, predictions: FoldPredictions) -> list[Error]:
    """Errors for the calibration: every test run, predicted by a learner without its family, or without its GPU."""
    return [
        Error(
            target,
            on_new_gpu(runs[index].group) if split == "gpu" else runs[index].group,
            runs[index].labels[target] - float(predicted[target][position]),
            float(predicted[f"spread {target}"][position]),
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
            spreads = predicted[f"spread {target}"]
            for position, index in enumerate(fold.judge):
                group, known_gpu = runs[index].group, split != "gpu"
                if calibration.scale_of(target, group, known_gpu=known_gpu) is not None:
                    sigmas[target][position] = calibration.log_sigma(target, group, float(spreads[position]), known_gpu=known_gpu)
        found.append(sigmas)
    return found
