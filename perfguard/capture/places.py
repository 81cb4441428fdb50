"""What a tensor of the device says of its place: the guarded device, as in a trial. It is on meta.

    `x.device`, `x.is_cuda`, `x.is_cpu`    the guarded device
    `x.get_device()`                       its number
    `x.type()`                             its legacy type, such as "torch.cuda.FloatTensor"

The legacy types themselves, such as `torch.cuda.FloatTensor`, make tensors on the device, and are what `isinstance` finds.
`x.is_meta` is what it is, so that code can tell a dry run (docs/tracing.md). A tensor that the user makes on "meta" by name
says so. So does each that is asked within an operator of PyTorch, as by a hook of `saved_tensors_hooks`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from perfguard.graph.libraries import Replace

Answer = Callable[[torch.Tensor], object]


def answers_of(place: torch.device) -> Mapping[Any, Answer]:
    """Return what a tensor at ``place`` says of it, by the property or the function that asks."""
    is_cpu = place.type == "cpu"
    number = -1 if is_cpu else 0
    return {
        torch.Tensor.device: lambda _: place,
        torch.Tensor.is_cuda: lambda _: not is_cpu,
        torch.Tensor.is_cpu: lambda _: is_cpu,
        torch.Tensor.get_device: lambda _: number,
        torch.get_device: lambda _: number,
        torch.Tensor.type: lambda tensor: legacy_type(tensor.dtype, is_cpu=is_cpu),
    }


def asked_by(func: Any) -> Any:
    """Return the property that ``func`` reads, or the function itself."""
    return func.__self__ if type(func) is types.MethodWrapperType else func


def legacy_type(dtype: torch.dtype, *, is_cpu: bool) -> str:
    """Return the name of the type that tensors of ``dtype`` had before PyTorch 0.4, such as "torch.cuda.FloatTensor"."""
    name = torch.empty(0, dtype=dtype, device="cpu").type().removeprefix("torch.")
    return f"torch.{name}" if is_cpu else f"torch.cuda.{name}"


_LEGACY = ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")
_OF_CUDA = "torch.cuda."


def cuda_types(replace: Replace) -> None:
    """Let the legacy types of CUDA make tensors of the device. A build of PyTorch without CUDA has them only by name."""
    for name in _LEGACY:
        replace(torch.cuda, f"{name}Tensor", _standing_for)
    replace(torch, "set_default_tensor_type", _with_a_device)


def cuda_type_named(kind: Any) -> torch.dtype | None:
    """Return the dtype of a legacy type of CUDA, or of its name. None: it is none."""
    name = kind if type(kind) is str else f"{kind.__module__}.{kind.__name__}" if isinstance(kind, type) else ""
    if not name.startswith(_OF_CUDA):
        return None
    return getattr(torch, name.removeprefix(_OF_CUDA)).dtype  # type: ignore[no-any-return]


def _standing_for(own: Any) -> Any:
    """Return a class that makes and finds tensors of the device, as the legacy type ``own`` does."""
    dtype = own.dtype

    class Kind(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype is dtype

    def __new__(cls: type, *args: Any, **_: Any) -> torch.Tensor:
        holds_data = bool(args) and isinstance(args[0], (list, tuple, np.ndarray)) and not isinstance(args[0], torch.Size)
        if holds_data:
            return torch.tensor(args[0], dtype=dtype, device="cuda")
        made: torch.Tensor = torch.empty(0, dtype=dtype, device="cuda").new(*args)
        return made

    return Kind(own.__name__, (), {"__new__": __new__, "__module__": own.__module__, "dtype": dtype, "is_cuda": True})


def _with_a_device(own: Callable[[Any], None]) -> Callable[[Any], None]:
    def set_default_tensor_type(t: Any) -> None:
        dtype = cuda_type_named(t)
        if dtype is None:
            own(t)
            return
        torch.set_default_dtype(dtype)
        torch.set_default_device("cuda")

    return set_default_tensor_type
