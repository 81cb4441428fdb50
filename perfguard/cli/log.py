"""``perfguard log``, ``learn``, ``weights`` and ``report``: what the measurement log holds, and what is made of it."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from perfguard.exceptions import ConfigurationError, LogError
from perfguard.measure import Status
from perfguard.predictor import DEFAULT_PREDICTOR
from perfguard.quantities import format_quantity, parse_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perfguard.log import MeasurementStore, Selection
    from perfguard.quantities import Quantity
    from perfguard.record import TrialRecord


def add_log_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the words that ``perfguard log`` takes."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, help: str, *, selects: bool = True) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=help)
        _add_log(added)
        if selects:
            group = added.add_argument_group("selection", "only decisions that match all of these options")
            group.add_argument("--study", help="the study's name")
            group.add_argument("--device", help='for instance "a100" or "cpu"')
            group.add_argument("--host", help="the name of the machine")
            group.add_argument("--status", choices=get_args(Status), help="how the run ended")
            group.add_argument("--verdict", choices=("launch", "prune", "repair"), help="what the guard decided")
            group.add_argument("--since", metavar="TIME", help='"2026-11-20", "2026-11-20 14:30" (UTC), or an age: "2h", "90d"')
            group.add_argument("--before", metavar="TIME", help="the same")
        return added

    show = verb("show", "show the newest decisions and the measured costs")
    show.add_argument("--last", type=int, default=20, metavar="N", help="how many (default: 20)")
    show.add_argument("--json", action="store_true", help="print JSON")
    export = verb("export", "write the decisions with their measurements as a table")
    export.add_argument("file", metavar="FILE.csv|FILE.parquet", help="the file to write")
    quarantine = verb("quarantine", "show the readings that PerfGuard does not learn from, and why", selects=False)
    quarantine.add_argument("--json", action="store_true", help="print JSON")
    forget = verb("forget", "set measurements aside: they stay in the log, but PerfGuard does not learn from them")
    forget.add_argument("--undo", action="store_true", help="use the selected measurements again")
    prune = verb("prune", "delete decisions with their measurements, for good")
    for changing in (forget, prune):
        changing.add_argument("--yes", action="store_true", help="do not ask for confirmation")


def _add_log(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log", metavar="FILE|URL", help="default: PERFGUARD_LOG, else your own log")


def log(arguments: argparse.Namespace) -> None:
    """Run the verb with these arguments."""
    verbs = {"show": _show, "export": _export, "quarantine": _quarantine, "forget": _forget, "prune": _prune}
    with open_log(arguments.log) as store:
        verbs[arguments.verb](store, arguments)


def open_log(location: str | None) -> MeasurementStore:
    """Return the log that was named, else that of the environment variable PERFGUARD_LOG, else the user's own."""
    location = location or os.environ.get("PERFGUARD_LOG")
    if location is not None and "://" not in location and not Path(location).exists():
        raise ConfigurationError(f"There is no measurement log at {location}.")
    from perfguard.log import MeasurementStore

    return MeasurementStore(location)


def _selection(store: MeasurementStore, arguments: argparse.Namespace) -> Selection:
    """Return what the options select.

    Raises:
        LogError: if the log has no such study, device or host.
    """
    from perfguard.log import Selection

    selection = Selection(
        study=arguments.study,
        device=None if arguments.device is None else _devices(arguments.device),
        host=arguments.host,
        status=arguments.status,
        verdict=arguments.verdict,
        since=_time(arguments.since, "--since"),
        before=_time(arguments.before, "--before"),
    )
    of_one = {
        "study": Selection(study=selection.study),
        "device": Selection(device=selection.device),
        "host": Selection(host=selection.host),
    }
    for what, one in of_one.items():
        if not one.is_everything and not store.records(one, newest=1):
            raise LogError(_why_unknown(what, getattr(arguments, what), store.names()[what]))
    return selection


def _why_unknown(what: str, name: str, known: Sequence[str], *, most: int = 10) -> str:
    """Return that the log has no study, device or host of this ``name``, and which it has."""
    from perfguard.workload import did_you_mean

    shown = ", ".join(map(repr, known[:most])) + (", ..." if len(known) > most else "")
    return f"The log has no {what} {name!r}{did_you_mean(name, known)}. It has {shown or 'none'}."


def _devices(name: str) -> str | tuple[str, ...]:
    """The id that was named; of an alias all that it may have meant, since "a100" is an A100 SXM on a machine that has one."""
    from perfguard.devices.catalog import alias_of, catalog, is_short_for, look_up

    known = look_up(name)
    if known is None or alias_of(name) is None:
        return name if known is None else known.id
    fitting = [id_ for id_, device in catalog().items() if id_ == known.id or is_short_for(name, device)]
    return tuple(part for id_ in fitting for part in (id_, f"{id_}:"))


