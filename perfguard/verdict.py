"""Verdict: what to do with a trial, and the numbers that decided it. The guard gives it, the log holds it, tuners act on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from perfguard.exceptions import ConfigurationError
from perfguard.repair import AS_PROPOSED, Repair
from perfguard.risk_budget import EVEN_CHANCE

if TYPE_CHECKING:
    from perfguard.budget import Limit
    from perfguard.predictor import Estimate, Prediction
    from perfguard.quantities import Quantity

Action = Literal["launch", "prune", "repair"]
NOT_SEALED = (
    "Dry runs are not sealed on this system: a library in another language could change files, or reach the network "
    "(docs/reliability.md)."
)
"""What a `Source` means that ends with "not sealed"."""
Source = Literal[
    "",
    "captured",
    "captured at the first forward pass",
    "captured, not sealed",
    "captured at the first forward pass, not sealed",
    "described",
    "as a trial alike",
]
ALIKE: Literal["as a trial alike"] = "as a trial alike"
"""The source of a trial for which another one stands in, see :mod:`perfguard.capture.alike`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The action for a trial, with the numbers behind it. :attr:`reason` makes the sentence from them."""

    action: Action
    predicted: Mapping[Quantity, Estimate] = field(default_factory=dict)
    """Memory in bytes, times in seconds, energy in joules. Empty: PerfGuard could not predict, so the trial is unguarded."""
    limits: tuple[Limit, ...] = ()
    """Each budget beside the estimate that was compared with it."""
    accepted: float = EVEN_CHANCE
    """The chance of breaking a limit that was accepted, in (0, 1)."""
    grounds: str = ""
    """Why a chance above one half was accepted, or was not, in words. Empty: nothing but the numbers decided."""
    bound: str = ""
    """The lower bound of the memory in words, if this bound alone decided. The estimates then follow from it."""
    is_ruled_out: bool = field(default=False, compare=False)
    """Whether the trial cannot fit, whatever is predicted. A verdict that was read from a log does not know it."""
    repair: Repair = AS_PROPOSED
    """Changes that the trial has to apply, if ``action`` is "repair". The estimates are the repaired trial's."""
    as_proposed: Limit | None = None
    """The limit that a repaired trial would break as it was proposed."""
    remark: str = ""
    """What a person should know beside the numbers, for instance that no remedy helps."""
    unjudged: str = ""
    """Why there is no prediction. Empty: there is one."""
    source: Source = ""
    """How it is known what the trial runs. Empty: it is not known."""
    phase: str = ""
    """The phase of the trial that needs most memory, for instance "the evaluation". Empty: a training step."""
    unmodelled: str = ""
    """Codes of what the prediction leaves out, with commas; see :mod:`perfguard.unmodelled`. Empty: nothing is known to be."""
    guard_s: float = field(default=0.0, compare=False)
    """Seconds that the study has waited for PerfGuard since the verdict before; see :mod:`perfguard.guard_time`."""
    dry_run_s: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Of these, seconds of dry runs, by part; see :mod:`perfguard.capture.stopwatch`."""
    prediction: Prediction | None = field(default=None, compare=False)
    """All that was predicted. None: nothing was, or the verdict was read from a log, which holds :attr:`predicted` alone."""

    @classmethod
    def of(cls, prediction: Prediction, limits: Iterable[Limit], *, accepted: float, bound: str = "") -> Verdict:
        """Return "launch" if each limit holds with the chance 1 - ``accepted``, else "prune".

        Args:
            prediction: of the trial.
            limits: beside what is predicted for them; at least one.
            accepted: the chance of breaking a limit that is accepted, in (0, 1).
            bound: the lower bound of the memory in words, if it alone decides. Then the action is "prune".
        """
        limits = tuple(limits)
        known: dict[Quantity, Estimate | None] = {
            "memory": prediction.peak_memory,
            "step_time": prediction.step_time,
            "time": prediction.total_time,
            "energy": prediction.energy,
        }
        known |= {limit.quantity: limit.estimate for limit in limits}
        predicted = {quantity: estimate for quantity, estimate in known.items() if estimate is not None}
        is_broken = bool(bound) or any(limit.margin(accepted) > 0 for limit in limits)
        return cls(
            action="prune" if is_broken else "launch",
            predicted=predicted,
            limits=limits,
            accepted=accepted,
            bound=bound,
            is_ruled_out=bool(bound),
            unmodelled=", ".join(dict.fromkeys(gap.code for gap in prediction.unmodelled)),
            prediction=prediction,
        )

    @property
    def margins(self) -> Mapping[Quantity, float]:
        """Distance from feasibility for each limit, as a logarithm. Positive: it does not hold with the required chance.

        A chance above one half that was accepted all the same makes no limit hold: its margin is that of one half, which is
        log(predicted median / limit).
        """
        return {limit.quantity: limit.margin(self._required) for limit in self.limits}

    @property
    def _required(self) -> float:
        return min(self.accepted, EVEN_CHANCE)

    @property
    def worst(self) -> Limit | None:
        """The limit that is nearest to be broken, or broken by most: the reason of the verdict. None: there is no limit."""
        if self.bound:  # the bound is one of memory, whatever else may be broken
            return next((limit for limit in self.limits if limit.quantity == "memory"), None)
        return max(self.limits, key=lambda limit: limit.margin(self._required), default=None)

    @property
    def p_violation(self) -> float:
        """The largest chance, over the limits, that the trial breaks one; 0 where nothing was predicted."""
        return max((limit.p_violation for limit in self.limits), default=0.0)

    @property
    def is_unguarded(self) -> bool:
        """Whether the trial is launched without a prediction."""
        return self.action == "launch" and not self.predicted

    @property
    def is_overruled(self) -> bool:
        """Whether the trial is launched although it would break a limit (``on_violation="warn"``)."""
        return self.action == "launch" and not self.grounds and any(limit.margin(self.accepted) > 0 for limit in self.limits)

    @property
    def reason(self) -> str:
        """A sentence that a person can act on."""
        if self.unjudged:
            return f"not judged: {self.unjudged}"
        if self.worst is None:
            return self.remark
        worst = self.worst
        if self.bound:
            words = f"needs {self.bound}, the budget is {worst.format(worst.limit)}"
        else:
            chance = chance_in_words(worst.p_violation)
            words = f"{worst.sentence}, exceeded with a chance of {chance} ({self.grounds or f'{self.accepted:.1%} accepted'})"
        if self.as_proposed is not None:
            words = f"{self.as_proposed.sentence}; with {self.repair} it {words}"
        if self.is_overruled:
            words = f"launched all the same: {words}"
        phase = f"most memory is needed by {self.phase}" if self.phase else ""
        return "; ".join(part for part in (words, phase, self.remark) if part)


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict that was written to the measurement log."""

    id: str
    """Key in the log; empty if it could not be logged."""
    verdict: Verdict
    steps: int | None = None
    """Steps of the whole trial. None: unknown."""
    study: str = ""
    """Name of the study that asked."""


def chance_in_words(chance: float) -> str:
    """Return a probability as a percentage that never claims certainty, for instance "99.4%" or "over 99.9%"."""
    if chance > 0.999:
        return "over 99.9%"
    return "under 0.1%" if chance < 0.001 else f"{chance:.1%}"


def check_chance(chance: float, *, what: str) -> float:
    """Return ``chance``, a probability in (0, 1).

    Raises:
        ConfigurationError: if it is none. The message calls it ``what``.
    """
    if isinstance(chance, bool) or not isinstance(chance, (int, float)) or not 0 < chance < 1:
        raise ConfigurationError(f"{what} must lie in (0, 1), for instance 0.05, but got {chance!r}.")
    return float(chance)
