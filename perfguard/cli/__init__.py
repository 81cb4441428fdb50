"""The ``perfguard`` command."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from importlib.metadata import EntryPoint, entry_points

from perfguard.cli._collect import add_arguments as add_collect_arguments
from perfguard.cli._compiler import compiler_deferred
from perfguard.cli._learn import add_learn_arguments, add_weights_arguments
from perfguard.cli._log import add_arguments as add_log_arguments
from perfguard.cli._subject import add_arguments as add_subject_arguments
from perfguard.exceptions import ConfigurationError, PerfGuardError
from perfguard.predictor import DEFAULT_PREDICTOR

__all__ = ["COMMANDS_GROUP", "main"]

COMMANDS_GROUP = "perfguard.commands"
"""Entry-point group for further commands: a function of the words after the command's name."""
_ELSEWHERE = {
    "train": "perfguard-research, in a checkout of PerfGuard: pip install ./models",
    "leaderboard": "perfguard-research, in a checkout of PerfGuard: pip install ./models",
}
"""Our own commands that are no part of the main distribution, and how to install them."""
_RUN_BY = {
    "predict": ("_predict", "show_prediction"),
    "rank": ("_rank", "show_ranking"),
    "evaluate": ("_evaluate", "evaluate_table"),
    "collect": ("_collect", "collect_rows"),
    "gpus": ("_gpus", "show_gpus"),
    "log": ("_log", "run_log_command"),
    "learn": ("_learn", "learn"),
    "weights": ("_learn", "run_weights_command"),
}
"""The module and the function that run a command. A module is imported when its command runs."""

_PREDICTS = ("predict", "rank")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 for an error that PerfGuard explains, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    installed = {point.name: point for point in entry_points(group=COMMANDS_GROUP)}
    try:
        if words and words[0] in installed:
            installed[words[0]].load()(words[1:])
            return 0
        if words and words[0] in _ELSEWHERE:
            raise ConfigurationError(f"`perfguard {words[0]}` is not installed. It comes with {_ELSEWHERE[words[0]]}.")
        arguments = _parser(installed.values()).parse_args(words)
        arguments.own_process = argv is None
        module, function = _RUN_BY[arguments.command]
        run = getattr(importlib.import_module(f"perfguard.cli.{module}"), function)
        with compiler_deferred() if arguments.own_process and arguments.command in _PREDICTS else nullcontext():
            run(arguments)
    except PerfGuardError as error:
        print(f"perfguard: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser(installed: Iterable[EntryPoint]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="perfguard", description="Know before a trial starts what it will cost.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    predict = commands.add_parser("predict", help="memory and time of one workload on a device")
    add_subject_arguments(predict)
    predict.add_argument("--gpu", default="auto", help='a name from `perfguard gpus`, "auto" or "cpu" (default: auto)')
    predict.add_argument("--mig", metavar="auto|PROFILE", help="the smallest MIG profile that fits, or a prediction on this one")
    predict.add_argument("--mps", type=float, metavar="SHARE", help="with this share of the multiprocessors, within 0 and 1")
    predict.add_argument("--explain", action="store_true", help="where the bytes and the time are, by module and operator")
    predict.add_argument("--plot", metavar="FILE.png", help="draw the memory over the step")
    predict.add_argument("--measure", action="store_true", help="run it too: an ONNX file on the CPU, with ONNX Runtime")
    predict.add_argument("--json", action="store_true", help="data on standard output")

    rank = commands.add_parser("rank", help="GPUs by how fast, how cheap, and whether it fits")
    add_subject_arguments(rank)
    rank.add_argument("--gpus", default="all", metavar="all|a100,t4", help="names from `perfguard gpus` (default: all)")
    rank.add_argument("--price-table", metavar="PRICES.csv", help="columns gpu and price_per_hour, in any currency")
    rank.add_argument("--json", action="store_true", help="data on standard output")

    evaluate = commands.add_parser("evaluate", help="hold a predictor against a table of measured runs")
    evaluate.add_argument("table", metavar="TABLE", help="a table of measured runs, CSV, compressed or not")
    evaluate.add_argument("--predictor", default=DEFAULT_PREDICTOR, help=f"its name (default: {DEFAULT_PREDICTOR})")
    evaluate.add_argument("--out", metavar="FILE.csv", help="write the table with the predictions")
    evaluate.add_argument("--json", metavar="FILE.json", help="write the report as data")

    add_collect_arguments(commands.add_parser("collect", help="rows of one's own: networks run and measured on this machine"))

    gpus = commands.add_parser("gpus", help="the GPUs in the catalog")
    gpus.add_argument("--json", action="store_true", help="data on standard output")

    add_log_arguments(commands.add_parser("log", help="what the measurement log holds, and out of it and into it"))
    add_learn_arguments(
        commands.add_parser("learn", help="fine-tune the weights on the log, and promote them if they are better")
    )
    add_weights_arguments(commands.add_parser("weights", help="the generations of weights in the log, and back to an older one"))

    for point in installed:  # listed here; they read their own words
        commands.add_parser(point.name, help=f"of {point.module.partition('.')[0]}; see `perfguard {point.name} --help`")
    return parser
