"""Tensors in nests of tuples, lists and dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in ``value``, in order. A tensor that occurs twice is listed twice."""
    found: list[torch.Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, Mapping):
        for item in value.values():
            _collect(item, found)


def is_meta(value: Any) -> bool:
    """Whether ``value`` is a tensor on the meta device."""
    return isinstance(value, torch.Tensor) and value.is_meta
