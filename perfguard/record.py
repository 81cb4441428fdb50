"""TrialRecord: the verdict on one trial and what it cost, in one schema.

The measurement log has these fields as columns. Optuna's plugin writes the same names into its trials, so that a study can be
shown without the log. For each quantity, with its unit in the name:

    memory_predicted_bytes    median of the prediction
    memory_low_bytes          lower end of the 90% interval
    memory_high_bytes         upper end
    memory_limit_bytes        the budget; there is none for a quantity without one
    memory_measured_bytes     what the trial cost

and so on for host_memory (bytes), time, epoch_time, step_time, latency (seconds, ``_s``), energy (joules, ``_j``) and cost
(``_dollars``: the currency of the price that the user gave).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from perfguard.account import account_as_json, accounts_from_json
from perfguard.budget import Limit
from perfguard.predictor import HALF_INTERVAL, Estimate
from perfguard.quantities import SPECS, Quantity
from perfguard.repair import AS_PROPOSED, Repair
from perfguard.risk_budget import EVEN_CHANCE
from perfguard.verdict import Action, Verdict

if TYPE_CHECKING:
    from perfguard.measure import CutShort, Measurement, Status

QUANTITIES: tuple[Quantity, ...] = tuple(SPECS)
_NUMBERS = ("predicted", "low", "high", "limit")
"""The numbers of a verdict for each quantity."""


def column(quantity: Quantity, number: str) -> str:
    """Return the name of a number, for instance "memory_limit_bytes" for ("memory", "limit")."""
    return f"{quantity}_{number}_{SPECS[quantity].unit.column}"


_COLUMNS = {quantity: tuple(column(quantity, number) for number in _NUMBERS) for quantity in QUANTITIES}
_TEXTS = ("source", "phase", "bound", "grounds", "remark", "unjudged", "unmodelled")
"""The texts of a verdict, which have the names of its fields."""
VERDICT_COLUMNS: Mapping[str, type] = {
    **dict.fromkeys(("verdict", "repair", "predictor", *_TEXTS), str),
    "accepted": float,
    "guard_s": float,
    "dry_run_s": str,  # JSON: of these, seconds of dry runs by part
    # The factor on the sigma of the interval that was issued: intervals are judged by the width before (perfguard.learning).
    "memory_widening": float,
    "step_time_widening": float,
    # What each stage of each prediction has changed, as perfguard.account writes it.
    "account": str,
    **{name: float for names in _COLUMNS.values() for name in names},
}
"""Every column of a verdict, with the type of its values."""


def columns_of(verdict: Verdict) -> dict[str, Any]:
    """Return ``verdict`` as columns, without those that are unknown or empty. Values are text and numbers."""
    columns: dict[str, Any] = {"verdict": verdict.action, "accepted": verdict.accepted, "guard_s": verdict.guard_s}
    columns["dry_run_s"] = json.dumps(verdict.dry_run_s) if verdict.dry_run_s else ""
    columns |= {name: getattr(verdict, name) for name in _TEXTS}
    if verdict.prediction is not None:
        columns["predictor"] = verdict.prediction.predictor
        names = {"memory": "memory_widening", "time": "step_time_widening"}
        columns |= {names[target]: factor for target, factor in verdict.prediction.widening.items()}
    columns["account"] = account_as_json(verdict.predicted)
    for quantity, estimate in verdict.predicted.items():
        columns |= _numbers_of(quantity, estimate)
    for limit in verdict.limits:
        columns[column(limit.quantity, "limit")] = limit.limit
    if verdict.repair != AS_PROPOSED:
        repair = asdict(verdict.repair)
        if verdict.as_proposed is not None:  # the columns above are the repaired trial's
            proposed = verdict.as_proposed
            numbers = _numbers_of(proposed.quantity, proposed.estimate)
            repair["as_proposed"] = numbers | {column(proposed.quantity, "limit"): proposed.limit}
        columns["repair"] = json.dumps(repair)
    return {name: value for name, value in columns.items() if value != ""}


def verdict_from(columns: Mapping[str, Any]) -> Verdict | None:
    """Return the verdict that :func:`columns_of` wrote. None: there is none."""
    action: Action | None = columns.get("verdict")
    if action is None:
        return None
    predicted, limits = numbers_in(columns)
    accounts = accounts_from_json(columns.get("account") or "")
    predicted = {name: replace(estimate, stages=accounts.get(name, ())) for name, estimate in predicted.items()}
    repair = json.loads(columns.get("repair") or "{}")
    _, proposed = numbers_in(repair.pop("as_proposed", {}))
    texts: dict[str, Any] = {name: columns.get(name) or "" for name in _TEXTS}
    return Verdict(
        action=action,
        predicted=predicted,
        limits=limits,
        accepted=columns.get("accepted") or EVEN_CHANCE,
        repair=Repair(**repair),
        as_proposed=proposed[0] if proposed else None,
        guard_s=columns.get("guard_s") or 0.0,
        dry_run_s=json.loads(columns.get("dry_run_s") or "{}"),
        **texts,
    )


def _numbers_of(quantity: Quantity, estimate: Estimate) -> dict[str, float]:
    return dict(zip(_COLUMNS[quantity], (estimate.median, *estimate.interval()), strict=False))  # the limit is no prediction


def numbers_in(columns: Mapping[str, Any]) -> tuple[dict[Quantity, Estimate], tuple[Limit, ...]]:
    """Return the estimates and limits in ``columns``. Standard deviations follow from the ends of intervals."""
    predicted = {}
    limits = []
    for quantity in QUANTITIES:
        median, low, high, limit = map(columns.get, _COLUMNS[quantity])
        if median is not None and low is not None and high is not None:
            predicted[quantity] = Estimate(median, math.log(high / low) / (2 * HALF_INTERVAL))
            if limit is not None:
                limits.append(Limit(quantity, limit, predicted[quantity]))
    return predicted, tuple(limits)


def measured_by(measurement: Measurement, predicted: Mapping[Quantity, Estimate]) -> dict[Quantity, float]:
    """Return what a run cost, by quantity. A latency, an epoch or a price is known where it is ``predicted``."""
    known: dict[Quantity, float | None] = {
        "memory": measurement.peak_memory_bytes,
        "step_time": measurement.step_time_s,
        "time": measurement.total_time_s,
    }
    for quantity, spec in SPECS.items():
        base = spec.multiple_of
        value = None if base is None else known[base]
        if base is not None and value is not None and quantity in predicted and base in predicted:
            known[quantity] = value * predicted[quantity].median / predicted[base].median
    return {quantity: value for quantity, value in known.items() if value is not None and math.isfinite(value)}


RAN_OUT: Mapping[Quantity, str] = {"memory": "oom", "time": "timeout"}
"""The status of a run that ended because it had no more of a quantity."""


def breaks(quantity: Quantity, status: Status | None, measured: Mapping[Quantity, float], limit: float | None) -> bool:
    """Return whether a run that ended with ``status`` broke its ``limit`` of ``quantity``, or ran out of it."""
    return status == RAN_OUT.get(quantity, "-") or (limit is not None and measured.get(quantity, 0.0) > limit)


_IN_WORDS = {"launch": "launched", "repair": "repaired", "prune": "pruned"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """One trial. None: unknown, or not measured."""

    number: int | None
    """Number of the trial in its study."""
    verdict: Verdict | None
    """None: PerfGuard never judged the trial."""
    measured: Mapping[Quantity, float] = field(default_factory=dict)
    """What the trial cost on the guarded device: bytes, seconds, joules."""
    status: Status | None = None
    """How the run ended. None: it never ran, still runs, or could not be measured."""
    not_measured: str = ""
    """Why what ran says nothing of the guarded device. Empty: it does, or nothing ran."""
    note: str = ""
    """Limits of the measurement's reliability."""
    cut_short: CutShort = ""
    """Who has stopped the trial before its end. Empty: nobody did, or the tuner alone knows it."""
    set_aside: str = ""
    """Why nothing is learnt from the measurement. Empty: it is learnt, unless it is implausible."""
    params: Mapping[str, Any] = field(default_factory=dict)
    study: str = ""
    trial_id: str | None = None
    """The tuner's own name of the trial, for instance Ray Tune's."""
    decision_id: str = ""
    """Key in the measurement log. Empty: it is not logged."""
    created_at: datetime | None = None
    """Time of the verdict, UTC."""
    host: str | None = None
    """The machine that ran the trial, or that decided on it."""
    device_id: str | None = None
    """The guarded device."""
    device_name: str = ""
    capacity_bytes: int | None = None
    """The guarded device's own memory."""
    predictor: str = ""
    """Name and version of the predictor."""
    stopped_early: bool = False
    """Whether the tuner stopped the trial before its end, so that its time is not that of a whole trial."""
    duration_s: float | None = None
    """Seconds from the start to the end of the trial as the tuner knows them, measured or not. The guard's time is in it."""
    first_step_s: float | None = None
    """Seconds from the start of the measurement to the end of the first step."""

    def counted(self, quantity: Quantity) -> float | None:
        """Return what was measured of ``quantity``. None: nothing was, or it says nothing of the guarded device."""
        return None if self.not_measured else self.measured.get(quantity)

    @property
    def reason(self) -> str:
        """The verdict's sentence; empty without a verdict."""
        return "" if self.verdict is None else self.verdict.reason

    @property
    def predicted(self) -> Mapping[Quantity, Estimate]:
        """The predictions, by quantity."""
        return {} if self.verdict is None else self.verdict.predicted

    @property
    def limits(self) -> Mapping[Quantity, float]:
        """The limits that were compared with a prediction: bytes, seconds, joules."""
        return {} if self.verdict is None else {limit.quantity: limit.limit for limit in self.verdict.limits}

    @property
    def is_pruned(self) -> bool:
        """Whether the trial was rejected and did not run. A scheduler may launch a trial against its verdict."""
        return self.verdict is not None and self.verdict.action == "prune" and self.status is None and not self.not_measured

    @property
    def is_unguarded(self) -> bool:
        """Whether the trial was launched without a prediction, or against its verdict."""
        if self.verdict is None or self.verdict.is_unguarded:
            return True
        return self.verdict.action == "prune" and not self.is_pruned

    @property
    def in_words(self) -> str:
        """What happened to the trial: "launched", "repaired", "pruned" or "unguarded"."""
        return "unguarded" if self.verdict is None or self.is_unguarded else _IN_WORDS[self.verdict.action]

    @property
    def broken_limit(self) -> Quantity | None:
        """The quantity for which the trial was pruned. None: it was not, or no limit was recorded."""
        if self.verdict is None or not self.is_pruned or self.verdict.worst is None:
            return None
        return self.verdict.worst.quantity

    @property
    def fails_at_once(self) -> bool:
        """Whether a pruned trial would have run out of the device's own memory in its first step, whatever its budget."""
        memory = self.predicted.get("memory")
        return memory is not None and self.capacity_bytes is not None and memory.median > self.capacity_bytes

    @property
    def saved_s(self) -> float | None:
        """Predicted seconds of a pruned trial that would have run; None for others, and without a prediction."""
        time = self.predicted.get("time")
        return None if time is None or not self.is_pruned or self.fails_at_once else time.median

    @property
    def guard_s(self) -> float:
        """Seconds that the study waited for PerfGuard before the verdict, from the one before; see :attr:`Verdict.guard_s`."""
        return 0.0 if self.verdict is None else self.verdict.guard_s

    @property
    def ran_s(self) -> float | None:
        """Seconds that the trial ran: measured, else by the tuner's clock without the guard's time."""
        measured_s = self.measured.get("time")
        if measured_s is not None or self.duration_s is None:
            return measured_s
        return max(0.0, self.duration_s - self.guard_s)

    @property
    def is_measured(self) -> bool:
        """Whether the trial ran on the guarded device, and it is known whether it broke a limit."""
        if self.not_measured or self.status in ("failed", "interrupted"):  # it was cut off before it could break a limit
            return False
        return self.status in RAN_OUT.values() or any(quantity in self.measured for quantity in self.limits)

    @property
    def violates(self) -> bool:
        """Whether a trial that ran broke one of its limits, or ran out of memory or time of the guarded device."""
        return any(map(self.breaks, QUANTITIES))

    def breaks(self, quantity: Quantity) -> bool:
        """Return whether a trial that ran broke its limit of ``quantity``, or ran out of it."""
        return not self.not_measured and breaks(quantity, self.status, self.measured, self.limits.get(quantity))

    def error(self, quantity: Quantity) -> float | None:
        """Return |predicted / measured - 1|; None for a run that did not end well, or where there is nothing to compare."""
        predicted = self.predicted.get(quantity)
        measured = self.counted(quantity)
        is_whole = self.status == "ok" and not (self.stopped_early and quantity in ("time", "cost"))
        return abs(predicted.median / measured - 1) if is_whole and predicted and measured else None
