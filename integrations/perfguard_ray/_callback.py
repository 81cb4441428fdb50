"""PerfGuardCallback: sees what the trials of a run cost, logs it, and stops those whose pace breaks the time budget."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

from ray import cloudpickle
from ray.exceptions import OutOfMemoryError
from ray.tune import Callback
from ray.tune.experiment import Trial
from rich.console import Console

from perfguard.measure import Status, status_of
from perfguard.summary import TrialRecord
from perfguard.tracking import fields_of
from perfguard_ray._ledger import Entry, ledger_of, number_of
from perfguard_ray._measure import PREFIX, measurement_in, report_in
from perfguard_ray._summary import summarize


class PerfGuardCallback(Callback):
    """Logs the cost of each trial beside its prediction, so that the guard learns from it. Works with any scheduler.

    Three lines that a Tune user adds::

        search = PerfGuardSearcher(OptunaSearch(), gpu="a100", build=build, time_budget="2h")
        Tuner(train, tune_config=TuneConfig(search_alg=search), run_config=RunConfig(callbacks=[PerfGuardCallback(search)]))
        with perfguard_ray.measure():  # in the training function, around its body

    - A trial that runs out of memory is logged as ``oom``. The memory that it had reached is a lower bound.
    - A trial whose measured pace will break the time budget is stopped at its next report. It is logged as ``timeout``. This
      needs a ``time_budget``, a workload with ``steps``, and 25 measured steps.
    - A trial that the end of the driver cuts off is logged as ``interrupted``. ``Tuner.restore`` resumes it, and its final cost
      replaces that row.

    Each result of a trial also gets what was predicted, by the names of :mod:`perfguard.tracking`. Tune's own loggers write it
    with the rest: files and TensorBoard always, MLflow and W&B if their callbacks stand after this one. So a quantity has two
    names. ``perfguard/peak_memory_bytes`` and ``perfguard/total_time_s`` are what the trial reports, since its latest start.
    ``perfguard/measured_memory_gib`` and ``perfguard/measured_time_s`` are what the budget is compared with: the same memory in
    GiB, and the time of all starts.

    The console has a line for each configuration that is rejected. At the end of the run it has the table of
    :func:`perfguard_ray.summarize`. ``RunConfig(verbose=0)`` switches both off.

    Args:
        search: the PerfGuardSearcher or PerfGuardVariantGenerator of the run, or a ConcurrencyLimiter around it.

    Raises:
        ConfigurationError: for anything else.
    """

    def __init__(self, search: Any) -> None:
        self.ledger = ledger_of(search, who="PerfGuardCallback")

    def setup(self, *arguments: Any, **info: Any) -> None:
        self.ledger.verbose = _verbosity()

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        from_checkpoint = trial.latest_checkpoint_result is not None
        self.ledger.start(trial.trial_id, trial.config, trial=number_of(trial), from_checkpoint=from_checkpoint)

    def on_trial_result(self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any) -> None:
        entry = self.ledger.entries.get(trial.trial_id)
        if entry is None:
            return
        entry.report = report_in(result) or entry.report
        not_measured = self.ledger.why_not_measured(entry)
        if not_measured is not None:  # the columns are the guarded device's, and the pace of another says nothing
            for name in report_in(result):
                del result[f"{PREFIX}{name}"]
        result.update(fields_of(running_record(entry, not_measured)))  # for the loggers that stand after this callback
        if not_measured is not None:
            return
        guard = self.ledger.guard
        if breaks_budget(entry, guard.budget.longest_trial_s, guard.risk):
            entry.stopped = True
            # A callback cannot stop a trial; its own stopping criterion can, and every scheduler respects it.
            trial.stopping_criterion = {**trial.stopping_criterion, "training_iteration": 0}

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self._finish(trial)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        error = _error_of(trial)
        measurement = measurement_in(error)
        if measurement is not None and (entry := self.ledger.entries.get(trial.trial_id)) is not None:
            entry.report = {name: value for name, value in asdict(measurement).items() if value is not None}
        self.ledger.finish(trial.trial_id, status_of_failure(error), note=_short_message(error))

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Trials that a stopper of the whole experiment has ended. Tune does not notify callbacks of them in another way."""
        if not self.ledger.entries:
            return
        for trial in trials:
            entry = self.ledger.entries.get(trial.trial_id)
            if entry is not None and trial.status == Trial.TERMINATED:
                note = "stopped with the experiment"
                if entry.report:
                    self._finish(trial, note)
                else:
                    self.ledger.finish(trial.trial_id, "interrupted", note=note)

    def on_experiment_end(self, trials: list[Trial], **info: Any) -> None:
        """Finish the trials that an interrupt (Ctrl-C) or an error in the driver has cut off."""
        for trial_id in list(self.ledger.entries):
            self.ledger.finish(trial_id, "interrupted", note="cut off by the end of the driver")
        if self.ledger.verbose >= 1:
            Console().print(summarize(self))

    def _finish(self, trial: Trial, note: str = "") -> None:
        entry = self.ledger.entries.get(trial.trial_id)
        stopped = entry is not None and entry.stopped
        self.ledger.finish(trial.trial_id, "timeout" if stopped else "ok", note="stopped by its pace" if stopped else note)


def running_record(entry: Entry, not_measured: str | None) -> TrialRecord:
    """Return the record of a running trial, with its latest report.

    Args:
        entry: the trial.
        not_measured: the reason why its report does not measure the guarded device. None: it does.
    """
    verdict = entry.decision.verdict
    names = {"memory": "peak_memory_bytes", "step_time": "step_time_s", "time": "total_time_s"}
    report = {} if not_measured else dict(entry.report)
    if "total_time_s" in report:  # that is the time since the latest start
        report["total_time_s"] = entry.elapsed_s
    return TrialRecord(
        number=-1,
        verdict=None if entry.rejected else verdict.action,  # it runs against its verdict, so it is not pruned
        reason=verdict.reason,
        predicted={quantity: estimate.median for quantity, estimate in verdict.estimates.items()},
        intervals={quantity: estimate.interval() for quantity, estimate in verdict.estimates.items()},
        limits={limit.quantity: limit.limit for limit in verdict.limits},
        measured={quantity: report[name] for quantity, name in names.items() if name in report},
        status=None,
        not_measured=not_measured or "",
    )


def _verbosity() -> int:
    """``RunConfig(verbose=...)`` of the run that sets up its callbacks.

    Tune passes it only to its own reporters, so it is read in the caller's frame (``ray.tune.tune.run``, Ray 2.43 to 2.60).
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "run" and frame.f_globals.get("__name__") == "ray.tune.tune":
            verbose = frame.f_locals.get("verbose")
            return int(verbose.value if isinstance(verbose, Enum) else verbose or 0)
        frame = frame.f_back
    return 0


def breaks_budget(entry: Entry, time_budget_s: float | None, risk: float) -> bool:
    """Whether the measured pace shows, with a chance of 1 - ``risk``, that the trial will take longer than ``time_budget_s``."""
    if time_budget_s is None:
        return False
    if entry.elapsed_s > time_budget_s:
        return True
    if entry.pace is None or entry.decision.steps is None:
        return False
    steps_left = max(0, entry.decision.steps - entry.num_steps)
    total = entry.pace.total_time(elapsed_s=entry.elapsed_s, steps_left=steps_left)
    return total.p_exceeds(time_budget_s) >= 1 - risk


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


def _short_message(error: Exception | None) -> str:
    """The last line of what Ray made of the error: the error itself."""
    lines = [line for line in str(error or "").splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else ""
