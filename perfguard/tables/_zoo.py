"""Models by the names that tables give them."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from perfguard.exceptions import TableError, why_not_imported


@functools.cache
def _timm() -> Any:
    try:
        return importlib.import_module("timm")
    except ImportError as error:
        raise TableError(why_not_imported(error, "timm", "The models of this table are timm's: pip install timm.")) from error
    except RuntimeError as error:  # a torchvision that was built for another PyTorch
        raise TableError(f"The models of this table are timm's, but importing it failed with RuntimeError: {error}") from error


def timm_model(name: str, size: int | None = None, *, fused_attention: bool = True, **options: Any) -> nn.Module:
    """The timm model ``name``, without weights, for square images of ``size`` pixels (None: its own), made with ``options``.

    Make it under ``torch.device("meta")`` and it costs no memory. Without ``fused_attention`` it multiplies its matrices one by
    one, as was usual before PyTorch 2.

    Raises:
        TableError: if timm is missing, or does not know the model or the size.
    """
    timm = _timm()
    timm.layers.set_fused_attn(fused_attention)
    try:
        return _created(name, size, options)
    except Exception as error:
        retired = re.search(r"Invalid pretrained tag \(.*\) for ([\w.]+)\.", str(error))
        if retired:  # weights that timm no longer has, of an architecture that it still has
            return _created(retired[1], size, options)
        raise TableError(f"timm cannot make the model {name!r}: {type(error).__name__}: {error}") from error
    finally:
        timm.layers.set_fused_attn(True)


def _created(name: str, size: int | None, options: Mapping[str, Any]) -> nn.Module:
    create = _timm().create_model
    model: nn.Module
    if size is not None:
        try:
            model = create(name, img_size=size, **options)
            return model
        except TypeError:  # a convolutional network takes any size
            pass
    model = create(name, **options)
    return model
