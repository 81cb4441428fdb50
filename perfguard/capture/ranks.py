"""One rank of many: a dry run of distributed training is one of its processes, and the others are not there.

Their place takes PyTorch's "fake" process group. It knows how many there are, and its collectives move nothing. So the real
DDP, FSDP and DeepSpeed run on the stage, with their own buckets, shards and buffers.

    init_process_group("nccl")     makes a fake group, of the size that its arguments or torchrun's variables say
    an all-reduce, an all-gather   an operator of the step that reads and writes its buffers; its time: `perfguard/collectives.py`
    a stream of FSDP               an attribute of its operators, which run beside the computation
    a storage that FSDP empties    dies there, and is born again where it is filled
    what compares the ranks        finds them alike
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from perfguard.capture.deepspeed_engine import engines_in
from perfguard.exceptions import CaptureError
from perfguard.graph.op import Phase, StorageKind
from perfguard.unmodelled import CPU_LINK_TIME, FSDP_ONE_PART, NCCL_BUFFERS, NO_PROCESS_GROUP, NO_SHARDING, Unmodelled

if TYPE_CHECKING:
    from perfguard.capture.host import HostUse
    from perfguard.graph.libraries import Replace
    from perfguard.graph.recorder import Recorder


GPUS_OF_A_NODE = 8
"""Unless LOCAL_WORLD_SIZE says another number: those of an NVIDIA DGX or HGX board."""


def gpus_of_a_node() -> int:
    """As many as LOCAL_WORLD_SIZE says."""
    return max(int(os.environ.get("LOCAL_WORLD_SIZE", GPUS_OF_A_NODE)), 1)


def torchrun_variables(world_size: int, rank: int = 0, in_node: int = GPUS_OF_A_NODE) -> dict[str, str]:
    """Return what torchrun sets in the environment of one of ``world_size`` processes, on nodes of ``in_node`` GPUs or less."""
    in_node = min(world_size, in_node)
    return {
        "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(in_node), "RANK": str(rank), "LOCAL_RANK": str(rank % in_node),
        "GROUP_RANK": str(rank // in_node), "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
    }  # fmt: skip


class Ranks:
    """Makes the process groups of a dry run, and says what of its ranks the graph does not account for.

    Args:
        recorder: of the dry run.
        use: learns what FSDP keeps on the host.
        device_kind: "cuda" or "cpu".
    """

    def __init__(self, recorder: Recorder, use: HostUse, device_kind: str) -> None:
        self._recorder = recorder
        self._use = use
        self._device_kind = device_kind
        self._rank, self._world_size = 0, 0
        """0 processes: the objective makes no process group."""

    @property
    def number(self) -> int:
        """Number of processes in the objective's group. 1: there is no group."""
        return max(1, self._world_size)

    @property
    def are_many(self) -> bool:
        """Whether the objective has made a group of several processes."""
        return self.number > 1

    def enter(self, stack: ExitStack, replace: Replace) -> None:
        """Let the objective make process groups until ``stack`` closes."""
        if not dist.is_available():
            return
        c10d = dist.distributed_c10d
        replace(c10d, "rendezvous", lambda _: _rendezvous)
        replace(c10d, "_new_process_group_helper", lambda own: self._making_fake_groups(own, replace))
        for module in (dist, c10d):
            replace(module, "init_process_group", _without_a_device)
        replace(torch.multiprocessing, "spawn", lambda _: _running_the_first)
        if self._device_kind == "cuda":
            replace(torch.cuda, "device_count", lambda _: lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
            replace(torch._C, "_get_accelerator", lambda _: lambda: torch.device("cuda"))
        if not dist.is_initialized():
            stack.callback(_leave_the_group)
            return
        rank, size = dist.get_rank(), dist.get_world_size()  # by the process before; the others do not follow into a dry run
        c10d.GroupMember.WORLD = None
        dist.init_process_group("gloo", rank=rank, world_size=size)

    def _making_fake_groups(self, own: Callable[..., Any], replace: Replace) -> Callable[..., Any]:
        def new_group(size: int, rank: int, ranks: Any, backend: Any, store: Any, *args: Any, **kwargs: Any) -> Any:
            from torch.testing._internal.distributed import fake_pg  # noqa: F401 - it registers the backend

            if not self._world_size:
                self._rank = rank
                self._world_size = size
                _let_wrappers_run_on_meta(replace, self._recorder, self._use, self._device_kind)
            return own(size, rank, ranks, "fake", store, *args, **kwargs | {"backend_options": None, "device_id": None})

        return new_group

    def options(self, models: Collection[nn.Module]) -> tuple[str, ...]:
        """Return which of "ddp", "deepspeed", "fsdp" and "tp" there are, for how ``models`` are wrapped."""
        return tuple(sorted(_wrappers_in(models))) if self.are_many else ()

    def unmodelled(self, models: Collection[nn.Module]) -> Iterator[Unmodelled]:
        """Say what of the ranks is not accounted for, in a dry run that has run ``models``."""
        stated = int(os.environ.get("WORLD_SIZE", "1"))
        if not self._world_size and stated > 1:
            yield NO_PROCESS_GROUP.of(stated)
        if not self.are_many:
            return
        left = NCCL_BUFFERS if self._device_kind == "cuda" else CPU_LINK_TIME
        yield left.of(self._rank, self._world_size)
        found = _wrappers_in(models)
        if not found:
            yield NO_SHARDING
        if len(found.get("fsdp", ())) == 1:
            yield FSDP_ONE_PART


def _wrappers_in(models: Collection[nn.Module]) -> Mapping[str, Sequence[nn.Module]]:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    types: dict[str, Any] = {"ddp": nn.parallel.DistributedDataParallel, "fsdp": (FSDPModule, FullyShardedDataParallel)}
    parts = [part for model in models for part in model.modules()]
    found = {name: [part for part in parts if isinstance(part, type_)] for name, type_ in types.items()}
    found["deepspeed"] = engines_in(parts)
    if not found["fsdp"]:
        found["tp"] = [part for part in parts if any(isinstance(p, DTensor) for p in part.parameters(recurse=False))]
    return {name: wrapped for name, wrapped in found.items() if wrapped}


def _without_a_device(own: Callable[..., Any]) -> Callable[..., Any]:
    def init_process_group(*args: Any, device_id: Any = None, **kwargs: Any) -> Any:  # a GPU that this machine may not have
        return own(*args, **kwargs)

    return init_process_group


def _rendezvous(url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[tuple[Any, int, int]]:
    try:
        rank = int(os.environ["RANK"]) if rank < 0 else rank
        world_size = int(os.environ["WORLD_SIZE"]) if world_size < 0 else world_size
    except KeyError as error:
        raise CaptureError(
            f"init_process_group does not know how many processes there are: {error} is not set, as torchrun would. "
            "State their number: perfguard dry-run --world-size 8 train.py."
        ) from error
    if not 0 <= rank < world_size:
        raise CaptureError(f"Of {world_size} processes, the rank must be 0 to {world_size - 1}, but got {rank}.")
    yield dist.HashStore(), rank, world_size  # type: ignore[attr-defined]


def _running_the_first(fn: Callable[..., Any], args: tuple[Any, ...] = (), *_: Any, **__: Any) -> None:
    fn(0, *args)


def _leave_the_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    # A failed initialization leaves the counter raised. PyTorch remembers meshes by their ranks, with the names of their groups.
    dist.distributed_c10d._world.group_count = 0


def _let_wrappers_run_on_meta(replace: Replace, recorder: Recorder, use: HostUse, device_kind: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, _common_utils, _flat_param, _init_utils
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group
    from torch.distributed.tensor import _dispatch, _sharding_prop
    from torch.nn.parallel import distributed as ddp

    def nothing(_: Any) -> Callable[..., None]:
        return lambda *_, **__: None

    for name in ("_verify_param_shape_across_processes", "_sync_module_states"):
        replace(ddp, name, nothing)
    replace(ddp.DistributedDataParallel, "__init__", _without_devices)
    # DTensor runs each operator once on fake tensors, as large as the whole ones, to know the shape of its result.
    replace(_sharding_prop.ShardingPropagator, "_propagate_tensor_meta_non_cached", _disable_current_modes())
    replace(_dispatch, "is_rng_supported_mesh", nothing)  # random numbers of a GPU have a state, which is compared
    replace(_fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params", nothing)
    for module in (_fsdp_param, _fsdp_param_group) if device_kind == "cpu" else ():  # there, nothing moves
        replace(module, "CPUOffloadPolicy", lambda _: ())  # of which nothing is an instance
    replace(_fsdp_param.FSDPParam, "reset_sharded_param", _following_meta)
    replace(_fsdp_param.FSDPParam, "to_sharded_dtensor", lambda own: _offloading(own, use))
    replace(_fsdp_collectives, "_get_device_handle", lambda own: lambda kind: own(device_kind if kind == "meta" else kind))
    copy_in = getattr(_fsdp_collectives, "all_gather_copy_in_cuda", None)  # that of meta does not copy
    replace(torch.ops.fsdp, "all_gather_copy_in", lambda own: _calling(copy_in, own) if copy_in else own)
    replace(_fsdp_collectives, "record_grad_output_stream", lambda _: lambda *_: None)  # of PyTorch 2.15; it launches nothing
    replace(torch.UntypedStorage, "resize_", lambda own: _emptying(own, recorder))
    replace(FullyShardedDataParallel, "__init__", _refusing_fsdp1_offload)
    replace(_flat_param.FlatParamHandle, "to_cpu", lambda _: lambda handle: nullcontext())  # gathered weights have no values
    replace(_init_utils, "_need_to_materialize_module", lambda _: lambda *_: (False, False))
    replace(
        _init_utils,
        "_get_compute_device",
        lambda _: lambda *_: torch.device(device_kind, 0) if device_kind == "cuda" else torch.device("cpu"),
    )
    replace(_common_utils._FSDPDeviceHandle, "from_device", lambda own: _of_the_guarded(own, torch.device(device_kind)))
    if device_kind == "cuda":
        replace(torch.cuda, "stream", lambda own: lambda stream: _on_stream(own, stream, recorder))


def _calling(function: Callable[..., Any], packet: Any) -> Callable[..., Any]:
    """``function`` in the place of ``packet``, whose overloads the compiler lists."""

    def called(*args: Any) -> Any:
        return function(*args)

    called.op_overloads = lambda: [getattr(packet, name) for name in packet.overloads()]  # type: ignore[attr-defined]
    return called


def _without_devices(own: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of the batch from meta to "meta:0" would be none on a GPU."""

    def __init__(self: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, *args: Any, **kw: Any) -> None:
        own(self, module, None, None, *args, **kw)

    return __init__


def _refusing_fsdp1_offload(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        offload = kwargs.get("cpu_offload", args[3] if len(args) > 3 else None)
        if offload is not None and offload.offload_params:
            raise CaptureError("FSDP1's offload to the host cannot be dry-run. That of its successor fully_shard can.")
        own(self, *args, **kwargs)

    return __init__


def _of_the_guarded(own: Any, device: torch.device) -> Any:
    return classmethod(lambda cls, of: own.__func__(cls, device if of.type == "meta" else of))


def _following_meta(own: Callable[..., Any]) -> Callable[..., Any]:
    """FSDP2 takes over what has become of its parameters, by `.to(dtype)` or `.to_empty(...)`, but not on meta."""

    def reset_sharded_param(self: Any) -> None:
        own(self)
        parameter = self.sharded_param
        size = self.padded_sharded_param_size
        dim = self.fsdp_placement.dim
        local = parameter._local_tensor
        if local.is_meta and local.untyped_storage()._cdata != self._sharded_param_data.untyped_storage()._cdata:
            padded = local if local.size() == size else local.new_empty(size)
            self._sharded_param_data = padded.view(-1)
            parameter._local_tensor = padded.narrow(dim, 0, local.size(dim) if local.numel() else 0)
            self._sharding_spec = parameter._spec

    return reset_sharded_param


def _offloading(own: Callable[..., Any], use: HostUse) -> Callable[..., Any]:
    """FSDP2 moves shards of parameters to the host, but not those on meta. Gradients are there already."""

    def to_sharded_dtensor(self: Any, tensor: torch.Tensor) -> Any:
        if self.offload_to_cpu and tensor.is_meta:
            self._sharded_param_data = use.offload(self._sharded_param_data, is_pinned=self.pin_memory)
            tensor = self._sharded_param_data.as_strided(tensor.shape, tensor.stride())
        elif self.offload_to_cpu:
            use.offload(tensor)
        return own(self, tensor)

    return to_sharded_dtensor


def _emptying(own: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        if storage.device.type == "meta":
            recorder.release(storage)
        return own(storage, size)

    return resize_


def _on_stream(own: Callable[..., Any], stream: Any, recorder: Recorder) -> Any:
    is_current = stream is None or stream is torch.cuda.current_stream()
    return own(stream) if is_current else recorder.with_attributes(stream=1)


@functools.cache
def is_collective(func: torch._ops.OpOverload) -> bool:
    """Whether an operator is a collective of c10d, or a functional one, which DTensor runs."""
    named = {argument.name for argument in func._schema.arguments}
    return func.namespace == "c10d" or (func.namespace == "_c10d_functional" and "group_name" in named)


def run_foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that treats lists element by element, as an optimizer does, on shards that lie alike.

    DTensor itself would work out the placement of each element from all the others: half of the dry run, for hundreds of them.

    Returns:
        What it returns. NotImplemented: it is none, or they do not lie alike.
    """
    from torch.distributed.tensor import DTensor

    name = func._schema.name
    if not name.startswith("aten::_foreach_") or name.endswith(("norm", "max")):
        return NotImplemented
    if any(isinstance(arg, torch.Tensor) for arg in args):  # clipping multiplies by a norm, which lies otherwise
        return NotImplemented
    lists: list[Any] = [arg for arg in args if type(arg) in (list, tuple) and isinstance(arg[0], torch.Tensor)]
    for alike in zip(*lists, strict=True):
        if not all(isinstance(x, DTensor) and x.placements == alike[0].placements for x in alike):
            return NotImplemented
        if any(placement.is_partial() for placement in alike[0].placements):
            return NotImplemented
    # Not `to_local` and `from_local`: these make a view for each tensor.
    out = func(*([x._local_tensor for x in arg] if any(arg is one for one in lists) else arg for arg in args), **kwargs)
    if out is None:  # in place
        return None
    return [DTensor(part, x._spec, requires_grad=False) for part, x in zip(out, lists[0], strict=True)]


def run_collective(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a collective. DDP's reducer asks its work for the tensors, which a fake work does not have."""
    with recorder.with_attributes(ranks=_ranks_in(args)):
        out = func(*args, **kwargs)
    if func is torch.ops.c10d.allreduce_.default:
        from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

        if recorder.phase is Phase.BACKWARD:
            recorder.mark([("ddp.bucket", tensor) for tensor in out[0]], StorageKind.GRADIENT)
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(out[0])
        return out[0], _create_work_from_future(future).boxed()
    return out


def _ranks_in(args: tuple[Any, ...]) -> tuple[int, int]:
    """How many ranks are in the group of a collective with ``args``, and how many of them share a node, at the most."""
    objects = [item for item in args if isinstance(item, torch.ScriptObject)]
    boxed = [item for item in objects if item._type().qualified_name().endswith("ProcessGroup")]
    group: Any = dist.ProcessGroup.unbox(boxed[0]) if boxed else args[-1]
    if type(group) is str:  # of a functional collective
        group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]
    ranks = dist.get_process_group_ranks(group)
    in_node = gpus_of_a_node()
    return len(ranks), max(Counter(rank // in_node for rank in ranks).values())