def _time(text: str | None, what: str) -> datetime.datetime | None:
    """The moment that a date, a time or an age means; without a time zone it is in UTC, as `perfguard log show` prints it."""
    if text is None:
        return None
    try:
        moment = datetime.datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
        return moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.timezone.utc)
    except ValueError:
        pass
    with suppress(ConfigurationError, OverflowError):
        if text.strip()[-1:].isalpha():  # a bare number may be meant as a year
            return datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(seconds=parse_seconds(text, what=what))
    raise ConfigurationError(
        f'{what} must look like "2026-11-20", "2026-11-20 14:30" (UTC) or an age such as "90d", but got {text!r}.'
    )


def _show(store: MeasurementStore, arguments: argparse.Namespace) -> None:
    records = store.records(_selection(store, arguments), newest=max(1, arguments.last))
    counts = store.counts()
    if arguments.json:
        rows = [_as_json(record) for record in records]
        print(json.dumps({"log": repr(store), "counts": counts, "decisions": rows}, indent=2, default=str))
        return

    def cells(record: TrialRecord, quantity: Quantity) -> list[str]:
        predicted = record.predicted.get(quantity)
        values = None if predicted is None else predicted.median, record.measured.get(quantity)
        return ["" if value is None else format_quantity(quantity, value) for value in values]

    headings = ["when (UTC)", "study", "trial", "verdict", "device", "memory predicted", "measured", "step predicted", "measured"]
    table = [
        [
            f"{record.created_at:%Y-%m-%d %H:%M:%S}",
            record.study,
            "" if record.number is None else f"{record.number}",
            "" if record.verdict is None else record.verdict.action,
            record.device_id or "",
            *cells(record, "memory"),
            *cells(record, "step_time"),
            ", ".join(filter(None, [record.status, "set aside" if record.set_aside else None])),
        ]
        for record in records
    ]
    print_table([*headings, "status"], table)
    print(", ".join(f"{count:,} {name}" for name, count in counts.items()))


def _as_json(record: TrialRecord) -> dict[str, Any]:
    """One decision with its measurement, in the columns of the log."""
    from perfguard.record import column, columns_of

    names = ("decision_id", "created_at", "study", "trial_id", "host", "device_id", "params", "status", "set_aside")
    measured = {column(quantity, "measured"): value for quantity, value in record.measured.items()}
    verdict = {} if record.verdict is None else columns_of(record.verdict)
    own = {"trial": record.number, "predictor": record.predictor, "reason": record.reason}
    return {name: getattr(record, name) for name in names} | own | verdict | measured


def print_table(headings: list[str], rows: list[list[str]]) -> None:
    """Print ``rows`` below their ``headings``."""
    from rich.table import Table
    from rich.text import Text

    from perfguard.cli.gpus import wide_console

    table = Table()
    for index, heading in enumerate(headings):
        table.add_column(heading, no_wrap=index == 0)
    for row in rows:
        table.add_row(*map(Text, row))  # not as markup: a study may be named "s[1]"
    wide_console(200).print(table)


def _export(store: MeasurementStore, arguments: argparse.Namespace) -> None:
    print(f"{arguments.file}: {store.export(arguments.file, _selection(store, arguments)):,} decisions")


def _quarantine(store: MeasurementStore, arguments: argparse.Namespace) -> None:
    from perfguard.learning import doubts_of

    keys = ("decision_id", "when", "device", "reading", "reason")
    found: list[tuple[Any, ...]] = []
    for doubt in (doubt for device_id in store.device_ids() for doubt in doubts_of(store.observations(device_id))):
        seen = doubt.observation
        when = datetime.datetime.fromtimestamp(seen.recorded_at_ns / 1e9, tz=datetime.timezone.utc)
        found.append((seen.decision_id, when.isoformat(), seen.device.id, doubt.target, doubt.reason))
    num_quarantined = len(found)
    for aside in store.records():
        if aside.set_aside and aside.created_at is not None:
            found.append((aside.decision_id, aside.created_at.isoformat(), aside.device_id, "all", aside.set_aside))
    rows = [dict(zip(keys, values, strict=True)) for values in sorted(found, key=lambda values: str(values[1]))]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(f"{row['when'][:19]}  {row['decision_id'][:12]}  {row['device']}  {row['reading']}: {row['reason']}")
    print(f"{num_quarantined} readings are quarantined, {len(rows) - num_quarantined} measurements are set aside")


def _forget(store: MeasurementStore, arguments: argparse.Namespace) -> None:
    """Set measurements aside, or with --undo use them again, after a question."""
    selection = _selection(store, arguments)
    if selection.is_everything:
        raise ConfigurationError("Say which measurements to forget: --study NAME, --device NAME, --host NAME, --since TIME, ...")
    found = [row for row in store.records(selection) if row.status and bool(row.set_aside) == arguments.undo]
    if not found:
        state = "set aside" if arguments.undo else "in use"
        raise LogError(f"No measurement that is {state} matches. See `perfguard log show` with the same selection.")
    question = "Use them again?" if arguments.undo else "Set them aside, so that nothing learns from them?"
    _confirm(found, "measurements", question, yes=arguments.yes)
    if arguments.undo:
        print(f"{store.take_back(selection):,} measurements are used again")
        return
    today = datetime.datetime.now(datetime.timezone.utc)
    count = store.set_aside(selection, f"forgotten on {today:%Y-%m-%d} by `perfguard log forget`")
    print(f"{count:,} measurements are set aside; the same selection with --undo takes them back")
    begun = found[0].created_at
    promoted = [known for known in store.weights() if known.state == "promoted" and (begun is None or known.created_at >= begun)]
    if promoted:
        print("Fine-tuned weights that may have learnt from these runs are in use. To take them out of use:")
        print("    perfguard weights rollback")


