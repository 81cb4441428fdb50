"""The training script of ``perfguard dry-run``: it runs as ``python train.py`` would, but nothing is computed or written."""

from __future__ import annotations

import functools
import io
import os
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from perfguard.capture import Answer, Ask, DryRuns
from perfguard.cli.trainer import ask_for_setup
from perfguard.exceptions import CaptureError

if TYPE_CHECKING:
    from perfguard.cli.trainer import Setup
    from perfguard.devices import Device
    from perfguard.workload import CapturedTrial

MOST_SECONDS = 300.0
"""How long a dry run may take. A script reads its data anew each time, and the person who waits has Ctrl-C."""


def capture_script(
    path: str,
    words: Sequence[str],
    device: Device,
    *,
    world_size: int | None = None,
    spares: bool = True,
    choose: Callable[[Setup], Setup] | None = None,
    network: bool = False,
) -> CapturedTrial:
    """Return what a training script with these words would run on ``device``. It runs in a process of its own.

    Args:
        path: the script, or "-m" and the name of a module.
        words: what it gets.
        device: where it would run.
        world_size: number of processes, of which it is the first. None: the environment or the script itself says it.
        spares: give all batches for a while, before loaders are cut short. Without, the steps of the script may not be seen.
        network: leave the network open.
        choose: returns how Hugging Face's Trainer runs a step instead of how the script says. It is called in this process.

    Raises:
        CaptureError: if the dry run does not show it. The message names the line where it ended.
        TooLargeError: if a tensor of the script does not fit into any memory.
    """
    module = _module_of(path)
    file = Path(path if module is None else module.replace(".", "/") + ".py")
    if file.is_file() and "mlflow" in file.read_text(errors="replace") and find_spec("mlflow"):
        import mlflow  # noqa: F401  # a dry run silences what was imported before it
    run = functools.partial(_run, path, words, world_size, choose is not None)
    runs = DryRuns(run, device, most_seconds=MOST_SECONDS + 5, spares=spares, network=network)
    try:
        return runs.capture(lambda setup: Answer("setup", choose(setup)) if choose else _has_no_parameters(setup))
    except CaptureError as error:
        text = (
            str(error).replace("build=...", f"{path}:BUILD").replace("dry_run_network=True", "--dry-run-network")
        )  # an engine's words are those of Python
        raise CaptureError(text.replace("The objective", path).replace("the objective", path)) from error
    finally:
        runs.close()


def _run(path: str, words: Sequence[str], world_size: int | None, asks: bool, ask: Ask) -> None:
    """Run in the child. Ends well with the script's end, and with ``sys.exit(0)``."""
    sys.argv = [path, *words]
    if asks:
        ask_for_setup(ask)
    if world_size is not None or {"WORLD_SIZE", "RANK"} <= os.environ.keys():
        from perfguard.capture.ranks import gpus_of_a_node, torchrun_variables

        if world_size is not None:
            os.environ |= torchrun_variables(world_size)
        else:  # whoever states these two need not state the others, which libraries ask for
            stated = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
            os.environ |= torchrun_variables(*stated, gpus_of_a_node()) | {**os.environ}
    module = _module_of(path)
    sys.path.insert(0, str(Path.cwd() if module else Path(path).resolve().parent))
    sys.dont_write_bytecode = True
    _set_alarm(MOST_SECONDS)  # before the process is killed, which could not name the line
    said = io.StringIO()
    said.fileno = lambda: 2  # type: ignore[method-assign]  # for faulthandler and others, which want a real file
    try:
        with redirect_stderr(said):
            if module:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):  # argparse has said why
            words_of_end = end.code if isinstance(end.code, str) else (said.getvalue().strip().splitlines() or [""])[-1]
            status = f"status {end.code if isinstance(end.code, int) else 1}: {words_of_end}"
            raise ExitError(status).with_traceback(end.__traceback__) from None
    finally:
        _set_alarm(0)


def _module_of(path: str) -> str | None:
    return path.removeprefix("-m ") if path.startswith("-m ") else None


class ExitError(Exception):
    """The script ended with another status than 0."""


def _has_no_parameters(*question: object) -> Answer:
    raise AssertionError(question)


def _set_alarm(seconds: float) -> None:
    if hasattr(signal, "setitimer"):  # Windows has none
        signal.signal(signal.SIGALRM, _stop)
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise TimeoutError(f"it has not ended after {MOST_SECONDS:g} s")
