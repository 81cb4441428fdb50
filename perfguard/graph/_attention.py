"""Selects the kernel of attention, as `sdp_utils.cpp` of PyTorch 2.13 does for the target.

On the meta device ``scaled_dot_product_attention`` decomposes into the plain math path and stores the attention matrix, which
no fused kernel does. PyTorch has meta kernels and derivatives for the fused operators, so the one that the target would run is
called instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from perfguard.graph._target import Target

_HALF = (torch.float16, torch.bfloat16)
_MAX_FLASH_WIDTH = 256


def attention(
    target: Target,
    math: Callable[..., Any],
    query: torch.Tensor,  # shape: (*batch, heads, L, E)
    key: torch.Tensor,  # shape: (*batch, heads or fewer with enable_gqa, S, E)
    value: torch.Tensor,  # shape: (*batch, heads or fewer with enable_gqa, S, Ev)
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``F.scaled_dot_product_attention`` by the kernel that ``target`` would run; ``math`` is the decomposed form."""
    aten = torch.ops.aten
    grouped = enable_gqa and key.shape[-3] != query.shape[-3]
    masked = attn_mask is not None
    trainable_mask = attn_mask is not None and attn_mask.requires_grad
    if query.dim() == 4 and target.is_cpu and dropout_p == 0 and not trainable_mask:
        if grouped:
            key, value = _repeated(query, key, value)
        return aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
    if query.dim() == 4 and not target.is_cpu:
        same_width = query.shape[-1] == value.shape[-1] <= _MAX_FLASH_WIDTH
        if (
            torch.backends.cuda.flash_sdp_enabled()
            and target.flash_attention
            and not masked
            and query.dtype in _HALF
            and same_width
        ):
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if torch.backends.cuda.mem_efficient_sdp_enabled() and not grouped and query.dtype in (*_HALF, torch.float32):
            bias = _bias(attn_mask, query, key)
            return aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
                query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
            )[0]
    return math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)  # type: ignore[no-any-return]


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> torch.Tensor:
    """Widths that are no multiple of 8 are padded, and the result is cut."""
    width = query.shape[-1]
    padding = -width % 8
    if padding:
        scale = width**-0.5 if scale is None else scale
        query, key, value = (torch.nn.functional.pad(tensor, (0, padding)) for tensor in (query, key, value))
    out = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    return out[..., :width] if padding else out  # type: ignore[no-any-return]


def _bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """A mask as the memory-efficient kernel takes it: additive, in the query's dtype, rows padded to 16 elements."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    mask = mask.to(query.dtype)
    length = key.shape[-2]
    if length % 16 and mask.shape[-1] == length:
        mask = torch.nn.functional.pad(mask, (0, -length % 16))[..., :length]
    return mask.expand(*query.shape[:-1], length)


def _repeated(query: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.repeat_interleave(query.shape[-3] // tensor.shape[-3], dim=-3) for tensor in tensors]
