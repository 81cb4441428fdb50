"""Models of other people to trace: timm's and Hugging Face's, without weights."""

from __future__ import annotations

import importlib.util
from typing import Any

from perfguard.tables import prepare_torchvision

IS_COMPLETE = all(importlib.util.find_spec(name) for name in ("timm", "torchvision", "transformers"))


def transformers() -> Any:
    """The package; it imports torchvision where there is one."""
    prepare_torchvision()
    import transformers

    return transformers


def input_size(model: Any) -> tuple[int, int, int]:
    """Channels, height and width that a timm model wants."""
    channels, height, width = model.default_cfg["input_size"]
    return channels, height, width
