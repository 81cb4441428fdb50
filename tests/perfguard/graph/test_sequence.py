"""A stack of blocks costs what the trace of the whole says."""

from __future__ import annotations

import random
import runpy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from perfguard import TensorSpec, Workload, trace
from perfguard.graph import Op, OpGraph, SequenceTracer, StorageKind

SPACE = runpy.run_path(str(Path(__file__).resolve().parents[3] / "examples/nas_space.py"))
SHAPE = (2, 3, 16, 16)


def random_network(seed: int) -> nn.Sequential:
    rng = random.Random(seed)
    make: Callable[..., nn.Sequential] = SPACE["network"]
    return make(SPACE["random_cell"](rng), width=rng.choice((4, 6, 8)), depth=rng.choice((1, 2)))


def with_views() -> nn.Sequential:
    return nn.Sequential(
        nn.ReLU(inplace=True), nn.Conv2d(3, 4, 3), nn.Identity(), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(784, 5)
    )


MAKES: list[Callable[[], nn.Sequential]] = [*(lambda seed=seed: random_network(seed) for seed in range(8)), with_views]


@pytest.fixture(autouse=True, scope="module")
def _a_first_trace() -> None:
    """The very first trace of a process keeps its first output alive to the end; those after it do not."""
    with torch.device("meta"):
        trace(Workload(nn.Conv2d(3, 4, 3), SHAPE, mode="infer"), target="cpu")


def _without_views(graph: OpGraph) -> list[Op]:
    return [
        op._replace(inputs=(), outputs=(), attributes={name: value for name, value in op.attributes.items() if name != "views"})
        for op in graph.ops
    ]


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_stack_is_the_trace_of_the_whole(make: Callable[[], nn.Sequential], target: str) -> None:
    with torch.device("meta"):
        model = make()
    whole = trace(Workload(model, SHAPE, mode="infer"), target=target)  # type: ignore[arg-type]
    stack = SequenceTracer().trace(model, SHAPE, target=target)  # type: ignore[arg-type]
    assert stack is not None
    assert _without_views(stack) == _without_views(whole)
    assert np.array_equal(stack.live_bytes, whole.live_bytes)
    assert np.array_equal(stack.edges, whole.edges)
    assert stack.bytes_by_kind(len(stack.ops) // 2) == whole.bytes_by_kind(len(whole.ops) // 2)
    assert stack.unmodelled == whole.unmodelled


def test_an_equal_block_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = SequenceTracer()
    with torch.device("meta"):
        blocks = [nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(depth))) for depth in (2, 5)]
    assert tracer.trace(blocks[0], SHAPE, target="cuda") is not None

    def untraced(*_: object, **__: object) -> None:
        raise AssertionError("traced again")

    monkeypatch.setattr("perfguard.graph._sequence._traced", untraced)
    graph = tracer.trace(blocks[1], SHAPE, target="cuda")
    assert graph is not None
    assert len(graph.ops) == 5
    assert sum(storage.kind is StorageKind.PARAMETER for storage in graph.storages) == 10


class _Two(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, x + 2


def test_what_cannot_be_taken_apart_is_left_alone() -> None:
    tracer = SequenceTracer()
    with torch.device("meta"):
        shared = nn.Conv2d(3, 3, 1)
        tied, two, real = nn.Sequential(shared, shared), nn.Sequential(_Two()), nn.Sequential(nn.Linear(16, 2))
        hooked = nn.Sequential(nn.ReLU())
        strided = nn.Sequential(nn.Unflatten(1, (3, 1)))
    hooked.register_forward_hook(lambda *_: None)
    for model in (tied, two, hooked, nn.Sequential(nn.Linear(16, 2, device="cpu"))):
        assert tracer.trace(model, SHAPE, target="cuda") is None
    assert tracer.trace(real, TensorSpec((4, 16)), target="cuda") is not None
    assert tracer.trace(strided, SHAPE, target="cuda") is not None
