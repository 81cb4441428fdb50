"""Everything PerfGuard raises or warns about.

PerfGuardError
├── ConfigurationError (ValueError)    an argument that cannot be right: budget, risk, name of a GPU
│   └── UnknownDeviceError             a GPU that is not in the catalog
├── WorkloadError                      the workload cannot be built or traced
│   ├── BuildError                     the user's ``build`` raised or returned the wrong thing
│   ├── TraceError                     the training step cannot be traced on the meta device
│   ├── TooLargeError                  a tensor of it does not fit into any memory
│   └── OnnxError                      an ONNX file that is damaged, refused, or leaves sizes open
├── PredictorError                     no such predictor, or weights that are refused
├── TableError                         a table of measured runs, or a row of it, that cannot be used
├── MeasuringError                     the device cannot be measured on: missing, lost, or no process can be started
├── UnguardedTrialError (RuntimeError) a trial could not be judged, and the guard is strict
└── LogError                           the measurement log
    ├── LogCorruptError                not a PerfGuard log, or a damaged one
    └── LogVersionError                written by another version of PerfGuard

PerfGuardWarning (UserWarning)
├── UnguardedTrialWarning              a trial was launched without a verdict, or without a check of one of its budgets
├── UntrainedDeviceWarning             the predictor has never seen this device
├── BudgetWarning                      a trial was launched although it is expected to break a budget
├── NothingFeasibleWarning             nothing that was proposed fits the budgets
├── MeasurementWarning                 a trial ran but could not be measured or attributed
├── DriftWarning                       runs cost other than they did: a driver, a framework, a card has changed
├── ServiceWarning                     the predictor service of a cluster is away; predictions are made locally
├── LogWarning                         a row could not be written yet; it is kept
└── TrackingWarning                    a trial could not be written to an experiment tracker
"""

from __future__ import annotations

_LONGEST_PROBLEM = 600


class PerfGuardError(Exception):
    """Base of all errors of PerfGuard."""


class ConfigurationError(PerfGuardError, ValueError):
    """An argument that cannot be right. The message has the expected values and a remedy."""


class UnknownDeviceError(ConfigurationError):
    """A device name that is neither in the catalog nor "auto" nor "cpu"."""


class WorkloadError(PerfGuardError):
    """A workload that cannot be built or traced."""


class BuildError(WorkloadError):
    """The user's ``build`` function raised, or returned something that is not a Workload."""


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
        mend: what to do about it.
    """

    def __init__(self, path: object, problem: str, mend: str) -> None:
        # Names in a file may hold anything: a refusal is one line of bounded length, and moves no cursor.
        problem = "".join(letter if letter.isprintable() else "?" for letter in problem[:_LONGEST_PROBLEM])
        super().__init__(path, problem, mend)

    def __str__(self) -> str:
        path, problem, mend = self.args
        return f"{path} {problem}. {mend}"


class PredictorError(PerfGuardError):
    """The predictor does not exist, or its weights are refused."""


class TableError(PerfGuardError):
    """A table of measured runs, or a row of it, that cannot be used."""


class MeasuringError(PerfGuardError):
    """The device cannot be measured on: it is missing or lost, or no process can be started on it."""


class UnguardedTrialError(PerfGuardError, RuntimeError):
    """A trial could not be judged, so a strict guard (``strict=True``) does not launch it; the message says why."""


class LogError(PerfGuardError):
    """The measurement log cannot be used."""


class LogCorruptError(LogError):
    """The file is not a measurement log, or it is damaged."""


class LogVersionError(LogError):
    """The log was written by another version of PerfGuard; it is left untouched."""


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


class ServiceWarning(PerfGuardWarning):
    """The predictor service of a cluster is away, or of another version; predictions are made locally."""


class LogWarning(PerfGuardWarning):
    """A row could not be written now; it is kept and written later."""


class TrackingWarning(PerfGuardWarning):
    """A trial could not be written to an experiment tracker, or not counted in the progress line. The study goes on."""
