"""The task function of a Hydra application, as a dry run calls it, and as a launcher does."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import optuna
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import env_override, setup_globals
from hydra.types import TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from perfguard.devices import Device
from perfguard.exceptions import MeasurementWarning, warn_user
from perfguard.leftovers import free_memory
from perfguard.measure import Measurement, Run
from perfguard.session import HowEnded
from perfguard.time_limit import TimeLimitReached, call_within
from perfguard_hydra.space import SearchSpace
from perfguard_optuna.guard import ran_out_of_memory
from perfguard_optuna.session import how_ended


@dataclass(frozen=True, kw_only=True)
class DryTask:
    """The task function as an objective of Optuna, for a dry run: it gets the configuration that its job would have."""

    task: TaskFunction
    loader: ConfigLoader
    config: DictConfig
    """That of the sweep."""
    space: SearchSpace

    def __call__(self, trial: optuna.Trial) -> float | Sequence[float]:
        """Return what the task returns with the parameters of ``trial``."""
        overrides = self.space.overrides(self.space.suggest(trial))
        config = self.loader.load_sweep_config(self.config, list(overrides))
        with _as_job(config) as task_config:
            result: float | Sequence[float] = self.task(task_config)
        return result


@contextmanager
def _as_job(config: DictConfig) -> Iterator[DictConfig]:
    """Let Hydra's own configuration be that of the job, as ``hydra.core.utils.run_job`` does. No folder is made.

    Yields:
        The configuration of the task.
    """
    setup_globals()
    before = HydraConfig.instance().cfg
    with read_write(config), open_dict(config):
        config.hydra.job.id = "0"
        config.hydra.job.num = 0
        config.hydra.runtime.output_dir = config.hydra.runtime.cwd
    HydraConfig.instance().set_config(config)
    task_config = copy.deepcopy(config)
    with read_write(task_config), open_dict(task_config):
        del task_config["hydra"]
    environment: Any = OmegaConf.to_container(config.hydra.job.env_set)
    try:
        with env_override(environment):
            yield task_config
    finally:
        HydraConfig.instance().cfg = before


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a job sends back."""

    value: Any
    """What the task returned. None: it was pruned."""
    pruned: str
    """Why the job ended before it had its value. Empty: it has its value."""
    how: HowEnded
    measurement: Measurement | None
    """What the job cost. None: it could not be measured."""


class MeasuredTask:
    """The task function, measured where a launcher runs it. What ends a trial, and is no fault of the code, is an outcome.

    Args:
        task: the task function.
        device: the guarded device.
        limit_s: seconds after which a job is ended. None: no limit.
    """

    def __init__(self, task: TaskFunction, device: Device, *, limit_s: float | None = None) -> None:
        functools.update_wrapper(self, task, updated=())
        self._task = task
        self._device = device
        self._limit_s = limit_s

    def __call__(self, config: DictConfig) -> Outcome:
        """Run the task. Memory that ran out, the hard time limit, and a TrialPruned of the task itself make a pruned outcome."""
        run = _start(self._device)
        value: Any = None
        pruned = ""
        try:
            value = call_within(self._limit_s, functools.partial(self._task, config))
            how = how_ended(None)
        except (Exception, TimeLimitReached) as error:
            how = how_ended(error)
            pruned = _why_pruned(error)
            if not pruned:
                raise
            free_memory(error)
        return Outcome(value=value, pruned=pruned, how=how, measurement=_finish(run, how))


def _why_pruned(error: BaseException) -> str:
    """Return why a trial that ended with ``error`` counts as pruned. Empty: it has failed."""
    if ran_out_of_memory(error):
        return f"ran out of memory: {error}"
    if isinstance(error, (optuna.TrialPruned, TimeLimitReached)):
        return str(error) or "the task has pruned it"
    return ""


def _start(device: Device) -> Run | None:
    try:
        return Run(device).start()
    except Exception as error:
        _warn_unmeasured(error)
        return None


def _finish(run: Run | None, how: HowEnded) -> Measurement | None:
    if run is None:
        return None
    try:
        return run.finish(how.status, note=how.note, cut_short=how.cut_short)
    except Exception as error:
        _warn_unmeasured(error)
        return None


def _warn_unmeasured(error: Exception) -> None:
    warn_user(f"PerfGuard could not measure a job: {type(error).__name__}: {error}", MeasurementWarning)
