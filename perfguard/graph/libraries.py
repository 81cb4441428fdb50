"""Libraries for fine-tuning, on meta as on a GPU: Triton's kernels (Liger), bitsandbytes, torchao's optimizers, TRL.

What calls a kernel of Triton makes its outputs first, so the kernel itself is one operator that is not run.

Most operators of bitsandbytes know their shapes on meta. What is here replaces those that do not, and those that are several
kernels on a GPU (bitsandbytes 0.50: `backends/cuda/ops.py`, `backends/default/ops.py`; torchao 0.18: `optim/adam.py`; TRL 1.16:
`kernels/chunked_logprob.py`, `trainer/grpo_trainer.py`).
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from perfguard.graph.recorder import tensors_in
from perfguard.graph.shape_rules import META, empty_twin, is_meta

Replace = Callable[[Any, str, Callable[[Any], Any]], None]
"""``replace(owner, name, make)`` puts ``make(original)`` in the place of an attribute."""
_library = torch.library.Library("perfguard", "FRAGMENT")
_library.define("triton_kernel(Tensor[] read, Tensor(a!)[] written) -> ()")


@torch.library.impl(_library, "triton_kernel", "Meta")
def _triton_kernel_on_meta(read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
    """Its outputs are made before."""


def replacing(stack: ExitStack) -> Replace:
    """Return a function that replaces attributes until ``stack`` closes. One that a version does not have stays missing."""

    def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        if hasattr(owner, name):
            own = vars(owner)[name] if isinstance(owner, type) and name in vars(owner) else getattr(owner, name)
            stack.callback(setattr, owner, name, own)
            setattr(owner, name, make(own))

    return replace


def libraries_on_meta(replace: Replace) -> None:
    """Let the libraries that are imported work on meta as on a GPU. Call it again where others may be by now."""
    _triton_on_meta(replace)
    _bitsandbytes_on_meta(replace)
    _torchao_on_meta(replace)
    _grpo_on_meta(replace)


def _triton_on_meta(replace: Replace) -> None:
    """Let each kernel of Triton be one operator on meta, if Triton is imported."""
    jit, tuner = (sys.modules.get(f"triton.runtime.{name}") for name in ("jit", "autotuner"))
    if jit is not None and tuner is not None and not hasattr(jit.JITFunction.run, "__wrapped__"):
        replace(jit.JITFunction, "run", _launching)
        replace(tuner.Autotuner, "run", _without_tuning)


def _bitsandbytes_on_meta(replace: Replace) -> None:
    """Let bitsandbytes work on meta as on a GPU, if it is imported."""
    bnb = sys.modules.get("bitsandbytes")
    if bnb is None or not hasattr(bnb, "optim") or hasattr(bnb.functional.get_paged, "__wrapped__"):
        return
    for kind in ("Params4bit", "Int8Params"):
        replace(getattr(bnb.nn, kind), "to", _quantizing)
    replace(bnb.functional, "get_paged", _paged)
    for name in ("fill", "prefetch_tensor"):
        replace(bnb.functional, name, lambda own: lambda tensor, *args: None if tensor.is_meta else own(tensor, *args))
    replace(bnb.functional, "int8_vectorwise_quant", _without_outliers)
    for name, expand in _SEVERAL_KERNELS.items():
        replace(torch.ops.bitsandbytes, name, functools.partial(_Expanded, expand))


def unquantized_layers(model: nn.Module) -> list[str]:
    """Names of layers that bitsandbytes has not quantized yet, as it does where they arrive on a GPU, and of all of 8 bits."""
    return [
        f"{name!r}, a {type(module).__name__}"
        for name, module in model.named_modules()
        for weight in module.parameters(recurse=False)
        if type(weight).__module__.startswith("bitsandbytes") and not getattr(weight, "bnb_quantized", False)
    ]


def constants_of_4bit(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return twins on meta of what bitsandbytes keeps beside the weights that it has quantized. They are no buffers."""
    found = []
    for name, parameter in model.named_parameters():
        state = getattr(parameter, "quant_state", None)
        for part in filter(None, (state, getattr(state, "state2", None))):
            found += [(name, empty_twin(part.absmax)), (name, empty_twin(part.code))]
    return found


