"""A real step is held against its dry run: they agree on what was captured right, and nothing of the user's changes."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from perfguard.capture.real import RealStep
from perfguard.capture.trial import capture
from perfguard.devices import resolve_device
from perfguard.graph import StorageKind
from perfguard.unmodelled import OPAQUE_FUNCTIONS
from perfguard.workload import CapturedTrial

CPU = resolve_device("cpu")


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> None:
    """Another test of this process may have compiled something. Then nothing is held against a dry run."""
    torch._dynamo.utils.counters.clear()


def perceptron(depth: int = 4) -> nn.Module:
    hidden = (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(depth))
    return nn.Sequential(nn.Linear(48, 64), *hidden, nn.Linear(64, 3))


def convolutional() -> nn.Module:
    layers = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2)
    return nn.Sequential(nn.Unflatten(1, (3, 4, 4)), *layers, nn.Flatten(), nn.Linear(64, 3))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (3, 16)), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(48, 3))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Linear(48, 64), nn.Dropout(), nn.Linear(64, 64)), nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(checkpoint(self.first, x, use_reentrant=False))


def train(
    model: nn.Module, around: Callable[[int], Any] = lambda _: nullcontext(), *, accumulation: int = 1
) -> list[torch.Tensor]:
    """Train for 12 steps, each in a context of its own, and return what the training has left."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if not parameter.is_meta:
            nn.init.normal_(parameter, std=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(12 * 16 * accumulation, 48), torch.randint(0, 3, (12 * 16 * accumulation,)))
    with torch.no_grad():
        model(data.tensors[0][:16])  # an evaluation before the first step
    for number, (x, y) in enumerate(DataLoader(data, 16, shuffle=True), 1):
        with around(number):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if number % accumulation == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return [*model.state_dict().values(), torch.rand(1)]


@contextmanager
def watching(step: RealStep) -> Iterator[RealStep]:
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: step.after_step(optimizer))
    try:
        yield step
    finally:
        hook.remove()
        step.close()
        assert step not in _get_current_dispatch_mode_stack()


def captured_by(objective: Callable[[], object]) -> CapturedTrial:
    return capture(objective, CPU)


@functools.cache
def shallow() -> CapturedTrial:
    return captured_by(lambda: train(perceptron(4)))


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("make", [perceptron, convolutional, encoder, Checkpointed])
def test_real_step_agrees_with_its_dry_run_and_changes_no_number(make: Callable[[], nn.Module], accumulation: int) -> None:
    # tolerance=1e-3: they agree to the byte, but for the scalar with which a backward pass begins
    step = RealStep(captured_by(lambda: train(make(), accumulation=accumulation)), "cpu", tolerance=1e-3)
    alone = train(make(), accumulation=accumulation)
    with watching(step):
        beside = train(make(), accumulation=accumulation)
    assert step.ops
    assert step.difference is None
    assert all(map(torch.equal, alone, beside))


def test_difference_has_the_graph_of_the_real_step() -> None:
    with watching(RealStep(shallow(), "cpu")) as step:
        train(model := perceptron(8))
    assert step.difference is not None
    assert "runs 19 matrix products (11 in the dry run) and writes" in step.difference.in_words
    other = captured_by(lambda: train(perceptron(8))).graph
    parameters = sum(4 * parameter.numel() for parameter in model.parameters())
    graph = step.difference.graph
    real = graph.bytes_by_kind(len(graph.ops) - 1)
    assert (real[StorageKind.PARAMETER], real[StorageKind.GRADIENT]) == (parameters, parameters)
    assert real[StorageKind.OPTIMIZER_STATE] == pytest.approx(2 * parameters, rel=0.01)
    assert graph.flops == pytest.approx(other.flops, rel=0.02)
    assert graph.peak_live_bytes == pytest.approx(other.peak_live_bytes, rel=0.15)  # the data set is beside it on the host


def test_step_that_depends_on_chance_is_no_difference() -> None:
    class Deep(nn.Module):
        def __init__(self, depths: list[int]) -> None:
            super().__init__()
            self.layers: Any = perceptron(8)
            self.depths = itertools.cycle(depths)

        def forward(self, x: torch.Tensor) -> Any:
            return self.layers[-1](self.layers[: next(self.depths)](x))

    with watching(RealStep(captured_by(lambda: train(Deep([2]))), "cpu")) as step:
        train(Deep([2, 2, 5, 9]))
    assert step.difference is None


@pytest.mark.parametrize(
    "changes",
    [{"num_optimizers": 2}, {"steps": 5}, {"phases": {"the longest batch of 1000 samples": None}}, "unmodelled"],
    ids=str,
)
def test_what_cannot_be_compared_is_not_recorded(changes: Any) -> None:
    found = shallow()
    changes = {"graph": replace(found.graph, unmodelled=(OPAQUE_FUNCTIONS,))} if changes == "unmodelled" else changes
    with watching(RealStep(replace(found, **changes), "cpu")) as step:
        train(perceptron(8))
    assert (step.ops, step.difference) == ([], None)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_step_is_not_recorded(fullgraph: bool) -> None:
    """It would not compile below a recorder, and what must be one graph would raise."""
    torch._dynamo.reset()  # what another test has compiled is not compiled again
    model = perceptron(8)
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=fullgraph)
    with watching(RealStep(shallow(), "cpu")) as step:
        train(model)
    assert (step.ops, step.difference) == ([], None)


def test_model_is_freed_after_its_trial_without_the_garbage_collector() -> None:
    """A recorder is part of a cycle, and would keep the model, its gradients and the states of its optimizer alive."""
    step, model = RealStep(shallow(), "cpu"), perceptron(8)
    left = weakref.ref(next(model.parameters()))
    gc.disable()
    try:
        with watching(step):
            train(model)
        assert step.ops
        del model
        assert left() is None
    finally:
        gc.enable()


def test_device_that_is_not_the_guarded_one_is_not_recorded() -> None:
    with watching(RealStep(shallow(), "cuda")) as step:
        train(perceptron(8))
    assert (step.ops, step.difference) == ([], None)


@pytest.mark.parametrize("steps", [{1, 2, 3}, {2}, {3}], ids=str)
def test_modes_of_the_user_stay_in_order(steps: set[int]) -> None:
    def around(number: int) -> Any:
        return FlopCounterMode(display=False) if number in steps else nullcontext()

    alone = train(perceptron(8))
    with watching(RealStep(shallow(), "cpu")):
        assert all(map(torch.equal, alone, train(perceptron(8), around)))


def test_failure_of_the_recorder_ends_it_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, step = train(perceptron(8)), RealStep(shallow(), "cpu")
    monkeypatch.setattr("perfguard.graph.recorder.flops_of", lambda *_: 1 / 0)
    with watching(step):
        assert all(map(torch.equal, alone, train(perceptron(8))))
    assert step.difference is None


def test_step_that_raises_leaves_no_mode_behind() -> None:
    def around(number: int) -> Any:
        assert number < 3
        return nullcontext()

    with pytest.raises(AssertionError), watching(RealStep(shallow(), "cpu")):
        train(perceptron(4), around)
