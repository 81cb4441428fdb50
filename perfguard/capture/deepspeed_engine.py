"""DeepSpeed in a dry run: its real engine runs on the stage, with its own partitions, buckets and gathered parameters.

What is replaced:

    the accelerator      by the guarded GPU's, also where DeepSpeed was imported on a machine without one
    a compiled kernel    by none: that of an optimizer is one operator, that of an optimizer on the host is not seen
    MPI                  by an error: nobody asks it how many processes there are
    gathered parameters  by such that no rank may change, as they have no values to send
"""

from __future__ import annotations

import builtins
import functools
import itertools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from perfguard.exceptions import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from perfguard.graph.libraries import Replace

_UNKNOWN_RANKS = (
    "DeepSpeed does not know how many processes there are: RANK and WORLD_SIZE are not set, as its launcher would. "
    "State their number: perfguard dry-run --world-size 8 train.py."
)
_ON_CPU = "DeepSpeed on a CPU cannot be dry-run. Name a GPU, as in gpu='h100'."


def deepspeed_on_meta(replace: Replace, device_kind: str) -> None:
    """Let DeepSpeed run on meta as on a GPU, as soon as it is imported."""

    def prepare() -> None:
        deepspeed = _deepspeed()
        if deepspeed is None or deepspeed.ops.op_builder.builder.OpBuilder.load is _Kernels:
            return
        replace(deepspeed.ops.op_builder.builder.OpBuilder, "load", lambda _: _Kernels)  # first: imports come back to here
        from deepspeed.accelerator import real_accelerator
        from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

        if real_accelerator.get_accelerator().device_name() != "cuda":
            replace(real_accelerator, "ds_accelerator", lambda _: CUDA_Accelerator())
        replace(deepspeed.comm.comm, "mpi_discovery", _refusing(_UNKNOWN_RANKS))
        replace(sys.modules["deepspeed.runtime.zero.partition_parameters"].GatheredParameters, "__init__", _changed_by_nobody)
        if device_kind == "cpu":
            replace(deepspeed.comm.comm, "TorchBackend", _refusing(_ON_CPU))

    def importing(own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def __import__(*args: Any, **kwargs: Any) -> Any:
            found = own(*args, **kwargs)
            prepare()
            return found

        return __import__

    prepare()
    replace(builtins, "__import__", importing)


def _deepspeed() -> Any:
    """The package, if it is imported to its end."""
    deepspeed = sys.modules.get("deepspeed")
    return deepspeed if hasattr(deepspeed, "DeepSpeedEngine") and hasattr(deepspeed, "initialize") else None


def engines_in(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those of ``modules`` that are DeepSpeed's engines."""
    deepspeed = _deepspeed()
    return [] if deepspeed is None else [part for part in modules if isinstance(part, deepspeed.DeepSpeedEngine)]


def _changed_by_nobody(own: Callable[..., None]) -> Callable[..., None]:
    """Gather parameters, which have no values, for no rank to change. What one rank has changed is sent to the others."""

    @functools.wraps(own)
    def __init__(self: Any, params: Any, modifier_rank: int | None = None, *args: Any, **kwargs: Any) -> None:
        own(self, params, None, *args, **kwargs)

    return __init__


class _Kernels:
    """What DeepSpeed would compile and load."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in ("multi_tensor_adam", "multi_tensor_lion"):
            return self._multi_tensor
        of_host = name.startswith(("create_", "destroy_")) or name.endswith(("_update", "_rollback"))
        return (lambda *_, **__: None) if of_host else _refusing(f"DeepSpeed's kernel {name} cannot be dry-run.")(None)

    @staticmethod
    def _multi_tensor(chunk_size: int, overflow: torch.Tensor, lists: list[list[torch.Tensor]], *_: Any) -> None:
        gradients, parameters, *states = lists
        torch.ops.perfguard.fused_optimizer_(parameters, gradients, [*itertools.chain(*states)])


def _refusing(words: str) -> Callable[[Any], Callable[..., NoReturn]]:
    """Make what can be put in the place of an attribute, and raises a CaptureError of these ``words`` where it is called."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise CaptureError(words)

    return lambda _: refuse
