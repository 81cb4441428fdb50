"""A workload's optimizers over meta parameters, with their state filled in, in the form that the target would run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from perfguard.exceptions import TraceError, WorkloadError
from perfguard.graph.kernels import Target
from perfguard.graph.shape_rules import empty_like, outputs_of
from perfguard.workload import Workload

HOST = torch.device("cpu")
"""Context for an optimizer that keeps its step counters on the host, whatever the device of the parameters."""
AroundStep = Callable[[], AbstractContextManager[None]]
_library = torch.library.Library("perfguard", "FRAGMENT")
_library.define("fused_optimizer_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] state) -> ()")


@torch.library.impl(_library, "fused_optimizer_", "Meta")
def _fused_optimizer(params: list[torch.Tensor], grads: list[torch.Tensor], state: list[torch.Tensor]) -> None:
    """One kernel that reads and writes everything in place; it has no temporaries."""


class OptimizerOnMeta:
    """One optimizer. Its ``fused`` form refuses meta tensors, so an operator of ours stands for it."""

    def __init__(self, optimizer: torch.optim.Optimizer, target: Target, around_step: AroundStep) -> None:
        self.optimizer = optimizer
        self._around_step = around_step
        self._own_step = optimizer.step
        self._fused = [bool(group.get("fused")) for group in optimizer.param_groups]
        for group, fused in zip(optimizer.param_groups, self._fused, strict=True):
            if fused:
                group["fused"] = False
            # On meta PyTorch picks the for-loop form, on CUDA the foreach form; Adafactor the for-loop form, to save memory.
            by_loop = isinstance(optimizer, torch.optim.Adafactor)
            by_tensor = isinstance(group.get("lr"), torch.Tensor)  # which the foreach form takes only when it is capturable
            if not target.is_cpu and group.get("foreach", False) is None and not (by_tensor or by_loop):
                group["foreach"] = True
        self._fill_state()
        optimizer.step = self.step  # type: ignore[method-assign]

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that it trains."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def state_tensors(self) -> Iterable[tuple[torch.Tensor, Any]]:
        """Tensors of its state on any device, each with the parameter that it belongs to."""
        return ((parameter, value) for parameter, state in self.optimizer.state.items() for value in state.values())

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run ``optimizer.step()``. A closure runs first, as in the user's code."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._around_step(), HOST:
            if not any(self._fused):
                self._own_step()
                return loss
            parameters = [parameter for parameter in self.parameters() if parameter.grad is not None]
            state = [
                value
                for parameter in parameters
                for value in self.optimizer.state[parameter].values()
                if isinstance(value, torch.Tensor) and value.is_meta
            ]
            torch.ops.perfguard.fused_optimizer_(parameters, [parameter.grad for parameter in parameters], state)
        return loss

    def _fill_state(self) -> None:
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.grad = empty_like(parameter)
        try:
            with HOST, _ValuesUnknown():  # type: ignore[no-untyped-call]
                self._own_step()
        except Exception as error:
            if isinstance(self.optimizer, torch.optim.LBFGS):
                raise TraceError(
                    "LBFGS evaluates the model as often as its line search needs. Its step has no fixed cost. "
                    "To see one evaluation, give torch.optim.SGD; LBFGS keeps 2 * history_size gradients beside that."
                ) from error
            if isinstance(self.optimizer, torch.optim.SparseAdam):
                raise TraceError(
                    "PyTorch cannot trace sparse gradients. Describe the model with Embedding(..., sparse=False) and "
                    "torch.optim.Adam; that counts a dense gradient, more than the sparse one has."
                ) from error
            raise TraceError(
                f"The step of {type(self.optimizer).__name__} cannot be traced ({type(error).__name__}: {error}). "
                f"Give Workload(optimizer=...) a similar one, for instance torch.optim.AdamW."
            ) from error
        self.optimizer.zero_grad(set_to_none=True)


class _ValuesUnknown(TorchDispatchMode):
    """Lets an optimizer read a value off the device (Adafactor reads norms); what it launches does not depend on it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0
        with torch._C.DisableTorchFunction():  # calls of PyTorch's meta kernels are not recorded
            return outputs_of(func, args, kwargs or {})


def optimizers_on_meta(
    workload: Workload, model: nn.Module, target: Target, *, around_step: AroundStep
) -> dict[str, OptimizerOnMeta]:
    """The workload's optimizers by the path of the submodule whose parameters they train; "" is the whole model."""
    given = workload.optimizer
    if not isinstance(given, Mapping):
        return {"": OptimizerOnMeta(make_optimizer(given, workload.model, model), target, around_step)}
    made = {}
    for path, optimizer in given.items():
        try:
            part = model.get_submodule(path)
            live_part = workload.model.get_submodule(path)
        except AttributeError:
            raise WorkloadError(
                f"Workload.optimizer names the submodule {path!r}, which {type(model).__name__} does not have. "
                f"It has {', '.join(name for name, _ in model.named_children())}."
            ) from None
        made[path] = OptimizerOnMeta(make_optimizer(optimizer, live_part, part), target, around_step)
    return made


def make_optimizer(given: Any, live_model: nn.Module, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer over the parameters of ``model``, the twin of ``live_model``, as ``given`` describes it.

    Raises:
        WorkloadError: if it describes none.
    """
    try:
        if isinstance(given, torch.optim.Optimizer):
            return _twin(given, live_model, model)
        make = given or functools.partial(torch.optim.SGD, lr=1e-3)
        with HOST:
            optimizer = make(parameter for parameter in model.parameters() if parameter.requires_grad)
    except WorkloadError:
        raise
    except Exception as error:
        raise WorkloadError(
            f"Workload.optimizer cannot be made over the model's parameters ({type(error).__name__}: {error})."
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise WorkloadError(
            f"Workload.optimizer must be a torch.optim.Optimizer, its class or a functools.partial of it, "
            f"but calling it returned {type(optimizer).__name__}."
        )
    own = set(map(id, model.parameters()))
    if any(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"]):
        raise WorkloadError(  # never step an optimizer over real weights
            "Workload.optimizer must make an optimizer over the parameters that it is called with, but the one that it returned "
            "holds others. Give a class or a functools.partial, or a live optimizer over Workload.model's own parameters."
        )
    return optimizer


def _twin(live: torch.optim.Optimizer, live_model: nn.Module, model: nn.Module) -> torch.optim.Optimizer:
    twins = dict(zip(map(id, live_model.parameters()), model.parameters(), strict=True))
    try:
        groups = [{**group, "params": [twins[id(parameter)] for parameter in group["params"]]} for group in live.param_groups]
    except KeyError:
        raise WorkloadError(
            "Workload.optimizer holds parameters that are not in Workload.model. Give the optimizer of this very model, "
            "or a class or functools.partial that PerfGuard can call with the model's parameters."
        ) from None
    accepted = type(live).__init__.__code__.co_varnames
    make: Callable[..., torch.optim.Optimizer] = type(live)
    with HOST:
        twin: Any = make(groups, **{k: v for k, v in live.defaults.items() if k in accepted})
        if isinstance(given := getattr(live, "is_paged", None), bool):  # bitsandbytes keeps the bits of its states beside them
            twin.args, twin.is_paged = live.args, given  # type: ignore[attr-defined]
            twin.fill_qmap()
    return cast(torch.optim.Optimizer, twin)
