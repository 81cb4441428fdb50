"""Redirect: Python's own file functions, on a private copy. For systems whose kernel gives a process no view of its own.

What is written goes into a scratch folder, at its path from the root, and is read back from there. What is removed is hidden:

    open("/home/me/best.pt", "w")    opens SCRATCH/home/me/best.pt
    open("/home/me/best.pt", "a")    the same, after a copy of the real file is there
    os.remove("/home/me/best.pt")    notes that it is hidden

Only what goes through these functions is redirected: not a name that was imported from `os` before, not a program, not a library
that opens files by itself. These the kernel refuses, or an audit hook (`ladder.py`).
"""

from __future__ import annotations

import builtins
import errno
import functools
import io
import os
import shutil
import sqlite3
import sqlite3.dbapi2
import stat
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

Path = str | bytes | os.PathLike[Any] | int


class Redirect:
    """Takes the place of Python's file functions.

    Args:
        scratch: an empty folder of this process's own.
        most_bytes: how much the free space there may shrink before nothing more can be written.
    """

    def __init__(self, scratch: str, *, most_bytes: int) -> None:
        self._scratch = os.path.realpath(scratch)
        self._least_free_bytes = self._free_bytes() - most_bytes
        self._hidden: set[str] = set()
        """Real paths that were removed here."""
        self._real = {name: getattr(os, name) for name in (*_READING, *_WRITING, *_OTHERS) if hasattr(os, name)}
        """The functions of `os` as they were."""
        self._folders: dict[str, str] = {}
        """Folders without symbolic links, by their paths."""

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self._scratch).free

    def install(self) -> None:
        """Replace the functions. There is no way back."""
        real = self._real
        shutil._use_fd_functions = False  # type: ignore[attr-defined]  # rmtree then goes by paths
        instead: dict[str, Callable[..., Any]] = {
            "access": self._access, "chdir": self._chdir, "listdir": self._listdir, "mkdir": self._mkdir,
            "open": self._open_descriptor, "scandir": self._scandir,
        }  # fmt: skip
        instead |= {name: self._reading(real[name]) for name in real.keys() & set(_READING)}
        instead |= {name: self._writing(real[name]) for name in real.keys() & set(_WRITING)}
        instead |= {name: self._moving(real[name]) for name in ("rename", "replace")}
        instead |= {name: self._linking(real[name], is_symbolic=name == "symlink") for name in ("link", "symlink")}
        instead |= {name: self._removing(real[name]) for name in ("remove", "unlink", "rmdir")}
        for module in (os, sys.modules[os.name]):  # they are pickled by their names in the second
            for name, function in instead.items():
                setattr(module, name, function)
        for closer in vars(tempfile._TemporaryFileCloser).values():  # type: ignore[attr-defined]  # it has taken os.unlink for itself
            defaults = getattr(closer, "__defaults__", None) or ()
            if real["unlink"] in defaults:
                closer.__defaults__ = tuple(os.unlink if default is real["unlink"] else default for default in defaults)
        builtins.open = io.open = self._opening(io.open)
        tarfile.bltn_open = builtins.open  # type: ignore[attr-defined]  # it has taken it for itself
        sqlite3.connect = sqlite3.dbapi2.connect = self._connecting(sqlite3.connect)
        tempfile.tempdir = os.path.join(self._scratch, "tmp")
        self._real["mkdir"](tempfile.tempdir)
        os.environ["TMPDIR"] = tempfile.tempdir  # for programs and libraries

    # --- Paths ------------------------------------------------------------------------------------------------------------------

    def _own(self, path: str) -> str:
        """Return where the copy of an absolute ``path`` is, or would be."""
        return self._scratch + path

    def _absolute(self, path: Path) -> str | None:
        """Return the path without links. None: it is a descriptor, of this process's own, or a device."""
        if isinstance(path, int):
            return None
        folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
        found = os.path.join(self._without_links(folder), name) if name else folder
        is_own = found == self._scratch or found.startswith(f"{self._scratch}/")
        is_of_system = found.startswith(("/dev/", "/proc/")) and not found.startswith("/dev/shm/")
        return None if is_own or is_of_system else found

    def _without_links(self, folder: str) -> str:
        """Return a folder as `os.path.realpath` would, by the functions as they were."""
        if folder not in self._folders:
            above, name = os.path.split(folder)
            found = os.path.join(self._without_links(above), name) if name else folder
            with suppress(OSError):
                found = os.path.abspath(os.path.join(os.path.dirname(found), self._real["readlink"](found)))
                found = self._without_links(found)
            self._folders[folder] = found
        return self._folders[folder]

    def _is_there(self, path: str) -> bool:
        try:
            self._real["lstat"](path)
        except OSError:
            return False
        return True

    def _is_folder(self, path: str) -> bool:
        return stat.S_ISDIR(self._real["lstat"](path).st_mode)

    def _exists(self, path: str) -> bool:
        return self._is_there(self._own(path)) or self._is_real(path)

    def _is_real(self, path: str) -> bool:
        """Whether the real file is there, and was not removed here."""
        return not self._is_hidden(path) and self._is_there(path)

    def _is_hidden(self, path: str) -> bool:
        return any(path == hidden or path.startswith(f"{hidden}/") for hidden in self._hidden)

    def _to_read(self, path: Path) -> Path:
        """Return where the content of ``path`` is now."""
        found = self._absolute(path)
        if found is None:
            return path
        if self._is_there(self._own(found)):
            return self._own(found)
        if self._is_hidden(found):
            raise _error(errno.ENOENT, path)
        return path

    def _to_write(self, path: Path, *, keeps: bool, makes: bool = True) -> Path:
        """Return the copy of ``path``. With ``keeps``, it has the content of the real file. Without ``makes``, it must exist."""
        found = self._absolute(path)
        if found is None:
            return path
        own = self._own(found)
        copied_bytes = self._real["stat"](found).st_size if keeps and self._is_real(found) and not self._is_there(own) else 0
        if self._free_bytes() - copied_bytes < self._least_free_bytes:
            raise _error(errno.ENOSPC, path)
        if self._is_there(own):
            return own
        is_real = self._is_real(found)
        if not (is_real or makes) or not self._exists(os.path.dirname(found)):
            raise _error(errno.ENOENT, path)
        self._make_folders(os.path.dirname(own))
        if is_real and self._is_folder(found):
            self._make_folders(own)
        elif is_real and keeps:
            shutil.copy2(found, own)
        return own

    def _make_folders(self, folder: str) -> None:
        if not self._is_there(folder):
            self._make_folders(os.path.dirname(folder))
            self._real["mkdir"](folder)

    # --- Functions --------------------------------------------------------------------------------------------------------------

    def _reading(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def read(path: Path, *args: Any, **kwargs: Any) -> Any:
            return own(path if kwargs.get("dir_fd") is not None else self._to_read(path), *args, **kwargs)

        return read

    def _writing(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def write(path: Path, *args: Any, **kwargs: Any) -> Any:
            if own.__name__ == "truncate":
                own(self._to_write(path, keeps=True, makes=False), *args, **kwargs)
                return
            with suppress(OSError):  # the kernel allows no change of modes, owners and times
                own(self._to_write(path, keeps=True, makes=False), *args, **kwargs)

        return write

    def _opening(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def open_file(file: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not set(mode) & set("wax+"):
                return own(self._to_read(file), mode, *args, **kwargs)
            found = self._absolute(file)
            if found is not None and "x" in mode and self._exists(found):
                raise _error(errno.EEXIST, file)
            return own(self._to_write(file, keeps="w" not in mode, makes="r" not in mode), mode, *args, **kwargs)

        return open_file

    def _open_descriptor(self, path: Path, flags: int, *args: Any, **kwargs: Any) -> int:
        own = self._real["open"]
        if kwargs.get("dir_fd") is not None:
            return int(own(path, flags, *args, **kwargs))
        if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return int(own(self._to_read(path), flags, *args, **kwargs))
        found = self._absolute(path)
        if found is not None and flags & os.O_EXCL and self._exists(found):
            raise _error(errno.EEXIST, path)
        place = self._to_write(path, keeps=not flags & os.O_TRUNC, makes=bool(flags & os.O_CREAT))
        return int(own(place, flags | os.O_CREAT, *args, **kwargs))  # the real file may be there alone

    def _access(self, path: Path, *args: Any, **kwargs: Any) -> bool:
        try:
            return bool(self._real["access"](self._to_read(path), *args, **kwargs))
        except FileNotFoundError:
            return False

    def _chdir(self, path: Path) -> None:
        found = self._absolute(path)
        self._real["chdir"](path if found is None or self._is_real(found) else self._to_read(path))

    def _connecting(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def connect(database: Any, *args: Any, **kwargs: Any) -> Any:
            is_file = not kwargs.get("uri") and database not in ("", b"", ":memory:", b":memory:")
            return own(self._to_write(database, keeps=True) if is_file else database, *args, **kwargs)

        return connect

    def _mkdir(self, path: Path, *args: Any, **kwargs: Any) -> None:
        found = self._absolute(path)
        if found is not None and self._exists(found):
            raise _error(errno.EEXIST, path)
        self._real["mkdir"](self._to_write(path, keeps=False), *args, **kwargs)

    def _removing(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def remove(path: Path, *args: Any, **kwargs: Any) -> None:
            found = self._absolute(path)
            if found is None or kwargs.get("dir_fd") is not None:
                own(path, *args, **kwargs)
                return
            is_folder = stat.S_ISDIR(self._real["lstat"](self._to_read(path)).st_mode)
            wants_folder = own.__name__ == "rmdir"
            if is_folder != wants_folder:
                raise _error(errno.ENOTDIR if wants_folder else errno.EISDIR, path)
            if wants_folder and self._names(path):
                raise _error(errno.ENOTEMPTY, path)
            if self._is_there(self._own(found)):
                own(self._own(found))
            self._hidden.add(found)

        return remove

    def _moving(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def move(source: Path, target: Path, *args: Any, **kwargs: Any) -> None:
            before = self._absolute(source)
            after = self._absolute(target)
            if before is None or after is None or before == after:
                own(self._to_read(source), target if after is None else self._to_write(target, keeps=False), *args, **kwargs)
                return
            self._bring(before)
            own(self._own(before), self._to_write(target, keeps=False), *args, **kwargs)
            self._hidden.add(before)
            self._hidden.add(after)  # else what a real folder had in it would show through

        return move

    def _bring(self, path: str) -> None:
        """Copy a file, or a folder with all that is in it, into the scratch folder."""
        self._to_write(path, keeps=True, makes=False)
        if self._is_folder(self._own(path)):
            for name in self._names(path):
                self._bring(os.path.join(path, name))

    def _linking(self, own: Callable[..., Any], *, is_symbolic: bool) -> Callable[..., Any]:
        @functools.wraps(own)
        def link(source: Path, target: Path, *args: Any, **kwargs: Any) -> None:
            found = self._absolute(target)
            if found is not None and self._exists(found):
                raise _error(errno.EEXIST, target)
            start = source if is_symbolic else self._to_write(source, keeps=True, makes=False)
            own(start, self._to_write(target, keeps=False), *args, **kwargs)

        return link

    def _names(self, path: Path | None) -> list[Any]:
        path = "." if path is None else path
        found = self._absolute(path)
        if found is None:
            return list(self._real["listdir"](path))
        names: set[str] = set()
        if not self._exists(found):
            raise _error(errno.ENOENT, path)
        if self._is_there(self._own(found)):
            names.update(self._real["listdir"](self._own(found)))
        if self._is_real(found):
            real = self._real["listdir"](found)
            names.update(name for name in real if not self._is_hidden(os.path.join(found, name)))
        return sorted(names)

    def _listdir(self, path: Path | None = ".") -> list[Any]:
        names = self._names(path)
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def _scandir(self, path: Path | None = ".") -> Any:
        path = "." if path is None else path
        if self._absolute(path) is None:
            return self._real["scandir"](path)
        folder: Any = path if isinstance(path, bytes) else os.fspath(path)  # type: ignore[arg-type]
        return _Scan(_Entry(name, os.path.join(folder, name)) for name in self._listdir(folder))


_READING = ("stat", "lstat", "readlink", "statvfs")
_WRITING = ("truncate", "chmod", "utime", "chown", "lchown", "setxattr", "removexattr")
_OTHERS = (
    "access", "chdir", "link", "listdir", "mkdir", "open", "remove", "rename", "replace", "rmdir", "scandir", "symlink", "unlink",
)  # fmt: skip


def _error(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), path)  # Python makes a FileNotFoundError of it, or a FileExistsError


class _Entry:
    """What `os.scandir` gives, by the functions that were replaced."""

    def __init__(self, name: Any, path: Any) -> None:
        self.name = name
        self.path = path

    def __fspath__(self) -> Any:
        return self.path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path) if follow_symlinks else os.lstat(self.path)

    def inode(self) -> int:
        return os.lstat(self.path).st_ino

    def is_symlink(self) -> bool:
        return os.path.islink(self.path)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self.path) and (follow_symlinks or not self.is_symlink())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isfile(self.path) and (follow_symlinks or not self.is_symlink())


class _Scan:
    """An iterator over entries that can be closed."""

    def __init__(self, entries: Iterator[_Entry]) -> None:
        self._entries = entries

    def __iter__(self) -> _Scan:
        return self

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> _Scan:
        return self

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None: ...
