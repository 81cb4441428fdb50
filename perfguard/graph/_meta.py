"""A workload's model and batch on the meta device, the user's own objects left as they are."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from perfguard._batch import mapped
from perfguard.exceptions import TraceError, WorkloadError
from perfguard.pytorch import function_inside
from perfguard.workload import TensorSpec, Workload

META = torch.device("meta")
_PURE = {"fp16": torch.float16, "bf16": torch.bfloat16}


def model_on_meta(workload: Workload) -> nn.Module:
    """The model with every tensor replaced by one without memory, in the workload's precision and layout.

    A model that is on meta already is used as it is where nothing has to be converted. Otherwise a copy is made, and nothing
    is allocated for it: ``copy.deepcopy`` finds the replacement of each tensor in its memo. Only a model on meta that cannot
    be copied is converted itself.
    """
    model = workload.model
    if not isinstance(model, nn.Module):
        raise WorkloadError(f"Workload.model must be a torch.nn.Module, but got {type(model).__name__}.")
    on_meta = all(tensor.is_meta for tensor in _tensors_of(model))
    if on_meta and workload.precision not in _PURE and workload.layout == "nchw":
        return model
    try:
        twins: dict[int, Any] = {id(tensor): _empty_twin(tensor) for tensor in _tensors_of(model)}
        model = copy.deepcopy(model, twins)
        _rebind_compiled_methods(model, twins)
    except Exception as error:
        if not on_meta:
            raise TraceError(
                f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}). "
                f'Build it under `with torch.device("meta"):`, or give `build=` instead of a live model.'
            ) from error
    if workload.precision in _PURE:
        model = model.to(_PURE[workload.precision])
    if workload.layout == "nhwc":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def _rebind_compiled_methods(model: nn.Module, twins: dict[int, Any]) -> None:
    """A compiled method that an instance holds is copied as a function, so it would still run on the original."""
    for module in model.modules():
        for name, value in vars(module).items():
            inside = function_inside(value)
            if id(getattr(inside, "__self__", None)) in twins:
                vars(module)[name] = copy.deepcopy(inside, twins)


def loss_on_meta(workload: Workload) -> Any:
    """The loss; a module's own tensors (class weights) are replaced as the model's are."""
    if not isinstance(workload.loss, nn.Module):
        return workload.loss
    return copy.deepcopy(workload.loss, {id(tensor): _empty_twin(tensor) for tensor in _tensors_of(workload.loss)})


def _tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():  # tensors kept as plain attributes
        yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))


def _empty_twin(tensor: torch.Tensor) -> torch.Tensor:
    twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad)


def batch_on_meta(value: Any, workload: Workload) -> Any:
    """Tensors, TensorSpecs and shapes, nested in tuples, lists and dicts, as meta tensors."""

    def on_meta(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return _cast(torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=META), workload)
        if isinstance(leaf, TensorSpec):
            return _cast(torch.empty(leaf.shape, dtype=_dtype_named(leaf.dtype), device=META), workload)
        return leaf

    return mapped(value, on_meta)


def _dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise WorkloadError(f'TensorSpec.dtype must name a torch dtype such as "float32" or "int64", but got {name!r}.')
    return dtype


def _cast(tensor: torch.Tensor, workload: Workload) -> torch.Tensor:
    if workload.precision in _PURE and tensor.is_floating_point():
        tensor = tensor.to(_PURE[workload.precision])
    if workload.layout == "nhwc" and tensor.dim() == 4:
        tensor = tensor.to(memory_format=torch.channels_last)
    return tensor
