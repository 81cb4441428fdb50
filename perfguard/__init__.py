"""PerfGuard knows, before a trial starts, whether it will run out of memory or time."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfguard.budget import Budget, Limit
    from perfguard.devices import Device, resolve_device
    from perfguard.graph import OpGraph, opaque, trace
    from perfguard.guard import Guard
    from perfguard.log import MeasurementStore
    from perfguard.measure import Measurement, Run
    from perfguard.predictor import Estimate, Observation, Prediction, Predictor, load_predictor, predict
    from perfguard.verdict import Decision, Verdict
    from perfguard.workload import TensorSpec, Workload

__version__ = "0.2.0"

_HOMES = {
    "Budget": "budget",
    "Decision": "verdict",
    "Device": "devices",
    "Estimate": "predictor",
    "Guard": "guard",
    "Limit": "budget",
    "Measurement": "measure",
    "MeasurementStore": "log",
    "Observation": "predictor",
    "OpGraph": "graph",
    "Prediction": "predictor",
    "Predictor": "predictor",
    "Run": "measure",
    "TensorSpec": "workload",
    "Verdict": "verdict",
    "Workload": "workload",
    "load_predictor": "predictor",
    "opaque": "graph",
    "predict": "predictor",
    "resolve_device": "devices",
    "trace": "graph",
}

__all__ = [
    "Budget",
    "Decision",
    "Device",
    "Estimate",
    "Guard",
    "Limit",
    "Measurement",
    "MeasurementStore",
    "Observation",
    "OpGraph",
    "Prediction",
    "Predictor",
    "Run",
    "TensorSpec",
    "Verdict",
    "Workload",
    "load_predictor",
    "opaque",
    "predict",
    "resolve_device",
    "trace",
]


def __getattr__(name: str) -> Any:  # PEP 562: `import perfguard` stays quick, torch comes with the first use
    if name in _HOMES:
        return getattr(importlib.import_module(f"perfguard.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
