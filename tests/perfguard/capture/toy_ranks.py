"""A small transformer, trained in the ways of many processes: as a dry run, under PyTorch's tracker, and really, with gloo."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from perfguard.capture import Answer, DryRuns
from perfguard.capture.trial import capture
from perfguard.devices import resolve_device
from perfguard.graph import StorageKind
from perfguard.workload import CapturedTrial
from tests.warm import processes

VOCABULARY, STEPS = 1000, 4


class Block(nn.Module):
    """One layer of a transformer."""

    def __init__(self, width: int, heads: int = 4, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.heads, self.checkpoints = nn.LayerNorm(width), nn.LayerNorm(width), heads, checkpoints
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self._forward, x, use_reentrant=False) if self.checkpoints else self._forward(x)
        return out

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.second(x))))
        return out


def language_model(width: int = 256, depth: int = 4, **options: Any) -> nn.Sequential:
    """Return a transformer with a head."""
    blocks = [Block(width, **options) for _ in range(depth)]
    return nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, nn.Linear(width, VOCABULARY))


def sharded(model: nn.Module, device: str, **options: Any) -> nn.Module:
    """Shard each block, and the rest."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in (part for part in model.modules() if isinstance(part, Block)):
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def sharded_by_fsdp1(model: nn.Module, device: str, **options: Any) -> nn.Module:
    """Shard each block, and the rest, by FSDP1."""
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=place, **options)


def tensor_parallel(model: nn.Module, device: str) -> nn.Module:
    """Split the perceptron of each block."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in (part for part in model.modules() if isinstance(part, Block)):
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


_HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_FSDP1_HALF = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WAYS: dict[str, Callable[[str], nn.Module]] = {
    "DDP": lambda device: DistributedDataParallel(language_model().to(device)),
    "DDP, gradients as views": lambda device: DistributedDataParallel(language_model().to(device), gradient_as_bucket_view=True),
    "DDP, ZeroRedundancyOptimizer": lambda device: DistributedDataParallel(language_model().to(device)),
    "FSDP2": lambda device: sharded(language_model().to(device), device),
    "FSDP2, not resharded": lambda device: sharded(language_model().to(device), device, reshard_after_forward=False),
    "FSDP2, bf16": lambda device: sharded(language_model().to(device), device, mp_policy=_HALF),
    "FSDP1": lambda device: sharded_by_fsdp1(language_model(), device),
    "FSDP1, bf16": lambda device: sharded_by_fsdp1(language_model(), device, mixed_precision=_FSDP1_HALF),
    "tensor parallelism": lambda device: tensor_parallel(language_model().to(device), device),
    "FSDP2, checkpointing": lambda device: sharded(language_model(checkpoints=True).to(device), device),
}
"""How the model is made on a device and wrapped, by name."""


def _zero(parameters: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # with a warning about torch.jit

    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "DDP, ZeroRedundancyOptimizer": _zero,
    "tensor parallelism": lambda of: torch.optim.AdamW(of, foreach=False),  # a group has sharded parameters and whole ones
}
"""Of the others it is AdamW."""


def train(
    model: nn.Module,
    device: str,
    *,
    make_optimizer: Callable[[Any], Any] = torch.optim.AdamW,
    steps: int = STEPS,
    around: Callable[[int, Any, Any], Any] | None = None,
) -> None:
    """Train for some steps. ``around(number, optimizer, batch)`` returns the context of a step."""
    optimizer = make_optimizer(model.parameters())
    tokens = torch.randint(0, VOCABULARY, (4, 64)).to(device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    for number in range(steps):
        if around is None:
            step()
        else:
            with around(number, optimizer, tokens):
                step()


def dry_run(way: str, world_size: int, gpu: str = "cpu", **place: Any) -> CapturedTrial:
    """Return what a rank would run."""
    device = resolve_device(gpu)

    def objective() -> None:
        dist.init_process_group("nccl" if device.kind == "cuda" else "gloo", **{"rank": 0, "world_size": world_size} | place)
        train(WAYS[way](device.kind), device.kind, make_optimizer=OPTIMIZERS.get(way, torch.optim.AdamW))

    return capture(objective, device)


def in_a_child(run: Callable[[], None], gpu: str = "a100") -> CapturedTrial:
    """Return what a dry run of ``run``, which has no parameters, shows. It has a process of its own."""
    runs = DryRuns(lambda _: run(), resolve_device(gpu))
    try:
        return runs.capture(_asked)
    finally:
        runs.close()


def _asked(*question: Any) -> Answer:
    raise AssertionError(f"it has no parameters, but asks for {question}")


def bytes_of(captured: CapturedTrial, *kinds: StorageKind) -> int:
    """Bytes of all storages of a step of these ``kinds``."""
    return sum(storage.num_bytes for storage in captured.graph.storages if storage.kind in kinds)


def tracked_bytes(way: str, world_size: int) -> int:
    """Peak of the last step by PyTorch's tracker, of real tensors on the CPU; the other ranks are PyTorch's fake ones."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    dist.init_process_group("fake", rank=0, world_size=world_size)
    buckets: dict[int, torch.Tensor] = {}
    try:
        model = WAYS[way]("cpu")
        if isinstance(model, DistributedDataParallel):
            # The reducer asks for a result, which the work of a fake group does not have. The tracker is shown the buckets.
            model.register_comm_hook(None, lambda _, bucket: _finished(buckets, bucket))
        tracker: Any = None

        def around(number: int, optimizer: Any, tokens: torch.Tensor) -> Any:
            nonlocal tracker
            tracker = MemTracker()
            if isinstance(model, DistributedDataParallel):
                tracker.track_external(model, getattr(optimizer, "optim", optimizer), tokens, *buckets.values())
            else:
                tracker = FSDPMemTracker(model, optimizer)
                tracker.track_inputs((tokens,))
            return tracker

        train(model, "cpu", make_optimizer=OPTIMIZERS.get(way, torch.optim.AdamW), around=around)
        return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]  # type: ignore[no-any-return]
    finally:
        dist.destroy_process_group()


