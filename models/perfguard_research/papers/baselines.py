"""Baselines for a predictor: the roofline, and trees on hand-made features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from perfguard_models.features import FeatureSet
from perfguard_models.features.step import STEP_FEATURES, SUMS
from perfguard_models.learner import QUANTITIES, Example, Predicted, State, column, sums_table
from perfguard_models.trees import Forest, forests_in
from perfguard_research.dataset import ALL_TABLES, STEPS, Run
from perfguard_research.learners import OnEpoch, labels_of
from perfguard_research.trees import forest_of_boosting, tensors_of

_FEWEST_ROWS = 20
_PHYSICS = {"memory": "log_reserved", "time": "log_roofline"}


class Roofline:
    """The replay's reserved bytes and the summed roofline, each times one factor: the median of measured over computed.

    Single operators have a factor of their own.
    """

    name: ClassVar[str] = "roofline"
    views: ClassVar[tuple[FeatureSet, ...]] = (SUMS,)
    tables: ClassVar[tuple[str, ...]] = ALL_TABLES

    def __init__(self, **settings: Any) -> None:
        self._factors: dict[str, float] = {}

    def fit(self, runs: Sequence[Run], *, on_epoch: OnEpoch | None = None) -> None:
        for target in _PHYSICS:
            ratio = labels_of(runs, target) - _physics(runs, target)
            groups = _groups(runs, target)
            for name in np.unique(groups[~np.isnan(ratio)]):
                self._factors[name] = float(np.nanmedian(ratio[groups == name]))

    def predict(self, runs: Sequence[Example]) -> Predicted:
        found = {target: np.full(len(runs), np.nan) for target in QUANTITIES}
        for target in _PHYSICS:
            factors = [self._factors.get(name, np.nan) for name in _groups(runs, target)]
            found[target] = _physics(runs, target) + np.array(factors)
        return found

    def state(self) -> tuple[State, Mapping[str, Any]]:
        return {name: torch.tensor([factor], dtype=torch.float64) for name, factor in self._factors.items()}, {}

    @classmethod
    def from_state(cls, tensors: State, settings: Mapping[str, Any]) -> Roofline:
        made = cls(**settings)
        made._factors = {name: float(value[0]) for name, value in tensors.items()}
        return made


def _groups(runs: Sequence[Example], target: str) -> npt.NDArray[np.str_]:
    """The name of each run's group: runs of a group share a factor."""
    return np.array([f"{target} operator" if run.is_single else target for run in runs], dtype=str)


def _physics(runs: Sequence[Example], target: str) -> npt.NDArray[np.float64]:
    """What physics says of ``target``, as a logarithm; 0 where it says nothing. Shape: (len(runs),)."""
    return column(runs, _PHYSICS[target]) if target in _PHYSICS else np.zeros(len(runs))


class Trees:
    """Boosted trees on the sums, on the logarithm of measured over physics."""

    name: ClassVar[str] = "trees"
    views: ClassVar[tuple[FeatureSet, ...]] = (SUMS,)
    tables: ClassVar[tuple[str, ...]] = STEPS

    def __init__(self, *, trees: int = 400, learning_rate: float = 0.05, leaves: int = 20, seed: int = 0) -> None:
        self.settings = {"trees": trees, "learning_rate": learning_rate, "leaves": leaves, "seed": seed}
        self._forests: dict[str, Forest] = {}

    def fit(self, runs: Sequence[Run], *, on_epoch: OnEpoch | None = None) -> None:
        from sklearn.ensemble import HistGradientBoostingRegressor

        x = sums_table(runs)
        for target in QUANTITIES:
            y = labels_of(runs, target) - _physics(runs, target)
            known = ~np.isnan(y)
            if known.sum() >= _FEWEST_ROWS:
                model = HistGradientBoostingRegressor(
                    loss="absolute_error",
                    max_iter=self.settings["trees"],
                    learning_rate=self.settings["learning_rate"],
                    max_leaf_nodes=self.settings["leaves"],
                    max_features=0.5,
                    random_state=self.settings["seed"],
                )
                self._forests[target] = forest_of_boosting(model.fit(x[known], y[known]))

    def predict(self, runs: Sequence[Example]) -> Predicted:
        found = {target: np.full(len(runs), np.nan) for target in QUANTITIES}
        for target, forest in self._forests.items():
            found[target] = forest.predict(sums_table(runs)) + _physics(runs, target)
        return found

    def state(self) -> tuple[State, Mapping[str, Any]]:
        return tensors_of(self._forests), self.settings

    @classmethod
    def from_state(cls, tensors: State, settings: Mapping[str, Any]) -> Trees:
        made = cls(**settings)
        made._forests = forests_in(tensors, len(STEP_FEATURES))
        return made
