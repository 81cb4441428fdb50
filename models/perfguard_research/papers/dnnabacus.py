"""DNNAbacus: a stacked ensemble of shallow models on the network structural matrix and nine more features.

Bai et al. 2022, "DNNAbacus: Toward Accurate Computational Cost Prediction for Deep Neural Networks". Table 2 has the
structure-independent features. Section 3.2.2 and figure 7 have the matrix: how often an operator of one kind feeds one of
another. Section 3.3 has the learners. The paper uses AutoGluon to stack random forests, boosted trees and extra trees. Here a
ridge regression stacks scikit-learn's three, on their predictions for held-out rows.

Deviations: learning rate and epochs are left out, because they change neither quantity. The paper's kinds are layers; ours are
the kinds of a trace. Features of the device are added to the table, because there is more than one device. The learners are
fixed; AutoGluon chooses among more by their errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from perfguard.graph import OP_KINDS
from perfguard_models.features import FeatureSet
from perfguard_models.learner import QUANTITIES, Example, Predicted, State
from perfguard_models.trees import Forest, forests_in
from perfguard_research.dataset import STEPS, Run
from perfguard_research.learners import OnEpoch, labels_of
from perfguard_research.papers.layers import GLOBAL_COLUMNS, LAYERS, trains
from perfguard_research.trees import forest_of_bagging, forest_of_boosting, tensors_of

_NUMBER = len(OP_KINDS)
_PARTS = 3


class DNNAbacus:
    """The stacked ensemble, one for each quantity. Training steps only, as in the paper."""

    name: ClassVar[str] = "dnnabacus"
    views: ClassVar[tuple[FeatureSet, ...]] = (LAYERS,)
    tables: ClassVar[tuple[str, ...]] = STEPS
    mode: ClassVar[str] = "train"

    def __init__(self, *, trees: int = 40, seed: int = 0) -> None:
        self.settings = {"trees": trees, "seed": seed}
        self._members: dict[str, Forest] = {}
        """By the quantity and the number of the member, as in "time.0"."""
        self._weights: dict[str, npt.NDArray[np.float64]] = {}

    def fit(self, runs: Sequence[Run], *, on_epoch: OnEpoch | None = None) -> None:
        from sklearn.ensemble import ExtraTreesRegressor, HistGradientBoostingRegressor, RandomForestRegressor, StackingRegressor
        from sklearn.linear_model import Ridge
        from sklearn.model_selection import KFold

        trees = self.settings["trees"]
        seed = self.settings["seed"]
        bagging = {"n_estimators": trees, "max_leaf_nodes": 400, "random_state": seed, "max_features": 0.3}
        members = [
            ("rf", RandomForestRegressor(**bagging)),
            ("et", ExtraTreesRegressor(**bagging)),
            ("gb", HistGradientBoostingRegressor(max_iter=5 * trees, random_state=seed)),
        ]
        runs = [run for run in runs if trains(run.view)]
        x = _table(runs)
        for target in QUANTITIES:
            y = labels_of(runs, target)
            known = ~np.isnan(y)
            if known.sum() >= 2 * _PARTS:
                parts = KFold(_PARTS, shuffle=True, random_state=seed)
                stack = StackingRegressor(members, Ridge(alpha=1e-3), cv=parts).fit(x[known], y[known])
                self._weights[target] = np.array([*stack.final_estimator_.coef_, stack.final_estimator_.intercept_])
                rf, et, gb = stack.estimators_
                forests = forest_of_bagging(rf), forest_of_bagging(et), forest_of_boosting(gb)
                self._members |= {f"{target}.{at}": forest for at, forest in enumerate(forests)}

    def predict(self, runs: Sequence[Example]) -> Predicted:
        found = {target: np.full(len(runs), np.nan) for target in QUANTITIES}
        own = [at for at, run in enumerate(runs) if trains(run.view)]
        x = _table([runs[at] for at in own])
        for target, weights in self._weights.items() if own else ():
            predicted = np.stack([self._members[f"{target}.{at}"].predict(x) for at in range(len(weights) - 1)], axis=1)
            found[target][own] = predicted @ weights[:-1] + weights[-1]
        return found

    def state(self) -> tuple[State, Mapping[str, Any]]:
        weights = {f"{target}.weights": torch.from_numpy(values) for target, values in self._weights.items()}
        return weights | tensors_of(self._members), self.settings

    @classmethod
    def from_state(cls, tensors: State, settings: Mapping[str, Any]) -> DNNAbacus:
        made = cls(**settings)
        made._weights = {
            name.removesuffix(".weights"): values.numpy() for name, values in tensors.items() if name.endswith(".weights")
        }
        made._members = forests_in(tensors, _NUMBER**2 + len(GLOBAL_COLUMNS))
        return made


def _table(runs: Sequence[Example]) -> npt.NDArray[np.float32]:
    """Matrix and facts of each run. Shape: (n, len(OP_KINDS)² + len(GLOBAL_COLUMNS)).

    The matrix has the number of edges from an operator of kind i to one of kind j.
    """
    rows = np.zeros((len(runs), _NUMBER**2 + len(GLOBAL_COLUMNS)), dtype=np.float32)
    for row, run in zip(rows, runs, strict=True):
        source, sink = run.view["kind"][run.view["edge_index"]]
        row[: _NUMBER**2] = np.bincount(source * _NUMBER + sink, minlength=_NUMBER**2)
        row[_NUMBER**2 :] = np.log1p(run.view["globals"])
    return rows
