"""The trace cache gives what a trace gives, to the byte."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from perfguard.graph import TraceCache, trace
from perfguard.workload import TensorSpec, Workload


def total(output: Any) -> torch.Tensor:
    first: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return first.float().sum()


def random_network(rng: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    """A network, and the shape of one of its samples."""
    width = 8 * rng.randint(1, 8)
    kind = rng.choice(["mlp", "cnn", "cnn", "encoder", "lstm", "unet"])
    if kind == "mlp":
        layers: list[nn.Module] = [nn.Linear(width, width)]
        for _ in range(rng.randint(0, 3)):
            layers += [rng.choice([nn.ReLU(), nn.GELU(), nn.SiLU(), nn.Tanh()]), nn.Dropout(rng.choice([0.0, 0.1]))]
            layers += [nn.Linear(width, width), rng.choice([nn.Identity(), nn.BatchNorm1d(width)])]
        return nn.Sequential(*layers), (width,)
    if kind == "cnn":
        size = rng.choice([8, 15, 32])
        layers = [nn.Conv2d(3, width, 3, padding=1)]
        for _ in range(rng.randint(1, 4)):
            layers += [
                nn.Conv2d(width, width, rng.choice([1, 3, 5]), rng.choice([1, 1, 2]), 2, groups=rng.choice([1, 8])),
                rng.choice([nn.BatchNorm2d(width), nn.GroupNorm(4, width), nn.Identity()]),
                rng.choice([nn.ReLU(), nn.ReLU(inplace=True), nn.Hardswish()]),
            ]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(rng.choice([1, 2])), nn.Flatten(), nn.LazyLinear(10)), (3, size, size)
    if kind == "encoder":
        layer = nn.TransformerEncoderLayer(width, rng.choice([1, 2, 4]), 2 * width, batch_first=True)
        return nn.TransformerEncoder(layer, rng.randint(1, 2), enable_nested_tensor=False), (rng.randint(4, 40), width)
    if kind == "lstm":
        cell = rng.choice([nn.LSTM, nn.GRU])
        return cell(width, width, rng.randint(1, 2), batch_first=True), (rng.randint(2, 20), width)
    down, up = nn.Conv2d(1, width, 3, 2, 1), nn.ConvTranspose2d(width, 1, 2, 2)
    return nn.Sequential(down, nn.ReLU(), up), (1, 2 * rng.randint(2, 16), 16)


def random_workload(seed: int) -> functools.partial[Workload]:
    """A function of the batch size."""
    rng = random.Random(seed)
    model, sample = random_network(rng)
    for module in model.modules():
        if isinstance(module, nn.LazyLinear):
            with torch.no_grad():
                model(torch.zeros(2, *sample))
            break
    optimizer: Any = rng.choice([torch.optim.SGD, torch.optim.Adam, functools.partial(torch.optim.AdamW, foreach=False)])
    precision: Any = rng.choice(["fp32", "fp32", "bf16", "amp-bf16"])
    mode: Any = rng.choice(["train", "train", "infer"])

    def make(batch: int) -> Workload:
        return Workload(
            model,
            (batch, *sample),
            loss=total if mode == "train" else None,
            optimizer=optimizer,
            precision=precision,
            mode=mode,
        )

    return functools.partial(make)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_two_hundred_random_networks_are_the_same_bytes_as_traced_anew(part: int) -> None:
    from_templates = 0
    for seed in range(20 * part, 20 * (part + 1)):
        make, cache, rng = random_workload(seed), TraceCache(), random.Random(seed)
        batches = [rng.randint(2, 256) for _ in range(3)]
        batches += [rng.randint(min(batches), max(batches)) for _ in range(2)]
        cached = [cache.trace(make(batch)) for batch in batches]
        for batch, graph in zip(batches, cached, strict=True):
            assert graph.to_bytes() == trace(make(batch)).to_bytes(), f"seed {seed}, batch {batch}"
        from_templates += sum(family._template is not None for family in cache._families.values())
    assert from_templates >= 15  # otherwise it is no cache


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> list[Workload]:
    """Workloads that were really traced."""
    from perfguard.graph import _cache

    traced: list[Workload] = []

    def counting(workload: Workload, **options: Any) -> Any:
        traced.append(workload)
        return trace(workload, **options)

    monkeypatch.setattr(_cache, "trace", counting)
    return traced


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def test_a_network_made_anew_with_another_learning_rate_is_not_traced_again(count: list[Workload]) -> None:
    cache = TraceCache()
    for lr in (0.1, 0.01, 0.001):
        cache.trace(
            Workload(mlp(), (32, 8), loss=lambda output: output.sum(), optimizer=functools.partial(torch.optim.Adam, lr=lr))
        )
    assert len(count) == 1


def test_after_three_batches_the_ones_between_and_congruent_to_them_are_not_traced(count: list[Workload]) -> None:
    cache = TraceCache()
    for batch in (8, 64, 16, 32, 56, 8, 33, 72):
        cache.trace(Workload(mlp(), (batch, 8), TensorSpec((batch,), "int64"), F.cross_entropy))
    assert [workload.inputs[0] for workload in count] == [8, 64, 16, 33, 72]


@pytest.mark.parametrize(
    "change",
    [
        {"precision": "bf16"},
        {"optimizer": torch.optim.Adam},
        {"optimizer": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)},
        {"model": nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))},
        {"model": nn.Sequential(nn.Linear(8, 16).requires_grad_(False), nn.ReLU(), nn.Linear(16, 4))},
        {"accumulation": 2},
        {"ema": True},
        {"loss": lambda output: output.mean()},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_changes_the_step_is_traced_anew(change: dict[str, Any], count: list[Workload]) -> None:
    cache = TraceCache()
    options: dict[str, Any] = {"model": mlp(), "inputs": (32, 8), "loss": total}
    cache.trace(Workload(**options))
    cache.trace(Workload(**options | change))
    assert len(count) == 2


def test_a_changed_attribute_of_a_module_is_seen(count: list[Workload]) -> None:
    cache, dropout = TraceCache(), nn.Dropout(0.0)
    model = nn.Sequential(nn.Linear(8, 8), dropout)
    cache.trace(Workload(model, (32, 8), loss=total))
    dropout.p = 0.5
    assert "native_dropout" in {op.name for op in cache.trace(Workload(model, (32, 8), loss=total)).ops}


class Quadratic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x @ x.T


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x.relu() if len(x) > 20 else x.tanh()


class Pads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(F.pad(x, (0, 0, 0, -len(x) % 16)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("model", [Quadratic(), Branches(), Pads()])
def test_what_is_not_affine_in_the_batch_is_traced_each_time(model: nn.Module) -> None:
    cache = TraceCache()
    for batch in (16, 64, 32, 48, 20, 40, 10, 19, 21):
        workload = Workload(model, (batch, 8), loss=total)
        assert cache.trace(workload).to_bytes() == trace(workload).to_bytes()


def partly(share: float) -> Callable[[Any], torch.optim.Optimizer]:
    def make(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        return torch.optim.Adam(parameters[: round(share * len(parameters))])

    return make


def test_what_decides_the_step_in_roundabout_ways_is_seen(count: list[Workload]) -> None:
    class Flagged(nn.Linear):
        twice = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(super().forward(x) if self.twice else x)

    cache = TraceCache()
    options: dict[str, Any] = {"inputs": (4, 8), "loss": total}
    for share in (0.5, 1.0):
        cache.trace(Workload(mlp(), optimizer=partly(share), **options))
    for Flagged.twice in (False, True):
        cache.trace(Workload(Flagged(8, 8), **options))
    assert len(count) == 4


def test_what_cannot_be_compared_is_traced_each_time(count: list[Workload]) -> None:
    class Holds(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.rows = iter([1, 2, 3])

    cache = TraceCache()
    with torch.device("meta"):
        model = Holds()
    for _ in range(2):
        cache.trace(Workload(model, (4, 8), loss=total))
    assert len(count) == 2


def test_an_error_is_not_remembered() -> None:
    cache = TraceCache()
    for _ in range(2):
        with pytest.raises(Exception, match="Check the shapes"):
            cache.trace(Workload(mlp(), (4, 9), loss=total))
