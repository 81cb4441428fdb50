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
    """

    captures = True

    def __init__(
        self, objective: Objective, device: Device, directions: Sequence[StudyDirection], *, network: bool = False
    ) -> None:
        super().__init__(functools.partial(_play, objective, tuple(directions)), device, network=network)

    def __call__(self, params: Mapping[str, Any]) -> CapturedTrial:
        """Return what the objective would run with ``params``.

        Raises:
            KeyError: if it suggests a parameter that ``params`` does not have.
            CaptureError: if the dry run does not show it.
            TooLargeError: if a tensor of it does not fit into any memory.
        """

        return self.capture(lambda name, distribution: _answer(name, params[name], distribution), params)

    def ask(self, trial: optuna.Trial) -> CapturedTrial:
        """Return what ``trial`` would run. It gets all parameters that the objective suggests.

        Raises:
            CaptureError, TooLargeError: as when called.
        """

        _ = trial.relative_params  # a sampler dry-runs its proposals now, and not in this dry run
        return self.capture(lambda name, distribution: _answer(name, trial._suggest(name, distribution), distribution))


def _answer(name: str, value: Any, distribution: BaseDistribution) -> Answer:
    """The value of a parameter; of one that is continuous, another one too, between the ends of its range."""
    if not isinstance(distribution, FloatDistribution) or distribution.step is not None:
        return Answer(name, value)
    low, high = distribution.low, distribution.high
    share = 0.4 if value > (low + high) / 2 else 0.6
    if distribution.log:
        return Answer(name, value, math.exp(math.log(low) + share * (math.log(high) - math.log(low))))
    return Answer(name, value, low + share * (high - low))


def _play(objective: Objective, directions: tuple[StudyDirection, ...], ask: Ask) -> object:
    try:
        return objective(DryTrial(ask, directions))
    except optuna.TrialPruned as error:
        raise SelfEnded("The objective prunes the trial by itself.") from error


class DryTrial(optuna.Trial):
    """The trial of a dry run. It suggests what the real one would. What it reports goes into a study in memory."""

    def __init__(self, ask: Ask, directions: Sequence[StudyDirection]) -> None:
        study = optuna.create_study(directions=directions, pruner=optuna.pruners.NopPruner(), study_name="dry-run")
        super().__init__(study, study._storage.create_new_trial(study._study_id))
        self._ask = ask

    def _suggest(self, name: str, distribution: BaseDistribution) -> Any:
        """What all three ``suggest_...`` call (Optuna 0.18 to 5.0)."""
        known = self._cached_frozen_trial.params
        if name not in known:
            known[name] = self._ask(name, distribution)
        return known[name]


def leave_study(trial: optuna.Trial) -> None:
    """Make ``trial`` one of a dry run that goes on in the middle of the objective: nothing more of it reaches its study."""

    def ask(name: str, distribution: BaseDistribution) -> Any:
        raise CaptureError(f"the objective suggests {name!r} after training began")

    dry, params = DryTrial(ask, trial.study.directions), trial.params
    dry._cached_frozen_trial.params.update(params)
    trial.__class__, trial.__dict__ = DryTrial, vars(dry)
