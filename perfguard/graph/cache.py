"""Graphs of equal workloads: one trace serves all.

A study traces the same network many times, with another learning rate or seed. Two workloads with equal keys have the same graph.
A key is the workload as pickle writes it: the tree of modules by value, the shapes and dtypes of all tensors, and every
hyperparameter that changes a step. Where something cannot be compared by value, there is no key, and the workload is traced.
"""

from __future__ import annotations

import functools
import io
import pickle
import types
import weakref
from collections.abc import Hashable, Mapping
from dataclasses import fields
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch._library.custom_ops import CustomOpDef
from torch.utils.flop_counter import flop_registry

from perfguard.graph.kernels import Target, target_of
from perfguard.graph.opgraph import OpGraph
from perfguard.graph.trace import trace
from perfguard.last_used import LastUsed
from perfguard.pytorch import function_inside, module_inside
from perfguard.workload import TensorSpec, Workload, mapped

if TYPE_CHECKING:
    from perfguard.devices import Device

_OF_COMPILER = ("_compiled_call_impl", "_is_torch_compile", "_compile_kwargs")
"""Attributes by which torch.compile marks a module, and Lightning's own torch.compile."""
_LEAVES = (type, types.CodeType, types.BuiltinFunctionType, types.MethodDescriptorType, types.ModuleType, torch._ops.OpOverload,
           torch._ops.OpOverloadPacket, CustomOpDef, torch.dtype, torch.device, torch.memory_format)  # fmt: skip
"""What is compared as it is."""


class TraceCache:
    """:func:`trace`, remembering the graphs of the workloads that were traced last. Thread-safe; holds no tensors.

    Args:
        most_graphs: the most graphs that are remembered.
        most_operators: the most operators that all of them have together. One takes about 1 KiB.
    """

    def __init__(self, most_graphs: int = 128, *, most_operators: int = 100_000) -> None:
        self._graphs: LastUsed[Hashable, OpGraph] = LastUsed(most_graphs, most_weight=most_operators, weigh=_num_operators)

    def trace(self, workload: Workload, *, target: Device | Literal["cuda", "cpu"] = "cuda") -> OpGraph:
        """Same as :func:`perfguard.graph.trace`, with the same errors."""
        key = structure_of(workload, target_of(target))
        graph = None if key is None else self._graphs.get(key)
        if graph is None:
            graph = trace(workload, target=target)  # outside of the lock: other threads trace meanwhile
            if key is not None:
                self._graphs.put(key, graph)
        return graph


def _num_operators(graph: OpGraph) -> int:
    return len(graph.ops)


class _Indescribable(Exception):
    """Something that cannot be compared by value, such as the numbers in a tensor."""


def structure_of(workload: Workload, target: Target) -> Hashable | None:
    """The key of ``workload`` on ``target``; None if it holds something that cannot be compared by value.

    What code reads from global variables is not seen, nor what an object leaves out of its pickle.
    """
    written = _Bounded()
    pickler = _ByValue(written, compiled=workload.compiled)
    try:
        parts = {field.name: getattr(workload, field.name) for field in fields(workload)}
        del parts["steps"], parts["steps_per_epoch"]  # they change no step
        parts["inputs"] = mapped(workload.inputs, _sizes)
        parts["targets"] = mapped(workload.targets, _sizes)
        parts["optimizer"] = _optimizer(workload.optimizer) if workload.mode == "train" else None
        pickler.dump((_ambient(), parts))
    except Exception:  # whatever the user's objects raise when they are pickled
        return None
    return target, sha256(written.getvalue()).digest(), tuple(pickler.leaves)  # the bytes may be 16 MiB


def _sizes(leaf: Any) -> Any:
    """A tensor of a batch, of which only shape and dtype are read. Its strides would be, too, so it must be contiguous."""
    if isinstance(leaf, torch.Tensor) and not leaf.is_contiguous():
        raise _Indescribable
    if not isinstance(leaf, (torch.Tensor, TensorSpec)):
        return leaf
    return TensorSpec, tuple(leaf.shape), str(leaf.dtype).removeprefix("torch.")


def _ambient() -> Hashable:
    """Switches of PyTorch that the trace reads."""
    hooks = torch.nn.modules.module
    if hooks._global_forward_hooks or hooks._global_forward_pre_hooks or hooks._global_backward_hooks:
        raise _Indescribable
    cuda = torch.backends.cuda
    # Formulas of FLOPs are only ever added.
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), torch.get_default_dtype(), len(flop_registry)


