"""PerfGuardPruner: an Optuna pruner that prunes before the launch, and when the pace shows that the time will not do."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import optuna
from optuna.pruners import BasePruner, HyperbandPruner
from optuna.trial import FrozenTrial, TrialState

from perfguard.exceptions import ConfigurationError, UnguardedTrialError, UnguardedTrialWarning, warn_user
from perfguard.workload import Build, Workload
from perfguard_optuna.guard import GuardedRun, OptunaGuard, trial_of
from perfguard_optuna.ranks import leads_ranks

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Unpack

    from perfguard.devices import Device
    from perfguard.guard import GuardSettings


class PerfGuardPruner(HyperbandPruner):
    """Prunes a trial before it starts if it would run out of memory or time, and learns from those that run.

    Three ways to use it:

    1. ``perfguard_optuna.create_study().optimize(objective, n_trials=100, pruner=PerfGuardPruner(gpu="a100"))``: the objective
       stays as it is. A dry run of it shows what a trial runs.
    2. ``optuna.create_study(pruner=PerfGuardPruner(gpu="a100", build=build))``. The objective calls
       ``if trial.should_prune(): raise optuna.TrialPruned()`` after the last suggestion, before anything is allocated.
    3. Without ``build``: the objective has ``with pruner.trial(trial, model, batch, optimizer=...) as run: ...`` around the
       training.

    While a trial runs, ``should_prune()`` also returns True when the measured pace shows that it will break its time budget.

    It is a HyperbandPruner only so that Optuna tells it when a trial begins. So it can warn if the trial before never called
    ``should_prune()``. :func:`summarize` counts every such trial.

    Args:
        gpu: the device. A catalog name such as "a100", "auto" (the GPU that NVML shows, else the CPU), "cpu", or a Device.
        build: ``build(params) -> Workload``, a function of the hyperparameters, in the place of a dry run. A trial is judged when
            it has suggested what ``build`` reads. None: ``objective.build`` if there is one. Without either, a plain study judges
            only trials whose objective calls :meth:`trial` with a model.
        inner: Another pruner. It decides during the trial, for instance ``HyperbandPruner()``.
        guard: An :class:`OptunaGuard` to share. It excludes all other settings but ``inner``.
        settings: The other arguments of :class:`OptunaGuard`, such as ``memory_budget``, ``time_budget``, ``risk`` and ``log``.

    Raises:
        ConfigurationError: for an unknown GPU, a budget or a risk that cannot be right.
        LogError: for a log that cannot be used.
    """

    def __init__(
        self,
        gpu: str | Device = "auto",
        *,
        build: Build | None = None,
        inner: BasePruner | None = None,
        guard: OptunaGuard | None = None,
        **settings: Unpack[GuardSettings],
    ) -> None:
        if inner is not None and not isinstance(inner, BasePruner):
            raise ConfigurationError(f"inner must be an Optuna pruner, for instance HyperbandPruner(), but got {inner!r}.")
        if guard is not None and (settings or build is not None or gpu != "auto"):
            raise ConfigurationError("Give a guard, or the settings of one, but not both: the guard has its own settings.")
        super().__init__()
        self.guard = guard or OptunaGuard(gpu, build=build, **settings)
        self._inner = inner
        self._begun: dict[int, tuple[tuple[str, int], tuple[str, int] | None]] = {}
        """The latest trial of each thread, and the one before it if that was not looked at yet."""

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Judge ``trial`` at its first call. At later calls, check its pace and call the inner pruner.

        Called by ``trial.should_prune()``.
        """
        try:
            session = self.guard.session_of(study, trial)
            launched = session.begin(self.guard.build)
            if not launched:
                session.report_unjudged(self.guard.build)
        except optuna.TrialPruned:
            return True
        except (UnguardedTrialError, ConfigurationError) as error:
            if not leads_ranks():
                raise
            warn_user(str(error), UnguardedTrialWarning)  # the other ranks wait for an answer, and an error would not reach them
            return True
        if launched and session.too_slow():
            return True
        return self._inner is not None and self._inner.prune(study, trial)

    def trial(
        self,
        trial: optuna.trial.BaseTrial | None,
        model: Workload | nn.Module | None = None,
        batch: object = None,
        **fields: object,
    ) -> GuardedRun:
        """See :meth:`OptunaGuard.trial`."""
        return self.guard.trial(trial, model, batch, **fields)

    # Optuna 5.0 calls a pruner only from should_prune(), and a HyperbandPruner also for the study that the sampler sees: when a
    # trial begins, suggests and ends. The sampler sees the study itself.

    def _get_bracket_id(self, study: optuna.Study, trial: FrozenTrial) -> int:
        thread = threading.get_ident()
        this = (study.study_name, trial.number)
        latest, before = self._begun.get(thread, (None, None))
        if latest != this:  # the trial is being made: an error now would leave it running for ever
            self._begun[thread] = this, latest
        elif before is not None:
            self._begun[thread] = this, None
            ended = trial_of(study, *before)
            if ended is not None and ended.state == TrialState.COMPLETE:  # nothing of PerfGuard knows of it
                self.guard.session_of(study, ended).report_ended(ended.state)
        return 0

    def _create_bracket_study(self, study: optuna.Study, bracket_id: int) -> optuna.Study:
        return study

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_begun": {}}
