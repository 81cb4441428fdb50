"""Numbers of optimizers, without a trial."""

from __future__ import annotations

import torch

from perfguard.capture.optimizers import Optimizers

LINE, OTHER = ("train.py", 10), ("train.py", 20)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def test_an_optimizer_keeps_its_number_and_waits_for_its_first_step() -> None:
    seen, first, second = Optimizers(), optimizer(), optimizer()
    assert [seen.number_new(first, LINE), seen.number_new(second, OTHER), seen.number(first)] == [0, 1, 0]
    seen.steps[0] = 1
    assert seen.waited_for == {1}
    assert [seen.has_stepped(first), seen.has_stepped(second)] == [True, False]
    assert [*seen.with_steps()] == [first]


def test_one_that_a_line_makes_again_beside_an_outer_one_is_that_of_the_line() -> None:
    seen, outer = Optimizers(), optimizer()
    seen.number_new(outer, OTHER)
    task = optimizer()
    seen.number_new(task, LINE)
    seen.steps[1] = 5  # of the first task; the outer one still waits
    assert seen.number_new(again := optimizer(), LINE) == 1
    assert seen.has_stepped(again)


def test_one_that_a_line_makes_again_after_all_have_stepped_is_of_another_stage() -> None:
    seen = Optimizers()
    first = optimizer()
    seen.number_new(first, LINE)
    seen.steps[0] = 5
    assert seen.number_new(optimizer(), LINE) == 1


def test_one_that_is_gone_has_no_say() -> None:
    seen = Optimizers()
    seen.number(optimizer())
    assert seen.waited_for == set()
