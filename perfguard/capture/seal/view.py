"""A private copy-on-write view of all files, for this process and all that it starts (Linux 5.12).

User, mount, network and IPC namespaces with overlayfs. What the process writes, renames and removes is kept in memory, is read
back as written, and is gone when the last process in the view ends. Its network has no way out, and Unix sockets of others refuse
it. No privileges are needed where the system allows unprivileged namespaces. Many containers forbid them.

    /                a tmpfs of this process's own, which lies over its /sys until the root is changed
    a folder         an overlay: below it the real folder, above it memory
    with mounts      made anew, and its parts are covered one by one: a mount of the namespace before cannot be taken off a folder
    the rest         read-only: files beside a mount, and file systems that overlayfs does not take
    /proc, /sys      those of the system, /dev likewise with a /dev/shm that is covered
"""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
import struct
from bisect import bisect_right
from contextlib import suppress
from pathlib import Path

import perfguard.capture.seal.linux as linux

_SCRATCH = "/sys"
"""A folder that every Linux has, and that is still at hand by its descriptor when something lies over it."""
_UP = 0x1
_SET_INTERFACE_FLAGS = 0x8914
"""IFF_UP and SIOCSIFFLAGS (linux/if.h, linux/sockios.h)."""


def enter_view(*, network: bool, most_bytes: int) -> None:
    """Enter the view. Call it in a process of one thread, such as one that was just forked.

    Args:
        network: leave the network open.
        most_bytes: the most memory that written files may take.

    Raises:
        OSError: if the system does not allow it. Files and network are then as before, or less of them.
    """
    if len(os.listdir("/proc/self/task")) > 1:
        raise OSError(errno.EINVAL, "a process with several threads cannot change its view")
    here = _working_folder()
    is_privileged = _unshare(network)
    if here is not None and not is_privileged:
        _check_owner(here)
    linux.mount(None, "/", flags=linux.RECURSIVE | linux.SLAVE)
    try:
        _make_view(here, _Cover(is_privileged=is_privileged), most_bytes)
    except OSError:
        with suppress(OSError):
            linux.call("umount2", _SCRATCH.encode(), linux.DETACH)
        raise
    if not network:
        _bring_loopback_up()
    if not is_privileged and os.getuid():
        linux.drop_capabilities()  # so that the modes of files hold, as they do outside


def _check_owner(folder: str) -> None:
    """Raise an OSError if new files cannot be made in ``folder``: overlayfs copies no owner that this namespace does not have."""
    found = os.stat(folder)
    if (found.st_uid, found.st_gid) != (os.getuid(), os.getgid()):
        raise OSError(errno.EOVERFLOW, f"{folder} has another owner or group than this process")


def _make_view(here: str | None, cover: _Cover, most_bytes: int) -> None:
    system = {name: os.open(f"/{name}", os.O_PATH | os.O_CLOEXEC) for name in ("proc", "sys", "dev")}
    linux.mount("tmpfs", _SCRATCH, "tmpfs", options=f"size={most_bytes},mode=0755")
    root = f"{_SCRATCH}/root"
    os.mkdir(root)
    for name in os.listdir("/"):
        if name not in system:
            cover.path(f"/{name}", f"{root}/{name}")
    for name, descriptor in system.items():
        os.mkdir(f"{root}/{name}")
        linux.mount(f"/proc/self/fd/{descriptor}", f"{root}/{name}", flags=linux.BIND | linux.RECURSIVE)
        os.close(descriptor)
    _refuse_sockets(f"{root}/dev")
    for name in ("dev", "sys"):
        linux.make_read_only(f"{root}/{name}")  # devices can be written to all the same
    if os.path.isdir("/dev/shm"):
        cover.overlay("/dev/shm", f"{root}/dev/shm")
    if here is not None and any(here == shown or here.startswith(f"{shown}/") for shown in cover.shown):
        raise OSError(errno.EOPNOTSUPP, f"the file system of {here} cannot be covered")
    os.chroot(root)
    _go_to(here)


def _refuse_sockets(folder: str) -> None:
    """Lay the null device over each socket, such as that of the system's log."""
    for entry in os.scandir(folder):
        if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
            linux.mount(os.devnull, entry.path, flags=linux.BIND)


