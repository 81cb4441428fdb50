"""Alike: the captured trial that may stand in for another one, so that no dry run of it is made.

Two trials are alike if their answers are the same, but for numbers that differ by a fifth at most. The step of one then costs
about what that of the other costs. A guard that costs a study more than it saves uses this where every limit holds with room to
spare.

Without a dry run, it must be known what the objective asks. That is what it has asked in each trial so far. An objective that has
once asked something else after the same names is dry-run for each trial.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from perfguard.capture.child import Answer
from perfguard.last_used import LastUsed
from perfguard.verdict import ALIKE

if TYPE_CHECKING:
    from perfguard.workload import CapturedTrial

Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Known:
    answers: Mapping[str, Answer]
    """Those that change its step."""
    captured: CapturedTrial


class Alike:
    """Captured trials by their answers. The caller holds a lock.

    Args:
        most_ratio: the largest ratio of two numbers that are alike.
        most_trials: the most trials that are remembered.
        most_operators: the most operators that all their graphs have together.
    """

    def __init__(self, *, most_ratio: float = 1.2, most_trials: int = 64, most_operators: int = 50_000) -> None:
        self._most_ratio = most_ratio
        self._known: LastUsed[Hashable, _Known] = LastUsed(most_trials, most_weight=most_operators, weigh=_num_operators)
        self._questions: dict[Names, tuple[Any, ...]] = {}
        """What the objective asks next, by the names of its answers before."""
        self._ends: set[Names] = set()
        """The names of all answers of a trial."""
        self._varies = False
        """Whether a value has decided what is asked."""

    def note_question(self, answers: Mapping[str, Answer], question: tuple[Any, ...]) -> None:
        """Note what the objective asks after ``answers``."""
        if self._varies:
            return
        names = tuple(answers)
        self._varies = names in self._ends or self._questions.setdefault(names, question) != question

    def note(self, answers: Mapping[str, Answer], captured: CapturedTrial, *, by_value: bool) -> None:
        """Note a trial that was dry-run to its end.

        Args:
            answers: all that it has asked.
            captured: what it runs.
            by_value: whether the values of continuous parameters change the step.
        """
        names = tuple(answers)
        self._ends.add(names)
        self._varies |= names in self._questions
        kept = {name: given for name, given in answers.items() if by_value or given.other is None}
        if any(given.is_fact and given.other is not None for given in kept.values()):
            return  # its step may depend on its number, so no other trial is like it
        key = tuple((name, repr(given.value)) for name, given in kept.items())
        self._known.put(key, _Known(kept, captured))

    def foresee(self, answer: Callable[..., Answer], answers: dict[str, Answer]) -> bool:
        """Ask as in each trial so far, and fill in the ``answers``. Return whether these are all that the objective asks."""
        if self._varies:
            return False
        while (question := self._questions.get(tuple(answers))) is not None:
            given = answer(*question)
            answers[given.name] = given
        return tuple(answers) in self._ends

    def nearest(self, values: Mapping[str, Any]) -> CapturedTrial | None:
        """Return the captured trial that is nearest to one with these ``values`` of its answers. None: none is alike."""
        if self._varies:
            return None
        ratios = [(self._ratio(known.answers, values), known.captured) for _, known in self._known.newest_first()]
        ratio, captured = min(ratios, key=lambda found: found[0], default=(math.inf, None))
        return replace(captured, source=ALIKE) if captured is not None and ratio <= self._most_ratio else None

    def _ratio(self, answers: Mapping[str, Answer], values: Mapping[str, Any]) -> float:
        """Return the largest ratio of two numbers. Infinity: something else differs, or is not known."""
        if not all(name in values for name in answers):
            return math.inf
        return max((ratio_of(given.value, values[name]) for name, given in answers.items()), default=1.0)


def _num_operators(known: _Known) -> int:
    return known.captured.num_operators


def ratio_of(one: Any, other: Any) -> float:
    """Return the ratio of the larger of two positive numbers to the smaller one. Of others: 1 if equal, else infinity."""
    if type(one) is type(other) and repr(one) == repr(other):
        return 1.0
    are_numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 for value in (one, other))
    return max(one, other) / min(one, other) if are_numbers else math.inf
