"""OptunaGuard: judges the trials of a study, measures those that run, and writes both into them.

A trial's way is that of its :class:`perfguard_optuna.session.OptunaSession`.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from types import TracebackType
from typing import TYPE_CHECKING, Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from perfguard.exceptions import ConfigurationError, UnguardedTrialError, UnguardedTrialWarning, warn_user
from perfguard.guard import Guard, as_workload
from perfguard.last_used import LastUsed
from perfguard.leftovers import free_memory
from perfguard.measure import Measurement, Run, Status, status_of
from perfguard.record import columns_of, verdict_from
from perfguard.rejections import Search
from perfguard.repair import Repair
from perfguard.session import HowEnded, TrialSession
from perfguard.time_limit import TimeLimitReached
from perfguard.verdict import Verdict
from perfguard.workload import AnyBuild, AnyWorkload, Workload, announce_optimizer, did_you_mean
from perfguard_optuna.attributes import PREFIX, AnyTrial
from perfguard_optuna.capture import SelfDescribed
from perfguard_optuna.dry_trial import DryTrial
from perfguard_optuna.ranks import Ranks, own_trial
from perfguard_optuna.session import OptunaSession, end_run, how_ended, start_run

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Unpack

    from perfguard.devices import Device
    from perfguard.guard import GuardSettings
    from perfguard.quantities import Quantity


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
        settings: the keyword arguments of :class:`perfguard.Guard`. A repair needs ``build``, and an objective that calls
            :func:`repair_of`.

    Raises:
        ConfigurationError: for an unknown GPU or setting, a budget or a risk that cannot be right.
        LogError: for a log that cannot be used.
    """

    def __init__(
        self,
        gpu: str | Device = "auto",
        *,
        build: AnyBuild | None = None,
        **settings: Unpack[GuardSettings],
    ) -> None:
        if build is not None and not callable(build):
            raise ConfigurationError(f"build must be a function of the hyperparameters, but got {build!r}.")
        self.guard = Guard(gpu, **settings)
        """The guard of the core: device, budget, risk, predictor, log."""
        self.device = self.guard.device
        self.log = self.guard.log
        self.build = build
        self.ends_or_repeats = self.guard.on_oom == "repair" or self.guard.hard_time_limit_s is not None
        self.calls_objective = False
        """Whether a GuardedObjective calls the objective. Only that can end a trial from outside, or run it once more."""
        self.running: dict[int, OptunaSession] = {}
        """The trial that each thread runs."""
        self._sessions = _latest_sessions()
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
        return GuardedRun(self, None if own is None else self.session_of(own.study, own), found, Ranks.of(own, "inline"))

    def session_of(self, study: optuna.Study, trial: AnyTrial) -> OptunaSession:
        """Return the session of ``trial``. The start distinguishes it from a trial in a deleted study of the same name.

        That of a trial that runs is kept to its end. Of the others, only the latest are: what they wrote into the study stays.
        """
        session = self._sessions.get_or_put(_key_of(study, trial), lambda: self._begin_session(study, trial))
        session.study = study
        session.trial = trial  # Optuna has several objects of one trial, and this is the latest
        return session

    def _begin_session(self, study: optuna.Study, trial: AnyTrial) -> OptunaSession:
        core = TrialSession(
            guard=self.guard,
            search=self.search_of(study),
            study=study.study_name,
            number=trial.number,
            applies_repair=False,  # its objective has not called `repair_of` yet
        )
        return OptunaSession(self, study, trial, core)

    def finish(self, study: optuna.Study, error: BaseException | None, ranks: Ranks | None = None) -> Measurement | None:
        """End the measuring of the calling thread's trial, which ended with ``error``, and learn from it.

        ``ranks`` have run it too. None: this process ran it alone.
        """
        session = self.running.pop(threading.get_ident(), None)
        how = how_ended(error)
        if session is None:
            return None if ranks is None else ranks.end(None, how.status)
        session.study = study
        self._sessions.put(_key_of(study, session.trial), session)  # among the latest: others ask for it after its end
        return session.end(how, ranks=ranks)

    def end_abandoned(self, study: optuna.Study) -> None:
        """End the measurement of a trial without a reported end. In a plain study, the next trial's first call does this."""
        session = self.running.pop(threading.get_ident(), None)
        if session is None or session.run is None:
            return
        ended = trial_of(study, session.study.study_name, session.trial.number)
        status: Status = "failed" if ended is not None and ended.state == TrialState.FAIL else "ok"
        note = "its end was not reported"
        if session.run.num_steps:
            note = f"ended at its last step, because {note}"
        is_complete = ended is not None and ended.state == TrialState.COMPLETE
        session.end(HowEnded(status, note, "" if is_complete else "by the tuner"), at_last_step=True)

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

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_sessions": _latest_sessions(), "running": {}}


_TrialKey = tuple[str, int, datetime.datetime | None]


def _key_of(study: optuna.Study, trial: AnyTrial) -> _TrialKey:
    return study.study_name, trial.number, trial.datetime_start


def _latest_sessions() -> LastUsed[_TrialKey, OptunaSession]:
    """Return an empty memory of the latest trials, in which those that run stay."""
    return LastUsed(128, must_stay=_runs)


def _runs(session: OptunaSession) -> bool:
    return session.run is not None


class GuardedRun:
    """A ``with`` block in which a trial runs and is measured. Made by :meth:`OptunaGuard.trial`."""

    def __init__(
        self,
        guard: OptunaGuard,
        trial: OptunaSession | None,
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
        guard = self._guard
        trial = self._trial
        ranks = self._ranks
        if trial is None:
            assert ranks is not None
            self._shared = verdict_from(ranks.join())
            self._run = start_run(guard.guard)
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
            how = how_ended(error)
            self.measurement = self._ranks.end(end_run(self._guard.guard, self._run, how), how.status)
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
