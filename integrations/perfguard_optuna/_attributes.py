"""User attributes and constraints that PerfGuard writes into a trial. Their names are stable.

    perfguard:schema                     version of these names, 2
    perfguard:verdict, :reason           "launch", "prune" or "repair", and a sentence; a trial that was never judged has only a
                                         reason
    perfguard:p_violation                chance to break the worst limit, to four digits
    perfguard:learnt_from                number of measured runs of the device from which the predictor had learnt
    perfguard:repair:<field>             what a repaired trial changed: micro_batch_size, accumulation, precision, checkpointing
    perfguard:<quantity>:predicted_<unit>, :low_<unit>, :high_<unit>, :limit_<unit>     memory in whole bytes; time, epoch_time,
                                         step_time and latency in seconds (s), energy in joules (j), cost in dollars or the
                                         currency of the user's prices (dollars), to six digits
    perfguard:memory:capacity_bytes      the device's own memory, of which a budget may be a part
    perfguard:<quantity>:measured_<unit> what it cost in the end
    perfguard:status                     ok, oom, timeout, failed or interrupted
    perfguard:not_measured               in the place of these two: why what ran says nothing of the guarded device
    perfguard:stopped                    why a running trial was stopped: its pace
    perfguard:proposed_for               of a proposal that a PerfGuardSampler rejected: the trial that it searched for

Names without a unit, of version 1, are read as well.

There is one constraint a limit, `perfguard:<quantity>`: the logarithm of (upper predicted bound / limit), positive where
infeasible.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import optuna
from optuna.study._constrained_optimization import _CONSTRAINTS_KEY
from optuna.trial import FrozenTrial, TrialState

from perfguard.measure import Measurement
from perfguard.summary import QUANTITIES, TrialRecord
from perfguard.verdict import Verdict

SCHEMA_VERSION = 2
PREFIX = "perfguard"
_UNITS = {"memory": "bytes", "energy": "j", "cost": "dollars"}


def attributes_of(verdict: Verdict, capacity_bytes: int, num_learnt: int) -> dict[str, Any]:
    """The user attributes that carry ``verdict``, on a device of so much memory, from so many measured runs."""
    attributes: dict[str, Any] = {
        f"{PREFIX}:schema": SCHEMA_VERSION,
        f"{PREFIX}:verdict": verdict.action,
        f"{PREFIX}:reason": verdict.reason,
        f"{PREFIX}:p_violation": _rounded(verdict.p_violation, 4),
        f"{PREFIX}:learnt_from": num_learnt,
        **_written("memory", "capacity", capacity_bytes),
    }
    if verdict.prediction is not None:
        attributes[f"{PREFIX}:predictor"] = verdict.prediction.predictor
        for quantity, estimate in verdict.estimates.items():
            low, high = estimate.interval()
            attributes |= _written(quantity, "predicted", estimate.median)
            attributes |= _written(quantity, "low", low) | _written(quantity, "high", high)
    for limit in verdict.limits:
        attributes |= _written(limit.quantity, "limit", limit.limit)
    if verdict.action == "repair":
        attributes |= {f"{PREFIX}:repair:{name}": value for name, value in asdict(verdict.repair).items()}
    return attributes


def attributes_of_unjudged(why: str) -> dict[str, Any]:
    """The user attributes of a trial that ran without a verdict."""
    return {f"{PREFIX}:schema": SCHEMA_VERSION, f"{PREFIX}:reason": f"not judged: {why}"}


def _written(quantity: str, field: str, value: float) -> dict[str, float]:
    """One attribute, with its unit in its name: whole bytes, anything else to six digits."""
    unit = _UNITS.get(quantity, "s")
    return {
        f"{PREFIX}:{quantity}:{field}_{unit}": round(value) if unit == "bytes" and math.isfinite(value) else _rounded(value, 6)
    }


def _rounded(value: float, num_digits: int) -> float:
    return float(f"{value:.{num_digits}g}")


def constraints_of(verdict: Verdict, names: Sequence[str]) -> dict[str, float]:
    """The constraints called ``names``: the margins of those limits; a broken limit that has no name counts for the first."""
    constraints = {name: verdict.margins.get(name, 0.0) for name in names}
    others = [margin for quantity, margin in verdict.margins.items() if quantity not in constraints]
    if names and others and max(others) > 0:
        constraints[names[0]] = max(constraints[names[0]], *others)
    return constraints


def established_constraints(study: optuna.Study, names: Sequence[str]) -> Sequence[str]:
    """The constraints that the study's completed trials have; ``names`` where there is none yet.

    Samplers that model constraints (GP, NSGA-II) refuse a study whose trials have different ones. So a study that was begun
    without the guard, or with another budget, keeps those with which it was begun.
    """
    completed = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if not completed:
        return names
    prefix = f"{PREFIX}:"
    return [key.removeprefix(prefix) for key in completed[0].constraints if key.startswith(prefix)]


def measured_attributes_of(measurement: Measurement, cost: float | None = None) -> dict[str, Any]:
    """The user attributes that carry ``measurement``, and what the run cost. A cost of None: no budget limits it."""
    measured = {
        "memory": measurement.peak_memory_bytes,
        "step_time": measurement.step_time_s,
        "time": measurement.total_time_s,
        "cost": cost,
    }
    attributes: dict[str, Any] = {f"{PREFIX}:status": measurement.status}
    for quantity, value in measured.items():
        if value is not None:
            attributes |= _written(quantity, "measured", value)
    return attributes


def record_of(trial: FrozenTrial) -> TrialRecord:
    """The record that PerfGuard wrote into ``trial``."""
    attributes = trial.user_attrs

    def by_quantity(field: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for quantity in QUANTITIES:
            name = f"{PREFIX}:{quantity}:{field}"
            value = attributes.get(f"{name}_{_UNITS.get(quantity, 's')}", attributes.get(name))
            if value is not None:
                found[quantity] = value
        return found

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
        not_measured=attributes.get(f"{PREFIX}:not_measured", ""),
        capacity_bytes=by_quantity("capacity").get("memory"),
    )


def proposals_rejected_for(study: optuna.Study, trial: FrozenTrial) -> list[FrozenTrial]:
    """The proposals that a PerfGuardSampler rejected while it searched for ``trial``. Optuna calls no callback for them."""
    pruned = study.get_trials(deepcopy=False, states=(TrialState.PRUNED,))
    return [rejected for rejected in pruned if rejected.user_attrs.get(f"{PREFIX}:proposed_for") == trial.number]


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
    """Set constraints as ``Trial.set_constraint`` does (Optuna 5.0), for a FrozenTrial; see :func:`write_attributes`."""
    for quantity, value in constraints.items():
        study._storage.set_trial_system_attr(trial._trial_id, f"{_CONSTRAINTS_KEY}:{PREFIX}:{quantity}", value)
