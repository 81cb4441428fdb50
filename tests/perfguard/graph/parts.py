"""Parts of workloads that several tests of graphs use."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from perfguard.graph.recorder import tensors_in


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


class RealBytes(TorchDispatchMode):
    """Sums the bytes of the storages that are alive after each operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[int, int] = {}
        self.most = 0
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._count = itertools.count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in((args, kwargs or {}, out)):
            storage = tensor.untyped_storage()
            if storage not in self._numbers:
                number = self._numbers[storage] = next(self._count)
                self.alive[number] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, number)
        self.most = max(self.most, sum(self.alive.values()))
        return out
