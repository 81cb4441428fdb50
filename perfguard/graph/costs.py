"""Cost of one operator: its kind, FLOPs and bytes.

FLOPs of matrix products come from ``torch.utils.flop_counter``. Those of convolutions are our own, because
that counter ignores groups in the backward pass (a depthwise net would come out up to 200 times too slow).

A name decides on costs only in the namespaces that PerfGuard knows. An operator of another library keeps its namespace in its
name, as in "mylib::mm". So no rule for "mm" takes it for a matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from perfguard.exceptions import TraceError
from perfguard.graph.arguments import Args, Kwargs, argument_of
from perfguard.graph.shape_rules import NO_REDUCTION

OP_KINDS = (
    "conv",
    "conv_backward",
    "matmul",
    "attention",
    "norm",
    "norm_backward",
    "pool",
    "softmax",
    "activation",
    "elementwise",
    "reduction",
    "copy",
    "embedding",
    "random",
    "loss",
    "foreach",
    "rnn",
    "fill",
    "other",
)
"""Kinds of operators; the order is part of the feature schema."""
KIND_INDEX = {kind: index for index, kind in enumerate(OP_KINDS)}

_KNOWN_NAMESPACES = frozenset({"aten", "prims", "perfguard", "c10d", "_c10d_functional", "bitsandbytes"})
"""Namespaces of PyTorch, of PerfGuard, and of what `libraries.py` knows."""
_KIND_BY_NAME = {
    "convolution": "conv",
    "convolution_backward": "conv_backward",
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "_scaled_mm", "linear",
                     "int8_linear_matmul"), "matmul"),
    **dict.fromkeys(("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"), "softmax"),
    **dict.fromkeys(
        ("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "var_mean", "var", "std", "linalg_vector_norm",
         "norm", "prod", "cumsum", "any", "all", "logsumexp", "topk", "sort"),
        "reduction",
    ),
    **dict.fromkeys(
        ("cat", "clone", "copy_", "_to_copy", "stack", "constant_pad_nd", "index", "index_put", "index_put_", "gather",
         "scatter", "scatter_", "scatter_add", "scatter_add_", "index_select", "repeat", "roll", "flip", "slice_backward",
         "select_backward", "as_strided_scatter", "_unsafe_index", "_unsafe_index_put", "contiguous", "unfold_backward",
         "index_add", "index_add_", "masked_fill", "where", "tril", "triu", "im2col", "col2im", "nonzero", "masked_select"),
        "copy",
    ),
    **dict.fromkeys(("embedding", "embedding_dense_backward", "_embedding_bag", "_embedding_bag_backward"), "embedding"),
    **dict.fromkeys(("native_dropout", "native_dropout_backward", "bernoulli", "bernoulli_", "rand", "randn", "uniform_",
                     "normal_", "rand_like", "randn_like", "randint", "randperm"), "random"),
    **dict.fromkeys(("zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "fill_", "zero_", "new_zeros",
                     "new_full", "new_ones", "arange", "scalar_tensor", "eye", "linspace"), "fill"),
    **dict.fromkeys(("relu", "relu_", "gelu", "gelu_backward", "silu", "silu_", "silu_backward", "threshold_backward",
                     "sigmoid", "sigmoid_backward", "tanh", "tanh_backward", "hardtanh", "hardtanh_", "hardtanh_backward",
                     "hardswish", "hardswish_", "hardswish_backward", "hardsigmoid", "hardsigmoid_backward", "leaky_relu",
                     "leaky_relu_", "leaky_relu_backward", "elu", "elu_", "elu_backward", "mish", "mish_", "mish_backward",
                     "softplus", "softplus_backward", "_prelu_kernel", "_prelu_kernel_backward", "log_sigmoid_forward",
                     "log_sigmoid_backward", "glu", "glu_backward"), "activation"),
}  # fmt: skip
_KIND_BY_FRAGMENT = (
    ("_foreach", "foreach"),
    ("_fused_", "foreach"),
    ("scaled_dot_product", "attention"),
    ("_norm_backward", "norm_backward"),
    ("batch_norm", "norm"),
    ("_norm", "norm"),
    ("pool", "pool"),
    ("upsample", "pool"),
    ("grid_sampler", "pool"),
    ("loss", "loss"),
    ("lstm", "rnn"),
    ("gru", "rnn"),
    ("rnn", "rnn"),
)
# Operators that allocate without launching a kernel, or that only look at metadata.
_FREE = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh",
                   "_local_scalar_dense", "alias", "is_same_size", "resize_", "set_", "_wrap_tensor_autograd"})  # fmt: skip
_MAX_FFT_SIZE = 256
_FIRST_FACTOR = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "addbmm": 1}
"""Index of the left factor of a matrix product in the arguments. The right factor follows it."""
_TAKING = frozenset({"embedding", "index", "_unsafe_index", "index_select", "gather", "take", "_embedding_bag"})
"""Operators that read a part of their first input."""
_COUNTED_BY_INPUT = ("reduction", "loss", "norm_backward")
_ELEMENTWISE_FLOPS = {"activation": 4, "norm": 8, "norm_backward": 11, "softmax": 5, "loss": 2, "random": 4}


def name_of(func: torch._ops.OpOverload) -> str:
    """Return the name without overload, such as "mm" of aten. A custom operator keeps its namespace, as in "mylib::mm"."""
    qualified: str = func._schema.name
    namespace, _, name = qualified.partition("::")
    return name if namespace in _KNOWN_NAMESPACES else qualified


def _is_custom(name: str) -> bool:
    """Whether ``name`` is that of a custom operator, as :func:`name_of` gives it."""
    return "::" in name


def kind_of(name: str) -> str:
    """Return the kind of the operator ``name``, as :func:`name_of` gives it. A custom operator is elementwise."""
    if _is_custom(name):
        return "elementwise"
    if kind := _KIND_BY_NAME.get(name):
        return kind
    for fragment, kind in _KIND_BY_FRAGMENT:
        if fragment in name:
            return kind
    return "elementwise"


def formula_kind(func: torch._ops.OpOverload, name: str) -> str | None:
    """Return the kind of a custom operator that has a formula in torch's registry of FLOPs. None: it has none.

    The registry is for matrix products, so its FLOPs run at the rate of a matrix product.
    """
    return "matmul" if _is_custom(name) and func.overloadpacket in flop_registry else None


def launches_kernel(name: str) -> bool:
    """False for operators that only allocate or look at metadata."""
    return name not in _FREE


def bytes_read(name: str, inputs: Sequence[int], taken: int) -> int:
    """Bytes that one call reads.

    Args:
        name: the aten operator.
        inputs: bytes of each input, in the order of the arguments.
        taken: bytes of the rows or elements that a gather or an embedding takes of its first input. Others read it all.
    """
    return sum(inputs) if name not in _TAKING else taken + sum(inputs[1:])


def bytes_taken(name: str, inputs: Sequence[torch.Tensor], written: int) -> int:
    """Bytes that a gather or an embedding takes of its first input: as many as it writes, but a bag writes only sums.

    A row that is taken twice counts twice.
    """
    if name != "_embedding_bag":
        return written
    table, indices = inputs[:2]
    return indices.numel() * table.shape[1] * table.element_size()


def flops_of(func: torch._ops.OpOverload, name: str, kind: str, args: Args, kwargs: Kwargs, out: Any) -> int:
    """Floating-point operations of one call; a multiply-add counts as two."""
    if _is_custom(name) and func.overloadpacket in flop_registry:
        return _flops_by_formula(func, name, args, kwargs, out)
    if kind == "conv":
        return product_flops(args[0].shape, args[1].shape, out.shape, transposed=bool(args[6]))
    if (counter := _OWN_COUNTERS.get(name)) is not None:
        return counter(args)
    if name.startswith("_scaled_dot_product_"):  # torch's counter of before 2.12 refuses fewer heads of keys than of queries
        backward = name.endswith("_backward")
        shapes = (tensor.shape for tensor in args[backward : backward + 3])
        is_causal = bool(argument_of(func, args, kwargs, "is_causal"))
        return (_attention_backward_flops if backward else attention_flops)(*shapes, causal=is_causal)
    counter = flop_registry.get(func.overloadpacket)
    if counter is not None:
        return int(counter(*args, **kwargs, out_val=out))
    return elementwise_flops(kind, _num_elements(args) if kind in _COUNTED_BY_INPUT else 0, _num_elements(out))


def _flops_by_formula(func: torch._ops.OpOverload, name: str, args: Args, kwargs: Kwargs, out: Any) -> int:
    """Return the FLOPs of one call of a custom operator by the formula that its author has registered.

    Raises:
        TraceError: if the formula fails, or gives no number of FLOPs.
    """
    hint = (
        "Correct the function that `torch.utils.flop_counter.register_flop_formula` has registered: it gets the shapes of the "
        "operator's arguments, and `out_shape=`. It returns the number of FLOPs, where a multiply-add counts as two."
    )
    try:
        found = flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
        flops = int(found)
    except Exception as error:
        raise TraceError(f"The formula for the FLOPs of {name} fails ({type(error).__name__}: {error}). {hint}") from error
    if flops < 0:
        raise TraceError(f"The formula for the FLOPs of {name} must not give a negative number, but got {found!r}. {hint}")
    return flops


def cuda_workspace(func: torch._ops.OpOverload, name: str, args: Args, kwargs: Kwargs) -> torch.Tensor | None:
    """A tensor on meta like what CUDA's kernel of ``func`` makes beside its outputs while it runs. None: it makes nothing."""
    rule = _WORKSPACES.get(name)
    return None if rule is None else rule(func, args, kwargs)


