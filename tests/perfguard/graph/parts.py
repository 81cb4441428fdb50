"""Parts of workloads that several tests of graphs use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def total(output: Any) -> torch.Tensor:
    """A loss of the first output."""
    first: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return first.sum()


class Scale(nn.Module):
    """Its output needs a gradient, so that what follows has two of them to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Apply(nn.Module):
    """Any function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)
