"""Log messages without a caller's request: one line to standard error, through the logger "perfguard".

Like Optuna's logger it has its own handler, because Python shows no INFO by default. A handler or a level that the user gave
the logger stays, and the environment variable PERFGUARD_QUIET, if it is not empty, keeps PerfGuard silent.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import TextIO

_logger = logging.getLogger("perfguard")
_lock = threading.Lock()
_logged_topics: set[str] = set()


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to what is standard error now: notebooks and tests replace it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        raise AttributeError("the stream is always standard error")


def log_once(topic: str, message: str) -> None:
    """Log ``message`` as INFO, unless this process has logged a message on ``topic`` before."""
    if os.environ.get("PERFGUARD_QUIET"):
        return
    with _lock:
        if topic in _logged_topics:
            return
        _logged_topics.add(topic)
        if _logger.level == logging.NOTSET:
            _logger.setLevel(logging.INFO)
        if not _logger.handlers:
            handler = _StandardError()
            handler.setFormatter(logging.Formatter("[PerfGuard] %(message)s"))
            _logger.addHandler(handler)
            _logger.propagate = False
    _logger.info(message)
