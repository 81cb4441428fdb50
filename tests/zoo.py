"""Models of other people to trace: timm's and Hugging Face's, without weights."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import nn

# The wheel of torchvision on PyPI carries CUDA operators, and beside a CPU build of torch its import fails for lack of them.
# Nothing that is traced here calls one; declared by name they let it be imported.
_TORCHVISION_OPERATORS = (
    "nms", "qnms", "roi_align", "_roi_align_backward", "ps_roi_align", "_ps_roi_align_backward", "roi_pool", "_roi_pool_backward",
    "ps_roi_pool", "_ps_roi_pool_backward", "deform_conv2d", "_deform_conv2d_backward",
)  # fmt: skip
IS_COMPLETE = all(importlib.util.find_spec(name) for name in ("timm", "torchvision", "transformers"))


@functools.cache
def _torchvision_operators() -> torch.library.Library | None:
    """They last as long as somebody holds the library."""
    if torch.cuda.is_available():
        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in _TORCHVISION_OPERATORS:
        library.define(f"{name}() -> ()")
    return library


def transformers() -> Any:
    """The package."""
    _torchvision_operators()
    import transformers

    return transformers


def timm_model(name: str, size: int | None = None) -> nn.Module:
    """The timm model ``name`` for square images of ``size`` pixels; make it under ``torch.device("meta")``."""
    _torchvision_operators()
    import timm

    model: nn.Module
    if size is not None:
        try:
            model = timm.create_model(name, img_size=size)
            return model
        except TypeError:  # convolutional networks take any size
            pass
    model = timm.create_model(name)
    return model


def input_size(model: Any) -> tuple[int, int, int]:
    """Channels, height and width that a timm model wants."""
    channels, height, width = model.default_cfg["input_size"]
    return channels, height, width
