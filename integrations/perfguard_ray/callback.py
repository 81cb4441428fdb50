"""What a Tune run measures: `measure` and `measured` in a trial, PerfGuardCallback in the driver, the summary at the end."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import ray
from ray import cloudpickle
from ray.exceptions import OutOfMemoryError
from ray.tune import Callback, Trainable
from ray.tune.experiment import Trial
from ray.tune.result import DONE, RESULT_DUPLICATE
from ray.tune.utils import flatten_dict
from rich.console import Console

from perfguard import summary
from perfguard.devices import Device, cpu_name, visible_gpu
from perfguard.exceptions import ConfigurationError, LogError, LogWarning, warn_user
from perfguard.measure import Measurement, Run, Status, status_of
from perfguard.record import TrialRecord, measured_by
from perfguard.session import HowEnded
from perfguard.tracking import fields_of
from perfguard_ray.ledger import REPAIR_KEY, ledger_of, number_of
from perfguard_ray.worker import Facts, TrialRejected, Watch, asked_for, play_steps, session_here

if TYPE_CHECKING:
    from perfguard.summary import Summary

PREFIX = "perfguard/"
_ATTRIBUTE = "_perfguard_measurement"
T = TypeVar("T", bound=type[Trainable])


@contextmanager
def measure(device: Device | None = None) -> Iterator[Run]:
    """Measure a trial until the end of the block. Every ``tune.report`` in the block has the cost so far.

    The one line that a training function needs::

        def train(config):
            with perfguard_ray.measure():
                ...  # build the model, train, tune.report({"loss": loss}) as before

    Reports have ``perfguard/peak_memory_bytes``, ``perfguard/step_time_s``, ``perfguard/total_time_s``, ``perfguard/num_steps``
    and the method. Torch's ``optimizer.step()`` counts the steps. With another framework call ``run.step()`` after each one
    (``with perfguard_ray.measure() as run``). Reports after the block have the final numbers. A dict that the function returns
    is such a report. In a training function of Ray Train, this applies to ``ray.train.report``, and the numbers are those of the
    worker with rank 0.

    Outside Ray the block is measured too (``run.measurement``), but nothing is reported.

    Args:
        device: what the trial runs on. None: the GPU that Ray gave it, else the CPU. The report names the device that the
            trial really used.
    """
    session = session_here()
    watch = Watch(getattr(session, "trial_id", None))
    run = _new_run(watch, device)
    if session is not None:
        _carry_with_reports(run, session)
    run.start()
    try:
        with watch.training(run):
            yield run
    except TrialRejected as error:  # by the driver, so this is no failure
        _fail(run, error)
    except BaseException as error:
        _fail(run, error)
        raise
    else:
        run.finish()
    finally:
        watch.close()


def measured(trainable: T) -> T:
    """Decorate a class Trainable, so that it is measured. Its results have the values of :func:`measure`.

    The one line that a Trainable class needs::

        @perfguard_ray.measured
        class Train(tune.Trainable): ...
    """

    class Measured(trainable):  # type: ignore[misc, valid-type]
        def setup(self, config: dict[str, Any], **parameters: object) -> None:
            self._perfguard_begin()
            super().setup(config, **parameters)

        def _perfguard_begin(self) -> None:
            self._perfguard_watch = Watch(self.trial_id)
            self._perfguard_run = _new_run(self._perfguard_watch).start()

        def _perfguard_end(self) -> None:
            self._perfguard_watch.close()
            self._perfguard_run.finish()

        def step(self) -> dict[str, Any]:
            try:
                with self._perfguard_watch.training(self._perfguard_run) as first_forward:
                    result = super().step()
                    if first_forward is not None and first_forward.child:
                        play_steps(super().step)
            except TrialRejected:
                return {RESULT_DUPLICATE: True}  # it ends, as a function that returns without a report
            except Exception as error:
                _fail(self._perfguard_run, error)
                raise
            return {**result, **metrics_of(self._perfguard_run)}

        def reset_config(self, new_config: dict[str, Any]) -> bool:
            done = bool(super().reset_config(new_config))
            if done:
                self._perfguard_end()
                self._perfguard_begin()
            return done

        def cleanup(self) -> None:
            self._perfguard_end()
            super().cleanup()

    for name in ("__name__", "__qualname__", "__doc__", "__module__"):
        setattr(Measured, name, getattr(trainable, name))
    return cast(T, Measured)


class _Cpu(NamedTuple):
    """The part of a Device that a Run reads. Measuring a CPU's rates would cost each new actor a quarter of a second."""

    id: str
    name: str
    kind: str = "cpu"


