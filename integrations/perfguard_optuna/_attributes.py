"""What PerfGuard writes into a trial: user attributes and constraints, with stable names.

    perfguard:schema                     version of these names, 1
    perfguard:verdict, :reason           "launch" or "prune", and a sentence
    perfguard:p_violation                chance to break the worst limit
    perfguard:<quantity>:predicted, :low, :high, :limit     for memory (bytes), time and step_time (seconds)
    perfguard:<quantity>:measured        what it cost in the end
    perfguard:status                     ok, oom, timeout or failed

and one constraint a limit, `perfguard:<quantity>`: the logarithm of (upper predicted bound / limit), positive where infeasible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.study._constrained_optimization import _CONSTRAINTS_KEY
from optuna.trial import FrozenTrial

from perfguard.guard import Verdict
from perfguard.measure import Measurement

SCHEMA_VERSION = 1
PREFIX = "perfguard"


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """What PerfGuard knows of one trial, read back from its attributes. None: not predicted, or not measured."""

    number: int
    verdict: str | None
    reason: str
    predicted: Mapping[str, float]
    """By quantity: "memory" in bytes, "time" and "step_time" in seconds."""
    intervals: Mapping[str, tuple[float, float]]
    """The central 90% of each predicted quantity."""
    limits: Mapping[str, float]
    measured: Mapping[str, float]
    status: str | None


def attributes_of(verdict: Verdict) -> dict[str, Any]:
    """The user attributes that carry ``verdict``."""
    attributes: dict[str, Any] = {
        f"{PREFIX}:schema": SCHEMA_VERSION,
        f"{PREFIX}:verdict": verdict.action,
        f"{PREFIX}:reason": verdict.reason,
        f"{PREFIX}:p_violation": verdict.p_violation,
    }
    if verdict.prediction is not None:
        prediction = verdict.prediction
        attributes[f"{PREFIX}:predictor"] = prediction.predictor
        estimates = {"memory": prediction.peak_memory, "step_time": prediction.step_time, "time": prediction.total_time}
        for quantity, estimate in estimates.items():
            if estimate is not None:
                low, high = estimate.interval()
                attributes |= {
                    f"{PREFIX}:{quantity}:predicted": estimate.median,
                    f"{PREFIX}:{quantity}:low": low,
                    f"{PREFIX}:{quantity}:high": high,
                }
    attributes |= {f"{PREFIX}:{limit.quantity}:limit": limit.limit for limit in verdict.limits}
    return attributes


def measured_attributes_of(measurement: Measurement) -> dict[str, Any]:
    """The user attributes that carry ``measurement``."""
    measured = {
        "memory": measurement.peak_memory_bytes,
        "step_time": measurement.step_time_s,
        "time": measurement.total_time_s,
    }
    attributes: dict[str, Any] = {f"{PREFIX}:status": measurement.status}
    return attributes | {f"{PREFIX}:{quantity}:measured": value for quantity, value in measured.items() if value is not None}


def record_of(trial: FrozenTrial) -> TrialRecord:
    """What PerfGuard wrote into ``trial``."""
    attributes = trial.user_attrs

    def by_quantity(field: str) -> dict[str, float]:
        keys = {quantity: f"{PREFIX}:{quantity}:{field}" for quantity in ("memory", "time", "step_time")}
        return {quantity: attributes[key] for quantity, key in keys.items() if key in attributes}

    low, high = by_quantity("low"), by_quantity("high")
    return TrialRecord(
        number=trial.number,
        verdict=attributes.get(f"{PREFIX}:verdict"),
        reason=attributes.get(f"{PREFIX}:reason", ""),
        predicted=by_quantity("predicted"),
        intervals={quantity: (low[quantity], high[quantity]) for quantity in low},
        limits=by_quantity("limit"),
        measured=by_quantity("measured"),
        status=attributes.get(f"{PREFIX}:status"),
    )


def write_attributes(study: optuna.Study, trial: FrozenTrial | optuna.Trial, attributes: Mapping[str, Any]) -> None:
    """Set user attributes of a trial that is still running; one that has finished meanwhile is left as it is.

    A pruner is handed a FrozenTrial, which cannot be written to: only the study's storage can, and it has been private since
    Optuna 1.
    """
    for key, value in attributes.items():
        try:
            study._storage.set_trial_user_attr(trial._trial_id, key, value)
        except optuna.exceptions.UpdateFinishedTrialError:
            return


def write_constraints(study: optuna.Study, trial: FrozenTrial | optuna.Trial, constraints: Mapping[str, float]) -> None:
    """What ``Trial.set_constraint`` does (Optuna 5.0), for a FrozenTrial; see :func:`write_attributes`."""
    for quantity, value in constraints.items():
        study._storage.set_trial_system_attr(trial._trial_id, f"{_CONSTRAINTS_KEY}:{PREFIX}:{quantity}", value)
