"""``perfguard log``: what the measurement log holds, out of it, into it, and out of the way."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from perfguard.exceptions import ConfigurationError, LogError
from perfguard.measure import Status
from perfguard.quantities import format_bytes, format_seconds, parse_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from perfguard.log import LoggedDecision, MeasurementStore, Selection

_DEFAULT_LAST = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words that ``perfguard log`` takes."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    show = _verb(verbs, "show", "show the newest decisions and the measured costs")
    _add_selection(show)
    show.add_argument("--last", type=int, default=_DEFAULT_LAST, metavar="N", help=f"how many (default: {_DEFAULT_LAST})")
    show.add_argument("--json", action="store_true", help="print JSON")

    export = _verb(verbs, "export", "write the log into a folder, one file for each table")
    export.add_argument("folder", metavar="FOLDER")
    _add_selection(export)
    export.add_argument("--format", choices=("csv", "parquet"), default="csv", help="default: csv; parquet needs pyarrow")
    export.add_argument("--anonymize", action="store_true", help="strip names of studies, hyperparameters, modules, and all text")

    import_ = _verb(verbs, "import", "add the rows of an export, without rows that the log has already")
    import_.add_argument("folder", metavar="FOLDER")

    quarantine = _verb(verbs, "quarantine", "show the readings that PerfGuard does not learn from, and why")
    quarantine.add_argument("--json", action="store_true", help="print JSON")

    forget = _verb(verbs, "forget", "set measurements aside: they stay in the log, but PerfGuard does not learn from them")
    _add_selection(forget)
    forget.add_argument("--undo", action="store_true", help="use the selected measurements again")
    forget.add_argument("--yes", action="store_true", help="do not ask for confirmation")

    prune = _verb(verbs, "prune", "delete decisions with their measurements")
    _add_selection(prune)
    prune.add_argument("--older-than", metavar="AGE", help='the same as --before: for instance "90d"')
    prune.add_argument("--keep", type=int, metavar="N", help="also keep at most the newest N of the other decisions")


def _add_selection(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("selection", "only decisions that match all of these options")
    group.add_argument("--study", help="the study's name")
    group.add_argument("--device", help='for instance "a100" or "cpu"')
    group.add_argument("--host", help="the name of the machine")
    group.add_argument("--status", choices=get_args(Status), help="how the run ended")
    group.add_argument("--verdict", choices=("launch", "prune", "repair"), help="what the guard decided")
    group.add_argument("--since", metavar="TIME", help='"2026-11-20", "2026-11-20 14:30" (UTC), or an age: "2h", "90d"')
    group.add_argument("--before", metavar="TIME", help="the same")


def _selection(arguments: argparse.Namespace, *, before: str | None = None) -> Selection:
    from perfguard.log import Selection

    now = datetime.datetime.now(datetime.timezone.utc)
    if arguments.before is not None and before is not None:
        raise LogError("Give either --before or --older-than, not both: they mean the same.")
    return Selection(
        study=arguments.study,
        device=None if arguments.device is None else _devices(arguments.device),
        host=arguments.host,
        status=arguments.status,
        verdict=arguments.verdict,
        since=_time(arguments.since, "--since", now),
        before=_time(arguments.before, "--before", now) or _time(before, "--older-than", now),
    )


def _devices(name: str) -> str | tuple[str, ...]:
    """The id that was named; of an alias all that it may have meant, since "a100" is an A100 SXM on a machine that has one."""
    from perfguard.devices.catalog import catalog, is_alias, is_short_for, look_up

    known = look_up(name)
    if known is None or not is_alias(name):
        return name if known is None else known.id
    fitting = [id_ for id_, device in catalog().items() if id_ == known.id or is_short_for(name, device)]
    return tuple(part for id_ in fitting for part in (id_, f"{id_}:"))


def _time(text: str | None, what: str, now: datetime.datetime) -> datetime.datetime | None:
    """The moment that a date, a time or an age means; without a time zone it is in UTC, as `perfguard log show` prints it."""
    if text is None:
        return None
    try:
        moment = datetime.datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
        return moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.timezone.utc)
    except ValueError:
        pass
    try:
        if text.strip()[-1:].isalpha():  # a bare number may be meant as a year
            return now - datetime.timedelta(seconds=parse_seconds(text, what=what))
    except (ConfigurationError, OverflowError):
        pass
    raise LogError(f'{what} must look like "2026-11-20", "2026-11-20 14:30" (UTC) or an age such as "90d", but got {text!r}.')


def _verb(verbs: Any, name: str, help: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=help)
    parser.add_argument("--log", metavar="FILE|URL", help="default: PERFGUARD_LOG, else your own log")
    return parser


def run_log_command(arguments: argparse.Namespace) -> None:
    """Run the command with these arguments.

    Raises:
        PerfGuardError: for a log, a folder or an argument that cannot be used.
    """
    actions: dict[str, Callable[[MeasurementStore, argparse.Namespace], None]] = {
        "show": _show,
        "export": _export,
        "import": _import,
        "quarantine": _quarantine,
        "forget": _forget,
        "prune": _prune,
    }
    with open_log(arguments.log, must_exist=arguments.verb != "import") as store:
        actions[arguments.verb](store, arguments)


def open_log(location: str | None, *, must_exist: bool) -> MeasurementStore:
    """The log that was named, else that of the environment variable PERFGUARD_LOG, else the user's own.

    Raises:
        LogError: if it cannot be opened; with ``must_exist`` also if it would be a new one.
    """
    location = location or os.environ.get("PERFGUARD_LOG")
    if must_exist and location is not None and "://" not in location and not Path(location).exists():
        raise LogError(f"There is no measurement log at {location}.")
    from perfguard.log import MeasurementStore

    return MeasurementStore.default() if location is None else MeasurementStore(location)


def _show(store: MeasurementStore, arguments: argparse.Namespace) -> None:
    decisions = store.decisions(_selection(arguments), newest=max(1, arguments.last))
    if arguments.json:
        rows = [asdict(decision) | {"created_at": decision.created_at.isoformat()} for decision in decisions]
        print(json.dumps({"log": repr(store), "counts": store.counts(), "decisions": rows}, indent=2, default=str))
        return
    from rich.console import Console

    console = Console()
    if not console.is_terminal:  # a pipe or a file has no width; rich would cut the text at 80 columns
        console = Console(width=200)
    console.print(_table(decisions))
    console.print(", ".join(f"{count:,} {name}" for name, count in store.counts().items()), highlight=False)


def _table(decisions: list[LoggedDecision]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    for heading in (
        "when (UTC)",
        "study",
        "trial",
        "verdict",
        "device",
        "memory predicted",
        "measured",
        "step predicted",
        "measured",
        "status",
    ):
        table.add_column(heading, no_wrap=heading == "when (UTC)")
    for decision in decisions:
        table.add_row(
            f"{decision.created_at:%Y-%m-%d %H:%M:%S}",
            escape(decision.study),
            "" if decision.trial is None else str(decision.trial),
            decision.action,
            decision.device_id or "",
            _text(decision.predicted_peak_memory_bytes, format_bytes),
            _text(decision.measured_peak_memory_bytes, format_bytes),
            _text(decision.predicted_step_time_s, format_seconds),
            _text(decision.measured_step_time_s, format_seconds),
            ", ".join(filter(None, [decision.status, "set aside" if decision.set_aside else None])),
        )
    return table


def _text(value: float | None, form: Callable[[float], str]) -> str:
    return "" if value is None else form(value)


def _quarantine(store: MeasurementStore, arguments: argparse.Namespace) -> None:
    from perfguard.learning import assess_log

    found = [refused for device_id in store.device_ids() for refused in assess_log(store.observations(device_id)).quarantined]
    rows: list[dict[str, Any]] = [
        {
            "decision_id": refused.observation.decision_id,
            "when": _when(refused.observation.recorded_at_ns).isoformat(),
            "device": refused.observation.device.id,
            "reading": refused.target,
            "reason": refused.reason,
        }
        for refused in found
    ]
    rows += [
        {
            "decision_id": decision.decision_id,
            "when": decision.created_at.isoformat(),
            "device": decision.device_id,
            "reading": "all",
            "reason": decision.set_aside,
        }
        for decision in store.decisions()
        if decision.set_aside
    ]
    rows.sort(key=lambda row: str(row["when"]))
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(f"{row['when'][:19]}  {row['decision_id'][:12]}  {row['device']}  {row['reading']}: {row['reason']}")
    num_aside = sum(row["reading"] == "all" for row in rows)
    print(f"{len(rows) - num_aside} readings are quarantined, {num_aside} measurements are set aside")


def _when(time_ns: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(time_ns / 1e9, tz=datetime.timezone.utc)


def _export(store: MeasurementStore, arguments: argparse.Namespace) -> None:
    from perfguard.log import export_log

    counts = export_log(store, arguments.folder, _selection(arguments), format=arguments.format, anonymize=arguments.anonymize)
    print(f"{arguments.folder}: " + ", ".join(f"{count:,} {name}" for name, count in counts.items()))


def _import(store: MeasurementStore, arguments: argparse.Namespace) -> None:
    from perfguard.log import import_log

    counts = import_log(store, arguments.folder)
    print("new: " + ", ".join(f"{count:,} {name}" for name, count in counts.items()))


def _prune(store: MeasurementStore, arguments: argparse.Namespace) -> None:
    selection = _selection(arguments, before=arguments.older_than)
    if selection.is_everything and arguments.keep is None:
        raise LogError("Say what to remove: --before TIME, --study NAME, --device NAME, --keep N, ...")
    print(f"{store.prune(selection, keep_newest=arguments.keep):,} decisions removed")


def _forget(store: MeasurementStore, arguments: argparse.Namespace) -> None:
    selection = _selection(arguments)
    if selection.is_everything:
        raise LogError("Say which measurements to forget: --study NAME, --device NAME, --host NAME, --since TIME, ...")
    found = [row for row in store.decisions(selection) if row.status and bool(row.set_aside) == arguments.undo]
    if not found:
        state = "set aside" if arguments.undo else "in use"
        raise LogError(f"No measurement that is {state} matches. See `perfguard log show` with the same selection.")
    devices = sorted({row.device_id or "unknown" for row in found})
    studies = {row.study for row in found}
    print(
        f"{len(found):,} measurements of {len(studies)} {'study' if len(studies) == 1 else 'studies'} on {', '.join(devices)}, "
        f"{found[0].created_at:%Y-%m-%d %H:%M:%S} to {found[-1].created_at:%Y-%m-%d %H:%M:%S} (UTC)"
    )
    _confirm(arguments, "Use them again?" if arguments.undo else "Set them aside, so that nothing learns from them?")
    if arguments.undo:
        print(f"{store.take_back(selection):,} measurements are used again")
        return
    today = datetime.datetime.now(datetime.timezone.utc)
    count = store.set_aside(selection, f"forgotten on {today:%Y-%m-%d} by `perfguard log forget`")
    print(f"{count:,} measurements are set aside; the same selection with --undo takes them back")
    weights = store.weights_since(found[0].created_at)
    if weights:
        print("Fine-tuned weights that may have learnt from these runs are still in use. To take them out of use:")
    for generation in weights:
        print(f"    perfguard weights rollback {generation.weights_id[:12]}")


def _confirm(arguments: argparse.Namespace, question: str) -> None:
    """Ask for confirmation, unless --yes was given.

    Raises:
        LogError: if the answer is no, or standard input is no terminal.
    """
    if arguments.yes:
        return
    if not sys.stdin.isatty():
        raise LogError("Nothing was changed: add --yes where there is no terminal.")
    if input(f"{question} [y/N] ").strip().lower() not in ("y", "yes"):
        raise LogError("Nothing was changed.")
