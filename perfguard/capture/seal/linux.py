"""System calls of Linux that Python has no functions for. Each raises OSError if the kernel refuses."""

from __future__ import annotations

import ctypes
import functools
import os
import platform

NEW_MOUNTS = 0x00020000
NEW_USER = 0x10000000
NEW_NETWORK = 0x40000000
NEW_IPC = 0x08000000
"""Namespaces of unshare(2) (linux/sched.h)."""
BIND = 0x1000
RECURSIVE = 0x4000
SLAVE = 0x80000
"""Flags of mount(2) (linux/mount.h)."""
DETACH = 2
"""MNT_DETACH of umount2(2)."""
NO_NEW_PRIVILEGES = 38
SECCOMP = 22
DIE_WITH_PARENT = 1
ADOPT_ORPHANS = 36
"""Options of prctl(2) (linux/prctl.h)."""
_MOUNT_SETATTR = 442
"""Number of a system call that is newer than the tables, so it is the same on all processors (asm-generic/unistd.h)."""
_READ_ONLY = 0x1
_ALL_BELOW = 0x8000
_HERE = -100
"""MOUNT_ATTR_RDONLY, AT_RECURSIVE and AT_FDCWD (linux/mount.h, linux/fcntl.h)."""


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def call(name: str, *args: object) -> int:
    """Call a function of the C library that returns -1 if it fails."""
    found = getattr(_libc(), name, None)
    if found is None:
        raise OSError(f"this system has no {name}")
    result = int(found(*args))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def system_call(number: int, *args: object) -> int:
    """Call the kernel by the number of a system call, where the C library has no function for it."""
    return call("syscall", ctypes.c_long(number), *args)


def prctl(option: int, value: int, extra: object = 0) -> None:
    """Change an attribute of this process (prctl(2))."""
    call("prctl", option, ctypes.c_ulong(value), extra, ctypes.c_ulong(0), ctypes.c_ulong(0))


def mount(source: str | None, target: str, kind: str | None = None, flags: int = 0, options: str = "") -> None:
    """Mount as mount(2) does."""
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind)]
    call("mount", *words, ctypes.c_ulong(flags), os.fsencode(options))


def make_read_only(target: str) -> None:
    """Make a mount and all mounts below it read-only (Linux 5.12)."""
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY, 0, 0, 0)
    system_call(_MOUNT_SETATTR, _HERE, os.fsencode(target), _ALL_BELOW, ctypes.byref(attributes), ctypes.sizeof(attributes))


def drop_capabilities() -> None:
    """Give up all capabilities of this thread (capset(2))."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3; of this thread
    call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def is_linux() -> bool:
    """Whether this is Linux, whose processes can fork, on a processor whose system calls are known here."""
    return hasattr(os, "fork") and platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64")
