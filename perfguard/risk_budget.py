"""RiskBudget: the share of a study's device time that may be lost in trials that exceed a budget, and where it is spent.

Before the launch it is only known with which chance a trial exceeds a budget. Both mistakes cost something. A launched trial that
fails costs the time until the failure shows. A pruned trial that would have fitted is lost for good. :class:`RiskBudget` says
which doubtful trials are worth their risk, and :class:`History` where its times come from.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from perfguard.exceptions import ConfigurationError
from perfguard.pace import LEAST_STEPS
from perfguard.quantities import format_seconds

if TYPE_CHECKING:
    from perfguard.quantities import Quantity
    from perfguard.verdict import Verdict

DEFAULT_RISK = 0.05
"""The share of a study's device time that may be lost in launched trials that exceed a budget."""
EVEN_CHANCE = 0.5
SMALL_CHANCE = 0.05
"""The chance of exceeding a limit below which a trial counts as sure to fit."""
MOST_DOUBTFUL = 0.999
"""A trial that exceeds a limit with a larger chance teaches too little to be worth its time."""


def check_risk(risk: float) -> float:
    """Return ``risk``, a share in [0, 1).

    Raises:
        ConfigurationError: if it is none.
    """
    if isinstance(risk, bool) or not isinstance(risk, (int, float)) or not 0 <= risk < 1:
        raise ConfigurationError(
            "risk is the share of the device time that may be lost in failed trials, in [0, 1), for instance 0.05, "
            f"but got {risk!r}."
        )
    return float(risk)


@dataclass(frozen=True, slots=True, kw_only=True)
class RiskBudget:
    """What a study may still lose in trials that exceed a budget.

    Notation, in seconds of device time of one study:
        S    spent: the time of the launched trials that have ended
        L    lost: the part of S that trials took which exceeded a budget
        A    at stake: the expected loss of the doubtful trials that run now and may still fail
        T    the time of the next trial, if it does not exceed a budget
        f    the time until it shows that it does
        p    the chance that it does
        r    ``risk``, the share of the study's time that may be lost

    **The rule.** A trial with p <= 1/2 is launched. A trial with p > 1/2 is launched if

        L + A + p f <= r (S + T)

    It follows from what both mistakes cost. A trial that more likely fits than not is worth its time: of such trials, pruning
    loses more good ones than launching loses time. A trial with p > 1/2 costs p f on average. It is worth that while failures are
    cheap, because each reading and each failure moves the predictor: what was doubtful becomes known. A predictor that is wrong
    is corrected in this way, and one that is right has few trials above one half that fit.

    **What it promises.** The left side is the loss that is expected after this launch, if p is right. So no trial with p > 1/2 is
    launched that brings the expected loss above the share r. The loss itself passes the share by one such failure at most: by
    (1 - p) f. What was lost counts before the next doubtful trial.

    **What it does not promise.** Trials with p <= 1/2 are launched whatever was lost. Where most trials are near the limit, or
    where a failure costs more than a trial, the study may lose more than r. With r = 0, no failure can be afforded: then only a
    trial that fits with a chance of 95% is launched.

    Example:
        >>> budget = RiskBudget(risk=0.05, spent_s=6000, lost_s=120)
        >>> budget.left_s(trial_s=600)
        210.0
        >>> budget.accepted(failure_s=300, trial_s=600)
        0.7
    """

    risk: float = DEFAULT_RISK
    """The share of the device time that may be lost, in [0, 1)."""
    spent_s: float = 0.0
    lost_s: float = 0.0
    at_stake_s: float = 0.0

    def left_s(self, *, trial_s: float) -> float:
        """Return the seconds that may still be lost if a trial of ``trial_s`` seconds is launched."""
        return max(0.0, self.risk * (self.spent_s + trial_s) - self.lost_s - self.at_stake_s)

    def accepted(self, *, failure_s: float, trial_s: float) -> float:
        """Return the largest chance of exceeding a limit with which a trial is launched.

        Args:
            failure_s: seconds until it shows that the trial exceeds the limit.
            trial_s: seconds of the trial if it does not.
        """
        if self.risk == 0:
            return SMALL_CHANCE
        return max(EVEN_CHANCE, min(MOST_DOUBTFUL, self.left_s(trial_s=trial_s) / max(failure_s, 1e-9)))

    def trade(self, *, failure_s: float, trial_s: float) -> str:
        """Return what a failure would cost beside what is left to lose, in words."""
        left_s = self.left_s(trial_s=trial_s)
        cost = f"a failure would cost about {format_seconds(failure_s)}"
        if left_s == 0:
            return f"{cost}, and nothing is left to lose"
        if left_s < EVEN_CHANCE * failure_s:
            return f"{cost}, and {format_seconds(left_s)} are left to lose"
        return f"{cost} of the {format_seconds(left_s)} that are left to lose"


