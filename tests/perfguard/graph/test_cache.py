"""The trace cache gives what a trace gives, to the byte."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import nn

from perfguard.graph import TraceCache, cache, trace
from perfguard.workload import Workload

OPTIMIZERS: tuple[Any, ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adafactor,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.NAdam,
    torch.optim.RAdam,
)
TARGETS: tuple[Literal["cuda", "cpu"], ...] = ("cuda", "cpu")
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def total(output: Any) -> torch.Tensor:
    first: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return first.float().sum()


def random_network(rng: random.Random) -> tuple[nn.Module, Callable[[int], tuple[int, ...]]]:
    """A network, and the shape of one of its samples, by its size (of an image, or the length of a sequence)."""
    width = 8 * rng.randint(1, 8)
    kind = rng.choice(["mlp", "cnn", "cnn", "encoder", "lstm", "unet"])
    if kind == "mlp":
        layers: list[nn.Module] = [nn.Linear(width, width)]
        norm = rng.choice([nn.LayerNorm, nn.BatchNorm1d])
        for _ in range(rng.randint(0, 3)):
            layers += [rng.choice([nn.ReLU(), nn.GELU(), nn.SiLU(), nn.Tanh()]), nn.Dropout(rng.choice([0.0, 0.1]))]
            layers += [nn.Linear(width, width), rng.choice([nn.Identity(), norm(width)])]
        return nn.Sequential(*layers), (lambda _: (width,)) if norm is nn.BatchNorm1d else (lambda size: (size, width))
    if kind == "cnn":
        layers = [nn.Conv2d(3, width, 3, padding=1)]
        for _ in range(rng.randint(1, 4)):
            layers += [
                nn.Conv2d(width, width, rng.choice([1, 3, 5]), rng.choice([1, 1, 2]), 2, groups=rng.choice([1, 8])),
                rng.choice([nn.BatchNorm2d(width), nn.GroupNorm(4, width), nn.Identity()]),
                rng.choice([nn.ReLU(), nn.ReLU(inplace=True), nn.Hardswish()]),
            ]
        cells = rng.choice([1, 2])
        head = [nn.AdaptiveAvgPool2d(cells), nn.Flatten(), nn.Linear(width * cells**2, 10)]
        return nn.Sequential(*layers, *head), lambda size: (3, size, size)
    if kind == "encoder":
        layer = nn.TransformerEncoderLayer(width, rng.choice([1, 2, 4]), 2 * width, batch_first=True)
        return nn.TransformerEncoder(layer, rng.randint(1, 2), enable_nested_tensor=False), lambda size: (size, width)
    if kind == "lstm":
        cell = rng.choice([nn.LSTM, nn.GRU])
        return cell(width, width, rng.randint(1, 2), batch_first=True), lambda size: (size // 8, width)
    down, up = nn.Conv2d(1, width, 3, 2, 1), nn.ConvTranspose2d(width, 1, 2, 2)
    return nn.Sequential(down, nn.ReLU(), up), rng.choice([lambda size: (1, size, size), lambda size: (1, size, 16)])


def random_optimizer(rng: random.Random, model: nn.Module) -> Any:
    """One of eight, in one of three forms where it has them, as a class, a partial, or over some of the parameters."""
    kind = rng.choice(OPTIMIZERS)
    options: dict[str, Any] = rng.choice([{}, {"foreach": False}, {"foreach": True}, {"weight_decay": 0.1}])
    if kind in FUSED and rng.random() < 0.3:
        options = {"fused": True}
    if kind is torch.optim.SGD and rng.random() < 0.5:
        options = options | {"momentum": 0.9}
    if rng.random() < 0.2:
        first, *rest = model.parameters()
        return kind([{"params": [first], "lr": 0.1}, {"params": rest}], **options)
    return functools.partial(kind, **options) if options else kind


def random_workloads(seed: int, *, count: int) -> list[Workload]:
    """What a study might ask for: one network, several batches, sizes, precisions and optimizers."""
    rng = random.Random(seed)
    model, shape = random_network(rng)
    for parameter in model.parameters():
        parameter.requires_grad_(rng.random() < 0.95)
    next(iter(model.parameters())).requires_grad_(True)
    optimizers = [random_optimizer(rng, model) for _ in range(2)]
    precisions: Any = rng.sample(["fp32", "bf16", "amp-bf16", "fp16", "amp-fp16"], 2)
    mode: Any = rng.choice(["train", "train", "train", "infer"])
    options: dict[str, Any] = {"loss": total, "ema": rng.random() < 0.1, "ddp": rng.random() < 0.1} if mode == "train" else {}
    drawn = []
    for _ in range(count):
        sample = shape(16 + 8 * rng.randint(0, 1))
        batch = rng.choice((2, 8))
        precision, optimizer = (some[rng.random() < 0.3] for some in (precisions, optimizers))
        drawn.append(Workload(model, (batch, *sample), optimizer=optimizer, precision=precision, mode=mode, **options))
    return drawn


@pytest.mark.parametrize("seeds", [pytest.param(range(60), marks=pytest.mark.slow), range(200, 210)])
def test_cached_graphs_equal_traces(seeds: range, count: list[Workload]) -> None:
    for seed in seeds:
        traces, target = TraceCache(), TARGETS[seed % 2]
        for workload in random_workloads(seed, count=12):
            graph = traces.trace(workload, target=target)
            assert graph.content_hash == trace(workload, target=target).content_hash, f"seed {seed}: {workload}"
    assert len(count) < 11 * len(seeds)  # otherwise it is no cache


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> list[Workload]:
    """Workloads that were really traced."""
    traced: list[Workload] = []

    def counting(function: Callable[..., Any], workload: Workload, *args: Any, **options: Any) -> Any:
        traced.append(workload)
        return function(workload, *args, **options)

    monkeypatch.setattr(cache, "trace", functools.partial(counting, trace))
    return traced


def partly(share: float) -> Callable[[Any], torch.optim.Optimizer]:
    def make(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        return torch.optim.Adam(parameters[: round(share * len(parameters))])

    return make


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.mark.parametrize("share", ["tied", "one storage"])
def test_cache_handles_parameters_sharing_memory(share: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8))
    if share == "tied":
        model[2].weight = model[0].weight
    else:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
            flat = torch.empty(2, 8, 8)
        model[0].weight, model[2].weight = nn.Parameter(flat[0]), nn.Parameter(flat[1])
    traces = TraceCache()
    for optimizer in (torch.optim.Adam, torch.optim.SGD):
        for batch in (4, 16, 8, 12):
            workload = Workload(model, (batch, 8), loss=total, optimizer=optimizer)
            assert traces.trace(workload).content_hash == trace(workload).content_hash


def test_the_oldest_graph_is_forgotten(count: list[Workload]) -> None:
    traces = TraceCache(most_graphs=2)
    for batch in (8, 16, 8, 9, 8, 16):
        traces.trace(Workload(mlp(), (batch, 8), mode="infer"))
    assert [workload.inputs[0] for workload in count] == [8, 16, 9, 16]


@pytest.mark.parametrize(
    "change",
    [
        {"precision": "bf16"},
        {"optimizer": torch.optim.Adam},
        {"optimizer": partly(0.5)},
        {"model": nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))},
        {"model": nn.Sequential(nn.Linear(8, 16).requires_grad_(False), nn.ReLU(), nn.Linear(16, 4))},
        {"accumulation": 2},
        {"ema": True},
        {"loss": lambda output: output.mean()},
    ],
)
def test_whatever_changes_the_step_is_traced_anew(change: dict[str, Any], count: list[Workload]) -> None:
    traces = TraceCache()
    options: dict[str, Any] = {"model": mlp(), "inputs": (32, 8), "loss": total}
    traces.trace(Workload(**options))
    traces.trace(Workload(**options | change))
    assert len(count) == 2


def test_a_changed_attribute_of_a_module_is_seen(count: list[Workload]) -> None:
    traces, dropout = TraceCache(), nn.Dropout(0.0)
    model = nn.Sequential(nn.Linear(8, 8), dropout)
    traces.trace(Workload(model, (32, 8), loss=total))
    dropout.p = 0.5
    assert "native_dropout" in {op.name for op in traces.trace(Workload(model, (32, 8), loss=total)).ops}


def test_what_cannot_be_compared_is_traced_each_time(count: list[Workload]) -> None:
    class Holds(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.rows = iter([1, 2, 3])

    traces = TraceCache()
    with torch.device("meta"):
        model = Holds()
    for _ in range(2):
        traces.trace(Workload(model, (4, 8), loss=total))
    assert len(count) == 2
