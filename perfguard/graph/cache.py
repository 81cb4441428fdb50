"""Graphs of equal workloads: one trace serves all.

A study traces the same network many times, with another learning rate or seed. Two workloads with equal keys have the same graph.
A key has the tree of modules by value, the shapes and dtypes of all tensors, and every hyperparameter that changes a step. Where
something cannot be compared by value, there is no key, and the workload is traced.
"""

from __future__ import annotations

import enum
import functools
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from perfguard.graph.kernels import Target, target_of
from perfguard.graph.opgraph import OpGraph
from perfguard.graph.trace import trace
from perfguard.pytorch import function_inside, module_inside
from perfguard.workload import TensorSpec, Workload, mapped

if TYPE_CHECKING:
    from perfguard.devices import Device

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.memory_format)
_EXACTLY_PLAIN = frozenset(_PLAIN)
_CONTAINERS = frozenset({tuple, list, dict, OrderedDict, torch.Size})
_EMPTY = frozenset({dict, OrderedDict, set})  # most attributes of a module are empty dictionaries of hooks
_OF_COMPILER = frozenset({"_compiled_call_impl", "_is_torch_compile", "_compile_kwargs"})
"""Attributes by which torch.compile marks a module, and Lightning's own torch.compile."""
_MOST_VALUES = 200_000


class TraceCache:
    """:func:`trace`, remembering the graphs of the last ``most_graphs`` different workloads. Thread-safe; holds no tensors."""

    def __init__(self, most_graphs: int = 128) -> None:
        self._graphs: OrderedDict[Hashable, OpGraph] = OrderedDict()
        self._most_graphs = most_graphs
        self._lock = threading.Lock()

    def trace(self, workload: Workload, *, target: Device | Literal["cuda", "cpu"] = "cuda") -> OpGraph:
        """Same as :func:`perfguard.graph.trace`, with the same errors."""
        key = structure_of(workload, target_of(target))
        if key is None:
            return trace(workload, target=target)
        with self._lock:
            graph = self._graphs.pop(key, None)
            if graph is not None:
                self._graphs[key] = graph  # now the newest
        if graph is None:
            graph = trace(workload, target=target)  # outside of the lock: other threads trace meanwhile
            with self._lock:
                self._graphs[key] = graph
                if len(self._graphs) > self._most_graphs:
                    self._graphs.popitem(last=False)
        return graph


class _Indescribable(Exception):
    """Something that cannot be compared by value, such as an open file."""


def structure_of(workload: Workload, target: Target) -> Hashable | None:
    """The key of ``workload`` on ``target``; None if it holds something that cannot be compared by value.

    What code reads from global variables is not seen.
    """
    describe = _Describer(compiled=workload.compiled)
    try:
        parts: list[Hashable] = [target, _ambient()]
        for field in fields(workload):
            value = getattr(workload, field.name)
            if field.name in ("inputs", "targets"):
                parts.append(describe(mapped(value, _leaf)))
            elif field.name == "optimizer":
                parts.append(_optimizer(value, describe) if workload.mode == "train" else None)
            elif field.name not in ("steps", "steps_per_epoch"):  # they change no step
                parts.append(describe(value))
        return tuple(parts)
    except (_Indescribable, RecursionError, AttributeError, TypeError, ValueError):
        return None


def _leaf(leaf: Any) -> Any:
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
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), torch.get_default_dtype()


def _optimizer(value: Any, describe: _Describer) -> Hashable:
    """Key of an optimizer. Only whether a number is zero matters: lr and betas change no kernel."""
    if isinstance(value, Mapping):
        return tuple((path, _optimizer(item, describe)) for path, item in value.items())
    if isinstance(value, functools.partial) and isinstance(value.func, type) and issubclass(value.func, torch.optim.Optimizer):
        numbers = tuple((key, _kind_of(item, describe)) for key, item in sorted(value.keywords.items()))
        return describe(value.func), describe(value.args), numbers
    if isinstance(value, torch.optim.Optimizer):
        groups = tuple(
            (
                tuple((key, _kind_of(item, describe)) for key, item in sorted(group.items()) if key != "params"),
                tuple(map(describe, group["params"])),
            )
            for group in value.param_groups
        )
        return type(value), groups
    return describe(value)


def _kind_of(value: Any, describe: _Describer) -> Hashable:
    if isinstance(value, float):
        return float, value != 0
    if isinstance(value, (tuple, list)):
        return type(value), tuple(_kind_of(item, describe) for item in value)
    return describe(value)


