"""A small transformer, trained by DeepSpeed: in a dry run, or really, on the CPU, where the other ranks are PyTorch's fake ones.

DS_ACCELERATOR=cpu python -m tests.perfguard.capture.toy_deepspeed 3 8     # ZeRO 3, 8 ranks: the peak of a step in bytes
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from perfguard.capture.ranks import torchrun_variables
from tests.perfguard.capture.toy_ranks import STEPS, VOCABULARY, language_model


def train(
    stage: int, *, begins: Callable[[], None] = lambda: None, two_groups: bool = False, own_optimizer: bool = True, **zero: Any
) -> None:
    """Train for some steps; ``begins()`` is called before each. ``zero`` is added to the settings of ZeRO.

    Without an optimizer of one's own, it is DeepSpeed's, which compiles kernels.
    """
    import deepspeed

    model = language_model()
    small = {"reduce_bucket_size": 200_000, "stage3_prefetch_bucket_size": 200_000, "stage3_param_persistence_threshold": 1000}
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "allgather_bucket_size": 200_000, **small, **zero},
    }
    weights, others = ([p for p in model.parameters() if (p.dim() > 1) is one] for one in (True, False))
    groups = [{"params": weights}, {"params": others}] if two_groups else [{"params": [*weights, *others]}]
    if own_optimizer:
        engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, foreach=True), config=settings)
    else:
        settings["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    tokens = torch.randint(0, VOCABULARY, (4, 64)).to(engine.device)
    for _ in range(STEPS):
        begins()
        engine.backward(F.cross_entropy(engine(tokens).flatten(0, 1).float(), tokens.flatten()))
        engine.step()


def real_peak_bytes(stage: int, world_size: int) -> int:
    """The peak of a rank in a step, by the CPU's allocator, in a process of its own."""
    command = [sys.executable, "-m", __spec__.name, str(stage), str(world_size)]
    variables = os.environ | torchrun_variables(world_size) | {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def main() -> None:
    """Train, and print the peak of the last step."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    stage, world_size = map(int, sys.argv[1:])
    dist.init_process_group("fake", rank=0, world_size=world_size)

    def begins() -> None:
        gc.collect()
        with torch.profiler.record_function("a step begins"):
            pass

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        train(stage, begins=begins)
    live = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        live += event.nbytes() if event.name() == "[memory]" else 0
        peak = live if event.name() == "a step begins" else max(peak, live)
    print(peak)


if __name__ == "__main__":
    main()
