"""Optimizers: those that a trial has made, by numbers, and their steps."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator

import torch


class Optimizers:
    """Numbers of the optimizers, and how many steps each has made.

    An optimizer is known by its number and not by its id: that of one which is gone may be that of the next.
    """

    def __init__(self) -> None:
        self.numbers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        """By optimizer, of those that live."""
        self.steps: dict[int, int] = {}
        """By number, in the order of their first steps."""
        self._counter = itertools.count()
        self._made_at: dict[tuple[str, int] | None, int] = {}
        """Numbers of the latest ones, by the line of the user's code that has made them."""

    def number(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the number of an optimizer. One that was not seen gets the next."""
        if optimizer not in self.numbers:
            self.numbers[optimizer] = next(self._counter)
        return self.numbers[optimizer]

    def number_new(self, optimizer: torch.optim.Optimizer, line: tuple[str, int] | None) -> int:
        """Number an optimizer that a ``line`` has made. One of a step, as for a task of meta-learning, is the one before it."""
        before = self._made_at.get(line)
        if before in self.steps and (self.waited_for or [*self.steps][-1] != before):
            self.numbers[optimizer] = before
        self._made_at[line] = self.number(optimizer)
        return self.numbers[optimizer]

    @property
    def waited_for(self) -> set[int]:
        """Numbers of those that live and have made no step."""
        return set(self.numbers.values()) - self.steps.keys()

    def has_stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it has made a step."""
        return self.numbers.get(optimizer) in self.steps

    def with_steps(self) -> Iterator[torch.optim.Optimizer]:
        """Yield those that live and have made a step."""
        return (optimizer for optimizer, number in self.numbers.items() if number in self.steps)
