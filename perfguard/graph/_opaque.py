"""opaque: what cannot be traced, described by what it returns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from perfguard.exceptions import TraceError

F = TypeVar("F", bound=Callable[..., Any])

_library = torch.library.Library("perfguard", "FRAGMENT")
_library.define("opaque(Tensor[] inputs, Tensor(a!)[] outputs) -> ()")


@torch.library.impl(_library, "opaque", "Meta")
def _opaque_on_meta(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """Reads its inputs and writes its outputs; what it computes in between is not known."""


class _Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, example: Callable[[], Any], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = example()
        outputs = made if isinstance(made, tuple) else (made,)
        if not all(isinstance(output, torch.Tensor) for output in outputs):
            raise TraceError("example_outputs of perfguard.opaque must return a tensor or a tuple of tensors.")
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        torch.ops.perfguard.opaque(inputs, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[Any, ...]:
        inputs = ctx.saved_tensors
        grads = [torch.empty_like(tensor) if tensor.is_floating_point() else None for tensor in inputs]
        torch.ops.perfguard.opaque([*inputs, *grad_outputs], [grad for grad in grads if grad is not None])
        return None, *grads


def opaque(function: F, *, example_outputs: Callable[..., Any]) -> F:
    """Return ``function``, made traceable by a description of its outputs.

    Use it for custom CUDA extensions without a meta kernel, for numpy or `.item()` inside forward, and for shapes that depend on
    data, if you know better sizes than a trace assumes. On real tensors the function runs as it is. In a trace
    ``example_outputs`` is called instead. The bytes of its outputs and of the inputs are counted, forward and backward; its
    arithmetic is not.

    Args:
        function: takes tensors and other values.
        example_outputs: takes the same arguments on the meta device. Returns a tensor or a tuple of tensors of the expected
            shapes, for instance ``lambda boxes, scores: boxes.new_empty(100, 4)``.

    Example:
        >>> import torch
        >>> class Detector(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.keep = opaque(lambda scores: scores[scores > 0.5], example_outputs=lambda scores: scores.new_empty(100))
        ...     def forward(self, scores):
        ...         return self.keep(scores)
        >>> Detector()(torch.tensor([0.2, 0.9]))
        tensor([0.9000])
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if not any(tensor.is_meta for tensor in tensors):
            return function(*args, **kwargs)
        outputs = _Opaque.apply(lambda: example_outputs(*args, **kwargs), *tensors)  # type: ignore[no-untyped-call]
        return outputs if len(outputs) > 1 else outputs[0]

    return call  # type: ignore[return-value]
