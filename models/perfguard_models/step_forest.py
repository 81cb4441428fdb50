"""Boosted trees that predict the time of a step from its sums, and are monotone.

They read how many seconds of roofline a step spends on each kind of operator, how many operators it has, and the device's
figures. More seconds or more operators never take less time, and a better figure never takes more. So for the same operators, a
larger batch, one more layer or a weaker device never cost less. Columns that may fall for a larger step are left out, for
instance the share of products with few rows.

The trees correct a start. It grows as the square root of a rough time, because larger steps are more efficient. Beyond the
steps that were measured it grows in proportion.

Shapes: n steps.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from perfguard_models.features.step import STEP_FEATURES
from perfguard_models.learner import State
from perfguard_models.trees import Forest

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
_PREFIX = "forest"
_VERSION = list(hashlib.sha256(repr(DIRECTIONS).encode()).digest()[:8])


class StepForest(NamedTuple):
    """The trees, and the range in which they were fitted."""

    forest: Forest
    largest: float
    """Log seconds: the rough time up to which steps were measured."""

    def predict(self, sums: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """Log seconds of steps with these sums, (n, len(STEP_FEATURES)). Shape: (n,)."""
        return self.forest.predict(forest_columns(sums)) + start_of(sums, self.largest)

    def tensors(self) -> State:
        """Tensors for a weight file."""
        own = {"largest": torch.tensor([self.largest], dtype=torch.float64), "columns": torch.tensor(_VERSION)}
        return self.forest.tensors(_PREFIX) | {f"{_PREFIX}.{name}": value for name, value in own.items()}

    @staticmethod
    def from_tensors(tensors: State) -> StepForest | None:
        """The inverse of :meth:`tensors`; None: there are no trees.

        Raises:
            KeyError: if one tensor is missing.
            ValueError: if they are damaged, or read other columns.
        """
        if f"{_PREFIX}.columns" not in tensors:
            return None
        found = StepForest(Forest.from_tensors(tensors, _PREFIX, len(DIRECTIONS)), float(tensors[f"{_PREFIX}.largest"][0]))
        if tensors[f"{_PREFIX}.columns"].tolist() != _VERSION or not math.isfinite(found.largest):
            raise ValueError("the trees of step times read other columns, or are damaged")
        return found


def forest_columns(sums: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """What the trees read of steps with these sums, in the order of DIRECTIONS. Shape: (n, len(DIRECTIONS))."""
    columns = sums[:, _PLACE].astype(np.float64)
    seconds = columns[:, : len(_SECONDS)]
    seconds[:] = np.round(np.log(np.maximum(seconds, _LEAST_SHARE)) + sums[:, [_ROOFLINE]], _DECIMALS)
    return columns.astype(np.float32)


def rough_time(sums: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Log seconds of a rough time of steps with these sums. Shape: (n,)."""
    columns = sums[:, [_ROOFLINE, _OPERATORS]].astype(np.float64) + np.log([_ROOFLINES, _OPERATOR_S])
    return np.asarray(np.logaddexp(*columns.T))


def start_of(sums: npt.NDArray[np.float32], largest: float) -> npt.NDArray[np.float64]:
    """The log time that the trees correct: half of the rough log time, and all of what is beyond ``largest``. Shape: (n,)."""
    rough = rough_time(sums)
    return np.asarray(np.minimum(rough, largest) / 2 + np.maximum(rough - largest, 0))
