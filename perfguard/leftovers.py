"""What a trial that died leaves on the device: it is freed, and what the user's code still holds is named."""

from __future__ import annotations

import gc
import sys
import traceback
from types import FunctionType
from typing import Any

from perfguard.exceptions import MeasurementWarning, warn_user
from perfguard.pytorch import objects_of
from perfguard.quantities import format_bytes


def free_memory(error: BaseException) -> None:
    """Free what the frames that ``error`` has passed still hold, and give PyTorch's cache back to the device."""
    errors = [error]
    for one in errors:
        traceback.clear_frames(one.__traceback__)
        errors += [other for other in (one.__cause__, one.__context__) if other is not None and other not in errors]
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def warn_of_held_memory(device_bytes: int) -> None:
    """Warn if PyTorch still holds more than a tenth of a GPU of that size after a trial that ran out of memory."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or torch.cuda.memory_allocated() <= 0.1 * device_bytes:
        return
    warn_user(
        f"{format_bytes(torch.cuda.memory_allocated())} are still allocated after a trial that ran out of memory, so its second "
        f"try has less. The largest tensors: {largest_tensors('cuda') or 'unknown'}. Unless another trial needs them, keep no "
        "tensor outside of the objective.",
        MeasurementWarning,
    )


def largest_tensors(kind: str, number: int = 3) -> str:
    """The largest tensors on a ``kind`` of device in words: shape, bytes and, if it is found, the variable that holds them.

    Tensors that only PyTorch's own graph holds are not seen.
    """
    torch: Any = sys.modules["torch"]
    tensors = [one for one in objects_of(torch.Tensor) if one.device.type == kind]
    sizes = sorted(((one.numel() * one.element_size(), one) for one in tensors), key=lambda pair: -pair[0])
    return ", ".join(f"{tuple(one.shape)} of {format_bytes(size)}{_holder_of(one)}" for size, one in sizes[:number])


def _holder_of(thing: object) -> str:
    """The function or the global variable that leads to ``thing`` by at most six references, in words. Empty: there is none."""
    level = [thing]
    seen = {id(thing)}
    for _ in range(6):
        found = [one for one in gc.get_referrers(*level[:50]) if one is not level and id(one) not in seen]
        for one in found:
            if isinstance(one, FunctionType):
                return f" in a closure of {one.__module__}.{one.__qualname__}"
            module = sys.modules.get(str(one.get("__name__"))) if type(one) is dict else None
            if module is not None and module.__dict__ is one:
                name = next((name for name, value in one.items() if any(value is held for held in level)), "")
                return f" in {module.__name__}.{name}"
        seen.update(map(id, found))
        level = found
    return ""
