"""OptunaGuard: judges the trials of a study, measures those that run, and writes both into them.

A trial's way: :meth:`KnownTrial.begin` judges it, and launches or prunes it. There :meth:`~KnownTrial.judge` builds the workload,
and :meth:`~KnownTrial.decide` asks the core. :meth:`~KnownTrial.end` measures the trial, and the core learns.
"""

from __future__ import annotations

import datetime
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import optuna
from optuna.trial import FrozenTrial, TrialState

from perfguard.exceptions import (
    ConfigurationError,
    MeasurementWarning,
    TooLargeError,
    UnguardedTrialError,
    UnguardedTrialWarning,
    warn_user,
)
from perfguard.guard import Guard, as_workload
from perfguard.guard_time import GuardClock, on_guard_time
from perfguard.last_used import LastUsed
from perfguard.leftovers import free_memory
from perfguard.measure import CUT_SHORT, TOO_SLOW, Measurement, Run, Status, status_of
from perfguard.quantities import parse_seconds
from perfguard.record import column, columns_of, measured_by, verdict_from
from perfguard.rejections import Search
from perfguard.repair import Repair
from perfguard.time_limit import TimeLimitReached
from perfguard.verdict import Decision, Verdict
from perfguard.workload import (
    AnyBuild,
    AnyWorkload,
    CapturedTrial,
    WatchedParams,
    Workload,
    announce_optimizer,
    did_you_mean,
    is_missing_parameter,
    why_missing,
)
from perfguard_optuna.attributes import PREFIX, AnyTrial, attributes_of, has_verdict, write
from perfguard_optuna.capture import SelfDescribed
from perfguard_optuna.dry_trial import DryTrial
from perfguard_optuna.facts import asked_for
from perfguard_optuna.ranks import Ranks, leads_ranks, own_trial

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Unpack

    from perfguard.capture.real import RealStep
    from perfguard.devices import Device
    from perfguard.guard import GuardSettings
    from perfguard.quantities import Quantity

    class OptunaSettings(GuardSettings, total=False):
        """The other keyword arguments of :class:`OptunaGuard`."""

        on_oom: OnOom
        hard_time_limit: int | float | str | None


OnOom = Literal["prune", "repair"]


