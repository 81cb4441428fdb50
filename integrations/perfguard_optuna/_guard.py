"""OptunaGuard: the guard of a study; it judges trials, measures those that run, and writes both into them."""

from __future__ import annotations

import datetime
import gc
import math
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from perfguard.exceptions import (
    BudgetWarning,
    ConfigurationError,
    MeasurementWarning,
    NothingFeasibleWarning,
    TooLargeError,
    UnguardedTrialError,
    UnguardedTrialWarning,
    warn_user,
)
from perfguard.guard import Guard, as_workload
from perfguard.measure import Measurement, Run, Status, status_of
from perfguard.repair import AS_PROPOSED, Repair
from perfguard.verdict import EVEN_CHANCE, Decision, Verdict
from perfguard.workload import Build, Workload, build_workload, is_missing_parameter, why_missing
from perfguard_optuna._attributes import (
    PREFIX,
    attributes_of,
    attributes_of_unjudged,
    constraints_of,
    established_constraints,
    measured_attributes_of,
    write_attributes,
    write_constraints,
)

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Unpack

    from perfguard.devices import Device
    from perfguard.guard import GuardSettings

AnyTrial = FrozenTrial | optuna.Trial
TrialKey = tuple[str, int, datetime.datetime | None]
_Place = tuple[str, tuple[str, ...]]
"""A study, and the names of the parameters that ``build`` read."""
MOST_REJECTIONS_IN_A_ROW = 300
PATIENCE = 30
"""Rejections in a row after which a search that finds nothing sure accepts what is more likely to fit than not."""
_LEAST_VIOLATION = 0.01
"""Constraint of a trial that broke a limit by an unknown amount, as a logarithm."""


