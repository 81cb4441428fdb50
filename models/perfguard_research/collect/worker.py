"""The process in which configurations run: whatever one of them does to it costs that one row.

The worker is forked from a server that has imported everything but has never touched CUDA, so that a fresh one costs little more
than a CUDA context. Both sides exchange lines of JSON over a pipe.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from perfguard.devices import Device
from perfguard.exceptions import MeasuringError
from perfguard_research.collect.backend import Backend, Card, Processor
from perfguard_research.collect.run import Row, run_recipe
from perfguard_research.tables.recipe import Recipe

_ROW_LIMIT_S = 60.0
_COMPILED_LIMIT_S = 240.0
_START_LIMIT_S = 120.0
_POLL_S = 0.1
_ROWS = 50
"""After so many, a new process: kernels that were loaded stay in the context and make it grow."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])


def preload_libraries() -> None:
    """Have the libraries of vision and text imported once, by the fork server; has no effect once that runs."""
    _context.set_forkserver_preload([__name__, "perfguard_research.collect.libraries"])


class Worker:
    """A process that runs one configuration after another, replaced when it has crashed, hung, aged or lost its GPU.

    Args:
        device: on which it runs.
        limit_bytes: the memory that it may take. None: all there is.
        row_limit_s: seconds for one configuration. A compiled one has four times as long.
    """

    def __init__(self, device: Device, *, limit_bytes: int | None = None, row_limit_s: float = _ROW_LIMIT_S) -> None:
        self._device = device
        self._limit_bytes = limit_bytes
        self._row_limit_s = row_limit_s
        self._process: Any = None
        self._pipe: Connection | None = None
        self.rows = 0
        """Number of recipes that the present process has run."""
        self.starts = 0
        self.facts: dict[str, str] = {}

    @property
    def last_pid(self) -> int:
        """Id of the last process that started; it may have ended since."""
        return int(self.facts.get("pid", 0))

    def start(self) -> None:
        """Start a process, unless there is one that is not too old.

        Raises:
            MeasuringError: if it cannot be started. The message has the process's error.
        """
        if self._process is not None and self.rows >= _ROWS:
            self.close()
        if self._process is not None:
            return
        self._pipe, theirs = _context.Pipe()
        words = theirs, self._device, self._limit_bytes, torch.get_num_threads()
        self._process = _context.Process(target=_serve, args=words, daemon=True)
        self._process.start()
        theirs.close()
        self.rows, self.starts = 0, self.starts + 1
        hello = self._answer(_START_LIMIT_S, lambda: False)
        if not isinstance(hello, dict) or "error" in hello:
            reason = hello["error"] if isinstance(hello, dict) else hello
            self.close()
            raise MeasuringError(f"No process could be started on {self._device.name}: {reason}")
        self.facts = hello

    def run(self, recipe: Recipe, *, long: bool, stop: Callable[[], bool]) -> Row | None:
        """Measure ``recipe``; None if ``stop()`` ended it early.

        Raises:
            MeasuringError: if no process can be started any more.
        """
        self.start()
        assert self._pipe is not None
        self.rows += 1
        limit_s = self._row_limit_s * (_COMPILED_LIMIT_S / _ROW_LIMIT_S if recipe.compiled else 1)
        start = time.perf_counter()
        try:
            self._pipe.send_bytes(json.dumps({"recipe": recipe.to_json(), "long": long}).encode())
            answer = self._answer(limit_s, stop)
        except OSError:
            answer = self._exit_reason()
        if isinstance(answer, dict):
            if answer["status"] == "failed" or "could not be freed" in answer["note"]:
                self.close()  # an error of CUDA stays with its process
            return answer
        self.close()
        if answer == "stopped":
            return None
        status = "timeout" if answer == "no answer" else "failed"
        note = f"given up after {limit_s:g} s" if status == "timeout" else answer
        return {"status": status, "note": note, "run_s": f"{time.perf_counter() - start:.6g}"}

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process.close()
            self._process = None
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def _answer(self, limit_s: float, stop: Callable[[], bool]) -> Row | str:
        """The process's reply, or why there is none."""
        assert self._pipe is not None
        end = time.monotonic() + limit_s
        while not self._pipe.poll(_POLL_S):
            if stop():
                return "stopped"
            if time.monotonic() > end:
                return "no answer"
        try:
            answer: Row = json.loads(self._pipe.recv_bytes())
            return answer
        except (EOFError, OSError):
            return self._exit_reason()

    def _exit_reason(self) -> str:
        self._process.join(5)
        code = self._process.exitcode
        if code is None or code >= 0:
            return f"the process ended with status {code}"
        return f"the process was ended by {signal.Signals(-code).name}"


def _serve(pipe: Connection, device: Device, limit_bytes: int | None, num_threads: int) -> None:
    """Main loop of the worker: send the facts of the device, then run recipes until the pipe closes."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent decides; it kills
    warnings.simplefilter("ignore")
    _be_quiet()
    torch.set_num_threads(num_threads)
    try:
        place = _place(device)
        _load_libraries(device, place)
        gc.freeze()  # each run looks for garbage first; among all that was imported that takes a third of a second
        if limit_bytes is not None:
            place.limit(limit_bytes)
        hello = {**place.facts(), "pid": str(os.getpid())}
    except Exception as error:
        pipe.send_bytes(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        return
    pipe.send_bytes(json.dumps(hello).encode())
    kinds = set[str]()
    while True:
        try:
            request = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        recipe = Recipe.from_json(request["recipe"])
        pipe.send_bytes(json.dumps(run_recipe(recipe, device, place, long=request["long"])).encode())
        if recipe.kind not in kinds:  # its library was imported
            kinds.add(recipe.kind)
            gc.collect()
            gc.freeze()


def _place(device: Device) -> Backend:
    if device.kind == "cpu":
        return Processor()
    torch.cuda.init()
    torch.ones(1, device="cuda").add_(1)  # the context, before anything is measured
    try:
        import pynvml

        pynvml.nvmlInit()  # a session that stays open makes those of the probes cheap
    except Exception:
        pass  # the probes say so
    return Card(device)


def _load_libraries(device: Device, place: Backend) -> None:
    """One small step of each kind, so that the first rows are not charged for what PyTorch loads when it is first used."""
    sizes = {"style": "plain", "norm": "batch", "activation": "relu", "kernel": 3, "width": 8, "depth": 1, "down": []}
    sizes |= {"img_size": 8, "classes": 2}
    recipe = Recipe(space="vision", kind="cnn", model="", family="", sizes=sizes, batch_size=2, optimizer="adamw")
    row = run_recipe(recipe, device, place)
    if row["status"] != "ok":
        raise MeasuringError(f"a first small run {row['status']}: {row['note']}")


def _be_quiet() -> None:
    """Other libraries' words on each of thousands of networks would hide ours."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    if "transformers" in sys.modules:
        sys.modules["transformers"].logging.set_verbosity_error()
