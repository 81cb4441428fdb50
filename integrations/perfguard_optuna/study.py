"""GuardedStudy: an Optuna study whose ``optimize`` takes a pruner, and whose objective needs no change to be guarded."""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, cast

import optuna
from optuna.distributions import BaseDistribution
from optuna.pruners import BasePruner
from optuna.trial import FixedTrial, FrozenTrial, TrialState

from perfguard.capture import SelfEnded
from perfguard.exceptions import (
    CaptureError,
    ConfigurationError,
    TooLargeError,
    UnguardedTrialError,
    UnguardedTrialWarning,
    warn_user,
)
from perfguard.leftovers import free_memory, warn_of_held_memory
from perfguard.repair import AS_PROPOSED, Repair
from perfguard.session import check_repairs
from perfguard.summary import summarize
from perfguard.time_limit import call_within, uninterrupted
from perfguard.workload import AnyBuild, CapturedTrial
from perfguard_optuna.attributes import PREFIX, has_verdict, records_of
from perfguard_optuna.capture import Objective, ObjectiveBuild, SelfDescribed, leave_study
from perfguard_optuna.dry_trial import DryTrial
from perfguard_optuna.facts import snapshot_of
from perfguard_optuna.guard import GuardedRun, OptunaGuard, prune_if_ran_out, ran_out_of_memory
from perfguard_optuna.progress import LaunchedBar
from perfguard_optuna.pruner import PerfGuardPruner
from perfguard_optuna.ranks import Ranks, leads_ranks, own_trial, running
from perfguard_optuna.sampler import PerfGuardSampler
from perfguard_optuna.session import OptunaSession

if TYPE_CHECKING:
    from perfguard.capture.first_forward import FirstForward
    from perfguard.devices import Device

