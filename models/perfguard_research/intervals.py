"""Intervals from the errors of runs that were held out; see `perfguard_models.calibration`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from perfguard.predictor import COVERAGE, HALF_INTERVAL
from perfguard_models.calibration import CPU, NEW_GPU, OPERATOR, Calibration, on_new_gpu
from perfguard_models.learner import QUANTITIES, Predicted
from perfguard_research.dataset import Fold, Run

_FEWEST = 100
_LOWEST_FLOOR = 0.01
FoldPredictions = list[tuple[Fold, Predicted]]
"""The folds of a split with the predictions for their test runs. "spread TARGET" is the members' standard deviation."""
SplitPredictions = dict[tuple[str, str], FoldPredictions]
"""Predictions by split and predictor."""
CALIBRATED = ("memory", "time")
"""Quantities that have intervals."""


def judged(runs: Sequence[Run], split: str, predictions: FoldPredictions) -> pd.DataFrame:
    """One line for each prediction of a run that was held out.

    Returns:
        "fold" and "run": the number of the fold, and the index of the run.
        "target", "measured", "predicted": NaN where there is no reading or no prediction.
        "spread": standard deviation between the predictor's members; 0 of one member.
        "group" and "source": those of the run. A GPU that was held out has a group of its own.
        "log_sigma": standard deviation by a calibration on the other folds; NaN where these have too few runs.
    """
    groups = {index: runs[index].setting.group for fold, _ in predictions for index in fold.judge}
    lines = pd.DataFrame(
        [
            {
                "fold": at,
                "run": index,
                "target": target,
                "measured": runs[index].labels.get(target, math.nan),
                "predicted": float(predicted[target][position]),
                "spread": float(predicted[f"spread {target}"][position]) if f"spread {target}" in predicted else 0.0,
                "group": on_new_gpu(groups[index]) if split == "gpu" else groups[index],
                "source": runs[index].source,
            }
            for at, (fold, predicted) in enumerate(predictions)
            for position, index in enumerate(fold.judge)
            for target in QUANTITIES
        ]
    )
    lines["log_sigma"] = math.nan
    for fold, own in lines[lines["target"].isin(CALIBRATED)].groupby("fold"):
        calibration = calibrated(lines[lines["fold"] != fold])
        known_gpu = split != "gpu"
        lines.loc[own.index, "log_sigma"] = [
            math.nan
            if calibration.scale_of(target, groups[at], known_gpu=known_gpu) is None
            else calibration.log_sigma(target, groups[at], spread, known_gpu=known_gpu)
            for target, at, spread in zip(own["target"], own["run"], own["spread"], strict=True)
        ]
    return lines


def calibrated(lines: pd.DataFrame) -> Calibration:
    """Fit a calibration to the errors of held-out runs, as :func:`judged` has them."""
    errors = lines.assign(residual=lines["measured"] - lines["predicted"])
    is_known = np.isfinite(errors["residual"]) & np.isfinite(errors["spread"])
    floor: dict[str, float] = {}
    scale: dict[str, float] = {}
    for target, found in errors[is_known & errors["target"].isin(CALIBRATED)].groupby("target", sort=False):
        spreads = found["spread"][found["spread"] > 0]  # 0: one member alone could say
        middle = spreads.quantile(0.5, interpolation="higher") if len(spreads) else 0.0
        own_floor = floor[str(target)] = max(float(middle), _LOWEST_FLOOR)
        scale |= {
            f"{target}/{group}": _scale_of(own, own_floor)
            for group, own in found.groupby("group", sort=False)
            if len(own) >= _FEWEST
        }
        groups = found["group"].str
        known = found[~(groups.startswith(OPERATOR) | groups.startswith(NEW_GPU))]
        is_cpu = known["group"].str.startswith(CPU)
        if is_cpu.any():
            scale[f"{target}/{CPU}"] = _scale_of(known[is_cpu], own_floor)
        if not is_cpu.all():
            scale[str(target)] = _scale_of(known[~is_cpu], own_floor)
            if (new := f"{target}/{NEW_GPU}") in scale:  # its machine is as unknown as that of a new source
                scale[new] = max(scale[new], scale[str(target)])
    return Calibration(floor, scale)


def _scale_of(errors: pd.DataFrame, floor: float) -> float:
    """The conformal quantile of the scores, as standard deviations of a normal distribution.

    A source of n runs weighs as the square root of n, so that no large one decides alone. The weights are those of Tibshirani et
    al. 2019, "Conformal Prediction Under Covariate Shift", equation 7. A new run weighs as much as a score does on average.
    """
    score = (errors["residual"].abs() / np.hypot(errors["spread"], floor)).to_numpy()
    weight = errors["source"].map(errors["source"].value_counts()).to_numpy() ** -0.5
    order = np.argsort(score)
    rank = int(np.searchsorted(np.cumsum(weight[order] / weight.mean()), (len(score) + 1) * COVERAGE - 1e-9))
    return float(score[order[min(rank, len(score) - 1)]]) / HALF_INTERVAL
