"""sealed: the rungs of the seal, from the strongest to the weakest, and what all of them have in common."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple, SupportsIndex, get_args

import psutil

import perfguard.capture.seal.linux as linux
from perfguard.capture.seal.audit import refuse_changes
from perfguard.capture.seal.inherited import adopt_orphans, leave_files, leave_shared_memory
from perfguard.capture.seal.landlock import filter_calls, landlock_version, restrict
from perfguard.capture.seal.programs import Programs
from perfguard.capture.seal.redirect import Redirect
from perfguard.capture.seal.semaphores import share_without_files
from perfguard.capture.seal.trackers import switch_off_trackers
from perfguard.capture.seal.view import enter_view
from perfguard.capture.seal.weights import save_weights_small

Rung = Literal["namespaces", "landlock", "python"]
RUNGS: tuple[Rung, ...] = get_args(Rung)
"""From the strongest to the weakest."""
_VARIABLE = "PERFGUARD_SEAL"
"""Names the strongest rung to try, for a system on which a stronger one is in the way."""
_SCRATCH = "perfguard-dry-run-"
"""Begin of the name of a folder for what a process writes, which ends with the number of the process."""
_WRITABLE = ("/dev/null", "/dev/zero", "/dev/full", "/dev/tty", "/dev/ptmx", "/dev/pts", "/proc/self", "/dev/kfd", "/dev/dri")
"""What may be written besides: it keeps nothing, belongs to the process, or is a GPU, as `/dev/nvidia*` are."""
_MOST_SHARE = 0.25
"""The share of the free memory that written files may take on a memory file system."""


class Seal(NamedTuple):
    """What keeps a dry run from changing anything outside."""

    rung: Rung
    programs: Programs
    """Those that the dry run starts."""

    @property
    def is_tight(self) -> bool:
        """Whether the kernel seals it, so that libraries in other languages and programs are sealed too."""
        return self.rung != "python"


@contextmanager
def sealed(*, keep: Collection[int] = (), network: bool = False, most_bytes: int = 2**33) -> Iterator[Seal]:
    """Seal this process for ever, and run the block.

    Call it in a process of its own with one thread, such as a forked one. With several threads the kernel gives it no view.

    Args:
        keep: descriptors by which the process talks to whoever waits for it.
        network: leave the network open.
        most_bytes: the most that written files may take together, and at most a quarter of the free memory.
    """
    adopt_orphans()
    rung = _climb(network=network, most_bytes=min(most_bytes, int(_MOST_SHARE * psutil.virtual_memory().available)))
    leave_files(keep, may_write=rung == "namespaces")
    leave_shared_memory()
    switch_off_trackers()
    save_weights_small()
    if not network:
        wait_for_no_network()
    programs = Programs()
    programs.follow()
    try:
        yield Seal(rung, programs)
    finally:
        programs.end()


def _climb(*, network: bool, most_bytes: int) -> Rung:
    """Take the strongest rung that holds, and return which."""
    strongest = os.environ.get(_VARIABLE, RUNGS[0])
    allowed = RUNGS[RUNGS.index(strongest) :] if strongest in RUNGS else RUNGS
    if "namespaces" in allowed and linux.is_linux():
        with suppress(OSError):
            enter_view(network=network, most_bytes=most_bytes)
            with suppress(OSError):  # signals are refused since Linux 6.12
                restrict(None, network=network)
            return "namespaces"
    scratch = _make_scratch()
    if "landlock" in allowed and landlock_version():
        with suppress(OSError):
            writable = [*filter(os.path.exists, _WRITABLE), *map(str, Path("/dev").glob("nvidia*"))]
            restrict([*writable, *([scratch] if scratch else [])], network=network)
            filter_calls(network=network)
            _redirect(scratch, most_bytes)
            if scratch is not None:
                share_without_files(scratch)
            return "landlock"
    _redirect(scratch, most_bytes)
    refuse_changes(scratch, network=network)
    return "python"


def _redirect(scratch: str | None, most_bytes: int) -> None:
    if scratch is not None:
        Redirect(scratch, most_bytes=most_bytes).install()


def _make_scratch() -> str | None:
    """Make a folder for what this process writes. None: there is no place for one, so it cannot write."""
    for folder in _scratch_folders(os.getpid()):
        with suppress(OSError):
            folder.mkdir(mode=0o700)
            return str(folder)
    return None


def remove_scratch(process: int) -> None:
    """Remove what a sealed ``process``, which has ended, has left on the disk."""
    for folder in _scratch_folders(process):
        if folder.exists():
            shutil.rmtree(folder, ignore_errors=True)


def _scratch_folders(process: int) -> list[Path]:
    """Return where a process may write, the best place first. There is none if no temporary folder can be written to."""
    places = ["/dev/shm"]
    with suppress(FileNotFoundError):
        places.insert(0, tempfile.gettempdir())
    numbered_by = 0  # containers that share a folder count their processes by themselves
    with suppress(OSError):
        numbered_by = os.stat("/proc/self/ns/pid").st_ino
    return [Path(place) / f"{_SCRATCH}{numbered_by}-{process}" for place in places]


def wait_for_no_network(*, most_s: float = 0.05) -> None:
    """Shorten `time.sleep` to ``most_s`` seconds once a connection was tried.

    Libraries try again for minutes, with pauses between, and the network stays closed.
    """
    sleep = time.sleep
    was_tried = False

    def hear(event: str, args: tuple[object, ...]) -> None:
        nonlocal was_tried
        is_internet = event == "socket.__new__" and args[1] in (socket.AF_INET, socket.AF_INET6)
        if is_internet or event in ("socket.connect", "socket.getaddrinfo"):
            was_tried = True

    def sleep_less(seconds: float | SupportsIndex, /) -> None:
        sleep(min(float(seconds), most_s) if was_tried else seconds)

    sys.addaudithook(hear)
    time.sleep = sleep_less


def explain(error: BaseException, seal: Seal) -> str:
    """Return what in the seal has caused ``error``, as sentences. Empty: nothing has, as far as its texts tell."""
    texts = " ".join(str(each) for each in _chain(error))
    if any(words in texts for words in _NO_NETWORK):
        return ". A dry run has no network: dry_run_network=True opens it, for data that are read from far"
    if os.strerror(errno.ENOSPC) in texts:
        return ". The dry run has filled the space that it has for files"
    is_refused = os.strerror(errno.EROFS) in texts or (seal.rung != "namespaces" and os.strerror(errno.EACCES) in texts)
    return ". A dry run may change no file here" if is_refused else ""


_NO_NETWORK = (
    os.strerror(errno.ENETUNREACH),
    os.strerror(errno.ECONNREFUSED),
    "name resolution",
    "Name or service not known",
    "connection is bad",
)
"""What errors say that follow from a closed network."""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
