"""The steps of a loop that a dry run does not come to the end of are read off its head, or not at all."""

from __future__ import annotations

import itertools
import random
import time
import weakref
from argparse import Namespace
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm, trange  # type: ignore[import-untyped]

from perfguard.capture.loop_heads import LoopHeads
from perfguard.capture.trial import capture
from perfguard.devices import resolve_device

args = Namespace(epochs=7, steps=1000, warmup=10, dry_run=False)
LOADER = [1, 2, 3, 4, 5]


class Seen(Exception):
    """Enough steps were made."""


@pytest.fixture
def step() -> tuple[LoopHeads, Callable[[], None]]:
    heads = LoopHeads()
    numbers = itertools.count(1)

    def make() -> None:
        heads.note_step()
        if next(numbers) == 4:
            raise Seen

    return heads, make


def over_a_range(step: Callable[[], None]) -> None:
    for _ in range(args.steps):
        step()


def from_the_middle(step: Callable[[], None]) -> None:
    first = 3
    for _ in range(first, args.steps + args.warmup, 2):
        step()


def with_progress(step: Callable[[], None]) -> None:
    for _ in tqdm(range(args.steps), disable=True):
        step()


def with_progress_by_name(step: Callable[[], None]) -> None:
    for _ in trange(args.steps, disable=True):
        step()


def in_a_range_of_ranges(step: Callable[[], None]) -> None:
    for _ in range(10):
        for _ in range(args.epochs):
            for _ in range(0, 64, 16):
                step()


def while_it_counts(step: Callable[[], None]) -> None:
    number = 100
    while number < args.steps:
        step()
        number += 4


def while_it_is_not_above(step: Callable[[], None]) -> None:
    number = 1
    while number <= args.steps:
        step()
        number += 1


def until_a_break(step: Callable[[], None]) -> None:
    number = 0
    while True:
        step()
        number += 1
        if number > args.steps:
            break


def until_the_first_of_two(step: Callable[[], None]) -> None:
    for number in range(10**9):
        if number >= args.steps:
            return
        step()


def with_a_switch(step: Callable[[], None]) -> None:
    for number in range(args.steps):
        step()
        if number % 10 == 0 and args.dry_run:
            pass
        if args.dry_run:
            break


def every_eighth_round(step: Callable[[], None]) -> None:
    for number in range(args.steps):
        if (number + 1) % 8 == 0:
            step()


def every_eighth_round_until_a_break(step: Callable[[], None]) -> None:
    for number in range(10**9):
        if number >= args.steps:
            break
        if number % 8 == 0:
            step()


def in_functions(step: Callable[[], None]) -> None:
    def an_epoch() -> None:
        for _ in range(20):
            step()

    for _ in range(args.epochs):
        an_epoch()


@pytest.mark.parametrize(
    ("loop", "steps"),
    [
        (over_a_range, 1000), (from_the_middle, 504), (with_progress, 1000), (with_progress_by_name, 1000),
        (in_a_range_of_ranges, 280), (while_it_counts, 225), (while_it_is_not_above, 1000), (until_a_break, 1001),
        (until_the_first_of_two, 1000), (with_a_switch, 1000), (in_functions, 140), (every_eighth_round, 125),
        (every_eighth_round_until_a_break, 125),
    ],
)  # fmt: skip
def test_a_head_that_counts_says_the_steps(
    loop: Callable[..., None], steps: int, step: tuple[LoopHeads, Callable[[], None]]
) -> None:
    heads, make = step
    with pytest.raises(Seen):
        loop(make)
    assert heads.steps(None) == steps
    assert heads.steps(5) is None


def over_a_loader(step: Callable[[], None]) -> None:
    for _ in range(args.epochs):
        for _ in LOADER:
            step()


def test_a_loop_over_a_loader_has_the_steps_of_an_epoch(step: tuple[LoopHeads, Callable[[], None]]) -> None:
    heads, make = step
    with pytest.raises(Seen):
        over_a_loader(make)
    assert heads.steps(5) == 35
    assert heads.steps(None) is None


def until_it_is_late(step: Callable[[], None]) -> None:
    ends_at = time.monotonic() + 60
    while time.monotonic() < ends_at:
        step()


def while_a_flag_holds(step: Callable[[], None]) -> None:
    is_done = False
    for number in range(args.steps):
        step()
        is_done = number > 500
        if is_done:
            break


