"""Interface of a fitted learner: it predicts the cost of steps from arrays of features."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from perfguard_models.features.step import STEP_FEATURES

Arrays = dict[str, npt.NDArray[Any]]
"""The features of one step on one device, by name."""
TARGETS = ("memory", "time", "gpu_util", "sm_active")
"""Predicted quantities. Memory and time are logarithms of bytes and seconds, utilisation is the logit of a share."""
Predicted = dict[str, npt.NDArray[np.float64]]
"""Predictions for each step by target: log bytes, log seconds, or the logit of a share. NaN: no prediction."""
State = dict[str, torch.Tensor]
"""Fitted parameters as named tensors, for a weight file."""


class Example(Protocol):
    """A step on a device, as a learner reads it."""

    @property
    def gpu(self) -> str:
        """The id of the device."""

    @property
    def is_single(self) -> bool:
        """Whether it is one operator, measured alone."""

    @property
    def view(self) -> Arrays:
        """Features of the step."""


class Step(NamedTuple):
    """An :class:`Example` without a measurement."""

    gpu: str
    is_single: bool
    view: Arrays


@runtime_checkable
class Ensemble(Protocol):
    """A learner that has several members."""

    def parts(self, runs: Sequence[Example]) -> list[Predicted]:
        """The prediction of each member."""

    def combine(self, parts: Sequence[Predicted], runs: Sequence[Example]) -> Predicted:
        """The prediction of all members together."""


class Learner(Protocol):
    """A fitted predictor of steps. All of it is in `state`; the rest follows from its constructor's arguments."""

    name: ClassVar[str]
    views: ClassVar[tuple[str, ...]]
    """The features that it reads, by the names of :data:`perfguard_models.trained.FEATURE_SETS`."""

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


def predict_with_spread(learner: Learner, runs: Sequence[Example]) -> tuple[Predicted, Predicted]:
    """Predicted cost of ``runs``, and for each target the standard deviation between the learner's members; 0 for one member."""
    if not isinstance(learner, Ensemble):
        predicted = learner.predict(runs)
        return predicted, {target: np.zeros(len(runs)) for target in predicted}
    members = learner.parts(runs)
    predicted = learner.combine(members, runs)
    spread: Predicted = {}
    for target in predicted:
        values = np.stack([member[target] for member in members])
        known = np.isfinite(values)
        number = np.maximum(known.sum(0), 1)
        mean = np.where(known, values, 0).sum(0) / number
        spread[target] = np.sqrt((np.where(known, values - mean, 0) ** 2).sum(0) / number)
    return predicted, spread


def share_of(logit: float) -> float:
    """The share, 0 to 1, that utilisation's ``logit`` stands for."""
    return 1 / (1 + math.exp(-logit))


def sums_table(runs: Sequence[Example]) -> npt.NDArray[np.float32]:
    """The sums of each step. Shape: (n, len(STEP_FEATURES))."""
    return np.stack([run.view["sums"] for run in runs])


def column(runs: Sequence[Example], name: str) -> npt.NDArray[np.float64]:
    """One of the sums. Shape: (n,)."""
    return np.array([run.view["sums"][STEP_FEATURES.index(name)] for run in runs], dtype=np.float64)