def _torchao_on_meta(replace: Replace) -> None:
    """Let the low-bit optimizers of torchao, which compile their step, run it as one kernel, if torchao is imported."""
    adam = sys.modules.get("torchao.optim.adam")
    if adam is not None and not hasattr(adam.single_param_adam, "__wrapped__"):
        replace(adam, "single_param_adam", _in_one_kernel)


def _grpo_on_meta(replace: Replace) -> None:
    """Let GRPO and RLOO train on completions of the most tokens, if they are imported. They cut them at their ends, a value."""
    for name in ("grpo", "rloo"):
        trainer = getattr(sys.modules.get(f"trl.trainer.{name}_trainer"), f"{name.upper()}Trainer", None)
        if trainer is not None and not hasattr(trainer._generate_single_turn, "__wrapped__"):
            replace(trainer, "_generate_single_turn", _completing)


def trl_on_meta(replace: Replace) -> None:
    """Let TRL's loss run in kernels of Triton as on a GPU. Without Triton, it makes several copies of the logits."""
    loss = sys.modules.get("trl.kernels.chunked_logprob")
    if loss is not None and loss._forward_tile is not _read_tile:
        replace(loss, "_forward_tile", lambda _: _read_tile)
        replace(loss, "_backward_tile", lambda _: _write_tile)
        replace(loss, "_addmm_fp32", lambda _: _add_product)
    offloading = sys.modules.get("trl.models.activation_offloading")
    if offloading is not None:
        replace(offloading.OffloadActivations, "__init__", _offloading_from_meta)


class _TypeOfDevice(str):
    """The name of the device's type. A tensor says "cuda" where a dry run answers for it, and "meta" within autograd."""

    def __eq__(self, other: object) -> bool:
        return other in ("cuda", "meta")

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(str(self))


def _offloading_from_meta(own: Any) -> Any:
    @functools.wraps(own)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        with ExitStack() as stack:
            replacing(stack)(torch.accelerator, "current_accelerator", lambda _: lambda: torch.device("cuda"))
            own(self, *args, **kwargs)
        self.accelerator_type = _TypeOfDevice("meta")

    return __init__


def _launching(own: Any) -> Any:
    @functools.wraps(own)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        if not any(map(is_meta, tensors.values())):
            return own(self, *args, **kwargs)
        written = _reached_by(self, r"store|atomic_\w+") & tensors.keys() or tensors.keys()
        read = (tensors.keys() - written) | (_reached_by(self, "load") & tensors.keys())
        with torch.no_grad():  # the caller's backward pass is kernels of its own
            torch.ops.perfguard.triton_kernel(*([tensors[name] for name in tensors if name in some] for some in (read, written)))
        return None

    return run


@functools.cache
def _reached_by(kernel: Any, calls: str) -> Set[str]:
    """Arguments that a kernel loads or stores: `rows = y_ptr + first` and `tl.store(rows + columns, ...)` reach "y_ptr"."""
    begins_at = dict(re.findall(r"(\w+) = \(?\s*(\w+) \+", kernel.src))
    reached = set(re.findall(rf"\b(?:{calls})\(\s*(\w+)", kernel.src))
    return reached | {begins_at[name] for name in reached if name in begins_at}


def _without_tuning(own: Any) -> Any:
    @functools.wraps(own)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(map(is_meta, (*args, *kwargs.values()))):
            return own(self, *args, **kwargs)
        return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())

    return run


def _in_one_kernel(own: Any) -> Any:
    @functools.wraps(own)
    def single_param_adam(parameter: Any, gradient: Any, step: Any, *state: Any) -> None:
        if not parameter.is_meta:
            own(parameter, gradient, step, *state)
            return
        inner = [tensor for tensor in tensors_in(state) if tensor.is_meta]
        torch.ops.perfguard.fused_optimizer_(tensors_in([parameter]), tensors_in([gradient]), inner)

    return single_param_adam


