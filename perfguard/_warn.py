"""One way to warn: the warning points at the user's line, not at ours."""

from __future__ import annotations

import sys
import threading
import warnings
from types import FrameType

_NOT_THE_USERS = frozenset(
    {
        "accelerate", "concurrent", "contextlib", "functools", "lightning", "lightning_fabric", "optuna", "perfguard",
        "perfguard_models", "perfguard_optuna", "perfguard_ray", "perfguard_research",
        "pytorch_lightning", "ray", "threading", "torch", "transformers",
    }
)  # fmt: skip
"""Packages through which a user's call comes to us. `warnings.warn(skip_file_prefixes=...)` would do this from Python 3.12 on."""


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn at the innermost line that is neither ours nor of a library through which the user came to us.

    A thread of a tuner has no such line. Then it is the line of the main thread, which waits in a call of the user's. Without
    either it is our own.

    Args:
        message: what happened, what it means for the user, and what to do.
        category: the class of the warning.
    """
    here = sys._getframe(1)
    found = _of_the_user(here) or _of_the_user(sys._current_frames().get(threading.main_thread().ident or 0)) or here
    warnings.warn_explicit(
        message,
        category,
        found.f_code.co_filename,
        found.f_lineno,
        module=found.f_globals.get("__name__"),
        registry=found.f_globals.setdefault("__warningregistry__", {}),
    )


def _of_the_user(frame: FrameType | None) -> FrameType | None:
    while frame is not None and _package_of(frame) in _NOT_THE_USERS:
        frame = frame.f_back
    return frame


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


__all__ = ["warn_user"]
