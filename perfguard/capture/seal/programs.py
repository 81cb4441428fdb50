"""Programs that an objective starts in a dry run: they run inside the seal, and may take two seconds of processor time together.

One that takes longer trains. It is ended, and so is the dry run: what it trains is not seen here.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from contextlib import suppress
from typing import Any

import psutil

from perfguard.exceptions import CaptureError

_STARTS = {"subprocess.Popen", "os.system", "os.posix_spawn", "os.spawn"}
"""Python's audit events of a program that starts (docs.python.org/3/library/audit_events.html)."""


class StartsTrainingError(CaptureError):
    """The objective starts a program that trains. So no dry run can see what it trains."""


class _TrainsElsewhere(BaseException):
    """Ends the objective."""


class Programs:
    """Follows the programs that this process starts.

    Args:
        most_cpu_s: processor time that they may take together, in seconds.
        pause_s: seconds between two looks at them.
    """

    def __init__(self, *, most_cpu_s: float = 2.0, pause_s: float = 0.05) -> None:
        self._most_cpu_s = most_cpu_s
        self._pause_s = pause_s
        self._process = psutil.Process()
        self._own_command = self._process.cmdline()
        self._main = threading.main_thread().ident
        self._taken_s: dict[int, float] = {}
        """Processor time of each program, by the number of its process."""
        self._watch: threading.Thread | None = None
        self._is_over = threading.Event()
        self.problem: StartsTrainingError | None = None
        """Why the dry run ends. None: no program has taken too long."""

    def follow(self) -> None:
        """Follow the programs from now on. There is no way back."""
        sys.addaudithook(self._hear)

    def end(self) -> None:
        """End all processes that this one has started: nothing of a dry run goes on after it."""
        self._is_over.set()
        if os.getpid() == self._process.pid:  # else the objective has forked
            for one in self._process.children(recursive=True):
                with suppress(psutil.Error):
                    one.kill()

    def _hear(self, event: str, _: tuple[Any, ...]) -> None:
        if event not in _STARTS or self._is_over.is_set() or os.getpid() != self._process.pid:
            return
        if self.problem is not None:
            raise _TrainsElsewhere
        if self._watch is None:
            self._watch = threading.Thread(target=self._look, daemon=True)
            self._watch.start()

    def _look(self) -> None:
        while not self._is_over.wait(self._pause_s):
            programs = [one for one in self._process.children(recursive=True) if self._is_program(one)]
            for one in programs:
                with suppress(psutil.Error):
                    times = one.cpu_times()
                    self._taken_s[one.pid] = times.user + times.system
            if sum(self._taken_s.values()) > self._most_cpu_s:
                self._end(programs)
                return

    def _is_program(self, process: psutil.Process) -> bool:
        """Whether it is no process of multiprocessing, which runs a part of the objective."""
        with suppress(psutil.Error):
            command = process.cmdline()
            return command != self._own_command and not any("multiprocessing" in word for word in command)
        return False

    def _end(self, programs: list[psutil.Process]) -> None:
        self.problem = StartsTrainingError(
            f"The objective starts a program that takes more than {self._most_cpu_s:g} s of processor time, so it trains. "
            "A dry run sees only what the objective's own process trains. Describe what the program runs: build=..."
        )
        for one in programs:
            with suppress(psutil.Error):
                one.kill()
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._main or 0), ctypes.py_object(_TrainsElsewhere))
