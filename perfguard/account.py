"""The account of an estimate: what each stage of a prediction has changed, from physics to the last bound.

Notation:
    shift_i = log(median after stage i / median before it)
    log(final median / physics) = the sum of the shifts

An estimate carries its account (:attr:`perfguard.predictor.Estimate.stages`). Each stage is a function that returns the new
estimate, by :meth:`perfguard.predictor.Estimate.then`, which adds the entry. So no stage can change a number without one. A stage
that changes nothing leaves none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perfguard.predictor import Estimate
    from perfguard.quantities import Quantity

PHYSICS = "physics"
"""Name of the first stage: what follows from the operators and the data sheet alone."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of one estimate."""

    name: str
    """For instance "network" or "this device's runs"."""
    shift: float
    """log(median after the stage / median before it). 0 for physics, which is the first."""
    log_sigma: float
    """Standard deviation of the logarithm after the stage."""
    why: str
    """The reason in about six words."""


Account = tuple[Stage, ...]
"""The stages of one estimate, in order. Empty: the predictor gives no account."""


def physics_of(median: float, account: Account) -> float:
    """Return the value that ``account`` began with, from the ``median`` that it ended with, in the same unit."""
    return median * math.exp(-sum(stage.shift for stage in account))


def account_as_json(predicted: Mapping[Quantity, Estimate]) -> str:
    """Return the accounts of ``predicted`` as a text: a list [name, shift, sigma, why] for each stage, by quantity.

    A quantity with the very stages of an earlier one has the name of that one: the time of an epoch is that of its steps. Empty:
    no estimate has an account.
    """
    written: dict[Account, Quantity] = {}
    document: dict[str, object] = {}
    for quantity, estimate in predicted.items():
        if not estimate.stages:
            continue
        first = written.setdefault(estimate.stages, quantity)
        rows = [[stage.name, round(stage.shift, 5), round(stage.log_sigma, 5), stage.why] for stage in estimate.stages]
        document[quantity] = rows if first == quantity else first
    return json.dumps(document, separators=(",", ":")) if document else ""


def accounts_from_json(text: str) -> dict[str, Account]:
    """Return the accounts that :func:`account_as_json` wrote, by quantity. Shifts are rounded to five digits."""
    document = json.loads(text or "{}")
    rows = {quantity: document[stages] if isinstance(stages, str) else stages for quantity, stages in document.items()}
    return {quantity: tuple(Stage(*stage) for stage in stages) for quantity, stages in rows.items()}
