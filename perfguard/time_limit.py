"""A hard limit on the time of a call: it ends a trial that hangs, and says where it stood.

In the main thread a signal interrupts the call, and also a wait: a sleep, a read, a lock. Other threads get no signals in Python.
There the call ends at its next line of Python, so a wait comes to its own end first. Nothing ends a call into C that does not
return, for instance one that waits for a GPU that hangs.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any, TypeVar

from perfguard.exceptions import frame_of_the_user
from perfguard.quantities import format_seconds

T = TypeVar("T")
_SIGNAL: Any = getattr(signal, "SIGURG", None)
"""It is ignored by default, so one that comes late does no harm. For this reason Go interrupts its threads with it, too
(runtime/signal_unix.go, sigPreempt). SIGALRM and its timer stay the user's. None: on Windows."""

_locks: dict[int, threading.RLock] = {}
"""Of each thread with a limit. A thread that holds its own is not interrupted."""


class TimeLimitReached(BaseException):
    """A call has reached its hard time limit. As Ctrl-C does, this passes an ``except Exception`` of the code that it ends."""


def reason_of(limit_s: float) -> str:
    """Return why a trial is ended after ``limit_s`` seconds, in words."""
    return f"ran for {format_seconds(limit_s)}, hard_time_limit"


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let the hard time limit of this thread wait until the block ends: half of a row, or of an import, would do harm."""
    with _locks.get(threading.get_ident(), nullcontext()):
        yield


def call_within(limit_s: float | None, call: Callable[[], T]) -> T:
    """Return what ``call`` returns. A limit of None is no limit.

    Raises:
        TimeLimitReached: if it does not end within ``limit_s`` seconds. The message has the line of the user's code.
    """
    if limit_s is None:
        return call()
    thread = threading.get_ident()
    is_over = False
    lock = _locks[thread] = threading.RLock()
    handler: Any = None  # the user's own
    reason: list[str] = []  # empty until the time is over
    by_signal = _SIGNAL is not None and threading.current_thread() is threading.main_thread()

    def interrupt() -> None:
        with lock:
            if not is_over:
                frame = frame_of_the_user(sys._current_frames().get(thread))
                at = frame and f"; it stood at {frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
                reason.append(f"{reason_of(limit_s)}{at or ''}")
                if by_signal:
                    signal.pthread_kill(thread, _SIGNAL)
                else:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeLimitReached))

    def on_signal(number: int, frame: FrameType | None) -> None:
        if reason and not is_over:
            raise TimeLimitReached(reason[0])

    def end() -> None:
        nonlocal is_over
        with lock:  # an interrupt that is under way comes right after it
            is_over = True
        _locks.pop(thread, None)
        timer.cancel()
        if by_signal:
            signal.signal(_SIGNAL, handler or signal.SIG_DFL)

    timer = threading.Timer(limit_s, interrupt)
    timer.daemon = True
    try:
        try:
            handler = signal.signal(_SIGNAL, on_signal) if by_signal else None
            timer.start()
            return call()
        finally:
            end()
    except (TimeLimitReached, Exception) as error:  # what was interrupted may raise another error in its place
        end()  # which may have been interrupted, too
        if not reason:
            raise
        raise TimeLimitReached(reason[0]) from error
