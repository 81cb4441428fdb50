"""One way to warn: the warning points at the user's line, not at ours."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_NOT_THE_USERS = frozenset(
    {
        "accelerate", "concurrent", "contextlib", "functools", "lightning", "lightning_fabric", "optuna", "perfguard",
        "perfguard_models", "perfguard_optuna", "perfguard_ray", "pytorch_lightning", "ray", "threading", "torch", "transformers",
    }
)  # fmt: skip
"""Packages through which a user's call comes to us. `warnings.warn(skip_file_prefixes=...)` would do this from Python 3.12 on."""


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn at the innermost line that is neither ours nor of a library through which the user came to us.

    Where there is no such line, as in a thread of a tuner, the warning points at the outermost one.

    Args:
        message: what happened, what it means for the user, and what to do.
        category: the class of the warning.
    """
    frame = outermost = sys._getframe(1)
    while frame is not None and _package_of(frame) in _NOT_THE_USERS:
        outermost, frame = frame, frame.f_back  # type: ignore[assignment]
    found = frame or outermost
    warnings.warn_explicit(
        message,
        category,
        found.f_code.co_filename,
        found.f_lineno,
        module=found.f_globals.get("__name__"),
        registry=found.f_globals.setdefault("__warningregistry__", {}),
    )


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


__all__ = ["warn_user"]
