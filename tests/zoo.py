"""Models of other people to trace: timm's and Hugging Face's, without weights."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

# The wheel of torchvision on PyPI carries CUDA operators, and beside a CPU build of torch its import fails for lack of them.
# Nothing that is traced here calls one; declared by name they let it be imported.
_TORCHVISION_OPERATORS = (
    "nms", "qnms", "roi_align", "_roi_align_backward", "ps_roi_align", "_ps_roi_align_backward", "roi_pool", "_roi_pool_backward",
    "ps_roi_pool", "_ps_roi_pool_backward", "deform_conv2d", "_deform_conv2d_backward",
)  # fmt: skip


@functools.cache
def _timm() -> Any:
    if not torch.cuda.is_available():
        library = torch.library.Library("torchvision", "DEF")
        for name in _TORCHVISION_OPERATORS:
            library.define(f"{name}() -> ()")
        globals()["_library"] = library  # it lasts as long as somebody holds it
    import timm

    return timm


def timm_model(name: str, size: int | None = None) -> nn.Module:
    """The timm model ``name`` for square images of ``size`` pixels; make it under ``torch.device("meta")``."""
    timm = _timm()
    if size is not None:
        try:
            model: nn.Module = timm.create_model(name, img_size=size)
            return model
        except TypeError:  # convolutional networks take any size
            pass
    model = timm.create_model(name)
    return model