class OptunaGuard(Guard):
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
        within_timeout: whether the study's timeout is a limit. If so, a GuardedStudy prunes a trial that would outlast
            ``optimize(timeout=...)``.
        settings: The keyword arguments of :class:`perfguard.Guard`.

    Raises:
        ConfigurationError: for an unknown GPU, a budget or a risk that cannot be right.
        LogError: for a log that cannot be used.
    """

    def __init__(
        self,
        gpu: str | Device = "auto",
        *,
        build: Build | None = None,
        within_timeout: bool = False,
        **settings: Unpack[GuardSettings],
    ) -> None:
        if build is not None and not callable(build):
            raise ConfigurationError(f"build must be a function of the hyperparameters, but got {build!r}.")
        super().__init__(gpu, **settings)
        self.build = build
        self.within_timeout = within_timeout
        self.deadline: float | None = None
        """End of the study's time on the clock of time.monotonic; set by a GuardedStudy."""
        self._judged: dict[TrialKey, _Judged] = {}
        self._launched: dict[int, Launched] = {}
        self._finished: set[TrialKey] = set()
        self._build_errors: dict[TrialKey, Exception] = {}
        self._missing: dict[TrialKey, Collection[str]] = {}
        """Parameters that ``build`` read and the trial did not have at its last judgement."""
        self._unjudged: set[TrialKey] = set()
        self._remembered_for: Build | None = build
        self._rejections: dict[_Place, dict[tuple[Any, ...], _Rejection]] = {}
        self._warned_about_build = False

    @contextmanager
    def trial(
        self, trial: optuna.Trial, model: Workload | nn.Module | None = None, batch: Any = None, **fields: Any
    ) -> Iterator[GuardedRun]:
        """Judge ``trial``, then measure what runs inside the ``with`` block and learn from it.

        Args:
            trial: the trial that Optuna handed to the objective.
            model: what the block trains: a Workload, or a model. None: ``build(trial.params)``.
            batch: an example batch for a model. Tensors, specifications or a shape.
            fields: other fields of :class:`perfguard.Workload`, with a model. Examples are ``optimizer``, ``loss`` and
                ``targets``.

        Raises:
            optuna.TrialPruned: At the start, if the trial would break a limit. Inside the block, by ``run.step()``, if its pace
                will break the time budget. At the end, if it ran out of memory or time.
        """
        study = trial.study
        decision = self.decision_of(study, trial)
        if decision is None:
            self.finish_abandoned(study)
            build = self.build if model is None else lambda _params: as_workload(model, batch, **fields)
            decision = self.judge(study, trial, trial.params, build)
        if decision is None:
            unknown = ConfigurationError(self.why_unjudged(build, self._missing.get(_key(study, trial), ())))
            with self._counted_if_unjudged(study, trial):
                decision = self.decide(_raiser(unknown), study=study.study_name, trial=trial.number, params=trial.params)
            self._warned_about_build = True  # the guard has just warned
        if decision.verdict.action == "prune":
            raise optuna.TrialPruned(decision.verdict.reason)
        launched = self._launched.get(threading.get_ident()) or self.launch(study, trial, decision)
        launched.repair_was_read = True  # the block applies it
        with pruned_if_out_of_resources():
            try:
                yield GuardedRun(launched.run, decision, lambda: self.too_slow(study, launched))
            except BaseException as error:
                self.finish(study, error)
                raise
            self.finish(study, None)

    def decision_of(self, study: optuna.Study, trial: AnyTrial) -> Decision | None:
        """The decision that was made on ``trial``, if it was judged with the parameters that it has now."""
        judged = self._judged.get(_key(study, trial))
        if judged is None or any(
            name not in trial.params or trial.params[name] != value for name, value in judged.params.items()
        ):
            return None
        return judged.decision

    def judge(
        self,
        study: optuna.Study,
        trial: AnyTrial,
        params: Mapping[str, Any],
        build: Build | None,
        *,
        final: bool = True,
        threshold: float | None = None,
    ) -> Decision | None:
        """Decide on ``trial`` and write the verdict into it.

        None: not yet. Either ``build`` is missing, or it reads a parameter that ``params`` does not have. Unless this is the
        ``final`` attempt, a default for a missing parameter also delays the verdict. The parameters of a trial that did not fit
        are remembered. They are judged once more if another trial was launched since, and not again. ``threshold`` is the
        accepted chance of exceeding a limit. It replaces the remaining risk.
        """
        if build is None:
            return None
        if build != self._remembered_for:
            self._rejections, self._remembered_for = {}, build
        rejected = self.remembered(study, params, threshold)
        if rejected is not None:
            return self._reject_again(study, trial, params, rejected)
        watched = WatchedParams(params)
        try:
            workload = build_watched(build, watched)
        except Exception as error:
            if is_missing_parameter(error, params):
                self._missing[_key(study, trial)] = {error.args[0]}
                return None
            is_hopeless = isinstance(error, TooLargeError) and not watched.missing
            if not final and not is_hopeless:  # a parameter may be missing: `build(**params)` raises another error for that
                self._build_errors[_key(study, trial)] = error
                return None
            return self.settle(study, trial, watched, _raiser(error))
        if watched.missing and not final:
            self._missing[_key(study, trial)] = watched.missing
            return None
        return self.settle(study, trial, watched, lambda: workload, threshold)

    def settle(
        self,
        study: optuna.Study,
        trial: AnyTrial,
        params: WatchedParams,
        make_workload: Callable[[], Workload],
        threshold: float | None = None,
    ) -> Decision:
        """Decide on what ``params`` would run, and write the verdict into ``trial``.

        Raises:
            UnguardedTrialError: if that cannot be judged, and the guard is strict.
        """
        self._build_errors.pop(_key(study, trial), None)
        self._missing.pop(_key(study, trial), None)
        with self._counted_if_unjudged(study, trial):
            decision = self.decide(
                make_workload,
                study=study.study_name,
                trial=trial.number,
                params=params.all(),
                time_left_s=self.time_left_s(),
                threshold=threshold,
            )
        if decision.verdict.action == "prune":
            self.remember(study, params, decision.verdict)
        return self._keep(study, trial, decision, params.used())

    def remember(self, study: optuna.Study, params: WatchedParams, verdict: Verdict) -> None:
        """Remember that ``params`` do not fit, unless the verdict depends on a missing parameter or on the time left."""
        if params.missing or self.within_timeout:  # what does not fit into the time left may fit into another study's
            return
        used = params.used()
        if not used:  # a model was given, or this is a build of one workload
            return
        place = study.study_name, tuple(sorted(used))
        known = self._rejections.setdefault(place, {})
        values = _values(used, place[1])
        before = known.get(values)
        num, num_judged = (0, 0) if before is None else (before.num, before.num_judged)
        known[values] = _Rejection(place[1], verdict, self._num_launched, num + 1, num_judged + 1)

    def remembered(self, study: optuna.Study, params: Mapping[str, Any], threshold: float | None = None) -> _Rejection | None:
        """Return the earlier rejection of these parameters, if judging them again would come to the same.

        None has three causes. They were not judged yet. They were judged once, and a trial was launched since, from which the
        guard may have learnt. Or ``threshold`` accepts their chance of breaking a limit; its default is the risk that is left.
        """
        accepted = self.threshold if threshold is None else threshold
        proposed = params.all() if isinstance(params, WatchedParams) else params
        for (study_name, names), known in list(self._rejections.items()):  # other threads add to them
            if study_name != study.study_name or not proposed.keys() >= set(names):
                continue
            found = known.get(_values(proposed, names))
            if found is not None and found.is_final(self._num_launched) and found.verdict.p_violation > accepted:
                return found
        return None

    def has_rejected_again(self, study: optuna.Study) -> bool:
        """Whether the same parameters of ``study`` were rejected more than once."""
        return any(
            rejection.num > 1
            for (study_name, _), known in list(self._rejections.items())
            if study_name == study.study_name
            for rejection in list(known.values())
        )

    def _reject_again(self, study: optuna.Study, trial: AnyTrial, params: Mapping[str, Any], rejected: _Rejection) -> Decision:
        rejected.num += 1
        decision = self.record(rejected.verdict, None, study=study.study_name, trial=trial.number, params=params)
        return self._keep(study, trial, decision, params)

    def _keep(self, study: optuna.Study, trial: AnyTrial, decision: Decision, used: Mapping[str, Any]) -> Decision:
        self._judged[_key(study, trial)] = _Judged(decision, used)
        attributes = attributes_of(decision.verdict, self.device.memory_bytes, self.num_learnt)
        self.write(study, trial, attributes, lambda: self.constraints_of(study, decision.verdict))
        return decision

    def write(
        self,
        study: optuna.Study,
        trial: AnyTrial,
        attributes: Mapping[str, Any],
        constraints: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """Write into ``trial``. If the storage cannot be reached, warn once and continue. Optuna will raise its own error."""
        try:
            write_attributes(study, trial, attributes)
            write_constraints(study, trial, constraints())
        except Exception as error:
            self._warn_once(
                UnguardedTrialWarning,
                f"PerfGuard could not write into trial {trial.number} (shown once): {type(error).__name__}: {error}",
            )

    def constraints_of(self, study: optuna.Study, verdict: Verdict) -> dict[str, float]:
        """Constraints of a trial of ``study`` with that verdict: the distance from feasibility for each limit."""
        return constraints_of(verdict, established_constraints(study, self.limited_quantities))

    @property
    def limited_quantities(self) -> tuple[str, ...]:
        """The quantities that get a constraint each."""
        quantities = self.budget.quantities
        return (*quantities, "time") if self.within_timeout and "time" not in quantities else quantities

    def time_left_s(self) -> float | None:
        """Remaining time of the study; None: it has no time limit."""
        if not self.within_timeout or self.deadline is None:
            return None
        return max(0.0, self.deadline - time.monotonic())

    def launch(self, study: optuna.Study, trial: AnyTrial, decision: Decision) -> Launched:
        """Begin to measure ``trial`` in the calling thread. A trial that cannot be measured runs in any case."""
        run = Run(self.device)
        try:
            run.start()
        except Exception as error:
            self._warn_unmeasured(error)
        launched = Launched(study.study_name, trial, decision, run)
        self._launched[threading.get_ident()] = launched
        return launched

    def has_finished(self, study: optuna.Study, trial: AnyTrial) -> bool:
        """Whether ``trial`` was launched and its measuring has ended; it is not launched again."""
        return _key(study, trial) in self._finished

    def end_unjudged(self, study: optuna.Study, trial: AnyTrial, build: Build | None) -> None:
        """Report once why a trial runs without a verdict, and give it the constraints that every trial has.

        Raises:
            UnguardedTrialError: if the guard is strict.
        """
        key = _key(study, trial)
        error = self._build_errors.get(key)
        if error is not None:
            self.settle(study, trial, WatchedParams(trial.params), _raiser(error))
        elif key not in self._unjudged:
            self._end_unjudged(study, trial, self.why_unjudged(build, self._missing.get(key, ()), trial.params))

    def end_unasked(self, study: optuna.Study, trial: FrozenTrial, state: TrialState) -> None:
        """Do as :meth:`end_unjudged` for a trial that ended in ``state`` and never called the guard.

        A trial that failed, pruned itself or was interrupted may have ended before the call. It has its own reason to end. So
        the missing verdict is written into it, and there is no warning and no error.
        """
        key = _key(study, trial)
        if key in self._judged or key in self._unjudged or f"{PREFIX}:verdict" in trial.user_attrs:
            return
        is_complete = state == TrialState.COMPLETE
        if is_complete and (self.build is None or key in self._missing or key in self._build_errors):
            self.end_unjudged(study, trial, self.build)
        elif is_complete:
            self._end_unjudged(
                study,
                trial,
                f"PerfGuard never judged a trial{self._and_so('it ran unguarded')}: the objective does not call "
                "trial.should_prune(), and Optuna calls a pruner nowhere else. Make the study with "
                "`study = perfguard_optuna.create_study(...)`, or begin the objective's work with "
                "`if trial.should_prune(): raise optuna.TrialPruned`, right after the last suggestion.",
            )
        else:
            how = {TrialState.FAIL: "failed", TrialState.PRUNED: "pruned itself"}.get(state, "ended")
            self._write_unjudged(study, trial, f"it {how} before PerfGuard could judge it.")

    @contextmanager
    def _counted_if_unjudged(self, study: optuna.Study, trial: AnyTrial) -> Iterator[None]:
        """Write the reason into a trial that a strict guard refuses, and mark it as reported."""
        try:
            yield
        except UnguardedTrialError as error:
            self._unjudged.add(_key(study, trial))
            self.write(study, trial, attributes_of_unjudged(str(error)))
            raise

    def _write_unjudged(self, study: optuna.Study, trial: AnyTrial, why: str) -> None:
        self._unjudged.add(_key(study, trial))
        self.write(
            study,
            trial,
            attributes_of_unjudged(why),
            lambda: dict.fromkeys(established_constraints(study, self.limited_quantities), 0.0),
        )

    def _end_unjudged(self, study: optuna.Study, trial: AnyTrial, why: str) -> None:
        self._write_unjudged(study, trial, why)
        if self.strict:
            raise UnguardedTrialError(why)
        if not self._warned_about_build:
            self._warned_about_build = True
            warn_user(why, UnguardedTrialWarning)

    def reject(self, study: optuna.Study, trial: AnyTrial, verdict: Verdict) -> None:
        """Write the rejecting ``verdict`` into ``trial``, because no proposal for it fits."""
        self._keep(study, trial, Decision("", verdict), {})

    def _warn_unmeasured(self, error: Exception) -> None:
        self._warn_once(MeasurementWarning, f"PerfGuard could not measure a trial (shown once): {type(error).__name__}: {error}")

    def running(self, study: optuna.Study, trial: AnyTrial) -> Launched | None:
        """``trial``, if the calling thread has launched it."""
        launched = self._launched.get(threading.get_ident())
        return launched if launched is not None and _key(study, launched.trial) == _key(study, trial) else None

    def too_slow(self, study: optuna.Study, launched: Launched) -> str | None:
        """Record and return why a running trial will break its time budget at the measured pace; None: it may hold it."""
        if self.on_violation == "warn":
            return None
        reason = self.breaks_time_budget(launched.decision, launched.run, time_left_s=self.time_left_s())
        if reason is not None:
            excess = partial(self._excess_of, study, "time", _LEAST_VIOLATION)
            self.write(study, launched.trial, {f"{PREFIX}:stopped": reason}, excess)
        return reason

    def repair_of(self, study: optuna.Study, trial: AnyTrial) -> Repair:
        """The change that makes a trial fit. An objective that calls this is trusted to apply it."""
        launched = self.running(study, trial)
        if launched is not None:
            launched.repair_was_read = True
        decision = self.decision_of(study, trial)
        return AS_PROPOSED if decision is None else decision.verdict.repair

    def finish(self, study: optuna.Study, error: BaseException | None) -> Measurement | None:
        """End the measuring of the calling thread's trial, which ended with ``error``, and learn from it."""
        launched = self._launched.pop(threading.get_ident(), None)
        if launched is None:
            return None
        pruned = isinstance(error, optuna.TrialPruned)
        note = f"{type(error).__name__}: {error}"[:200] if error is not None and not pruned else ""
        measurement = self._measured(launched, "ok" if pruned else status_of(error), note)
        if measurement is None:
            return None
        if pruned:
            measurement = _without_memory_before_a_step(measurement)
        elsewhere = self.why_not_measured(measurement)
        if elsewhere:
            # Whatever ran out of memory is no reading of the guarded device, but says why the trial was pruned.
            why_pruned = {f"{PREFIX}:status": "oom"} if measurement.status == "oom" else {}
            self.write(study, launched.trial, {f"{PREFIX}:not_measured": elsewhere, **why_pruned})
        else:
            happened = partial(self._what_happened, study, launched, measurement)
            cost = self.budget.cost_of(measurement.total_time_s)
            self.write(study, launched.trial, measured_attributes_of(measurement, cost), happened)
        if measurement.status == "oom":
            free_memory()
        if launched.ignored_repair:
            self._warn_once(
                UnguardedTrialWarning,
                "PerfGuard repaired a trial, but its objective did not call `repair_of(trial)`, so it ran as "
                "proposed, and PerfGuard learns nothing from it.",
            )
        else:
            self.learn(launched.decision, measurement)
        return measurement

    def _measured(self, launched: Launched, status: Status, note: str, *, at_last_step: bool = False) -> Measurement | None:
        """The cost of a trial that ends here; None if it could not be measured."""
        self._finished.add(_key(launched.study_name, launched.trial))
        try:
            return launched.run.finish(status, note=note, at_last_step=at_last_step)
        except Exception as error:
            self._warn_unmeasured(error)
            return None

    def _what_happened(self, study: optuna.Study, launched: Launched, measurement: Measurement) -> dict[str, float]:
        """Constraints of a trial that broke a limit in spite of its verdict. They are infeasible for the sampler."""
        quantity = {"oom": "memory", "timeout": "time"}.get(measurement.status)
        if quantity is None:
            return {}
        measured = measurement.peak_memory_bytes if quantity == "memory" else measurement.total_time_s
        limit = next((limit.limit for limit in launched.decision.verdict.limits if limit.quantity == quantity), None)
        excess = math.log(measured / limit) if measured and limit else 0.0
        return self._excess_of(study, quantity, max(excess, _LEAST_VIOLATION))

    def _excess_of(self, study: optuna.Study, quantity: str, excess: float) -> dict[str, float]:
        names = established_constraints(study, self.limited_quantities)
        wanted = ("time", "cost") if quantity == "time" else (quantity,)  # a budget of cost limits the time
        return {next((name for name in wanted if name in names), names[0]): excess} if names else {}

    def finish_abandoned(self, study: optuna.Study) -> None:
        """End the measurement of a trial without a reported end. In a plain study, the next trial's first call does this."""
        launched = self._launched.pop(threading.get_ident(), None)
        if launched is None:
            return
        trials = study.get_trials(deepcopy=False) if launched.study_name == study.study_name else []
        ended = next((trial for trial in trials if trial.number == launched.trial.number), None)
        failed = ended is not None and ended.state == TrialState.FAIL
        note = (
            "ended at its last step, because its end was not reported" if launched.run.num_steps else "its end was not reported"
        )
        measurement = self._measured(launched, "failed" if failed else "ok", note, at_last_step=True)
        if measurement is not None:
            self.learn(launched.decision, _without_memory_before_a_step(measurement))

    def why_unjudged(
        self, build: Build | None = None, missing: Collection[str] = (), params: Mapping[str, Any] | None = None
    ) -> str:
        """The reason why a trial with ``params`` is launched without a verdict: an unknown workload, or ``missing``
        parameters."""
        if missing:
            return (
                f"{why_missing(missing, params or {})}{self._and_so('trials run unguarded')}. Correct the name in build, or "
                "suggest all that build needs before the first should_prune()."
            )
        if self.build is None and build is None:
            return (
                f"PerfGuard does not know what the trials run{self._and_so('they are launched unguarded')}. Give it "
                "`build=lambda params: Workload(...)`, or wrap the training in `with guard.trial(trial, model, batch): ...`."
            )
        unguarded = self._and_so("trials run unguarded")
        return f"The objective suggested nothing that PerfGuard could judge by{unguarded}. Suggest what build needs."

    def _and_so(self, consequence: str) -> str:
        """The consequence for a warning. A strict guard has none, because it ends the study."""
        return "" if self.strict else f", so {consequence}"

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_launched": {}, "deadline": None}


@dataclass(slots=True)
class _Rejection:
    """Parameters that do not fit."""

    names: tuple[str, ...]
    """Parameters that ``build`` read."""
    verdict: Verdict
    num_launched: int
    """Trials that the guard had launched when they were judged last."""
    num: int
    """Number of rejected proposals of these parameters."""
    num_judged: int
    """Number of judgements among them. The other proposals were rejected from memory."""

    def is_final(self, num_launched: int) -> bool:
        """Whether judging them again would come to the same: nothing was launched since, or it was done before."""
        return self.num_judged > 1 or self.num_launched == num_launched


@dataclass(slots=True)
class Search:
    """State of one search: its proposals since the last launch."""

    guard: OptunaGuard
    num_rejected: int = 0
    """Proposals in a row that do not fit."""
    least_doubtful: float = 1.0
    """Their least chance of breaking a limit."""
    last: Verdict | None = None
    """Verdict on the last of them."""
    has_warned: bool = False
    """Whether it has warned that nothing fits."""
    has_launched: bool = False
    """Whether it ever found something to launch."""

    @property
    def threshold(self) -> float | None:
        """The chance of breaking a limit to accept; None: what the guard's risk budget has left.

        A search may find nothing sure for a while, but something that is more likely to fit than not. Then it begins a new
        risk budget. Otherwise a machine whose times scatter would end a study that has trials to run.
        """
        if self.num_rejected < PATIENCE or self.least_doubtful > self.guard.first_threshold:
            return None
        return self.guard.first_threshold

    @property
    def is_over(self) -> bool:
        """Whether so much was rejected that there is nothing to be found."""
        return self.num_rejected >= MOST_REJECTIONS_IN_A_ROW

    def rejected(self, verdict: Verdict) -> None:
        """Count a proposal that does not fit."""
        self.num_rejected, self.last = self.num_rejected + 1, verdict
        self.least_doubtful = min(self.least_doubtful, verdict.p_violation)

    def warn_that_nothing_fits(self) -> None:
        """Warn once that the search finds nothing, and how to fix it. Without a proposal there is no warning."""
        if self.last is None or self.has_warned:
            return
        self.has_warned = True
        what, verb, remedy = "fits", "would", ""
        if self.last.p_violation <= EVEN_CHANCE:
            more_risk = math.ceil(10 * self.last.p_violation) / 10
            what, verb, remedy = "is sure to fit", "may", f", accept more risk (risk={more_risk:g})"
        warn_user(
            f"Nothing {what}: {self.num_rejected} proposals in a row {verb} break a budget, the last of them {self.last.reason}. "
            f"The study ends here. Raise the budget, widen the search space towards smaller trials{remedy}, "
            "or allow repairs (on_violation='repair').",
            NothingFeasibleWarning,
        )

    def launched(self, verdict: Verdict | None) -> None:
        """Begin to count anew; None: it was launched without a verdict."""
        if self.threshold is not None and verdict is not None and verdict.p_violation > self.guard.risk:
            self.guard._warn_once(
                BudgetWarning,
                f"No proposal is certain to fit ({self.num_rejected} in a row), so PerfGuard launches a trial that more likely "
                "fits than not (shown once). The share of violations may exceed `risk`. Raise the budget, or the risk.",
                about="patience",
            )
        self.num_rejected, self.least_doubtful, self.has_launched = 0, 1.0, True


class GuardedRun:
    """A trial that was launched and is being measured."""

    def __init__(self, run: Run, decision: Decision, too_slow: Callable[[], str | None]) -> None:
        self._run = run
        self._too_slow = too_slow
        self.verdict = decision.verdict
        self.repair = decision.verdict.repair
        """Change that makes the trial fit; see :class:`perfguard.repair.Repair`."""

    def step(self) -> None:
        """Mark the end of one training step.

        Raises:
            optuna.TrialPruned: if the trial will break its time budget at the pace that was measured.
        """
        self._run.step()
        if self._run.num_steps % max(1, self._run.num_steps // 50):
            return  # to look at all steps after each would cost more than a step, in the end
        if reason := self._too_slow():
            raise optuna.TrialPruned(reason)

    @property
    def num_steps(self) -> int:
        """Steps marked so far."""
        return self._run.num_steps

    @property
    def measurement(self) -> Measurement | None:
        """Measured cost of the trial; None while it runs."""
        return self._run.measurement


@dataclass(slots=True)
class Launched:
    """A trial that is being measured."""

    study_name: str
    trial: AnyTrial
    decision: Decision
    run: Run
    repair_was_read: bool = False

    @property
    def ignored_repair(self) -> bool:
        """Whether the objective ran a trial as proposed that was to be repaired."""
        return self.decision.verdict.action == "repair" and not self.repair_was_read


@dataclass(frozen=True, slots=True)
class _Judged:
    decision: Decision
    params: Mapping[str, Any]
    """Parameters that ``build`` read."""


class WatchedParams(dict[str, Any]):
    """Parameters that record which of them were read, and which missing ones were.

    ``build`` may remove items, as from any dict, so a copy of the given ones is kept.
    """

    def __init__(self, params: Mapping[str, Any]) -> None:
        self._given = params.all() if isinstance(params, WatchedParams) else dict(params)
        super().__init__(self._given)
        self.missing: set[str] = set()
        self._used: set[str] = set()

    def refill(self) -> None:
        """Restore the given items for another attempt. The record of what was read stays."""
        self.clear()
        self.update(self._given)

    def all(self) -> dict[str, Any]:
        """All given parameters, without recording them as read."""
        return dict(self._given)

    def used(self) -> dict[str, Any]:
        """The parameters that were read."""
        return {name: value for name, value in self._given.items() if name in self._used}

    def _look_at_all(self) -> None:
        self._used.update(self._given)

    def __getitem__(self, key: str) -> Any:
        self._used.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Same as for a dict."""
        present = key in self
        return self[key] if present else default

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Same as for a dict."""
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        """Same as for a dict."""
        if default and key not in self:
            return default[0]
        value = self[key]
        del self[key]
        return value

    def popitem(self) -> tuple[str, Any]:
        """Same as for a dict."""
        self._look_at_all()
        return super().popitem()

    def __contains__(self, key: object) -> bool:
        present = super().__contains__(key)
        if present:
            self._used.add(str(key))
        elif key not in self._given:
            self.missing.add(str(key))
        return present

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        self._look_at_all()
        return super().__len__()

    def __eq__(self, other: object) -> bool:
        self._look_at_all()
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def keys(self) -> Any:
        """Same as for a dict."""
        self._look_at_all()
        return dict.keys(self)

    def values(self) -> Any:
        """Same as for a dict."""
        self._look_at_all()
        return dict.values(self)

    def items(self) -> Any:
        """Same as for a dict."""
        self._look_at_all()
        return dict.items(self)

    def copy(self) -> dict[str, Any]:
        """Same as for a dict."""
        self._look_at_all()
        return dict(dict.items(self))

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __reversed__(self) -> Iterator[str]:
        self._look_at_all()
        return super().__reversed__()


def build_watched(build: Build, params: WatchedParams) -> Workload:
    """``build_workload``, which may try twice: the second attempt finds all parameters, whatever the first took out."""

    def attempt(watched: Mapping[str, Any]) -> Workload:
        try:
            return build(watched)
        except BaseException:
            params.refill()
            raise

    return build_workload(attempt, params)


@contextmanager
def pruned_if_out_of_resources() -> Iterator[None]:
    """Turn an out-of-memory error into a pruned trial, so that the study goes on."""
    try:
        yield
    except UnguardedTrialError:  # whatever its message quotes
        raise
    except Exception as error:
        if status_of(error) != "oom":
            raise
        raise optuna.TrialPruned(f"ran out of memory: {error}") from error


def _without_memory_before_a_step(measurement: Measurement) -> Measurement:
    """The memory of a trial that ended before its first step does not show what its steps need."""
    return replace(measurement, peak_memory_bytes=None) if measurement.num_steps == 0 else measurement


def free_memory() -> None:
    """Give back what a trial that ran out of memory has left behind."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _values(params: Mapping[str, Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    """The parameters called ``names`` as a key; a category may be anything, a list among others, and 1 is not True."""
    values = (params[name] for name in names)
    return tuple((type(value).__name__, value if isinstance(value, (int, float, str)) else repr(value)) for value in values)


def _key(study: optuna.Study | str, trial: AnyTrial) -> TrialKey:
    """Key of a trial. The start distinguishes it from a trial in a deleted study of the same name."""
    return study if isinstance(study, str) else study.study_name, trial.number, trial.datetime_start


def _raiser(error: Exception) -> Any:
    def raise_it() -> Workload:
        raise error

    return raise_it
