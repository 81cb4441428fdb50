"""GuardedStudy: an Optuna study whose ``optimize`` takes a pruner, and whose objective needs no change to be guarded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import optuna
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial

from perfguard.workload import Build
from perfguard_optuna._pruner import PerfGuardPruner, pruned_if_out_of_memory

Objective = Callable[[optuna.Trial], float | Sequence[float]]


class GuardedStudy(optuna.Study):
    """``optuna.Study`` with ``optimize(..., pruner=PerfGuardPruner(...))``. Pickles, reloads and runs like its parent."""

    def optimize(
        self,
        func: Objective,
        n_trials: int | None = None,
        timeout: float | None = None,
        n_jobs: int = 1,
        catch: Iterable[type[Exception]] | type[Exception] = (),
        callbacks: Iterable[Callable[[optuna.Study, FrozenTrial], None]] | None = None,
        gc_after_trial: bool = False,
        show_progress_bar: bool = False,
        *,
        pruner: BasePruner | None = None,
    ) -> None:
        """As ``optuna.Study.optimize``; ``pruner`` becomes the study's pruner.

        With a PerfGuardPruner each trial is judged as soon as it has suggested what ``build`` asks for. A trial that would break
        a budget ends there as PRUNED, so nothing of it reaches the device; the others are measured.
        """
        if pruner is not None:
            self.pruner = pruner
        if isinstance(self.pruner, PerfGuardPruner):
            func = _GuardedObjective(func, self.pruner)
        super().optimize(func, n_trials, timeout, n_jobs, catch, callbacks, gc_after_trial, show_progress_bar)


class _GuardedObjective:
    """The user's objective, judged and measured."""

    def __init__(self, objective: Objective, pruner: PerfGuardPruner) -> None:
        self._objective = objective
        self._pruner = pruner
        self._build: Build | None = pruner.build or getattr(objective, "build", None)

    def __call__(self, trial: optuna.Trial) -> float | Sequence[float]:
        guarded = _GuardedTrial.of(trial, self._pruner, self._build)
        with pruned_if_out_of_memory():
            try:
                value = self._objective(guarded)
            except BaseException as error:
                self._pruner.finish(trial.study, error)
                raise
        self._pruner.finish(trial.study, None)
        if self._pruner.decision_of(trial.study, trial) is None:
            self._pruner.warn_unjudged(self._build)
        return value


class _GuardedTrial(optuna.Trial):
    """A trial that is judged at the suggestion after which ``build`` has all that it asks for."""

    _pruner: PerfGuardPruner
    _build: Build | None

    @classmethod
    def of(cls, trial: optuna.Trial, pruner: PerfGuardPruner, build: Build | None) -> _GuardedTrial:
        """The same trial. ``Trial.__init__`` would ask the sampler again, so its state is taken over instead (Optuna 5.0)."""
        guarded = cls.__new__(cls)
        guarded.__dict__.update(trial.__dict__)
        guarded._pruner, guarded._build = pruner, build
        return guarded

    def suggest_float(self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False) -> float:
        value = super().suggest_float(name, low, high, step=step, log=log)
        self._judge()
        return value

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        value = super().suggest_int(name, low, high, step=step, log=log)
        self._judge()
        return value

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        value = super().suggest_categorical(name, choices)
        self._judge()
        return value

    def should_prune(self) -> bool:
        self._judge(final=True)
        return super().should_prune()

    def report(self, value: float, step: int) -> None:
        self._judge(final=True)
        super().report(value, step)

    def _judge(self, *, final: bool = False) -> None:
        if self._build is None or self._pruner.decision_of(self.study, self) is not None:
            return
        params = _Watched(self.params)
        decision = self._pruner.judge(self.study, self, params, self._build, provisional=lambda: params.guessed and not final)
        if decision is None:
            return
        if decision.verdict.action == "prune":
            raise optuna.TrialPruned(decision.verdict.reason)
        self._pruner.launch(self.study, self, decision)


class _Watched(dict[str, Any]):
    """Parameters that remember whether somebody asked, with a default, for one that is not there (yet)."""

    guessed = False

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if self.__contains__(key) else default

    def __contains__(self, key: object) -> bool:
        present = super().__contains__(key)
        self.guessed |= not present
        return present


def create_study(
    *,
    storage: str | BaseStorage | None = None,
    sampler: BaseSampler | None = None,
    pruner: BasePruner | None = None,
    study_name: str | None = None,
    direction: Literal["minimize", "maximize"] | StudyDirection | None = None,
    load_if_exists: bool = False,
    directions: Sequence[Literal["minimize", "maximize"] | StudyDirection] | None = None,
) -> GuardedStudy:
    """``optuna.create_study``, but of a :class:`GuardedStudy`. The arguments are the same."""
    storage = optuna.storages.get_storage(storage)
    study = optuna.create_study(
        storage=storage,
        sampler=sampler,
        pruner=pruner,
        study_name=study_name,
        direction=direction,
        load_if_exists=load_if_exists,
        directions=directions,
    )
    return GuardedStudy(study_name=study.study_name, storage=storage, sampler=study.sampler, pruner=study.pruner)


def load_study(
    *,
    study_name: str | None,
    storage: str | BaseStorage,
    sampler: BaseSampler | None = None,
    pruner: BasePruner | None = None,
) -> GuardedStudy:
    """``optuna.load_study``, but of a :class:`GuardedStudy`. The arguments are the same."""
    storage = optuna.storages.get_storage(storage)
    study = optuna.load_study(study_name=study_name, storage=storage, sampler=sampler, pruner=pruner)
    return GuardedStudy(study_name=study.study_name, storage=storage, sampler=study.sampler, pruner=study.pruner)