def _new_run(watch: Watch, device: Device | None = None) -> Run:
    return Run(device or visible_gpu() or cast(Device, _Cpu("cpu", cpu_name())), on_step=watch.after_step)


def _fail(run: Run, error: BaseException) -> None:
    """End the run of a trial that failed, and let the error take the measurement to the driver: it reports nothing more."""
    run.finish(status_of(error), note=f"{type(error).__name__}: {error}"[:200])
    try:
        setattr(error, _ATTRIBUTE, run.measurement)
    except AttributeError:  # a class with slots
        pass


def metrics_of(run: Run) -> dict[str, Any]:
    """The report that carries what ``run`` has cost so far; what was not measured is left out."""
    pace = run.pace
    fields = asdict(run.so_far()) | ({} if pace is None else {"pace_mean_s": pace.mean_s, "pace_error_s": pace.error_s})
    return {f"{PREFIX}{name}": value for name, value in fields.items() if value is not None and name != "status"}


def measurement_in(error: BaseException | None) -> Measurement | None:
    """The measurement of a trial that failed with ``error``; None: it does not measure itself."""
    while error is not None:
        measurement = getattr(error, _ATTRIBUTE, None)
        if isinstance(measurement, Measurement):
            return measurement
        error = getattr(error, "cause", None) or error.__cause__
    return None


def _carry_with_reports(run: Run, session: Any) -> None:
    """Let every report of the ``session`` in this process carry the measurements of ``run``, until another run takes over.

    A session has no public hook for that. Ray Tune's is replaced on the instance (Ray 2.7 to 2.60). Ray says of Ray Train's that
    it "can be patched if new user APIs behaviors is wanted" (v2/_internal/execution/train_fn_utils.py, since 2.48).
    """
    plain: Callable[..., None] = getattr(session.report, "_perfguard_plain", session.report)
    trial_id = getattr(session, "trial_id", None)

    def report(metrics: dict[str, Any], *arguments: object, **options: object) -> None:
        is_ours = trial_id == getattr(session, "trial_id", None)  # an actor that is used again keeps its session
        is_measured = f"{PREFIX}num_steps" in metrics  # by a worker of Ray Train, which runs the steps
        extra = metrics_of(run) if is_ours and not is_measured and RESULT_DUPLICATE not in metrics else {}
        plain({**metrics, **extra}, *arguments, **options)

    report._perfguard_plain = plain  # type: ignore[attr-defined]
    session.report = report


