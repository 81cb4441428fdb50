"""Landlock and seccomp: the kernel refuses this process, and all that it starts, to change files and to use the network.

Both are for any process, without privileges, and cannot be undone. Landlock is in Linux 5.13 and later; what each version of its
interface adds stands beside the rights. Files that are open already stay writable (see `inherited.py`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Sequence
from contextlib import suppress

import perfguard.capture.seal.linux as linux

_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
"""Numbers of Landlock's system calls, which are the same on all processors (asm-generic/unistd.h)."""
_WRITE_FILE = 1 << 1
_REFER = 1 << 13
_TRUNCATE = 1 << 14
_REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))
"""Rights of linux/landlock.h: to remove and make folders, files, links, sockets, pipes and devices."""
_TCP = 0b11
"""To bind and to connect; interface 4 and later."""
_ABSTRACT_SOCKETS = 0b01
_SIGNALS = 0b10
"""What reaches processes outside; interface 6 and later."""
_BENEATH = 1


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def landlock_version() -> int:
    """Return the version of Landlock's interface. 0: the kernel has none, or does not use it."""
    if not linux.is_linux():
        return 0
    with suppress(OSError):
        return linux.system_call(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    return 0


def restrict(writable: Sequence[str] | None, *, network: bool) -> None:
    """Let this process change no file but what is in the ``writable`` folders, and reach no process outside.

    Args:
        writable: folders and devices that may be written. None: files are not restricted.
        network: leave TCP open.

    Raises:
        OSError: if the kernel has no Landlock.
    """
    version = landlock_version()
    if not version:
        raise OSError(errno.ENOSYS, "this system has no Landlock")
    changes = 0
    if writable is not None:
        changes = _WRITE_FILE | _REMOVE_AND_MAKE | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    tcp = _TCP if version >= 4 and not network and writable is not None else 0
    scoped = (_SIGNALS | (0 if network else _ABSTRACT_SOCKETS)) if version >= 6 else 0
    if not changes and not scoped:
        return
    rules = _Ruleset(changes, tcp, scoped)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = linux.system_call(_CREATE_RULESET, ctypes.byref(rules), ctypes.c_size_t(size), 0)
    try:
        for path in writable or ():
            _allow(ruleset, path, changes)
        linux.prctl(linux.NO_NEW_PRIVILEGES, 1)
        linux.system_call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, changes: int) -> None:
    parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rights = changes if os.path.isdir(path) else changes & (_WRITE_FILE | _TRUNCATE)
        linux.system_call(_ADD_RULE, ruleset, _BENEATH, ctypes.byref(_PathBeneath(rights, parent)), 0)
    finally:
        os.close(parent)


_SYSTEM = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
"""By processor: its number (linux/audit.h), and that of socket(2)."""
_CHANGES_OF_MARKS = {
    "x86_64": (90, 91, 92, 93, 94, 132, 188, 189, 190, 197, 198, 199, 235, 260, 261, 268, 280, 452),
    "aarch64": (5, 6, 7, 14, 15, 16, 52, 53, 54, 55, 88, 452),
}
"""By processor: the numbers of all forms of chmod, chown, utime, setxattr and removexattr, which Landlock does not know."""
_LOAD = 0x20
_JUMP_IF_EQUAL = 0x15
_RETURN = 0x06
"""Instructions of classic BPF (linux/bpf_common.h)."""
_ALLOW = 0x7FFF0000
_FAIL = 0x00050000
"""What a filter may answer (linux/seccomp.h)."""
_NUMBER = 0
_ARCHITECTURE = 4
_FIRST_ARGUMENT = 16
"""Offsets in seccomp_data (linux/seccomp.h)."""
_NETLINK = 16
"""AF_NETLINK, by which programs ask the kernel itself (linux/socket.h)."""


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def filter_calls(*, network: bool) -> None:
    """Let this process change no mode, owner, time and extended attribute of a file, and make no socket.

    A pair of sockets, of its own, is all that is left of the network.

    Args:
        network: allow sockets.

    Raises:
        OSError: if the kernel has no seccomp.
    """
    architecture, make_socket = _SYSTEM[platform.machine()]
    marks = _CHANGES_OF_MARKS[platform.machine()]
    sockets = [
        (_JUMP_IF_EQUAL, 0, 2, make_socket),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_JUMP_IF_EQUAL, 0, 1, _NETLINK),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _FAIL | errno.ENETUNREACH),
    ]
    allows = [(_RETURN, 0, 0, _ALLOW)] if network else sockets
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_IF_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _ALLOW),  # of another processor, which is emulated
        (_LOAD, 0, 0, _NUMBER),
        *((_JUMP_IF_EQUAL, len(marks) - at + len(allows) - 1, 0, number) for at, number in enumerate(marks)),
        *allows,
        (_RETURN, 0, 0, _FAIL | errno.EROFS),
    ]
    program = _Program(len(steps), b"".join(struct.pack("HBBI", *step) for step in steps))
    linux.prctl(linux.NO_NEW_PRIVILEGES, 1)
    linux.prctl(linux.SECCOMP, 2, ctypes.byref(program))  # SECCOMP_MODE_FILTER