P = ParamSpec("P")


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

        Args:
            pruner: a pruner. It replaces the one that the study was created with.
            count: What ``n_trials`` counts with a PerfGuardPruner: "launched" trials, or every one that was "proposed". What a
                PerfGuardSampler rejects by itself never counts. After 300 proposals in a row that do not fit, the study ends
                with a NothingFeasibleWarning.

        Raises:
            ConfigurationError: if ``pruner`` is no pruner, or for another ``count``.
        """
        if count not in ("launched", "proposed"):
            raise ConfigurationError(f'count must be "launched" or "proposed", but got {count!r}.')
        if not isinstance(pruner, BasePruner | None):  # else every trial would run unguarded
            raise ConfigurationError(f'pruner must be a pruner, such as PerfGuardPruner(gpu="a100"), but got {pruner!r}.')
        if pruner is not None:
            self.pruner = pruner
        callbacks = list(callbacks or ())
        if not isinstance(self.pruner, PerfGuardPruner):
            if pruner is None:  # else another was asked for
                callbacks.append(_warner_of_no_pruner())
            super().optimize(func, n_trials, timeout, n_jobs, catch, callbacks, gc_after_trial, show_progress_bar)
            return
        guard = self.pruner.guard
        sampler = self.sampler
        objective = GuardedObjective(func, guard)
        ends_at = None if timeout is None else time.monotonic() + timeout
        search = guard.search_of(self)
        search.begin()
        objective.begin(self)
        bar = None
        if show_progress_bar and n_trials is not None and count == "launched":
            bar = LaunchedBar(lambda: objective.num_launched, n_trials, timeout)
            callbacks.append(bar)
        run = functools.partial(
            super().optimize,
            objective,
            n_jobs=n_jobs,
            catch=catch,
            callbacks=callbacks,
            gc_after_trial=gc_after_trial,
            show_progress_bar=show_progress_bar and bar is None,
        )
        try:
            run(n_trials=n_trials, timeout=timeout)
            if n_trials is not None and count == "launched":
                self._launch_others(run, objective, n_trials, ends_at)
            if self._stop_flag and not search.num_launched and not isinstance(sampler, PerfGuardSampler):
                # The sampler has come to the end of its space.
                if (tried := search.last_try(guard.guard)) is None:
                    search.warn_that_nothing_fits()
                else:
                    self.enqueue_trial(dict(tried))
                    run(n_trials=1)
        finally:
            objective.end()
            self.sampler = sampler
            if bar is not None:
                bar.close()

    def _launch_others(self, run: Callable[..., None], objective: GuardedObjective, n_trials: int, ends_at: float | None) -> None:
        """Run as many trials more as were pruned, until ``n_trials`` are launched, the time is over, or the study stops."""
        while objective.num_launched < n_trials and not self._stop_flag:
            left_s = None if ends_at is None else ends_at - time.monotonic()
            if left_s is not None and left_s <= 0:
                return
            run(n_trials=n_trials - objective.num_launched, timeout=left_s)

    def __repr__(self) -> str:
        try:
            states = Counter(trial.state for trial in self.get_trials(deepcopy=False))
            name = self.study_name
        except Exception:  # its storage is away, which whoever prints it cannot help
            return super().__repr__()
        known = ", ".join(f"{count} {state.name.lower()}" for state, count in sorted(states.items()))
        return f"<GuardedStudy {name!r}: {known or 'no trials yet'}>"

    def _repr_html_(self) -> str:
        """The summary, as a notebook shows the study in the last line of a cell."""
        return summarize(records_of(self), title=self.study_name)._repr_html_()


def _warner_of_no_pruner() -> Callable[[optuna.Study, FrozenTrial], None]:
    """Return a study callback that warns of the first trial that nobody has judged."""

    @functools.cache
    def warn() -> None:
        warn_user(
            "A GuardedStudy runs without a PerfGuardPruner, so its trials are unguarded. Give it to optimize: "
            'pruner=PerfGuardPruner(gpu="auto").',
            UnguardedTrialWarning,
        )

    return lambda _, trial: None if has_verdict(trial) or trial.state != TrialState.COMPLETE else warn()


class GuardedObjective:
    """An objective whose trials are judged and measured. :func:`guarded` makes one for a plain study.

    Args:
        objective: the user's own.
        guard: gives the verdicts. Without a ``build``, a dry run of the objective shows what a trial runs.
        on_all_ranks: whether the other ranks of a process group call it too, with None in the place of the trial.
    """

    def __init__(self, objective: Objective, guard: OptunaGuard, *, on_all_ranks: bool = False) -> None:
        functools.update_wrapper(self, objective, updated=())
        self.guard = guard
        self._on_all_ranks = on_all_ranks
        self._objective = objective
        self._build: AnyBuild | None = guard.build or getattr(objective, "build", None)
        check_repairs(guard.guard, self._build)
        guard.calls_objective = True
        self._lock = threading.Lock()
        self.num_launched = 0

    def begin(self, study: optuna.Study) -> None:
        """Prepare for the trials of ``study``, before the first of them touches the device."""
        with self._lock:
            if self._build is None:
                clock = self.guard.guard.clock
                self._build = self.guard.build = captures = ObjectiveBuild(
                    self._objective,
                    self.guard.device,
                    study.directions,
                    network=self.guard.guard.dry_run_network,
                    clock=clock,
                )
                with suppress(CaptureError), clock.running():  # each trial says why it failed
                    captures.start()
            self._propose_nothing_again(study)

    def end(self) -> None:
        """End what :meth:`begin` has begun."""
        if isinstance(self._build, ObjectiveBuild):
            self._build.close()
            self._build = self.guard.build = None

    def __call__(self, trial: optuna.Trial | FixedTrial | FrozenTrial | None) -> float | Sequence[float]:
        """Run one trial. None: that of rank 0. A FixedTrial or a FrozenTrial, which belongs to no study, runs as it is.

        Raises:
            optuna.TrialPruned: if it does not fit, ran out of memory, or has reached the hard time limit.
            ConfigurationError: if several ranks run it with a setting that is for one process.
        """
        if isinstance(trial, FixedTrial | FrozenTrial):  # it belongs to no study: the objective is tried, or shown again
            return self._objective(trial)  # type: ignore[arg-type]
        ranks = Ranks.of(trial, "objective") if self._on_all_ranks else None
        settings = self.guard.guard
        ends_alone = settings.hard_time_limit_s is not None or (ranks is None and settings.on_oom == "repair")
        if ends_alone and (ranks is not None or leads_ranks()):
            raise ConfigurationError(
                "Leave out hard_time_limit, which is for trials of one process: of several ranks (torch.distributed), one that "
                "ends alone leaves the others waiting. on_oom='repair' needs perfguard_optuna.guarded(...) on all of them."
            )
        token = running.set(ranks)
        try:
            return self._lead(trial, ranks) if trial is not None else self._follow(cast("Ranks", ranks))
        finally:
            running.reset(token)

    def _follow(self, ranks: Ranks) -> float | Sequence[float]:
        """Run the trial of rank 0 on another rank, and once more if all ranks do."""
        try:
            with GuardedRun(self.guard, None, None, ranks):
                return self._objective(None)  # type: ignore[arg-type]  # which makes a TorchDistributedTrial of it
        except Exception as error:
            if self.guard.guard.on_oom == "prune" or not ranks.repeat:
                raise
            free_memory(error)
        ranks.begin()
        return self._follow(ranks)

    def _lead(self, trial: optuna.Trial, ranks: Ranks | None) -> float | Sequence[float]:
        guard = self.guard
        study = trial.study
        if self._build is None:
            self.begin(study)
        guard.end_abandoned(study)  # of a plain study before
        try:
            with ranks.judging() if ranks else nullcontext():
                guarded = self._begin(trial)
            value = call_within(guard.guard.hard_time_limit_s, functools.partial(self._run, guarded, ranks))
        except BaseException as error:
            guard.finish(study, error, ranks)
            ended = TrialState.PRUNED if isinstance(error, optuna.TrialPruned) else TrialState.FAIL
            guard.session_of(study, trial).report_ended(ended)  # of its own, before it could be judged
            prune_if_ran_out(error, ranks)
            raise
        else:
            guard.finish(study, None, ranks)
        finally:
            self._count(trial)
        guarded.session.report_unjudged(guarded._build)
        return value

    def _run(self, trial: _GuardedTrial, ranks: Ranks | None) -> float | Sequence[float]:
        """Run the objective, and once more with a repair if it ran out of memory (``on_oom="repair"``)."""
        try:
            return self._try(trial)
        except Exception as error:
            build = trial._build
            if self.guard.guard.on_oom == "prune" or build is None or not (ranks or ran_out_of_memory(error)):
                raise
            with uninterrupted():
                self.guard.finish(trial.study, error, ranks)
                if ranks is not None:
                    if not ranks.repeat:
                        raise
                    ranks.begin()
                free_memory(error)
                with ranks.judging() if ranks else nullcontext():
                    if not trial.session.try_again(build):
                        raise optuna.TrialPruned(f"ran out of memory: {error}") from error
        # The error is gone, and with it what its frames held.
        warn_of_held_memory(self.guard.device.memory_bytes)
        trial.set_user_attr(f"{PREFIX}try", 2)
        trial._cached_frozen_trial.intermediate_values = {}  # else Optuna would ignore what the second try reports
        trial._begin()
        return self._try(trial)

    def _try(self, trial: _GuardedTrial) -> float | Sequence[float]:
        """Run the objective. What could not be raised at a suggestion is raised at its end."""
        try:
            with trial.first_forward or nullcontext():
                value = self._objective(trial)
        finally:
            if isinstance(trial.kept, UnguardedTrialError):
                raise trial.kept
        if trial.kept is not None:
            trial.session.report_unguarded(
                "Several ranks ran it against its verdict, because a suggestion cannot prune it on all of them. Begin the "
                "objective's work with `if trial.should_prune(): raise optuna.TrialPruned`, right after the last suggestion."
            )
        return value

    def _begin(self, trial: optuna.Trial) -> _GuardedTrial:
        """Judge ``trial``, after a dry run has suggested all of its parameters.

        Where the dry run shows no step, it is judged at its first forward pass; where ``build`` is given, as it suggests.
        """
        guarded = _GuardedTrial.of(trial, self.guard, self._build)
        captures = self._build
        if not isinstance(captures, ObjectiveBuild):
            return guarded
        found: Exception | None = None
        captures.may_stand_in = self.guard.guard.stand_ins(trial.study.study_name)
        try:
            captures.ask(trial)
        except (SelfEnded, SelfDescribed):
            guarded._build = None
            return guarded
        except (CaptureError, TooLargeError) as error:
            found = error
        session = guarded.session
        session.judge(captures, found=found, may_wait=not leads_ranks())
        if session.core.problem is not None:
            guarded.first_forward = self._first_forward_of(guarded, captures, session.core.problem)
        session.begin(captures, keeps_pace=True)
        return guarded

    def _first_forward_of(self, trial: _GuardedTrial, captures: ObjectiveBuild, problem: CaptureError) -> FirstForward:
        from perfguard.capture.first_forward import FirstForward  # loads torch

        def judge(found: CapturedTrial | Exception) -> None:
            with uninterrupted():
                trial.session.judge_late(found, set_up_s=first_forward.set_up_s, waited_s=first_forward.waited_s)

        fact = snapshot_of(trial)
        first_forward = FirstForward(
            self.guard.device,
            judge,
            lambda: leave_study(trial, fact),
            problem=problem,
            network=self.guard.guard.dry_run_network,
        )
        return first_forward

    def _count(self, trial: optuna.Trial) -> None:
        decision = self.guard.session_of(trial.study, trial).decision_now
        search = self.guard.search_of(trial.study)
        with self._lock:
            if decision is None or decision.verdict.action != "prune":
                self.num_launched += 1
                return
            if search.is_over and (tried := search.last_try(self.guard.guard)) is not None:
                trial.study.enqueue_trial(dict(tried))
            elif search.is_over:
                search.warn_that_nothing_fits()  # once
                if not (self._on_all_ranks and leads_ranks()):  # else the others would wait for the next trial
                    trial.study.stop()
            self._propose_nothing_again(trial.study)

    def _propose_nothing_again(self, study: optuna.Study) -> None:
        """Keep a GuardedStudy's sampler from proposing what was rejected before, as soon as it does so."""
        if not isinstance(study, GuardedStudy) or isinstance(study.sampler, PerfGuardSampler) or self._build is None:
            return
        if self.guard.search_of(study).any_repeated:
            study.sampler = PerfGuardSampler.against_repeats(study.sampler, self.guard, self._build)