def _confirm(found: Sequence[TrialRecord], noun: str, question: str, *, yes: bool) -> None:
    """Print what was ``found``, and ask before it changes, unless the answer is ``yes`` already.

    Raises:
        LogError: if the answer is no, or there is no terminal to ask.
    """
    studies = {row.study for row in found}
    devices = sorted({row.device_id or "unknown" for row in found})
    print(
        f"{len(found):,} {noun} of {len(studies)} {'study' if len(studies) == 1 else 'studies'} on {', '.join(devices)}, "
        f"{found[0].created_at:%Y-%m-%d %H:%M:%S} to {found[-1].created_at:%Y-%m-%d %H:%M:%S} (UTC)"
    )
    if yes:
        return
    if not sys.stdin.isatty():
        raise LogError("Nothing was changed: add --yes where there is no terminal.")
    if input(f"{question} [y/N] ").strip().lower() not in ("y", "yes"):
        raise LogError("Nothing was changed.")


def _prune(store: MeasurementStore, arguments: argparse.Namespace) -> None:
    """Delete decisions after a question. Where none matches, there is nothing to ask."""
    selection = _selection(store, arguments)
    if selection.is_everything:
        raise ConfigurationError("Say what to remove: --before TIME, --study NAME, --device NAME, ...")
    if found := store.records(selection):
        question = "Delete them with their measurements? There is no way back; `perfguard log forget` has one."
        _confirm(found, "decisions", question, yes=arguments.yes)
    print(f"{store.prune(selection):,} decisions removed")


def add_learn_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the words that ``perfguard learn`` takes."""
    _add_log(parser)
    parser.add_argument("--predictor", default=DEFAULT_PREDICTOR, help=f"name of the predictor (default: {DEFAULT_PREDICTOR})")


def learn(arguments: argparse.Namespace) -> None:
    """Update the log's weights once. A cron job or a timer makes it a watch."""
    if arguments.own_process:  # beside a study or on a cluster's head: it must not be noticed
        with suppress(OSError, AttributeError):  # Windows has no niceness
            os.nice(15)
        os.environ["OMP_NUM_THREADS"] = "1"  # PyTorch and scikit-learn are not imported yet
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends as after Ctrl-C
    with open_log(arguments.log) as store:
        from perfguard.learning import tune_weights

        print(tune_weights(store, predictor=arguments.predictor) or "Nothing to learn: too few runs are new.")


def add_weights_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the words that ``perfguard weights`` takes."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    show = verbs.add_parser("list", help="list every generation, its errors, and whether it is in use")
    show.add_argument("--json", action="store_true", help="print JSON")
    back = verbs.add_parser("rollback", help="go back to the generation before the one in use")
    back.add_argument("predictor", nargs="?", metavar="OF", help="as `list` names it (default: the newest in use)")
    for verb in (show, back):
        _add_log(verb)


def weights(arguments: argparse.Namespace) -> None:
    """List the generations of fine-tuned weights, or go back to the one before."""
    with open_log(arguments.log) as store:
        if arguments.verb == "rollback":
            in_use = [known.predictor for known in store.weights() if known.state == "promoted"]
            if not in_use:
                raise LogError("No fine-tuned weights are in use: the shipped ones are.")
            back = store.roll_back(arguments.predictor or in_use[-1])
            now = "the shipped weights are in use again" if back is None else f"{back[:12]} is in use again"
            print(f"Rolled back; {now}. Guards take them after their next run.")
            return
        generations = store.weights()
    if arguments.json:
        print(json.dumps([asdict(generation) for generation in generations], indent=2, default=str))
    elif not generations:
        print("No weights were fine-tuned yet; the shipped ones are in use.")
    else:
        rows = []
        for one in generations:
            errors = ", ".join(f"{name} {value:.4g}" for name, value in one.metrics.items())
            rows.append([one.weights_id[:12], one.predictor, f"{one.created_at:%Y-%m-%d %H:%M:%S}", one.state, errors])
        print_table(["id", "of", "made (UTC)", "state", "runs, and errors before and after"], rows)


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the words that ``perfguard report`` takes."""
    from perfguard.cli.subject import add_records_arguments

    add_records_arguments(parser)
    parser.add_argument("--out", default="report.html", metavar="FILE.html", help="the file to write (default: report.html)")


def report(arguments: argparse.Namespace) -> None:
    """Write the report and print its path."""
    from perfguard.cli.subject import check_page
    from perfguard.log_location import default_location
    from perfguard.report import write_report

    source = arguments.source or default_location()
    check_page("--out", arguments.out)
    if arguments.source is None and "://" not in source and not Path(source).exists():
        raise ConfigurationError(f"There is no measurement log at {source}. Name a log, or the storage of an Optuna study.")
    print(write_report(source, arguments.out, study=arguments.study))
