"""What a device runs where PyTorch on meta would run something else.

On meta tensors PyTorch decomposes what a GPU runs as one fused kernel: attention, dropout, recurrent layers, RMSNorm,
half-precision softmax. Autocast does nothing at all. :class:`DevicePaths` sits above autograd and replaces each such call with
the one that the target would make. So autograd saves for the backward pass what it would save there. Where PyTorch has no
operator with a meta kernel, one of our own stands for it. The parts, in order:

    Target            the properties of a device that decide
    attention         the kernel that `sdp_utils.cpp` of PyTorch 2.13 would choose
    fused_rms_norm    one kernel each way, which keeps its input and one number a row
    fused_rnn         one kernel for all time steps and layers, as in cuDNN, and in some cases oneDNN
    opaque            what cannot be traced, described by what it returns
    DevicePaths       the mode, and autocast
    device_semantics  checks in PyTorch's own Python code that must not see that tensors are on meta
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch
import torch.amp.autocast_mode
import torch.cuda.amp.common
import torch.nn.functional as F
import torch.nn.modules.transformer
import torch.utils.checkpoint
from torch import nn
from torch.overrides import TorchFunctionMode

from perfguard.exceptions import TraceError
from perfguard.graph.libraries import libraries_on_meta, replacing
from perfguard.graph.recorder import tensors_in
from perfguard.graph.shape_rules import is_meta

if TYPE_CHECKING:
    from perfguard.devices import Device

_Function = TypeVar("_Function", bound=Callable[..., Any])
_HALF = (torch.float16, torch.bfloat16)
_is_autocast_enabled = torch.is_autocast_enabled
"""PyTorch's own, which is asked at each call. The one that is put in its place answers of meta, too."""
_library = torch.library.Library("perfguard", "FRAGMENT")


class Target(NamedTuple):
    """The kind of device that a step is traced for. Two devices with equal targets share one trace."""

    is_cpu: bool = False
    flash_attention: bool = True
    """FlashAttention, and memory-efficient attention in bfloat16, need compute capability 8.0 (Ampere)."""


def target_of(device: Device | Literal["cuda", "cpu"]) -> Target:
    """The target of ``device``; "cuda" means a recent GPU."""
    kind = device if isinstance(device, str) else device.kind
    if kind == "cpu":
        return Target(is_cpu=True, flash_attention=False)
    before_ampere = ("kepler", "pascal", "volta", "turing")
    return Target(flash_attention=isinstance(device, str) or device.architecture.lower() not in before_ampere)


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
        same_width = query.shape[-1] == value.shape[-1] <= 256  # the widest head of FlashAttention
        if (
            torch.backends.cuda.flash_sdp_enabled()
            and target.flash_attention
            and not masked
            and query.dtype in _HALF
            and same_width
        ):
            return _flash(query, key, value, dropout_p, is_causal, scale)
        # Below compute capability 8.0 it takes no bfloat16 (`check_mem_efficient_hardware_support` and its list of dtypes).
        efficient_dtypes = (*_HALF, torch.float32) if target.flash_attention else (torch.float16, torch.float32)
        if torch.backends.cuda.mem_efficient_sdp_enabled() and not grouped and query.dtype in efficient_dtypes:
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


_library.define("fused_rms_norm(Tensor input, Tensor? weight, int num_normalized) -> (Tensor, Tensor)")
_library.define("fused_rms_norm_backward(Tensor grad_output, Tensor input, Tensor rstd, Tensor? weight) -> (Tensor, Tensor)")


@torch.library.impl(_library, "fused_rms_norm", "Meta")
def _rms_norm_on_meta(input: torch.Tensor, weight: torch.Tensor | None, num_normalized: int) -> tuple[torch.Tensor, torch.Tensor]:
    kept = input.dim() - num_normalized
    dtype = torch.float32 if input.dtype in _HALF else input.dtype
    rstd = input.new_empty((*input.shape[:kept], *(1 for _ in range(num_normalized))), dtype=dtype)
    return torch.empty_like(input, memory_format=torch.contiguous_format), rstd


