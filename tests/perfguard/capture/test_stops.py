"""A loop that a value ends makes another number of steps in a dry run, where values are 0. So its steps are not known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.perfguard.capture.toy_ranks import in_a_child


class Training:
    """Four epochs at most, of ten steps each."""

    def __init__(self) -> None:
        self.model = nn.Linear(20, 3).cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = DataLoader(TensorDataset(torch.randn(80, 20), torch.randint(0, 3, (80,))), 8)
        self.num_bad = 0

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x.cuda()), y.cuda())
        loss.backward()
        self.optimizer.step()
        return loss

    def epoch(self) -> float:
        total = 0.0
        for x, y in self.loader:
            total += self.step(x, y).item()
        return total / len(self.loader)

    def accuracy(self) -> float:
        with torch.no_grad():
            right = [(self.model(x.cuda()).argmax(1) == y.cuda()).float().mean().cpu() for x, y in self.loader]
        return float(torch.stack(right).mean())


class Stopper:
    def __init__(self) -> None:
        self.best, self.num_bad = 1e9, 0

    def __call__(self, loss: float) -> bool:
        self.num_bad = 0 if loss < self.best else self.num_bad + 1
        self.best = min(self.best, loss)
        return self.num_bad >= 2

    def update(self, loss: float) -> None:
        self(loss)

    @property
    def stops(self) -> bool:
        return self.num_bad >= 2


def by_the_loss() -> None:
    training, loss = Training(), torch.ones(())
    while loss > 0.1:
        for x, y in training.loader:
            loss = training.step(x, y)


def by_the_loss_as_a_number() -> None:
    training, loss = Training(), 1.0
    while loss > 0.1:
        loss = training.epoch()


def by_a_metric() -> None:
    training = Training()
    for _ in range(4):
        training.epoch()
        if training.accuracy() > 0.9:
            break


def by_patience() -> None:
    training, best, num_bad = Training(), 1e9, 0
    for _ in range(4):
        loss = training.epoch()
        if loss < best:
            best, num_bad = loss, 0
        else:
            num_bad += 1
        if num_bad >= 2:
            break


def by_a_stopper() -> None:
    training, stopper = Training(), Stopper()
    for _ in range(4):
        if stopper(training.epoch()):
            return


def by_a_stopper_with_a_method() -> None:
    training, stopper = Training(), Stopper()
    for _ in range(4):
        stopper.update(training.epoch())
        if stopper.stops:
            break


def by_a_stopper_that_is_called() -> None:
    training, early_stopping = Training(), Stopper()
    for _ in range(4):
        early_stopping(training.epoch())
        if early_stopping.stops:
            break


def by_an_entry() -> None:
    training, metrics = Training(), {"loss": 1.0}
    while metrics["loss"] > 0.1:
        metrics["loss"] = training.epoch()


def by_a_history() -> None:
    training, history, best, num_bad = Training(), {"loss": [1e9]}, 1e9, 0
    for _ in range(4):
        history["loss"].append(training.epoch())
        num_bad = 0 if history["loss"][-1] < best else num_bad + 1
        if num_bad >= 2:
            break


@pytest.mark.parametrize(
    "objective",
    [
        by_the_loss,
        by_the_loss_as_a_number,
        by_a_metric,
        by_patience,
        by_a_stopper,
        by_a_stopper_with_a_method,
        by_a_stopper_that_is_called,
        by_an_entry,
        by_a_history,
    ],
    ids=lambda one: one.__name__,
)
def test_steps_of_a_loop_that_a_value_ends_are_not_known(objective: Callable[[], None]) -> None:
    found = in_a_child(objective)
    assert (found.steps, found.steps_per_epoch) == (None, 10)
    lines = objective.__code__.co_firstlineno, objective.__code__.co_firstlineno + 11
    words, _, line = found.unseen.rpartition(":")
    assert words == "a value that no dry run knows ends its loop at test_stops.py"
    assert lines[0] < int(line) < lines[1]


def by_a_number_of_steps() -> None:
    training, number, best, losses = Training(), 0, 1e9, []
    while number < 40:
        for x, y in training.loader:
            loss = training.step(x, y)
            losses.append(loss.item())
            number += 1
            if number == 40:
                break
        if losses[-1] < best:  # which keeps the best, and ends nothing
            best = losses[-1]


class CountingTraining(Training):
    """It reads no value, though its backward passes and its masks compute with some."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = super().step(x, y)
        self.num_right = (loss < 1).float().mean()
        self.number += 1
        return loss


def by_a_trainer_that_counts() -> None:
    training = CountingTraining()
    while training.number < 40:
        for x, y in training.loader:
            training.step(x, y)
            if training.number == 40:
                break


def by_an_entry_with_a_number() -> None:
    training, state = Training(), {"number": 0, "loss": 0.0}
    while True:
        state["loss"] = training.epoch()
        state["number"] += 1
        if state["number"] == 4:
            break


def unless_it_is_no_number() -> None:
    training = Training()
    for _ in range(4):
        loss = training.epoch()
        if not torch.isfinite(torch.tensor(loss)):
            break


def by_the_pruner(trial: Any) -> None:
    training = Training()
    for epoch in range(4):
        trial.report(training.accuracy(), epoch)
        training.epoch()
        if trial.should_prune():
            break


def whatever_ends_a_loop_within() -> None:
    training = Training()
    for _ in range(4):
        if training.epoch() > 0.5:
            for word in ("high", "very high"):
                if word == "high":
                    break
            else:
                training.num_bad += 1


def until_enough_steps() -> None:
    training, number = Training(), 0
    while number < 33:
        for x, y in training.loader:
            training.step(x, y)
            number += 1


def until_enough_steps_after_an_epoch() -> None:
    training, counts = Training(), {"steps": 0}
    for _ in range(1000):
        for x, y in training.loader:
            training.step(x, y)
            counts["steps"] += 1
        training.accuracy()
        if counts["steps"] >= 33:
            return


def until_enough_epochs() -> None:
    """What is counted within an epoch does not end it."""
    training, epoch, number = Training(), 0, 0
    while epoch < 4:
        for x, y in training.loader:
            training.step(x, y)
            number += 1
            if number > 10**6:
                return
        epoch += 1


class Trial:
    def report(self, value: float, step: int) -> None: ...

    def should_prune(self) -> bool:
        return False


@pytest.mark.parametrize(
    "objective",
    [
        by_a_number_of_steps,
        by_a_trainer_that_counts,
        by_an_entry_with_a_number,
        unless_it_is_no_number,
        whatever_ends_a_loop_within,
        until_enough_steps,
        until_enough_steps_after_an_epoch,
        until_enough_epochs,
        lambda: by_the_pruner(Trial()),
    ],
    ids=["steps", "trainer", "entry", "no number", "loop within", "enough", "enough after", "enough epochs", "pruner"],
)
def test_other_loops_are_counted(objective: Callable[[], None]) -> None:
    found = in_a_child(objective)
    assert (found.steps, found.unseen) == (40, "")
