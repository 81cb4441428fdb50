"""Trackers of experiments are switched off.

A dry run is no experiment, and the threads that write for them are not in its process.
"""

from __future__ import annotations

import os
import sys
from unittest.mock import MagicMock

_SWITCHES = {
    "WANDB_MODE": "disabled", "WANDB_SILENT": "true", "COMET_MODE": "disabled", "NEPTUNE_MODE": "debug",
    "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DEACTIVATE_ASYNC_LOAD": "1",  # the stage is there for one thread
}  # fmt: skip
_METHODS = {
    "tensorboard.summary.writer.event_file_writer.EventFileWriter": ("add_event", "flush", "close", "reopen"),
    "tensorboardX.event_file_writer.EventFileWriter": ("add_event", "flush", "close", "reopen"),
    "wandb.sdk.wandb_run.Run": (
        "log", "finish", "log_artifact", "log_code", "save", "define_metric", "watch", "alert", "use_artifact",
    ),
}  # fmt: skip
"""What trackers that run already do, by their classes."""


def switch_off_trackers() -> None:
    """Let those that are imported already do nothing, and tell the others by their environment variables."""
    os.environ |= _SWITCHES
    mlflow = sys.modules.get("mlflow.tracking._tracking_service.utils")
    if mlflow is not None:  # it has no switch
        mlflow._tracking_store_registry.get_store = MagicMock()
    for path, names in _METHODS.items():
        module, kind = path.rsplit(".", 1)
        for name in names if (found := getattr(sys.modules.get(module), kind, None)) is not None else ():
            setattr(found, name, _do_nothing)


def _do_nothing(*_: object, **__: object) -> None: ...
