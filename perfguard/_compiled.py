"""What of a model torch.compile wraps."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def is_compiled(model: Any) -> bool:
    """Whether torch.compile wraps ``model``, or the one module in a wrapper without parameters of its own, such as DDP."""
    import torch

    if _is_wrapped(model) or not isinstance(model, torch.nn.Module):
        return _is_wrapped(model)
    children = list(model.children())
    return len(children) == 1 and not model._parameters and is_compiled(children[0])


def module_inside(module: nn.Module) -> nn.Module:
    """The module in ``torch.compile(module)``. Any other module is returned as it is."""
    inside: nn.Module = vars(module)["_modules"]["_orig_mod"] if _is_optimized(module) else module
    return inside


def function_inside(function: Any) -> Any:
    """What torch.compile was given to make ``function``. None: it did not make it."""
    return vars(function).get("_torchdynamo_orig_callable") if isinstance(function, FunctionType) else None


def path_inside(path: str) -> str:
    """The path of a submodule or parameter as it is without torch.compile."""
    return path.replace("._orig_mod", "")


def compiled_parts(model: nn.Module) -> Iterator[str]:
    """The paths of what torch.compile wraps: submodules, and functions of a module, of its class or that its forward names."""
    within: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if path.startswith(within):
            continue
        prefix = f"{path}." if path else ""
        if _is_wrapped(module):
            within += (prefix,)
            yield path_inside(path) or "the model"
        else:
            yield from (path_inside(prefix) + name for name, value in _values_of(module).items() if _is_wrapped(value))


def _is_wrapped(value: Any) -> bool:
    if function_inside(value) is not None:
        return "_torchdynamo_disable" not in vars(value)
    state = getattr(value, "__dict__", {})
    if _is_optimized(value):  # torch.compiler.disable makes one, too
        return _is_wrapped(state.get("_forward", state.get("forward")))
    return function_inside(state.get("_compiled_call_impl")) is not None  # module.compile()


def _is_optimized(value: Any) -> bool:
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")  # not loaded: nothing is compiled
    return eval_frame is not None and isinstance(value, eval_frame.OptimizedModule)


def _values_of(module: nn.Module) -> dict[str, Any]:
    forward = getattr(type(module), "forward", None)
    code, variables = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    values = {name: variables.get(name) for name in code.co_names} if code else {}
    for base in reversed(type(module).__mro__):
        values |= {} if base.__module__.startswith("torch.") else vars(base)
    return values | vars(module)