def _finished(buckets: dict[int, torch.Tensor], bucket: Any) -> torch.futures.Future[torch.Tensor]:
    buckets[bucket.index()] = bucket.buffer()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def real_bytes(way: str, folder: Path) -> tuple[int, int]:
    """Train two processes with gloo. Return the peak of a step and what it leaves, by the CPU's allocator.

    Each is the least of eight steps on both ranks.
    """
    start: Any = torch.multiprocessing.start_processes  # type: ignore[attr-defined]
    processes()  # so that the two need not import torch
    start(_really_train, (way, str(folder)), nprocs=2, start_method="forkserver")
    steps = [line.split() for rank in range(2) for line in (folder / f"rank{rank}").read_text().splitlines()]
    return min(int(peak) for peak, _ in steps), min(int(left) for _, left in steps)


def _really_train(rank: int, way: str, folder: str) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/meeting")
    wait = dist.Work.wait

    def wait_for_its_thread(self: dist.Work, *args: Any, **kwargs: Any) -> Any:
        """The profiler does not see what gloo's thread frees. So the thread lets go first, while this one holds the work."""
        done = wait(self, *args, **kwargs)
        time.sleep(0.005)
        return done

    dist.Work.wait = wait_for_its_thread  # type: ignore[method-assign]
    # It waits in C++, and costs a step nothing.
    vars(torch.nn.parallel.distributed)["_sync_module_states"] = lambda *_, **__: None

    class Marked:
        def __enter__(self) -> None:
            gc.collect()
            time.sleep(0.02)
            with torch.profiler.record_function("a step begins"):
                pass

        def __exit__(self, *_: object) -> None: ...

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        make = OPTIMIZERS.get(way, torch.optim.AdamW)
        train(WAYS[way]("cpu"), "cpu", make_optimizer=make, steps=10, around=lambda *_: Marked())
    live = peak = 0
    steps = []
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "a step begins":
            steps.append(f"{peak} {live}")
            peak = live
        elif event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    Path(folder, f"rank{rank}").write_text("\n".join(steps[2:]))  # before the first step, and in it, optimizers have no state
    dist.destroy_process_group()
