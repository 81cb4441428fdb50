"""The progress line of a guarded study: launched, pruned and over-budget trials, and the time saved."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import optuna
from optuna.trial import FrozenTrial
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from perfguard.exceptions import TrackingWarning, warn_user
from perfguard.quantities import format_seconds
from perfguard_optuna._attributes import proposals_rejected_for, record_of


def can_show(console: Console) -> bool:
    """Whether a line that changes can be shown: on a terminal, and not in CI, where each change would be a line of the log."""
    return console.is_terminal and not console.is_jupyter and not os.environ.get("CI")


class ProgressLine:
    """A study callback that counts finished trials in one line. Its failures stop no study."""

    def __init__(self, progress: Progress, n_trials: int | None, *, counts_pruned: bool) -> None:
        self._progress = progress
        self._counts_pruned = counts_pruned
        self._lock = threading.Lock()
        self._num_done = self._num_launched = self._num_pruned = self._num_over = 0
        self._saved_s = 0.0
        self._task = progress.add_task(self._text, total=n_trials)

    def __call__(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Count a trial that has just ended, and what was rejected in the search for it."""
        with _study_goes_on():
            self._count(study, trial)

    def _count(self, study: optuna.Study, trial: FrozenTrial) -> None:
        records = [record_of(ended) for ended in (*proposals_rejected_for(study, trial), trial)]
        with self._lock:
            for record in records:
                if record.verdict == "prune":
                    self._num_pruned += 1
                    self._saved_s += record.saved_s or 0.0
                else:
                    self._num_launched += 1
                    self._num_over += record.violates
            self._num_done += self._counts_pruned or records[-1].verdict != "prune"
            self._progress.update(self._task, completed=self._num_done, description=self._text)

    @property
    def _text(self) -> str:
        saved = f" · {format_seconds(self._saved_s)} saved" if self._saved_s else ""
        return f"{self._num_launched} launched · {self._num_pruned} pruned · {self._num_over} over budget{saved}"


@contextmanager
def progress_line(console: Console, n_trials: int | None, *, counts_pruned: bool) -> Iterator[ProgressLine]:
    """Show a progress line while the block runs. What is logged or printed meanwhile appears above it.

    Args:
        console: a terminal.
        n_trials: the number of trials to launch. None: unknown.
        counts_pruned: whether ``n_trials`` counts pruned trials, too.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=console, refresh_per_second=2, redirect_stdout=sys.stdout.isatty())
    line = ProgressLine(progress, n_trials, counts_pruned=counts_pruned)
    with _study_goes_on():
        progress.start()
    try:
        with _logged_above():
            yield line
    finally:
        with _study_goes_on():
            progress.stop()


@contextmanager
def _study_goes_on() -> Iterator[None]:
    """Warn of an error of the progress line, for instance where the terminal is gone, and go on."""
    try:
        yield
    except Exception as error:
        warn_user(
            "The progress line failed, so its counts may be too small. The study goes on, and perfguard_optuna.summarize(study) "
            f"has the right counts. The cause is a {type(error).__name__}: {error}",
            TrackingWarning,
        )


@contextmanager
def _logged_above() -> Iterator[None]:
    """Let the log of Optuna go through Rich's standard error: its handler holds the one that there was when it was made."""
    handlers = [
        handler
        for handler in logging.getLogger("optuna").handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.__stderr__
    ]
    for handler in handlers:
        handler.setStream(sys.stderr)
    try:
        yield
    finally:
        for handler in handlers:
            handler.setStream(sys.__stderr__)
