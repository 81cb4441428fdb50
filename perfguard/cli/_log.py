"""``perfguard log``: what the measurement log holds, out of it, into it, and out of the way."""

from __future__ import annotations

import argparse
import datetime
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfguard.exceptions import LogError
from perfguard.quantities import format_bytes, format_seconds, parse_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from perfguard.store import LoggedDecision, MeasurementStore

_DEFAULT_LAST = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words that ``perfguard log`` takes."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    show = _verb(verbs, "show", "the newest decisions and what they cost")
    show.add_argument("--study", help="only of this study")
    show.add_argument("--last", type=int, default=_DEFAULT_LAST, metavar="N", help=f"how many (default: {_DEFAULT_LAST})")
    show.add_argument("--json", action="store_true", help="data on standard output")

    export = _verb(verbs, "export", "write the log into a folder, one file a table")
    export.add_argument("folder", metavar="FOLDER")
    export.add_argument("--format", choices=("csv", "parquet"), default="csv", help="default: csv; parquet needs pyarrow")
    export.add_argument("--anonymize", action="store_true", help="strip names of studies, hyperparameters, modules, and all text")

    import_ = _verb(verbs, "import", "add the rows of an export; those that are there already are left out")
    import_.add_argument("folder", metavar="FOLDER")

    quarantine = _verb(verbs, "quarantine", "the readings that are not believed, and why; nothing is learnt from them")
    quarantine.add_argument("--json", action="store_true", help="data on standard output")

    prune = _verb(verbs, "prune", "remove old decisions with their measurements")
    prune.add_argument("--older-than", metavar="AGE", help='for instance "90d"')
    prune.add_argument("--keep", type=int, metavar="N", help="keep at most the newest N decisions")


def _verb(verbs: Any, name: str, help: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=help)
    parser.add_argument("--log", metavar="FILE|URL", help="default: PERFGUARD_LOG, else your own log")
    return parser


def run_log_command(arguments: argparse.Namespace) -> None:
    """Do what the words say.

    Raises:
        PerfGuardError: for a log, a folder or an argument that cannot be used.
    """
    actions: dict[str, Callable[[MeasurementStore, argparse.Namespace], None]] = {
        "show": _show,
        "export": _export,
        "import": _import,
        "quarantine": _quarantine,
        "prune": _prune,
    }
    with open_log(arguments.log, must_exist=arguments.verb != "import") as store:
        actions[arguments.verb](store, arguments)


def open_log(location: str | None, *, must_exist: bool) -> MeasurementStore:
    """The log that was named, else that of the environment variable PERFGUARD_LOG, else the user's own.

    Raises:
        LogError: if it cannot be opened; with ``must_exist`` also if it would be a new one.
    """
    from perfguard.store import MeasurementStore

    location = location or os.environ.get("PERFGUARD_LOG")
    if must_exist and location is not None and "://" not in location and not Path(location).exists():
        raise LogError(f"There is no measurement log at {location}.")
    return MeasurementStore.default() if location is None else MeasurementStore(location)


def _show(store: MeasurementStore, arguments: argparse.Namespace) -> None:
    decisions = store.decisions(arguments.study, newest=max(1, arguments.last))
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
            decision.status or "",
        )
    return table


def _text(value: float | None, form: Callable[[float], str]) -> str:
    return "" if value is None else form(value)


def _quarantine(store: MeasurementStore, arguments: argparse.Namespace) -> None:
    from perfguard.evidence import weigh

    found = [refused for device_id in store.device_ids() for refused in weigh(store.observations(device_id)).quarantined]
    rows = [
        {
            "decision_id": refused.observation.decision_id,
            "when": _when(refused.observation.recorded_at_ns).isoformat(),
            "device": refused.observation.device.id,
            "reading": refused.target,
            "reason": refused.reason,
        }
        for refused in sorted(found, key=lambda refused: refused.observation.recorded_at_ns)
    ]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(f"{row['when'][:19]}  {row['decision_id'][:12]}  {row['device']}  {row['reading']}: {row['reason']}")
    print(f"{len(rows)} readings are quarantined")


def _when(time_ns: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(time_ns / 1e9, tz=datetime.timezone.utc)


def _export(store: MeasurementStore, arguments: argparse.Namespace) -> None:
    from perfguard.store import export_log

    counts = export_log(store, arguments.folder, format=arguments.format, anonymize=arguments.anonymize)
    print(f"{arguments.folder}: " + ", ".join(f"{count:,} {name}" for name, count in counts.items()))


def _import(store: MeasurementStore, arguments: argparse.Namespace) -> None:
    from perfguard.store import import_log

    counts = import_log(store, arguments.folder)
    print("new: " + ", ".join(f"{count:,} {name}" for name, count in counts.items()))


def _prune(store: MeasurementStore, arguments: argparse.Namespace) -> None:
    if arguments.older_than is None and arguments.keep is None:
        raise LogError("Say what to remove: --older-than AGE, --keep N, or both.")
    before = None
    if arguments.older_than is not None:
        age_s = parse_seconds(arguments.older_than, what="--older-than")
        before = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(seconds=age_s)
    print(f"{store.prune(before=before, keep_newest=arguments.keep):,} decisions removed")
