"""Outputs of operators on meta, by their shapes alone: of the most frequent, and where PyTorch's meta kernel lacks or errs.

For some operators PyTorch's meta kernel is a decomposition in Python that takes a millisecond, and a network calls them a hundred
times. A rule makes the same outputs (shape, strides, dtype) in a few microseconds where the case is plain, and declines
(`NotImplemented`) where it is not. The tests hold every rule against PyTorch's own kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from perfguard.graph.arguments import argument_of

aten = torch.ops.aten
META = torch.device("meta")
"""Where the tensors of a step are. The word "meta" is the user's: in a dry run, what a script makes there takes no memory."""
NO_REDUCTION = 0
"""Of the argument `reduction` of a loss: one for each element (`at::Reduction`)."""
_HALF = (torch.float16, torch.bfloat16)


def is_meta(value: Any) -> bool:
    """Whether ``value`` is a tensor on the meta device."""
    return isinstance(value, torch.Tensor) and value.is_meta


def _empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)


def _alike(first: torch.Tensor, *others: Any) -> bool:
    return all(
        isinstance(other, torch.Tensor)
        and other.is_meta
        and other.shape == first.shape
        and other.stride() == first.stride()
        and other.dtype is first.dtype
        for other in others
    )


def _statistics_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Norms keep their statistics in float32 for half-precision inputs."""
    return torch.float32 if tensor.dtype in _HALF else tensor.dtype


def empty_twin(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on meta with the shape, strides and dtype of ``tensor``. `torch.empty_like` would run Python code there."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """`torch.empty_like` of a tensor on meta."""
    return empty_twin(tensor) if _is_dense(tensor) else torch.empty_like(tensor)


def _elementwise(x: torch.Tensor, *others: Any, **_: Any) -> Any:
    tensors = [other for other in others if not _is_number(other)]
    if not x.dim() and len(tensors) < len(others):
        return NotImplemented  # beside a tensor without dimensions, a number decides on the dtype, too
    return empty_twin(x) if x.dtype.is_floating_point and _is_dense(x) and _alike(x, *tensors) else NotImplemented


def _is_number(value: Any) -> bool:
    """Whether it is one of Python's, as it is or as a tensor on the host: it changes no shape and no floating-point dtype."""
    if isinstance(value, torch.Tensor):
        return not value.dim() and value.device.type == "cpu" and not value.dtype.is_complex
    return isinstance(value, (int, float))


def _zeros_like(x: torch.Tensor, *, memory_format: Any = None, pin_memory: Any = None, **others: Any) -> Any:
    if memory_format not in (None, torch.preserve_format) or pin_memory or any(value is not None for value in others.values()):
        return NotImplemented
    return _elementwise(x)


def _fits(x: torch.Tensor, other: Any) -> bool:
    """Whether an operator may write its result of ``x`` and ``other`` into ``x``, without looking twice."""
    if _is_number(other):
        return x.dtype.is_floating_point or (isinstance(other, torch.Tensor) and other.dtype is x.dtype)
    return isinstance(other, torch.Tensor) and other.is_meta and other.shape == x.shape and other.dtype is x.dtype


def _in_place(x: torch.Tensor, *others: Any, **_: Any) -> Any:
    return x if x.is_meta and all(_fits(x, other) for other in others) else NotImplemented


def _list_in_place(tensors: Sequence[torch.Tensor], *others: Any, **_: Any) -> Any:
    return None if _lists_fit(tensors, others) else NotImplemented


def _list(tensors: Sequence[torch.Tensor], *others: Any, **_: Any) -> Any:
    if not _lists_fit(tensors, others) or not all(_is_dense(tensor) for tensor in tensors):
        return NotImplemented
    if any(isinstance(other, (list, tuple)) and not all(map(_alike, tensors, other)) for other in others):
        return NotImplemented
    return [empty_twin(tensor) for tensor in tensors]


def _lists_fit(tensors: Sequence[torch.Tensor], others: Sequence[Any]) -> bool:
    return all(tensor.is_meta and tensor.dtype.is_floating_point for tensor in tensors) and all(
        len(other) == len(tensors) and all(map(_fits, tensors, other)) if isinstance(other, (list, tuple)) else _is_number(other)
        for other in others
    )


