"""GuardedSweep: the loop of the sweeper. It asks Optuna, then the guard, and launches what fits.

ask       Optuna proposes a trial
judge     a dry run of the task shows what its job would run, and the guard decides
refill    a trial that does not fit is pruned with its constraints, and another one takes its place in the batch
sort      the longest job of a batch begins first, so that the others do not wait for it
launch    the user's launcher runs the batch
tell      values, pruned trials and failures go to Optuna, measurements to the guard
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import optuna
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, TaskFunction
from hydra.utils import get_method
from omegaconf import DictConfig, OmegaConf
from optuna.samplers import BaseSampler, GridSampler
from optuna.trial import TrialState

from perfguard.capture import SelfEnded
from perfguard.exceptions import CaptureError, ConfigurationError, TooLargeError
from perfguard.verdict import Verdict
from perfguard_hydra.space import SearchSpace
from perfguard_hydra.task import DryTask, MeasuredTask, Outcome
from perfguard_optuna.capture import ObjectiveBuild
from perfguard_optuna.guard import OptunaGuard
from perfguard_optuna.session import OptunaSession

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """The configuration ``hydra.sweeper``."""

    sampler: BaseSampler | Callable[..., BaseSampler] | None = None
    """A sampler. A partial of GridSampler gets the grid of the space. None: Optuna's default."""
    directions: Sequence[Literal["minimize", "maximize"]] = ("minimize",)
    storage: str | None = None
    """URL of Optuna's storage. None: the study is kept in memory."""
    study_name: str | None = None
    n_trials: int = 20
    """Jobs to launch. Trials that do not fit are replaced, and do not count."""
    n_jobs: int = 2
    """Jobs of a batch."""
    max_failure_rate: float = 0.0
    """Share of the failed jobs in a batch above which the sweep ends, in [0, 1]. Pruned jobs have not failed."""
    custom_search_space: str | None = None
    """Dotted path of a function ``(config, trial)`` that suggests more parameters. None: there is none."""
    params: Mapping[str, Any] = field(default_factory=dict)
    gpu: str = "auto"
    guard: Mapping[str, Any] = field(default_factory=dict)
    """The other arguments of :class:`perfguard.Guard`."""

    def __post_init__(self) -> None:
        for name in ("n_trials", "n_jobs"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"hydra.sweeper.{name} must be at least 1, but got {getattr(self, name)!r}.")
        if not 0 <= self.max_failure_rate <= 1:
            raise ConfigurationError(f"hydra.sweeper.max_failure_rate must lie in [0, 1], but got {self.max_failure_rate!r}.")
        for name in ("on_violation", "on_oom"):
            if self.guard.get(name) == "repair":
                raise ConfigurationError(
                    f"hydra.sweeper.guard.{name}='repair' needs a description of the trials, which a sweep does not have: a dry "
                    f"run shows what a job runs, but not how to change it. Leave out {name}."
                )


@dataclass(frozen=True, slots=True)
class _Job:
    """A trial that is going to be launched."""

    trial: optuna.Trial
    overrides: tuple[str, ...]
    session: OptunaSession

    @property
    def verdict(self) -> Verdict:
        return self.session.verdict


