"""A fitted learner on disk: PATH.safetensors with its tensors, PATH.json with its card and its calibration."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from perfguard.devices import Device
from perfguard.exceptions import PredictorError
from perfguard.graph import OP_KINDS, OpGraph
from perfguard_models.calibration import Calibration
from perfguard_models.features import features_of
from perfguard_models.learner import Learner, Step
from perfguard_models.memory_forest import MemoryForest
from perfguard_models.setting import Setting
from perfguard_models.step_time import StepTime
from perfguard_models.weight_files import check_made_for, fitting, read_pair, write_pair

FORMAT = 1
CPU_PREFIX = "cpu-"
"""Begins the names of weights for CPUs."""


class FittedModel(NamedTuple):
    """A fitted learner, its card and its calibration."""

    learner: Learner
    card: dict[str, Any]
    calibration: Calibration


def learner_class(name: str) -> type[Learner]:
    """The one of GuardNet's learners that is called ``name``.

    Raises:
        PredictorError: if there is none.
    """
    learners: dict[str, type[Learner]] = {MemoryForest.name: MemoryForest, StepTime.name: StepTime}
    if name not in learners:
        raise PredictorError(
            f"GuardNet has no learner {name!r}, only {', '.join(learners)}. These are another predictor's weights."
        )
    return learners[name]


def write_trained(out: Path, name: str, learner: Learner, card: dict[str, Any], calibration: Calibration) -> None:
    """Write OUT.safetensors, and OUT.json: the card, with the hash that binds it to the tensors."""
    tensors, settings = learner.state()
    document = {
        "format": FORMAT,
        "predictor": name,
        "settings": dict(settings),
        "columns": columns_of(learner),
        "calibration": {"floor": dict(calibration.floor), "scale": dict(calibration.scale)},
        **card,
    }
    write_pair(out, tensors, document)


def columns_of(learner: Learner) -> str:
    """A hash of the names of all columns that the learner reads: weights for others would read nonsense."""
    read = [view.columns for view in learner.views], OP_KINDS
    return hashlib.sha256(repr(read).encode()).hexdigest()[:16]


def read_trained(path: Path, *, learner_of: Callable[[str], type[Learner]] = learner_class) -> FittedModel:
    """Read what :func:`write_trained` wrote: PATH.safetensors and PATH.json. ``learner_of`` gives the class for a name.

    Raises:
        PredictorError: if a file is missing, damaged, of another version, or they do not belong together.
    """
    mend = "perfguard train TABLE --predictor NAME --out DIR"
    tensors, card = read_pair(path, mend=mend, made_for={"format": FORMAT})
    with fitting(f"The weights {path.name!r}"):
        learner = learner_of(card["predictor"]).from_state(tensors, card["settings"])
        calibration = Calibration(card["calibration"]["floor"], card["calibration"]["scale"])
    check_made_for(card, path.name, {"columns": columns_of(learner)})
    return FittedModel(learner, card, calibration)


def step_of(learner: Learner, graph: OpGraph, device: Device) -> Step:
    """Return ``graph`` on ``device`` with the features that ``learner`` reads."""
    return Step(Setting.of(graph, device).is_single, features_of(learner.views, graph, device))