Shows = Literal["in the step", "in a phase", "by the pace", "at the end"]
"""When a trial shows that it exceeds a budget."""
_SHOWS: Mapping[Quantity, Shows] = {
    "memory": "in the step",
    "host_memory": "in the step",
    "time": "by the pace",
    "cost": "by the pace",
}
"""All other quantities are known when the trial has ended: nothing stops it before."""


def shows(quantity: Quantity, *, phase: str = "") -> Shows:
    """Return when a trial shows that it exceeds its limit of ``quantity``.

    Args:
        quantity: the limited one.
        phase: the phase that needs most memory, as in :attr:`Verdict.phase`. Empty: a training step.
    """
    if quantity == "memory" and phase:
        return "in a phase"
    return _SHOWS.get(quantity, "at the end")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedTrial:
    """A launched trial of a study that has ended."""

    total_s: float
    """From the launch to the end."""
    exceeded: Shows | None = None
    """When it showed that it exceeds a budget. None: it exceeded none."""
    first_step_s: float | None = None
    """From the launch to the end of its first step. None: unknown."""
    has_result: bool = False
    """Whether it ran to its end all the same: nothing enforces the budget that it exceeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningTrial:
    """A trial that was launched although its chance of exceeding a budget is above one half, and that has not ended."""

    chance: float
    shows: Shows
    age_s: float
    """Since its verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedTimes:
    """What is predicted of the next trial."""

    step_s: float
    """A step."""
    epoch_s: float | None = None
    """An epoch. None: unknown."""
    trial_s: float | None = None
    """The trial. None: unknown."""

    @classmethod
    def of(cls, verdict: Verdict) -> PredictedTimes:
        """Return the times that ``verdict`` predicts."""
        medians = {quantity: estimate.median for quantity, estimate in verdict.predicted.items()}
        return cls(step_s=medians.get("step_time", 0.0), epoch_s=medians.get("epoch_time"), trial_s=medians.get("time"))


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The launched trials of a study, of all its processes.

    The times of the next trial are means over the study's own trials. Before there are any, they follow from the prediction, and
    from a stated prior for what no prediction knows: the set-up, and a trial whose steps are unknown.
    """

    ended: tuple[EndedTrial, ...] = ()
    running: tuple[RunningTrial, ...] = ()
    prior_set_up_s: float = 10.0
    """Set-up of a trial: imports, data, the model on the device."""
    prior_failures_a_trial: float = 10.0
    """Time of a trial whose steps are unknown, in times of a set-up with its first step."""
    num_first_steps: int = 2
    """Steps until memory has had its peak: the second step has the optimizer's states."""

    def trial_s(self, predicted: PredictedTimes) -> float:
        """Return the seconds of the next trial, if it exceeds no budget."""
        own = [trial.total_s for trial in self.ended if trial.exceeded is None]
        if own:
            return statistics.fmean(own)
        if predicted.trial_s is not None:
            return self._first_step_s(predicted) + predicted.trial_s
        return self.prior_failures_a_trial * self._first_step_s(predicted)

    def failure_s(self, when: Shows, predicted: PredictedTimes) -> float:
        """Return the seconds until the next trial shows ``when`` that it exceeds a budget.

        A trial that exceeds a budget of time may be longer than all before it. So its predicted steps count beside the failures
        of the study.
        """
        whole_s = max(self.trial_s(predicted), predicted.trial_s or 0.0)
        begin_s = self._first_step_s(predicted)
        expected_s: Mapping[Shows, float] = {
            "in the step": begin_s + (self.num_first_steps - 1) * predicted.step_s,
            "in a phase": whole_s if predicted.epoch_s is None else begin_s + predicted.epoch_s,
            "by the pace": begin_s + LEAST_STEPS * predicted.step_s,
            "at the end": whole_s,
        }
        this_s = min(expected_s[when], whole_s)
        failures = [trial for trial in self.ended if trial.exceeded == when]
        own = [trial.total_s for trial in failures if not trial.has_result] or [trial.total_s for trial in failures]
        if not own:
            return this_s
        is_of_memory = when in ("in the step", "in a phase")
        return statistics.fmean(own) if is_of_memory else max(statistics.fmean(own), this_s)

    def _first_step_s(self, predicted: PredictedTimes) -> float:
        own = [trial.first_step_s for trial in self.ended if trial.first_step_s is not None]
        return statistics.fmean(own) if own else self.prior_set_up_s + predicted.step_s

    def budget(self, risk: float, predicted: PredictedTimes) -> RiskBudget:
        """Return what the study may still lose.

        A running trial is at stake until a failure would have shown. So a process that died does not count for ever.
        """
        at_stake_s = 0.0
        for trial in self.running:
            failure_s = self.failure_s(trial.shows, predicted)
            if trial.age_s < failure_s:
                at_stake_s += trial.chance * failure_s
        return RiskBudget(
            risk=risk,
            spent_s=sum(trial.total_s for trial in self.ended),
            lost_s=sum(trial.total_s for trial in self.ended if trial.exceeded is not None),
            at_stake_s=at_stake_s,
        )
