"""RMSNorm as CUDA runs it: one kernel each way, which keeps its input and one number a row.

On meta ``torch.rms_norm`` decomposes into a power, a mean, a root and two products, and keeps most of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_HALF = (torch.float16, torch.bfloat16)
_library = torch.library.Library("perfguard", "FRAGMENT")
_library.define("fused_rms_norm(Tensor input, Tensor? weight, int num_normalized) -> (Tensor, Tensor)")
_library.define("fused_rms_norm_backward(Tensor grad_output, Tensor input, Tensor rstd, Tensor? weight) -> (Tensor, Tensor)")


@torch.library.impl(_library, "fused_rms_norm", "Meta")
def _forward(input: torch.Tensor, weight: torch.Tensor | None, num_normalized: int) -> tuple[torch.Tensor, torch.Tensor]:
    kept = input.dim() - num_normalized
    dtype = torch.float32 if input.dtype in _HALF else input.dtype
    rstd = input.new_empty((*input.shape[:kept], *(1 for _ in range(num_normalized))), dtype=dtype)
    return torch.empty_like(input, memory_format=torch.contiguous_format), rstd


@torch.library.impl(_library, "fused_rms_norm_backward", "Meta")
def _backward(
    grad_output: torch.Tensor, input: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_weight = input.new_empty(0) if weight is None else torch.empty_like(weight)
    return torch.empty_like(input, memory_format=torch.contiguous_format), grad_weight


class _FusedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, num_normalized: int) -> torch.Tensor:
        output, rstd = torch.ops.perfguard.fused_rms_norm(input, weight, num_normalized)
        ctx.save_for_backward(input, rstd, weight)
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, rstd, weight = ctx.saved_tensors
        grad_input, grad_weight = torch.ops.perfguard.fused_rms_norm_backward(grad_outputs[0], input, rstd, weight)
        return grad_input, None if weight is None else grad_weight, None


def fused_rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> Any:
    """``torch.rms_norm`` in one kernel."""
    return _FusedRmsNorm.apply(input, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
