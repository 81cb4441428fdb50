"""The process in which configurations run: whatever one of them does to it costs that one row.

It is forked from a server that has imported everything but has never touched CUDA, so that a fresh one costs little more than a
CUDA context.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import time
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch

from perfguard.devices import Device
from perfguard.exceptions import MeasuringError
from perfguard_research.collect.run import Columns, place_of, run_row
from perfguard_research.collect.spaces import TEXT
from perfguard_research.networks import Network
from perfguard_research.tables import MeasuredRow

_context = multiprocessing.get_context("forkserver")


class Worker:
    """A process that runs one configuration after another, replaced when it has crashed, hung, aged or lost its GPU.

    Args:
        device: on which it runs.
        limit_bytes: the memory that it may take. None: all there is.
        row_limit_s: seconds for one configuration. A compiled one has four times as long.
        most_rows: after so many, a new process: kernels that were loaded stay in the context and make it grow.
    """

    def __init__(self, device: Device, *, limit_bytes: int | None = None, row_limit_s: float = 60.0, most_rows: int = 50) -> None:
        self._device = device
        self._limit_bytes = limit_bytes
        self._row_limit_s = row_limit_s
        self._most_rows = most_rows
        self._process: Any = None
        self._pipe: Connection
        self._rows = 0

    @property
    def pid(self) -> int | None:
        """Id of the process; None: there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start a process, unless there is one that is not too old.

        Raises:
            MeasuringError: if it cannot be started. The message has the process's error.
        """
        if self._process is not None and self._rows < self._most_rows:
            return
        self.close()
        # Else the first row of each process would be charged for the memory of the networks' libraries. Only those are imported
        # that the choice of spaces has found to work.
        libraries = ["timm", "torchvision.models", *(f"transformers.models.{name}.modeling_{name}" for name in TEXT)]
        there = [name for name in libraries if name.partition(".")[0] in sys.modules]
        _context.set_forkserver_preload([__name__, *there])
        self._pipe, theirs = _context.Pipe()
        arguments = theirs, self._device, self._limit_bytes, torch.get_num_threads()
        self._process = _context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self._rows = 0
        if (hello := self._answer(120.0)) != {}:
            self.close()
            raise MeasuringError(f"No process could be started on {self._device.name}: {hello}")

    def run(self, row: MeasuredRow, *, until: float = float("inf")) -> Columns | None:
        """Measure ``row``; None if it was not done at the time ``until`` of ``time.monotonic()``.

        Raises:
            MeasuringError: if no process can be started any more.
        """
        self.start()
        self._rows += 1
        limit_s = self._row_limit_s * (4 if row.compiled else 1)
        answer = self._answer(min(limit_s, until - time.monotonic()), row)
        if isinstance(answer, dict) and answer["status"] != "failed" and "could not be freed" not in answer["note"]:
            return answer
        self.close()  # an error of CUDA stays with its process
        if answer:
            return answer if isinstance(answer, dict) else {"status": "failed", "note": answer}
        return None if time.monotonic() >= until else {"status": "timeout", "note": f"given up after {limit_s:g} s"}

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process.close()
            self._pipe.close()
            self._process = None

    def _answer(self, limit_s: float, row: MeasuredRow | None = None) -> Columns | str:
        """The process's reply (to ``row``); or why there is none, empty: it took too long."""
        try:
            if row is not None:
                self._pipe.send(row)
            answer: Columns | str = self._pipe.recv() if self._pipe.poll(max(limit_s, 0.0)) else ""
            return answer
        except (EOFError, OSError):
            self._process.join(5)
            code = self._process.exitcode
            is_signal = code is not None and code < 0
            return (
                f"the process was ended by {signal.Signals(-code).name}" if is_signal else f"the process ended with status {code}"
            )


def _serve(pipe: Connection, device: Device, limit_bytes: int | None, num_threads: int) -> None:
    """Main loop of the worker: say that it is ready, then run rows until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides; it kills
    warnings.simplefilter("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # its words on each of thousands of networks would hide ours
    if "transformers" in sys.modules:
        sys.modules["transformers"].logging.set_verbosity_error()
    torch.set_num_threads(num_threads)
    try:
        place = place_of(device)
        # A small step, so that the first rows are not charged for what PyTorch loads when it is first used.
        sizes = {"style": "plain", "norm": "batch", "activation": "relu", "kernel": 3, "width": 8, "depth": 1, "down": []}
        network = Network(name="perfguard:cnn", config=sizes | {"img_size": 8, "classes": 2})
        small = MeasuredRow(
            table="collected", source="", family="", network=network, mode="train", gpu=device.id, batch_size=2, optimizer="adamw"
        )
        row = run_row(small, device, place)
        if row["status"] != "ok":
            raise MeasuringError(f"a first small run {row['status']}: {row['note']}")
        gc.freeze()  # each run looks for garbage first; among all that was imported that takes a third of a second
        if limit_bytes is not None:
            place.limit(limit_bytes)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    pipe.send({})
    while True:
        try:
            row_to_run = pipe.recv()
        except (EOFError, OSError):
            return
        pipe.send(run_row(row_to_run, device, place))