def _unshare(network: bool) -> bool:
    """Leave the namespaces of the process before. Return whether that needed no user namespace."""
    user = os.getuid()
    group = os.getgid()
    wanted = linux.NEW_MOUNTS | linux.NEW_IPC | (0 if network else linux.NEW_NETWORK)
    with suppress(PermissionError):
        linux.call("unshare", wanted)
        return True
    linux.call("unshare", wanted | linux.NEW_USER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        Path(f"/proc/self/{name}").write_text(text)
    return False


class _Cover:
    """Makes a covered copy of a tree of files.

    Args:
        is_privileged: without a user namespace, overlayfs keeps its marks where only the system may.
        most_mounts: mounts that it makes before it gives up. A system with very many takes long.
    """

    def __init__(self, *, is_privileged: bool, most_mounts: int = 1000) -> None:
        self._marks = "" if is_privileged else ",userxattr"
        self._most_mounts = most_mounts
        self._num_mounts = 0
        self._mounted = _mount_points()
        self.shown: list[str] = []
        """Paths that are read-only."""

    def path(self, source: str, target: str) -> None:
        """Cover ``source``, of any kind, at ``target``, which does not exist yet."""
        mode = os.lstat(source).st_mode
        if stat.S_ISLNK(mode):
            os.symlink(os.readlink(source), target)
        elif stat.S_ISDIR(mode):
            os.mkdir(target)
            self._folder(source, target)
        elif stat.S_ISREG(mode):
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
            self._show(source, target)

    def _folder(self, source: str, target: str) -> None:
        with suppress(OSError):  # a kind of file system that overlayfs does not take
            if not self._has_mounts_below(source):
                self.overlay(source, target)
                return
        if not os.access(source, os.R_OK | os.X_OK):
            self._show(source, target)
            return
        names = os.listdir(source)
        if not self._has_mounts_below(source) and len(names) > self._most_mounts - self._num_mounts:
            self._show(source, target)
            return
        for name in names:
            with suppress(FileNotFoundError):  # it is gone by now
                self.path(os.path.join(source, name), os.path.join(target, name))
        _like(source, target)

    def overlay(self, source: str, target: str) -> None:
        """Lay memory over the folder ``source``, and mount both at ``target``."""
        number = self._count()
        upper = f"{_SCRATCH}/upper{number}"
        work = f"{_SCRATCH}/work{number}"
        for folder in (upper, work):
            os.mkdir(folder)
        _like(source, upper)
        below = os.open(source, os.O_PATH | os.O_CLOEXEC)  # a path may hold the commas and colons that separate options
        try:
            layers = f"lowerdir=/proc/self/fd/{below},upperdir={upper},workdir={work}"
            linux.mount("overlay", target, "overlay", options=layers + self._marks)
        finally:
            os.close(below)

    def _show(self, source: str, target: str) -> None:
        """Mount ``source`` read-only at ``target``."""
        self._count()
        self.shown.append(source)
        linux.mount(source, target, flags=linux.BIND | linux.RECURSIVE)
        linux.make_read_only(target)

    def _count(self) -> int:
        self._num_mounts += 1
        if self._num_mounts > self._most_mounts:
            raise OSError(errno.ENOSPC, f"it would take more than {self._most_mounts} mounts to cover all files")
        return self._num_mounts

    def _has_mounts_below(self, folder: str) -> bool:
        at = bisect_right(self._mounted, f"{folder}/")
        return at < len(self._mounted) and self._mounted[at].startswith(f"{folder}/")


def _mount_points() -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    escaped = [line.split(" ", 5)[4] for line in lines]  # proc_pid_mountinfo(5)
    return sorted(re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path) for path in escaped)


def _like(source: str, folder: str) -> None:
    """Give ``folder`` the owner and the mode of ``source``; where the owner cannot be given, what this process may do there."""
    found = os.stat(source)
    is_writable = os.access(source, os.W_OK)
    try:
        os.chown(folder, found.st_uid, found.st_gid)
    except OSError:
        os.chmod(folder, 0o755 if is_writable else 0o555)
        return
    os.chmod(folder, stat.S_IMODE(found.st_mode))


def _working_folder() -> str | None:
    """Return the working folder. None: it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _go_to(folder: str | None) -> None:
    if folder is not None:
        os.chdir(folder)
        return
    gone = f"{'/dev/shm' if os.path.isdir('/dev/shm') else '/tmp'}/removed-{os.getpid()}"
    os.mkdir(gone)
    os.chdir(gone)
    os.rmdir(gone)


def _bring_loopback_up() -> None:
    """A process of the view may talk to itself, and to what it has started."""
    import fcntl  # Windows has none

    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        fcntl.ioctl(asking, _SET_INTERFACE_FLAGS, struct.pack("16sh14x", b"lo", _UP))