class PerfGuardCallback(Callback):
    """Logs the cost of each trial beside its prediction, so that the guard learns from it. Works with any scheduler.

    :class:`PerfGuardSearcher` has an example of both.

    - A trial that runs out of memory is logged as ``oom``. The memory that it had reached is a lower bound. It never runs again
      as it was. With ``on_oom="repair"`` and Tune's ``FailureConfig(max_failures=1)``, it runs once more with smaller batches.
    - A trial whose measured pace will break the time budget is stopped at its next report. It is logged as cut short. This
      needs a ``time_budget``, a workload with ``steps``, and 25 measured steps.
    - A trial that reaches ``hard_time_limit`` is stopped, and logged as ``timeout``. It may hang, so its actor is killed.
    - A trial that the end of the driver cuts off is logged as ``interrupted``. ``Tuner.restore`` resumes it, and its final cost
      replaces that row.

    Each result of a trial also gets what was predicted, by the names of :mod:`perfguard.tracking`. Tune's own loggers write it
    with the rest: files and TensorBoard always, MLflow and W&B if their callbacks stand after this one. So the time has two
    names. ``perfguard/total_time_s`` is what the trial reports, since its latest start. ``perfguard/time_measured_s`` is what the
    budget is compared with: the time of all starts.

    The console has a line for each configuration that is rejected. At the end of the run it has the table of
    :func:`perfguard_ray.summarize`. ``RunConfig(verbose=0)`` switches both off.

    Args:
        search: the PerfGuardSearcher or PerfGuardVariantGenerator of the run, or a ConcurrencyLimiter around it.

    Raises:
        ConfigurationError: for anything else.
    """

    def __init__(self, search: object) -> None:
        self.ledger = ledger_of(search, who="PerfGuardCallback")

    def setup(self, *arguments: object, **info: object) -> None:
        self.ledger.verbose = _verbosity()

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: object) -> None:
        if self.ledger.guard.on_oom == "repair" and trial.max_failures == 0:
            raise ConfigurationError(
                "on_oom='repair' needs Tune to start failed trials again: "
                "RunConfig(failure_config=tune.FailureConfig(max_failures=1))."
            )
        from_checkpoint = trial.latest_checkpoint_result is not None
        with asked_for(Facts.of(trial)):
            self.ledger.start(trial.trial_id, trial.config, trial=number_of(trial), from_checkpoint=from_checkpoint)

    def on_trial_result(self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: object) -> None:
        entry = self.ledger.entries.get(trial.trial_id)
        if entry is None:
            return
        report = {key.removeprefix(PREFIX): value for key, value in result.items() if key.startswith(PREFIX)}
        entry.report = report or entry.report
        # A function that returns sends no such result. Of a class that says itself that it is done, this cannot be known.
        is_cut_short = bool(result.get(DONE)) and not trial.should_stop({**flatten_dict(result), DONE: False})
        session = entry.session
        if not session.stopped:  # Tune stops it at the result after the one that broke the budget
            entry.how_ends = HowEnded("ok", cut_short="by the tuner" if is_cut_short else "")
        not_measured = self.ledger.why_not_measured(entry)
        entry.is_elsewhere = bool(not_measured)
        if not_measured:  # the columns are the guarded device's, and the pace of another says nothing
            for name in report:
                del result[f"{PREFIX}{name}"]
        verdict = entry.verdict
        is_measured = entry.reported and not not_measured
        measured = measured_by(self.ledger.measurement(entry), verdict.predicted) if is_measured else {}
        # Its end is not known yet. But one that runs against its verdict is not to be shown as pruned.
        running = TrialRecord(number=None, verdict=verdict, measured=measured, not_measured=not_measured, status="ok")
        fields = fields_of(running)
        del fields[f"{PREFIX}status"]
        result.update(fields)  # for the loggers that stand after this callback
        if session.too_slow(entry) is not None:
            entry.how_ends = HowEnded("ok", cut_short="by the tuner")
            # A callback cannot stop a trial; its own stopping criterion can, and every scheduler respects it.
            trial.stopping_criterion = {**trial.stopping_criterion, "training_iteration": 0}

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: object) -> None:
        self.ledger.finish(trial.trial_id)

    def on_trial_recover(self, iteration: int, trials: list[Trial], trial: Trial, **info: object) -> None:
        """Tune starts a trial again (``FailureConfig``). One that ran out of memory runs with a repair, or not at all."""
        how = self._how_failed(trial)
        if how.status != "oom" or trial.trial_id not in self.ledger.entries:
            return
        repair = self.ledger.try_again(trial.trial_id, trial.config, note=how.note)
        if repair is None:
            _stop(trial)
        else:
            trial.set_config({**trial.config, REPAIR_KEY: asdict(repair)})

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: object) -> None:
        self.ledger.finish(trial.trial_id, self._how_failed(trial))

    def _how_failed(self, trial: Trial) -> HowEnded:
        """How the trial failed, and in which words. Its error has its measurement, which is noted."""
        error = _error_of(trial)
        measurement = measurement_in(error)
        if measurement is not None and (entry := self.ledger.entries.get(trial.trial_id)) is not None:
            entry.report = {name: value for name, value in asdict(measurement).items() if value is not None}
        lines = [line for line in str(error or "").splitlines() if line.strip()]  # the last of Ray's lines is the error itself
        return HowEnded(status_of_failure(error), lines[-1].strip()[:200] if lines else "")

    def on_step_end(self, iteration: int, trials: list[Trial], **info: object) -> None:
        """Give verdicts to trials that wait for them, and end those whose time is over, or that a stopper has ended."""
        for trial in trials if self.ledger.entries else ():
            entry = self.ledger.entries.get(trial.trial_id)
            if entry is None:
                continue
            if self.ledger.decide_late(trial.trial_id):
                _stop(trial)
            elif trial.status == Trial.RUNNING and (reason := entry.over_time) is not None:
                entry.how_ends = HowEnded("timeout", reason)
                _kill(trial)
            elif trial.status == Trial.TERMINATED:
                # Tune has no other callback for trials that a stopper of the whole experiment ends.
                status: Status = "ok" if entry.reported else "interrupted"
                self.ledger.finish(trial.trial_id, HowEnded(status, "stopped with the experiment", "by the tuner"))

    def on_experiment_end(self, trials: list[Trial], **info: object) -> None:
        """Finish the trials that an interrupt (Ctrl-C) or an error in the driver has cut off."""
        for trial_id in list(self.ledger.entries):
            self.ledger.finish(trial_id, HowEnded("interrupted", "cut off by the end of the driver"))
        if self.ledger.verbose < 1:
            return
        try:
            Console().print(summarize(self))
        except LogError as error:  # the run itself has ended well
            warn_user(f"The summary cannot be shown. {error} Call `perfguard_ray.summarize` when the log is back.", LogWarning)