class GuardedSweep:
    """One sweep.

    Args:
        settings: of the sweeper.
        config: the composed configuration of the application.
        context: Hydra's.
        task: the task function of the application.

    Raises:
        ConfigurationError: for an unknown GPU or setting, a budget or a risk that cannot be right.
    """

    def __init__(self, settings: SweepSettings, *, config: DictConfig, context: HydraContext, task: TaskFunction) -> None:
        self._settings = settings
        self._config = config
        self._loader = context.config_loader
        self._task = task
        self._guard = OptunaGuard(settings.gpu, **settings.guard)
        measured = MeasuredTask(task, self._guard.device, limit_s=self._guard.guard.hard_time_limit_s)
        self._launcher = Plugins.instance().instantiate_launcher(config=config, hydra_context=context, task_function=measured)
        self._num_jobs = 0
        self._num_asked = 0
        self._most_asked = math.inf
        self._is_over = False
        """Whether there is nothing more to propose."""

    def run(self, arguments: Sequence[str]) -> optuna.Study:
        """Sweep over the overrides ``arguments`` and ``hydra.sweeper.params``, and write ``optimization_results.yaml``.

        Raises:
            ConfigurationError: for a search space that cannot be right.
            Exception: that of a job, if more jobs of a batch have failed than ``max_failure_rate`` allows.
        """
        settings = self._settings
        extend = None
        if settings.custom_search_space is not None:
            extend = functools.partial(get_method(settings.custom_search_space), self._config)
        space = SearchSpace.parse([*(f"{key}={value}" for key, value in settings.params.items()), *arguments], extend=extend)
        study = optuna.create_study(
            study_name=settings.study_name,
            storage=settings.storage,
            sampler=self._sampler_of(space),
            directions=list(settings.directions),
            load_if_exists=True,
        )
        log.info(f"Study {study.study_name!r} on {self._guard.device.name}: {', '.join(settings.directions)}")
        self._guard.search_of(study).begin()
        dry_task = DryTask(task=self._task, loader=self._loader, config=self._config, space=space)
        guard = self._guard.guard
        captures = ObjectiveBuild(
            dry_task, self._guard.device, study.directions, network=guard.dry_run_network, clock=guard.clock
        )
        try:
            while self._num_jobs < settings.n_trials and not self._is_over:
                size = min(settings.n_jobs, settings.n_trials - self._num_jobs)
                self._launch(study, in_launch_order(self._next_batch(study, space, captures, size)))
        finally:
            captures.close()
        self._write_results(study)
        return study

    def _sampler_of(self, space: SearchSpace) -> BaseSampler | None:
        sampler = self._settings.sampler
        if sampler is None or isinstance(sampler, BaseSampler):
            return sampler
        grid = space.grid()
        if getattr(sampler, "func", None) is GridSampler:
            self._most_asked = math.prod(len(values) for values in grid.values())
        return sampler(grid)

    # --- Ask, judge, refill -----------------------------------------------------------------------------------------------------

    def _next_batch(self, study: optuna.Study, space: SearchSpace, captures: ObjectiveBuild, size: int) -> list[_Job]:
        """Return up to ``size`` trials that are to be launched. They are fewer only where there is nothing more to propose."""
        batch: list[_Job] = []
        while len(batch) < size and not self._is_over:
            job = self._ask(study, space, captures)
            if job is not None:
                batch.append(job)
            self._is_over = self._is_over or self._num_asked >= self._most_asked
        return batch

    def _ask(self, study: optuna.Study, space: SearchSpace, captures: ObjectiveBuild) -> _Job | None:
        """Return the next trial of the study, if it is to be launched. None: it does not fit, and is pruned."""
        trial = study.ask()
        self._num_asked += 1
        try:
            params = space.suggest(trial)
            session = self._guard.session_of(study, trial)
            self._judge(session, captures)
        except BaseException:
            self._tell(study, trial, TrialState.FAIL)
            raise
        job = _Job(trial, space.overrides(params), session)
        if job.verdict.action != "prune":
            return job
        log.info(f"Trial {trial.number} is not launched: {job.verdict.reason}. {' '.join(job.overrides)}")
        self._tell(study, trial, TrialState.PRUNED)
        self._look_for_an_end(study)
        return None

    def _judge(self, session: OptunaSession, captures: ObjectiveBuild) -> None:
        captures.may_stand_in = self._guard.guard.stand_ins(session.study.study_name)
        found: Exception | None = None
        try:
            captures.ask(session.trial)  # type: ignore[arg-type]  # a Trial, since it was just asked for
        except (CaptureError, TooLargeError, SelfEnded) as error:
            found = error
        session.judge(captures, found=found)

    def _look_for_an_end(self, study: optuna.Study) -> None:
        """End the sweep after 300 rejections in a row: nothing is to be found. The least doubtful proposal is tried first."""
        search = self._guard.search_of(study)
        if not search.is_over:
            return
        tried = search.last_try(self._guard.guard)
        if tried is not None:
            study.enqueue_trial(dict(tried))
            return
        search.warn_that_nothing_fits()
        self._is_over = True

    # --- Launch, tell -----------------------------------------------------------------------------------------------------------

    def _launch(self, study: optuna.Study, batch: Sequence[_Job]) -> None:
        """Run a batch, and tell Optuna and the guard how each job ended.

        Raises:
            Exception: that of the first failed job, if too many have failed.
        """
        if not batch:
            return
        try:
            returns = self._launcher.launch([job.overrides for job in batch], initial_job_idx=self._num_jobs)
        except BaseException:
            for job in batch:
                self._tell(study, job.trial, TrialState.FAIL)
            raise
        self._num_jobs += len(batch)
        failed = [returned for job, returned in zip(batch, returns, strict=True) if not self._end(study, job, returned)]
        if len(failed) / len(batch) > self._settings.max_failure_rate:
            log.error(f"{len(failed)} of {len(batch)} jobs failed, max_failure_rate is {self._settings.max_failure_rate:g}.")
            _raise_error_of(failed[0])

    def _end(self, study: optuna.Study, job: _Job, returned: JobReturn) -> bool:
        """Tell how a job ended. Return False if it has failed."""
        if returned.status != JobStatus.COMPLETED:
            log.warning(f"Trial {job.trial.number} failed: {returned._return_value!r}")
            self._tell(study, job.trial, TrialState.FAIL)
            return False
        outcome: Outcome = returned.return_value
        returned.return_value = outcome.value
        if outcome.measurement is not None:
            job.session.end_with(outcome.measurement, outcome.how)
        if outcome.pruned:
            log.info(f"Trial {job.trial.number} is pruned: {outcome.pruned}")
            self._tell(study, job.trial, TrialState.PRUNED)
            return True
        try:
            values = values_of(outcome.value, num_objectives=len(study.directions))
        except ConfigurationError as error:
            log.warning(f"Trial {job.trial.number} failed: {error}")
            returned.status = JobStatus.FAILED
            returned.return_value = error
            self._tell(study, job.trial, TrialState.FAIL)
            return False
        self._tell(study, job.trial, TrialState.COMPLETE, values)
        return True

    def _tell(self, study: optuna.Study, trial: optuna.Trial, state: TrialState, values: Sequence[float] | None = None) -> None:
        """Tell the end of a trial. A sampler that has come to the end of its space ends the sweep."""
        try:
            study.tell(trial, values, state=state)
        except RuntimeError as error:  # Study.stop works in Study.optimize alone (Optuna 5.0). The trial is told all the same.
            if "Study.stop" not in str(error):
                raise
            self._is_over = True

    def _write_results(self, study: optuna.Study) -> None:
        """Write what Hydra's Optuna sweeper writes: the best trial, or the Pareto front."""
        completed = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        results: dict[str, Any] = {"name": "perfguard"}
        if not completed:
            log.warning("No trial has completed, so there is no best one.")
        elif len(study.directions) == 1:
            best = study.best_trial
            results |= {"best_params": best.params, "best_value": best.value}
            log.info(f"Best value: {best.value}, with {best.params}")
        else:
            front = study.best_trials
            results["solutions"] = [{"params": trial.params, "values": trial.values} for trial in front]
            log.info(f"{len(front)} trials on the Pareto front")
        folder = Path(str(self._config.hydra.sweep.dir))
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(OmegaConf.create(results), folder / "optimization_results.yaml")


