"""PerfGuard's own arithmetic, out of reach of what a script sets for its training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import ParamSpec, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

_P = ParamSpec("_P")
_R = TypeVar("_R")


def undisturbed(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``function`` on the CPU and in its own precision, whatever default device, autocast or inference mode the caller is under.

    Scripts call `torch.set_default_device("cuda")`, or build their modules on "meta"; weights that are loaded there would take
    memory from the trial, or hold nothing. The settings belong to the calling thread, so others see nothing of this.
    """

    @functools.wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with ExitStack() as stack:
            # `torch.get_default_device()` would begin CUDA in this process, to learn the number of the GPU.
            if any(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack()):
                stack.enter_context(torch.device("cpu"))
            if torch.is_autocast_enabled("cpu"):
                stack.enter_context(torch.autocast("cpu", enabled=False))
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(mode=False))
            return function(*args, **kwargs)

    return wrapped
