"""LaunchedBar: one progress bar over the launched trials of a study, however many proposals are replaced."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import optuna
from optuna.progress_bar import _ProgressBar
from optuna.trial import FrozenTrial


class LaunchedBar:
    """A study callback that moves Optuna's progress bar when a trial was launched.

    A GuardedStudy calls ``optimize`` of its parent again for the trials that were pruned before launch. Each call would draw
    a bar of its own, and count the pruned trials. The bar's class is private (Optuna 5.0).

    Args:
        num_launched: returns how many trials were launched until now.
        n_trials: the trials to launch.
        timeout: seconds of the study. None: it has no limit.
    """

    def __init__(self, num_launched: Callable[[], int], n_trials: int, timeout: float | None) -> None:
        self._num_launched = num_launched
        self._num_shown = 0
        self._began_s = time.monotonic()
        self._lock = threading.Lock()
        self._bar = _ProgressBar(True, n_trials, timeout)

    def __call__(self, study: optuna.Study, trial: FrozenTrial) -> None:
        with self._lock:
            while self._num_shown < self._num_launched():
                self._num_shown += 1
                self._bar.update(time.monotonic() - self._began_s, study)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()