def guarded(objective: Objective | None = None, gpu: str | Device = "auto", **settings: Any) -> Any:
    """Return ``objective`` for ``study.optimize``, guarded: what would run out of memory or time is pruned before it starts.

    The study may be any study of Optuna. Before each trial, the objective runs once where nothing is computed, and shows what the
    trial would run.

    Example:
        >>> study.optimize(perfguard_optuna.guarded(objective, gpu="a100"), n_trials=100)           # doctest: +SKIP
        >>> @perfguard_optuna.guarded(gpu="a100", time_budget="2h")                                 # doctest: +SKIP
        ... def objective(trial): ...

    Args:
        objective: as for ``study.optimize``. None: to be used as a decorator.
        gpu: as for :class:`OptunaGuard`.
        settings: the other arguments of :class:`OptunaGuard`.

    Raises:
        ConfigurationError: for an unknown GPU or setting, a budget or a risk that cannot be right.
    """
    guard = OptunaGuard(gpu, **settings)
    if objective is None:
        return lambda objective: GuardedObjective(objective, guard, on_all_ranks=True)
    if not callable(objective):
        raise ConfigurationError(f"guarded takes the objective first, but got {objective!r}.")
    return GuardedObjective(objective, guard, on_all_ranks=True)


class _GuardedTrial(optuna.Trial):
    """A trial that is judged at the suggestion after which ``build`` has all parameters that it reads."""

    _guard: OptunaGuard
    _build: AnyBuild | None
    first_forward: FirstForward | None = None
    """Judges it where its training begins. None: it was judged before."""
    kept: Exception | None = None
    """Why the trial must end, on rank 0 of several. Only should_prune and report of a TorchDistributedTrial end it on all."""

    @classmethod
    def of(cls, trial: optuna.Trial, guard: OptunaGuard, build: AnyBuild | None) -> _GuardedTrial:
        """Return ``trial``, guarded. ``Trial.__init__`` would call the sampler again, so the state is copied (Optuna 5.0)."""
        guarded = cls.__new__(cls)
        guarded.__dict__.update(trial.__dict__)
        guarded._guard = guard
        guarded._build = build
        return guarded

    @property
    def session(self) -> OptunaSession:
        """Its session."""
        return self._guard.session_of(self.study, self)

    def _suggest(self, name: str, distribution: BaseDistribution) -> Any:
        """What all three ``suggest_...`` call (Optuna 0.18 to 5.0)."""
        value = super()._suggest(name, distribution)
        self._begin(final=False)
        return value

    def should_prune(self) -> bool:
        self._begin()
        if self.kept is not None or self.session.too_slow():  # the pruner of a plain study does not look at the pace
            return True
        return super().should_prune()

    def report(self, value: float, step: int) -> None:
        self._begin()
        if self.kept is not None:
            raise self.kept
        super().report(value, step)

    def _begin(self, *, final: bool = True) -> None:
        if self.kept is not None:
            return
        try:
            with uninterrupted():
                self.session.begin(self._build, final=final)
        except (optuna.TrialPruned, UnguardedTrialError) as error:
            if not leads_ranks():
                raise
            self.kept = error


