"""PerfGuardPruner: an Optuna pruner that prunes before the launch."""

from __future__ import annotations

import datetime
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import optuna
from optuna.pruners import BasePruner
from optuna.trial import FrozenTrial, TrialState

from perfguard.exceptions import ConfigurationError, UnguardedTrialWarning
from perfguard.guard import DEFAULT_RISK, Decision, Guard
from perfguard.measure import Measurement, Run, Status, status_of
from perfguard.predictor import DEFAULT_PREDICTOR
from perfguard.workload import Build, Workload, asks_for_missing, build_workload
from perfguard_optuna._attributes import attributes_of, measured_attributes_of, write_attributes, write_constraints

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.predictor import Predictor
    from perfguard.store import MeasurementStore

AnyTrial = FrozenTrial | optuna.Trial
_TrialKey = tuple[str, int, datetime.datetime | None]


class PerfGuardPruner(BasePruner):
    """Prunes a trial before it starts if it would run out of memory or time, and learns from those that run.

    Three ways to use it:

    1. ``perfguard_optuna.create_study().optimize(objective, n_trials=100, pruner=PerfGuardPruner(gpu="a100", build=build))``:
       nothing changes in the objective. As soon as the trial has suggested all that ``build`` asks for, it is judged.
    2. ``optuna.create_study(pruner=PerfGuardPruner(gpu="a100", build=build))`` and, in the objective, after the last suggestion
       and before anything is allocated, Optuna's own ``if trial.should_prune(): raise optuna.TrialPruned()``.
    3. No ``build``: in the objective, ``with pruner.trial(trial, Workload(...)): ...`` around the training.

    Args:
        gpu: a catalog name such as "a100", "auto" (the GPU that NVML shows, else the CPU), "cpu", or a Device.
        build: ``build(params) -> Workload``, a function of the hyperparameters. None: taken from ``objective.build`` if the
            objective has one; otherwise trials are judged only where the objective calls :meth:`trial` with a workload.
        memory_budget: bytes, a text such as "38GiB", or a fraction of the device in (0, 1]. None: all of the device.
        time_budget: seconds of the whole trial, or a text such as "2h".
        step_time_budget: seconds of one step, or a text such as "250ms".
        risk: the share of the launched trials that may break a limit, in (0, 1).
        predictor: its name, or the object itself.
        log: the measurement log: a path, a database URL or an open store. None: your own log. False: nothing outlives the study.
        inner: another pruner that decides during the trial.

    Raises:
        ConfigurationError: for an unknown GPU, a budget or a risk that cannot be right.
        LogError: for a log that cannot be used.
    """

    def __init__(
        self,
        gpu: str | Device = "auto",
        *,
        build: Build | None = None,
        memory_budget: int | float | str | None = None,
        time_budget: int | float | str | None = None,
        step_time_budget: int | float | str | None = None,
        risk: float = DEFAULT_RISK,
        predictor: str | Predictor = DEFAULT_PREDICTOR,
        log: str | MeasurementStore | Literal[False] | None = None,
        inner: BasePruner | None = None,
    ) -> None:
        if build is not None and not callable(build):
            raise ConfigurationError(f"build must be a function of the hyperparameters, but got {build!r}.")
        self.build = build
        self.guard = Guard(
            gpu,
            memory_budget=memory_budget,
            time_budget=time_budget,
            step_time_budget=step_time_budget,
            risk=risk,
            predictor=predictor,
            log=log,
        )
        self._inner = inner
        self._decisions: dict[_TrialKey, Decision] = {}
        self._launched: dict[int, _Launched] = {}
        self._warned_about_build = False

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Judge ``trial`` when it is seen for the first time; later, ask the inner pruner. Called by ``trial.should_prune()``."""
        decision = self.decision_of(study, trial)
        if decision is None:
            self.finish_abandoned(study)
            decision = self.judge(study, trial, trial.params, self.build)
            if decision is None:
                self.warn_unjudged()
            elif decision.verdict.action == "launch":
                self.launch(study, trial, decision)
        if decision is not None and decision.verdict.action == "prune":
            return True
        return self._inner is not None and self._inner.prune(study, trial)

    @contextmanager
    def trial(self, trial: optuna.Trial, workload: Workload | None = None) -> Iterator[Run]:
        """Judge ``trial``, then measure what runs inside the ``with`` block and learn from it.

        Args:
            trial: the trial that Optuna handed to the objective.
            workload: what the block is going to run. None: ``build(trial.params)``.

        Raises:
            optuna.TrialPruned: at the start, if the trial would break a limit; at the end, if it ran out of memory.
        """
        study = trial.study
        decision = self.decision_of(study, trial)
        if decision is None:
            self.finish_abandoned(study)
            build = self.build if workload is None else lambda _params: workload
            decision = self.judge(study, trial, trial.params, build)
        if decision is not None and decision.verdict.action == "prune":
            raise optuna.TrialPruned(decision.verdict.reason)
        if decision is None:
            unknown = ConfigurationError(self.why_unjudged())
            decision = self.guard.decide(_raiser(unknown), study=study.study_name, trial=trial.number, params=trial.params)
            self._warned_about_build = True  # the guard has just said why
        launched = self._launched.get(threading.get_ident()) or self.launch(study, trial, decision)
        with pruned_if_out_of_memory():
            try:
                yield launched.run
            except BaseException as error:
                self.finish(study, error)
                raise
            self.finish(study, None)

    def decision_of(self, study: optuna.Study, trial: AnyTrial) -> Decision | None:
        """The decision that was made on ``trial``, if it was judged."""
        return self._decisions.get(_key(study, trial))

    def judge(
        self,
        study: optuna.Study,
        trial: AnyTrial,
        params: Mapping[str, Any],
        build: Build | None,
        *,
        provisional: Callable[[], bool] = lambda: False,
    ) -> Decision | None:
        """Decide on ``trial`` and write the verdict into it.

        None: not yet, because ``build`` is missing, asks for a parameter that ``params`` does not have, or succeeded with what
        ``provisional`` then calls a guess.
        """
        if build is None:
            return None
        try:
            workload = build_workload(build, params)
        except Exception as error:
            if asks_for_missing(error, params):
                return None
            decision = self.guard.decide(_raiser(error), study=study.study_name, trial=trial.number, params=params)
        else:
            if provisional():
                return None
            decision = self.guard.decide(lambda: workload, study=study.study_name, trial=trial.number, params=params)
        self._decisions[_key(study, trial)] = decision
        write_attributes(study, trial, attributes_of(decision.verdict))
        write_constraints(study, trial, decision.verdict.margins or dict.fromkeys(self.guard.limited_quantities, 0.0))
        return decision

    def launch(self, study: optuna.Study, trial: AnyTrial, decision: Decision) -> _Launched:
        """Begin to measure ``trial`` in the calling thread."""
        launched = _Launched(study.study_name, trial, decision, Run(self.guard.device).start())
        self._launched[threading.get_ident()] = launched
        return launched

    def finish(self, study: optuna.Study, error: BaseException | None) -> Measurement | None:
        """End the measuring of the calling thread's trial, which ended with ``error``, and learn from it."""
        launched = self._launched.pop(threading.get_ident(), None)
        if launched is None:
            return None
        pruned = isinstance(error, optuna.TrialPruned)
        note = f"{type(error).__name__}: {error}"[:200] if error is not None and not pruned else ""
        measurement = launched.run.finish("ok" if pruned else status_of(error), note=note)
        write_attributes(study, launched.trial, measured_attributes_of(measurement))
        self.guard.learn(launched.decision, measurement)
        return measurement

    def finish_abandoned(self, study: optuna.Study) -> None:
        """End the measuring of a trial whose end nobody told: in a plain study the next trial's first call does."""
        launched = self._launched.pop(threading.get_ident(), None)
        if launched is None:
            return
        status: Status = "ok"
        if launched.study_name == study.study_name:
            failed = study.get_trials(deepcopy=False, states=(TrialState.FAIL,))
            status = "failed" if any(trial.number == launched.trial.number for trial in failed) else "ok"
        measurement = launched.run.finish(status, at_last_step=True, note="its end was seen when the next trial began")
        self.guard.learn(launched.decision, measurement)

    def warn_unjudged(self, build: Build | None = None) -> None:
        """Say, once, that trials run unguarded because their workload is not known."""
        if not self._warned_about_build:
            self._warned_about_build = True
            warnings.warn(self.why_unjudged(build), UnguardedTrialWarning, stacklevel=3)

    def why_unjudged(self, build: Build | None = None) -> str:
        """Why a trial is launched without a verdict: its workload is not known."""
        if self.build is None and build is None:
            return (
                "PerfGuardPruner does not know what the trials run, so they are launched unguarded. Give it "
                "`build=lambda params: Workload(...)`, or wrap the training in `with pruner.trial(trial, Workload(...)):`."
            )
        return (
            "build(params) asks for a parameter that the trial has not suggested when it was judged, so the trial was "
            "launched unguarded. Suggest all that build needs before the first should_prune()."
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_launched": {}}


@dataclass(frozen=True, slots=True)
class _Launched:
    """A trial that is being measured."""

    study_name: str
    trial: AnyTrial
    decision: Decision
    run: Run


@contextmanager
def pruned_if_out_of_memory() -> Iterator[None]:
    """Turn an out-of-memory error into a pruned trial, so that the study goes on."""
    try:
        yield
    except Exception as error:
        if status_of(error) != "oom":
            raise
        raise optuna.TrialPruned(f"ran out of memory: {error}") from error


def _key(study: optuna.Study, trial: AnyTrial) -> _TrialKey:
    """The start tells a trial from one of the same number in a study of the same name that was deleted."""
    return study.study_name, trial.number, trial.datetime_start


def _raiser(error: Exception) -> Any:
    def raise_it() -> Workload:
        raise error

    return raise_it
