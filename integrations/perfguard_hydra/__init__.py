"""PerfGuard for Hydra: a sweeper over Optuna that launches no job which cannot run.

Hydra finds it as ``hydra/sweeper: perfguard``, see :mod:`hydra_plugins.perfguard_sweeper`.
"""

from perfguard.exceptions import why_not_imported as _why_not_imported

try:
    import hydra as _hydra  # noqa: F401
except ImportError as error:
    raise ImportError(
        _why_not_imported(error, "hydra", "perfguard_hydra needs Hydra: pip install 'perfguard[hydra]'.")
    ) from error

from perfguard_hydra.space import SearchSpace
from perfguard_hydra.sweep import GuardedSweep, SweepSettings

__all__ = ["GuardedSweep", "SearchSpace", "SweepSettings"]
