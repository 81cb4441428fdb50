"""What keeps the process of a dry run from changing anything outside of it."""

from __future__ import annotations

import builtins
import ctypes
import io
import mmap
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from perfguard.pytorch import objects_of


def leave_databases() -> None:
    """Let this process talk over no connection to a database that the process before still has open."""
    engines = sys.modules.get("sqlalchemy.engine")
    for engine in objects_of(engines.Engine) if engines is not None else ():
        engine.dispose(close=False)


def leave_files(*, connections_but: int | None = None) -> None:
    """Read open files from a place of this process's own, and write to none that is open for writing alone.

    ``connections_but``: talk over no socket and no pipe but this one. None: over all.
    """
    import fcntl

    null, descriptors = os.open(os.devnull, os.O_RDWR), Path("/proc/self/fd")  # Linux
    for descriptor in [int(each.name) for each in descriptors.iterdir()] if descriptors.is_dir() else ():
        try:
            mode, flags = os.fstat(descriptor).st_mode, fcntl.fcntl(descriptor, fcntl.F_GETFL)
            if descriptor in (null, 0, 1, 2):
                continue
            connects = stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode)
            is_left = connects and connections_but not in (None, descriptor)
            if is_left or (stat.S_ISREG(mode) and flags & os.O_ACCMODE == os.O_WRONLY):
                os.dup2(null, descriptor)
            elif stat.S_ISREG(mode):  # a copy would share its place with the process before
                own = os.open(f"/proc/self/fd/{descriptor}", flags & (os.O_ACCMODE | os.O_APPEND))
                os.lseek(own, os.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
                os.dup2(own, descriptor)
                os.close(own)
        except OSError:  # it is closed by now, or nobody may open it again
            continue


def leave_shared_memory(*, most_bytes: int = 2**26) -> None:
    """Take the memory that this process shares with others for its own: what it writes there is its own affair.

    Memory without a file is copied, up to ``most_bytes`` for each piece. A larger one stays shared. So do those of devices.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    fixed, maps = 0x10, Path("/proc/self/maps")  # MAP_FIXED (linux/mman.h)
    for line in maps.read_text().splitlines() if maps.exists() else ():
        span, rights, offset, _, _, *path = line.split(maxsplit=5)  # proc(5): address, permissions, offset, device, inode, path
        file = Path(path[0]) if path else Path()
        if rights[1] != "w" or rights[3] != "s" or (file.is_relative_to("/dev") and file.parts[2] not in ("shm", "zero")):
            continue
        begin, end = (int(part, 16) for part in span.split("-"))
        rights_to_it = mmap.PROT_READ | mmap.PROT_WRITE
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            libc.mmap(begin, end - begin, rights_to_it, mmap.MAP_PRIVATE | fixed, descriptor, int(offset, 16))
            os.close(descriptor)
        elif end - begin <= most_bytes:
            held = ctypes.string_at(begin, end - begin)
            libc.mmap(begin, end - begin, rights_to_it, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed, -1, 0)
            ctypes.memmove(begin, held, end - begin)


def write_nothing() -> None:
    """Keep this process from changing any file: what it opens for writing is the null device. Trackers are switched off."""
    import shutil

    import safetensors.torch
    import torch
    from torch.utils._python_dispatch import _disable_current_modes
    from torch.utils._pytree import tree_map
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    from perfguard.graph.shape_rules import empty_twin

    os.environ |= {
        "WANDB_MODE": "disabled", "WANDB_SILENT": "true", "COMET_MODE": "disabled", "NEPTUNE_MODE": "debug",
        "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_DEACTIVATE_ASYNC_LOAD": "1",  # the stage is there for one thread
    }  # fmt: skip
    if (mlflow := sys.modules.get("mlflow.tracking._tracking_service.utils")) is not None:  # it has no switch, nor needs a file
        mlflow._tracking_store_registry.get_store = MagicMock()
    really_open, really_open_descriptor = builtins.open, os.open
    really_list: Callable[[Any], Any] = os.listdir
    really_load = torch.load
    made: dict[str, Any] = {}
    """What the objective believes to have made, by its path: an object that was saved, or None."""

    def place(path: Any) -> str:
        return str(Path(path).absolute()) if isinstance(path, (str, os.PathLike)) else ""

    def open_to_read(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if set(mode) & set("wax+") and not isinstance(file, int):
            made[place(file)] = None
        return really_open(os.devnull if place(file) in made else file, mode, *args, **kwargs)

    def open_descriptor(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        return really_open_descriptor(os.devnull, os.O_RDWR) if writes else really_open_descriptor(path, flags, *args, **kwargs)

    def make(path: Any, *_: Any, **__: Any) -> None:
        made[place(path)] = None

    def save(obj: Any, f: Any, *_: Any, **__: Any) -> None:
        with _disable_current_modes():  # what was saved takes no memory of the device
            made[place(f)] = tree_map(lambda x: empty_twin(x) if type(x) is torch.Tensor and x.is_meta else x, obj)

    def load(f: Any, *args: Any, **kwargs: Any) -> Any:
        found = made.get(place(f))
        return really_load(f, *args, **kwargs) if found is None else found

    def nothing(*_: Any, **__: Any) -> None: ...

    for closer in vars(tempfile._TemporaryFileCloser).values():  # type: ignore[attr-defined] # it has taken os.unlink for itself
        if defaults := getattr(closer, "__defaults__", None):
            closer.__defaults__ = tuple(nothing if default is os.unlink else default for default in defaults)
    for module in ("tensorboard.summary.writer.event_file_writer", "tensorboardX.event_file_writer"):  # whose threads are gone
        for name in ("add_event", "flush", "close", "reopen"):
            if (writer := getattr(sys.modules.get(module), "EventFileWriter", None)) is not None:
                setattr(writer, name, nothing)
    if (wandb := getattr(sys.modules.get("wandb.sdk.wandb_run"), "Run", None)) is not None:
        for name in ("log", "finish", "log_artifact", "log_code", "save", "define_metric", "watch", "alert", "use_artifact"):
            setattr(wandb, name, nothing)
    builtins.open = io.open = open_to_read
    os.open = open_descriptor
    os.listdir = lambda path=".": [] if place(path) in made and not Path(path).exists() else really_list(path)
    for name in ("mkdir", "makedirs"):
        setattr(os, name, make)
    for name in ("remove", "unlink", "rmdir", "rename", "replace", "symlink", "link", "truncate", "chmod"):
        setattr(os, name, nothing)
    for name in ("rmtree", "move", "copy", "copy2", "copyfile", "copytree"):
        setattr(shutil, name, nothing)
    for name in ("save_file", "serialize_file"):
        setattr(safetensors.torch, name, nothing)
    torch.save, torch.load = save, load
    with suppress(ImportError):  # Windows, where a new process has no files open
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # files that are open, and libraries that write by themselves
    _MultiProcessingDataLoaderIter._shutdown_workers = nothing  # type: ignore[method-assign] # they work for the process before
