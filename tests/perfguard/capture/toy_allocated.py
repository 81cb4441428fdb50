"""What the CPU's allocator gives out in a step of one real rank. The other ranks are PyTorch's fake ones.

It prints the peak in bytes:

    python -m tests.perfguard.capture.toy_allocated FSDP1 8
"""

from __future__ import annotations

import functools
import gc
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from perfguard.capture.ranks import torchrun_variables
from tests.perfguard.capture import toy_deepspeed
from tests.perfguard.capture.toy_ranks import OPTIMIZERS, WAYS, train
from tests.warm import run_warm


def allocated_bytes(way: str, world_size: int) -> int:
    """The peak of a step, in a process of its own."""
    with pytest.MonkeyPatch.context() as environment:
        # With LOCAL_SIZE of all ranks, DeepSpeed compiles a way through shared memory, and waits for the others.
        for name, value in (torchrun_variables(world_size) | {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "1"}).items():
            environment.setenv(name, value)
        status, printed = run_warm("-m", __spec__.name, way, str(world_size), cwd=Path.cwd(), timeout_s=300)
    assert status == 0, printed
    return int(re.findall(r"^the peak: (\d+)$", printed, re.MULTILINE)[0])


def begins(*_: Any) -> Any:
    """Call it before each step."""
    gc.collect()
    with torch.profiler.record_function("a step begins"):
        return nullcontext()


def peak_of_last_step(run: Callable[[], object]) -> int:
    """What the CPU's allocator has given out at the most since the last call of :func:`begins`."""
    gc.collect()  # what dies later must have been born later
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    live = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        live += event.nbytes() if event.name() == "[memory]" else 0
        peak = live if event.name() == "a step begins" else max(peak, live)
    return peak


def main() -> None:
    """Train, and print the peak of the last step."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    way, world_size = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("fake", rank=0, world_size=world_size)

    def run() -> None:
        if way in toy_deepspeed.ZERO:
            toy_deepspeed.train(toy_deepspeed.ZERO[way], begins=begins)
        else:
            as_on_a_gpu = functools.partial(torch.optim.AdamW, foreach=True)
            train(WAYS[way]("cpu"), "cpu", make_optimizer=OPTIMIZERS.get(way, as_on_a_gpu), around=begins)

    print(f"\nthe peak: {peak_of_last_step(run)}")


if __name__ == "__main__":
    main()
