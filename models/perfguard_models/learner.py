"""Interface of a fitted learner: it predicts the cost of steps from arrays of features."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from perfguard_models.features import Arrays, FeatureSet
from perfguard_models.features.step import STEP_FEATURES

TARGETS = ("memory", "time", "gpu_util", "sm_active")
"""Predicted quantities. Memory and time are logarithms of bytes and seconds, utilisation is the logit of a share."""
Predicted = dict[str, npt.NDArray[np.float64]]
"""Predictions for each step by target: log bytes, log seconds, or the logit of a share. NaN: no prediction.

Of an ensemble, "spread TARGET" is the standard deviation between its members."""
State = dict[str, torch.Tensor]
"""Fitted parameters as named tensors, for a weight file."""


class Example(Protocol):
    """A step on a device, as a learner reads it."""

    @property
    def is_single(self) -> bool:
        """Whether it is one operator, measured alone."""

    @property
    def view(self) -> Arrays:
        """Features of the step."""


class Step(NamedTuple):
    """An :class:`Example` without a measurement."""

    is_single: bool
    view: Arrays


class Learner(Protocol):
    """A fitted predictor of steps. All of it is in `state`; the rest follows from its constructor's arguments."""

    name: ClassVar[str]
    views: ClassVar[tuple[FeatureSet, ...]]
    """The features that it reads."""

    def predict(self, runs: Sequence[Example]) -> Predicted:
        """Predicted cost of ``runs``."""

    def state(self) -> tuple[State, Mapping[str, Any]]:
        """The tensors, and what else (JSON) is needed to make them a predictor again."""

    @classmethod
    def from_state(cls, tensors: State, settings: Mapping[str, Any]) -> Learner:
        """The inverse of :meth:`state`.

        Raises:
            KeyError, ValueError, RuntimeError: if they do not belong together.
        """


def share_of(logit: float) -> float:
    """The share, 0 to 1, that utilisation's ``logit`` stands for."""
    return 1 / (1 + math.exp(-logit))


def sums_table(runs: Sequence[Example]) -> npt.NDArray[np.float32]:
    """The sums of each step. Shape: (n, len(STEP_FEATURES))."""
    return np.stack([run.view["sums"] for run in runs])


def column(runs: Sequence[Example], name: str) -> npt.NDArray[np.float64]:
    """One of the sums. Shape: (n,)."""
    return np.array([run.view["sums"][STEP_FEATURES.index(name)] for run in runs], dtype=np.float64)
