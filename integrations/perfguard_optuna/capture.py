"""ObjectiveBuild: the default ``build``. It dry-runs the objective with the parameters that a trial has, or would have."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.study import StudyDirection

from perfguard.capture import Answer, Ask, DryRuns, SelfEnded
from perfguard.exceptions import CaptureError
from perfguard.guard_time import GuardClock
from perfguard_optuna.dry_trial import DryTrial
from perfguard_optuna.facts import FACT, Facts, ParamsAndFacts, Told, facts_asked_for, snapshot_of

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.workload import CapturedTrial

Objective = Callable[[optuna.Trial], float | Sequence[float]]


class SelfDescribed(CaptureError):
    """The objective describes its step by itself, so what it says counts."""


class ObjectiveBuild(DryRuns):
    """``build(params)``, by dry runs of an objective in other processes.

    Args:
        objective: of the study.
        device: the guarded device.
        directions: those of the study.
        network: leave the network open in dry runs.
        clock: counts the time of dry runs, without that of the study's sampler. None: they are not counted.
    """

    captures = True

    def __init__(
        self,
        objective: Objective,
        device: Device,
        directions: Sequence[StudyDirection],
        *,
        network: bool = False,
        clock: GuardClock | None = None,
    ) -> None:
        super().__init__(functools.partial(_play, objective, tuple(directions)), device, network=network)
        self.clock = clock or GuardClock()
        self.note_seconds = self.clock.note_dry_run

    def __call__(self, params: Mapping[str, object]) -> CapturedTrial:
        """Return what the objective would run with ``params``, in the trial that :func:`asked_for` names.

        Raises:
            KeyError: if it suggests a parameter that ``params`` does not have.
            CaptureError: if the dry run does not show it.
            TooLargeError: if a tensor of it does not fit into any memory.
        """

        facts = facts_asked_for()

        def answer(name: str, distribution: BaseDistribution | None) -> Answer:
            return facts.answer(name) if distribution is None else _answer(name, params[name], distribution)

        return self.capture(answer, ParamsAndFacts(params, facts))

    def ask(self, trial: optuna.Trial) -> CapturedTrial:
        """Return what ``trial`` would run. It gets all parameters that the objective suggests.

        Raises:
            CaptureError, TooLargeError: as when called.
        """

        _ = trial.relative_params  # a sampler dry-runs its proposals now, and not in this dry run
        facts = Facts(trial.study, trial)

        def answer(name: str, distribution: BaseDistribution | None) -> Answer:
            if distribution is None:
                return facts.answer(name)
            with self.clock.paused():
                value = trial._suggest(name, distribution)
            return _answer(name, value, distribution)

        with self.clock.running():
            return self.capture(answer)


def _answer(name: str, value: Any, distribution: BaseDistribution) -> Answer:
    """The value of a parameter; of one that is continuous, another one too, between the ends of its range."""
    if not isinstance(distribution, FloatDistribution) or distribution.step is not None:
        return Answer(name, value)
    low = distribution.low
    high = distribution.high
    share = 0.4 if value > (low + high) / 2 else 0.6
    if distribution.log:
        return Answer(name, value, math.exp(math.log(low) + share * (math.log(high) - math.log(low))))
    return Answer(name, value, low + share * (high - low))


def _told(fact: object) -> Any:
    return fact.read() if isinstance(fact, Told) else fact


def _play(objective: Objective, directions: tuple[StudyDirection, ...], ask: Ask) -> object:
    try:
        return objective(DryTrial(ask, lambda name: _told(ask(FACT + name, None)), directions))
    except optuna.TrialPruned as error:
        raise SelfEnded("The objective prunes the trial by itself.") from error


def leave_study(trial: optuna.Trial, fact: Callable[[str], Any] | None = None) -> None:
    """Make ``trial`` one of a dry run that goes on in the middle of the objective: nothing more of it reaches its study.

    Args:
        trial: the real one, in a process of its own.
        fact: returns what the trial and its study say of themselves. None: what they say now.
    """

    def suggest(name: str, distribution: BaseDistribution) -> Any:
        raise CaptureError(f"the objective suggests {name!r} after training began")

    dry = DryTrial(suggest, fact or snapshot_of(trial), trial.study.directions)
    dry._written.params.update(trial.params)
    dry._written._distributions.update(trial.distributions)
    dry._written.intermediate_values.update(trial._cached_frozen_trial.intermediate_values)
    trial.__class__ = DryTrial
    trial.__dict__ = vars(dry)
