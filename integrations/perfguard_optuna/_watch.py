"""A pruner that is notified of the end of every trial of a plain study, even if the objective never calls it.

Optuna 5.0 calls a pruner only where the objective calls ``should_prune()``. A HyperbandPruner is the one exception. Optuna calls
it when a trial begins, suggests and ends, to get the study that the sampler sees (``optuna.pruners._filter_study``). This pruner
inherits from it and returns the same study, with a sampler whose ``after_trial`` also notifies the pruner. Nothing of Optuna is
replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optuna
from optuna.pruners import HyperbandPruner
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState


class WatchingPruner(HyperbandPruner):
    """A HyperbandPruner in name only: :meth:`trial_ended` is called at the end of each trial."""

    def __init__(self) -> None:
        super().__init__()

    def trial_ended(self, study: optuna.Study, trial: FrozenTrial, state: TrialState) -> None:
        """Called when ``trial`` ends in ``state``, before that is written. An exception ends ``optimize``, as from a sampler."""

    def _get_bracket_id(self, study: optuna.Study, trial: FrozenTrial) -> int:
        return 0

    def _create_bracket_study(self, study: optuna.Study, bracket_id: int) -> optuna.Study:
        return _WatchedStudy.of(study, self)


class _WatchedStudy(optuna.Study):
    """A study that shares the state of the original. Only its sampler differs: ``after_trial`` also notifies the pruner."""

    __slots__ = ("_notified_pruner",)
    _notified_pruner: WatchingPruner

    @classmethod
    def of(cls, study: optuna.Study, pruner: WatchingPruner) -> _WatchedStudy:
        watched = cls.__new__(cls)
        watched.__dict__ = study.__dict__
        watched._notified_pruner = pruner
        return watched

    @property
    def sampler(self) -> Any:
        return _WatchedSampler(self.__dict__["sampler"], self._notified_pruner)

    @sampler.setter
    def sampler(self, sampler: BaseSampler) -> None:
        self.__dict__["sampler"] = sampler


class _WatchedSampler:
    """The study's sampler, which also notifies the pruner of the end of a trial."""

    def __init__(self, sampler: BaseSampler, pruner: WatchingPruner) -> None:
        self._sampler = sampler
        self._pruner = pruner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def after_trial(self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """Same as for the sampler, and notify the pruner."""
        self._sampler.after_trial(study, trial, state, values)
        self._pruner.trial_ended(study, trial, state)