def _batch_norm(
    x: torch.Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> Any:
    if not _is_dense(x) or weight is None:
        return NotImplemented
    dtype = _statistics_dtype(x)
    return empty_twin(x), _empty(x.shape[1:2], dtype), _empty(x.shape[1:2], dtype)


def _batch_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: Any, mean: Any, variance: Any, save_mean: Any, save_invstd: Any,
    train: bool, eps: float, output_mask: Sequence[bool],
) -> Any:  # fmt: skip
    if not train or weight is None or not all(output_mask) or not _is_dense(x) or not _alike(x, grad):
        return NotImplemented
    return empty_twin(x), empty_twin(weight), empty_twin(weight)


def _layer_norm(x: torch.Tensor, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    if not x.is_contiguous():
        return NotImplemented
    kept = x.dim() - len(normalized_shape)
    shape = (*x.shape[:kept], *(1 for _ in normalized_shape))
    dtype = _statistics_dtype(x)
    return _empty(x.shape, x.dtype), _empty(shape, dtype), _empty(shape, dtype)


def _layer_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, normalized_shape: Sequence[int], mean: Any, rstd: Any, weight: Any, bias: Any,
    output_mask: Sequence[bool],
) -> Any:  # fmt: skip
    if weight is None or bias is None or not all(output_mask) or not x.is_contiguous() or not _alike(x, grad):
        return NotImplemented
    return _empty(x.shape, x.dtype), empty_twin(weight), empty_twin(bias)


def _mm(a: torch.Tensor, b: torch.Tensor) -> Any:
    if a.dtype is not b.dtype or a.shape[1] != b.shape[0]:
        return NotImplemented
    return _empty((a.shape[0], b.shape[1]), a.dtype)


def _addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **_: Any) -> Any:
    if bias.dim() != 1 or bias.shape[0] not in (1, b.shape[1]) or bias.dtype is not a.dtype:
        return NotImplemented
    return _mm(a, b)


