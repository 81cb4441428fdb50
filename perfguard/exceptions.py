"""Everything PerfGuard raises, warns about or says unasked.

PerfGuardError
├── ConfigurationError (ValueError)    an argument that cannot be right: budget, risk, name of a GPU
├── WorkloadError                      the workload cannot be built or traced
│   ├── BuildError                     the user's ``build`` raised or returned the wrong thing
│   ├── CaptureError                   the dry run of an objective does not show what a trial runs
│   ├── TraceError                     the training step cannot be traced on the meta device
│   ├── TooLargeError                  a tensor of it does not fit into any memory
│   └── OnnxError                      an ONNX file that is damaged, refused, or leaves sizes open
├── PredictorError                     no such predictor, or weights that are refused
├── TableError                         a table of measured runs, or a row of it, that cannot be used
├── MeasuringError                     the device cannot be measured on: missing, lost, or no process can be started
├── UnguardedTrialError (RuntimeError) a trial could not be judged, and the guard is strict
└── LogError                           the measurement log is damaged, of another version, or cannot be reached

PerfGuardWarning (UserWarning)
├── UnguardedTrialWarning              a trial was launched without a verdict, or without a check of one of its budgets
├── UntrainedDeviceWarning             the predictor has never seen this device
├── BudgetWarning                      a trial was launched although it is expected to break a budget
├── NothingFeasibleWarning             nothing that was proposed fits the budgets
├── MeasurementWarning                 a trial ran but could not be measured or attributed
├── DriftWarning                       runs cost other than they did: a driver, a framework, a card has changed
├── LogWarning                         a row could not be written yet; it is kept
└── TrackingWarning                    a trial could not be written to an experiment tracker
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from types import FrameType


class PerfGuardError(Exception):
    """Base of all errors of PerfGuard."""


class ConfigurationError(PerfGuardError, ValueError):
    """An argument that cannot be right. The message has the expected values and a remedy."""


class WorkloadError(PerfGuardError):
    """A workload that cannot be built or traced."""


class BuildError(WorkloadError):
    """The user's ``build`` function raised, or returned something that is not a Workload."""


class CaptureError(WorkloadError):
    """The dry run of an objective does not show what a trial runs."""


class TraceError(WorkloadError):
    """The step could not be traced; the message names the module and what to do."""


class TooLargeError(WorkloadError):
    """A tensor of the workload does not fit into any memory, so that the workload cannot even be described.

    Args:
        message: PyTorch's message.
        num_bytes: what the tensor takes at least.
    """

    def __init__(self, message: str, num_bytes: int) -> None:
        super().__init__(message, num_bytes)
        self.num_bytes = num_bytes

    def __str__(self) -> str:
        return str(self.args[0])


class OnnxError(WorkloadError):
    """An ONNX file that cannot be used: which file, what of it, and what to do.

    Args:
        path: the file.
        problem: what is wrong with it, as a sentence that begins with the verb.
        hint: what to do about it.
    """

    def __init__(self, path: object, problem: str, hint: str) -> None:
        # Names in a file may hold anything: a refusal is one line of bounded length, and moves no cursor.
        problem = "".join(letter if letter.isprintable() else "?" for letter in problem[:600])
        super().__init__(path, problem, hint)

    def __str__(self) -> str:
        path, problem, hint = self.args
        return f"{path} {problem}. {hint}"


class PredictorError(PerfGuardError):
    """The predictor does not exist, or its weights are refused."""


class TableError(PerfGuardError):
    """A table of measured runs, or a row of it, that cannot be used."""


class MeasuringError(PerfGuardError):
    """The device cannot be measured on: it is missing or lost, or no process can be started on it."""


class UnguardedTrialError(PerfGuardError, RuntimeError):
    """A trial could not be judged, so a strict guard (``strict=True``) does not launch it; the message says why."""


class LogError(PerfGuardError):
    """The measurement log cannot be used: it is damaged, of another version of PerfGuard, or cannot be reached."""


class PerfGuardWarning(UserWarning):
    """Base of all warnings of PerfGuard."""


class UnguardedTrialWarning(PerfGuardWarning):
    """A trial was launched without a verdict, or without a check of one of its budgets."""


class UntrainedDeviceWarning(PerfGuardWarning):
    """The predictor was not trained on such steps on this device."""


class BudgetWarning(PerfGuardWarning):
    """A trial was launched although it is expected to break a budget, because only warnings are enabled."""


class NothingFeasibleWarning(PerfGuardWarning):
    """No proposal fits the budgets. The search ends, or goes on without guidance."""


class MeasurementWarning(PerfGuardWarning):
    """A trial ran, but a quantity could not be measured or attributed to it."""


class DriftWarning(PerfGuardWarning):
    """Runs cost other than they did, or ran under other conditions; what was learnt before counts for less."""


class LogWarning(PerfGuardWarning):
    """A row could not be written now; it is kept and written later."""


class TrackingWarning(PerfGuardWarning):
    """A trial could not be written to an experiment tracker. The study goes on."""


def frame_of_the_user(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame that is neither ours, nor of Python, nor of a library through which the user came to us."""
    between = {
        "accelerate", "lightning", "lightning_fabric", "optuna", "perfguard", "perfguard_models", "perfguard_optuna",
        "perfguard_ray", "perfguard_research", "pytorch_lightning", "ray", "torch", "transformers", *sys.stdlib_module_names,
    }  # fmt: skip
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in between:
        frame = frame.f_back
    return frame


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn at the innermost line that is neither ours nor of a library through which the user came to us.

    A thread of a tuner has no such line. Then it is the line of the main thread, which waits in a call of the user's. Without
    either it is our own. A message says what happened, what it means for the user, and what to do.
    """
    # warnings.warn(skip_file_prefixes=...) would do this from Python 3.12 on.
    here = sys._getframe(1)
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    found = frame_of_the_user(here) or frame_of_the_user(main) or here
    warnings.warn_explicit(
        message,
        category,
        found.f_code.co_filename,
        found.f_lineno,
        module=found.f_globals.get("__name__"),
        registry=found.f_globals.setdefault("__warningregistry__", {}),
    )


_said: set[str] = set()


def log_once(topic: str, message: str) -> None:
    """Say ``message`` on standard error, unless this process has said something on ``topic`` before.

    Where the logger "perfguard" has a handler, it goes there, as INFO. If the logger has a higher level, or the environment
    variable PERFGUARD_QUIET is not empty, nothing is said.
    """
    logger = logging.getLogger("perfguard")
    if topic in _said or os.environ.get("PERFGUARD_QUIET") or logger.level > logging.INFO:
        return
    _said.add(topic)
    if logger.handlers:
        logger.setLevel(logger.level or logging.INFO)  # Python shows no INFO by default
        logger.info(message)
    else:
        print(f"[PerfGuard] {message}", file=sys.stderr)


def leave_unsaid(topic: str) -> None:
    """Let :func:`log_once` say nothing on ``topic`` in this process."""
    _said.add(topic)


def why_not_imported(error: ImportError, package: str, if_missing: str) -> str:
    """Error message for a ``package`` that could not be imported: ``if_missing`` if it is not installed.

    An installed package can fail because of its own imports. Then the message names the first cause.
    """
    causes: list[BaseException] = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    if any(isinstance(cause, ModuleNotFoundError) and (cause.name or "").partition(".")[0] == package for cause in causes):
        return if_missing
    return f"{package} is installed, but importing it failed with {type(causes[-1]).__name__}: {causes[-1]}"
