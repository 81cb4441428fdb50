"""Writes trials where people look: MLflow, Weights & Biases or TensorBoard.

The names are ``perfguard/verdict`` (launched, repaired, pruned or unguarded), ``perfguard/reason``, ``perfguard/status``, the
numbers of :mod:`perfguard.record` such as ``perfguard/memory_predicted_bytes`` or ``perfguard/time_measured_s``, and
``perfguard/over_budget`` (of a measured trial: 1 if it broke a budget, else 0). What is unknown is left out.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from perfguard.exceptions import ConfigurationError, TrackingWarning, warn_user
from perfguard.record import TrialRecord, column, columns_of

TrackerName = Literal["mlflow", "wandb", "tensorboard"]
_Writer = Callable[[str, Mapping[str, float | str]], None]


def fields_of(record: TrialRecord) -> dict[str, float | str]:
    """Return what is known of a trial, by the names above. What is unknown, empty or not finite is left out."""
    fields: dict[str, Any] = {} if record.verdict is None else columns_of(record.verdict)
    fields |= {column(quantity, "measured"): value for quantity, value in record.measured.items()}
    fields |= {"verdict": record.in_words, "reason": record.reason, "status": record.status, "not_measured": record.not_measured}
    fields.pop("account", None)  # `perfguard explain` shows it, from the study or the log
    fields["over_budget"] = float(record.violates) if record.is_measured else None
    return {
        f"perfguard/{name}": value if isinstance(value, str) else float(value)
        for name, value in fields.items()
        if value not in (None, "") and (isinstance(value, str) or math.isfinite(value))
    }


class Tracker:
    """Writes trials into one tracker. A tracker that fails never stops a study: one :class:`TrackingWarning` says why.

    A trial that could not be written is written with a later one. After a failure the tracker is left alone for ten times as long
    as the failure took. So the wait for a server that is away takes at most a tenth of the study's time.

    Example:
        >>> Tracker("tensorboard", log_dir="runs/resnet")                                           # doctest: +SKIP

    Args:
        to: "mlflow", "wandb" or "tensorboard".
        settings: of ``mlflow.set_tracking_uri`` (``tracking_uri=``), of ``wandb.init`` (``project=``, ``mode=``, ...), or of
            ``torch.utils.tensorboard.SummaryWriter`` (``log_dir=``).

    Raises:
        ConfigurationError: for another name, or if the package is not installed.
    """

    def __init__(self, to: TrackerName, **settings: object) -> None:
        if to not in get_args(TrackerName):
            raise ConfigurationError(f"The tracker must be one of {', '.join(get_args(TrackerName))}, but got {to!r}.")
        self.to = to
        writers: Any = {"mlflow": _mlflow_writer, "wandb": _wandb_writer, "tensorboard": _tensorboard_writer}
        try:
            self._write: _Writer = writers[to](**settings)
        except ImportError as error:
            raise ConfigurationError(f"Tracker({to!r}) needs its package: pip install 'perfguard[{to}]' ({error}).") from error
        self._lock = threading.Lock()
        self._waiting: list[tuple[str, Mapping[str, float | str]]] = []
        self._not_before_s = 0.0
        self._has_warned = False

    def write(self, name: str, record: TrialRecord, more: Mapping[str, float | str] | None = None) -> None:
        """Write one trial that has ended, for instance "trial 7", and ``more`` values beside it."""
        with self._lock:
            self._waiting.append((name, fields_of(record) | dict(more or {})))
            begun_s = time.monotonic()
            if begun_s < self._not_before_s:
                return
            try:
                while self._waiting:
                    self._write(*self._waiting[0])
                    self._waiting.pop(0)
            except Exception as error:
                self._not_before_s = time.monotonic() + 10 * (time.monotonic() - begun_s)
                if not self._has_warned:
                    self._has_warned = True
                    words = f"PerfGuard could not write into {self.to} (shown once): {type(error).__name__}: {error}"
                    warn_user(f"{words}. Trials are kept, and written when it answers again.", TrackingWarning)


def _mlflow_writer(tracking_uri: str | None = None) -> _Writer:
    """One run for each trial, below the run that is active. Numbers are metrics, sentences are tags."""
    import mlflow

    if tracking_uri is not None:
        mlflow.set_tracking_uri(tracking_uri)

    def write(name: str, fields: Mapping[str, float | str]) -> None:
        with mlflow.start_run(run_name=name, nested=True):
            mlflow.log_metrics({key: value for key, value in fields.items() if not isinstance(value, str)})
            mlflow.set_tags({key: value[:5000] for key, value in fields.items() if isinstance(value, str)})  # MLflow's limit

    return write


def _wandb_writer(**settings: Any) -> _Writer:
    """One row for each trial in the run that is active, or in one that is begun."""
    import wandb

    def write(name: str, fields: Mapping[str, float | str]) -> None:
        run = wandb.run or wandb.init(**settings)
        run.log({"perfguard/trial": name, **fields})

    return write


def _tensorboard_writer(log_dir: str | None = None) -> _Writer:
    """Numbers are scalars over the order of the trials, sentences are texts."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(log_dir)
    num_written = 0

    def write(name: str, fields: Mapping[str, float | str]) -> None:
        nonlocal num_written
        for key, value in fields.items():
            add = writer.add_text if isinstance(value, str) else writer.add_scalar
            add(key, f"{name}: {value}" if isinstance(value, str) else value, num_written)
        writer.flush()
        num_written += 1

    return write