def by_a_growing_bound(step: Callable[[], None]) -> None:
    number, bound = 0, 10
    while number < bound:
        step()
        number += 1
        bound += 1


def by_uneven_steps(step: Callable[[], None]) -> None:
    number = 1
    while number < args.steps:
        step()
        number *= 2


def over_what_has_no_length(step: Callable[[], None]) -> None:
    for _ in itertools.count():
        step()


def with_counters_in_each(step: Callable[[], None]) -> None:
    for _ in range(3):
        number = 0
        while number < args.steps:
            step()
            number += 1


def with_two_steps_a_round(step: Callable[[], None]) -> None:
    for _ in range(args.steps):
        step()
        step()


def until_a_bound_that_is_never_reached(step: Callable[[], None]) -> None:
    most = float("inf")
    for number in range(args.steps):
        if number >= most:
            break
        step()


def until_a_bound_that_stands_for_none(step: Callable[[], None]) -> None:
    most = -1
    for number in range(args.steps):
        if number == most:
            break
        step()


def over_a_sample_of_a_range(step: Callable[[], None]) -> None:
    for _ in random.sample(range(args.steps), 10):
        step()


def over_a_range_that_grows(step: Callable[[], None]) -> None:
    for epoch in range(args.epochs):
        for _ in range(10 * (epoch + 1)):
            step()


def in_one_loop_after_another(step: Callable[[], None]) -> None:
    for _ in range(2):
        step()
    for _ in range(args.steps):
        step()


@pytest.mark.parametrize(
    "loop",
    [
        with_two_steps_a_round, until_a_bound_that_is_never_reached, until_a_bound_that_stands_for_none,
        over_a_sample_of_a_range, over_a_range_that_grows, in_one_loop_after_another,
        until_it_is_late, while_a_flag_holds, by_a_growing_bound, by_uneven_steps, over_what_has_no_length,
        with_counters_in_each,
    ],
)  # fmt: skip
def test_a_loop_with_another_end_says_nothing(loop: Callable[..., None], step: tuple[LoopHeads, Callable[[], None]]) -> None:
    heads, make = step
    with pytest.raises(Seen):
        loop(make)
    assert heads.steps(None) is None


def test_steps_that_no_dry_run_comes_to_the_end_of_are_known() -> None:
    def objective() -> None:
        model = nn.Linear(8, 2).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        number = 0
        while number < 700_000:
            model(torch.randn(4, 8).cuda()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            number += 1

    captured = capture(objective, resolve_device("a100"), most_seconds=0.3)
    assert captured.unseen
    assert captured.steps == 700_000


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
def test_epochs_that_are_not_replayed_are_counted() -> None:
    def objective() -> None:
        model = nn.Linear(8, 2).cuda()
        model.compile()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(9000):
            for (x,) in DataLoader(TensorDataset(torch.randn(64, 8)), 4):
                model(x.cuda()).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    captured = capture(objective, resolve_device("a100"), most_seconds=0.3)
    assert captured.unseen
    assert (captured.steps_per_epoch, captured.steps) == (16, 144_000)


def test_two_optimizers_that_step_in_turns_make_one_step() -> None:
    def objective() -> None:
        models = [nn.Linear(8, 2).cuda() for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
        for _ in range(50_000):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(torch.randn(4, 8).cuda()).sum().backward()
                optimizer.step()

    captured = capture(objective, resolve_device("a100"), most_seconds=0.3)
    assert captured.steps is None  # the inner loop goes over optimizers


def test_a_gan_makes_a_step_a_round() -> None:
    def objective() -> None:
        one, other = nn.Linear(8, 2).cuda(), nn.Linear(8, 2).cuda()
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (one, other)]
        for _ in range(50_000):
            one(torch.randn(4, 8).cuda()).sum().backward()
            optimizers[0].step()
            other(torch.randn(4, 8).cuda()).sum().backward()
            optimizers[1].step()

    assert capture(objective, resolve_device("a100"), most_seconds=0.3).steps == 50_000


def test_reading_a_head_keeps_nothing_of_the_loop_alive(step: tuple[LoopHeads, Callable[[], None]]) -> None:
    heads, make = step
    alive: list[weakref.ref[torch.Tensor]] = []

    def loop() -> None:
        for number in range(args.steps):
            kept = torch.zeros(number + 1)
            alive.append(weakref.ref(kept))
            make()
            del kept
            assert alive[-1]() is None

    with pytest.raises(Seen):
        loop()
    assert heads.steps(None) == args.steps
