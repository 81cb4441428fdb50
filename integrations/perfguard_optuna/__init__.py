"""PerfGuard for Optuna: trials that cannot run are pruned before they start."""

from perfguard.exceptions import why_not_imported as _why_not_imported

try:
    import optuna as _optuna  # noqa: F401
except ImportError as error:
    raise ImportError(
        _why_not_imported(error, "optuna", "perfguard_optuna needs Optuna: pip install 'perfguard[optuna]'.")
    ) from error

from perfguard.record import TrialRecord
from perfguard.summary import Summary
from perfguard_optuna.attributes import record_of, records_of
from perfguard_optuna.guard import GuardedRun, OptunaGuard
from perfguard_optuna.pruner import PerfGuardPruner
from perfguard_optuna.sampler import PerfGuardSampler
from perfguard_optuna.show import TrackingCallback, plot_budget, plot_savings, summarize
from perfguard_optuna.study import GuardedStudy, create_study, guarded, load_study, repair_of

__all__ = [
    "GuardedRun",
    "GuardedStudy",
    "OptunaGuard",
    "PerfGuardPruner",
    "PerfGuardSampler",
    "Summary",
    "TrackingCallback",
    "TrialRecord",
    "create_study",
    "guarded",
    "load_study",
    "plot_budget",
    "plot_savings",
    "record_of",
    "records_of",
    "repair_of",
    "summarize",
]
