"""``perfguard report``: one HTML file on a guarded study or on the measurement log."""

from __future__ import annotations

import argparse
from pathlib import Path

from perfguard.exceptions import ConfigurationError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words that ``perfguard report`` takes."""
    parser.add_argument(
        "source",
        nargs="?",
        metavar="STUDY|LOG",
        help="the storage of an Optuna study (file or URL), or a measurement log (default: PERFGUARD_LOG, else your own log)",
    )
    parser.add_argument("--study", metavar="NAME", help="the study's name, if there are several")
    parser.add_argument(
        "--log", metavar="FILE|URL", help="the log of an Optuna study (default: PERFGUARD_LOG, else your own log)"
    )
    parser.add_argument("--out", default="report.html", metavar="FILE.html", help="the file to write (default: report.html)")


def write_report(arguments: argparse.Namespace) -> None:
    """Write the report and print its path.

    Raises:
        PerfGuardError: for a source that cannot be read, or a file that cannot be written.
    """
    from perfguard import report
    from perfguard.log import default_location

    source = arguments.source or default_location()
    if arguments.source is None and "://" not in source and not Path(source).exists():
        raise ConfigurationError(f"There is no measurement log at {source}. Name a log, or the storage of an Optuna study.")
    print(report.write_report(source, arguments.out, study=arguments.study, log=arguments.log))
