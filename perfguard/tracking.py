"""The numbers of a trial under the names by which experiment trackers show them: MLflow, Weights & Biases, TensorBoard.

    perfguard/verdict                   launched, repaired, pruned (before launch) or unguarded (launched without a
                                        verdict, or against it)
    perfguard/reason                    a sentence
    perfguard/status                    how the run ended: ok, oom, timeout, failed or interrupted
    perfguard/predicted_<quantity>_<unit>, perfguard/predicted_<quantity>_low_<unit>, ..._high_<unit>
                                        the median and the central 90%
    perfguard/measured_<quantity>_<unit>
    perfguard/<quantity>_budget_<unit>
    perfguard/over_budget               of a measured trial: 1 if it broke a budget, else 0
    perfguard/saved_time_s              of a pruned trial: the predicted time that it did not take
    perfguard/not_measured              why a trial that ran was not measured

Memory is in GiB, energy in joules, cost in dollars, everything else in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from perfguard.summary import QUANTITIES

if TYPE_CHECKING:
    from perfguard.budget import Quantity
    from perfguard.summary import TrialRecord

Field = float | str
PREFIX = "perfguard/"
_UNITS = {"memory": ("gib", 2.0**30), "energy": ("j", 1.0), "cost": ("dollars", 1.0)}
_SECONDS = ("s", 1.0)


def fields_of(record: TrialRecord) -> dict[str, Field]:
    """Return what is known of a trial, by name. What is unknown, empty or not finite is left out."""
    return {f"{PREFIX}{name}": value for name, value in _fields(record) if value is not None and _is_known(value)}


def _fields(record: TrialRecord) -> Iterator[tuple[str, Field | None]]:
    yield "verdict", record.verdict_in_words
    yield "reason", record.reason
    yield "status", record.status
    yield "not_measured", record.not_measured
    for quantity in QUANTITIES:
        yield from _fields_of_quantity(record, quantity)
    if record.verdict == "prune":
        yield "saved_time_s", record.saved_s
    elif record.is_measured:
        yield "over_budget", float(record.violates)


def _fields_of_quantity(record: TrialRecord, quantity: Quantity) -> Iterator[tuple[str, Field]]:
    unit, size = _UNITS.get(quantity, _SECONDS)
    if quantity in record.predicted:
        yield f"predicted_{quantity}_{unit}", record.predicted[quantity] / size
    if quantity in record.intervals:
        low, high = record.intervals[quantity]
        yield f"predicted_{quantity}_low_{unit}", low / size
        yield f"predicted_{quantity}_high_{unit}", high / size
    if quantity in record.measured:
        yield f"measured_{quantity}_{unit}", record.measured[quantity] / size
    if quantity in record.limits:
        yield f"{quantity}_budget_{unit}", record.limits[quantity] / size


def _is_known(value: Field) -> bool:
    return bool(value) if isinstance(value, str) else math.isfinite(value)