def in_launch_order(batch: Sequence[_Job]) -> list[_Job]:
    """Return the jobs of a batch, the longest by its predicted time first.

    The time is that of the whole trial, or of a step where the number of steps of a trial is not known.
    """
    quantity = "time" if all("time" in job.verdict.predicted for job in batch) else "step_time"

    def predicted_s(job: _Job) -> float:
        estimate = job.verdict.predicted.get(quantity)  # type: ignore[call-overload]
        return 0.0 if estimate is None else float(estimate.median)

    return sorted(batch, key=predicted_s, reverse=True)


def values_of(returned: object, *, num_objectives: int) -> list[float]:
    """Return the values of the objectives that a task returned: a number, or of several objectives a list.

    Raises:
        ConfigurationError: for anything else.
    """
    many = [returned] if num_objectives == 1 else returned
    try:
        values = [float(value) for value in many]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        values = []
    if len(values) != num_objectives:
        wanted = "a number" if num_objectives == 1 else f"a list of {num_objectives} numbers"
        raise ConfigurationError(f"The task must return {wanted}, one for each direction, but it returned {returned!r}.")
    return values


def _raise_error_of(failed: JobReturn) -> None:
    """Raise the error of a failed job.

    Raises:
        Exception: always.
    """
    _ = failed.return_value  # which raises it, with its traceback
