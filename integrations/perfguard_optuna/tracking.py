"""Callbacks that write predictions, measurements and verdicts where users look: MLflow, W&B, TensorBoard, optuna-dashboard.

Each is a callback of ``study.optimize``, and needs its package when it is made:

    >>> study.optimize(objective, n_trials=40, callbacks=[MLflowCallback()])                        # doctest: +SKIP

The names of the numbers are those of :mod:`perfguard.tracking`.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from perfguard.budget import NOUNS
from perfguard.exceptions import ConfigurationError, TrackingWarning, warn_user, why_not_imported
from perfguard.quantities import format_quantity
from perfguard.summary import QUANTITIES, time_in_words
from perfguard.tracking import PREFIX as FIELD
from perfguard.tracking import Field, fields_of
from perfguard_optuna._attributes import PREFIX, proposals_rejected_for, record_of
from perfguard_optuna._summary import summarize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from perfguard.summary import TrialRecord

_PAUSE = 10
"""After a failure, a tracker is left alone for this many times as long as the failure took."""
_PATIENCE_S = 10.0
"""A server that does not answer for so long is away."""
_MOST_DRAWING = 0.01
"""The part of a study's time that its pictures in the dashboard may take."""
_NOTE = "**PerfGuard: "
"""Beginning of what PerfGuard adds to a note of the dashboard. What stands before it is the user's."""
_NOTE_END = "[//]: # (PerfGuard ends here)"
"""End of it: a link that nothing uses, so Markdown shows nothing. What stands after it is the user's, too."""
_RUN_ID = "mlflow_run_id"
_STATUS = {TrialState.COMPLETE: "FINISHED", TrialState.FAIL: "FAILED", TrialState.PRUNED: "KILLED"}


def tracked_fields(trial: FrozenTrial) -> dict[str, Field]:
    """What PerfGuard wrote into a finished trial, by the names of :mod:`perfguard.tracking`, and beside them:

    ``perfguard/chance_over_budget``, ``perfguard/learnt_from_runs`` (the number of measured runs from which the prediction
    had learnt), ``perfguard/predictor``, ``perfguard/stopped`` (why a running trial was stopped) and ``perfguard/repair_<field>``
    of a repaired trial.
    """
    attributes = trial.user_attrs
    more = {
        "chance_over_budget": attributes.get(f"{PREFIX}:p_violation"),
        "learnt_from_runs": attributes.get(f"{PREFIX}:learnt_from"),
        "predictor": attributes.get(f"{PREFIX}:predictor"),
        "stopped": attributes.get(f"{PREFIX}:stopped"),
    }
    repairs = f"{PREFIX}:repair:"
    more |= {f"repair_{key.removeprefix(repairs)}": value for key, value in attributes.items() if key.startswith(repairs)}
    known = {name: value for name, value in more.items() if value is not None}
    return fields_of(record_of(trial)) | {
        f"{FIELD}{name}": value if isinstance(value, str) else float(value) for name, value in known.items()
    }


