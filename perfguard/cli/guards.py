"""The guard of a command. It learns from the same log as a study's, so a command prints the number that a trial would get."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from perfguard.exceptions import ConfigurationError, LogError, leave_unsaid
from perfguard.predictor import DEFAULT_PREDICTOR

if TYPE_CHECKING:
    from perfguard.budget import Budget
    from perfguard.devices import Device
    from perfguard.guard import Guard
    from perfguard.predictor import Predictor

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
    from perfguard.log import default_location

    location = log or default_location()
    if "://" in location or Path(location).expanduser().exists():
        return location
    if log is not None:
        raise ConfigurationError(f"There is no measurement log at {log}. Give another one, or --log {NO_LOG}.")
    return None


def notes_of(guard: Guard) -> list[str]:
    """Return a sentence on the log that the numbers depend on. Empty: they are those of the shipped weights."""
    if not guard.num_learnt:
        return []
    runs = "1 run" if guard.num_learnt == 1 else f"{guard.num_learnt} runs"
    return [f"Learnt from {runs} of {guard.device.name} in the log {guard.log.location}. --log {NO_LOG} leaves them out."]