def _softmax_backward_workspace(func: torch._ops.OpOverload, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """Its gradient times its output (`softmax_backward_cuda_out` of SoftMax.cu)."""
    return torch.empty_like(args[0], device="meta")


def _embedding_backward_workspace(func: torch._ops.OpOverload, args: Args, kwargs: Kwargs) -> torch.Tensor | None:
    """Sums of parts of up to ten rows, in float32, of more than 3,072 indices (`embedding_backward_cuda_kernel`)."""
    number = args[1].numel()
    if number <= 3072:
        return None
    width = args[0].shape[-1]
    dtype = torch.promote_types(args[0].dtype, torch.float32)
    return torch.empty(number // 10 + min(number, args[2]), -(-width // 32) * 32, dtype=dtype, device="meta")


def _loss_workspace(func: torch._ops.OpOverload, args: Args, kwargs: Kwargs) -> torch.Tensor | None:
    """The losses of all elements, of which a mean or a sum is taken; of logits, their log-sigmoid, too (Loss.cpp)."""
    is_reduced = argument_of(func, args, kwargs, "reduction") != NO_REDUCTION
    number = int(is_reduced) + int(func is torch.ops.aten.binary_cross_entropy_with_logits.default)
    if not number:
        return None
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    return torch.empty(number, *shape, dtype=torch.result_type(args[0], args[1]), device="meta")


_WORKSPACES: Mapping[str, Callable[..., torch.Tensor | None]] = {
    "_softmax_backward_data": _softmax_backward_workspace,
    "embedding_dense_backward": _embedding_backward_workspace,
    "mse_loss": _loss_workspace,
    "smooth_l1_loss": _loss_workspace,
    "huber_loss": _loss_workspace,
    "binary_cross_entropy_with_logits": _loss_workspace,
}


def elementwise_flops(kind: str, num_inputs: int, num_outputs: int) -> int:
    """Floating-point operations of an operator of ``kind`` that does a few for each element.

    Args:
        kind: one of OP_KINDS.
        num_inputs: elements of its largest input.
        num_outputs: elements of its largest output.
    """
    per_element = _ELEMENTWISE_FLOPS.get(kind, 0 if kind in ("copy", "fill", "embedding") else 1)
    return per_element * (num_inputs if kind in _COUNTED_BY_INPUT else num_outputs)


def _num_elements(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel()
    if isinstance(value, (tuple, list)):
        return max((_num_elements(item) for item in value), default=0)
    return 0


def product_flops(inputs: Sequence[int], weight: Sequence[int], outputs: Sequence[int], *, transposed: bool) -> int:
    """2 · N · (positions) · (weights): each weight meets each position of the smaller map once a sample.

    ``weight`` is (C_out, C_in / groups, *kernel), or (C_in, C_out / groups, *kernel) if transposed, so its number of
    elements already accounts for the groups.
    """
    positions = math.prod(inputs[2:] if transposed else outputs[2:])
    return 2 * inputs[0] * positions * math.prod(weight)


def _convolution_backward_flops(args: Args) -> int:
    grad_output = args[0]
    inputs = args[1]
    weight = args[2]
    transposed = bool(args[7])
    output_mask = args[10]
    one = product_flops(inputs.shape, weight.shape, grad_output.shape, transposed=transposed)
    return one * (int(output_mask[0]) + int(output_mask[1]))


def attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *, causal: bool = False) -> int:
    """Two matrix products, (L, E) x (E, S) and (L, S) x (S, Ev), in each head. A mask that is a tensor saves nothing."""
    return 2 * math.prod(query[:-2]) * _num_scores(query[-2], key[-2], causal=causal) * (query[-1] + value[-1])


def _attention_backward_flops(query: torch.Size, key: torch.Size, value: torch.Size, *, causal: bool) -> int:
    """The scores again, then the gradients of value, probabilities, query and key: five products for the forward's two."""
    return 2 * math.prod(query[:-2]) * _num_scores(query[-2], key[-2], causal=causal) * (3 * query[-1] + 2 * value[-1])


def _num_scores(queries: int, keys: int, *, causal: bool) -> int:
    """Scores that a fused kernel computes in each head. If causal, query i meets the keys up to i, and blocks beyond it are
    skipped (Dao 2023, "FlashAttention-2", arXiv 2307.08691, section 3.1.1: 1.7 to 1.8 times as fast)."""
    if not causal:
        return queries * keys
    meeting = min(queries, keys)
    return meeting * (meeting + 1) // 2 + (queries - meeting) * keys


def _fused_rnn_flops(input: torch.Tensor, weights: Sequence[torch.Tensor]) -> int:
    """Each weight is used once at each position."""
    return 2 * input.shape[:-1].numel() * sum(weight.numel() for weight in weights if weight.dim() == 2)


# Operators that torch's registry does not know.
_OWN_COUNTERS: dict[str, Callable[[Sequence[Any]], int]] = {
    "convolution_backward": _convolution_backward_flops,
    "int8_linear_matmul": lambda args: 2 * args[0].numel() * args[1].shape[0],  # bitsandbytes' (M, K) x (N, K)
    "fused_rnn": lambda args: _fused_rnn_flops(args[0], args[3]),
    "fused_rnn_backward": lambda args: 2 * _fused_rnn_flops(args[1], args[5]),
}


def attributes_of(name: str, kind: str, args: Args) -> dict[str, Any]:
    """Hyperparameters that decide which kernel runs, and which of cuDNN's algorithms with large workspaces are possible.

    Winograd's needs 3 x 3 (or 5 x 5) kernels, both it and FFT need stride, dilation and groups of one (cuDNN's developer guide,
    tables of `cudnnConvolutionForward`).
    """
    if (first := _FIRST_FACTOR.get(name)) is not None:
        left = args[first].shape
        right = args[first + 1].shape
        return {"product": (left[0] if len(left) == 3 else 1, left[-2], right[-1], left[-1])}
    if name in ("fused_rnn", "fused_rnn_backward"):
        return {"steps": args[-1]}
    if kind not in ("conv", "conv_backward"):
        return {}
    shift = 0 if kind == "conv" else 1
    inputs, weight, stride, padding, dilation = args[shift], args[1 + shift], *args[3 + shift : 6 + shift]
    transposed = bool(args[6 + shift])
    groups = int(args[8 + shift])
    return convolution_attributes(
        tuple(inputs.shape),
        tuple(weight.shape),
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        transposed=transposed,
    )


def convolution_attributes(
    in_shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    transposed: bool,
) -> dict[str, Any]:
    """Attributes that select the kernel of a convolution; see :func:`attributes_of`."""
    kernel = weight_shape[2:]
    dense = groups == 1 and all(step == 1 for step in (*stride, *dilation))
    return {
        "in_shape": in_shape,
        "weight_shape": weight_shape,
        "stride": tuple(stride),
        "padding": tuple(padding),
        "dilation": tuple(dilation),
        "groups": groups,
        "transposed": transposed,
        "winograd": dense and kernel in ((3, 3), (5, 5)),
        "fft": dense and len(kernel) == 2 and max(kernel) > 1 and max(in_shape[2:]) <= _MAX_FFT_SIZE,
    }
