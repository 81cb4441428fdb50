"""What PyTorch does around a step: compiled models, random numbers, garbage, and errors on tensors that are too large.

Importing this module does not import torch.
"""

from __future__ import annotations

import gc
import random
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any

from perfguard.exceptions import TooLargeError

if TYPE_CHECKING:
    from torch import nn


def is_compiled(model: object) -> bool:
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


def function_inside(function: object) -> Any:
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


def has_data_parallel(model: nn.Module) -> bool:
    """Whether ``model`` is spread over the GPUs of one process, or a part of it."""
    from torch import nn

    return any(isinstance(module, nn.DataParallel) for module in model.modules())


def _is_wrapped(value: object) -> bool:
    if function_inside(value) is not None:
        return "_torchdynamo_disable" not in vars(value)
    state = getattr(value, "__dict__", {})
    if _is_optimized(value):  # torch.compiler.disable makes one, too
        return _is_wrapped(state.get("_forward", state.get("forward")))
    return function_inside(state.get("_compiled_call_impl")) is not None  # module.compile()


def _is_optimized(value: object) -> bool:
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")  # not loaded: nothing is compiled
    return eval_frame is not None and isinstance(value, eval_frame.OptimizedModule)


def _values_of(module: nn.Module) -> dict[str, Any]:
    """What a module names and has attributes of its own: torch.compile leaves some."""
    forward = getattr(type(module), "forward", None)
    code = getattr(forward, "__code__", None)
    variables = getattr(forward, "__globals__", {})
    values = {name: variables.get(name) for name in code.co_names} if code else {}
    for base in reversed(type(module).__mro__):
        values |= {} if base.__module__.startswith("torch.") else vars(base)
    return {name: value for name, value in (values | vars(module)).items() if getattr(value, "__dict__", None)}


def objects_of(kind: Any) -> list[Any]:
    """Return the objects of a class that are alive, as far as Python's garbage collector follows them.

    ``kind`` may be a tuple of classes, as for ``issubclass``. ``isinstance`` would ask a proxy, which may raise.
    """
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def hook_optimizers_of_fastai() -> None:
    """Let the optimizers of fastai, if it is imported, call PyTorch's hooks around each step. They are not PyTorch's own."""
    kind: Any = getattr(sys.modules.get("fastai.optimizer"), "Optimizer", None)
    if kind is None or hasattr(kind, "_optimizer_step_pre_hooks"):
        return
    from torch.optim import Optimizer

    # of one optimizer
    kind._optimizer_step_pre_hooks = {}
    kind._optimizer_step_post_hooks = {}
    kind._optimizer_step_code = Optimizer._optimizer_step_code
    kind.step = Optimizer.profile_hook_step(kind.step)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector for the block.

    A trace makes thousands of small objects, which would start many collections, and no cycles that matter. Without the collector
    a storage dies with its last reference, so lifetimes are the same in each trace.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def random_numbers_kept(*, beside_threads: bool = False) -> Iterator[None]:
    """Restore the host's random state after the block.

    Meta tensors draw nothing, so this matters only if a model itself draws on the host. While other threads run, the state is
    not restored, because they would see the same numbers twice. With ``beside_threads`` it is restored all the same, for a
    short block that runs once.
    """
    import torch

    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    before = torch.get_rng_state(), random.getstate(), numpy_random.get_state() if numpy_random else None
    try:
        yield
    finally:
        if beside_threads or threading.active_count() == 1:
            torch.set_rng_state(before[0])
            random.setstate(before[1])
            if numpy_random:
                numpy_random.set_state(before[2])


@contextmanager
def too_large_named() -> Iterator[None]:
    """Raise TooLargeError instead of PyTorch's errors for a tensor that is too large for any device."""
    try:
        yield
    except TooLargeError:
        raise
    except Exception as error:
        cause: BaseException | None = error
        num_bytes: int | None = None
        while cause is not None and (num_bytes := _refused_bytes(str(cause))) is None:
            cause = cause.__cause__
        if cause is None or num_bytes is None:
            raise
        words = str(cause).splitlines()[0][:240].rstrip(".")
        raise TooLargeError(f"A tensor of the workload does not fit into any memory: {words}.", num_bytes) from error


def _refused_bytes(message: str) -> int | None:
    """Lower bound on the bytes of the tensor that PyTorch refuses with ``message``; None: not for its size on any device."""
    overflow = (
        r"Storage size calculation overflowed|Stride calculation overflowed|integer multiplication overflow"
        r"|argument '(size|shape)' failed to unpack .*Overflow"
    )
    if re.search(overflow, message):
        return 2**63  # PyTorch counts bytes in 64 bits with a sign; a tensor that it cannot count has at least so many
    allocation = re.search(r"can't allocate memory: you tried to allocate (\d+) bytes", message)
    # A failed allocation below 4 TiB may only be too large for this machine, and fit the device.
    return int(allocation[1]) if allocation and int(allocation[1]) >= 2**42 else None
