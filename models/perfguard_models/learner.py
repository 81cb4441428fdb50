"""A fitted learner: it predicts the cost of steps from arrays of features, and is read from two files.

PATH.safetensors has its tensors, PATH.json its card and its calibration. A hash in the card binds both. Nothing is unpickled.
`perfguard_research.learners` writes them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load

from perfguard.devices import Device
from perfguard.exceptions import PredictorError
from perfguard.graph import OP_KINDS, OpGraph
from perfguard_models.calibration import Calibration, Setting
from perfguard_models.features import Arrays, FeatureSet, features_of
from perfguard_models.features.step import STEP_FEATURES

FORMAT = 1
LARGEST_BYTES = 64 * 2**20
CPU_PREFIX = "cpu-"
"""Begins the names of weights for CPUs."""
Floats = npt.NDArray[np.float64]
QUANTITIES = ("memory", "time", "gpu_util", "sm_active")
"""Predicted quantities. Memory and time are logarithms of bytes and seconds, utilisation is the logit of a share."""
Predicted = dict[str, Floats]
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
    """A fitted predictor of steps."""

    name: ClassVar[str]
    views: ClassVar[tuple[FeatureSet, ...]]
    """The features that it reads."""

    def predict(self, runs: Sequence[Example]) -> Predicted:
        """Predicted cost of ``runs``."""

    @classmethod
    def from_state(cls, tensors: State, settings: Mapping[str, Any]) -> Learner:
        """The learner whose tensors and settings (JSON) these are.

        Raises:
            KeyError, ValueError, RuntimeError: if they do not belong together.
        """


def share_of(logit: float) -> float:
    """The share, 0 to 1, that utilisation's ``logit`` stands for."""
    return 1 / (1 + math.exp(-logit))


def sums_table(runs: Sequence[Example]) -> npt.NDArray[np.float32]:
    """The sums of each step. Shape: (n, len(STEP_FEATURES))."""
    return np.stack([run.view["sums"] for run in runs])


def column(runs: Sequence[Example], name: str) -> Floats:
    """One of the sums. Shape: (n,)."""
    return np.array([run.view["sums"][STEP_FEATURES.index(name)] for run in runs], dtype=np.float64)


# Files


class FittedModel(NamedTuple):
    """A fitted learner, its card and its calibration."""

    learner: Learner
    card: dict[str, Any]
    calibration: Calibration

    @property
    def version(self) -> str:
        """It differs for other tensors, another card or another calibration."""
        return hashlib.sha256(json.dumps(self.card, sort_keys=True).encode()).hexdigest()

    def step(self, graph: OpGraph, device: Device) -> Step:
        """``graph`` on ``device`` with the features that the learner reads."""
        return Step(Setting.of(graph, device).is_single, features_of(self.learner.views, graph, device))


def columns_of(learner: Learner) -> str:
    """A hash of the names of all columns that the learner reads: weights for others would read nonsense."""
    read = [view.columns for view in learner.views], OP_KINDS
    return hashlib.sha256(repr(read).encode()).hexdigest()[:16]


def read_trained(path: Path, learner_of: Callable[[str], type[Learner]]) -> FittedModel:
    """Read PATH.safetensors and PATH.json. ``learner_of`` gives the class for a learner's name.

    Raises:
        PredictorError: if a file is missing, damaged, of another version, or they do not belong together.
    """
    hint = "perfguard train TABLE --predictor NAME --out DIR"
    tensors, card = read_pair(path, hint=hint, made_for={"format": FORMAT})
    with fitting(f"The weights {path.name!r}"):
        learner = learner_of(card["predictor"]).from_state(tensors, card["settings"])
        calibration = Calibration(card["calibration"]["floor"], card["calibration"]["scale"])
    check_made_for(card, path.name, {"columns": columns_of(learner)})
    return FittedModel(learner, card, calibration)


def read_pair(path: Path, *, hint: str, made_for: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of PATH.safetensors by name, and the card PATH.json.

    Args:
        path: of both files, without suffix.
        hint: the command that makes them again, for messages.
        made_for: what the card must have, because the code depends on it.

    Raises:
        PredictorError: if one cannot be read, was made for other code, or they do not belong together.
    """
    try:
        data = Path(f"{path}.safetensors").read_bytes()
        card = json.loads(Path(f"{path}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PredictorError(
            f"The weights {path.name!r} cannot be read: {error}. Reinstall perfguard, or train them again with `{hint}`."
        ) from error
    check_made_for(card, path.name, made_for)
    if len(data) > LARGEST_BYTES or card.get("sha256") != hashlib.sha256(data).hexdigest():
        raise PredictorError(f"The weights {path.name!r} do not match the hash in their card; the file is damaged or exchanged.")
    with fitting(f"The weights {path.name!r}"):
        return load(data), card


def check_made_for(card: Any, name: str, made_for: Mapping[str, Any]) -> None:
    """Raises PredictorError unless the card of the weights ``name`` has all that is in ``made_for``."""
    others = [key for key, value in made_for.items() if not isinstance(card, dict) or card.get(key) != value]
    if others:
        raise PredictorError(
            f"The weights {name!r} were made for another version of PerfGuard: their card has another {others[0]!r}. "
            "Train them again with this version."
        )


@contextmanager
def fitting(what: str) -> Iterator[None]:
    """Whatever tensors and settings raise that do not fit the code becomes a PredictorError about ``what``."""
    try:
        yield
    except (SafetensorError, RuntimeError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise PredictorError(f"{what} do not fit the predictor: {type(error).__name__}: {error}") from error
