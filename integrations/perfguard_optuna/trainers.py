"""GuardedTraining: what the callbacks for Lightning and for Hugging Face's Trainer have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import optuna
from torch.utils.data import DataLoader, IterableDataset

from perfguard.exceptions import ConfigurationError, WorkloadError
from perfguard.pytorch import random_numbers_kept
from perfguard.workload import Workload
from perfguard_optuna.capture import refuse_dry_trial
from perfguard_optuna.guard import GuardedRun, OptunaGuard

HOW_TO_GIVE_A_BATCH = "Give `batch=`: tensors, or TensorSpec((32, 3, 224, 224)) and the like in their place."


class GuardedTraining:
    """``with guard.trial(trial, workload)`` for a trainer, whose callback reports the begin, the steps and the end.

    Args:
        guard: the guard of the study.
        trial: the trial that trains.

    Raises:
        ConfigurationError: for a guard that repairs: a trainer that is already made cannot be changed.
    """

    def __init__(self, guard: OptunaGuard, trial: optuna.Trial) -> None:
        if not isinstance(guard, OptunaGuard):
            raise ConfigurationError(f"guard must be a perfguard_optuna.OptunaGuard, but got {guard!r}.")
        refuse_dry_trial(trial)
        if not isinstance(trial, optuna.Trial):
            raise ConfigurationError(f"trial must be what Optuna hands to the objective, but got {trial!r}.")
        if guard.guard.on_violation == "repair":
            raise ConfigurationError(
                "An existing trainer cannot be repaired. Use on_violation='prune' or 'warn', or call "
                "guard.trial(trial, workload) before it is made and give it the micro-batch of run.repair."
            )
        self.guard = guard
        self._trial = trial
        self._run: GuardedRun | None = None

    @property
    def runs(self) -> bool:
        """Whether it has begun and not ended."""
        return self._run is not None

    def begin(self, make_workload: Callable[[], Workload]) -> None:
        """Judge the trial, unless that was done before, and begin to measure it.

        Args:
            make_workload: describes what is going to be trained. If it raises, the trial is launched with a warning.

        Raises:
            optuna.TrialPruned: if the trial would break a limit.
        """

        def described() -> Workload:
            try:
                return make_workload()
            except WorkloadError:
                raise
            except Exception as error:
                cause = f"{type(error).__name__}: {error}"
                raise WorkloadError(f"the trainer does not say what it is going to run ({cause})") from error

        self._run = GuardedRun(self.guard, self._trial, described).__enter__()

    def step(self) -> None:
        """Mark the end of one optimizer step.

        Raises:
            optuna.TrialPruned: if the trial will break its time budget at the pace that was measured.
        """
        if self._run is None:
            return
        try:
            self._run.step()
        except optuna.TrialPruned as error:
            self.end(error)
            raise

    def end(self, error: BaseException | None = None) -> None:
        """End the measuring, if it has begun.

        Raises:
            optuna.TrialPruned: if ``error`` says that memory ran out.
        """
        run, self._run = self._run, None
        if run is not None:
            run.__exit__(None if error is None else type(error), error, None if error is None else error.__traceback__)


def first_batch(loaders: Any) -> Any:
    """One batch of a DataLoader, or of several in a list or dict, put together from the first samples of the data set.

    The loader itself is not iterated: no worker starts, no sampler moves on, and the user's random numbers stay where they are.

    Raises:
        WorkloadError: for anything else, a stream among them, which could be read only once.
    """
    if isinstance(loaders, Mapping):
        return {name: first_batch(loader) for name, loader in loaders.items()}
    if isinstance(loaders, (list, tuple)):
        return [first_batch(loader) for loader in loaders]
    if not isinstance(loaders, DataLoader) or isinstance(loaders.dataset, IterableDataset):
        raise WorkloadError(f"reading a batch from {type(loaders).__name__} would consume it. {HOW_TO_GIVE_A_BATCH}")
    dataset, collate = loaders.dataset, loaders.collate_fn
    with random_numbers_kept():
        size = loaders.batch_size or getattr(loaders.batch_sampler, "batch_size", None)
        if size is None:
            raise WorkloadError(f"the loader's own batch sampler decides how large a batch is. {HOW_TO_GIVE_A_BATCH}")
        return collate([dataset[index] for index in range(min(size, len(dataset)))])  # type: ignore[arg-type]
