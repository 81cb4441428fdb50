"""Boosted trees beside the network: those of memory, and those of step times.

Scikit-learn trains them (`perfguard_research.trees`), safetensors keep them, and numpy walks them.

**Memory** (:class:`MemoryForest`). Trees on step features correct the replay of the allocator. The features describe the whole
step, and the replay's peaks with each of cuDNN's algorithms. On GPUs, the training rows were measured with cuDNN's benchmark mode
on, which leaves workspaces in the allocator's cache. For perceptrons the trees also predict utilisation. On CPUs the trees
correct the bytes that are alive, because the C library keeps what was freed.

**Time** (:class:`StepForest`). Trees read how many seconds of roofline a step spends on each kind of operator, how many operators
it has, and the device's figures. More seconds or more operators never take less time, and a better figure never takes more. So
for the same operators, a larger batch, one more layer or a weaker device never cost less. Columns that may fall for a larger step
are left out, for instance the share of products with few rows.

The trees of times correct a start. It grows as the square root of a rough time, because larger steps are more efficient. Beyond
the steps that were measured it grows in proportion.

Shapes: n steps.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from perfguard_models.features import FeatureSet
from perfguard_models.features.step import STEP_FEATURES, SUMS
from perfguard_models.learner import Example, Floats, Predicted, State, column, sums_table

FIELDS = ("roots", "feature", "threshold", "left", "right", "value")
LIMIT = "limit"
"""Forests of memory, fitted only to whether a step fitted a card or ran out of memory."""
PREDICTED = ("memory", "gpu_util", "sm_active")
_ROWS_AT_ONCE = 1024
_TIMES = [name for name in STEP_FEATURES if name.startswith("time_")]
_SECONDS = dict.fromkeys((*_TIMES, "traffic_share", "matrix_traffic_share"), 1)
"""Shares of the roofline. The trees read them as log seconds."""
_SIZES = dict.fromkeys(("log_roofline", "log_operators", "train"), 1)
_FIGURES = dict.fromkeys(("log_bandwidth", "log_device_flops", "log_matrix_flops", "log_sms", "log_l2", "log_clock"), -1)
_SWITCHES = dict.fromkeys(("half", "nhwc", "compiled"), 0)
DIRECTIONS = _SECONDS | _SIZES | _FIGURES | _SWITCHES
"""What the trees read, in order. 1: more never takes less time. -1: more never takes more time. 0: either."""
_PLACE = [STEP_FEATURES.index(name) for name in DIRECTIONS]
_ROOFLINE, _OPERATORS = (STEP_FEATURES.index(name) for name in ("log_roofline", "log_operators"))
_LEAST_SHARE = 1e-6
_DECIMALS = 3
"""Of log seconds. Equal seconds are equal then, although shares of other totals round differently."""
_ROOFLINES, _OPERATOR_S = 1.5, 1e-5
"""A rough time: one and a half times the roofline, and ten microseconds for each operator."""
VERSION = list(hashlib.sha256(repr(DIRECTIONS).encode()).digest()[:8])
"""Identifies the columns in a weight file."""


class Forest(NamedTuple):
    """A sum of trees. Node i is a leaf if ``left[i] == i``; elsewhere a row goes left if its feature is at most the threshold."""

    roots: npt.NDArray[np.int32]  # shape: (trees,)
    feature: npt.NDArray[np.int16]  # shape: (nodes,)
    threshold: npt.NDArray[np.float32]
    left: npt.NDArray[np.int32]
    right: npt.NDArray[np.int32]
    value: npt.NDArray[np.float32]
    base: float

    def predict(self, x: npt.NDArray[Any]) -> Floats:
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

    @staticmethod
    def from_tensors(tensors: State, prefix: str, num_features: int) -> Forest:
        """The forest of a weight file, for rows of so many features.

        Raises:
            KeyError: if one is missing.
            ValueError: if an index would lead outside, or round in a circle.
        """
        arrays = [tensors[f"{prefix}.{field}"].numpy() for field in FIELDS]
        forest = Forest(**dict(zip(FIELDS, arrays, strict=True)), base=float(tensors[f"{prefix}.base"][0]))
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


class MemoryForest:
    """Trees of memory, a forest for each quantity and member of the ensemble.

    Args:
        forests: how many members there are.
        training: what else it was trained with.
    """

    name: ClassVar[str] = "memory-forest"
    views: ClassVar[tuple[FeatureSet, ...]] = (SUMS,)

    def __init__(self, *, forests: int, **training: Any) -> None:
        self.settings: dict[str, Any] = {"forests": forests, **training}
        self.forests: dict[str, Forest] = {}
        """By the quantity and the number of the member, as in "memory0"."""
        self.constant = 0.0

    def start(self, runs: Sequence[Example], target: str) -> Floats:
        """Physics, to which the trees add their corrections. Shape: (n,)."""
        physics = {"memory": "log_reserved", LIMIT: "log_live"}
        return np.log(np.exp(column(runs, physics[target])) + self.constant) if target in physics else np.zeros(len(runs))

    def predict(self, runs: Sequence[Example]) -> Predicted:
        """See :class:`perfguard_models.learner.Learner`. The mean of the members."""
        of = {target: self._members(target, runs) for target in (*PREDICTED, LIMIT)}
        limited = of.pop(LIMIT)
        # Where memory was measured it was in float32; half precision was only ever bracketed.
        use = ((column(runs, "half") > 0) & ~np.isnan(limited)) | np.isnan(of["memory"])
        of["memory"] = np.where(use, limited, of["memory"])
        spreads = {f"spread {target}": members.std(0) for target, members in of.items()}
        return {target: members.mean(0) for target, members in of.items()} | spreads | {"time": np.full(len(runs), np.nan)}

    def _members(self, target: str, runs: Sequence[Example]) -> Floats:
        """What each member predicts: NaN without such trees, and for single operators, because the trees were fitted to whole
        steps. Shape: (members, n)."""
        names = [f"{target}{member}" for member in range(self.settings["forests"])]
        found = np.full((len(names), len(runs)), np.nan)
        whole = [at for at, run in enumerate(runs) if not run.is_single]
        if whole and names[0] in self.forests:
            sums = sums_table([runs[at] for at in whole])
            found[:, whole] = np.stack([self.forests[name].predict(sums) for name in names])
        return found + self.start(runs, target)

    @classmethod
    def from_state(cls, tensors: State, settings: Mapping[str, Any]) -> MemoryForest:
        """See :class:`perfguard_models.learner.Learner`."""
        made = cls(**settings)
        made.constant = float(tensors["constant"][0])
        made.forests = forests_in(tensors, len(STEP_FEATURES))
        return made


class StepForest(NamedTuple):
    """The trees, and the range in which they were fitted."""

    forest: Forest
    largest: float
    """Log seconds: the rough time up to which steps were measured."""

    def predict(self, sums: npt.NDArray[np.float32]) -> Floats:
        """Log seconds of steps with these sums, (n, len(STEP_FEATURES)). Shape: (n,)."""
        return self.forest.predict(forest_columns(sums)) + start_of(sums, self.largest)

    @staticmethod
    def from_tensors(tensors: State) -> StepForest | None:
        """The trees of a weight file; None: there are none.

        Raises:
            KeyError: if one tensor is missing.
            ValueError: if they are damaged, or read other columns.
        """
        if "forest.columns" not in tensors:
            return None
        found = StepForest(Forest.from_tensors(tensors, "forest", len(DIRECTIONS)), float(tensors["forest.largest"][0]))
        if tensors["forest.columns"].tolist() != VERSION or not math.isfinite(found.largest):
            raise ValueError("the trees of step times read other columns, or are damaged")
        return found


def forest_columns(sums: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """What the trees read of steps with these sums, in the order of DIRECTIONS. Shape: (n, len(DIRECTIONS))."""
    columns = sums[:, _PLACE].astype(np.float64)
    seconds = columns[:, : len(_SECONDS)]
    seconds[:] = np.round(np.log(np.maximum(seconds, _LEAST_SHARE)) + sums[:, [_ROOFLINE]], _DECIMALS)
    return columns.astype(np.float32)


def rough_time(sums: npt.NDArray[np.float32]) -> Floats:
    """Log seconds of a rough time of steps with these sums. Shape: (n,)."""
    columns = sums[:, [_ROOFLINE, _OPERATORS]].astype(np.float64) + np.log([_ROOFLINES, _OPERATOR_S])
    return np.asarray(np.logaddexp(*columns.T))


def start_of(sums: npt.NDArray[np.float32], largest: float) -> Floats:
    """The log time that the trees correct: half of the rough log time, and all of what is beyond ``largest``. Shape: (n,)."""
    rough = rough_time(sums)
    return np.asarray(np.minimum(rough, largest) / 2 + np.maximum(rough - largest, 0))