def _sum(x: torch.Tensor, dims: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    if not dims or not x.is_contiguous() or not x.dtype.is_floating_point or dtype not in (None, x.dtype):
        return NotImplemented
    summed = {dim % x.dim() for dim in dims}
    if keepdim:
        shape = [1 if dim in summed else size for dim, size in enumerate(x.shape)]
    else:
        shape = [size for dim, size in enumerate(x.shape) if dim not in summed]
    return _empty(shape, x.dtype)


def _in_place_of_its_losses(own: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """A mean or a sum in the storage of the losses of all elements, which the kernels of CPU and CUDA resize to one number.

    (`mse_loss`, `smooth_l1_loss` and `soft_margin_loss` of Loss.cpp; `binary_cross_entropy_out` there and in Loss.cu.) PyTorch's
    own meta kernels return a number in a storage of its own.
    """
    if argument_of(own, args, kwargs, "reduction") == NO_REDUCTION:
        return NotImplemented
    given = {argument.name: value for argument, value in zip(own._schema.arguments, args, strict=False)}
    losses = own(**given | kwargs | {"reduction": NO_REDUCTION})
    return losses.resize_(())


def _gradient_of_input(grad: torch.Tensor, x: torch.Tensor, *_: Any, **__: Any) -> Any:
    return _empty(x.shape, x.dtype)


def _ctc_loss(log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any, *_: Any) -> Any:
    """Losses, and the forward variables of each time step: of blanks and letters of the longest target (Graves et al. 2006)."""
    most_steps, number = log_probs.shape[:2]
    longest = targets.shape[1] if targets.dim() == 2 else int(max(target_lengths))
    return _empty((number,), log_probs.dtype), _empty((number, most_steps, 2 * longest + 1), log_probs.dtype)


def _ctc_loss_backward(grad: torch.Tensor, log_probs: torch.Tensor, *_: Any) -> Any:
    return empty_twin(log_probs)


def _batch_norm_stats(x: torch.Tensor, *_: Any) -> Any:
    """Of SyncBatchNorm (Normalization.cu), as the four after it: mean and deviation of each channel."""
    dtype = _statistics_dtype(x)
    return _empty(x.shape[1:2], dtype), _empty(x.shape[1:2], dtype)


def _batch_norm_elemt(x: torch.Tensor, *_: Any) -> Any:
    return empty_twin(x) if _is_dense(x) else _empty(x.shape, x.dtype)


def _batch_norm_backward_reduce(
    grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, invstd: Any, weight: Any, *masks: bool
) -> Any:  # fmt: skip
    """The sums of the gradient that all ranks need, and the gradients of weight and bias."""
    needs_input, needs_weight, needs_bias = masks
    dtype = mean.dtype if weight is None else weight.dtype
    sums = [_empty(x.shape[1:2], mean.dtype) if needs_input else None for _ in range(2)]
    gradients = [_empty(x.shape[1:2], dtype) if needed else None for needed in (needs_weight, needs_bias)]
    return (*sums, *gradients)


def _batch_norm_backward_elemt(grad: torch.Tensor, x: torch.Tensor, *_: Any) -> Any:
    return _batch_norm_elemt(x)


Rule = Callable[..., Any]
_LOSSES = (aten.mse_loss.default, aten.smooth_l1_loss.default, aten.soft_margin_loss.default, aten.binary_cross_entropy.default)
SHAPE_RULES: dict[torch._ops.OpOverload, Rule] = {
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.zeros_like.default: _zeros_like,
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.sum.dim_IntList: _sum,
    **dict.fromkeys((aten.gelu.default, aten.silu.default, aten.relu.default, aten.sqrt.default, aten.gelu_backward.default,
                     aten.silu_backward.default, aten.threshold_backward.default, aten.sigmoid_backward.default,
                     aten.hardswish_backward.default, aten.hardsigmoid_backward.default, aten.add.Tensor, aten.mul.Tensor,
                     aten.div.Tensor), _elementwise),
    **dict.fromkeys((aten.add_.Tensor, aten.mul_.Tensor, aten.addcmul_.default, aten.addcdiv_.default, aten.lerp_.Scalar),
                    _in_place),
    **dict.fromkeys((aten._foreach_add_.List, aten._foreach_add_.Scalar, aten._foreach_mul_.Scalar, aten._foreach_div_.List,
                     aten._foreach_div_.ScalarList, aten._foreach_addcmul_.Scalar, aten._foreach_addcdiv_.Scalar,
                     aten._foreach_addcdiv_.ScalarList, aten._foreach_lerp_.Scalar), _list_in_place),
    **dict.fromkeys((aten._foreach_sqrt.default, aten._foreach_add.List), _list),
}  # fmt: skip

UNLIKE_META_KERNEL: dict[torch._ops.OpOverload, Rule] = {
    loss: functools.partial(_in_place_of_its_losses, loss) for loss in _LOSSES
}
"""Of operators whose outputs have other storages on meta than on a device."""
WITHOUT_META_KERNEL: dict[torch._ops.OpOverload, Rule] = {
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss_backward.default: _ctc_loss_backward,
    aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    aten.multi_margin_loss_backward.default: _gradient_of_input,
    aten.multilabel_margin_loss_backward.default: _gradient_of_input,
    aten.batch_norm_stats.default: _batch_norm_stats,
    aten.batch_norm_gather_stats_with_counts.default: _batch_norm_stats,
    aten.batch_norm_elemt.default: _batch_norm_elemt,
    aten.batch_norm_backward_reduce.default: _batch_norm_backward_reduce,
    aten.batch_norm_backward_elemt.default: _batch_norm_backward_elemt,
}
"""Of operators that only a rule can run."""

_RULES: dict[torch._ops.OpOverload, Rule] = SHAPE_RULES | UNLIKE_META_KERNEL | WITHOUT_META_KERNEL


def outputs_of(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the output of ``func``: on meta by its rule, if it has one, or else from PyTorch's own kernel."""
    rule = _RULES.get(func)
    firsts = (x[0] if type(x) is list and x else x for x in args)
    if rule is not None and any(map(is_meta, firsts)):  # of the host's tensors, the values are needed
        out = rule(*args, **kwargs)
        if out is not NotImplemented:
            return out
    return func(*args, **kwargs)
