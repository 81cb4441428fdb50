"""Refinement from a log beyond the Gaussian process: trees on the features of a step, fitted to the runs of all devices.

The process adapts after the first runs, but its input has only eleven numbers per step. With many runs, extremely randomized
trees (Geurts et al. 2006) learn its residuals from all step features. Each tree is grown on a bootstrap sample. So the
prediction of the other trees for a run needs no second fit (out of bag, Breiman 2001). The process is conditioned on the
residuals of those predictions. On a few hundred runs, trees were as good as all other models tried. They take a tenth of a
second, and do not extrapolate.

On disk a refinement is one safetensors file. Its header records what it was made for. It does not change predictions for a
device without runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from perfguard.exceptions import PredictorError
from perfguard.predictor import Target
from perfguard_models.features.step import STEP_FEATURES
from perfguard_models.trees import Forest, forest_of_bagging

FORMAT = 2
_LARGEST_BYTES = 64 * 2**20
_PHYSICS_COLUMNS = {"memory": 3, "time": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class RefinementConfig:
    """Settings of the trees."""

    fewest_rows: int = 30
    """With fewer runs no trees are fitted."""
    trees: int = 100
    min_samples_leaf: int = 2
    max_features: float = 0.3
    """Share of the columns that each split may use."""
    rows_for_half: int = 300
    """With this many runs, half of the trees' prediction is applied. Fitted to 100 runs, the whole of it is worse than none."""
    summary_weight: float = 0.5
    """Sample weight of a step of the summary; a measured run has 1. The residual of a summary step is 0."""


CONFIG = RefinementConfig()


class ResidualRows(NamedTuple):
    """Training rows of the trees: n runs with the process's residuals. Steps of the weights' own summary have an empty id."""

    decision_ids: Sequence[str]
    devices: Sequence[str]
    x: npt.NDArray[np.float32]  # shape: (n, columns_of)
    y: npt.NDArray[np.float64]  # shape: (n,)


class ResidualForest:
    """Corrections of a predictor, as logarithms. Built by :func:`fit_residual_forest` or :meth:`from_bytes`."""

    def __init__(self, made_for: str, parts: Mapping[str, _Part]) -> None:
        self.made_for = made_for
        self._parts = parts

    def corrections(self, target: str, device_id: str, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """Corrections to add to the predictor's logarithms; 0 on a device without training rows. From (C, columns) to (C,)."""
        part = self._parts.get(target)
        return np.zeros(len(x)) if part is None or device_id not in part.devices else part.forest.predict(x)

    def held_out(self, target: str, decision_id: str) -> float | None:
        """The out-of-bag prediction for a training run; None if the run is not a training row."""
        part = self._parts.get(target)
        return None if part is None else part.held_out.get(decision_id)

    @property
    def shift_on_reference(self) -> float:
        """Mean |correction| on steps of the summary, out of bag, as a logarithm; the larger one of the targets."""
        return max((part.shift for part in self._parts.values()), default=0.0)

    def to_bytes(self) -> bytes:
        """A safetensors file."""
        tensors: dict[str, torch.Tensor] = {}
        for target, part in self._parts.items():
            tensors |= part.forest.tensors(target)
            ids = [list(bytes.fromhex(decision_id)) for decision_id in part.held_out]
            tensors[f"{target}.rows"] = torch.tensor(ids, dtype=torch.uint8).reshape(len(ids), -1)
            tensors[f"{target}.held_out"] = torch.tensor(list(part.held_out.values()), dtype=torch.float32)
        header = {
            "format": FORMAT,
            "made_for": self.made_for,
            "columns": _fingerprint(),
            "devices": {target: sorted(part.devices) for target, part in self._parts.items()},
            "strays": {target: part.shift for target, part in self._parts.items()},
        }
        return save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"perfguard": json.dumps(header)})

    @classmethod
    def from_bytes(cls, data: bytes) -> ResidualForest:
        """The inverse of :meth:`to_bytes`.

        Raises:
            PredictorError: if the data are damaged, of another version, or made for other columns.
        """
        try:
            if len(data) > _LARGEST_BYTES:
                raise ValueError(f"{len(data)} bytes, more than {_LARGEST_BYTES}")
            tensors = load(data)
            size = int.from_bytes(data[:8], "little")
            header = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["perfguard"])
            if header["format"] != FORMAT or header["columns"] != _fingerprint():
                raise ValueError("they were made by another version of PerfGuard")
            parts = {}
            for target, devices in header["devices"].items():
                forest = Forest.from_tensors(tensors, target, columns_of(target))
                ids = [bytes(row).hex() for row in tensors[f"{target}.rows"].tolist()]
                held_out = dict(zip(ids, tensors[f"{target}.held_out"].double().tolist(), strict=True))
                parts[target] = _Part(forest, frozenset(devices), held_out, float(header["strays"][target]))
            return cls(str(header["made_for"]), parts)
        except (SafetensorError, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise PredictorError(f"Refined weights cannot be used: {type(error).__name__}: {error}") from error


class _Part(NamedTuple):
    forest: Forest
    devices: frozenset[str]
    held_out: Mapping[str, float]
    shift: float


def columns_of(target: str) -> int:
    """Number of input columns of the trees."""
    return len(STEP_FEATURES) + _PHYSICS_COLUMNS[target] + 1


def rows_of(
    sums: npt.NDArray[np.float32], physics: npt.NDArray[np.float64], log_value: npt.NDArray[np.float64]
) -> npt.NDArray[np.float32]:
    """The trees' input for C runs. Shape: (C, columns).

    It has the step features (C, len(STEP_FEATURES)), the distance of physics from the predictor (C, 1 or 3), and
    the predictor's value (C,).
    """
    return np.concatenate([sums, physics, log_value[:, None]], axis=1).astype(np.float32)


def fit_residual_forest(
    made_for: str, rows: Mapping[Target, ResidualRows], *, seed: int = 0, config: RefinementConfig = CONFIG
) -> ResidualForest | None:
    """Fit trees to ``rows`` by target, on one core; None if each target has too few runs."""
    from sklearn.ensemble import ExtraTreesRegressor

    parts: dict[str, _Part] = {}
    for target, own in rows.items():
        is_measured = np.array([decision_id != "" for decision_id in own.decision_ids])
        if is_measured.sum() < config.fewest_rows:
            continue
        model = ExtraTreesRegressor(
            config.trees,
            min_samples_leaf=config.min_samples_leaf,
            max_features=config.max_features,
            bootstrap=True,
            oob_score=True,
            random_state=seed,
        )
        share = is_measured.sum() / (is_measured.sum() + config.rows_for_half)
        model.fit(own.x, share * own.y, sample_weight=np.where(is_measured, 1.0, config.summary_weight))
        out_of_bag = np.nan_to_num(np.asarray(model.oob_prediction_, dtype=np.float64))
        shift = float(np.abs(out_of_bag[~is_measured]).mean()) if not is_measured.all() else 0.0
        held_out = {key: predicted for key, predicted in zip(own.decision_ids, out_of_bag.tolist(), strict=True) if key}
        parts[target] = _Part(forest_of_bagging(model), frozenset(own.devices), held_out, shift)
    return ResidualForest(made_for, parts) if parts else None


def _fingerprint() -> str:
    """Hash of the columns' names and order. Trees must not read other columns."""
    return hashlib.sha256(repr((STEP_FEATURES, sorted(_PHYSICS_COLUMNS.items()))).encode()).hexdigest()[:16]
