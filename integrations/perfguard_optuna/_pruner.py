"""PerfGuardPruner: an Optuna pruner that prunes before the launch, and when the pace shows that the time will not do."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import optuna
from optuna.pruners import BasePruner
from optuna.trial import FrozenTrial, TrialState

from perfguard.exceptions import ConfigurationError
from perfguard.workload import Build, Workload
from perfguard_optuna._guard import GuardedRun, OptunaGuard
from perfguard_optuna._watch import WatchingPruner

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Unpack

    from perfguard.devices import Device
    from perfguard.guard import GuardSettings


class PerfGuardPruner(WatchingPruner):
    """Prunes a trial before it starts if it would run out of memory or time, and learns from those that run.

    Three ways to use it:

    1. ``perfguard_optuna.create_study().optimize(objective, n_trials=100, pruner=PerfGuardPruner(gpu="a100", build=build))``:
       the objective stays as it is. A trial is judged when it has suggested all parameters that ``build`` reads.
    2. ``optuna.create_study(pruner=PerfGuardPruner(gpu="a100", build=build))``. The objective calls
       ``if trial.should_prune(): raise optuna.TrialPruned()`` after the last suggestion, before anything is allocated.
    3. Without ``build``: the objective has ``with pruner.trial(trial, model, batch, optimizer=...) as run: ...`` around the
       training.

    While a trial runs, ``should_prune()`` also returns True when the measured pace shows that it will break its time budget.

    :func:`summarize` counts every trial that ends without a verdict, and the first one causes a warning. This includes
    objectives that never call ``should_prune()``. This class inherits from HyperbandPruner only to be notified when trials end.

    Args:
        gpu: the device. A catalog name such as "a100", "auto" (the GPU that NVML shows, else the CPU), "cpu", or a Device.
        build: ``build(params) -> Workload``, a function of the hyperparameters. None: ``objective.build`` if there is one.
            Without either, only trials whose objective calls :meth:`trial` with a model are judged.
        inner: Another pruner. It decides during the trial, for instance ``HyperbandPruner()``.
        within_timeout: whether the study's timeout is a limit. If so, a GuardedStudy prunes a trial that would outlast
            ``optimize(timeout=...)``.
        guard: An :class:`OptunaGuard` to share. It excludes all other settings but ``inner``.
        settings: The keyword arguments of :class:`perfguard.Guard`, such as ``memory_budget``, ``time_budget``, ``risk`` and
            ``log``.

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
        within_timeout: bool = False,
        guard: OptunaGuard | None = None,
        **settings: Unpack[GuardSettings],
    ) -> None:
        if inner is not None and not isinstance(inner, BasePruner):
            raise ConfigurationError(f"inner must be an Optuna pruner, for instance HyperbandPruner(), but got {inner!r}.")
        if guard is not None and (settings or build is not None or gpu != "auto" or within_timeout):
            raise ConfigurationError("Give a guard, or the settings of one, but not both: the guard has its own settings.")
        super().__init__()
        self.guard = guard or OptunaGuard(gpu, build=build, within_timeout=within_timeout, **settings)
        self._inner = inner

    @property
    def build(self) -> Build | None:
        """The function of the hyperparameters that describes a trial."""
        return self.guard.build

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Judge ``trial`` at its first call. At later calls, check its pace and call the inner pruner.

        Called by ``trial.should_prune()``.
        """
        guard = self.guard
        launched = guard.running(study, trial)
        if launched is None and not guard.has_finished(study, trial):
            guard.finish_abandoned(study)
            decision = guard.decision_of(study, trial) or guard.judge(study, trial, trial.params, guard.build)
            if decision is None:
                guard.end_unjudged(study, trial, guard.build)
            elif decision.verdict.action == "prune":
                return True
            else:
                launched = guard.launch(study, trial, decision)
        if launched is not None and guard.too_slow(study, launched):
            return True
        return self._inner is not None and self._inner.prune(study, trial)

    def trial_ended(self, study: optuna.Study, trial: FrozenTrial, state: TrialState) -> None:
        """Count a trial that was never judged. Called when Optuna records the end of a trial.

        Raises:
            UnguardedTrialError: for such a trial that ran to its end, if the guard is strict.
        """
        self.guard.end_unasked(study, trial, state)

    def trial(
        self, trial: optuna.Trial, model: Workload | nn.Module | None = None, batch: Any = None, **fields: Any
    ) -> AbstractContextManager[GuardedRun]:
        """See :meth:`OptunaGuard.trial`."""
        return self.guard.trial(trial, model, batch, **fields)
