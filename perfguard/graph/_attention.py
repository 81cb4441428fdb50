"""Attention as a GPU runs it.

On the meta device ``scaled_dot_product_attention`` decomposes into the plain math path and stores the attention matrix,
which no fused kernel does. This mode calls the fused operator that the target would pick instead; PyTorch has meta kernels,
derivatives and FLOP counts for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_HALF = (torch.float16, torch.bfloat16)


class FusedAttention(TorchFunctionMode):
    """Replaces ``F.scaled_dot_product_attention`` on meta tensors by the kernel that ``target`` ("cuda" or "cpu") would run."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self._target = target

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and args and args[0].is_meta:
            return _attention(self._target, func, *args, **kwargs)
        return func(*args, **kwargs)


def _attention(
    target: str,
    fallback: Callable[..., Any],
    query: torch.Tensor,  # shape: (*batch, heads, L, E)
    key: torch.Tensor,  # shape: (*batch, heads or fewer with enable_gqa, S, E)
    value: torch.Tensor,  # shape: (*batch, heads or fewer with enable_gqa, S, Ev)
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if query.dim() != 4 or (target == "cpu" and dropout_p > 0):
        return fallback(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)  # type: ignore[no-any-return]
    if enable_gqa and key.shape[1] != query.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    aten = torch.ops.aten
    if target == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
    same_width = query.shape[-1] == value.shape[-1]
    if attn_mask is None and query.dtype in _HALF and same_width and query.shape[-1] <= 256:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]  # type: ignore[no-any-return]
    if attn_mask is not None:
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    return aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
        query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )[0]
