"""The ``perfguard`` command.

subject.py    what FILE.py, FILE.py:BUILD or FILE.onnx is, and how --set, --dim and --batch-size are read
script.py     how FILE.py is dry-run
predict.py    perfguard predict, dry-run
check.py      perfguard check
explain.py    perfguard explain
guards.py     the guard of these commands, and the log that it learns from
plan.py       perfguard plan
trainer.py    what it tries of a script of Hugging Face's Trainer
gpus.py       perfguard gpus
calibrate.py  perfguard calibrate
log.py        perfguard log, learn, weights, report
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from perfguard import __version__
from perfguard.exceptions import ConfigurationError, PerfGuardError

__all__ = ["COMMANDS_GROUP", "main"]

COMMANDS_GROUP = "perfguard.commands"
"""Entry-point group for further commands: a function of the words after the command's name."""


# The module of each command, and its help. The module is imported when the command is called, so that `perfguard --help` loads
# none of them. It has two functions: `add_NAME_arguments(parser)`, and `NAME(arguments)`, which returns the exit status or None.
# "-" is "_" there.
_COMMANDS = {
    "predict": ("predict", "predict memory and time of a workload on a GPU, or on several"),
    "dry-run": ("predict", "dry-run a training script, and predict its memory and time on a GPU"),
    "check": ("check", "check whether a workload fits its limits, as an exit status"),
    "plan": ("plan", "find the fastest way to run a training script on GPUs that fits, and learns the same"),
    "explain": ("explain", "explain the number that a trial of a study or a log got, stage by stage"),
    "gpus": ("gpus", "list the GPUs in the catalog"),
    "calibrate": ("calibrate", "measure some steps on this machine, so that predictions fit it"),
    "log": ("log", "show, export or clean the measurement log"),
    "learn": ("log", "fine-tune the weights on the log, and promote better ones"),
    "weights": ("log", "list the weights in the log, or go back to older ones"),
    "report": ("log", "write an HTML page about a study or the measurement log"),
}
_OF_SCRIPTS = ("predict", "dry-run", "check", "plan")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return the exit status.

    It is 0, 1 for an error that PerfGuard explains, 2 for wrong usage, 130 after Ctrl-C, and 141 where the reader of the output
    has gone. `perfguard check` has its own.

    Args:
        argv: the words. None: those of the process, which then runs nothing else.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    installed = {point.name: point for point in entry_points(group=COMMANDS_GROUP)}
    try:
        if words and words[0] in installed:
            installed[words[0]].load()(words[1:])
            return 0
        if words and words[0] in ("evaluate", "train", "leaderboard", "collect"):  # ours, but no part of the main distribution
            raise ConfigurationError(
                f"`perfguard {words[0]}` is not installed. It comes with perfguard-research, in a checkout of PerfGuard: "
                "pip install ./models"
            )
        takes_script = words[:1] and words[0] in _OF_SCRIPTS
        end = words.index("--") if takes_script and "--" in words else len(words)  # what follows are the script's own words
        own_words = _with_negative_values(words[:end])
        arguments = _parser(own_words, installed.values()).parse_args(own_words)
        arguments.own_process = argv is None
        arguments.words = words[end + 1 :]
        status: int | None = _function(arguments.command, arguments.command)(arguments)
        sys.stdout.flush()  # here, so that a broken pipe is noticed while it can be answered
    except PerfGuardError as error:
        print(f"perfguard: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as in `perfguard gpus | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
        return 141
    return status or 0


def _with_negative_values(words: Sequence[str]) -> list[str]:
    """Return ``words`` with each option joined to a negative value, such as "--max-memory=-1GiB".

    argparse takes "-1GiB" for an option, and says that the value is missing. Joined, the value is refused by what reads it.
    """
    joined: list[str] = []
    for word in words:
        if joined and re.fullmatch(r"--[\w-]+", joined[-1]) and re.match(r"-[.$\d]", word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _function(command: str, name: str) -> Callable[..., Any]:
    module = importlib.import_module(f"perfguard.cli.{_COMMANDS[command][0]}")
    function: Callable[..., Any] = getattr(module, name.replace("-", "_"))
    return function


def _parser(words: Sequence[str], installed: Iterable[EntryPoint]) -> argparse.ArgumentParser:
    """The parser of the command's line. Only the command that ``words`` name gets its arguments."""
    parser = argparse.ArgumentParser(prog="perfguard", description="Predict what a trial will cost before it starts.")
    parser.add_argument("--version", action="version", version=f"perfguard {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, text) in _COMMANDS.items():
        added = commands.add_parser(name, help=text)
        if name in words:
            _function(name, f"add_{name}_arguments")(added)
    for point in installed:  # listed here; they read their own words
        commands.add_parser(point.name, help=f"from {point.module.partition('.')[0]}; see `perfguard {point.name} --help`")
    return parser
