"""Steps that are more than forward, loss, backward, update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from perfguard.exceptions import TraceError
from perfguard.graph import Phase, StorageKind, timeline, trace
from perfguard.workload import Workload
from tests.perfguard.graph.parts import total


class Checkpointed(nn.Module):
    """Blocks of a perceptron, checkpointed in one way or in none."""

    def __init__(self, depth: int, width: int, reentrant: bool | None) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(depth)
        )
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("precision", ["fp32", "amp-bf16", "bf16"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_computes_the_forward_pass_again(reentrant: bool, precision: Any) -> None:
    depth, plain, saving = (
        4,
        *(trace(Workload(Checkpointed(4, 64, kind), (512, 64), loss=total, precision=precision)) for kind in (None, reentrant)),
    )
    again = [op for op in saving.ops if op.name == "gelu" and op.phase is Phase.BACKWARD]
    assert len(again) == depth
    assert {op.module for op in again} == {f"blocks.{index}.1" for index in range(depth)}
    assert saving.peak_live_bytes < plain.peak_live_bytes
    dtypes = {op.dtype for op in saving.ops if op.kind == "matmul"}
    assert dtypes == {"float32" if precision == "fp32" else "bfloat16"}


@settings(max_examples=15)
@given(st.integers(1, 5), st.sampled_from([16, 64, 256]), st.sampled_from([8, 256, 2048]), st.booleans())
def test_checkpointing_never_raises_activation_peak(depth: int, width: int, batch: int, reentrant: bool) -> None:
    plain, saving = (trace(Workload(Checkpointed(depth, width, kind), (batch, width), loss=total)) for kind in (None, reentrant))
    kept, kept_without = (timeline(graph)["activations"].max() for graph in (saving, plain))
    assert kept <= kept_without


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 784))
        self.critic = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 1))


def gan_step(model: Any, real: torch.Tensor, _targets: Any, optimizer: Any) -> None:
    fake = model.generator(torch.randn(len(real), 16, device=real.device))
    optimizer["critic"].zero_grad()
    (F.softplus(-model.critic(real)).mean() + F.softplus(model.critic(fake.detach())).mean()).backward()
    optimizer["critic"].step()
    optimizer["generator"].zero_grad()
    F.softplus(-model.critic(fake)).mean().backward()
    optimizer["generator"].step()


def test_a_step_in_the_users_own_words() -> None:
    adam = torch.optim.Adam
    graph = trace(Workload(Gan(), (64, 784), step=gan_step, optimizer={"generator": adam, "critic": adam}))
    phases = [op.phase for op in graph.ops]
    changes = [phase for before, phase in zip([None, *phases], phases, strict=False) if phase is not before]
    assert changes == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER] * 2
    parameter_bytes = sum(4 * parameter.numel() for parameter in Gan().parameters())
    states = [storage for storage in graph.storages if storage.kind is StorageKind.OPTIMIZER_STATE]
    assert sum(storage.num_bytes for storage in states) == 2 * parameter_bytes
    assert sum(s.num_bytes for s in graph.storages if s.kind is StorageKind.GRADIENT) >= parameter_bytes


def test_inference_under_autograd_keeps_every_activation() -> None:
    """It is what a server costs that forgets `torch.no_grad()`, and what DIPPM measured."""

    def forward_only(model: nn.Module, inputs: Any, targets: Any, optimizer: Any) -> None:
        model.eval()
        model(inputs)

    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU())))
    without = trace(Workload(model, (512, 256), mode="infer")).peak_live_bytes
    under = trace(Workload(model, (512, 256), step=forward_only)).peak_live_bytes
    assert under - without > 12 * 4 * 512 * 256  # a linear layer and a GELU keep their inputs


def test_an_error_in_a_step_is_named_with_its_line() -> None:
    def step(model: nn.Module, x: torch.Tensor, _targets: Any, optimizer: torch.optim.Optimizer) -> None:
        total(model(x)).item()

    with pytest.raises(TraceError, match=r"\(test_steps\.py:\d+\): .*A value is read from a tensor"):
        trace(Workload(nn.Linear(8, 8), (4, 8), step=step))


def test_frozen_base_has_no_gradients_but_adapter_has() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(256, 256).requires_grad_(False)
            self.down, self.up = nn.Linear(256, 4, bias=False), nn.Linear(4, 256, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]

    graph = trace(Workload(nn.Sequential(Adapted(), Adapted()), (2, 256), loss=total, optimizer=torch.optim.Adam))
    adapters = 2 * 4 * 2 * 4 * 256
    assert sum(s.num_bytes for s in graph.storages if s.kind is StorageKind.GRADIENT) == adapters
    assert sum(s.num_bytes for s in graph.storages if s.kind is StorageKind.OPTIMIZER_STATE) == 2 * adapters
