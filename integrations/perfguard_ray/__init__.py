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

from perfguard_ray._callback import PerfGuardCallback
from perfguard_ray._generator import PerfGuardVariantGenerator
from perfguard_ray._ledger import repair_of
from perfguard_ray._measure import measure, measured
from perfguard_ray._population import PerfGuardPopulationBasedTraining
from perfguard_ray._resources import resources
from perfguard_ray._searcher import PerfGuardSearcher
from perfguard_ray._service import SharedPredictor
from perfguard_ray._summary import RunSummary, summarize

__all__ = [
    "PerfGuardCallback",
    "PerfGuardPopulationBasedTraining",
    "PerfGuardSearcher",
    "PerfGuardVariantGenerator",
    "RunSummary",
    "SharedPredictor",
    "measure",
    "measured",
    "repair_of",
    "resources",
    "summarize",
]
