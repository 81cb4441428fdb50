"""OptunaSession: the session of one trial of an Optuna study. It translates between the core and Optuna.

The core decides, and this file says it in Optuna's words: a verdict is :class:`optuna.TrialPruned`, attributes and constraints of
the trial. What only Optuna has is here, too: parameters that are suggested one by one, and ends that nobody reports.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import optuna
from optuna.trial import TrialState

from perfguard.capture import DryRuns
from perfguard.exceptions import ConfigurationError, MeasurementWarning, TooLargeError, UnguardedTrialError, UnguardedTrialWarning
from perfguard.guard import Guard
from perfguard.guard_time import GuardClock, on_guard_time
from perfguard.measure import Measurement, Run, status_of
from perfguard.record import column
from perfguard.repair import Repair
from perfguard.session import Ending, HowEnded, TrialSession
from perfguard.time_limit import TimeLimitReached
from perfguard.verdict import Decision, Verdict
from perfguard.workload import (
    AnyBuild,
    AnyWorkload,
    CapturedTrial,
    WatchedParams,
    did_you_mean,
    is_missing_parameter,
    why_missing,
)
from perfguard_optuna.attributes import AnyTrial, attributes_of, has_verdict, write
from perfguard_optuna.facts import asked_for
from perfguard_optuna.ranks import Ranks, leads_ranks

if TYPE_CHECKING:
    from perfguard.capture.real import Difference, RealStep
    from perfguard.quantities import Quantity
    from perfguard_optuna.guard import OptunaGuard


@dataclass(slots=True)
class OptunaSession:
    """One trial of a study under a guard. Made by :meth:`OptunaGuard.session_of`."""

    owner: OptunaGuard
    study: optuna.Study
    trial: AnyTrial
    core: TrialSession
    """The session of the core, which has the rules."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Those that ``build`` read for the decision."""
    missing: Collection[str] = ()
    """Parameters that ``build`` read and the trial did not have at its last judgement."""
    error: Exception | None = None
    """What ``build`` raised then."""
    run: Run | None = None
    """The measurement, while the trial runs."""
    real_step: RealStep | None = None
    """Holds a step of the running trial against its dry run. None: that was done for an equal trial."""
    is_over: bool = False
    """Whether it was measured, or reported as unguarded. It is not judged again."""
    guard_s: float = 0.0
    """The guard's time that its verdicts have, see :attr:`perfguard.verdict.Verdict.guard_s`."""

    @property
    def clock(self) -> GuardClock:
        """The clock of the guard's own time."""
        return self.guard.clock

    @property
    def guard(self) -> Guard:
        """The guard of the core."""
        return self.core.guard

    @property
    def decision_now(self) -> Decision | None:
        """The decision on the trial, if it was judged with the parameters that it has now."""
        params = self.trial.params
        is_same = all(name in params and params[name] == value for name, value in self.params.items())
        return self.core.decision if is_same else None

    @property
    def verdict(self) -> Verdict:
        """The verdict on the trial with the parameters that it has now."""
        decision = self.decision_now
        return Verdict(action="launch", unjudged="it was not judged") if decision is None else decision.verdict

    # --- Before the launch ------------------------------------------------------------------------------------------------------

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

        A trial that waits for its verdict until its first forward pass is measured, too. With ``keeps_pace``, a step of an
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
        is_waiting = self.core.problem is not None
        decision = self.decision_now
        if decision is None and not is_waiting:
            decision = self.judge(build, final=final, found=found)
        if decision is None and not is_waiting:
            return False
        if decision is not None and decision.verdict.action == "prune":
            raise optuna.TrialPruned(decision.verdict.reason)
        self._launch(keeps_pace=keeps_pace)
        return True

    @on_guard_time
    def judge(
        self,
        build: AnyBuild | None,
        *,
        final: bool = True,
        found: AnyWorkload | Exception | None = None,
        may_wait: bool = False,
    ) -> Decision | None:
        """Decide on the trial by its parameters, and write the verdict into it. None: it cannot be judged yet.

        Args:
            build: describes what the trial runs. None: nobody knows it, or it is ``found``.
            final: whether this is the last attempt. Before, a default for a missing parameter, or an error of ``build``, delays
                the verdict.
            found: what the trial runs, in the place of ``build``, or why that is not known.
            may_wait: as for :meth:`TrialSession.judge`.

        Raises:
            UnguardedTrialError: if it cannot be judged, and the guard is strict.
        """
        self.core.dry_runs = build if isinstance(build, DryRuns) else None
        params = WatchedParams(self.trial.params)
        if found is None and build is not None:
            found = self._described(build, params, final=final)
        return None if found is None else self.decide(params, found, may_wait=may_wait)

    def _described(self, build: AnyBuild, params: WatchedParams, *, final: bool) -> AnyWorkload | Exception | None:
        """Return what the trial runs by its ``build``, or why that is not known. None: a parameter may be missing yet."""
        with asked_for(self.study, self.trial):
            found = self.guard.describe(build, params)
        if not isinstance(found, Exception):
            self.missing = params.missing
            if params.missing and not final:
                return None
            self._warn_of_slips(params)
            return found
        if is_missing_parameter(found, params.given):
            self.missing = {found.args[0]}
            return None
        self.error = found
        is_hopeless = isinstance(found, TooLargeError) and not params.missing
        return found if final or is_hopeless else None  # `build(**params)` raises another error where one is missing

    def _warn_of_slips(self, params: WatchedParams) -> None:
        """Warn if a name for which a default counts is nearly one that the trial has."""
        for name in params.missing:
            if did_you_mean(name, params.given):
                self.guard.warn_once(
                    UnguardedTrialWarning,
                    f"{why_missing([name], params.given)}, so its default counts in every verdict. Correct the name in build.",
                    about=name,
                )

    def decide(self, params: WatchedParams, found: AnyWorkload | Exception, *, may_wait: bool = False) -> Decision | None:
        """Decide on what was ``found`` of the trial, and write the verdict into it. ``params`` are those that were read for it.

        ``may_wait`` and the result are those of :meth:`TrialSession.judge`.

        Raises:
            UnguardedTrialError: if that cannot be judged, and the guard is strict.
        """
        key = self.guard.key_of(found, params.used or params.given)
        with self._writing_errors():
            decision = self.core.judge(found, params.given, key=key, may_wait=may_wait)
        if decision is not None:
            self._note(decision, params.used)
        return decision

    def _note(self, decision: Decision, used: Mapping[str, object]) -> None:
        """Note a new decision, for which the parameters ``used`` were read, and write it into the trial."""
        self.params = used
        self.error = None
        self.missing = ()
        verdict = decision.verdict
        self.guard_s += verdict.guard_s
        attributes = attributes_of(verdict, self.owner.device) | {"decision_id": decision.id, "guard_s": self.guard_s}
        self._write(attributes, verdict.margins)

    @contextmanager
    def _writing_errors(self) -> Iterator[None]:
        """Write into the trial why a strict guard does not launch it."""
        try:
            yield
        except UnguardedTrialError as error:
            self._write_unjudged(str(error))
            raise

    def _launch(self, *, keeps_pace: bool) -> None:
        if self.core.captured is not None:
            from perfguard.capture.real import RealStep  # loads torch

            self.real_step = RealStep(self.core.captured, self.owner.device.kind)
        if self.owner.calls_objective and not leads_ranks():  # else nobody reports the end of a trial
            with self.clock.paused():
                self.core.take_room()
        self.run = start_run(self.guard, self._after_step if keeps_pace else None)
        self.owner.running[threading.get_ident()] = self

    # --- While it runs ----------------------------------------------------------------------------------------------------------

    @on_guard_time
    def judge_late(self, found: CapturedTrial | Exception, *, set_up_s: float, waited_s: float) -> None:
        """Judge the trial, which runs already, by what was ``found`` of it: what it runs, or why that is not known.

        Its set-up took ``set_up_s`` seconds. It has ``waited_s`` seconds for that, and waits for the verdict. Neither is its own
        time.

        Raises:
            optuna.TrialPruned: if the trial does not fit.
            UnguardedTrialError: if it cannot be judged, and the guard is strict.
        """
        self.clock.add(waited_s)
        params = WatchedParams(self.trial.params)
        made = found if isinstance(found, Exception) else self.guard.with_steps(found, params)
        with nullcontext() if self.run is None else self.run.left_out(after_s=waited_s), self._writing_errors():
            decision = self.core.judge_late(made, params.given, set_up_s=set_up_s)
            self._note(decision, params.used)
        if decision.verdict.action == "prune":
            self.run = None
            self.core.leave_room()
            self.owner.running.pop(threading.get_ident(), None)
            raise optuna.TrialPruned(decision.verdict.reason)

    def too_slow(self) -> str | None:
        """Return why the trial will break its time budget at the measured pace, and write it down. None: it may hold it."""
        reason = None if self.run is None else self.core.too_slow(self.run)
        if reason is not None:
            self._write({"stopped": reason}, self.core.margins_over("time"))
        return reason

    def _after_step(self, optimizer: object) -> None:
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
        self.core.applies_repair = True
        return self.verdict.repair

    # --- After its end ----------------------------------------------------------------------------------------------------------

    @on_guard_time
    def try_again(self, build: AnyBuild) -> bool:
        """Decide how the trial, which has ended out of memory, runs once more. Return False if it cannot run in another way."""
        params = WatchedParams(self.trial.params)
        is_repaired = self.core.try_again(self.guard.describe(build, params), params.given)
        if is_repaired and self.core.decision is not None:
            self.is_over = False
            self._note(self.core.decision, params.used)
        return is_repaired

    @on_guard_time
    def end(self, how: HowEnded, *, at_last_step: bool = False, ranks: Ranks | None = None) -> Measurement | None:
        """End the measuring of the trial, and learn from it.

        Returns:
            None: it ended before its first forward pass, or could not be measured.
        """
        run = self.run
        real_step = self.real_step
        assert run is not None
        self.run = None
        self.core.leave_room()
        self.real_step = None
        if real_step is not None:
            real_step.close()
        measurement = end_run(self.guard, run, self.core.how_ended(how), at_last_step=at_last_step)
        self.is_over = self.core.decision is not None
        if not self.is_over:
            return None
        if ranks is not None:
            measurement = ranks.end(measurement, how.status)
        if measurement is None:
            return None
        difference = None if real_step is None else real_step.difference
        return self.end_with(measurement, how, is_whole=not at_last_step and not how.cut_short, difference=difference)

    def end_with(
        self, measurement: Measurement, how: HowEnded, *, is_whole: bool | None = None, difference: Difference | None = None
    ) -> Measurement:
        """Learn from what the trial cost, and write that into it. Another process may have measured it.

        The other arguments are those of :meth:`TrialSession.end`.
        """
        self.is_over = True
        ending = self.core.end(measurement, is_whole=is_whole, difference=difference)
        self._write_ending(ending, how)
        return ending.measurement

    # --- What is written into the trial -----------------------------------------------------------------------------------------

    def _write_ending(self, ending: Ending, how: HowEnded) -> None:
        status = ending.measurement.status
        attributes: dict[str, Any] = {"status": status}
        if ending.not_measured:
            attributes["not_measured"] = ending.not_measured
        if status == "timeout":
            attributes["stopped"] = how.note
        attributes |= {column(quantity, "measured"): value for quantity, value in ending.measured.items()}
        first_step_s = ending.measurement.first_step_s
        if first_step_s is not None and not ending.not_measured:
            attributes["first_step_s"] = first_step_s
        self._write(attributes, ending.margins)

    def _write(self, attributes: Mapping[str, object], margins: Mapping[Quantity, float] | None = None) -> None:
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
        if self.core.decision is not None or self.is_over:
            return
        if self.error is not None:
            self.decide(WatchedParams(self.trial.params), self.error)
        else:
            self.report_unguarded(self.why_unjudged(build))

    def report_ended(self, state: TrialState) -> None:
        """Report a trial that ends in ``state`` and was never judged, as a sampler's ``after_trial`` knows it.

        A trial that failed, pruned itself or was interrupted has its own reason to end, so there is no warning and no error.
        """
        if self.core.decision is not None or self.is_over or has_verdict(self.trial):
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


