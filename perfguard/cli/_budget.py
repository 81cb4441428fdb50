"""Budgets as options of a command, and estimates as data."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from perfguard.budget import Budget
from perfguard.exceptions import ConfigurationError
from perfguard.predictor import Estimate

_OPTIONS = (
    ("step_time_budget", "--max-step-time"), ("time_budget", "--max-trial-time"), ("memory_budget", "--max-memory"),
    ("cost_budget", "--max-cost"), ("price_per_hour", "--price-per-hour"),
)  # fmt: skip
"""Names of the budgets in messages of the core, and the options that set them here."""


def budget_of(arguments: argparse.Namespace) -> Budget:
    """The budget that ``--max-memory`` and the other options of its kind give.

    Raises:
        ConfigurationError: naming the option that cannot be right.
    """
    memory: str | float | None = arguments.max_memory
    try:
        memory = None if memory is None else float(memory)  # a share of the device
    except ValueError:
        pass  # it has a unit
    with options_named():
        return Budget.parse(
            memory=memory,
            step_time=arguments.max_step_time,
            time=getattr(arguments, "max_trial_time", None),
            cost=(cost := getattr(arguments, "max_cost", None)),
            price_per_hour=None if cost is None else arguments.price_per_hour,
        )


@contextmanager
def options_named() -> Iterator[None]:
    """Errors of the core name the options in the place of its budgets."""
    try:
        yield
    except ConfigurationError as error:
        message = str(error)
        for name, option in _OPTIONS:
            message = message.replace(name, option)
        raise ConfigurationError(message) from error


def estimate_as_json(value: Estimate | None) -> dict[str, float] | None:
    """The median and the 90% interval."""
    if value is None:
        return None
    low, high = value.interval()
    return {"median": value.median, "low": low, "high": high}
