"""``perfguard explain``: how the number that a trial got came to be, from physics to the last bound."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from perfguard import explain as accounts
from perfguard.cli.predict import print_tables
from perfguard.cli.subject import add_records_arguments, check_page
from perfguard.exceptions import ConfigurationError
from perfguard.quantities import SPECS, Quantity

if TYPE_CHECKING:
    from perfguard.predictor import Estimate
    from perfguard.record import TrialRecord


def add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the words that ``perfguard explain`` takes."""
    parser.description = "Print what each stage of a trial's prediction has changed, beside what was measured."
    parser.add_argument("trial", metavar="TRIAL", help="its number, or the tuner's own name of it, as in Ray Tune")
    add_records_arguments(parser)
    parser.add_argument("--plot", metavar="FILE.html", help="draw one of the accounts as a waterfall")
    parser.add_argument(
        "--quantity",
        choices=get_args(Quantity),
        help="show this one alone, and draw it (default: all; the one that is furthest from its measurement is drawn)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def explain(arguments: argparse.Namespace) -> None:
    """Find the trial, and print its accounts."""
    from perfguard.log_location import default_location
    from perfguard.report import read_report

    if arguments.plot:
        check_page("--plot", arguments.plot)
    source = arguments.source or default_location()
    if arguments.source is None and "://" not in source and not Path(source).exists():
        raise ConfigurationError(f"There is no measurement log at {source}. Name a log, or the storage of an Optuna study.")
    report = read_report(source, study=arguments.study)
    record = accounts.find_trial(report.records, arguments.trial, title=f"The {report.source}")
    predicted = _explained(record, arguments.quantity)
    if arguments.json:
        print(json.dumps(_as_json(record, predicted), indent=2, default=str))
    else:
        _print(record, predicted)
    if arguments.plot:
        _draw(record, predicted, arguments.plot)


def _explained(record: TrialRecord, quantity: Quantity | None) -> dict[Quantity, Estimate]:
    """Return the estimates to explain.

    Raises:
        ConfigurationError: if there is none, with the reason.
    """
    trial = f"Trial {record.number if record.number is not None else record.trial_id}"
    if not record.predicted:
        why = record.reason or "PerfGuard has not judged it"
        raise ConfigurationError(f"{trial} has no prediction to explain: {why}.")
    found = accounts.explained(record.predicted)
    if not found:
        raise ConfigurationError(
            f"{trial} has predictions, but no account of them: {record.predictor or 'its predictor'} gives none, or an older "
            "PerfGuard has judged it."
        )
    if quantity is None:
        return found
    base = SPECS[quantity].multiple_of
    if quantity not in record.predicted or (quantity not in found and base not in found):
        known = ", ".join(found)
        raise ConfigurationError(f"{trial} has no account of {SPECS[quantity].noun}. --quantity is one of {known}.")
    return {quantity: record.predicted[quantity]}


def _as_json(record: TrialRecord, predicted: dict[Quantity, Estimate]) -> dict[str, Any]:
    return {
        "study": record.study,
        "trial": record.number,
        "trial_id": record.trial_id,
        "device_id": record.device_id,
        "predictor": record.predictor,
        "reason": record.reason,
        "account": accounts.as_json(predicted),
        "measured": dict(record.measured),
        "limits": dict(record.limits),
    }


def _print(record: TrialRecord, predicted: dict[Quantity, Estimate]) -> None:
    name = f"trial {record.number if record.number is not None else record.trial_id}"
    study = f" of {record.study}" if record.study else ""
    device = f", {record.device_name}" if record.device_name else ""
    print(f"{name}{study}{device}, {record.in_words}: {record.reason or 'no limit'}")
    for note in filter(None, (record.not_measured, record.note)):
        print(f"the measurement: {note}")
    print_tables(accounts.tables_of(predicted, measured=record.measured, limits=record.limits))
    print("The page docs/howto/wrong-number.md says what each stage means, and what to do.")


def _draw(record: TrialRecord, predicted: dict[Quantity, Estimate], path: str) -> None:
    from perfguard.plots import plot_account, write_page

    quantity = accounts.furthest(record, predicted)
    figure = plot_account(
        predicted[quantity],
        quantity=quantity,
        of=f"trial {record.number if record.number is not None else record.trial_id}",
        measured=record.measured.get(quantity),
        limit=record.limits.get(quantity),
    )
    write_page(figure, path)
    print(f"the account of the {SPECS[quantity].noun}: {path}")
