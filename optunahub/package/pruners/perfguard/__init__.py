"""PerfGuardPruner on OptunaHub: all of it is in the distribution perfguard, which this module imports."""

try:
    from perfguard_optuna import create_study
    from perfguard_optuna import PerfGuardPruner
    from perfguard_optuna import summarize
except ModuleNotFoundError as error:
    if error.name != "perfguard_optuna":
        raise
    raise ModuleNotFoundError(
        "pruners/perfguard needs PerfGuard: pip install 'perfguard[optuna]>=0.2'.", name=error.name
    ) from error

__all__ = ["PerfGuardPruner", "create_study", "summarize"]
