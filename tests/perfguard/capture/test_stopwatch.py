"""The seconds of a dry run belong to one part each."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from perfguard.capture import DryRuns
from perfguard.capture.stopwatch import Stopwatch
from perfguard.devices import resolve_device


class Clock:
    """Tells the time that it was set to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_each_second_belongs_to_the_part_that_was_entered_last() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    clock.now = 2.0
    watch.enter("steps")
    clock.now = 5.0
    with watch.within("batches"):
        clock.now = 6.0
    clock.now = 6.5
    assert watch.seconds == {"set-up": 2.0, "batches": 1.0, "steps": 3.5, "counting": 0.0, "graphs": 0.0}


def test_an_error_in_a_part_leaves_the_part_before() -> None:
    clock = Clock()
    watch = Stopwatch(clock)

    def fail() -> None:
        with watch.within("batches"):
            clock.now = 1.0
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    clock.now = 3.0
    assert watch.seconds["set-up"] == 2.0


def test_a_dry_run_says_where_its_seconds_went() -> None:
    def objective(_: object) -> None:
        model = torch.nn.Linear(4, 2).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for (x,) in DataLoader(TensorDataset(torch.randn(32, 4)), 8):
            model(x.cuda()).sum().backward()
            optimizer.step()

    dry_runs = DryRuns(objective, resolve_device("a100"))
    found = dry_runs.capture(lambda *_: pytest.fail("it has no parameters"), {})
    dry_runs.close()
    assert [*found.seconds] == ["set-up", "batches", "steps", "counting", "graphs", "process"]
    assert all(found.seconds[part] > 0 for part in ("set-up", "batches", "steps", "graphs", "process"))
