"""The measurement log: every verdict, and what the launched trials really cost."""

from perfguard.store._exchange import export_log, import_log
from perfguard.store._log import default_location
from perfguard.store._schema import LoggedDecision, LoggedWeights, WeightsState
from perfguard.store._selection import Selection
from perfguard.store._store import MeasurementStore

__all__ = [
    "LoggedDecision",
    "LoggedWeights",
    "MeasurementStore",
    "Selection",
    "WeightsState",
    "default_location",
    "export_log",
    "import_log",
]
