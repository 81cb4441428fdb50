"""Remembered: what dry runs have shown, by the answers that change it.

Two trials run the same step if their answers are equal, except for continuous parameters such as a learning rate. Whether these
change the step is found out once for each space, that is for the names of all parameters that a trial has had.

    shown       the captured trial, or the error of its dry run, by the answers
    questions   what the objective asks next, by the answers before
    spaces      the continuous parameters of a space, and whether their values change the step

All three have a bound. What was used longest ago is forgotten first. A trial that is proposed again after that is dry-run again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perfguard.capture.alike import Alike
from perfguard.capture.child import Answer
from perfguard.capture.errors import SelfEnded
from perfguard.capture.seal import StartsTrainingError
from perfguard.exceptions import CaptureError
from perfguard.last_used import LastUsed

if TYPE_CHECKING:
    from perfguard.workload import CapturedTrial

    Shown = CapturedTrial | Exception
    Question = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Space:
    """The parameters of a trial, which their names identify."""

    continuous: frozenset[str]
    """Names of the continuous parameters."""
    by_value: bool | None = None
    """Whether the values of continuous parameters change the step. None: not known yet, so they may."""


class Remembered:
    """What dry runs of one objective have shown. The caller holds a lock.

    Args:
        most_failed: dry runs that fail in a row before no more are made.
        most_trials: the most trials that are remembered.
        most_operators: the most operators that all their graphs have together. One takes 1 to 4 KiB.
        most_questions: the most questions that are remembered.
    """

    def __init__(
        self,
        *,
        most_failed: int = 3,
        most_trials: int = 128,
        most_operators: int = 100_000,
        most_questions: int = 4096,
    ) -> None:
        self.given_up: CaptureError | None = None
        """Why no more dry runs are made. None: they are."""
        self._most_failed = most_failed
        self._num_failed = 0
        self._shown: LastUsed[Hashable, Shown] = LastUsed(most_trials, most_weight=most_operators, weigh=_num_operators)
        self._questions: LastUsed[Hashable, Question] = LastUsed(most_questions)
        self._spaces: LastUsed[tuple[str, ...], _Space] = LastUsed(most_trials)
        self._latest_space: tuple[str, ...] = ()
        self.alike = Alike(most_trials=most_trials // 2, most_operators=most_operators // 2)
        """What may stand in for a trial that is not known: the newer half, so what is forgotten above is kept nowhere."""

    def foresee(self, answer: Callable[..., Answer], answers: dict[str, Answer]) -> Shown | None:
        """Ask as the objective would, until the ``answers``, which are filled in, are known ones. None: a dry run must tell."""
        found = self.of(answers)
        while found is None and (question := self._questions.get(_exactly(answers))) is not None:
            given = answer(*question)
            answers[given.name] = given
            found = self.of(answers)
        return found

    def of_params(self, params: Mapping[str, Any]) -> Shown | None:
        """Return what is known of a trial with ``params``. None: nothing is.

        Raises:
            KeyError: if they lack a parameter of the latest space.
        """
        if self.given_up is not None:
            return self.given_up
        for names, space in self._spaces.newest_first():
            if not all(name in params for name in names):
                continue
            answers = {name: Answer(name, params[name], 1.0 if name in space.continuous else None) for name in names}
            if (found := self.of(answers)) is not None:
                return found
        for name in self._latest_space:
            params[name]  # a KeyError names what is missing
        return None

    def of(self, answers: Mapping[str, Answer]) -> Shown | None:
        """Return what is known of a trial with ``answers``, or why no more dry runs are made. None: nothing is."""
        return self.given_up or self._shown.get(self._key(answers)) or self._shown.get(self._key(_without_numbers(answers)))

    def note_question(self, answers: Mapping[str, Answer], question: Question) -> None:
        """Note what the objective asks after ``answers``."""
        self._questions.put(_exactly(answers), question)
        self.alike.note_question(answers, question)

    def is_new_space(self, answers: Mapping[str, Answer]) -> bool:
        """Whether it is not known yet if the values of the continuous parameters change the step."""
        space = self._spaces.get(tuple(answers))
        return space is None or space.by_value is None

    def note_space(self, answers: Mapping[str, Answer], *, by_value: bool | None = None) -> None:
        """Note the space of ``answers``, and whether the values of its continuous parameters change the step."""
        names = tuple(answers)
        if names not in self._spaces:
            self._latest_space = names
        continuous = frozenset(name for name, given in answers.items() if given.other is not None)
        self._spaces.put(names, _Space(continuous, by_value))

    def note(self, answers: Mapping[str, Answer], shown: Shown) -> None:
        """Note what a dry run has ``shown``. After ``most_failed`` in a row that failed, or one
        whose objective trains in a program, no more are made."""
        failed = isinstance(shown, CaptureError) and not isinstance(shown, SelfEnded)
        self._num_failed = self._num_failed + 1 if failed else 0
        is_hopeless = self._num_failed == self._most_failed or isinstance(shown, StartsTrainingError)
        if isinstance(shown, CaptureError) and is_hopeless:  # whatever the parameters are
            self.give_up(shown)
        if answers or not isinstance(shown, CaptureError):  # else it did not come to what tells trials apart
            self._shown.put(self._key(answers), shown)
        parameters = _without_numbers(answers)
        space = self._spaces.get(tuple(answers))
        if not isinstance(shown, Exception):
            self.alike.note(answers, shown, by_value=space is None or space.by_value is not False)
        if len(parameters) < len(answers) and space is not None and space.by_value is False:  # another number changes nothing
            self.note_space(parameters, by_value=False)
            self._shown.put(self._key(parameters), shown)

    def give_up(self, why: CaptureError) -> None:
        """Make no more dry runs."""
        self.given_up = why

    def _key(self, answers: Mapping[str, Answer]) -> Hashable:
        space = self._spaces.get(tuple(answers))
        by_value = space is None or space.by_value is not False
        return tuple(
            (given.name, type(given.value).__name__, repr(given.value) if by_value or given.other is None else given.value != 0)
            for given in answers.values()
        )


def _without_numbers(answers: Mapping[str, Answer]) -> Mapping[str, Answer]:
    """Return ``answers`` without facts of the trial that no other trial has, such as its number."""
    return {name: given for name, given in answers.items() if not (given.is_fact and given.other is not None)}


def _exactly(answers: Mapping[str, Answer]) -> Hashable:
    """Return answers as a key. What an objective asks next may depend on the value of each."""
    return tuple((name, type(given.value).__name__, repr(given.value)) for name, given in answers.items())


def _num_operators(shown: Shown) -> int:
    return 0 if isinstance(shown, Exception) else shown.num_operators