def _completing(own: Any) -> Any:
    @functools.wraps(own)
    def _generate_single_turn(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = own(self, *args, **kwargs)
        is_alone = type(found) is list  # RLOO's
        longest = [[0] * self.max_completion_length for _ in (found if is_alone else found[0])]
        return longest if is_alone else (longest, *found[1:])

    return _generate_single_turn


def _quantizing(own: Any) -> Any:
    """Weights are quantized where they arrive on a GPU, and stay as they are on meta."""

    @functools.wraps(own)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        is_quantized = self.data.dtype is torch.int8 or getattr(self, "bnb_quantized", False)
        if device is None or device.type != "meta" or is_quantized:
            moved = own(self, *args, **kwargs)
            if device is not None and getattr(self, "SCB", None) is not None:  # it leaves scales behind that are on meta
                moved.SCB = self.SCB.to(device)
            return moved
        return (self if self.is_meta else own(self, device))._quantize(device)

    return to


def _paged(own: Any) -> Any:
    """CUDA moves managed memory to the host where PyTorch asks for more. One element stands for it."""

    @functools.wraps(own)
    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device) -> Any:
        if device.type == "cpu":
            return own(*shape, dtype=dtype, device=device)
        paged: Any = torch.empty((), dtype=dtype, device=META).expand(shape)
        paged.is_paged = True
        paged.page_deviceid = 0
        return paged

    return get_paged


class _Expanded:
    """Stands for an operator, which is called with its overload or without. Other threads may train on a GPU meanwhile."""

    def __init__(self, expand: Callable[..., Any], own: Any) -> None:
        self._expand = expand
        self._own = own
        self.default = self

    def __call__(self, rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (self._expand if rows.is_meta else self._own)(rows, *args, **kwargs)


def _gemm_4bit(
    rows: torch.Tensor, weight: torch.Tensor, shape: Sequence[int], absmax: torch.Tensor, blocksize: int, quant_type: str,
    bias: Any = None, absmax_8bit: Any = None, absmax_code: Any = None, absmax_offset: Any = None,
) -> Any:  # fmt: skip
    """Multiply by the whole weight, dequantized. A GPU does so for most batches; for a few rows, one kernel does both."""
    ops = torch.ops.bitsandbytes
    if absmax_8bit is not None:
        absmax = ops.dequantize_blockwise.default(absmax_8bit, absmax, absmax_code, 256, torch.float32) + absmax_offset
    return F.linear(rows, ops.dequantize_4bit.default(weight, absmax, blocksize, quant_type, shape, rows.dtype), bias)


def _without_outliers(own: Any) -> Any:
    """Columns with large values are multiplied in half precision. How many there are is a value: none."""

    def int8_vectorwise_quant(rows: torch.Tensor, threshold: float = 0.0) -> Any:
        if threshold == 0.0 or not rows.is_meta:
            return own(rows, threshold)
        quantized, scales, _ = own(rows)
        (rows.abs() >= threshold).any()
        return quantized, scales, rows.new_empty(0, dtype=torch.int64)

    return int8_vectorwise_quant


def _int8_mixed_scaled_mm(
    rows: torch.Tensor, quantized: torch.Tensor, weight: torch.Tensor, scales: Any, weight_scales: Any,
    outlier_columns: Any = None, bias: Any = None,
) -> Any:  # fmt: skip
    """Multiply all columns as 8-bit integers."""
    return _int8_scaled_mm(quantized, weight, scales, weight_scales, bias, rows.dtype), rows.new_empty(0)


def _int8_scaled_mm(
    rows: torch.Tensor, weight: torch.Tensor, scales: Any, weight_scales: Any, bias: Any = None, dtype: Any = None
) -> Any:
    """Multiply into integers of 32 bits, and scale these."""
    product = torch.ops.bitsandbytes.int8_linear_matmul.default(rows, weight)
    return torch.ops.bitsandbytes.int8_mm_dequant.default(product, scales, weight_scales, dtype=dtype, bias=bias)


_SEVERAL_KERNELS: dict[str, Callable[..., Any]] = {
    "gemm_4bit": _gemm_4bit,
    "int8_mixed_scaled_mm": _int8_mixed_scaled_mm,
    "int8_scaled_mm": _int8_scaled_mm,
}


def _read_tile(tile: torch.Tensor, *_: Any, **__: Any) -> None:
    """One kernel reads logits."""
    tile.amax(-1)


def _write_tile(tile: torch.Tensor, *_: Any, **__: Any) -> None:
    """One kernel turns logits into their gradients."""
    tile.mul_(1.0)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """cuBLAS adds a product of half-precision factors to a float32 matrix, with no copies."""
    total.addmm_(left, right)
