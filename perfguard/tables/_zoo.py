"""Models by the names that tables give them."""

from __future__ import annotations

import functools
import importlib
import re
import sys
from typing import Any

import torch
from torch import nn

from perfguard.exceptions import TableError

# PyPI's wheel of torchvision carries CUDA operators. Beside a CPU build of torch they cannot be loaded, and its import fails for
# lack of them. Nothing that is traced calls one; declared by name they let it be imported.
_TORCHVISION_OPERATORS = (
    "nms", "qnms", "roi_align", "_roi_align_backward", "ps_roi_align", "_ps_roi_align_backward", "roi_pool", "_roi_pool_backward",
    "ps_roi_pool", "_ps_roi_pool_backward", "deform_conv2d", "_deform_conv2d_backward",
)  # fmt: skip
_declared: list[torch.library.Library] = []


@functools.cache
def _timm() -> Any:
    prepare_torchvision()
    try:
        return importlib.import_module("timm")
    except ImportError as error:
        raise TableError(f"The models of this table are timm's, which cannot be imported ({error}): pip install timm.") from error


@functools.cache
def prepare_torchvision() -> None:
    """Make ``import torchvision`` work beside a CPU build of torch, if it is installed at all."""
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in _TORCHVISION_OPERATORS:
            library.define(f"{name}() -> ()")
        _declared.append(library)  # it lasts as long as somebody holds it


def timm_model(name: str, size: int | None = None, *, fused_attention: bool = True) -> nn.Module:
    """The timm model ``name``, without weights, for square images of ``size`` pixels (None: its own).

    Make it under ``torch.device("meta")`` and it costs no memory. Without ``fused_attention`` it multiplies its matrices one by
    one, as everybody did before PyTorch 2.

    Raises:
        TableError: if timm is missing, or does not know the model or the size.
    """
    timm = _timm()
    timm.layers.set_fused_attn(fused_attention)
    try:
        return _created(name, size)
    except Exception as error:
        retired = re.search(r"Invalid pretrained tag \(.*\) for ([\w.]+)\.", str(error))
        if retired:  # weights that timm no longer has, of an architecture that it still has
            return _created(retired[1], size)
        raise TableError(f"timm cannot make the model {name!r}: {type(error).__name__}: {error}") from error
    finally:
        timm.layers.set_fused_attn(True)


def _created(name: str, size: int | None) -> nn.Module:
    create = _timm().create_model
    model: nn.Module
    if size is not None:
        try:
            model = create(name, img_size=size)
            return model
        except TypeError:  # a convolutional network takes any size
            pass
    model = create(name)
    return model
