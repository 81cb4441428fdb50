"""What keeps the process of a dry run from changing anything outside of it."""

from __future__ import annotations

import builtins
import gc
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock


def leave_databases() -> None:
    """Let this process talk over no connection to a database that the process before still has open."""
    engines = sys.modules.get("sqlalchemy.engine")
    if engines is not None:
        for found in gc.get_objects():
            if issubclass(type(found), engines.Engine):  # `isinstance` would ask a proxy, which may raise
                found.dispose(close=False)


def write_nothing() -> None:
    """Keep this process from changing any file: what it opens for writing is the null device. Trackers are switched off."""
    import resource
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
    # Files that are open already, and libraries that write by themselves: logs, databases.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    _MultiProcessingDataLoaderIter._shutdown_workers = nothing  # type: ignore[method-assign] # they work for the process before
