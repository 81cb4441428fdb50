"""A fitted learner on disk: PATH.safetensors with its tensors, PATH.json with its card and its calibration."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from perfguard.exceptions import PredictorError
from perfguard.graph import OP_KINDS, OpGraph
from perfguard_models.calibration import Calibration
from perfguard_models.features import launches, step
from perfguard_models.learner import Arrays, Learner, Step
from perfguard_models.memory_forest import MemoryForest
from perfguard_models.setting import is_single
from perfguard_models.step_time import StepTime
from perfguard_models.weight_files import check_hash, read_pair, write_pair

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from perfguard.devices import Device

FORMAT = 1
CPU_PREFIX = "cpu-"
"""Begins the names of weights for CPUs."""


class FeatureSet(NamedTuple):
    """Features of steps that a learner may read."""

    columns: object
    """The names of all its columns, in their order. Weights that were fitted to other columns are refused."""
    compute: Callable[[OpGraph, Device], Arrays]
    """Computes the features of a graph on a device."""


FEATURE_SETS: Mapping[str, FeatureSet] = {
    "launches": FeatureSet((launches.COLUMNS, launches.NAMES, launches.DEVICE_COLUMNS, launches.EDGE_COLUMNS), launches.launches),
    "sums": FeatureSet(step.STEP_FEATURES, lambda graph, device: {"sums": step.step_features(graph, device)}),
}
"""Feature sets of GuardNet's learners by name."""
LEARNERS: Mapping[str, type[Learner]] = {learner.name: learner for learner in (MemoryForest, StepTime)}
"""GuardNet's learners, by name."""


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
    if name not in LEARNERS:
        raise PredictorError(
            f"GuardNet has no learner {name!r}, only {', '.join(LEARNERS)}. These are another predictor's weights."
        )
    return LEARNERS[name]


def write_trained(
    out: Path,
    name: str,
    learner: Learner,
    card: dict[str, Any],
    calibration: Calibration,
    *,
    feature_sets: Mapping[str, FeatureSet] = FEATURE_SETS,
) -> None:
    """Write OUT.safetensors, and OUT.json: the card, with the hash that binds it to the tensors."""
    tensors, settings = learner.state()
    document = {
        "format": FORMAT,
        "predictor": name,
        "settings": dict(settings),
        "columns": columns_of(learner, feature_sets),
        "calibration": {"floor": dict(calibration.floor), "scale": dict(calibration.scale)},
        **card,
    }
    write_pair(out, tensors, document)


def columns_of(learner: Learner, feature_sets: Mapping[str, FeatureSet] = FEATURE_SETS) -> str:
    """A hash of the names of all columns that the learner reads: weights for others would read nonsense."""
    read = [feature_sets[view].columns for view in learner.views], OP_KINDS
    return hashlib.sha256(repr(read).encode()).hexdigest()[:16]


def read_trained(
    tensors_file: Traversable,
    card_file: Traversable,
    name: str,
    *,
    learner_of: Callable[[str], type[Learner]] = learner_class,
    feature_sets: Mapping[str, FeatureSet] = FEATURE_SETS,
) -> FittedModel:
    """Read what :func:`write_trained` wrote.

    Args:
        tensors_file: PATH.safetensors.
        card_file: PATH.json.
        name: the name of the weights in messages.
        learner_of: gives the class for the name in the card.
        feature_sets: what that class may read.

    Raises:
        PredictorError: if a file is missing, damaged, of another version, or they do not belong together.
    """
    mend = f"make them with `perfguard train TABLE --predictor {name} --out DIR`"
    data, card = read_pair(tensors_file, card_file, f"The weights of {name!r}", mend)
    return trained_of(data, card, name, learner_of=learner_of, feature_sets=feature_sets)


def trained_of(
    data: bytes,
    card: Any,
    name: str,
    *,
    learner_of: Callable[[str], type[Learner]] = learner_class,
    feature_sets: Mapping[str, FeatureSet] = FEATURE_SETS,
) -> FittedModel:
    """The model in the two files; see :func:`read_trained`.

    Raises:
        PredictorError: if they are damaged, of another version, or do not belong together.
    """
    if not isinstance(card, dict) or card.get("format") != FORMAT:
        raise PredictorError(f"The card of {name!r} has another format than {FORMAT}. Train it again with this version.")
    check_hash(data, card, name)
    try:
        learner = learner_of(card["predictor"]).from_state(load_tensors(data), card["settings"])
        calibration = Calibration(card["calibration"]["floor"], card["calibration"]["scale"])
    except (RuntimeError, SafetensorError, KeyError, TypeError, ValueError, IndexError) as error:
        raise PredictorError(f"The weights {name!r} do not fit the predictor: {type(error).__name__}: {error}") from error
    if card.get("columns") != columns_of(learner, feature_sets):
        raise PredictorError(f"The weights {name!r} were made for other features than this PerfGuard has. Train them again.")
    return FittedModel(learner, card, calibration)


def step_of(learner: Learner, graph: OpGraph, device: Device, feature_sets: Mapping[str, FeatureSet] = FEATURE_SETS) -> Step:
    """Return ``graph`` on ``device`` with the features that ``learner`` reads."""
    features: Arrays = {}
    for name in learner.views:
        features |= feature_sets[name].compute(graph, device)
    return Step(device.id, is_single(graph), features)
