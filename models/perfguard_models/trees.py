"""Ensembles of regression trees as plain arrays: trained by scikit-learn, kept in safetensors, walked by numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from perfguard_models.learner import State

_ROWS_AT_ONCE = 1024
_FIELDS = ("roots", "feature", "threshold", "left", "right", "value")


class Forest(NamedTuple):
    """A sum of trees. Node i is a leaf if ``left[i] == i``; elsewhere a row goes left if its feature is at most the threshold."""

    roots: npt.NDArray[np.int32]  # shape: (trees,)
    feature: npt.NDArray[np.int16]  # shape: (nodes,)
    threshold: npt.NDArray[np.float32]
    left: npt.NDArray[np.int32]
    right: npt.NDArray[np.int32]
    value: npt.NDArray[np.float32]
    base: float

    def predict(self, x: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """The sum of the leaves that each row of ``x`` (n, features) reaches, and the base. Shape: (n,)."""
        x = np.asarray(x, dtype=np.float32)
        out = np.empty(len(x))
        for start in range(0, len(x), _ROWS_AT_ONCE):
            rows = x[start : start + _ROWS_AT_ONCE]
            at = np.broadcast_to(self.roots, (len(rows), len(self.roots))).copy()
            line = np.arange(len(rows))[:, None]
            while True:
                goes_left = rows[line, self.feature[at]] <= self.threshold[at]
                following = np.where(goes_left, self.left[at], self.right[at])
                if np.array_equal(following, at):
                    break
                at = following
            out[start : start + _ROWS_AT_ONCE] = self.value[at].sum(axis=1, dtype=np.float64)
        return out + self.base

    def tensors(self, prefix: str) -> State:
        """Tensors of the forest for a weight file."""
        named = {field: torch.from_numpy(np.ascontiguousarray(getattr(self, field))) for field in _FIELDS}
        return {f"{prefix}.{field}": value for field, value in named.items()} | {
            f"{prefix}.base": torch.tensor([self.base], dtype=torch.float64)
        }

    @staticmethod
    def from_tensors(tensors: State, prefix: str, num_features: int) -> Forest:
        """The inverse of :meth:`tensors`, for rows of so many features.

        Raises:
            KeyError: if one is missing.
            ValueError: if an index would lead outside, or round in a circle.
        """
        arrays = [tensors[f"{prefix}.{field}"].numpy() for field in _FIELDS]
        forest = Forest(**dict(zip(_FIELDS, arrays, strict=True)), base=float(tensors[f"{prefix}.base"][0]))
        nodes = np.arange(len(forest.left))
        leaf = forest.left == nodes
        children = np.stack([forest.left, forest.right])
        if (
            any(len(array) != len(nodes) for array in arrays[1:])
            or (children >= len(nodes)).any()
            or (children[:, ~leaf] <= nodes[~leaf]).any()
            or (forest.right[leaf] != nodes[leaf]).any()
            or not ((forest.roots >= 0) & (forest.roots < max(len(nodes), 1))).all()
            or (forest.feature < 0).any()
            or (forest.feature >= num_features).any()
        ):
            raise ValueError(f"the trees {prefix!r} are damaged")
        return forest


def forests_in(tensors: State, num_features: int) -> dict[str, Forest]:
    """All forests of a weight file by their prefixes; see :meth:`Forest.from_tensors`."""
    names = [name.removesuffix(".roots") for name in tensors if name.endswith(".roots")]
    return {name: Forest.from_tensors(tensors, name, num_features) for name in names}


def tensors_of(forests: Mapping[str, Forest]) -> State:
    """The inverse of :func:`forests_in`."""
    return {name: tensor for prefix, forest in forests.items() for name, tensor in forest.tensors(prefix).items()}


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
    nodes, first, leaf = np.arange(sum(lengths)), np.repeat(roots, lengths), of["leaf"]
    return Forest(
        roots=roots.astype(np.int32),
        feature=of["feature"].astype(np.int16),
        threshold=np.where(leaf, 0, of["threshold"]).astype(np.float32),
        left=np.where(leaf, nodes, of["left"].astype(np.int64) + first).astype(np.int32),
        right=np.where(leaf, nodes, of["right"].astype(np.int64) + first).astype(np.int32),
        value=of["value"].astype(np.float32),
        base=base,
    )
