"""The optimizer's form decides its temporaries and its state."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from perfguard.graph import OpGraph, Phase, StorageKind, trace
from perfguard.unmodelled import DDP_ALL_REDUCE
from perfguard.workload import Workload
from tests.perfguard.graph.parts import total

O = torch.optim  # noqa: E741
NUM_PARAMETERS = 4 * 256 * 256
PARAMETER_BYTES = 4 * NUM_PARAMETERS


def traced(optimizer: Any, **options: Any) -> OpGraph:
    layers = [nn.Linear(256, 256, bias=False) for _ in range(4)]
    return trace(Workload(nn.Sequential(*layers), (2, 256), loss=total, optimizer=optimizer, **options))


def state_bytes(graph: OpGraph) -> int:
    return sum(storage.num_bytes for storage in graph.storages if storage.kind is StorageKind.OPTIMIZER_STATE)


def temporary_bytes(graph: OpGraph) -> int:
    """Most bytes that the optimizer's step has of its own."""
    steps = [i for i, op in enumerate(graph.ops) if op.phase is Phase.OPTIMIZER]
    return max(graph.bytes_by_kind(i)[StorageKind.TEMPORARY] for i in steps)


@pytest.mark.parametrize("form", ["foreach", "for-loop"])
@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        (O.SGD, 0),
        (functools.partial(O.SGD, momentum=0.9), 1),
        (O.Adam, 2),
        (O.AdamW, 2),
        (functools.partial(O.AdamW, amsgrad=True), 3),
        (O.RMSprop, 1),
        (O.Adagrad, 1),
        (O.NAdam, 2),
        (O.Adafactor, 2 / 256),
    ],
)
def test_state_of_every_optimizer(optimizer: Any, states: float, form: str) -> None:
    graph = traced(functools.partial(optimizer, foreach=form == "foreach"))
    assert state_bytes(graph) == pytest.approx(states * PARAMETER_BYTES, rel=0.01, abs=8)


def test_foreach_needs_temporaries_of_all_parameters() -> None:
    """The for-loop needs those of one."""
    foreach, loop, fused = (
        temporary_bytes(traced(optimizer))
        for optimizer in (
            functools.partial(O.Adam, foreach=True),
            functools.partial(O.Adam, foreach=False),
            functools.partial(O.Adam, fused=True),
        )
    )
    assert foreach >= PARAMETER_BYTES
    assert PARAMETER_BYTES / 4 <= loop < PARAMETER_BYTES
    assert fused < PARAMETER_BYTES / 4


@pytest.mark.parametrize("optimizer", [O.SGD, O.Adam, O.AdamW])
def test_fused_optimizer_is_one_kernel_with_same_state(optimizer: Any) -> None:
    graph, foreach = traced(functools.partial(optimizer, fused=True)), traced(functools.partial(optimizer, foreach=True))
    assert [op.name for op in graph.ops if op.phase is Phase.OPTIMIZER] == ["fused_optimizer_"]
    assert state_bytes(graph) == state_bytes(foreach)


def test_one_optimizer_for_each_part() -> None:
    model = nn.ModuleDict({"a": nn.Linear(256, 256, bias=False), "b": nn.Linear(256, 256, bias=False)})

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts["b"](self.parts["a"](x))  # type: ignore[no-any-return]

    optimizer: dict[str, Any] = {"parts.a": O.Adam, "parts.b": functools.partial(O.SGD, lr=0.1)}
    graph = trace(Workload(Net(), (2, 256), loss=total, optimizer=optimizer))
    assert state_bytes(graph) == 2 * 4 * 256 * 256


def test_gradients_that_are_zeroed_stay_allocated() -> None:
    freed, kept = traced(O.SGD), traced(O.SGD, set_to_none=False)
    assert freed.bytes_by_kind(0)[StorageKind.GRADIENT] == 0
    assert kept.bytes_by_kind(0)[StorageKind.GRADIENT] == PARAMETER_BYTES


def test_ema_is_one_more_copy_of_parameters() -> None:
    plain, averaged = traced(O.SGD), traced(O.SGD, ema=True)
    assert averaged.peak_live_bytes == plain.peak_live_bytes + PARAMETER_BYTES
    assert averaged.ops[-1].name == "_foreach_lerp_"


def test_ddp_buckets_are_one_more_copy_of_gradients() -> None:
    plain, distributed = traced(O.SGD), traced(O.SGD, ddp=True)
    assert distributed.peak_live_bytes == plain.peak_live_bytes + PARAMETER_BYTES
    assert DDP_ALL_REDUCE in distributed.unmodelled
