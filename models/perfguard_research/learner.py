"""The interface of learners, which are fitted to measured runs, and helpers for every fit."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch

from perfguard_models.learner import Learner
from perfguard_research.dataset import Run

OnEpoch = Callable[[int, int, float], None]
"""Called now and then while fitting, with what is done, of how much, and the loss."""


class Trainable(Learner, Protocol):
    """A learner that can be fitted."""

    tables: ClassVar[tuple[str, ...]]
    """Kinds of table that it is fitted to and evaluated on."""

    def fit(self, runs: Sequence[Run], *, on_epoch: OnEpoch | None = None, checkpoint: Path | None = None) -> None:
        """Learn from ``runs``; ``on_epoch(done, of, loss)`` is called now and then. With a ``checkpoint``, a fit of the same runs
        that was interrupted goes on where it was."""


def labels_of(runs: Sequence[Run], target: str) -> npt.NDArray[np.float64]:
    """The labels of one target, NaN where there is none. Shape: (len(runs),)."""
    return np.array([run.labels.get(target, np.nan) for run in runs], dtype=np.float64)


class Epochs:
    """Epochs of one training, kept in a file after each of them.

    Args:
        number: how many.
        path: the file. None: nothing is kept.
        identity: identifies the training. The file of another training is not read.
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
    """Cache key of a training: the learner, its settings and the runs."""
    digest = hashlib.sha256(repr((name, sorted(settings.items()))).encode())
    for run in runs:
        digest.update(repr((run.structure, run.gpu, run.batch_size, run.fits, sorted(run.labels.items()))).encode())
    return digest.hexdigest()


def shuffled(number: int, seed: int, epoch: int) -> list[int]:
    """The order of an epoch; the same whether the epochs before it ran in this process or not."""
    order = list(range(number))
    random.Random(seed * 1_000_003 + epoch).shuffle(order)
    return order
