"""GuardNet's memory: boosted trees on step features correct the replay of the allocator.

The features describe the whole step, and the replay's peaks with each of cuDNN's algorithms. On GPUs, the training rows were
measured with cuDNN's benchmark mode on, which leaves workspaces in the allocator's cache. For perceptrons the trees also predict
utilisation. On CPUs the trees correct the bytes that are alive, because the C library keeps what was freed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from perfguard_models.features import FeatureSet
from perfguard_models.features.step import STEP_FEATURES, SUMS
from perfguard_models.learner import Example, Predicted, State, column, sums_table
from perfguard_models.trees import Forest, forests_in, tensors_of

LIMIT = "limit"
"""Forests of memory, fitted only to whether a step fitted a card or ran out of memory."""
PREDICTED = ("memory", "gpu_util", "sm_active")


class MemoryForest:
    """See the module's docstring.

    Args:
        forests: how many forests for each quantity.
        trees: of each forest.
        learning_rate: of the trees.
        seed: the first one.
    """

    name: ClassVar[str] = "memory-forest"
    views: ClassVar[tuple[FeatureSet, ...]] = (SUMS,)

    def __init__(self, *, forests: int = 2, trees: int = 400, learning_rate: float = 0.05, seed: int = 0) -> None:
        self.settings: dict[str, Any] = {"forests": forests, "trees": trees, "learning_rate": learning_rate, "seed": seed}
        self.forests: dict[str, Forest] = {}
        """By the quantity and the number of the member, as in "memory0"."""
        self.constant = 0.0

    def start(self, runs: Sequence[Example], target: str) -> npt.NDArray[np.float64]:
        """Physics, to which the trees add their corrections. Shape: (len(runs),)."""
        if target == LIMIT:
            return np.log(np.exp(column(runs, "log_live")) + self.constant)
        if target == "memory":
            return np.log(np.exp(column(runs, "log_reserved")) + self.constant)
        return np.zeros(len(runs))

    def predict(self, runs: Sequence[Example]) -> Predicted:
        """See :class:`perfguard_models.learner.Learner`. The mean of the forests."""
        members = [self._member(index, runs) for index in range(self.settings["forests"])]
        values = {target: np.stack([member[target] for member in members]) for target in members[0]}
        unknown = {"time": np.full(len(runs), np.nan)}
        means = {target: both.mean(0) for target, both in values.items()}
        return means | unknown | {f"spread {target}": both.std(0) for target, both in values.items()}

    def _member(self, index: int, runs: Sequence[Example]) -> Predicted:
        """The predictions of one forest of each quantity."""
        found = {target: self._forest(target, index, runs) + self.start(runs, target) for target in (*PREDICTED, LIMIT)}
        memory, limited = found["memory"], found.pop(LIMIT)
        # Where memory was measured it was in float32; half precision was only ever bracketed.
        use = ((column(runs, "half") > 0) & ~np.isnan(limited)) | np.isnan(memory)
        return found | {"memory": np.where(use, limited, memory)}

    def _forest(self, name: str, index: int, runs: Sequence[Example]) -> npt.NDArray[np.float64]:
        """NaN for single operators, because the forests were fitted to whole steps."""
        found = np.full(len(runs), np.nan)
        whole = [at for at, run in enumerate(runs) if not run.is_single]
        if f"{name}{index}" in self.forests and whole:
            found[whole] = self.forests[f"{name}{index}"].predict(sums_table([runs[at] for at in whole]))
        return found

    def state(self) -> tuple[State, Mapping[str, Any]]:
        """See :class:`perfguard_models.learner.Learner`."""
        constant = torch.tensor([self.constant], dtype=torch.float64)
        return {"constant": constant} | tensors_of(self.forests), self.settings

    @classmethod
    def from_state(cls, tensors: State, settings: Mapping[str, Any]) -> MemoryForest:
        """See :class:`perfguard_models.learner.Learner`."""
        made = cls(**settings)
        made.constant = float(tensors["constant"][0])
        made.forests = forests_in(tensors, len(STEP_FEATURES))
        return made
