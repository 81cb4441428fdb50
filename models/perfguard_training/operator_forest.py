"""Training of GuardNet's forest of operators."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from perfguard_models.features.kernel_shapes import SUPPORTED_KINDS
from perfguard_models.operator_forest import (
    DEVICE_DESCRIPTORS,
    Array,
    Kernels,
    OperatorForest,
    base_s,
    columns_of,
    feature_sets_of,
    kernels_of,
    name_of,
)
from perfguard_models.trees import forest_of_boosting
from perfguard_training.dataset import Run
from perfguard_training.learner import OnEpoch, labels_of

_FEWEST_ROWS = 60
_FLOOR_QUANTILE, _FLOOR_SHARE = 0.01, 0.97
_SHORTEST_S = 2e-6


class TrainableForest(OperatorForest):
    """GuardNet's forest of operators, with `fit`."""

    tables: ClassVar[tuple[str, ...]] = ("operator", "transformer")

    def fit(self, runs: Sequence[Run], *, on_epoch: OnEpoch | None = None, checkpoint: Path | None = None) -> None:
        """See :class:`perfguard_training.learner.Trainable`. Fitted in half a minute, it keeps no checkpoint."""
        timed = [run for run in runs if "time" in run.labels]
        single, whole = [run for run in timed if run.is_single], [run for run in timed if not run.is_single]
        if single:
            kernels, seconds = kernels_of(single), np.exp(labels_of(single, "time"))
            self.floors = _floors_of(kernels, [run.gpu for run in single], seconds)
            measured = np.maximum(seconds - self.floors_s(kernels, single), _SHORTEST_S)
            for at, kind in enumerate(SUPPORTED_KINDS):
                chosen = kernels.kind == at
                if chosen.sum() >= _FEWEST_ROWS:
                    self._fit_kind(kind, kernels.chosen(chosen), measured[chosen], (measured / seconds)[chosen])
                if on_epoch is not None:
                    on_epoch(at + 1, len(SUPPORTED_KINDS), 0.0)
            rest = kernels.kind == len(SUPPORTED_KINDS)
            if rest.any():
                self.factors["operator"] = float(np.median(np.log(seconds[rest] / kernels.roofline[rest])))
        if whole:
            predicted = self.combined(self.parts(whole))
            self.factors["step"] = float(np.median(labels_of(whole, "time") - predicted))

    def _fit_kind(self, kind: str, kernels: Kernels, seconds: Array, weight: Array) -> None:
        """Fit one kind. A row's weight is the share of its time above the floor: rows near the floor are uninformative."""
        from sklearn.ensemble import HistGradientBoostingRegressor

        y = np.log(seconds / base_s(kind, kernels))
        for member, apart in enumerate(DEVICE_DESCRIPTORS):
            for feature_set in feature_sets_of(kind):
                model = HistGradientBoostingRegressor(
                    loss="absolute_error",
                    max_iter=self.settings["trees"],
                    learning_rate=self.settings["learning_rate"],
                    max_leaf_nodes=24,
                    min_samples_leaf=30,
                    max_features=0.5,
                    early_stopping=False,
                    random_state=self.settings["seed"] + member,
                )
                model.fit(columns_of(kind, kernels, feature_set, apart), y, sample_weight=weight)
                self.forests[f"{kind} {feature_set} {member}"] = forest_of_boosting(model)


def least_relative_error(values: Sequence[float]) -> float:
    """The one of ``values`` that is on average the least far from the others, relative to each.

    Example:
        >>> least_relative_error([0.032, 0.033, 0.040, 0.057])
        0.033
    """
    array = np.sort(np.asarray(values, dtype=np.float64))
    return float(array[int(np.argmin([np.abs(value / array - 1).mean() for value in array]))])


def _floors_of(kernels: Kernels, gpus: Sequence[str], seconds: Array) -> dict[str, float]:
    """Floors of single operators, one in each run: just below the fastest run of each name on each GPU, and a common fit for
    all GPUs."""
    own = np.array([f"{name_of(name)} {gpu}" for name, gpu in zip(kernels.name, gpus, strict=True)])
    floors: dict[str, float] = {}
    for key in sorted(set(own[kernels.kind < len(SUPPORTED_KINDS)])):
        floors[str(key)] = float(np.quantile(seconds[own == key], _FLOOR_QUANTILE)) * _FLOOR_SHARE
    for name in sorted({key.split(" ")[0] for key in floors}):
        floors[name] = least_relative_error([value for key, value in floors.items() if key.startswith(f"{name} ")])
    return floors
