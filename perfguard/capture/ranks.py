"""One rank of many: a dry run of distributed training is one of its processes, and the others are not there.

Their place takes PyTorch's "fake" process group. It knows how many there are, and its collectives move nothing. So the real DDP and
the real FSDP run on the stage, with their own buckets, shards and buffers.

    init_process_group("nccl")     makes a fake group, of the size that its arguments or torchrun's environment say
    an all-reduce, an all-gather   an operator of the step, which reads and writes its buffers; over the link goes nothing
    a storage that FSDP empties    dies there, and is born again where it is filled
    what compares ranks            finds them alike
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from perfguard.exceptions import CaptureError

if TYPE_CHECKING:
    from perfguard.capture.stage import Replace
    from perfguard.graph.recorder import Recorder


def torchrun_environment(world_size: int, rank: int = 0) -> dict[str, str]:
    """Return the variables that torchrun sets for one of ``world_size`` processes on one machine."""
    size, number = str(world_size), str(rank)
    return {
        "WORLD_SIZE": size, "RANK": number, "LOCAL_WORLD_SIZE": size, "LOCAL_RANK": number, "GROUP_RANK": "0",
        "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
    }  # fmt: skip


class Ranks:
    """Makes the groups of processes of a dry run, and says what of them the graph does not account for.

    Args:
        recorder: of the dry run.
        replace: replaces attributes until the dry run ends.
    """

    def __init__(self, recorder: Recorder, device_kind: str) -> None:
        self._recorder = recorder
        self._device_kind = device_kind
        self._world_size = 0
        """Number of processes. 0: the objective makes no process group."""
        self._notes: dict[str, None] = {}

    def enter(self, stack: ExitStack, replace: Replace) -> None:
        """Let the objective make process groups until ``stack`` closes."""
        if not dist.is_available():
            return
        number = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        c10d = dist.distributed_c10d
        replace(c10d, "rendezvous", lambda _: _rendezvous)
        replace(c10d, "_new_process_group_helper", lambda own: self._making_a_fake_group(own, stack, replace))
        replace(torch.multiprocessing, "spawn", lambda _: lambda fn, args=(), *_, **__: fn(0, *args))
        if number > 1:
            replace(torch.cuda, "device_count", lambda _: lambda: number)

    def _making_a_fake_group(self, own: Callable[..., Any], stack: ExitStack, replace: Replace) -> Callable[..., Any]:
        def new_group(size: int, rank: int, ranks: list[int], backend: Any, store: Any, *args: Any, **kwargs: Any) -> Any:
            from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

            if not self._world_size:
                self._world_size = size
                stack.callback(_leave_the_group)
                _prepare_wrappers(replace, self._recorder, self._device_kind)
            ignored = {"backend_options": None, "device_id": None}  # they are NCCL's
            kwargs |= {name: value for name, value in ignored.items() if name in kwargs}
            return own(size, rank, ranks, "fake", store, *args, **kwargs)

        return new_group


def _rendezvous(url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    try:
        rank = int(os.environ["RANK"]) if rank < 0 else rank
        world_size = int(os.environ["WORLD_SIZE"]) if world_size < 0 else world_size
    except KeyError as error:
        raise CaptureError(
            f"init_process_group does not know how many processes there are: {error} is not set, as torchrun sets it. "
            "State the number: perfguard dry-run --world-size 8."
        ) from error
    if not 0 <= rank < world_size:
        raise CaptureError(f"The rank of a process must be 0 to {world_size - 1} where there are {world_size}, but got {rank}.")
    yield dist.HashStore(), rank, world_size


def _leave_the_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _prepare_wrappers(replace: Replace, recorder: Recorder, device_kind: str) -> None:
    """Let DDP and FSDP run with parameters on meta."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group
    from torch.nn.parallel import distributed as ddp

    def nothing(_: Any) -> Callable[..., None]:
        return lambda *_, **__: None

    for name in ("_verify_param_shape_across_processes", "_sync_module_states"):
        replace(ddp, name, nothing)
    replace(ddp.DistributedDataParallel, "__init__", _without_devices)
    replace(_fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params", nothing)
    replace(_fsdp_param.FSDPParam, "reset_sharded_param", _following_meta)
    replace(_fsdp_collectives, "_get_device_handle", lambda own: lambda kind: own(device_kind if kind == "meta" else kind))
    copy_in = getattr(_fsdp_collectives, "all_gather_copy_in_cuda", None)  # that of meta copies nothing
    replace(torch.ops.fsdp, "all_gather_copy_in", lambda own: copy_in or own)
    replace(torch.UntypedStorage, "resize_", lambda own: _releasing(own, recorder))


def _without_devices(own: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, *args: Any, **kw: Any) -> None:
        own(self, module, None, None, *args, **kw)  # else it copies the batch from meta to meta

    return __init__


def _following_meta(own: Callable[..., Any]) -> Callable[..., Any]:
    """FSDP takes a parameter that was moved or cast for its own only if it is not on meta."""

    def reset_sharded_param(self: Any) -> None:
        own(self)
        local = getattr(self._module_info.module, self._module_info.param_name)._local_tensor
        if local.is_meta and local.untyped_storage()._cdata != self._sharded_param_data.untyped_storage()._cdata:
            self._sharded_param_data = local.new_empty(self.padded_sharded_param_size).view(-1) if (
                local.size() != self.padded_sharded_param_size) else local.view(-1)

    return reset_sharded_param


def _releasing(own: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        if storage.device.type == "meta":
            recorder.release(storage)
        return own(storage, size)

    return resize_


def collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a collective, so that it is recorded. DDP's reducer asks its work for the tensors, which a fake one has not."""
    out = func(*args, **kwargs)
    if func is torch.ops.c10d.allreduce_.default:
        from torch._C._distributed_c10d import _create_work_from_future

        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(out[0])
        return out[0], _create_work_from_future(future).boxed()
    return out
