"""Fine-tuning beside a study, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any


class FineTuneProcess:
    """`perfguard learn --once` in a process beside this one, now and then: of low priority, on one core, without the GPU.

    Args:
        url: of the log.
        predictor: its name.
        every: runs between two updates.
    """

    def __init__(self, url: str, predictor: str, *, every: int = 25) -> None:
        self._url = url
        self._predictor = predictor
        self._every = every
        self._num_new = 0
        self._child: subprocess.Popen[bytes] | None = None

    def wake(self) -> None:
        """Start an update after a new run, if there are enough runs and no update is running. It never waits."""
        self._num_new += 1
        if self._num_new < self._every or (self._child is not None and self._child.poll() is None):
            return
        self._num_new = 0
        quiet = subprocess.DEVNULL
        command = [sys.executable, "-m", "perfguard.cli", "learn", "--once", "--predictor", self._predictor]
        environment = os.environ | {"PERFGUARD_LOG": self._url, "CUDA_VISIBLE_DEVICES": ""}
        self._child = subprocess.Popen(command, env=environment, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_child": None}
