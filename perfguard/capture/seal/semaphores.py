"""Semaphores, locks and shared memory of multiprocessing without files in /dev/shm, which Landlock refuses to make there.

A semaphore is an eventfd(2), which a process shares with those that it forks. Shared memory is a file of the scratch folder.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

_RECURSIVE = 0
"""Kind of a lock that its owner may take again (multiprocessing.synchronize.RECURSIVE_MUTEX)."""


class _NotSent:
    """What names a semaphore to other processes: those that were forked have it, and to others it cannot be sent."""

    def __reduce__(self) -> NoReturn:
        raise OSError("A dry run cannot share a semaphore with a process that is spawned here. Use the start method 'fork'.")


class Semaphore:
    """Takes the place of `_multiprocessing.SemLock`, and has its methods.

    Args:
        kind: 0 for a recursive lock, 1 for a semaphore.
        value: how often it can be taken at first.
        maxvalue: how often it can be taken at most.
        name, unlink: of the file that it does not have.
    """

    SEM_VALUE_MAX = 2**31 - 1
    """SEM_VALUE_MAX of glibc (limits.h)."""
    name = None
    handle = _NotSent()

    def __init__(self, kind: int, value: int, maxvalue: int, name: str, unlink: bool) -> None:
        self.kind = kind
        self.maxvalue = maxvalue
        self._descriptor = os.eventfd(value, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._num_taken = 0
        self._owner: int | None = None

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Take it, and return whether that was done within ``timeout`` seconds. None: wait for ever."""
        if self.kind == _RECURSIVE and self._is_mine():
            self._num_taken += 1
            return True
        ends_at = None if timeout is None else time.monotonic() + max(0.0, timeout)
        while not self._take():
            left_s = 0.0 if not block else None if ends_at is None else ends_at - time.monotonic()
            if left_s is not None and left_s <= 0:
                return False
            select.select([self._descriptor], [], [], left_s)
        self._num_taken += 1
        self._owner = threading.get_ident()
        return True

    def _take(self) -> bool:
        with suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)
            return True
        return False

    def release(self) -> None:
        """Give it back."""
        if self.kind == _RECURSIVE:
            if not self._is_mine():
                raise AssertionError("attempt to release recursive lock not owned by thread")
            if self._num_taken > 1:
                self._num_taken -= 1
                return
        elif self._get_value() >= self.maxvalue:
            raise ValueError("semaphore or lock released too many times")
        self._num_taken -= 1
        os.eventfd_write(self._descriptor, 1)

    def _count(self) -> int:
        return self._num_taken

    def _is_mine(self) -> bool:
        return self._num_taken > 0 and self._owner == threading.get_ident()

    def _get_value(self) -> int:
        lines = Path(f"/proc/self/fdinfo/{self._descriptor}").read_text().splitlines()
        return next(int(line.split()[1], 16) for line in lines if line.startswith("eventfd-count"))

    def _is_zero(self) -> bool:
        return self._get_value() == 0

    def _after_fork(self) -> None:
        self._num_taken = 0

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


def share_without_files(scratch: str, remove: Callable[[str], None] = os.unlink) -> None:
    """Let multiprocessing make semaphores and shared memory without /dev/shm."""
    opened: Any = os.open
    semaphores: Any = import_module("_multiprocessing")
    memory: Any = import_module("_posixshmem")
    semaphores.SemLock = Semaphore
    memory.shm_open = lambda path, flags, mode=0o777: opened(f"{scratch}/shm-{path.strip('/')}", flags, mode)
    memory.shm_unlink = lambda path: remove(f"{scratch}/shm-{path.strip('/')}")