def summarize(search: object) -> Summary:
    """The guard's summary of a Tune run, from the measurement log.

    Example:
        >>> tuner.fit()                                                                             # doctest: +SKIP
        >>> print(perfguard_ray.summarize(search))                                                  # doctest: +SKIP

    A run prints it at its end, unless ``RunConfig(verbose=0)``; a run that is restored prints the summary of the whole.

    Args:
        search: the PerfGuardSearcher or PerfGuardVariantGenerator of the run, or its PerfGuardCallback.

    Raises:
        ConfigurationError: for anything else.
        LogError: if the log cannot be read now.
    """
    ledger = ledger_of(search, who="perfguard_ray.summarize")
    return summary.summarize(
        ledger.records(), title=ledger.study, num_repeated=ledger.num_repeated, more_guard_s=ledger.superseded_guard_s()
    )


def status_of_failure(error: Exception | None) -> Status:
    """Out of memory also where Ray's memory monitor ended the trial, because its node ran low on main memory."""
    if isinstance(error, OutOfMemoryError) or "low on memory" in str(error):
        return "oom"
    return "failed" if error is None else status_of(error)


def _error_of(trial: Trial) -> Exception | None:
    """The error of the trial, which Ray has just pickled into the trial's folder on this machine, or as text."""
    path = trial.pickled_error_file
    try:
        if path is not None and Path(path).is_file():
            error = cloudpickle.loads(Path(path).read_bytes())
            return error if isinstance(error, Exception) else None
        if trial.error_file is not None and Path(trial.error_file).is_file():
            return RuntimeError(Path(trial.error_file).read_text(encoding="utf-8", errors="replace"))
    except Exception as error:  # whatever a class of the user's does while it is unpickled
        return error
    return None


def _stop(trial: Trial) -> None:
    """End a trial without an error or a result. Tune gives callbacks no other way."""
    _of_caller("self", "ray.tune.execution.tune_controller").stop_trial(trial)


def _kill(trial: Trial) -> None:
    """End a trial that may hang, and its actor. Tune lets an actor that hangs keep the processor and the GPU for ten minutes.

    An actor that Tune keeps for the next trial (private, Ray 2.43 to 2.60) lives on.
    """
    actor = trial.temporary_state.ray_actor
    _stop(trial)
    if actor is not None and not _of_caller("self", "ray.tune.execution.tune_controller")._reuse_actors:
        ray.kill(actor)


def _verbosity() -> int:
    """``RunConfig(verbose=...)`` of the run that sets up its callbacks. Tune passes it only to its own reporters."""
    verbose = _of_caller("verbose", "ray.tune.tune")
    return int(verbose.value if isinstance(verbose, Enum) else verbose or 0)


def _of_caller(name: str, module: str) -> Any:
    """A variable of the function of Tune that called the callback (Ray 2.43 to 2.60). None: there is none."""
    frame = inspect.currentframe()
    while frame is not None and not (frame.f_globals.get("__name__") == module and name in frame.f_locals):
        frame = frame.f_back
    return None if frame is None else frame.f_locals[name]
