"""Scripts in processes of their own: forked by a server that has imported torch already, or begun from nothing."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

_IMPORTED = ["torch", "torch._meta_registrations", "perfguard.cli", "perfguard_models.guardnet", "perfguard_optuna"]
"""An `import` of all of it takes five seconds of processor time, which is most of what a small script takes."""


def processes() -> ForkServerContext:
    """Where to make processes: in place of `multiprocessing`. Its server begins with the first of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


def begin(*arguments: str, cwd: Path, printed: Path) -> BaseProcess:
    """Starts what `run_warm` runs; what it prints to both streams goes to the file ``printed``."""
    child = processes().Process(target=_as_script, args=(arguments, str(cwd), dict(os.environ), str(printed)))
    child.start()
    return child


def run_warm(*arguments: str, cwd: Path, timeout_s: float) -> tuple[int, str]:
    """Runs `python ARGUMENTS` in the folder ``cwd``; the first is a script, or "-m" and the second a module.

    Returns:
        The exit status, and what was printed to both streams.
    """
    with tempfile.NamedTemporaryFile(mode="r", encoding="utf-8") as printed:
        child = begin(*arguments, cwd=cwd, printed=Path(printed.name))
        child.join(timeout_s)
        if child.is_alive():
            child.kill()
            child.join()
            raise TimeoutError(f"{' '.join(arguments)} took more than {timeout_s} s:\n{printed.read()}")
        assert child.exitcode is not None
        return child.exitcode, printed.read()


def run_fresh(*arguments: object, timeout_s: float = 240, status: int = 0) -> str:
    """What `python ARGUMENTS` prints, in a process that has imported nothing yet. It finds the modules that this one finds."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == status, done.stdout + done.stderr[-4000:]
    return done.stdout


def _as_script(arguments: Sequence[str], cwd: str, environment: Mapping[str, str], printed: str) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    with Path(printed).open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        if arguments[0] == "-m":
            sys.argv[:] = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = arguments
            sys.path.insert(0, str(Path(arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out
