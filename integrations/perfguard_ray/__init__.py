"""PerfGuard for Ray Tune: trials that cannot run never become actors."""

from perfguard.exceptions import why_not_imported as _why_not_imported

try:
    import ray as _ray
    import ray.tune as _tune  # noqa: F401
except ImportError as error:
    raise ImportError(_why_not_imported(error, "ray", "perfguard_ray needs Ray Tune: pip install 'perfguard[ray]'.")) from error

if tuple(int(part) for part in _ray.__version__.split(".")[:2]) < (2, 43):  # tune.report came to what it is now
    raise ImportError(
        f"perfguard_ray needs Ray 2.43 or newer, but {_ray.__version__} is installed: pip install --upgrade 'perfguard[ray]'."
    )

from perfguard_ray.callback import PerfGuardCallback, measure, measured, summarize
from perfguard_ray.capture import guarded
from perfguard_ray.ledger import repair_of
from perfguard_ray.resources import resources
from perfguard_ray.search import PerfGuardSearcher, PerfGuardVariantGenerator

__all__ = [
    "PerfGuardCallback",
    "PerfGuardSearcher",
    "PerfGuardVariantGenerator",
    "guarded",
    "measure",
    "measured",
    "repair_of",
    "resources",
    "summarize",
]
