"""PerfGuard for Optuna: trials that cannot run are pruned before they start."""

from perfguard.exceptions import why_not_imported as _why_not_imported

try:
    import optuna as _optuna  # noqa: F401
except ImportError as error:
    raise ImportError(
        _why_not_imported(error, "optuna", "perfguard_optuna needs Optuna: pip install 'perfguard[optuna]'.")
    ) from error

from perfguard.summary import TrialRecord
from perfguard_optuna._attributes import record_of
from perfguard_optuna._guard import GuardedRun, OptunaGuard
from perfguard_optuna._pruner import PerfGuardPruner
from perfguard_optuna._sampler import PerfGuardSampler
from perfguard_optuna._study import GuardedStudy, create_study, load_study, repair_of
from perfguard_optuna._summary import StudySummary, TrialPrinter, skipped_table, summarize
from perfguard_optuna.tracking import DashboardCallback, MLflowCallback, TensorBoardCallback, WandbCallback

__all__ = [
    "DashboardCallback",
    "GuardedRun",
    "GuardedStudy",
    "MLflowCallback",
    "OptunaGuard",
    "PerfGuardPruner",
    "PerfGuardSampler",
    "StudySummary",
    "TensorBoardCallback",
    "TrialPrinter",
    "TrialRecord",
    "WandbCallback",
    "create_study",
    "load_study",
    "record_of",
    "repair_of",
    "skipped_table",
    "summarize",
]
