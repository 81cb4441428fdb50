"""What PerfGuard writes into Optuna's trials, and how it is read back.

A user attribute is "perfguard:" and the name of a column of :mod:`perfguard.record`, for instance "perfguard:memory_limit_bytes".
Beside these there are:

    perfguard:reason           the verdict's sentence, for people; it is never read back
    perfguard:status           how the run ended: ok, oom, timeout, failed or interrupted
    perfguard:try              2 if the trial ran once more, after it ran out of memory (on_oom="repair")
    perfguard:not_measured     why what ran says nothing of the guarded device
    perfguard:stopped          why a running trial was stopped: its pace, or the hard time limit
    perfguard:first_step_s     seconds from the start to the end of the first step
    perfguard:decision_id      key of the verdict in the measurement log
    perfguard:proposed_for     of a proposal that a PerfGuardSampler rejected: the trial that it searched for
    perfguard:device_id, perfguard:device_name, perfguard:capacity_bytes      the guarded device, and its memory

Each limit also has a constraint, for instance "perfguard:memory". It is the logarithm of (predicted / limit), of (measured
/ limit) after a run that ended well, and positive where the trial does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timezone
from typing import TYPE_CHECKING, Any

import optuna
from optuna.study._constrained_optimization import _CONSTRAINTS_KEY
from optuna.trial import FrozenTrial, TrialState

from perfguard.record import QUANTITIES, TrialRecord, column, columns_of, verdict_from
from perfguard.verdict import Verdict

if TYPE_CHECKING:
    from perfguard.devices import Device

AnyTrial = FrozenTrial | optuna.Trial
PREFIX = "perfguard:"


def attributes_of(verdict: Verdict, device: Device) -> dict[str, Any]:
    """Return what is written into a trial for its verdict. The names lack :data:`PREFIX`."""
    where = {"device_id": device.id, "device_name": device.name, "capacity_bytes": device.memory_bytes}
    # By which factor an interval was widened matters to learning alone, which reads the log.
    shown = {name: value for name, value in columns_of(verdict).items() if not name.endswith("_widening")}
    return {**shown, **where, "reason": verdict.reason}


def write(
    study: optuna.Study, trial: AnyTrial, attributes: Mapping[str, object], constraints: Mapping[str, float] | None = None
) -> None:
    """Write user attributes and constraints into a trial. A trial that has finished meanwhile is left as it is.

    A pruner gets a FrozenTrial, which cannot be written to. Only the study's storage can, which is private (Optuna 1 to 5). A
    constraint has the key of ``Trial.set_constraint`` (Optuna 5.0).
    """
    storage = study._storage
    trial_id = trial._trial_id
    try:
        for name, value in attributes.items():
            storage.set_trial_user_attr(trial_id, f"{PREFIX}{name}", value)
        for quantity, margin in (constraints or {}).items():
            storage.set_trial_system_attr(trial_id, f"{_CONSTRAINTS_KEY}:{PREFIX}{quantity}", margin)
    except optuna.exceptions.UpdateFinishedTrialError:
        return


def has_verdict(trial: AnyTrial) -> bool:
    """Return whether PerfGuard has written a verdict into ``trial``, or why there is none."""
    return f"{PREFIX}verdict" in trial.user_attrs


def record_of(trial: FrozenTrial) -> TrialRecord:
    """Return what PerfGuard wrote into ``trial``: verdict, limits and measurement."""
    columns = {key.removeprefix(PREFIX): value for key, value in trial.user_attrs.items() if key.startswith(PREFIX)}
    status = columns.get("status")
    # An objective that asks `should_prune` and goes on all the same is not measured.
    ran_anyway = columns.get("verdict") == "prune" and status is None and trial.state == TrialState.COMPLETE
    return TrialRecord(
        number=trial.number,
        verdict=verdict_from(columns),
        measured={quantity: columns[name] for quantity in QUANTITIES if (name := column(quantity, "measured")) in columns},
        status=status,
        not_measured=columns.get("not_measured", "they ran against their verdict" if ran_anyway else ""),
        params=trial.params,
        decision_id=columns.get("decision_id", ""),
        created_at=None if trial.datetime_start is None else trial.datetime_start.astimezone(timezone.utc),
        device_id=columns.get("device_id"),
        device_name=columns.get("device_name", ""),
        capacity_bytes=columns.get("capacity_bytes"),
        predictor=columns.get("predictor", ""),
        stopped_early=trial.state == TrialState.PRUNED and status == "ok",
        duration_s=None if trial.duration is None else trial.duration.total_seconds(),
        first_step_s=columns.get("first_step_s"),
    )


def records_of(study: optuna.Study) -> list[TrialRecord]:
    """Return what PerfGuard wrote into each finished trial of ``study``, in order."""
    return [record_of(trial) for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()]