def how_ended(error: BaseException | None) -> HowEnded:
    """Return how a trial ended with ``error``."""
    if isinstance(error, optuna.TrialPruned):
        return HowEnded("ok", cut_short="by the tuner")
    if isinstance(error, TimeLimitReached):
        return HowEnded("timeout", str(error))
    return HowEnded(status_of(error), "" if error is None else f"{type(error).__name__}: {error}"[:200])


def start_run(guard: Guard, on_step: Callable[[Any], object] | None = None) -> Run:
    """Begin to measure a trial of the calling thread. A failure is a warning: the trial runs all the same."""
    run = Run(guard.device, on_step=on_step)
    try:
        run.start()
    except Exception as error:
        _warn_unmeasured(guard, error)
    return run


def end_run(guard: Guard, run: Run, how: HowEnded, *, at_last_step: bool = False) -> Measurement | None:
    """End the measuring of a trial. None: it failed, which is a warning."""
    try:
        return run.finish(how.status, note=how.note, cut_short=how.cut_short, at_last_step=at_last_step)
    except Exception as error:
        _warn_unmeasured(guard, error)
        return None


def _warn_unmeasured(guard: Guard, error: Exception) -> None:
    message = f"PerfGuard could not measure a trial (shown once): {type(error).__name__}: {error}"
    guard.warn_once(MeasurementWarning, message)
