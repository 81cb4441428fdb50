"""DeviceRoom: the memory that trials of this host have reserved on one device, so that several run on it side by side.

Each reservation is a file that its process holds locked. The system drops the lock when the process ends, however it ends, so no
daemon is needed, and what a dead process reserved is free. Threads lock as processes do, because each opens its own file.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from perfguard.exceptions import ConfigurationError
from perfguard.quantities import format_bytes, format_seconds

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None  # type: ignore[assignment]


def rooms_of_this_user() -> Path:
    """Return the folder of all rooms: that of temporary files, which the processes of a host share."""
    return Path(tempfile.gettempdir()) / f"perfguard-rooms-{os.getuid() if hasattr(os, 'getuid') else 'user'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRoom:
    """The room of one device of this host.

    Raises:
        ConfigurationError: on a system without ``flock``.
    """

    name: str
    """Names the device. Processes that give the same name share its room."""
    capacity_bytes: int
    folder: Path = field(default_factory=rooms_of_this_user)
    most_wait_s: float = 24 * 3600.0
    """Seconds after which a trial no longer waits."""
    poll_s: float = 0.2

    def __post_init__(self) -> None:
        if fcntl is None:
            raise ConfigurationError("share_device needs file locks (flock), which this system does not have. Leave it out.")

    @property
    def _place(self) -> Path:
        return self.folder / re.sub(r"[^\w.-]", "_", self.name)

    def reserve(self, num_bytes: int, *, on_wait: Callable[[str], object] = lambda _: None) -> Reservation:
        """Reserve ``num_bytes``, and wait until they fit beside what others have reserved. In an empty room everything fits.

        Args:
            num_bytes: the predicted memory of a trial.
            on_wait: called once if the trial has to wait, and once if it has waited too long, with the reason in words.
        """
        began_s = time.monotonic()
        has_waited = False
        while True:
            is_late = time.monotonic() - began_s > self.most_wait_s
            with self._gate():
                taken = self._taken()
                if is_late or not taken or sum(taken) + num_bytes <= self.capacity_bytes:
                    made = self._make(num_bytes)
                    break
            if not has_waited:
                has_waited = True
                on_wait(
                    f"A trial waits for {format_bytes(num_bytes)} of {self.name}: {len(taken)} running trials have reserved "
                    f"{format_bytes(sum(taken))} of {format_bytes(self.capacity_bytes)}"
                )
            time.sleep(self.poll_s)
        if is_late:
            on_wait(f"A trial has waited {format_seconds(self.most_wait_s)} for {self.name}, and starts all the same")
        return made

    def num_reserved(self) -> int:
        """Return the number of reservations."""
        with self._gate():
            return len(self._taken())

    @contextmanager
    def _gate(self) -> Iterator[None]:
        """Let one thread of one process at a time look at the room and change it."""
        self._make_folders()
        with (self._place / "gate").open("w") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            yield

    def _make_folders(self) -> None:
        """Make the folders, which no other user may have made: a link there would lead to a file of ours.

        Raises:
            PermissionError: if another user has made the folder of all rooms.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.folder.is_symlink() or self.folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{self.folder} is not a folder of this user")
        self._place.mkdir(exist_ok=True)

    def _make(self, num_bytes: int) -> Reservation:
        path = self._place / f"{uuid.uuid4().hex}.bytes"
        held = path.open("w")
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write(str(num_bytes))
        held.flush()
        return Reservation(room=self, path=path, held=held)

    def _taken(self) -> list[int]:
        """Return the bytes of each reservation, and remove those whose process is gone."""
        taken: list[int] = []
        for path in self._place.glob("*.bytes"):
            with suppress(FileNotFoundError), path.open() as file:  # it may be released meanwhile
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    taken.append(int(file.read() or 0))
                    continue
                path.unlink(missing_ok=True)
        return taken


@dataclass(slots=True, kw_only=True)
class Reservation:
    """Memory of a device that a running trial has reserved."""

    room: DeviceRoom
    path: Path
    held: IO[str]
    was_shared: bool = False
    """Whether another trial was seen beside it."""

    def look_for_neighbours(self) -> bool:
        """Return whether another trial has run beside this one, as far as was seen."""
        self.was_shared = self.was_shared or self.room.num_reserved() > 1
        return self.was_shared

    def release(self) -> None:
        """Give the memory back. A child that was forked meanwhile has the same lock, so the file goes, too."""
        with suppress(OSError, ValueError):  # it is given back already
            self.path.unlink(missing_ok=True)
            fcntl.flock(self.held, fcntl.LOCK_UN)
            self.held.close()
