"""``perfguard calibrate``: some steps run on this machine's device, so that predictions fit it."""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from perfguard.devices.detect import device_here
from perfguard.exceptions import ConfigurationError, UntrainedDeviceWarning, log_once

if TYPE_CHECKING:
    from perfguard.calibrate import CalibrationStep


def add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the words that ``perfguard calibrate`` takes."""
    parser.description = (
        "Run some steps on this machine's device and log what they cost. All guards of the device learn from that."
    )
    parser.add_argument("--gpu", default="auto", help='"auto", the name of this machine\'s GPU, or "cpu" (default: auto)')
    parser.add_argument("--seconds", type=float, default=60.0, help="start no further step after so many seconds (default: 60)")
    parser.add_argument("--log", metavar="FILE|URL", help="default: PERFGUARD_LOG, else your own log")


def calibrate(arguments: argparse.Namespace) -> None:
    """Calibrate, and print the errors of the predictions before and after it."""
    if not arguments.seconds > 0:
        raise ConfigurationError(f"--seconds must be positive, but is {arguments.seconds:g}.")
    device = device_here(arguments.gpu)
    from perfguard.calibrate import calibrate
    from perfguard.cli.log import print_table
    from perfguard.log import MeasurementStore

    began = time.monotonic()
    with MeasurementStore(arguments.log) if arguments.log else MeasurementStore.default() as log, warnings.catch_warnings():
        warnings.simplefilter("ignore", UntrainedDeviceWarning)  # which is why one calibrates
        # The guard has nothing to add about this log, so it does not advise to do what is being done.
        log_once(log.url or "", f"Steps run on {device.name} for {arguments.seconds:g} s. Ctrl-C ends this early.")
        steps = calibrate(device, log, seconds=arguments.seconds)
    by_network: dict[str, list[CalibrationStep]] = {}
    for step in steps:
        by_network.setdefault(step.params["network"], []).append(step)
        if step.measurement is not None and step.measurement.status != "ok":
            print(f"{step.measurement.status}: {step.params}: {step.measurement.note}")
    headings = ["network", "steps run", "left out", "step time off by", "memory off by"]
    print_table(headings, [_row(name, own) for name, own in (by_network | {"all": steps}).items()])
    number, seconds = sum(step.after is not None for step in steps), time.monotonic() - began
    print(
        f"{number} steps in {seconds:.0f} s. Predictions for {device.name} learn from them: they are in the log {log.location}."
    )


def _row(name: str, steps: Sequence[CalibrationStep]) -> list[str]:
    run, left_out = (sum(map(bool, found)) for found in ([step.after for step in steps], [step.problem for step in steps]))
    return [name, str(run), str(left_out), *(_off_by(steps, *names) for names in _NAMES)]


_NAMES = ("step_time_s", "step_time"), ("peak_memory_bytes", "peak_memory")
"""Attributes of a Measurement and of a Prediction."""


def _off_by(steps: Sequence[CalibrationStep], measured: str, predicted: str) -> str:
    """The median error before the calibration, and from the runs of other steps after it."""
    read = [(step, value) for step in steps if step.after is not None and (value := getattr(step.measurement, measured))]
    errors = (
        [abs(getattr(getattr(step, when), predicted).median / value - 1) for step, value in read] for when in ("before", "after")
    )
    return " → ".join(f"{statistics.median(found):.0%}" for found in errors) if read else "-"
