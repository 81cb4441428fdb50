"""The measurement log: every verdict, and what the launched trials really cost."""

from perfguard.store._schema import LoggedDecision
from perfguard.store._store import MeasurementStore

__all__ = ["LoggedDecision", "MeasurementStore"]
