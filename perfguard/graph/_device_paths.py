"""Runs on meta tensors the code paths that PyTorch takes on the target.

On meta tensors PyTorch decomposes what a GPU runs as one fused kernel (attention, dropout, recurrent layers, half-precision
softmax), and autocast does nothing at all. This mode sits above autograd and intercepts every call of the public functions. It
replaces the call with the one that the target would make. So autograd saves for the backward pass what it would save on the
target.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from perfguard.graph._attention import attention
from perfguard.graph._device_semantics import cast_weights
from perfguard.graph._pytree import is_meta, tensors_in
from perfguard.graph._rms_norm import fused_rms_norm
from perfguard.graph._rnn import FUSED_RNNS, fused_rnn, is_fused_on_cpu
from perfguard.graph._target import Target

_HALF = (torch.float16, torch.bfloat16)

# aten/src/ATen/autocast_mode.h of PyTorch 2.13, by the name under which Python sees the function.
_LOWER_PRECISION = frozenset({
    "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution",
    "prelu", "addmm", "addmv", "addr", "matmul", "__matmul__", "__rmatmul__", "einsum", "mm", "mv", "vecdot", "linear",
    "addbmm", "baddbmm", "bmm", "chain_matmul", "multi_dot", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "linalg_matmul", "linalg_multi_dot", "linalg_vecdot",
    "scaled_dot_product_attention", "_native_multi_head_attention", *FUSED_RNNS,
})  # fmt: skip
_FULL_PRECISION = frozenset({
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan",
    "pow", "__pow__", "__rpow__", "softplus", "layer_norm", "native_layer_norm", "group_norm", "cosine_similarity",
    "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss_nd", "nll_loss2d", "hinge_embedding_loss", "kl_div",
    "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm",
    "logsumexp", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "rms_norm", "norm",
    # what calls one of them inside:
    "__rdiv__", "__rtruediv__", "square", "pairwise_distance", "linalg_norm", "special_log_softmax", "trapezoid",
})  # fmt: skip
# These compute in float32 by themselves; nothing is copied.
_FULL_PRECISION_RESULT = frozenset({"prod", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm", "sum"})
_WIDEST = frozenset({"addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put",
                     "tensordot", "scatter_add"})  # fmt: skip
_OVERRIDABLE = ("torch.nn.functional", "torch.functional", "torch.autograd")
_SOFTMAX = {"softmax": torch.ops.aten._softmax, "log_softmax": torch.ops.aten._log_softmax}


class DevicePaths(TorchFunctionMode):
    """Calls on meta tensors what ``target`` would run. Enter it around the whole step."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self._target = target
        self._autocast_device = "cpu" if target.is_cpu else "cuda"
        self._expanding: set[Callable[..., Any]] = set()
        self.has_grouped_products = False

    @contextmanager
    def autocast(self, dtype: torch.dtype) -> Iterator[None]:
        """``torch.autocast`` of the target, which a machine without one refuses to enter."""
        device = self._autocast_device
        before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        torch.set_autocast_enabled(device, True)
        torch.set_autocast_dtype(device, dtype)
        torch.autocast_increment_nesting()
        try:
            yield
        finally:
            torch.set_autocast_enabled(device, before[0])
            torch.set_autocast_dtype(device, before[1])
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()

    @property
    def _low(self) -> torch.dtype:
        return torch.get_autocast_dtype(self._autocast_device)

    def __torch_function__(
        self, func: Callable[..., Any], types_: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if type(func) is types.FunctionType:
            if func is F.dropout and not self._target.is_cpu:
                return self._dropout(func, *args, **kwargs)
            inner = _without_overrides(func)
            if inner is None or func in self._expanding:  # a helper of the function checks in its name
                if torch.is_autocast_enabled(self._autocast_device):
                    args, kwargs = self._cast(name, args, kwargs)
                return func(*args, **kwargs)
            self._expanding.add(func)
            try:
                with self:  # what it calls comes back here
                    return inner(*args, **kwargs)
            finally:
                self._expanding.discard(func)
        if torch.is_autocast_enabled(self._autocast_device):
            if name == "cross_entropy_loss":
                return self._cross_entropy(func, *args, **kwargs)
            args, kwargs = self._cast(name, args, kwargs)
        if name == "scaled_dot_product_attention" and args and is_meta(args[0]):
            return attention(self._target, func, *args, **kwargs)
        if name in ("grouped_mm", "_grouped_mm") and is_meta(args[0]):
            self.has_grouped_products = True
            if args[0].dtype is not torch.bfloat16:
                return _grouped_product(func, *args, **kwargs)
        if name in _SOFTMAX:
            return self._softmax(func, name, args, kwargs)
        if name == "rms_norm" and not self._target.is_cpu and is_meta(args[0]):
            return fused_rms_norm(*args, **kwargs)
        if name in FUSED_RNNS and is_meta(args[0]) and (not self._target.is_cpu or is_fused_on_cpu(name, *args)):
            return fused_rnn(name, *args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(
        self, func: Callable[..., Any], input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        """CUDA keeps a mask of one byte an element; the decomposition keeps one of the input's dtype."""
        if not training or p <= 0 or p >= 1 or inplace or not is_meta(input):
            return func(input, p, training, inplace)
        return torch.native_dropout(input, p, True)[0]

    def _softmax(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """CUDA's softmax of a float16 tensor into float32 is one kernel; every other tensor is converted first."""
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        dtype = kwargs.get("dtype") or (args[2] if len(args) > 2 else None)
        if dtype is None and torch.is_autocast_enabled(self._autocast_device):
            dtype = torch.float32
        source: Any = args[0] if args else None
        if not is_meta(source) or dim is None:
            return func(*args, **kwargs)
        if dtype is torch.float32 and source.dtype is torch.float16 and not self._target.is_cpu:
            return _SOFTMAX[name](source, dim, True)
        return func(source, dim, dtype=dtype)

    def _cross_entropy(
        self,
        func: Callable[..., Any],
        input: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        reduction: int = 1,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> Any:
        """Compute log_softmax in the logits' dtype, because autocast keeps an explicit dtype. It does cast nll_loss."""
        if input.dtype not in _HALF or target.is_floating_point():
            return func(input, target, weight, reduction, ignore_index, label_smoothing)
        dim = 0 if input.dim() == 1 else 1
        log_probability = torch.ops.aten._log_softmax(input, dim, False)
        weight = None if weight is None else weight.float()
        loss = torch._C._nn.nll_loss_nd(log_probability.float(), target, weight, reduction, ignore_index)  # type: ignore[arg-type]
        if label_smoothing > 0:
            smooth = log_probability.sum(dim, dtype=torch.float32).neg().masked_fill(target == ignore_index, 0.0)
            loss = loss * (1 - label_smoothing) + (smooth if reduction == 0 else smooth.sum()) * label_smoothing
        return loss

    def _cast(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        if name in _LOWER_PRECISION:
            dtype = self._low
        elif name in _FULL_PRECISION_RESULT:
            half = args and isinstance(args[0], torch.Tensor) and args[0].is_meta and args[0].dtype in _HALF
            return args, {**kwargs, "dtype": torch.float32} if half and kwargs.get("dtype") is None else kwargs
        elif name in _FULL_PRECISION:
            dtype = torch.float32
        elif name in _WIDEST:
            dtype = torch.float32 if any(t.dtype is torch.float32 for t in tensors_in((args, kwargs))) else self._low
        else:
            return args, kwargs
        return self._cast_all(args, dtype), self._cast_all(kwargs, dtype)

    def _cast_all(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, torch.Tensor):
            return self._cast_one(value, dtype)
        if isinstance(value, dict):
            return {key: self._cast_all(item, dtype) for key, item in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self._cast_all(item, dtype) for item in value)
        return value

    def _cast_one(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Cast like `cached_cast`: float32 leaves that require a gradient are cast once while autocast lasts."""
        if not tensor.is_meta or tensor.dtype is dtype or tensor.dtype not in (torch.float32, *_HALF):
            return tensor
        cacheable = tensor.dtype is torch.float32 and dtype in _HALF and tensor.requires_grad and tensor.is_leaf
        if not cacheable or tensor._is_view() or not torch.is_autocast_cache_enabled():
            return tensor.to(dtype)
        casts = cast_weights()
        key = id(tensor), dtype
        if key not in casts:
            casts[key] = tensor, tensor.to(dtype)
        return casts[key][1]


def _grouped_product(func: Callable[..., Any], rows: torch.Tensor, weights: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The meta kernel takes bfloat16 only. The product of all rows with one expert has the same shape and arithmetic."""
    if rows.dim() == 2 and weights.dim() == 3:
        return rows @ weights[0]
    return func(rows, weights, *args, **kwargs)


_clones: dict[types.FunctionType, types.FunctionType | None] = {}


def _without_overrides(func: types.FunctionType) -> types.FunctionType | None:
    """``func`` without its check for overrides; None if it has none.

    A function of torch that is written in Python hands itself to the mode. The mode is off while it handles that call, so calls
    inside the function would not be intercepted. Its twin skips the check, so it can run with the mode on.
    """
    if func not in _clones:
        namespace = func.__globals__
        blind = {name: _never for name in namespace if name.startswith("has_torch_function")}
        clone = None
        if blind and (namespace.get("__name__") in _OVERRIDABLE or func is torch.Tensor.backward):
            clone = types.FunctionType(func.__code__, {**namespace, **blind}, func.__name__, func.__defaults__, func.__closure__)
            clone.__kwdefaults__ = func.__kwdefaults__
        _clones[func] = clone
    return _clones[func]


def _never(*_: Any) -> bool:
    return False