class OptunaGuard:
    """A :class:`perfguard.Guard` for the trials of Optuna.

    Inline in the objective, where the model is at hand:

        >>> guard = OptunaGuard("a100", memory_budget="38GiB")                                      # doctest: +SKIP
        >>> def objective(trial):                                                                   # doctest: +SKIP
        ...     model, batch = make_model(trial), example_batch(trial)
        ...     with guard.trial(trial, model, batch, loss=loss, optimizer=AdamW) as run:
        ...         for batch in loader:
        ...             train_step(model, batch)
        ...             run.step()
        ...     return validate(model)

    :class:`PerfGuardPruner` and :class:`PerfGuardSampler` share one.

    Args:
        gpu: as for :class:`perfguard.Guard`.
        build: ``build(params) -> Workload``, a function of the hyperparameters. None: only trials whose objective calls
            :meth:`trial` with a model or a workload are judged.
        on_oom: the action on a trial that runs out of memory all the same. With "repair", it runs once more with a repair. That
            needs ``build``, and an objective that calls :func:`repair_of`.
        hard_time_limit: seconds after which a running trial is ended and pruned, or a text such as "2h". None: no limit.
        settings: The keyword arguments of :class:`perfguard.Guard`.

    Raises:
        ConfigurationError: for an unknown GPU or setting, a budget or a risk that cannot be right.
        LogError: for a log that cannot be used.
    """

    def __init__(
        self,
        gpu: str | Device = "auto",
        *,
        build: AnyBuild | None = None,
        on_oom: OnOom = "prune",
        hard_time_limit: int | float | str | None = None,
        **settings: Unpack[GuardSettings],
    ) -> None:
        if build is not None and not callable(build):
            raise ConfigurationError(f"build must be a function of the hyperparameters, but got {build!r}.")
        if on_oom not in get_args(OnOom):
            raise ConfigurationError(f"on_oom must be one of {', '.join(get_args(OnOom))}, but got {on_oom!r}.")
        self.guard = Guard(gpu, **settings)
        """The guard of the core: device, budget, risk, predictor, log."""
        self.device, self.log = self.guard.device, self.guard.log
        self.build = build
        self.on_oom = on_oom
        self.hard_time_limit_s = None if hard_time_limit is None else parse_seconds(hard_time_limit, what="hard_time_limit")
        self.ends_or_repeats = on_oom == "repair" or hard_time_limit is not None
        self.calls_objective = False
        """Whether a GuardedObjective calls the objective. Only that can end a trial from outside, or run it once more."""
        self._trials = _latest_trials()
        self._running: dict[int, KnownTrial] = {}
        """The trial that each thread runs."""
        self._searches: LastUsed[str, Search] = LastUsed(128)

    def check(self, model: Workload | nn.Module, inputs: Any = None, **fields: Any) -> Verdict:
        """See :meth:`perfguard.Guard.check`."""
        return self.guard.check(model, inputs, **fields)

    def max_batch_size(self, model: Workload | nn.Module, inputs: Any = None, *, at_most: int = 2**20, **fields: Any) -> int:
        """See :meth:`perfguard.Guard.max_batch_size`."""
        return self.guard.max_batch_size(model, inputs, at_most=at_most, **fields)

    def trial(
        self, trial: optuna.trial.BaseTrial | None, model: Workload | nn.Module | None = None, batch: Any = None, **workload: Any
    ) -> GuardedRun:
        """Judge ``trial`` where the ``with`` block begins, then measure what runs inside and learn from it.

        In a process group, all ranks call it: rank 0 judges, and all prune together.

        Args:
            trial: the trial that Optuna handed to the objective, or a TorchDistributedTrial of it. None: on the ranks other than
                0 of a process group.
            model: what the block trains: a Workload, or a model. None: ``build(trial.params)``.
            batch: an example batch for a model. Tensors, specifications or a shape.
            workload: other fields of :class:`perfguard.Workload`, with a model. Examples are ``optimizer``, ``loss`` and
                ``targets``.

        Raises:
            optuna.TrialPruned: At the start, if the trial would break a limit. Inside the block, by ``run.step()``, if its pace
                will break the time budget. At the end, if it ran out of memory.
            ConfigurationError: for arguments that cannot be right.
        """
        own = own_trial(trial)
        if isinstance(own, DryTrial):
            raise SelfDescribed("The objective describes its step by itself, with guard.trial.")
        if not isinstance(own, optuna.Trial | None):
            raise ConfigurationError(
                f"guard.trial takes the trial that Optuna hands to the objective, and then the model, but got {trial!r} first."
            )
        known = [one.name for one in fields(Workload)]
        for name in workload:
            if name not in known:
                raise ConfigurationError(f"Workload has no field {name!r}{did_you_mean(name, known, cutoff=0.6)}.")

        found: AnyWorkload | Exception | None = None
        if model is not None and own is not None:  # else rank 0 judges it
            try:
                found = as_workload(model, batch, **workload)
                announce_optimizer(found)
            except Exception as error:  # the verdict says so
                found = error
        return GuardedRun(self, None if own is None else self.known(own.study, own), found, Ranks.of(own, "inline"))

    def known(self, study: optuna.Study, trial: AnyTrial) -> KnownTrial:
        """Return what is known of ``trial``. The start distinguishes it from a trial in a deleted study of the same name.

        A trial that runs is known to its end. Of the others, only the latest are: what they wrote into the study stays there.
        """
        known = self._trials.get_or_put(_key_of(study, trial), lambda: KnownTrial(self, self.guard, study, trial))
        known.study, known.trial = study, trial  # Optuna has several objects of one trial, and this is the latest
        return known

    def finish(self, study: optuna.Study, error: BaseException | None, ranks: Ranks | None = None) -> Measurement | None:
        """End the measuring of the calling thread's trial, which ended with ``error``, and learn from it.

        ``ranks`` have run it too. None: this process ran it alone.
        """
        known, how = self._running.pop(threading.get_ident(), None), _how_ended(error)
        if known is None:
            return None if ranks is None else ranks.end(None, how.status)
        known.study = study
        self._trials.put(_key_of(study, known.trial), known)  # among the latest, because others ask for it after its end
        return known.end(how, ranks=ranks)

    def end_abandoned(self, study: optuna.Study) -> None:
        """End the measurement of a trial without a reported end. In a plain study, the next trial's first call does this."""
        known = self._running.pop(threading.get_ident(), None)
        if known is None or known.run is None:
            return
        ended = trial_of(study, known.study.study_name, known.trial.number)
        status: Status = "failed" if ended is not None and ended.state == TrialState.FAIL else "ok"
        note = "ended at its last step, because its end was not reported" if known.run.num_steps else "its end was not reported"
        note += "" if ended is not None and ended.state == TrialState.COMPLETE else f"; {CUT_SHORT}"
        known.end(_HowEnded(status, note), at_last_step=True)

    def search_of(self, study: optuna.Study) -> Search:
        """Return the state of the search in ``study``."""
        return self._searches.get_or_put(study.study_name, Search)

    def constraints_of(self, study: optuna.Study, margins: Mapping[Quantity, float]) -> dict[str, float]:
        """Return the constraints of a trial of ``study``: the distance from feasibility for each limit that has a name there."""
        names = self._constraint_names(study)
        constraints = {name: margins.get(name, 0.0) for name in names}  # type: ignore[call-overload]
        others = [margin for quantity, margin in margins.items() if quantity not in constraints]
        if names and max(others, default=0) > 0:  # a broken limit that has no name counts for the first
            constraints[names[0]] = max(constraints[names[0]], *others)
        return constraints

    def _constraint_names(self, study: optuna.Study) -> Sequence[str]:
        """The constraints that the study's completed trials have; the limited quantities where there is no such trial yet.

        Samplers that model constraints (GP, NSGA-II) refuse a study whose trials have different ones. So a study that was begun
        without the guard, or with another budget, keeps those with which it was begun.
        """
        completed = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if completed:
            return [key.removeprefix(PREFIX) for key in completed[0].constraints if key.startswith(PREFIX)]
        return self.guard.budget.quantities

    def _start_run(self, on_step: Callable[[Any], object] | None = None) -> Run:
        run = Run(self.device, on_step=on_step)
        try:
            run.start()
        except Exception as error:
            self._warn_unmeasured(error)
        return run

    def _end_run(self, run: Run, how: _HowEnded, *, at_last_step: bool = False) -> Measurement | None:
        try:
            return run.finish(how.status, note=how.note, at_last_step=at_last_step)
        except Exception as error:
            self._warn_unmeasured(error)
            return None

    def _warn_unmeasured(self, error: Exception) -> None:
        message = f"PerfGuard could not measure a trial (shown once): {type(error).__name__}: {error}"
        self.guard.warn_once(MeasurementWarning, message)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_trials": _latest_trials(), "_running": {}}