class TrackingCallback(ABC):
    """A study callback that writes each finished trial somewhere, those included that were pruned before launch.

    A tracker that fails never stops a study. One TrackingWarning says why. The trial is kept, and written with a later one.
    The wait for a server that is away takes at most a tenth of the study's time.
    """

    name: str
    """Name of the tracker in messages."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[optuna.Study, FrozenTrial]] = []
        self._not_before = 0.0
        self._has_warned = False

    def __call__(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Write a trial that has just ended."""
        with self._lock:
            self._waiting.append((study, trial))
            began = time.monotonic()
            try:
                self._waiting += [(study, rejected) for rejected in proposals_rejected_for(study, trial)]
                if began < self._not_before:
                    return
                self._check()
                while self._waiting:
                    self._write(*self._waiting[0])
                    self._waiting.pop(0)
            except Exception as error:
                self._waiting.append(self._waiting.pop(0))  # it may be the one trial that cannot be written
                now = time.monotonic()
                self._not_before = max(self._not_before, now + _PAUSE * (now - began))
                self._warn(error)

    def write(self, study: optuna.Study) -> None:
        """Write all finished trials of a study, for instance of one that ran without this callback.

        Raises:
            Exception: whatever the tracker raises.
        """
        with self._lock:
            self._write_all(study, [trial for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()])
            self._waiting = [kept for kept in self._waiting if kept[0].study_name != study.study_name]

    def _check(self) -> None:
        """Raise if the tracker is away, where that can be known faster than by a failed write."""
        return

    @abstractmethod
    def _write(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Write one finished trial."""

    def _write_all(self, study: optuna.Study, trials: Sequence[FrozenTrial]) -> None:
        for trial in trials:
            self._write(study, trial)

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn_user(
                f"PerfGuard could not write a trial to {self.name} (shown once). The study goes on, and the trial is written "
                "with a later one. What is missing at the end, the callback's write(study) writes. The cause is a "
                f"{type(error).__name__}: {error}",
                TrackingWarning,
            )


class MLflowCallback(TrackingCallback):
    """Writes each trial into an MLflow run: numbers as metrics, verdict and reason as tags.

    A trial's run is found in this order:

    1. the run whose id the objective has set: ``trial.set_user_attr("mlflow_run_id", run.info.run_id)``;
    2. the run that Optuna's own ``MLflowCallback`` has made, if it stands before this one in ``callbacks``;
    3. a new run.

    A new run also gets the hyperparameters and the objective's values. Its status is FINISHED, FAILED or, for a pruned trial,
    KILLED. It is a child of the run that was active when the callback was made, if there was one in the same tracking store.
    Writing a trial twice changes nothing.

    Args:
        tracking_uri: where to write. None: as MLflow is configured.
        experiment: name of the experiment. None: that of the active run, else the one that ``mlflow.set_experiment`` or MLflow's
            environment variables name, else one that is named like the study.

    Raises:
        ConfigurationError: if MLflow is not installed, or cannot open ``tracking_uri``.
    """

    name = "MLflow"

    def __init__(self, tracking_uri: str | None = None, *, experiment: str | None = None) -> None:
        super().__init__()
        try:
            import mlflow
        except ImportError as error:
            raise ConfigurationError(_missing(error, "mlflow", "MLflow", "mlflow")) from error
        try:
            self._client = mlflow.MlflowClient(tracking_uri=tracking_uri)
        except Exception as error:
            where = "its tracking store" if tracking_uri is None else repr(tracking_uri)
            raise ConfigurationError(
                f"MLflow cannot open {where}: {str(error).strip()}. tracking_uri must look like 'http://host:5000' or "
                "'sqlite:///mlflow.db'."
            ) from error
        knows_active_run = self._client.tracking_uri == mlflow.get_tracking_uri()
        self._parent = mlflow.active_run() if knows_active_run else None
        self._experiment = experiment
        self._experiment_ids: dict[str, str] = {}

    def _check(self) -> None:
        import requests

        if self._client.tracking_uri.startswith("http"):  # MLflow asks a server that is away for four minutes
            try:
                requests.head(self._client.tracking_uri, timeout=_PATIENCE_S)
            except requests.exceptions.SSLError:  # MLflow has its own settings for certificates
                pass

    def _write(self, study: optuna.Study, trial: FrozenTrial) -> None:
        from mlflow.entities import Metric, Param, RunTag

        tags = {"number": f"{trial.number}", "datetime_start": f"{trial.datetime_start}"}  # Optuna's own callback writes both
        run_id, is_own = self._run_of(study, trial, tags)
        now = _milliseconds(trial.datetime_complete)
        fields = tracked_fields(trial) | (_values_of(trial) if is_own else {})
        self._client.log_batch(
            run_id,
            metrics=[Metric(name, value, now, 0) for name, value in fields.items() if not isinstance(value, str)],
            params=[Param(name, f"{value}") for name, value in trial.params.items()] if is_own else [],
            tags=[RunTag(name, value) for name, value in fields.items() if isinstance(value, str)],
        )
        if is_own:
            self._client.set_terminated(run_id, _STATUS[trial.state], now)

    def _run_of(self, study: optuna.Study, trial: FrozenTrial, tags: Mapping[str, str]) -> tuple[str, bool]:
        """The id of the run of a trial, and whether this callback has made it."""
        given = trial.user_attrs.get(_RUN_ID) or trial.system_attrs.get(_RUN_ID)
        if given is not None:
            return given, False
        experiment_id, mine = self._experiment_of(study), f"{FIELD}study"
        wanted = " and ".join(f"tags.{name} = '{value}'" for name, value in tags.items())
        for run in self._client.search_runs([experiment_id], wanted, max_results=1):
            return run.info.run_id, mine in run.data.tags
        tags = {**tags, mine: study.study_name}
        if self._parent is not None:
            tags["mlflow.parentRunId"] = self._parent.info.run_id
        start = _milliseconds(trial.datetime_start)
        return self._client.create_run(experiment_id, start, tags, f"{trial.number}").info.run_id, True

    def _experiment_of(self, study: optuna.Study) -> str:
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_ID, MLFLOW_EXPERIMENT_NAME

        name = self._experiment
        if name is None and self._parent is not None:
            return str(self._parent.info.experiment_id)
        if name is None and MLFLOW_EXPERIMENT_ID.get():
            return str(MLFLOW_EXPERIMENT_ID.get())
        name = name or MLFLOW_EXPERIMENT_NAME.get() or study.study_name
        if name not in self._experiment_ids:
            known = self._client.get_experiment_by_name(name)
            self._experiment_ids[name] = self._client.create_experiment(name) if known is None else known.experiment_id
        return self._experiment_ids[name]


class WandbCallback(TrackingCallback):
    """Writes each trial into a run of Weights & Biases, over the axis ``perfguard/trial``.

    The run is the active one, if there is one when a trial ends: ``with wandb.init(...): study.optimize(...)``. Else the callback
    makes a run for the study, which does not become the active run. It also gets the hyperparameters and the objective's values.
    Optuna's own ``WeightsAndBiasesCallback`` must stand before this one in ``callbacks``.

    Args:
        init: arguments of ``wandb.init`` for the callback's own run, for instance ``project`` and ``mode="offline"``.

    Raises:
        ConfigurationError: if wandb is not installed.
    """

    name = "W&B"

    def __init__(self, **init: Any) -> None:
        super().__init__()
        try:
            import wandb
        except ImportError as error:
            raise ConfigurationError(_missing(error, "wandb", "Weights & Biases", "wandb")) from error
        self._wandb = wandb
        self._init = init
        self._own: dict[str, Any] = {}
        self._with_axis: set[str] = set()

    def _write(self, study: optuna.Study, trial: FrozenTrial) -> None:
        run, fields = self._wandb.run, tracked_fields(trial)
        if run is None:
            run, fields = self._own_run(study), fields | trial.params | _values_of(trial)
        if run.id not in self._with_axis:
            run.define_metric(f"{FIELD}*", step_metric=f"{FIELD}trial")
            self._with_axis.add(run.id)
        # Optuna's own callback, before this one, has begun a row at the trial's number. W&B refuses a step that lies behind.
        step = trial.number if run.step <= trial.number else None
        run.log({f"{FIELD}trial": trial.number, **fields}, step=step, commit=True)

    def _own_run(self, study: optuna.Study) -> Any:
        if study.study_name not in self._own:
            settings = {"name": study.study_name, "reinit": "create_new"} | self._init
            self._own[study.study_name] = self._wandb.init(**settings)
        return self._own[study.study_name]

    def close(self) -> None:
        """Finish the runs that this callback has made."""
        while self._own:
            self._own.popitem()[1].finish()


class TensorBoardCallback(TrackingCallback):
    """Writes each trial as TensorBoard scalars at the step that is its number, and its verdict as text.

    Args:
        log_dir: folder of the study, for instance ``runs/resnet``. Give each study its own.

    Raises:
        ConfigurationError: if TensorBoard is not installed, or ``log_dir`` cannot be written.
    """

    name = "TensorBoard"

    def __init__(self, log_dir: str | Path) -> None:
        super().__init__()
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigurationError(_missing(error, "tensorboard", "TensorBoard", "tensorboard")) from error
        try:
            self._writer = SummaryWriter(str(log_dir))
        except OSError as error:
            raise ConfigurationError(f"TensorBoard cannot write to log_dir={str(log_dir)!r}: {error}.") from error

    def _write(self, study: optuna.Study, trial: FrozenTrial) -> None:
        fields = tracked_fields(trial) | _values_of(trial)
        for name, value in fields.items():
            if not isinstance(value, str):
                self._writer.add_scalar(name, value, trial.number)
        verdict, reason = fields[f"{FIELD}verdict"], fields.get(f"{FIELD}reason", "")
        self._writer.add_text(f"{FIELD}verdict", f"**{verdict}** {reason}", trial.number)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class DashboardCallback(TrackingCallback):
    """Writes into a study's storage what optuna-dashboard shows: a note for each trial, the guard's summary, and its pictures.

    A note has the verdict, the reason, and what was predicted, measured and allowed, in words with units. A note of your own
    stays, above PerfGuard's or below it. The summary and the pictures follow the study, and take at most 1% of its time.
    ``write(study)`` at the end brings them up to date.

    Raises:
        ConfigurationError: if optuna-dashboard or Plotly is not installed.
    """

    name = "optuna-dashboard"

    def __init__(self) -> None:
        super().__init__()
        try:
            import optuna_dashboard
        except ImportError as error:
            raise ConfigurationError(_missing(error, "optuna_dashboard", "optuna-dashboard", "dashboard")) from error
        try:
            import plotly  # noqa: F401
        except ImportError as error:
            raise ConfigurationError(_missing(error, "plotly", "The pictures in the dashboard", "dashboard")) from error
        self._dashboard = optuna_dashboard
        self._draw_after = 0.0

    def _write(self, study: optuna.Study, trial: FrozenTrial) -> None:
        _add_note(study, trial._trial_id, _note_of(trial), study._storage.get_study_system_attrs(study._study_id))
        if time.monotonic() >= self._draw_after:
            self._draw(study)

    def _write_all(self, study: optuna.Study, trials: Sequence[FrozenTrial]) -> None:
        attributes = study._storage.get_study_system_attrs(study._study_id)
        for trial in trials:
            _add_note(study, trial._trial_id, _note_of(trial), attributes)
        self._draw(study)

    def _draw(self, study: optuna.Study) -> None:
        from perfguard_optuna.visualization import plot_budget, plot_savings

        began = time.monotonic()
        try:
            rows = "\n".join(f"| {label} | {_cell(value)} |" for label, value in summarize(study).rows())
            attributes = study._storage.get_study_system_attrs(study._study_id)
            _add_note(study, None, f"{_NOTE}summary**\n\n| | |\n| --- | --- |\n{rows}\n", attributes)
            limited = {quantity for trial in study.get_trials(deepcopy=False) for quantity in record_of(trial).limits}
            for quantity in QUANTITIES:
                if quantity in limited:
                    figure = plot_budget(study, quantity=quantity)
                    self._dashboard.save_plotly_graph_object(study, figure, graph_object_id=f"perfguard-{quantity}")
            self._dashboard.save_plotly_graph_object(study, plot_savings(study), graph_object_id="perfguard-savings")
        finally:  # a picture that fails takes its time, too
            ended = time.monotonic()
            self._draw_after = ended + (ended - began) / _MOST_DRAWING


def _add_note(study: optuna.Study, trial_id: int | None, text: str, attributes: Mapping[str, Any]) -> None:
    """Put PerfGuard's part into a note, in the place of an earlier one, else below the user's. None: the study's own note.

    ``optuna_dashboard.save_note`` takes no finished trial, and reads all notes of a study three times. This writes what it would
    write (optuna-dashboard 0.21).
    """
    from optuna_dashboard import _note

    before = _note.get_note_from_system_attrs(attributes, trial_id)
    above, _, earlier = before["body"].partition(_NOTE)
    below = earlier.partition(_NOTE_END)[2]
    after = "\n\n".join(filter(None, [above.rstrip(), f"{text}\n{_NOTE_END}", below.strip()]))
    if after == before["body"]:
        return
    parts = _note.split_body(after, trial_id)
    longer = [key for key in attributes if key.startswith(_note.note_str_key_prefix(trial_id)) and key not in parts]
    for key, part in {**parts, **dict.fromkeys(longer, ""), _note.note_ver_key(trial_id): before["version"] + 1}.items():
        study._storage.set_study_system_attr(study._study_id, key, part)


def _note_of(trial: FrozenTrial) -> str:
    """What the dashboard shows beside a trial, as Markdown."""
    record, attributes = record_of(trial), trial.user_attrs
    verdict = "pruned before launch" if record.verdict == "prune" else record.verdict_in_words
    lines = [f"{_NOTE}{verdict}**" + (f": {record.reason}" if record.reason else ""), ""]
    known = [quantity for quantity in QUANTITIES if quantity in record.predicted or quantity in record.measured]
    rows = [_note_row(trial, record, quantity) for quantity in known]
    if rows:
        head = ("", "predicted", "90% interval", "measured", "budget", "constraint")
        lines += [_row(head), _row(["---"] * len(head)), *rows, ""]
    chance, learnt = attributes.get(f"{PREFIX}:p_violation"), attributes.get(f"{PREFIX}:learnt_from")
    facts = {
        "Chance to exceed a budget": None if chance is None else f"{chance:.0%}",
        "Learnt from": None if learnt is None else f"{learnt} run{'s' if learnt != 1 else ''}",
        "Saved time (predicted)": time_in_words(record.saved_s) if record.verdict == "prune" else None,
        "The run ended as": record.status,
        "Stopped": attributes.get(f"{PREFIX}:stopped"),
        "Not measured": record.not_measured or None,
    }
    return "\n".join([*lines, *(f"- {label}: {value}" for label, value in facts.items() if value is not None), ""])


def _note_row(trial: FrozenTrial, record: TrialRecord, quantity: Any) -> str:
    def text(value: float | None) -> str:
        return "–" if value is None else format_quantity(quantity, value)

    interval = record.intervals.get(quantity)
    constraint = trial.constraints.get(f"{PREFIX}:{quantity}")
    return _row(
        [
            NOUNS[quantity],
            text(record.predicted.get(quantity)),
            "–" if interval is None else f"{text(interval[0])} to {text(interval[1])}",
            text(record.measured.get(quantity)),
            text(record.limits.get(quantity)),
            "–" if constraint is None else "holds" if constraint <= 0 else "broken",
        ]
    )


def _row(cells: Any) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _values_of(trial: FrozenTrial) -> dict[str, float]:
    """The objective's values, named as Optuna's own callbacks name them; empty for a trial that did not complete."""
    values = trial.values if trial.state == TrialState.COMPLETE else ()
    return {"value" if len(values) == 1 else f"value_{index}": value for index, value in enumerate(values)}


def _milliseconds(moment: datetime | None) -> int:
    return int(1000 * (moment or datetime.now()).timestamp())


def _missing(error: ImportError, package: str, what: str, extra: str) -> str:
    return why_not_imported(error, package, f"{what} needs one more package: pip install 'perfguard[{extra}]'.")


__all__ = [
    "DashboardCallback",
    "MLflowCallback",
    "TensorBoardCallback",
    "TrackingCallback",
    "WandbCallback",
    "tracked_fields",
]