def repair_of(trial: optuna.Trial) -> Repair:
    """Changes that make ``trial`` fit (``on_violation="repair"``). Without a repair, all values are as proposed.

    Example:
        >>> repair = repair_of(trial)                                                               # doctest: +SKIP
        >>> batch_size = repair.micro_batch_size or trial.params["batch_size"]                      # doctest: +SKIP
        >>> accumulation = repair.accumulation                                                      # doctest: +SKIP

    Of several ranks, all call it with a TorchDistributedTrial, and get the same.

    Raises:
        ConfigurationError: for a TorchDistributedTrial in an objective that is not `guarded` on all ranks.
    """
    own = own_trial(trial)
    ranks = running.get()
    if ranks is not None and not isinstance(own, DryTrial):
        return ranks.repair(lambda: _own_repair(own))
    if own is not trial and not isinstance(own, DryTrial):
        raise ConfigurationError(
            "repair_of takes a TorchDistributedTrial only in an objective that perfguard_optuna.guarded(objective, ...) runs on "
            "all ranks. Elsewhere, all ranks have run.repair of `with guard.trial(trial, ...) as run`."
        )
    return _own_repair(own)


def _own_repair(trial: optuna.Trial) -> Repair:
    if isinstance(trial, FixedTrial | FrozenTrial):
        return AS_PROPOSED
    guard = trial._guard if isinstance(trial, _GuardedTrial) else getattr(trial.study.pruner, "guard", None)
    return guard.session_of(trial.study, trial).read_repair() if isinstance(guard, OptunaGuard) else AS_PROPOSED


def _of_guarded_study(make: Callable[P, optuna.Study]) -> Callable[P, GuardedStudy]:
    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> GuardedStudy:
        study = make(*args, **kwargs)
        return GuardedStudy(study.study_name, study._storage, study.sampler, study.pruner)

    made.__signature__ = inspect.signature(make).replace(return_annotation="GuardedStudy")  # type: ignore[attr-defined]
    # it is pickled by its place
    made.__module__ = __name__
    made.__qualname__ = make.__name__
    made.__doc__ = f"``optuna.{make.__name__}``, but of a :class:`GuardedStudy`. The arguments are the same."
    return made


create_study = _of_guarded_study(optuna.create_study)
load_study = _of_guarded_study(optuna.load_study)
