"""OptunaGuard: the guard of a study; it judges trials, measures those that run, and writes both into them."""

from __future__ import annotations

import datetime
import gc
import math
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from perfguard.exceptions import (
    ConfigurationError,
    MeasurementWarning,
    NothingFeasibleWarning,
    TooLargeError,
    UnguardedTrialWarning,
)
from perfguard.guard import EVEN_CHANCE, Decision, Guard, Verdict, as_workload
from perfguard.measure import Measurement, Run, Status, status_of
from perfguard.repair import AS_PROPOSED, Repair
from perfguard.workload import Build, Workload, asks_for_missing, build_workload
from perfguard_optuna._attributes import (
    PREFIX,
    attributes_of,
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
MOST_REJECTIONS_IN_A_ROW = 300
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
        build: ``build(params) -> Workload``, a function of the hyperparameters. None: trials are judged only where the objective
            calls :meth:`trial` with a model or a workload.
        within_timeout: in a GuardedStudy, whether a trial that would outlast ``optimize(timeout=...)`` is pruned.
        settings: the keyword arguments of :class:`perfguard.Guard`.

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
        """When the study's time ends, on time.monotonic's clock; set by a GuardedStudy."""
        self._judged: dict[TrialKey, _Judged] = {}
        self._launched: dict[int, Launched] = {}
        self._finished: set[TrialKey] = set()
        self._build_errors: dict[TrialKey, Exception] = {}
        self._warned_about_build = False

    @contextmanager
    def trial(
        self, trial: optuna.Trial, model: Workload | nn.Module | None = None, batch: Any = None, **fields: Any
    ) -> Iterator[GuardedRun]:
        """Judge ``trial``, then measure what runs inside the ``with`` block and learn from it.

        Args:
            trial: the trial that Optuna handed to the objective.
            model: what the block is going to train: a Workload, or a model. None: ``build(trial.params)``.
            batch: with a model: an example batch (tensors, specifications or a shape).
            fields: with a model: other fields of :class:`perfguard.Workload`, such as ``optimizer``, ``loss`` and ``targets``.

        Raises:
            optuna.TrialPruned: at the start, if the trial would break a limit; inside, by ``run.step()``, if its pace will break
                the time budget; at the end, if it ran out of memory or time.
        """
        study = trial.study
        decision = self.decision_of(study, trial)
        if decision is None:
            self.finish_abandoned(study)
            build = self.build if model is None else lambda _params: as_workload(model, batch, **fields)
            decision = self.judge(study, trial, trial.params, build)
        if decision is None:
            unknown = ConfigurationError(self.why_unjudged())
            decision = self.decide(_raiser(unknown), study=study.study_name, trial=trial.number, params=trial.params)
            self._warned_about_build = True  # the guard has just said why
        if decision.verdict.action == "prune":
            raise optuna.TrialPruned(decision.verdict.reason)
        launched = self._launched.get(threading.get_ident()) or self.launch(study, trial, decision)
        launched.asked_for_repair = True  # it is in the block's hands
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
    ) -> Decision | None:
        """Decide on ``trial`` and write the verdict into it.

        None: not yet, because ``build`` is missing, asks for a parameter that ``params`` does not have, or, unless this is the
        ``final`` attempt, took a default for one.
        """
        if build is None:
            return None
        watched = WatchedParams(params)
        try:
            workload = build_workload(build, watched)
        except Exception as error:
            if asks_for_missing(error, params):
                return None
            is_hopeless = isinstance(error, TooLargeError) and not watched.missing
            if not final and not is_hopeless:  # it may be for want of a parameter: `build(**params)` says so in its own way
                self._build_errors[_key(study, trial)] = error
                return None
            return self.settle(study, trial, watched, _raiser(error))
        if watched.missing and not final:
            return None
        return self.settle(study, trial, watched, lambda: workload)

    def settle(
        self, study: optuna.Study, trial: AnyTrial, params: WatchedParams, make_workload: Callable[[], Workload]
    ) -> Decision:
        """Decide on what ``params`` would run, and write the verdict into ``trial``."""
        decision = self.decide(
            make_workload, study=study.study_name, trial=trial.number, params=params.all(), time_left_s=self.time_left_s()
        )
        self._build_errors.pop(_key(study, trial), None)
        return self._keep(study, trial, decision, params.used())

    def _keep(self, study: optuna.Study, trial: AnyTrial, decision: Decision, used: Mapping[str, Any]) -> Decision:
        self._judged[_key(study, trial)] = _Judged(decision, used)
        self.write(study, trial, attributes_of(decision.verdict), lambda: self.constraints_of(study, decision.verdict))
        return decision

    def write(
        self,
        study: optuna.Study,
        trial: AnyTrial,
        attributes: Mapping[str, Any],
        constraints: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """Write into ``trial``. A storage that is away is for Optuna to complain about; the guard says so once and goes on."""
        try:
            write_attributes(study, trial, attributes)
            write_constraints(study, trial, constraints())
        except Exception as error:
            self._warn_once(
                UnguardedTrialWarning,
                f"PerfGuard could not write into trial {trial.number} (said once): {type(error).__name__}: {error}",
            )

    def constraints_of(self, study: optuna.Study, verdict: Verdict) -> dict[str, float]:
        """How far a trial of ``study`` with that verdict is from feasible, one number for each limit."""
        return constraints_of(verdict, established_constraints(study, self.limited_quantities))

    @property
    def limited_quantities(self) -> tuple[str, ...]:
        """The quantities that get a constraint each."""
        quantities = self.budget.quantities
        return (*quantities, "time") if self.within_timeout and "time" not in quantities else quantities

    def time_left_s(self) -> float | None:
        """What is left of the study's time; None where that is no limit."""
        if not self.within_timeout or self.deadline is None:
            return None
        return max(0.0, self.deadline - time.monotonic())

    def launch(self, study: optuna.Study, trial: AnyTrial, decision: Decision) -> Launched:
        """Begin to measure ``trial`` in the calling thread. What cannot be measured runs all the same."""
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
        """Say of a trial that ran to its end without a verdict why, once, and give it the constraints that every trial has."""
        error = self._build_errors.get(_key(study, trial))
        if error is not None:
            self.settle(study, trial, WatchedParams(trial.params), _raiser(error))
            return
        self.warn_unjudged(build)
        self.write(study, trial, {}, lambda: dict.fromkeys(established_constraints(study, self.limited_quantities), 0.0))

    def reject(self, study: optuna.Study, trial: AnyTrial, verdict: Verdict) -> None:
        """Write into ``trial`` that nothing was found to run in it."""
        self._keep(study, trial, Decision("", verdict), {})

    def _warn_unmeasured(self, error: Exception) -> None:
        self._warn_once(MeasurementWarning, f"PerfGuard could not measure a trial (said once): {type(error).__name__}: {error}")

    def running(self, study: optuna.Study, trial: AnyTrial) -> Launched | None:
        """``trial``, if the calling thread has launched it."""
        launched = self._launched.get(threading.get_ident())
        return launched if launched is not None and _key(study, launched.trial) == _key(study, trial) else None

    def too_slow(self, study: optuna.Study, launched: Launched) -> str | None:
        """Why a running trial will break its time budget at the measured pace, written into it; None if it may hold it."""
        if self.on_violation == "warn":
            return None
        reason = self.breaks_time_budget(launched.decision, launched.run, time_left_s=self.time_left_s())
        if reason is not None:
            excess = partial(self._excess_of, study, "time", _LEAST_VIOLATION)
            self.write(study, launched.trial, {f"{PREFIX}:stopped": reason}, excess)
        return reason

    def repair_of(self, study: optuna.Study, trial: AnyTrial) -> Repair:
        """What a trial has to change to fit; the objective that asks is trusted to do so."""
        launched = self.running(study, trial)
        if launched is not None:
            launched.asked_for_repair = True
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
            self.write(study, launched.trial, {f"{PREFIX}:not_measured": elsewhere})
        else:
            happened = partial(self._what_happened, study, launched, measurement)
            self.write(study, launched.trial, measured_attributes_of(measurement), happened)
        if measurement.status == "oom":
            free_memory()
        if launched.ignored_repair:
            self._warn_once(
                UnguardedTrialWarning,
                "PerfGuard repaired a trial, but its objective did not ask `repair_of(trial)` what to change, so it ran as "
                "proposed and is not learnt from.",
            )
        else:
            self.learn(launched.decision, measurement)
        return measurement

    def _measured(self, launched: Launched, status: Status, note: str, *, at_last_step: bool = False) -> Measurement | None:
        """What a trial cost that ends here; None if that cannot be told."""
        self._finished.add(_key(launched.study_name, launched.trial))
        try:
            return launched.run.finish(status, note=note, at_last_step=at_last_step)
        except Exception as error:
            self._warn_unmeasured(error)
            return None

    def _what_happened(self, study: optuna.Study, launched: Launched, measurement: Measurement) -> dict[str, float]:
        """A trial that was expected to fit, and did not, is infeasible for the sampler all the same."""
        quantity = {"oom": "memory", "timeout": "time"}.get(measurement.status)
        if quantity is None:
            return {}
        measured = measurement.peak_memory_bytes if quantity == "memory" else measurement.total_time_s
        limit = next((limit.limit for limit in launched.decision.verdict.limits if limit.quantity == quantity), None)
        excess = math.log(measured / limit) if measured and limit else 0.0
        return self._excess_of(study, quantity, max(excess, _LEAST_VIOLATION))

    def _excess_of(self, study: optuna.Study, quantity: str, excess: float) -> dict[str, float]:
        names = established_constraints(study, self.limited_quantities)
        return {quantity if quantity in names else names[0]: excess} if names else {}

    def finish_abandoned(self, study: optuna.Study) -> None:
        """End the measuring of a trial whose end nobody told: in a plain study the next trial's first call does."""
        launched = self._launched.pop(threading.get_ident(), None)
        if launched is None:
            return
        trials = study.get_trials(deepcopy=False) if launched.study_name == study.study_name else []
        told = next((trial for trial in trials if trial.number == launched.trial.number), None)
        failed = told is not None and told.state == TrialState.FAIL
        note = "ended at its last step, because its end was not told" if launched.run.num_steps else "its end was not told"
        measurement = self._measured(launched, "failed" if failed else "ok", note, at_last_step=True)
        if measurement is not None:
            self.learn(launched.decision, _without_memory_before_a_step(measurement))

    def warn_unjudged(self, build: Build | None = None) -> None:
        """Say once that trials run unguarded, and why."""
        if not self._warned_about_build:
            self._warned_about_build = True
            warnings.warn(self.why_unjudged(build), UnguardedTrialWarning, stacklevel=3)

    def why_unjudged(self, build: Build | None = None) -> str:
        """Why a trial is launched without a verdict: its workload is not known."""
        if self.build is None and build is None:
            return (
                "PerfGuard does not know what the trials run, so they are launched unguarded. Give it "
                "`build=lambda params: Workload(...)`, or wrap the training in `with guard.trial(trial, model, batch): ...`."
            )
        return (
            "build(params) asks for a parameter that the trial has not suggested when it was judged, so the trial was "
            "launched unguarded. Suggest all that build needs before the first should_prune()."
        )

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_launched": {}, "deadline": None}


class GuardedRun:
    """A trial that was launched and is being measured."""

    def __init__(self, run: Run, decision: Decision, too_slow: Callable[[], str | None]) -> None:
        self._run = run
        self._too_slow = too_slow
        self.verdict = decision.verdict
        self.repair = decision.verdict.repair
        """What to change so that the trial fits; see :class:`perfguard.repair.Repair`."""

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
        """What the trial cost; None while it runs."""
        return self._run.measurement


@dataclass(slots=True)
class Launched:
    """A trial that is being measured."""

    study_name: str
    trial: AnyTrial
    decision: Decision
    run: Run
    asked_for_repair: bool = False

    @property
    def ignored_repair(self) -> bool:
        """Whether the objective ran a trial as proposed that was to be repaired."""
        return self.decision.verdict.action == "repair" and not self.asked_for_repair


@dataclass(frozen=True, slots=True)
class _Judged:
    decision: Decision
    params: Mapping[str, Any]
    """Those that ``build`` looked at."""


class WatchedParams(dict[str, Any]):
    """Parameters that remember which of them were looked at, and which were asked for, with a default, that are not there."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        super().__init__(params)
        self.missing: set[str] = set()
        self._used: set[str] = set()

    def all(self) -> dict[str, Any]:
        """All parameters, without looking at any."""
        return dict(dict.items(self))

    def used(self) -> dict[str, Any]:
        """The parameters that were looked at."""
        return {name: value for name, value in dict.items(self) if name in self._used}

    def __getitem__(self, key: str) -> Any:
        self._used.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As of a dict."""
        present = key in self
        return self[key] if present else default

    def __contains__(self, key: object) -> bool:
        present = super().__contains__(key)
        if not present:
            self.missing.add(str(key))
        return present

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def keys(self) -> Any:
        """As of a dict."""
        self._used.update(dict.keys(self))
        return dict.keys(self)

    def values(self) -> Any:
        """As of a dict."""
        self._used.update(dict.keys(self))
        return dict.values(self)

    def items(self) -> Any:
        """As of a dict."""
        self._used.update(dict.keys(self))
        return dict.items(self)


@contextmanager
def pruned_if_out_of_resources() -> Iterator[None]:
    """Turn an out-of-memory error or a time-out into a pruned trial, so that the study goes on."""
    try:
        yield
    except Exception as error:
        status = status_of(error)
        if status not in ("oom", "timeout"):
            raise
        raise optuna.TrialPruned(f"ran out of {'memory' if status == 'oom' else 'time'}: {error}") from error


def warn_nothing_feasible(num_proposals: int, last: Verdict) -> None:
    """Say that a search finds nothing that fits, ``last`` being what it proposed last, and what to do."""
    verb, remedy = "would", ""
    if last.p_violation <= EVEN_CHANCE:
        verb, remedy = "may", f", accept more risk (risk={math.ceil(10 * last.p_violation) / 10:g})"
    warnings.warn(
        f"Nothing fits: {num_proposals} proposals in a row {verb} break a budget, the last of them {last.reason}. The study ends "
        f"here. Raise the budget, widen the search space towards smaller trials{remedy}, "
        "or allow repairs (on_violation='repair').",
        NothingFeasibleWarning,
        stacklevel=3,
    )


def _without_memory_before_a_step(measurement: Measurement) -> Measurement:
    """What a trial held that ended before its first step says nothing of what its steps need."""
    return replace(measurement, peak_memory_bytes=None) if measurement.num_steps == 0 else measurement


def free_memory() -> None:
    """Give back what a trial that ran out of memory has left behind."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _key(study: optuna.Study | str, trial: AnyTrial) -> TrialKey:
    """The start tells a trial from one of the same number in a study of the same name that was deleted."""
    return study if isinstance(study, str) else study.study_name, trial.number, trial.datetime_start


def _raiser(error: Exception) -> Any:
    def raise_it() -> Workload:
        raise error

    return raise_it
