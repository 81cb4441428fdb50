"""The guard of a command. It learns from the same log as a study's, so a command prints the number that a trial would get."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from perfguard.exceptions import ConfigurationError, LogError, leave_unsaid
from perfguard.log_location import default_location
from perfguard.predictor import DEFAULT_PREDICTOR

if TYPE_CHECKING:
    from perfguard.budget import Budget
    from perfguard.devices import Device
    from perfguard.graph import OpGraph
    from perfguard.guard import Guard
    from perfguard.predictor import Prediction, Predictor

NO_LOG = "none"
"""Value of ``--log`` for the shipped weights alone."""


def add_log_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--log``."""
    parser.add_argument(
        "--log",
        metavar="FILE|URL|none",
        help="measurement log from which predictions learn, as a study's guard does (default: PERFGUARD_LOG, else your own log); "
        "none: the shipped weights alone",
    )


def guard_within(budget: Budget, device: Device) -> Guard:
    """Return a guard of ``budget``, without a log."""
    from perfguard.guard import Guard

    guard = Guard(device, log=False)
    guard.budget = budget
    return guard


class Forecaster(Protocol):
    """What predicts the number that a trial would get: a guard, or the shipped weights within a guard's bounds."""

    @property
    def num_learnt(self) -> int:
        """Number of measured runs that the predictions have learnt from."""

    def predict(self, graph: OpGraph, *, steps: int | None = None) -> Prediction:
        """The prediction for one step; ``steps`` is the number of steps of the trial, if known."""


@dataclass(frozen=True, slots=True)
class WithoutLog:
    """Predictions of a guard without a log. It imports no database."""

    device: Device
    predictor: Predictor
    num_learnt: int = 0

    def predict(self, graph: OpGraph, *, steps: int | None = None) -> Prediction:
        """See :class:`Forecaster`."""
        from perfguard.physics import within_bounds  # imports numpy

        return within_bounds(self.predictor.predict(graph, self.device, steps=steps), graph, self.device, widening={})


def forecaster_for(device: Device, *, log: str | None, predictor: Predictor) -> Forecaster:
    """Return what predicts for ``device``. The arguments are those of :func:`guard_for`."""
    if _location(log) is None:
        return WithoutLog(device, predictor)
    return guard_for(device, log=log, predictor=predictor)


def guard_for(device: Device, *, log: str | None, predictor: str | Predictor = DEFAULT_PREDICTOR) -> Guard:
    """Return the guard of a command for ``device``.

    Args:
        device: to predict for.
        log: the value of ``--log``. None: it was not given. A log that nobody named and that cannot be used is left out.
        predictor: its name, or the object itself.

    Raises:
        ConfigurationError: if the log that was named is not there.
        LogError: if it cannot be used.
    """
    from perfguard.guard import Guard
    from perfguard.log import MeasurementStore

    location = _location(log)
    if location is None:
        return Guard(device, log=False, predictor=predictor)
    try:
        store = MeasurementStore(location)
        leave_unsaid(str(store.url))  # a guard's line about its log is for studies; see `notes_of`
        return Guard(device, log=store, predictor=predictor)
    except LogError:
        if log is not None:
            raise
        return Guard(device, log=False, predictor=predictor)


def _location(log: str | None) -> str | None:
    """Return the log to learn from. None: there is none."""
    if log == NO_LOG:
        return None

    location = log or default_location()
    if "://" in location or Path(location).expanduser().exists():
        return location
    if log is not None:
        raise ConfigurationError(f"There is no measurement log at {log}. Give another one, or --log {NO_LOG}.")
    return None


def notes_of(forecaster: Forecaster, device: Device) -> list[str]:
    """Return a sentence on the log that the numbers depend on. Empty: they are those of the shipped weights."""
    number = forecaster.num_learnt
    runs = "1 run" if number == 1 else f"{number} runs"
    return [f"Learnt from {runs} of {device.name} in your log. --log {NO_LOG} leaves them out."] if number else []