class _Describer:
    """Values by content, objects that were met before by the order of their first meeting (so that ties are kept)."""

    def __init__(self, *, compiled: bool) -> None:
        self._compiled = compiled
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []
        self._classes: set[type] = set()

    def __call__(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in _EXACTLY_PLAIN:
            return kind, value
        if (kind is dict or kind is OrderedDict) and not value:  # the hooks that a module does not have
            return kind
        if isinstance(value, type):
            return value
        key = id(value)
        if key in self._seen:
            return "again", self._seen[key]
        self._seen[key] = len(self._seen)
        self._kept.append(value)  # an id is good as long as its object lives
        if len(self._kept) > _MOST_VALUES:
            raise _Indescribable
        return self._describe(value)

    def _describe(self, value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, (tuple, list)):
            return type(value), tuple(map(self, value)), self._state(value)
        if isinstance(value, Mapping):
            return type(value), self._items(value), self._state(value)
        if isinstance(value, (set, frozenset)):
            if not all(isinstance(item, _PLAIN) for item in value):
                raise _Indescribable
            return type(value), frozenset(value)
        if isinstance(value, enum.Enum):
            return value
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, types.FunctionType):
            inside = function_inside(value)
            if inside is not None:
                return self._wrapped(inside)
            cells = tuple(self(cell.cell_contents) for cell in value.__closure__ or ())
            state = self(value.__dict__) if value.__dict__ else None
            return value.__code__, self(value.__defaults__), self(value.__kwdefaults__), cells, state
        if isinstance(value, types.MethodType):
            return types.MethodType, self(value.__func__), self(value.__self__)
        if isinstance(value, functools.partial):
            return functools.partial, self(value.func), self(value.args), self(value.keywords)
        if isinstance(value, weakref.ref):
            return weakref.ref, self(value())
        if isinstance(value, (types.BuiltinFunctionType, types.MethodDescriptorType, types.ModuleType, torch._ops.OpOverload)):
            return value
        if is_dataclass(value) or type(value).__module__ not in ("builtins", "_io", "_thread", "threading"):
            return type(value), self._state(value)
        raise _Indescribable

    def _module(self, module: nn.Module) -> Hashable:
        """Describe parameters and buffers by their shapes, which are all that a trace reads, and other objects by value."""
        if module_inside(module) is not module:
            return self._wrapped(module_inside(module))
        state = vars(module)
        tensors = tuple(
            (name, None if tensor is None else self._known_tensor(tensor))
            for kind in ("_parameters", "_buffers")
            for name, tensor in state[kind].items()
        )
        rest: list[Hashable] = []
        for key, item in state.items():
            kind = type(item)
            if key in _OF_COMPILER:  # None: it is not compiled
                rest += [] if self._compiled or item is None else ["compiled"]
            elif kind in _EXACTLY_PLAIN:
                rest.append((key, kind, item))
            elif kind in _EMPTY and not item:
                rest.append((key, kind))
            elif key not in ("_parameters", "_buffers"):
                rest.append((key, self(item)))
        return type(module), self._class_attributes(type(module)), tensors, tuple(rest)

    def _wrapped(self, inside: Any) -> Hashable:
        """Key of what torch.compile wraps: of a part of the model it matters that it is compiled, since the graph says so."""
        return self(inside) if self._compiled else ("compiled", self(inside))

    def _class_attributes(self, cls: type) -> Hashable:
        """Plain values that a class of the user's own holds for all its instances: they may have been changed."""
        if cls in self._classes:
            return None
        self._classes.add(cls)
        return tuple(
            (name, value)
            for base in cls.__mro__
            if not base.__module__.startswith(("torch.", "builtins"))
            for name, value in vars(base).items()
            if type(value) in _EXACTLY_PLAIN
        )

    def _state(self, value: Any) -> Hashable:
        """Attributes of an object that is no plain container, wherever it keeps them."""
        kind = type(value)
        if kind in _CONTAINERS:
            return None
        parts: list[Hashable] = []
        for base in kind.__mro__:
            slots = vars(base).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else tuple(slots):
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    parts.append((name, self(getattr(value, name))))
        state = getattr(value, "__dict__", None)
        if state is None and not parts and not isinstance(value, (tuple, list, Mapping)):
            raise _Indescribable
        return (*parts, self._items(state or {}))

    def _known_tensor(self, tensor: torch.Tensor) -> Hashable:
        if id(tensor) in self._seen:
            return "again", self._seen[id(tensor)]
        self._seen[id(tensor)] = len(self._seen)
        self._kept.append(tensor)
        return self._tensor_key(tensor)

    def _items(self, value: Mapping[Any, Any]) -> Hashable:
        return tuple([(key if type(key) is str else self(key), self(item)) for key, item in value.items()])

    def _tensor(self, value: torch.Tensor) -> Hashable:
        if not value.is_meta:  # its values may be read
            raise _Indescribable
        return self._tensor_key(value)

    def _tensor_key(self, value: torch.Tensor) -> Hashable:
        if value.grad_fn is not None or type(value) not in (torch.Tensor, nn.Parameter):
            raise _Indescribable
        return type(value), value.shape, value.stride(), value.dtype, value.requires_grad
