"""The best weights so far are copied while the last copy is alive, also in a dry run, where no value improves twice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from perfguard.capture.trial import capture
from perfguard.devices import resolve_device
from tests.live_bytes import peak_live_bytes

A100 = resolve_device("a100")


class _Training:
    """A model whose weights are most of its memory, and its epochs."""

    def __init__(self, kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> None:
        self.model = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 4)).cuda()
        self.optimizer = kind(self.model.parameters())  # type: ignore[call-arg]

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x.cuda()), y.cuda()).backward()
        self.optimizer.step()

    def epoch(self) -> None:
        for x, y in DataLoader(TensorDataset(torch.randn(12, 32), torch.arange(12) % 4), 2):
            self.step(x, y)

    def value(self, epoch: int, model: nn.Module | None = None) -> float:
        """A value that improves with each ``epoch``. A dry run knows none."""
        with torch.no_grad():
            output = (self.model if model is None else model)(torch.randn(2, 32, device="cuda"))
        return output.mean().item() if output.is_meta else 1.0 + epoch


def _copied_before_training() -> None:
    training, highest = _Training(), 0.0
    best = copy.deepcopy(training.model.state_dict())
    for epoch in range(3):
        training.epoch()
        value = training.value(epoch)
        if value > highest:
            highest, best = value, copy.deepcopy(training.model.state_dict())
    training.model.load_state_dict(best)


def _cloned() -> None:
    training, lowest = _Training(torch.optim.Adam), float("inf")
    best = None
    for epoch in range(3):
        training.epoch()
        value = -training.value(epoch)
        if value < lowest:
            lowest = value
            best = {name: weight.clone() for name, weight in training.model.state_dict().items()}
    assert best is not None


def _whole_model() -> None:
    training, lowest = _Training(), float("inf")
    best = None
    for epoch in range(3):
        training.epoch()
        value = -training.value(epoch)
        if value < lowest:
            lowest = value
            best = copy.deepcopy(training.model)
    assert best is not None


class _Saver:
    """What keeps the best states of a model and its optimizer, as a class for early stopping does."""

    def __init__(self) -> None:
        self.best: dict[str, Any] = {}
        self.lowest = float("inf")

    def __call__(self, value: float, training: _Training) -> None:
        if value < self.lowest:
            self.lowest = value
            self.save(training)

    def save(self, training: _Training) -> None:
        states = training.model.state_dict(), training.optimizer.state_dict()
        self.best = {"model": copy.deepcopy(states[0]), "optimizer": copy.deepcopy(states[1])}


def _of_a_class() -> None:
    training, saver = _Training(torch.optim.Adam), _Saver()
    for epoch in range(3):
        training.epoch()
        saver(-training.value(epoch), training)


def _snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def _of_an_average() -> None:
    training, highest = _Training(), -1.0
    average = copy.deepcopy(training.model)
    best = None
    for epoch in range(3):
        training.epoch()
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), training.model.parameters(), strict=True):
                mean.lerp_(weight, 0.1)
        value = training.value(epoch, average)
        if value > highest:
            highest, best = value, _snapshot(average)
    assert best is not None


def _between_steps_that_no_loader_feeds() -> None:
    training, lowest = _Training(torch.optim.Adam), float("inf")
    best = copy.deepcopy(training.model.state_dict())
    for step in range(20):
        training.step(torch.randn(2, 32), torch.randint(0, 4, (2,)))
        if step % 5 == 4:
            value = -training.value(step)
            if value < lowest:
                lowest, best = value, copy.deepcopy(training.model.state_dict())
    training.model.load_state_dict(best)


def _freed_before() -> None:
    training, lowest = _Training(), float("inf")
    best = None
    for epoch in range(3):
        training.epoch()
        value = -training.value(epoch)
        if value < lowest:
            lowest = value
            best = None
            best = copy.deepcopy(training.model)
    assert best is not None


def _on_the_host() -> None:
    training, lowest = _Training(), float("inf")
    best = None
    for epoch in range(3):
        training.epoch()
        value = -training.value(epoch)
        if value < lowest:
            lowest = value
            best = {name: weight.cpu() for name, weight in training.model.state_dict().items()}
    assert best is not None


def _copied_in_place() -> None:
    training = _Training()
    best = copy.deepcopy(training.model)
    for epoch in range(3):
        training.epoch()
        if training.value(epoch) > 0.5:
            best.load_state_dict(training.model.state_dict())


def _of_each_fold() -> None:
    for _fold in range(2):
        training = _Training()
        first = copy.deepcopy(training.model.state_dict())
        for _epoch in range(3):
            training.epoch()
        training.model.load_state_dict(first)


PROGRAMS = (
    _copied_before_training, _cloned, _whole_model, _of_a_class, _of_an_average, _between_steps_that_no_loader_feeds,
    _freed_before, _on_the_host, _copied_in_place, _of_each_fold,
)  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__.strip("_"))
def test_the_old_copy_and_the_new_one_are_alive_at_once_where_the_program_keeps_both(program: Callable[[], None]) -> None:
    found = capture(program, A100)
    seen = max(graph.peak_live_bytes for graph in (found.graph, *found.phases.values()))
    assert seen == pytest.approx(peak_live_bytes(program), rel=0.01)