@torch.library.impl(_library, "fused_rms_norm_backward", "Meta")
def _rms_norm_backward_on_meta(
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


FUSED_RNNS = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
# Values that cuDNN keeps for each unit, time step and sample, beside the outputs of all layers but the last: measured on an
# H100, cuDNN 9 (`benchmarks/cudnn_bytes.py`). It does not document its layout.
_RESERVED = {"lstm": 5, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}

_library.define(
    "fused_rnn(Tensor input, Tensor hx, Tensor? cx, Tensor[] weights, int num_directions, int num_reserved, int num_steps) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "fused_rnn_backward(Tensor grad_output, Tensor input, Tensor output, Tensor hx, Tensor? cx, Tensor[] weights, "
    "Tensor reserve, int num_steps) -> Tensor[]"
)


@torch.library.impl(_library, "fused_rnn", "Meta")
def _rnn_on_meta(
    input: torch.Tensor,  # shape: (*steps, input size), packed or not
    hx: torch.Tensor,  # shape: (layers * directions, batch, output size)
    cx: torch.Tensor | None,  # shape: (layers * directions, batch, hidden size); of an LSTM only
    weights: Sequence[torch.Tensor],
    num_directions: int,
    num_reserved: int,
    num_steps: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    output = input.new_empty(*input.shape[:-1], hx.shape[-1] * num_directions)
    cy = input.new_empty(0) if cx is None else torch.empty_like(cx)
    return output, torch.empty_like(hx), cy, input.new_empty(num_reserved)


@torch.library.impl(_library, "fused_rnn_backward", "Meta")
def _rnn_backward_on_meta(
    grad_output: torch.Tensor, input: torch.Tensor, output: torch.Tensor, hx: torch.Tensor, cx: torch.Tensor | None,
    weights: Sequence[torch.Tensor], reserve: torch.Tensor, num_steps: int,
) -> list[torch.Tensor]:  # fmt: skip
    states = [hx] if cx is None else [hx, cx]
    return [torch.empty_like(tensor) for tensor in (input, *states, *weights)]


class _FusedRnn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, num_directions: int, num_reserved: int, num_steps: int, num_workspace: int,
        input: torch.Tensor, hx: torch.Tensor, cx: torch.Tensor | None, *weights: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        _workspace = input.new_empty(num_workspace)
        output, hy, cy, reserve = torch.ops.perfguard.fused_rnn(input, hx, cx, weights, num_directions, num_reserved, num_steps)
        ctx.save_for_backward(input, output, hx, cx, reserve, *weights)
        ctx.num_steps = num_steps
        ctx.num_workspace = num_workspace
        return output, hy, cy

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        input, output, hx, cx, reserve, *weights = ctx.saved_tensors
        _workspace = input.new_empty(ctx.num_workspace)
        grad_input, grad_hx, *rest = torch.ops.perfguard.fused_rnn_backward(
            grad_output, input, output, hx, cx, weights, reserve, ctx.num_steps
        )
        return None, None, None, None, grad_input, grad_hx, *([None] if cx is None else []), *rest


def is_fused_on_cpu(kind: str, input: torch.Tensor, states: Any, *_: Any) -> bool:
    """Whether oneDNN runs the layer: an LSTM, padded and without projections (PyTorch's RNN.cpp, `use_mkldnn`).

    bfloat16 needs AVX-512, which is assumed. Under autocast a CPU without it gets such a layer in float32, so it is fused, too.
    """
    is_padded = not isinstance(states, torch.Tensor)
    is_known = input.dtype in (torch.float32, torch.bfloat16)
    return kind == "lstm" and is_padded and is_known and states[0].shape == states[1].shape


def fused_rnn(kind: str, input: torch.Tensor, *args: Any, on_cpu: bool) -> tuple[torch.Tensor, ...]:
    """``torch.lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu``, in either of their forms (padded, packed), as cuDNN runs it.

    cuDNN's workspace is seldom less than what is counted. In the middle of 88 layers on an H100 it is twice that, and many times
    that where there are few units (`benchmarks/cudnn_bytes.py`).
    """
    packed = isinstance(args[0], torch.Tensor) and isinstance(args[2], (list, tuple))
    states, weights, _biases, num_layers, _dropout, train, bidirectional = args[1:8] if packed else args[:7]
    hx, cx = states if kind == "lstm" else (states, None)
    num_directions = 2 if bidirectional else 1
    hidden = weights[0].shape[0] // _GATES[kind]
    width = hx.shape[-1]
    kept = _RESERVED[kind] * hidden * num_directions * num_layers + width * num_directions * (num_layers - 1)
    positions = input.shape[:-1].numel()
    length = args[0].numel() if packed else positions // hx.shape[1]  # that of the longest sequence
    # Steps that wait for one another. cuDNN runs the layers as a diagonal wavefront, and both directions of a layer at once
    # (Appleyard et al. 2016, arXiv 1604.01946, section 3.3). A layer that reads both directions waits for the end of both.
    if on_cpu:
        num_steps = length * num_layers * num_directions
    elif bidirectional:
        num_steps = length * num_layers
    else:
        num_steps = length + num_layers - 1
    beside_gates = 3.3 if bidirectional else 1
    of_units = int((_GATES[kind] + beside_gates) * positions * width * num_directions)
    num_workspace = 0 if on_cpu else of_units + 3 * input.numel() + sum(weight.numel() for weight in weights)
    sizes = num_directions, positions * kept if train else 0, num_steps, num_workspace
    output, hy, cy = _FusedRnn.apply(*sizes, input, hx, cx, *weights)  # type: ignore[no-untyped-call]
    return (output, hy, cy) if kind == "lstm" else (output, hy)


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


def opaque(function: _Function, *, example_outputs: Callable[..., Any]) -> _Function:
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
            inner = without_overrides(func)
            if inner is None or func in self._expanding:  # a helper of the function checks in its name
                if _is_autocast_enabled(self._autocast_device):
                    args, kwargs = self._cast(name, args, kwargs)
                return func(*args, **kwargs)
            self._expanding.add(func)
            try:
                with self:  # what it calls comes back here
                    return inner(*args, **kwargs)
            finally:
                self._expanding.discard(func)
        if _is_autocast_enabled(self._autocast_device):
            if name == "cross_entropy_loss":
                return self._cross_entropy(func, *args, **kwargs)
            args, kwargs = self._cast(name, args, kwargs)
        if name == "scaled_dot_product_attention" and args and is_meta(args[0]):
            return attention(self._target, func, *args, **kwargs)
        if name in ("grouped_mm", "_grouped_mm") and is_meta(args[0]):
            self.has_grouped_products = True
            if args[0].dtype is not torch.bfloat16 and args[0].dim() == 2 and args[1].dim() == 3:
                # The meta kernel takes bfloat16 only. The product of all rows with one expert has the same shape and arithmetic.
                return args[0] @ args[1][0]
        if name in _SOFTMAX:
            return self._softmax(func, name, args, kwargs)
        if name == "rms_norm" and not self._target.is_cpu and is_meta(args[0]):
            return fused_rms_norm(*args, **kwargs)
        if name in FUSED_RNNS and is_meta(args[0]) and (not self._target.is_cpu or is_fused_on_cpu(name, *args)):
            return fused_rnn(name, *args, **kwargs, on_cpu=self._target.is_cpu)
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
        casts = _of_thread.casts
        key = (id(tensor), dtype)
        if key not in casts:
            casts[key] = tensor, tensor.to(dtype)
        return casts[key][1]


_clones: dict[types.FunctionType, types.FunctionType | None] = {}


def without_overrides(func: types.FunctionType) -> types.FunctionType | None:
    """``func`` without its check for overrides; None if it has none.

    A function of torch that is written in Python hands itself to the mode. The mode is off while it handles that call, so calls
    inside the function would not be intercepted. Its twin skips the check, so it can run with the mode on.
    """
    if func not in _clones:
        namespace = func.__globals__
        blind = {name: lambda *_: False for name in namespace if name.startswith("has_torch_function")}
        clone = None
        if blind and (namespace.get("__name__") in _OVERRIDABLE or func is torch.Tensor.backward):
            clone = types.FunctionType(func.__code__, {**namespace, **blind}, func.__name__, func.__defaults__, func.__closure__)
            clone.__kwdefaults__ = func.__kwdefaults__
        _clones[func] = clone
    return _clones[func]


_lock = threading.Lock()
_num_inside = 0
_USE_ORIGINAL = object()
"""The answer of one who leaves it to the original."""
_restoring = ExitStack()


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.device_type = "cuda"
        self.casts: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        """Autocast's cache of weights on meta: (id, dtype) → the weight and its copy."""


_of_thread = _OfThread()


@contextmanager
def device_semantics(device_type: str) -> Iterator[None]:
    """Behave as on a GPU where code inspects meta tensors, or where this machine has no GPU to inspect.

    - Checkpointing looks up which device's random state and autocast it must restore.
    - Autocast checks for a GPU, and switches itself off if there is none. It does not know the device "meta". It also clears its
      cache of weights, and ours with it.
    - Torch's Transformer reads the values of a mask to see whether it is causal. On meta, a square mask counts as causal.
    - Models of Hugging Face check whether a padding mask hides anything; on meta, it does. They also check whether positions
      show several sequences in one row; on meta, they do not.
    - DataParallel is one module on one device. Its own forward pass looks for its parameters on the GPUs of this machine.
    - What torch.compile wraps runs as eager code, in other threads too. Otherwise the compiler would find that it cannot compile
      the code under a trace, and would then never compile it again.

    Several threads may be inside at once. The last one that leaves restores everything.
    """
    global _num_inside
    _of_thread.device_type = device_type
    with _lock:
        if _num_inside == 0:
            _replace_all()
        _num_inside += 1
    try:
        yield
    finally:
        _of_thread.casts.clear()
        with _lock:
            _num_inside -= 1
            if _num_inside == 0:
                _restoring.close()


def _replace_all() -> None:
    if "torch._dynamo.eval_frame" in sys.modules:  # otherwise nothing is compiled, and nothing need be loaded
        _restoring.enter_context(torch.compiler.set_stance("force_eager"))
    checkpoint = torch.utils.checkpoint
    transformer = torch.nn.modules.transformer
    _replace(checkpoint, "_infer_device_type", lambda *args: "cuda" if any(map(is_meta, args)) else _USE_ORIGINAL)

    def is_causal_mask(mask: Any, is_causal: bool | None = None, size: int | None = None) -> Any:
        return mask.dim() == 2 and mask.shape[0] == mask.shape[1] if is_meta(mask) and is_causal is None else _USE_ORIGINAL

    _replace(transformer, "_detect_is_causal_mask", is_causal_mask)

    def forward_of_one(self: nn.DataParallel[nn.Module], *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs) if any(map(is_meta, self.module.parameters())) else _USE_ORIGINAL

    _replace(nn.DataParallel, "forward", forward_of_one)
    if not torch.cuda.is_available():
        _replace(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        _replace(torch.cuda, "is_bf16_supported", lambda *_: True)
    _replace(torch, "clear_autocast_cache", _clear_casts)
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        own = getattr(torch, name)
        _replace(torch, name, lambda *args, own=own: own(_of_thread.device_type) if args == ("meta",) else _USE_ORIGINAL)
    _rename_meta(torch.amp.autocast_mode.autocast)
    libraries_on_meta(replacing(_restoring))
    masks = sys.modules.get("transformers.masking_utils")
    if masks is not None:
        _replace(masks, "is_tracing", lambda tensor=None: True if is_meta(tensor) else _USE_ORIGINAL)
        _replace(masks, "find_packed_sequence_indices", lambda positions: None if is_meta(positions) else _USE_ORIGINAL)


def _replace(owner: Any, name: str, override: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``override``, with the original as the fallback."""
    original = getattr(owner, name, None)
    if original is None:  # another version
        return

    def replaced(*args: Any, **kwargs: Any) -> Any:
        result = override(*args, **kwargs)
        return original(*args, **kwargs) if result is _USE_ORIGINAL else result

    _restoring.callback(setattr, owner, name, original)
    setattr(owner, name, replaced)


def _clear_casts() -> object:
    _of_thread.casts.clear()
    return _USE_ORIGINAL


def _rename_meta(autocast: Any) -> None:
    """`torch.autocast(x.device.type)` of a tensor on meta means the target."""
    original = autocast.__init__

    def renamed(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, _of_thread.device_type if device_type == "meta" else device_type, *args, **kwargs)

    _restoring.callback(setattr, autocast, "__init__", original)
    autocast.__init__ = renamed
