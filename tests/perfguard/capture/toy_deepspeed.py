"""A small transformer, trained by DeepSpeed. As a script it prints the operators of a dry run that imports DeepSpeed itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tests.perfguard.capture.toy_ranks import STEPS, VOCABULARY, in_a_child, language_model

ZERO = {f"DeepSpeed ZeRO {stage}": stage for stage in (1, 2, 3)}


def train(
    stage: int,
    *,
    begins: Callable[[], None] = lambda: None,
    two_groups: bool = False,
    own_optimizer: bool = True,
    model: Any = None,
    **zero: Any,
) -> None:
    """Train for some steps; ``begins()`` is called before each. ``zero`` is added to the settings of ZeRO.

    Without an optimizer of one's own, it is DeepSpeed's, which compiles kernels.
    """
    import deepspeed

    model = language_model() if model is None else model
    small = {"reduce_bucket_size": 200_000, "stage3_prefetch_bucket_size": 200_000, "stage3_param_persistence_threshold": 1000}
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
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


if __name__ == "__main__":
    assert "deepspeed" not in sys.modules
    print(*(op.name for op in in_a_child(lambda: train(3), gpu="h100").graph.ops))
