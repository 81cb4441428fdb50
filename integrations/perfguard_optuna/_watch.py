"""A pruner that is notified of the end of every trial of a plain study, even if the objective never calls it.

Optuna 5.0 calls a pruner only where the objective calls ``should_prune()``. There is one exception: a HyperbandPruner is asked,
when a trial begins, suggests and ends, for the study as its sampler should see it (``optuna.pruners._filter_study``). A pruner
that inherits from it is asked too, and answers with the same study. Its sampler hears of the end of each trial as ever, and so
does whoever watches. Nothing of Optuna is replaced.
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
        """Called when ``trial`` ends in ``state``, before that is written. What it raises ends ``optimize``, as of a sampler."""

    def _get_bracket_id(self, study: optuna.Study, trial: FrozenTrial) -> int:
        return 0

    def _create_bracket_study(self, study: optuna.Study, bracket_id: int) -> optuna.Study:
        return _WatchedStudy.of(study, self)


class _WatchedStudy(optuna.Study):
    """The same study, with one state for both; only its sampler's ``after_trial`` is heard by somebody else too."""

    __slots__ = ("_pruner_that_watches",)
    _pruner_that_watches: WatchingPruner

    @classmethod
    def of(cls, study: optuna.Study, pruner: WatchingPruner) -> _WatchedStudy:
        watched = cls.__new__(cls)
        watched.__dict__ = study.__dict__
        watched._pruner_that_watches = pruner
        return watched

    @property
    def sampler(self) -> Any:
        return _WatchedSampler(self.__dict__["sampler"], self._pruner_that_watches)

    @sampler.setter
    def sampler(self, sampler: BaseSampler) -> None:
        self.__dict__["sampler"] = sampler


class _WatchedSampler:
    """The study's sampler; the end of a trial is told to the pruner as well."""

    def __init__(self, sampler: BaseSampler, pruner: WatchingPruner) -> None:
        self._sampler = sampler
        self._pruner = pruner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def after_trial(self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """As of the sampler."""
        self._sampler.after_trial(study, trial, state, values)
        self._pruner.trial_ended(study, trial, state)
