"""The trace cache gives what a trace gives, to the byte."""

from __future__ import annotations

import functools
import pickle
import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from perfguard.graph import TraceCache, cache, trace
from perfguard.graph.cache import structure_of
from perfguard.graph.kernels import target_of
from perfguard.workload import Workload
from tests.perfguard.graph.parts import total

NETWORKS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8)), (8, 32)),
    (lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2)), (3, 16, 16)),
    (lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), (8, 32)),
    (lambda: nn.LSTM(16, 16, 2, batch_first=True), (4, 16)),
]
OPTIMIZERS: list[Any] = [
    torch.optim.SGD,
    torch.optim.Adafactor,
    functools.partial(torch.optim.SGD, lr=0.2, momentum=0.9),
    functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5),
    functools.partial(torch.optim.AdamW, fused=True),
    functools.partial(torch.optim.Adam, foreach=False),
    functools.partial(torch.optim.Adam, weight_decay=0.1),
    lambda parameters: torch.optim.Adam(list(parameters)[:1]),
]


@pytest.mark.parametrize(("make", "sample"), NETWORKS)
@pytest.mark.parametrize("target", ["cuda", "cpu"])
def test_cached_graphs_equal_traces(make: Any, sample: tuple[int, ...], target: Any, count: list[Workload]) -> None:
    rng, traces = random.Random(0), TraceCache()
    with torch.device("meta"):
        model = make()
    for _ in range(24):
        optimizer, precision, mode = rng.choice(OPTIMIZERS), rng.choice(["bf16", "amp-fp16"]), rng.choice(["train", "infer"])
        batch = rng.choice((2, 8))
        workload = Workload(model, (batch, *sample), loss=total, optimizer=optimizer, precision=precision, mode=mode)  # type: ignore[arg-type]
        assert traces.trace(workload, target=target).content_hash == trace(workload, target=target).content_hash, workload
    assert len(count) < 20  # otherwise it is no cache


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> list[Workload]:
    """Workloads that were really traced."""
    traced: list[Workload] = []

    def counting(function: Callable[..., Any], workload: Workload, *args: Any, **options: Any) -> Any:
        traced.append(workload)
        return function(workload, *args, **options)

    monkeypatch.setattr(cache, "trace", functools.partial(counting, trace))
    return traced


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def test_cache_handles_parameters_sharing_memory() -> None:
    with torch.device("meta"):
        tied, apart = (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2))
    tied[2].weight = tied[0].weight
    traces = TraceCache()
    for model in (apart, tied, apart):
        workload = Workload(model, (4, 8), loss=total, optimizer=torch.optim.Adam)
        assert traces.trace(workload).content_hash == trace(workload).content_hash


def test_the_oldest_graph_is_forgotten(count: list[Workload]) -> None:
    traces = TraceCache(most_graphs=2)
    for batch in (8, 16, 8, 9, 8, 16):
        traces.trace(Workload(mlp(), (batch, 8), mode="infer"))
    assert [workload.inputs[0] for workload in count] == [8, 16, 9, 16]


def test_large_graphs_are_fewer(count: list[Workload]) -> None:
    # 128 graphs of a language model would be gigabytes.
    one = len(trace(Workload(mlp(), (8, 8), mode="infer")).ops)
    traces = TraceCache(most_operators=2 * one)
    for batch in (8, 16, 9, 8, 8):
        traces.trace(Workload(mlp(), (batch, 8), mode="infer"))
    assert [workload.inputs[0] for workload in count] == [8, 16, 9, 8]


def test_key_of_a_large_description_is_small() -> None:
    # 128 keys of up to 16 MiB would be 2 GiB.
    model = mlp()
    model.table = bytes(2**20)  # type: ignore[assignment]
    key = structure_of(Workload(model, (8, 8), mode="infer"), target_of("cuda"))
    assert key is not None
    assert len(pickle.dumps(key[1])) < 100  # type: ignore[index]


@pytest.mark.parametrize(
    "change",
    [
        {"precision": "bf16"},
        {"optimizer": torch.optim.Adam},
        {"optimizer": lambda parameters: torch.optim.Adam(list(parameters)[:2])},
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


class Drops(nn.Linear):
    rate = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), self.rate)


@pytest.mark.parametrize("of_class", [False, True])
def test_a_changed_attribute_of_a_module_is_seen(of_class: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    traces, model = TraceCache(), Drops(8, 8)
    traces.trace(Workload(model, (32, 8), loss=total))
    monkeypatch.setattr(Drops if of_class else model, "rate", 0.5)
    assert "native_dropout" in {op.name for op in traces.trace(Workload(model, (32, 8), loss=total)).ops}


@pytest.mark.parametrize("rows", [(row for row in [1, 2, 3]), bytes(2**24)], ids=["generator", "data set"])
def test_what_cannot_be_compared_is_traced_each_time(rows: Any, count: list[Workload]) -> None:
    traces = TraceCache()
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    model.rows = rows
    for _ in range(2):
        traces.trace(Workload(model, (4, 8), loss=total))
    assert len(count) == 2


def test_a_method_patched_onto_a_module_is_compared_by_its_code() -> None:
    """Pickle writes a bound method as its name."""

    def once(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def twice(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (x + 1) * 2

    traces, found = TraceCache(), []
    for forward in (once, twice):
        model = nn.Identity()
        model.forward = types.MethodType(forward, model)  # type: ignore[method-assign]
        found.append(len(traces.trace(Workload(model, (4, 8), mode="infer")).ops))
    assert found[1] == found[0] + 1
