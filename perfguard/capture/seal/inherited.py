"""What a forked process has from the process before: open files, connections, shared memory. It makes all of that its own."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import perfguard.capture.seal.linux as linux
from perfguard.pytorch import objects_of

_FIXED = 0x10
_ANONYMOUS_SHARED = 0x21
"""MAP_FIXED, and MAP_SHARED with MAP_ANONYMOUS (linux/mman.h)."""
_REMOVED = " (deleted)"
"""What proc_pid_maps(5) has after the path of a removed file, and after /dev/zero, which stands for memory without a file."""


def leave_databases() -> None:
    """Let this process talk over no connection to a database that the process before still has open."""
    engines = sys.modules.get("sqlalchemy.engine")
    for engine in objects_of(engines.Engine) if engines is not None else ():
        engine.dispose(close=False)


def leave_files(keep: Collection[int], *, may_write: bool) -> None:
    """Open each file anew, and talk over no socket and no pipe but those to ``keep``.

    A file that was open for writing can still be read.

    Args:
        keep: descriptors that stay as they are.
        may_write: open files for writing too, by their paths, where the kernel makes a private copy of what is written.
    """
    descriptors = Path("/proc/self/fd")  # Linux
    if not hasattr(os, "fork") or not descriptors.is_dir():
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in [int(each.name) for each in descriptors.iterdir()]:
        if descriptor not in (0, 1, 2, null, *keep):
            with suppress(OSError):  # it is closed by now
                _leave(descriptor, null, may_write)
    os.close(null)


def _leave(descriptor: int, null: int, may_write: bool) -> None:
    import fcntl

    mode = os.fstat(descriptor).st_mode
    own = null
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        own = _opened_anew(descriptor, fcntl.fcntl(descriptor, fcntl.F_GETFL), null, may_write)
    elif stat.S_ISCHR(mode) and not os.isatty(descriptor):
        return
    os.dup2(own, descriptor, inheritable=os.get_inheritable(descriptor))
    if own != null:
        os.close(own)


def _opened_anew(descriptor: int, flags: int, null: int, may_write: bool) -> int:
    """Open the file of ``descriptor`` once more, at the same position. A copy would share the position."""
    kept_flags = flags & (os.O_ACCMODE | os.O_APPEND | os.O_DIRECTORY | os.O_PATH)
    own = _opened_by_path(descriptor, kept_flags) if may_write or flags & os.O_DIRECTORY else None
    if own is None and (flags & os.O_ACCMODE == os.O_WRONLY or flags & os.O_DIRECTORY):
        return null
    if own is None:
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    with suppress(OSError):  # a folder has no position
        os.lseek(own, os.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
    return own


def _opened_by_path(descriptor: int, flags: int) -> int | None:
    """Open the file again where its path leads to. None: that is another file, or may not be opened so."""
    before = os.fstat(descriptor)
    with suppress(OSError):
        own = os.open(os.readlink(f"/proc/self/fd/{descriptor}"), flags | os.O_CLOEXEC)
        after = os.fstat(own)
        if stat.S_ISDIR(before.st_mode) and stat.S_ISDIR(after.st_mode):
            return own
        if (after.st_size, after.st_mtime_ns, after.st_mode) == (before.st_size, before.st_mtime_ns, before.st_mode):
            return own
        os.close(own)
    return None


def leave_shared_memory(*, most_bytes: int = 2**26) -> None:
    """Take the memory that this process shares with others for its own: what it writes there is its own affair.

    Memory without a file, such as a semaphore of multiprocessing, is copied as it is now, and shared only with processes that are
    started from here. The memory of devices stays as it is.

    Args:
        most_bytes: the largest piece that is copied. A larger one can only be read: what writes there ends this process.
    """
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    for line in maps.read_text().splitlines():
        # proc_pid_maps(5): address, permissions, offset, device, inode, path
        span, rights, offset, _, _, *path = line.removesuffix(_REMOVED).split(maxsplit=5)
        if rights[1] != "w" or rights[3] != "s":
            continue
        file = Path(path[0]) if path else Path()
        if file.is_relative_to("/dev") and file.parts[2] not in ("shm", "zero"):
            continue
        begin, end = (int(part, 16) for part in span.split("-"))
        length = end - begin
        rights_to_it = mmap.PROT_READ | mmap.PROT_WRITE
        if file.is_file() and not line.endswith(_REMOVED):
            descriptor = os.open(file, os.O_RDONLY)
            libc.mmap(begin, length, rights_to_it, mmap.MAP_PRIVATE | _FIXED, descriptor, int(offset, 16))
            os.close(descriptor)
        elif length <= most_bytes:
            held = ctypes.string_at(begin, length)
            libc.mmap(begin, length, rights_to_it, _ANONYMOUS_SHARED | _FIXED, -1, 0)
            ctypes.memmove(begin, held, length)
        else:
            linux.call("mprotect", ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.PROT_READ)


def adopt_orphans() -> None:
    """Become the parent of whatever a child of this process leaves behind, so that it can be ended (Linux 3.4)."""
    with suppress(OSError):
        linux.prctl(linux.ADOPT_ORPHANS, 1)
