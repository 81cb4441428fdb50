"""What every predictor of a table is: something that is fitted to runs, and then says what others cost."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from perfguard_models.dataset import Run

Predicted = dict[str, npt.NDArray[np.float64]]
"""For each target, its prediction for each run: log bytes, log seconds, or the logit of a share. NaN: cannot say."""
State = dict[str, torch.Tensor]
"""What was learnt, as named tensors: what a weight file holds."""


@runtime_checkable
class Ensemble(Protocol):
    """A learner that has several members."""

    def parts(self, runs: Sequence[Run]) -> list[Predicted]:
        """What each member says."""

    def combine(self, parts: Sequence[Predicted], runs: Sequence[Run]) -> Predicted:
        """What they say together."""


OnEpoch = Callable[[int, int, float], None]


class Learner(Protocol):
    """A predictor before and after it was fitted. All of it is in `state`; the rest follows from its constructor's arguments."""

    name: ClassVar[str]
    views: ClassVar[tuple[str, ...]]
    """What it reads, of `perfguard_models.dataset.VIEWS`."""
    tables: ClassVar[tuple[str, ...]]
    """Kinds of table that it learns from and is judged on."""

    def fit(self, runs: Sequence[Run], *, on_epoch: OnEpoch | None = None, checkpoint: Path | None = None) -> None:
        """Learn from ``runs``; ``on_epoch(done, of, loss)`` is called now and then. With a ``checkpoint``, a fit of the same runs
        that was interrupted goes on where it was."""

    def predict(self, runs: Sequence[Run]) -> Predicted:
        """What ``runs`` cost. Labels are not looked at."""

    def state(self) -> tuple[State, Mapping[str, Any]]:
        """The tensors, and what else (JSON) is needed to make them a predictor again."""

    @classmethod
    def from_state(cls, tensors: State, settings: Mapping[str, Any]) -> Learner:
        """The inverse of :meth:`state`.

        Raises:
            KeyError, ValueError, RuntimeError: if they do not belong together.
        """


def predict_with_spread(learner: Learner, runs: Sequence[Run]) -> tuple[Predicted, Predicted]:
    """What ``runs`` cost, and for each target the standard deviation between the learner's members; 0 where it has one."""
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


def labels_of(runs: Sequence[Run], target: str) -> npt.NDArray[np.float64]:
    """The labels of one target, NaN where there is none. Shape: (len(runs),)."""
    return np.array([run.labels.get(target, np.nan) for run in runs], dtype=np.float64)


class Epochs:
    """Epochs of one training, kept in a file after each of them.

    Args:
        number: how many.
        path: the file; None: nothing is kept.
        identity: whose training it is; another's file is not read.
        parts: what changes while training, with `state_dict` and `load_state_dict`.
    """

    def __init__(self, number: int, path: Path | None, identity: str, **parts: Any) -> None:
        self._number = number
        self._path = path
        self._identity = identity
        self._parts = parts

    def __iter__(self) -> Iterator[int]:
        first = 0
        if self._path is not None and self._path.is_file():
            stored = torch.load(self._path, weights_only=True)
            if stored["identity"] == self._identity:
                first = stored["done"]
                torch.set_rng_state(stored["random"])
                for name, part in self._parts.items():
                    part.load_state_dict(stored[name])
        for epoch in range(first, self._number):
            yield epoch
            if self._path is not None:
                states = {name: part.state_dict() for name, part in self._parts.items()}
                partial = self._path.with_suffix(".part")
                torch.save({"identity": self._identity, "done": epoch + 1, "random": torch.get_rng_state(), **states}, partial)
                partial.replace(self._path)


def identity_of(name: str, settings: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """Whose training it is: the learner's and its settings', on these runs."""
    digest = hashlib.sha256(repr((name, sorted(settings.items()))).encode())
    for run in runs:
        digest.update(repr((run.structure, run.gpu, run.batch_size, run.fits, sorted(run.labels.items()))).encode())
    return digest.hexdigest()


def shuffled(number: int, seed: int, epoch: int) -> list[int]:
    """The order of an epoch; the same whether the epochs before it ran in this process or not."""
    order = list(range(number))
    random.Random(seed * 1_000_003 + epoch).shuffle(order)
    return order
