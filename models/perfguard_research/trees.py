"""Forests of scikit-learn as plain arrays, which GuardNet's files hold and `perfguard_models.trees` walks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from perfguard_models.learner import State
from perfguard_models.trees import FIELDS, Forest


def tensors_of(forests: Mapping[str, Forest]) -> State:
    """Tensors of forests by their prefixes, for a weight file; the inverse of :func:`perfguard_models.trees.forests_in`."""
    found: State = {}
    for prefix, forest in forests.items():
        found |= {f"{prefix}.{field}": torch.from_numpy(np.ascontiguousarray(getattr(forest, field))) for field in FIELDS}
        found[f"{prefix}.base"] = torch.tensor([forest.base], dtype=torch.float64)
    return found


def forest_of_boosting(model: Any) -> Forest:
    """The trees of a fitted `HistGradientBoostingRegressor` without categorical features."""
    trees = [stage[0].nodes for stage in model._predictors]
    columns = {"feature": "feature_idx", "threshold": "num_threshold", "left": "left", "right": "right", "value": "value"}
    found = [{own: nodes[name] for own, name in columns.items()} | {"leaf": nodes["is_leaf"].astype(bool)} for nodes in trees]
    return _joined(found, float(np.ravel(model._baseline_prediction)[0]))


def forest_of_bagging(model: Any) -> Forest:
    """The mean of the trees of a fitted `RandomForestRegressor` or `ExtraTreesRegressor`."""
    trees = [estimator.tree_ for estimator in model.estimators_]
    found = [
        {
            "feature": np.maximum(tree.feature, 0),
            "threshold": tree.threshold,
            "left": tree.children_left,
            "right": tree.children_right,
            "value": tree.value[:, 0, 0] / len(trees),
            "leaf": tree.children_left < 0,
        }
        for tree in trees
    ]
    return _joined(found, 0.0)


def _joined(trees: Sequence[dict[str, npt.NDArray[Any]]], base: float) -> Forest:
    """Trees whose children are numbered within each tree."""
    lengths = [len(tree["leaf"]) for tree in trees]
    roots = np.cumsum([0, *lengths])[:-1]
    of = {name: np.concatenate([tree[name] for tree in trees]) for name in trees[0]}
    nodes = np.arange(sum(lengths))
    first = np.repeat(roots, lengths)
    leaf = of["leaf"]
    return Forest(
        roots=roots.astype(np.int32),
        feature=of["feature"].astype(np.int16),
        threshold=np.where(leaf, 0, of["threshold"]).astype(np.float32),
        left=np.where(leaf, nodes, of["left"].astype(np.int64) + first).astype(np.int32),
        right=np.where(leaf, nodes, of["right"].astype(np.int64) + first).astype(np.int32),
        value=of["value"].astype(np.float32),
        base=base,
    )