def _optimizer(value: Any) -> Any:
    """What matters of an optimizer. Of a number only whether it is zero: lr and betas change no kernel."""
    if isinstance(value, Mapping):
        return {path: _optimizer(item) for path, item in value.items()}
    if isinstance(value, functools.partial) and isinstance(value.func, type) and issubclass(value.func, torch.optim.Optimizer):
        return value.func, value.args, _without_numbers(value.keywords)
    if isinstance(value, torch.optim.Optimizer):
        return type(value), [_without_numbers(group) for group in value.param_groups]
    return value


def _without_numbers(value: Any) -> Any:
    if isinstance(value, float):
        return float, value != 0
    if isinstance(value, (tuple, list)):
        return type(value), [_without_numbers(item) for item in value]
    return {key: _without_numbers(value[key]) for key in sorted(value)} if isinstance(value, Mapping) else value


class _Bounded(io.BytesIO):
    """A file in memory. A data set of the user's, for instance, is not compared."""

    def write(self, data: Any) -> int:
        most_bytes = 2**24
        if self.tell() + len(data) > most_bytes:
            raise _Indescribable
        return super().write(data)


class _ByValue(pickle.Pickler):
    """Writes values by content, and an object that was met before as a reference to it (so that ties are kept)."""

    def __init__(self, file: _Bounded, *, compiled: bool) -> None:
        super().__init__(file, protocol=5)
        self.leaves: list[Hashable] = []
        """Classes, code and so on, in the order in which they are met."""
        self._compiled = compiled
        self._shapes_alone: set[int] = set()
        """Ids of parameters and buffers: a trace does not read their values."""

    def reducer_override(self, value: Any) -> Any:
        """Return what is written in place of ``value``, when it is met for the first time."""
        if value is _leaf:
            return NotImplemented
        if isinstance(value, _LEAVES):
            self.leaves.append(value)
            return _leaf, (_plain_attributes(value) if isinstance(value, type) else (),)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, types.FunctionType):
            inside = function_inside(value)
            if inside is not None:
                return self._wrapped(inside)
            cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
            return types.FunctionType, (value.__code__,), (value.__defaults__, value.__kwdefaults__, cells, vars(value))
        if isinstance(value, types.MethodType):  # pickle would write the name alone, and it may be patched onto the object
            return types.MethodType, (value.__func__, value.__self__)
        if isinstance(value, functools._lru_cache_wrapper):  # pickle would write the name alone
            return functools.cache, (value.__wrapped__,)
        if isinstance(value, weakref.ref):
            return weakref.ref, (value(),)
        return NotImplemented

    def _tensor(self, value: torch.Tensor) -> Any:
        if not value.is_meta and id(value) not in self._shapes_alone:  # its values may be read
            raise _Indescribable
        if value.grad_fn is not None or type(value) not in (torch.Tensor, nn.Parameter):
            raise _Indescribable
        return type(value), (tuple(value.shape), value.stride(), value.dtype, value.requires_grad)

    def _module(self, module: nn.Module) -> Any:
        inside = module_inside(module)
        if inside is not module:
            return self._wrapped(inside)
        attributes = vars(module)
        is_compiled = not self._compiled and any(attributes.get(name) is not None for name in _OF_COMPILER)
        state = {
            name: value
            for name, value in attributes.items()
            if name not in _OF_COMPILER and (not isinstance(value, dict) or value)  # most dictionaries of hooks are empty
        }
        self._shapes_alone.update(map(id, (*module._parameters.values(), *module._buffers.values())))
        return type(module), (is_compiled,), state

    def _wrapped(self, inside: Any) -> Any:
        """What torch.compile wraps: of a part of the model it matters that it is compiled, since the graph says so."""
        return self.reducer_override(inside) if self._compiled else (torch.compile, (inside,))


def _leaf(attributes: Any) -> None:
    """Stands for a leaf in the bytes."""


def _plain_attributes(cls: type) -> list[tuple[str, Any]]:
    """Plain values that a class of the user's own holds for all its instances: they may have been changed."""
    return [
        (name, value)
        for base in cls.__mro__
        if not base.__module__.startswith(("torch.", "builtins"))
        for name, value in vars(base).items()
        if type(value) in (bool, int, float, complex, str, bytes, type(None))
    ]
