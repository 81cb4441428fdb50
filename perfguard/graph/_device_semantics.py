"""Checks in PyTorch's own Python code whose results on meta differ from those on the target, corrected during a trace."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.amp.autocast_mode
import torch.cuda.amp.common
import torch.nn.modules.transformer
import torch.utils.checkpoint

from perfguard.graph._pytree import is_meta

_lock = threading.Lock()
_of_thread = threading.local()
_num_inside = 0
_USE_ORIGINAL = object()
"""The answer of one who leaves it to the original."""
_restoring = ExitStack()


def cast_weights() -> dict[Any, tuple[torch.Tensor, torch.Tensor]]:
    """Autocast's cache of weights on meta, of this thread: (id, dtype) → the weight and its copy."""
    if not hasattr(_of_thread, "casts"):
        _of_thread.casts = {}
    casts: dict[Any, tuple[torch.Tensor, torch.Tensor]] = _of_thread.casts
    return casts


@contextmanager
def device_semantics(device_type: str) -> Iterator[None]:
    """Behave as on a GPU where code inspects meta tensors, or where this machine has no GPU to inspect.

    - Checkpointing looks up which device's random state and autocast it must restore.
    - Autocast checks for a GPU, and switches itself off if there is none. It does not know the device "meta". It also clears its
      cache of weights, and ours with it.
    - Torch's Transformer reads the values of a mask to see whether it is causal. On meta, a square mask counts as causal.
    - Models of Hugging Face check whether a padding mask hides anything; on meta, it does. They also check whether positions
      show several sequences in one row; on meta, they do not.
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
        cast_weights().clear()
        with _lock:
            _num_inside -= 1
            if _num_inside == 0:
                _restoring.close()


def _replace_all() -> None:
    if "torch._dynamo.eval_frame" in sys.modules:  # otherwise nothing is compiled, and nothing need be loaded
        _restoring.enter_context(torch.compiler.set_stance("force_eager"))
    checkpoint, transformer = torch.utils.checkpoint, torch.nn.modules.transformer
    _replace(checkpoint, "_infer_device_type", lambda *args: "cuda" if any(map(is_meta, args)) else _USE_ORIGINAL)
    _replace(
        transformer,
        "_detect_is_causal_mask",
        lambda mask, is_causal=None, size=None: _is_square(mask) if is_meta(mask) and is_causal is None else _USE_ORIGINAL,
    )
    if not torch.cuda.is_available():
        _replace(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        _replace(torch.cuda, "is_bf16_supported", lambda *_: True)
    _replace(torch, "clear_autocast_cache", _clear_casts)
    _rename_meta(torch.amp.autocast_mode.autocast)
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
    cast_weights().clear()
    return _USE_ORIGINAL


def _rename_meta(autocast: Any) -> None:
    """`torch.autocast(x.device.type)` of a tensor on meta means the target."""
    original = autocast.__init__

    def renamed(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, getattr(_of_thread, "device_type", "cuda") if device_type == "meta" else device_type, *args, **kwargs)

    _restoring.callback(setattr, autocast, "__init__", original)
    autocast.__init__ = renamed


def _is_square(mask: torch.Tensor) -> bool:
    return mask.dim() == 2 and mask.shape[0] == mask.shape[1]
