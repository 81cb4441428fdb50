"""GuardedStudy: an Optuna study whose ``optimize`` takes a pruner, and whose objective needs no change to be guarded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import optuna
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial
from rich.console import Console

from perfguard.exceptions import ConfigurationError
from perfguard.repair import AS_PROPOSED, Repair
from perfguard.workload import Build
from perfguard_optuna._guard import OptunaGuard, Search, pruned_if_out_of_resources
from perfguard_optuna._progress import can_show, progress_line
from perfguard_optuna._pruner import PerfGuardPruner
from perfguard_optuna._sampler import NewProposals, PerfGuardSampler

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
        count: Literal["launched", "proposed"] = "launched",
    ) -> None:
        """Same as ``optuna.Study.optimize``. ``pruner`` becomes the study's pruner.

        With a PerfGuardPruner, each trial is judged as soon as it has suggested what ``build`` reads. A trial that would break a
        budget ends there as PRUNED, so nothing of it reaches the device. The others are measured.

        With a PerfGuardPruner, ``show_progress_bar=True`` shows one line: launched, pruned and over-budget trials, and the time
        saved. It is shown only on a terminal, and not where the environment variable ``CI`` is set.

        Args:
            pruner: a pruner. It replaces the one that the study was created with.
            count: What ``n_trials`` counts with a PerfGuardPruner: "launched" trials, or every one that was "proposed". What a
                PerfGuardSampler rejects by itself never counts. After 300 proposals in a row that do not fit, the study ends
                with a NothingFeasibleWarning.
        """
        if count not in ("launched", "proposed"):
            raise ConfigurationError(f'count must be "launched" or "proposed", but got {count!r}.')
        if pruner is not None:
            self.pruner = pruner
        if not isinstance(self.pruner, PerfGuardPruner):
            super().optimize(func, n_trials, timeout, n_jobs, catch, callbacks, gc_after_trial, show_progress_bar)
            return
        deadline = None if timeout is None else time.monotonic() + timeout
        self.pruner.guard.deadline = deadline
        sampler, objective = self.sampler, _GuardedObjective(func, self.pruner.guard)
        objective.propose_nothing_again(self)
        console = Console(stderr=True)
        try:
            with ExitStack() as stack:
                if show_progress_bar and can_show(console):
                    line = stack.enter_context(progress_line(console, n_trials, counts_pruned=count == "proposed"))
                    callbacks = [line, *(callbacks or ())]
                common = (n_jobs, catch, callbacks, gc_after_trial, show_progress_bar and console.is_jupyter)
                self._optimize_guarded(objective, n_trials, timeout, deadline, count, common)
        finally:
            self.pruner.guard.deadline = None
            self.sampler = sampler

    def _optimize_guarded(
        self,
        objective: _GuardedObjective,
        n_trials: int | None,
        timeout: float | None,
        deadline: float | None,
        count: Literal["launched", "proposed"],
        common: tuple[Any, ...],
    ) -> None:
        super().optimize(objective, n_trials, timeout, *common)
        # The trials that did not fit are made up for.
        while n_trials is not None and count == "launched" and objective.num_launched < n_trials and not self._stop_flag:
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                break
            super().optimize(objective, n_trials - objective.num_launched, left_s, *common)
        if self._stop_flag and not objective.search.has_launched and type(self.sampler) is not PerfGuardSampler:
            objective.search.warn_that_nothing_fits()  # the sampler has come to the end of its space


class _GuardedObjective:
    """The user's objective, judged and measured."""

    def __init__(self, objective: Objective, guard: OptunaGuard) -> None:
        self._objective = objective
        self._guard = guard
        self._build: Build | None = guard.build or getattr(objective, "build", None)
        self._lock = threading.Lock()
        self.search = Search(guard)
        self.num_launched = 0

    def propose_nothing_again(self, study: optuna.Study) -> None:
        """Keep the study's sampler from proposing what was rejected before, as soon as it does so."""
        if self._build is None or isinstance(study.sampler, PerfGuardSampler) or not self._guard.has_rejected_again(study):
            return
        study.sampler = NewProposals(study.sampler, self._guard, self._build, self.search)

    def __call__(self, trial: optuna.Trial) -> float | Sequence[float]:
        self._guard.finish_abandoned(trial.study)  # of a plain study before
        guarded = _GuardedTrial.of(trial, self._guard, self._build, self.search)
        try:
            with pruned_if_out_of_resources():
                try:
                    value = self._objective(guarded)
                except BaseException as error:
                    self._guard.finish(trial.study, error)
                    raise
            self._guard.finish(trial.study, None)
        finally:
            self._count(trial)
        if self._guard.decision_of(trial.study, trial) is None:
            self._guard.end_unjudged(trial.study, trial, self._build)
        return value

    def _count(self, trial: optuna.Trial) -> None:
        decision = self._guard.decision_of(trial.study, trial)
        with self._lock:
            if decision is None or decision.verdict.action != "prune":
                self.num_launched += 1
                self.search.launched(None if decision is None else decision.verdict)
                return
            self.search.rejected(decision.verdict)
            if self.search.is_over:
                self.search.warn_that_nothing_fits()  # once
                trial.study.stop()
            self.propose_nothing_again(trial.study)


class _GuardedTrial(optuna.Trial):
    """A trial that is judged at the suggestion after which ``build`` has all parameters that it reads."""

    _guard: OptunaGuard
    _build: Build | None
    _search: Search

    @classmethod
    def of(cls, trial: optuna.Trial, guard: OptunaGuard, build: Build | None, search: Search) -> _GuardedTrial:
        """The same trial, guarded. ``Trial.__init__`` would call the sampler again, so the state is copied (Optuna 5.0)."""
        guarded = cls.__new__(cls)
        guarded.__dict__.update(trial.__dict__)
        guarded._guard, guarded._build, guarded._search = guard, build, search
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
        guard = self._guard
        if self._build is None or guard.running(self.study, self) is not None or guard.has_finished(self.study, self):
            return
        decision = self._guard.decision_of(self.study, self)
        if decision is None:
            decision = self._guard.judge(
                self.study, self, self.params, self._build, final=final, threshold=self._search.threshold
            )
        if decision is None:
            return
        if decision.verdict.action == "prune":
            raise optuna.TrialPruned(decision.verdict.reason)
        self._guard.launch(self.study, self, decision)


def repair_of(trial: optuna.Trial) -> Repair:
    """Changes that make ``trial`` fit (``on_violation="repair"``). Without a repair, all values are as proposed.

    Example:
        >>> repair = repair_of(trial)                                                               # doctest: +SKIP
        >>> batch_size = repair.micro_batch_size or trial.params["batch_size"]                      # doctest: +SKIP
        >>> accumulation = repair.accumulation                                                      # doctest: +SKIP
    """
    pruner = trial.study.pruner
    guard = trial._guard if isinstance(trial, _GuardedTrial) else getattr(pruner, "guard", None)
    return guard.repair_of(trial.study, trial) if isinstance(guard, OptunaGuard) else AS_PROPOSED


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
