"""Models of other people to trace: timm's and Hugging Face's, without weights."""

from __future__ import annotations

import importlib.util
from typing import Any

IS_COMPLETE = all(importlib.util.find_spec(name) for name in ("timm", "torchvision", "transformers"))


def input_size(model: Any) -> tuple[int, int, int]:
    """Channels, height and width that a timm model wants."""
    channels, height, width = model.default_cfg["input_size"]
    return channels, height, width
