"""Python's audit events: a seal for Python's own code, where the kernel has none (macOS, Windows, old or restricted kernels).

A library in another language is not heard. So a dry run behind this seal counts as not sealed, and the summary says so.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import Any

import psutil

_CHANGES = {
    "os.remove": 1, "os.rename": 2, "os.rmdir": 1, "os.mkdir": 1, "os.link": 2, "os.symlink": 2, "os.truncate": 1, "os.chmod": 1,
    "os.chown": 1, "os.utime": 1, "os.setxattr": 1, "os.removexattr": 1, "sqlite3.connect": 1,
}  # fmt: skip
"""Audit events that change files, and how many of their arguments are paths (docs.python.org/3/library/audit_events.html)."""
_PROGRAMS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile"}
_CONNECTIONS = {"socket.connect", "socket.sendto", "socket.sendmsg", "socket.bind", "socket.getaddrinfo"}
_SIGNALS = {"os.kill", "os.killpg"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def refuse_changes(scratch: str | None, *, network: bool) -> None:
    """Refuse what Python's own code would change outside of ``scratch``. Refuse programs, signals, and connections too.

    Args:
        scratch: the folder that may be changed. None: there is none.
        network: allow connections.
    """
    sys.addaudithook(_hook(scratch, network))


def _hook(scratch: str | None, network: bool) -> Callable[[str, tuple[Any, ...]], None]:
    def may_write(path: object) -> bool:
        if isinstance(path, int) or path is None:
            return True
        name = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        if name in ("", ":memory:", os.devnull):
            return True
        return scratch is not None and os.path.abspath(name).startswith(f"{scratch}/")

    def hear(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            writes = set(mode) & set("wax+") if mode is not None else (flags or 0) & _WRITES
            if writes and not may_write(path):
                _refuse(errno.EROFS, path)
        elif event in _CHANGES:
            for path in args[: _CHANGES[event]]:
                if not may_write(path) and not (event == "os.symlink" and path is args[0]):
                    _refuse(errno.EROFS, path)
        elif event in _PROGRAMS:
            _refuse(errno.EPERM, "a dry run starts no program on this system")
        elif event in _CONNECTIONS and not network:
            _refuse(errno.ENETUNREACH, None)
        elif event in _SIGNALS and not _is_started_here(args[0]):
            _refuse(errno.EPERM, None)

    return hear


def _is_started_here(process: int) -> bool:
    """Whether it is this process, or one that it has started."""
    if process == os.getpid():
        return True
    try:
        return process > 0 and any(one.pid == os.getpid() for one in psutil.Process(process).parents())
    except psutil.Error:
        return False


def _refuse(number: int, path: object) -> None:
    raise OSError(number, os.strerror(number), path)