_TrialKey = tuple[str, int, datetime.datetime | None]


def _key_of(study: optuna.Study, trial: AnyTrial) -> _TrialKey:
    return study.study_name, trial.number, trial.datetime_start


def _latest_trials() -> LastUsed[_TrialKey, KnownTrial]:
    """Return an empty memory of the latest trials, in which those that run stay."""
    return LastUsed(128, must_stay=_runs)


def _runs(known: KnownTrial) -> bool:
    return known.run is not None


@dataclass(slots=True)
class KnownTrial:
    """One trial under a guard: what is known of it, its verdict, and its measurement. Made by :meth:`OptunaGuard.known`."""

    owner: OptunaGuard
    guard: Guard
    """That of the core."""
    study: optuna.Study
    trial: AnyTrial
    decision: Decision | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    """Those that ``build`` read for the decision."""
    missing: Collection[str] = ()
    """Parameters that ``build`` read and the trial did not have at its last judgement."""
    error: Exception | None = None
    """What ``build`` raised then."""
    run: Run | None = None
    """The measurement, while the trial runs."""
    is_over: bool = False
    """Whether it was measured, or reported as unguarded. It is not judged again."""
    is_too_slow: bool = False
    """Whether its pace has shown that it will exceed its time budget."""
    repair_was_read: bool = False
    guard_s: float = 0.0
    """The guard's time that its verdicts have, see :attr:`perfguard.verdict.Verdict.guard_s`."""
    real_step: RealStep | None = None
    """Holds a step of the trial against its dry run. None: that was done for an equal trial."""

    @property
    def clock(self) -> GuardClock:
        """The clock of the guard's own time."""
        return self.guard.clock

    @on_guard_time
    def begin(
        self,
        build: AnyBuild | None,
        *,
        final: bool = True,
        found: AnyWorkload | Exception | None = None,
        keeps_pace: bool = False,
    ) -> bool:
        """Judge the trial and begin to measure it, unless that was done before. Return False if it cannot be judged yet.

        ``found`` is what the trial runs, in the place of ``build``, or why that is not known. With ``keeps_pace``, a step of an
        optimizer raises as soon as the trial will break its time budget. The others are those of :meth:`judge`.

        Raises:
            optuna.TrialPruned: if the trial does not fit.
            UnguardedTrialError: if it cannot be judged, and the guard is strict.
        """
        if self.run is not None or self.is_over:
            return True
        if not self.owner.calls_objective and self.owner.ends_or_repeats:
            raise ConfigurationError(
                "on_oom='repair' and hard_time_limit work where PerfGuard calls the objective. Make the study with "
                "perfguard_optuna.create_study(), or write study.optimize(perfguard_optuna.guarded(objective, ...))."
            )
        self.owner.end_abandoned(self.study)
        decision = self.decision_now
        if decision is None and found is not None:
            decision = self.decide(WatchedParams(self.trial.params), found)
        elif decision is None:
            decision = self.judge(build, final=final)
        if decision is None:
            return False
        if decision.verdict.action == "prune":
            raise optuna.TrialPruned(decision.verdict.reason)
        self._launch(self._after_step if keeps_pace else None)
        return True

    @on_guard_time
    def begin_unjudged(self) -> None:
        """Begin to measure the trial, which :meth:`judge_late` will judge."""
        self.owner.end_abandoned(self.study)
        self._launch(self._after_step)

    def _launch(self, on_step: Callable[[Any], object] | None) -> None:
        self.run = self.owner._start_run(on_step)
        self.owner._running[threading.get_ident()] = self

    @on_guard_time
    def judge_late(self, found: CapturedTrial | Exception, *, waited_s: float) -> None:
        """Judge the trial, which runs already, by what was ``found`` of it: what it runs, or why that is not known.

        It has ``waited_s`` seconds for that, and waits for the verdict. Neither is its own time.

        Raises:
            optuna.TrialPruned: if the trial does not fit.
            UnguardedTrialError: if it cannot be judged, and the guard is strict.
        """
        self.clock.add(waited_s)
        params = WatchedParams(self.trial.params)
        made = found if isinstance(found, Exception) else self.guard.with_steps(found, params)
        with nullcontext() if self.run is None else self.run.left_out(after_s=waited_s):
            decision = self.decide(params, made)
        if decision.verdict.action == "prune":
            self.run = None  # what it cost until now is not what it would have cost
            self.owner._running.pop(threading.get_ident(), None)
            raise optuna.TrialPruned(decision.verdict.reason)

    @property
    def decision_now(self) -> Decision | None:
        """The decision on the trial, if it was judged with the parameters that it has now."""
        params = self.trial.params
        is_same = all(name in params and params[name] == value for name, value in self.params.items())
        return self.decision if is_same else None

    @property
    def verdict(self) -> Verdict:
        """The verdict on the trial with the parameters that it has now."""
        decision = self.decision_now
        return Verdict(action="launch", unjudged="it was not judged") if decision is None else decision.verdict

    def judge(self, build: AnyBuild | None, *, final: bool) -> Decision | None:
        """Decide on the trial by its parameters, and write the verdict into it. None: it cannot be judged yet.

        ``build`` is None if nobody knows what the trial runs. Unless this is the ``final`` attempt, a default for a missing
        parameter, or an error of ``build``, delays the verdict.
        """
        if build is None:
            return None
        params = WatchedParams(self.trial.params)
        with asked_for(self.study, self.trial):
            found = self.guard.describe(build, params)
        if isinstance(found, Exception):
            if is_missing_parameter(found, params.given):
                self.missing = {found.args[0]}
                return None
            is_hopeless = isinstance(found, TooLargeError) and not params.missing
            self.error = found
            if not final and not is_hopeless:  # a parameter may be missing: `build(**params)` raises another error for that
                return None
        else:
            self.missing = params.missing
            if params.missing and not final:
                return None
            self._warn_of_slips(params)
        search, key = self.owner.search_of(self.study), self.guard.key_of(found, params.used)
        rejection = search.recall(key)
        if rejection is not None:
            name, number = self.study.study_name, self.trial.number
            decision = self.guard.record(rejection.verdict, None, study=name, trial=number, params=params.given)
            return self._keep(decision, params.used)
        decision = self.decide(params, found, grounds=search.grounds(key))
        search.remember(key, decision.verdict, params=self.trial.params)
        if isinstance(found, CapturedTrial) and decision.verdict.action != "prune":
            self.real_step = self.guard.watch(found)
        return decision

    def _warn_of_slips(self, params: WatchedParams) -> None:
        """Warn if a name for which a default counts is nearly one that the trial has."""
        for name in params.missing:
            if did_you_mean(name, params.given):
                self.guard.warn_once(
                    UnguardedTrialWarning,
                    f"{why_missing([name], params.given)}, so its default counts in every verdict. Correct the name in build.",
                    about=name,
                )

    def decide(self, params: WatchedParams, found: AnyWorkload | Exception, *, grounds: str = "") -> Decision:
        """Decide on what the trial would run, and write the verdict into it. ``params`` are those that were read for it.

        ``grounds`` are those of :meth:`perfguard.Guard.decide`.

        Raises:
            UnguardedTrialError: if that cannot be judged, and the guard is strict.
        """
        try:
            decision = self.guard.decide(
                found,
                study=self.study.study_name,
                trial=self.trial.number,
                params=params.given,
                grounds=grounds,
            )
        except UnguardedTrialError as error:
            self._write_unjudged(str(error))
            raise
        return self._keep(decision, params.used)

    def _keep(self, decision: Decision, used: Mapping[str, Any]) -> Decision:
        verdict = decision.verdict
        self.decision, self.params, self.error, self.missing = decision, used, None, ()
        self.owner.search_of(self.study).count(verdict)
        self.guard_s += verdict.guard_s
        attributes = attributes_of(verdict, self.owner.device) | {"decision_id": decision.id, "guard_s": self.guard_s}
        self._write(attributes, verdict.margins)
        return decision

    def _write(self, attributes: Mapping[str, Any], margins: Mapping[Quantity, float] | None = None) -> None:
        """Write into the trial; its constraints stay without ``margins``. If the storage cannot be reached, warn once and go on.

        Optuna will raise its own error.
        """
        try:
            write(self.study, self.trial, attributes, {} if margins is None else self.owner.constraints_of(self.study, margins))
        except Exception as error:
            self.guard.warn_once(
                UnguardedTrialWarning,
                f"PerfGuard could not write into trial {self.trial.number} (shown once): {type(error).__name__}: {error}",
            )

    # Nothing runs unguarded in silence: the reason is written into the trial, and the first one is a warning.

    def report_unjudged(self, build: AnyBuild | None) -> None:
        """Report why the trial runs without a verdict, unless it has one.

        Raises:
            UnguardedTrialError: if the guard is strict.
        """
        if self.decision is not None or self.is_over:
            return
        if self.error is not None:
            self.decide(WatchedParams(self.trial.params), self.error)
        else:
            self.report_unguarded(self.why_unjudged(build))

    def report_ended(self, state: TrialState) -> None:
        """Report a trial that ends in ``state`` and was never judged, as a sampler's ``after_trial`` knows it.

        A trial that failed, pruned itself or was interrupted has its own reason to end, so there is no warning and no error.
        """
        if self.decision is not None or self.is_over or has_verdict(self.trial):
            return
        build = self.owner.build
        if state != TrialState.COMPLETE:
            how = {TrialState.FAIL: "failed or was interrupted", TrialState.PRUNED: "pruned itself"}.get(state, "ended")
            self._write_unjudged(f"it {how} before PerfGuard could judge it.")
        elif build is None or self.missing or self.error is not None:
            self.report_unjudged(build)
        else:
            self.report_unguarded(
                "PerfGuard never judged a trial: the objective does not call trial.should_prune(), and Optuna calls a pruner "
                "nowhere else. Make the study with `study = perfguard_optuna.create_study(...)`, or begin the objective's work "
                "with `if trial.should_prune(): raise optuna.TrialPruned`, right after the last suggestion."
            )

    def why_unjudged(self, build: AnyBuild | None) -> str:
        """Return why the trial has no verdict, and what to do."""
        if self.missing:
            mend = "Correct the name in build, or suggest all that build needs before the first should_prune()."
            return f"{why_missing(self.missing, self.trial.params)}. {mend}"
        if self.owner.build is None and build is None:
            return (
                "PerfGuard does not know what the trials run. Make the study with `perfguard_optuna.create_study(...)`, or "
                "wrap the objective: `study.optimize(perfguard_optuna.guarded(objective, gpu=...))`."
            )
        return "The objective suggested nothing that PerfGuard could judge by. Suggest what build needs."

    def report_unguarded(self, why: str) -> None:
        """Report ``why`` the trial runs without a verdict, or against it.

        Raises:
            UnguardedTrialError: if the guard is strict.
        """
        self._write_unjudged(why)
        if self.guard.strict:
            raise UnguardedTrialError(why)
        self.guard.warn_once(UnguardedTrialWarning, f"A trial runs unguarded. {why}", about="unjudged")

    def _write_unjudged(self, why: str) -> None:
        self.is_over = True
        verdict = Verdict(action="launch", unjudged=why)
        self._write(attributes_of(verdict, self.owner.device), verdict.margins)

    def too_slow(self) -> str | None:
        """Return why the trial will break its time budget at the measured pace, and write it down. None: it may hold it."""
        if self.run is None or self.decision is None or self.guard.on_violation == "warn":
            return None
        reason = self.guard.breaks_time_budget(self.decision, self.run)
        if reason is not None:
            self.is_too_slow = True
            self._write({"stopped": reason}, self._margins_over("time"))
        return reason

    def _margins_over(self, quantity: Quantity, excess: float = 0.0) -> Mapping[Quantity, float]:
        """The margins of a trial that broke a limit: those of its verdict, but this one at least 1% over: it may be unknown."""
        budget = self.guard.budget
        if quantity == "time" and "time" not in budget.most and "cost" in budget.most:
            quantity = "cost"  # which limits the time
        return {**self.verdict.margins, quantity: max(excess, 0.01)}

    def _after_step(self, optimizer: Any) -> None:
        if self.real_step is not None:
            self.real_step.after_step(optimizer)
        self.check_pace()

    def check_pace(self) -> None:
        """Look at the pace of the running trial. To look at all steps after each would cost more than a step, in the end.

        Of a trial that several ranks run, only ``should_prune()`` shows the pace: all ranks ask it together.

        Raises:
            optuna.TrialPruned: if the trial will break its time budget.
        """
        if self.run is None or self.run.num_steps % max(1, self.run.num_steps // 50) or leads_ranks():
            return
        if reason := self.too_slow():
            raise optuna.TrialPruned(reason)

    def read_repair(self) -> Repair:
        """Return the change that makes the trial fit. An objective that asks for it is trusted to apply it."""
        self.repair_was_read = True
        return self.verdict.repair

    @on_guard_time
    def try_again(self, build: AnyBuild) -> bool:
        """Decide how the trial, which has ended out of memory, runs once more. Return False if it cannot run in another way."""
        params = WatchedParams(self.trial.params)
        if not self.repair_was_read:
            self.guard.warn_once(
                UnguardedTrialWarning,
                "A trial ran out of memory before its objective called `repair_of(trial)`, so it is pruned and does not run once "
                "more (shown once). Call it before anything is allocated, and apply what it returns.",
                about="on_oom",
            )
        elif self.decision is not None:
            decision = self.guard.decide(
                self.guard.describe(build, params),
                study=self.study.study_name,
                trial=self.trial.number,
                params=params.given,
                ran_out=self.decision,
            )
            if decision.verdict.action == "repair":
                self.is_over = False
                self._keep(decision, params.used)
                return True
        return False

    @on_guard_time
    def end(self, how: _HowEnded, *, at_last_step: bool = False, ranks: Ranks | None = None) -> Measurement | None:
        """End the measuring of the trial, and learn from it."""
        was_cut_off = at_last_step or how.note == CUT_SHORT
        if self.is_too_slow and how.note == CUT_SHORT:
            how = how._replace(note=TOO_SLOW)
        run, decision, self.run, self.is_over = self.run, self.decision, None, True
        real_step, self.real_step = self.real_step, None
        if real_step is not None:
            real_step.close()
        assert run is not None
        measurement = self.owner._end_run(run, how, at_last_step=at_last_step)
        if decision is None:  # it ended before its first forward pass
            self.is_over = False
            return None
        if ranks is not None:
            measurement = ranks.end(measurement, how.status)
        if measurement is None:
            return None
        if was_cut_off and measurement.num_steps == 0:  # its memory does not show what its steps need
            measurement = replace(measurement, peak_memory_bytes=None)
        attributes: dict[str, Any] = {"status": measurement.status}
        margins: Mapping[Quantity, float] | None = None
        if elsewhere := self.guard.why_not_measured(measurement):
            attributes["not_measured"] = elsewhere
        else:
            measured = measured_by(measurement, decision.verdict.predicted)
            attributes |= {column(quantity, "measured"): value for quantity, value in measured.items()}
            if measurement.first_step_s is not None:
                attributes["first_step_s"] = measurement.first_step_s
            if measurement.status == "ok" and not self.is_too_slow:
                margins = _margins_as_measured(decision.verdict, measured, is_whole=not was_cut_off)
            if measurement.status == "oom":
                limit = next((limit.limit for limit in decision.verdict.limits if limit.quantity == "memory"), None)
                needed = measurement.peak_memory_bytes
                margins = self._margins_over("memory", math.log(needed / limit) if needed and limit else 0.0)
        if measurement.status == "timeout":
            attributes["stopped"], margins = how.note, self._margins_over("time")
        self._write(attributes, margins)
        if decision.verdict.action == "repair" and not self.repair_was_read:
            self.guard.warn_once(
                UnguardedTrialWarning,
                "PerfGuard repaired a trial, but its objective did not call `repair_of(trial)`, so it ran as "
                "proposed, and PerfGuard learns nothing from it.",
                about="repair",
            )
        else:
            self.owner.search_of(self.study).num_ended += 1
            self.guard.learn(decision, measurement, difference=None if real_step is None else real_step.difference)
        return measurement


class GuardedRun:
    """A ``with`` block in which a trial runs and is measured. Made by :meth:`OptunaGuard.trial`."""

    def __init__(
        self,
        guard: OptunaGuard,
        trial: KnownTrial | None,
        found: AnyWorkload | Exception | None,
        ranks: Ranks | None = None,
    ) -> None:
        self._guard = guard
        self._trial = trial
        """None: that of rank 0."""
        self._found = found
        """What the block runs, or why that is not known. None: what `build` describes."""
        self._ranks = ranks
        self._shared: Verdict | None = None
        self._run: Run | None = None
        self._has_begun = False
        self.measurement: Measurement | None = None
        """Measured cost of the trial; None while it runs."""

    def __enter__(self) -> GuardedRun:
        self._has_begun = True
        guard, trial, ranks = self._guard, self._trial, self._ranks
        if trial is None:
            assert ranks is not None
            self._shared = verdict_from(ranks.join())
            self._run = guard._start_run()
            return self
        sharing: AbstractContextManager[dict[str, Any]] = ranks.judging() if ranks else nullcontext({})
        with sharing as shared:
            if not trial.begin(guard.build, found=self._found):
                trial.begin(None, found=ConfigurationError(trial.why_unjudged(guard.build)))
            shared.update(columns_of(self.verdict))
        self._run = trial.run
        trial.read_repair()  # the block applies it
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._trial is not None:
            self.measurement = self._guard.finish(self._trial.study, error, self._ranks)
        elif self._run is not None and self._ranks is not None:
            how = _how_ended(error)
            self.measurement = self._ranks.end(self._guard._end_run(self._run, how), how.status)
        is_last = self._trial is None and self._ranks is not None and not self._ranks.repeat
        if is_last or not self._guard.ends_or_repeats:  # else the objective around it has to end
            prune_if_ran_out(error, self._ranks)

    def __del__(self) -> None:
        if not self._has_begun:
            warn_user(
                "guard.trial(...) does nothing by itself, so a trial ran unguarded. Write `with guard.trial(...) as run:` around "
                "the training.",
                UnguardedTrialWarning,
            )

    @property
    def verdict(self) -> Verdict:
        """The verdict on the trial."""
        if self._trial is None:
            return self._shared or Verdict(action="launch", unjudged="rank 0 has not judged it")
        return self._trial.verdict

    @property
    def repair(self) -> Repair:
        """Change that makes the trial fit; see :class:`perfguard.repair.Repair`."""
        return self.verdict.repair

    @property
    def num_steps(self) -> int:
        """Steps marked so far."""
        return 0 if self._run is None else self._run.num_steps

    def step(self) -> None:
        """Mark the end of one training step.

        Raises:
            optuna.TrialPruned: if the trial will break its time budget at the pace that was measured.
        """
        if self._run is None:
            return
        self._run.step()
        if self._trial is not None:
            self._trial.check_pace()


class _HowEnded(NamedTuple):
    """How a trial ended, for its measurement."""

    status: Status
    note: str = ""


def _how_ended(error: BaseException | None) -> _HowEnded:
    if isinstance(error, optuna.TrialPruned):
        return _HowEnded("ok", CUT_SHORT)
    if isinstance(error, TimeLimitReached):
        return _HowEnded("timeout", str(error))
    return _HowEnded(status_of(error), "" if error is None else f"{type(error).__name__}: {error}"[:200])


def _margins_as_measured(verdict: Verdict, measured: Mapping[Quantity, float], *, is_whole: bool) -> Mapping[Quantity, float]:
    """Return the margins of a trial that ended well: log(measured / limit), and those of its verdict where nothing was read."""
    whole = {name: value for name, value in measured.items() if value > 0 and (is_whole or name not in ("time", "cost"))}
    read = {limit.quantity: math.log(whole[limit.quantity] / limit.limit) for limit in verdict.limits if limit.quantity in whole}
    return {**verdict.margins, **read}


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Return whether ``error`` is of memory. An error of PerfGuard or of Optuna may quote one, and is none."""
    quotes_others = isinstance(error, (UnguardedTrialError, optuna.TrialPruned))
    return isinstance(error, Exception) and not quotes_others and status_of(error) == "oom"


def prune_if_ran_out(error: BaseException | None, ranks: Ranks | None = None) -> None:
    """Turn an error of memory or of the hard time limit into a pruned trial. Of several ``ranks``, all do or none does."""
    is_oom = ran_out_of_memory(error) if ranks is None else ranks.end_together
    if error is not None and (is_oom or (ranks is None and isinstance(error, TimeLimitReached))):
        free_memory(error)
        raise optuna.TrialPruned(f"ran out of memory: {error}" if is_oom else str(error)) from error


def trial_of(study: optuna.Study, study_name: str, number: int) -> FrozenTrial | None:
    """Return the trial with that number of the study with that name. None: ``study`` is another, or has no such trial."""
    trials = study.get_trials(deepcopy=False) if study_name == study.study_name else []
    return next((trial for trial in trials if trial.number == number), None)
