"""Verdict: what to do with a trial, and why. The guard gives it, the log holds it, and integrations act on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from perfguard.exceptions import ConfigurationError
from perfguard.repair import AS_PROPOSED, Repair

if TYPE_CHECKING:
    from perfguard.budget import Limit
    from perfguard.predictor import Estimate, Prediction

Action = Literal["launch", "prune", "repair"]
EVEN_CHANCE = 0.5
DEFAULT_RISK = 0.05
"""The share of the launched trials that may break a limit."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The action for a trial, with its reasons."""

    action: Action
    reason: str
    """A sentence that a person can act on."""
    prediction: Prediction | None = None
    """None: the guard could not predict, so the trial is launched unguarded."""
    limits: tuple[Limit, ...] = ()
    margins: Mapping[str, float] = field(default_factory=dict)
    """Distance from feasibility for each limit, as a logarithm. Positive: the limit does not hold with the required chance."""
    repair: Repair = AS_PROPOSED
    """Changes that the trial has to apply, if ``action`` is "repair". The prediction is the repaired trial's."""

    @classmethod
    def of(cls, prediction: Prediction, limits: Iterable[Limit], *, accepted: float) -> Verdict:
        """Return "launch" if each limit holds with the chance 1 - ``accepted``, else "prune". The worst limit is the reason.

        Args:
            prediction: of the trial.
            limits: beside what is predicted for them; at least one.
            accepted: the chance of breaking a limit that is accepted, in (0, 1).
        """
        limits = tuple(limits)
        margins: dict[str, float] = {limit.quantity: limit.margin(accepted) for limit in limits}
        worst = max(limits, key=lambda limit: margins[limit.quantity])
        return cls("prune" if margins[worst.quantity] > 0 else "launch", worst.sentence, prediction, limits, margins)

    @property
    def estimates(self) -> Mapping[str, Estimate]:
        """What was predicted, by quantity; empty where nothing was."""
        if self.prediction is None:
            return {}
        prediction = self.prediction
        known = {"memory": prediction.peak_memory, "step_time": prediction.step_time, "time": prediction.total_time}
        known |= {limit.quantity: limit.estimate for limit in self.limits}
        return {quantity: estimate for quantity, estimate in known.items() if estimate is not None}

    @property
    def p_violation(self) -> float:
        """The largest chance, over the limits, that the trial breaks one; 0 where nothing was predicted."""
        return max((limit.p_violation for limit in self.limits), default=0.0)


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict that was written to the measurement log."""

    id: str
    """Key in the log; empty if it could not be logged."""
    verdict: Verdict
    steps: int | None = None
    """Steps of the whole trial. None: unknown."""


def check_risk(risk: float) -> float:
    """Return ``risk``, a share in (0, 1).

    Raises:
        ConfigurationError: if it is none.
    """
    if isinstance(risk, bool) or not isinstance(risk, (int, float)) or not 0 < risk < 1:
        raise ConfigurationError(f"risk must lie in (0, 1), for instance 0.05, but got {risk!r}.")
    return float(risk)
