"""The ``perfguard`` command."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import NamedTuple

from perfguard import __version__
from perfguard.cli._compiler import compiler_deferred
from perfguard.exceptions import ConfigurationError, PerfGuardError

__all__ = ["COMMANDS_GROUP", "main"]

COMMANDS_GROUP = "perfguard.commands"
"""Entry-point group for further commands: a function of the words after the command's name."""
_OF_RESEARCH = ("evaluate", "train", "leaderboard", "collect")


class _Command(NamedTuple):
    """A command. Its module is imported when it is called: its imports are no other command's."""

    module: str
    add_arguments: str
    """Name of the function of the module that adds the command's words to a parser."""
    run: str
    """Name of the function of the module that runs it."""
    help: str
    predicts: bool = False
    """Whether it predicts and does nothing else, so that PyTorch's compiler need not be loaded."""


_COMMANDS = {
    "predict": _Command("_predict", "add_arguments", "show_prediction", "predict memory and time of a workload on a GPU", True),
    "check": _Command("_check", "add_arguments", "check", "check whether a workload fits its limits, as an exit status", True),
    "rank": _Command("_rank", "add_arguments", "show_ranking", "order GPUs by speed or cost, and show which ones fit", True),
    "gpus": _Command("_gpus", "add_arguments", "show_gpus", "list the GPUs in the catalog"),
    "log": _Command("_log", "add_arguments", "run_log_command", "show, export, import or clean the measurement log"),
    "report": _Command("_report", "add_arguments", "write_report", "write an HTML page about a study or the measurement log"),
    "learn": _Command(
        "_learn", "add_learn_arguments", "learn", "fine-tune the weights on the log, and promote them if they are better"
    ),
    "weights": _Command(
        "_learn",
        "add_weights_arguments",
        "run_weights_command",
        "list the generations of weights in the log, or go back to an older one",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return the exit status.

    It is 0, 1 for an error that PerfGuard explains, 2 for wrong usage and 130 after Ctrl-C. `perfguard check` has its own.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    installed = {point.name: point for point in entry_points(group=COMMANDS_GROUP)}
    try:
        if words and words[0] in installed:
            installed[words[0]].load()(words[1:])
            return 0
        if words and words[0] in _OF_RESEARCH:
            raise ConfigurationError(
                f"`perfguard {words[0]}` comes with perfguard-research. In a checkout of PerfGuard: pip install ./models"
            )
        arguments = _parser(words, installed.values()).parse_args(words)
        arguments.own_process = argv is None
        command = _COMMANDS[arguments.command]
        run = getattr(_module(command), command.run)
        with compiler_deferred() if arguments.own_process and command.predicts else nullcontext():
            status: int | None = run(arguments)
    except PerfGuardError as error:
        print(f"perfguard: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status or 0


def _module(command: _Command) -> ModuleType:
    return importlib.import_module(f"perfguard.cli.{command.module}")


def _parser(words: Sequence[str], installed: Iterable[EntryPoint]) -> argparse.ArgumentParser:
    """The parser of the command's line. Only the command that ``words`` name gets its arguments."""
    parser = argparse.ArgumentParser(prog="perfguard", description="Predict what a trial will cost before it starts.")
    parser.add_argument("--version", action="version", version=f"perfguard {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        added = commands.add_parser(name, help=command.help)
        if name in words:
            getattr(_module(command), command.add_arguments)(added)
    for point in installed:  # listed here; they read their own words
        commands.add_parser(point.name, help=f"from {point.module.partition('.')[0]}; see `perfguard {point.name} --help`")
    return parser
