"""What describes a model in another form runs it once in a dry run, and the model stands for its description.

torch.jit.trace       sizes are tensors while it runs, which PyTorch's operators on meta refuse. Its graph is empty, so that
                      `SummaryWriter.add_graph` draws nothing
torch.onnx.export     a file of weights, which have no values
torch.export.export   runs on fake tensors of its own, outside of the dry run
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

from perfguard.graph.libraries import Replace


def describing(replace: Replace) -> None:
    """Let the functions that describe a model run it."""
    replace(torch.jit, "trace", lambda _: _trace)
    replace(torch.jit, "save", _saving)
    replace(torch._C, "_jit_pass_inline", lambda own: lambda graph: None if isinstance(graph, _NoGraph) else own(graph))
    replace(torch.onnx, "export", lambda _: _export_to_onnx)
    replace(torch.export, "export", _outside)


def _run_once(model: Callable[..., Any], inputs: Any) -> None:
    with torch.no_grad():
        model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def _trace(func: Any, example_inputs: Any = None, *_: Any, example_kwarg_inputs: Any = None, **__: Any) -> Any:
    if example_kwarg_inputs is None:
        _run_once(func, example_inputs)
    else:
        _run_once(functools.partial(func, **example_kwarg_inputs), ())
    if not isinstance(func, nn.Module):
        return func
    traced = copy.copy(func)  # it shares all parts and parameters
    traced.__class__ = type(type(func).__name__, (type(func),), {"save": _do_nothing, "graph": _NoGraph(), "code": ""})
    return traced


def _export_to_onnx(model: Any, args: Any = (), f: Any = None, *_: Any, kwargs: Any = None, **__: Any) -> None:
    _run_once(functools.partial(model, **(kwargs or {})), args)


class _NoGraph:
    """A graph without nodes."""

    def __getattr__(self, name: str) -> Callable[..., list[Any]]:
        return lambda *_: []  # inputs, nodes, outputs


def _saving(own: Callable[..., None]) -> Callable[..., None]:
    def save(m: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(m, torch.jit.ScriptModule):
            own(m, f, *args, **kwargs)

    return save


def _do_nothing(*_: Any, **__: Any) -> None: ...


def _outside(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def export(*args: Any, **kwargs: Any) -> Any:
        with _without_modes():
            return own(*args, **kwargs)

    return export


@contextmanager
def _without_modes() -> Iterator[None]:
    modes = _get_current_function_mode_stack()
    with _disable_current_modes():
        for _ in modes:
            _pop_mode()
        try:
            yield
        finally:
            for mode in modes:
                _push_mode(mode)
