"""``perfguard learn`` and ``perfguard weights``: fine-tuning beside a cluster, and what came of it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import time
import uuid
from contextlib import suppress
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING

from perfguard.cli._log import open_log
from perfguard.exceptions import LogError
from perfguard.predictor import DEFAULT_PREDICTOR
from perfguard.quantities import parse_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from perfguard.learning import OnlineTrainer
    from perfguard.log import LoggedWeights, MeasurementStore

_LEASE_S = 120.0
"""Longer than one update takes, shorter than anybody waits for a learner that was killed."""
_NICENESS = 15


def add_learn_arguments(parser: argparse.ArgumentParser) -> None:
    """The words that ``perfguard learn`` takes."""
    parser.add_argument("--log", metavar="FILE|URL", help="default: PERFGUARD_LOG, else your own log")
    parser.add_argument("--watch", action="store_true", help="continue until stopped, instead of one update")
    parser.add_argument("--once", action="store_true", help="one update (the default)")
    parser.add_argument("--every", default="30s", metavar="TIME", help="how often to look for new runs (default: 30s)")
    parser.add_argument("--min-new", type=int, default=20, metavar="N", help="fewest new runs for an update (default: 20)")
    parser.add_argument("--max-rows", type=int, default=1000, metavar="N", help="most runs to learn from (default: 1000)")
    parser.add_argument("--predictor", default=DEFAULT_PREDICTOR, help=f"name of the predictor (default: {DEFAULT_PREDICTOR})")


def learn(arguments: argparse.Namespace) -> None:
    """One update of the log's weights, or with --watch one whenever there are new runs, until SIGTERM or Ctrl-C.

    Args:
        arguments: the words, and ``own_process``: whether the process is here for nothing else. Then it stays in the background
            of the machine.

    Raises:
        PerfGuardError: for a log or a predictor that cannot be used. Watching, an outage of the log is waited for.
    """
    from perfguard.learning import LEASE

    every_s = parse_seconds(arguments.every, what="--every")
    if arguments.own_process:
        _stay_in_the_background()
    holder = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
    lease_s = max(_LEASE_S, 3 * every_s) if arguments.watch else _LEASE_S
    with open_log(arguments.log, must_exist=True) as log:

        def hold() -> bool:
            return log.lease(LEASE, holder, seconds=lease_s)

        try:
            if arguments.watch:
                _watch(_trainer(log, arguments), hold, every_s)
            elif hold():  # before anything heavy is imported, because many workers may try
                generation = _trainer(log, arguments).update(may_promote=hold)
                print(generation or f"Nothing to learn: fewer than {arguments.min_new} new runs, or too few in all.", flush=True)
            else:
                print("Another learner is at work on this log; nothing was done.", flush=True)
        finally:
            with suppress(LogError):
                log.release(LEASE, holder)


def _trainer(log: MeasurementStore, arguments: argparse.Namespace) -> OnlineTrainer:
    from perfguard.learning import OnlineTrainer

    return OnlineTrainer(log, predictor=arguments.predictor, min_new=arguments.min_new, max_rows=arguments.max_rows)


def _stay_in_the_background() -> None:
    with suppress(OSError, AttributeError):  # Windows has none
        os.nice(_NICENESS)
    os.environ["OMP_NUM_THREADS"] = "1"  # PyTorch and scikit-learn are not imported yet
    signal.signal(signal.SIGTERM, _as_interrupt)


def _as_interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _watch(trainer: OnlineTrainer, hold: Callable[[], bool], every_s: float) -> None:
    printed = ""
    while True:
        try:
            if hold():
                generation = trainer.update(may_promote=hold)
                news = "Watching." if generation is None else str(generation)
            else:
                news = "Another learner is at work; waiting."
        except LogError as error:
            news = f"{error} Trying again every {every_s:g} s."
        if news != printed:
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {news}", flush=True)
            printed = news
        time.sleep(every_s)


def add_weights_arguments(parser: argparse.ArgumentParser) -> None:
    """The words that ``perfguard weights`` takes."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    show = verbs.add_parser("list", help="list every generation, its errors, and whether it is in use")
    show.add_argument("--json", action="store_true", help="print JSON")
    back = verbs.add_parser("rollback", help="go back to the generation before the one in use")
    back.add_argument("id", nargs="?", help="a generation in use, or the beginning of its id (default: the one in use)")
    for verb in (show, back):
        verb.add_argument("--log", metavar="FILE|URL", help="default: PERFGUARD_LOG, else your own log")


def run_weights_command(arguments: argparse.Namespace) -> None:
    """Run the command with these arguments.

    Raises:
        PerfGuardError: for a log or an id that cannot be used.
    """
    with open_log(arguments.log, must_exist=True) as log:
        if arguments.verb == "list":
            _list(log.weights(), as_json=arguments.json)
        else:
            _roll_back(log, arguments.id)


def _list(generations: list[LoggedWeights], *, as_json: bool) -> None:
    if as_json:
        rows = [asdict(weights) for weights in generations]
        print(json.dumps(rows, indent=2, default=str))
        return
    if not generations:
        print("No weights were fine-tuned yet; the shipped ones are in use.")
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    for heading in ("id", "of", "made (UTC)", "state", "runs", "error on the newest runs", "on those kept back"):
        table.add_column(heading)
    for weights in generations:
        table.add_row(
            weights.weights_id[:12],
            escape(weights.predictor),
            f"{weights.created_at:%Y-%m-%d %H:%M:%S}",
            weights.state,
            str(weights.metrics.get("rows", "")),
            _errors(weights, "recent"),
            _errors(weights, "kept back"),
        )
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)


def _errors(weights: LoggedWeights, what: str) -> str:
    """Before and after, by quantity."""
    found = []
    for target in ("memory", "time"):
        before, after = (weights.metrics.get(f"{what} {target} {when}") for when in ("before", "after"))
        if before is not None and after is not None:
            found.append(f"{target} {before:.1%} → {after:.1%}")
    return ", ".join(found)


def _roll_back(log: MeasurementStore, weights_id: str | None) -> None:
    in_use = [weights for weights in log.weights() if weights.state == "promoted"]
    found = [weights for weights in in_use if weights.weights_id.startswith(weights_id or "")]
    if len(found) != 1:
        known = ", ".join(weights.weights_id[:12] for weights in in_use) or "none: the shipped weights are"
        raise LogError(f"Say which generation to roll back, by its id. In use: {known}.")
    back = log.roll_back_weights(found[0].weights_id)
    now = f"{back[:12]} is in use again" if back else "the shipped weights are in use again"
    print(f"{found[0].weights_id[:12]} is rolled back; {now}. Guards take them after their next run.")
