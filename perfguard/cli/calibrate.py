"""``perfguard calibrate``: some steps run on this machine's device, so that predictions fit it."""

from __future__ import annotations

import argparse
import time
import warnings

from perfguard.devices.detect import device_here
from perfguard.exceptions import ConfigurationError, UntrainedDeviceWarning, log_once


def add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the words that ``perfguard calibrate`` takes."""
    parser.description = (
        "Run some steps on this machine's device and log what they cost. All guards of the device learn from that."
    )
    parser.add_argument("--gpu", default="auto", help='"auto", the name of this machine\'s GPU, or "cpu" (default: auto)')
    parser.add_argument("--seconds", type=float, default=60.0, help="start no further step after so many seconds (default: 60)")
    parser.add_argument("--log", metavar="FILE|URL", help="default: PERFGUARD_LOG, else your own log")


def calibrate(arguments: argparse.Namespace) -> None:
    """Calibrate, and print the summary of the steps as that of a study: how many ran, and how far predictions were off."""
    if not arguments.seconds > 0:
        raise ConfigurationError(f"--seconds must be positive, but is {arguments.seconds:g}.")
    device = device_here(arguments.gpu)
    from perfguard.calibrate import calibrate
    from perfguard.log import MeasurementStore
    from perfguard.summary import summarize

    began = time.monotonic()
    with MeasurementStore(arguments.log) as log, warnings.catch_warnings():
        warnings.simplefilter("ignore", UntrainedDeviceWarning)  # which is why one calibrates
        # The guard has nothing to add about this log, so it does not advise to do what is being done.
        log_once(log.url or "", f"Steps run on {device.name} for {arguments.seconds:g} s. Ctrl-C ends this early.")
        records = calibrate(device, log, seconds=arguments.seconds)
    for record in records:
        if record.status not in (None, "ok"):
            print(f"{record.status}: {dict(record.params)}: {record.note}")
    print(summarize(records, title="perfguard calibrate"))
    number = sum(record.status == "ok" for record in records)
    seconds = time.monotonic() - began
    print(
        f"{number} steps in {seconds:.0f} s. Predictions for {device.name} learn from them: they are in the log {log.location}."
    )
