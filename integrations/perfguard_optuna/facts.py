"""Facts: what an objective may ask of its trial and of its study beside parameters. A dry run gets those of the real trial.

The child of a dry run reaches no storage. So it asks for each fact, as it asks for parameters, and only for what the objective
reads. What was read is an answer like a parameter: a trial with other facts is not the same trial.
"""

from __future__ import annotations

import copy
import datetime
import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import optuna

from perfguard.capture import Answer
from perfguard.exceptions import CaptureError
from perfguard_optuna.attributes import PREFIX

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    AnyTrial = optuna.Trial | FrozenTrial

FACT = "perfguard:"
"""Begins the name of a fact, which no parameter has."""
_FAR = 720_721
"""Another number of a trial. It has another remainder for each divisor up to 16, and is above what a study counts to."""
_MANY_DAYS = datetime.timedelta(days=1000)


class Told:
    """A fact on its way to the process of a dry run.

    Args:
        content: the fact. An exception: the objective gets it raised, as the study would have raised it.
        text: stands for the content where answers are compared.
    """

    __slots__ = ("_content", "_text")

    def __init__(self, content: object, text: str) -> None:
        try:
            self._content = pickle.dumps(content)
        except Exception as error:  # an attribute in a storage in memory may be anything
            self._content = pickle.dumps(CaptureError(f"what the trial or its study has cannot be sent to a dry run: {error}"))
        self._text = text if len(text) < 200 else hashlib.sha256(text.encode()).hexdigest()

    def __repr__(self) -> str:
        return self._text

    def read(self) -> Any:
        """Return the content, or raise it."""
        content = pickle.loads(self._content)
        if isinstance(content, Exception):
            raise content
        return content


class Facts:
    """The facts of a trial, as they are when they are asked for. What the trial has by then been suggested is none of them.

    Args:
        study: the study of the trial. None: not known.
        trial: the trial. None: it is not made yet, so it is the next of the study.
    """

    def __init__(self, study: optuna.Study | None, trial: AnyTrial | None) -> None:
        self._study = study
        self._trial = trial
        self._before = ({}, {}) if trial is None else (trial.params, trial.distributions)

    def answer(self, name: str) -> Answer:
        """Return the fact of this name. A number that is varied shows whether it changes the step."""
        fact = name.removeprefix(FACT)
        try:
            content = self.of(fact)
        except Exception as error:  # such as that no trial is completed yet
            content = error
        if isinstance(content, int):
            return Answer(name, content, content + _FAR, is_fact=True)
        if isinstance(content, datetime.datetime):
            return Answer(name, content, content - _MANY_DAYS, is_fact=True)
        text = repr(content)
        if fact == "trials":  # no two trials see the same
            text = f"as trial {self._number} sees them"
        elif isinstance(content, dict):  # a verdict on the trial says nothing of what it runs
            text = repr({key: value for key, value in content.items() if not str(key).startswith(PREFIX)})
        return Answer(name, Told(content, text), is_fact=True)

    def of(self, fact: str) -> Any:
        """Return a fact.

        Raises:
            Exception: what the study raises instead.
        """
        return _FACTS[fact](self)

    @property
    def _number(self) -> int:
        if self._trial is not None:
            return self._trial.number
        return 0 if self._study is None else len(self._study.get_trials(deepcopy=False))

    def _system_attrs(self) -> Mapping[str, Any]:
        if self._study is None or self._trial is None:
            return {}
        return copy.copy(self._study._storage.get_trial_system_attrs(self._trial._trial_id))

    def _constraints(self) -> Mapping[str, float]:
        return {} if self._trial is None else self._trial.constraints

    def _relative_params(self) -> Mapping[str, Any]:
        return self._trial.relative_params if isinstance(self._trial, optuna.Trial) else {}

    def _best_trial(self) -> FrozenTrial:
        if self._study is None:
            raise ValueError("No trials are completed yet.")
        return self._study._storage.get_best_trial(self._study._study_id)


_FACTS: dict[str, Callable[[Facts], Any]] = {
    "number": lambda facts: facts._number,
    "datetime_start": lambda facts: datetime.datetime.now() if facts._trial is None else facts._trial.datetime_start,
    "user_attrs": lambda facts: {} if facts._trial is None else facts._trial.user_attrs,
    "system_attrs": Facts._system_attrs,
    "constraints": Facts._constraints,
    "params": lambda facts: facts._before,
    "relative_params": Facts._relative_params,
    "study_name": lambda facts: "" if facts._study is None else facts._study.study_name,
    "study_user_attrs": lambda facts: {} if facts._study is None else facts._study.user_attrs,
    "study_system_attrs": lambda facts: (
        {} if facts._study is None else facts._study._storage.get_study_system_attrs(facts._study._study_id)
    ),
    "trials": lambda facts: [] if facts._study is None else facts._study.get_trials(deepcopy=False),
    "best_trial": Facts._best_trial,
}


_OF_STORAGE = ("system_attrs", "constraints", "study_name", "study_user_attrs", "study_system_attrs", "trials", "best_trial")
"""Those that only the storage knows."""


class ParamsAndFacts(Mapping[str, Any]):
    """Parameters, and the facts of a trial, which are looked up as they are asked for."""

    def __init__(self, params: Mapping[str, object], facts: Facts) -> None:
        self._params = params
        self._facts = facts

    def __getitem__(self, name: str) -> Any:
        return self._facts.answer(name).value if name.startswith(FACT) else self._params[name]

    def __contains__(self, name: object) -> bool:
        return name in self._params or (isinstance(name, str) and name.removeprefix(FACT) in _FACTS and name.startswith(FACT))

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)


_asked: ContextVar[Facts | None] = ContextVar("perfguard_facts", default=None)


@contextmanager
def asked_for(study: optuna.Study, trial: AnyTrial) -> Iterator[None]:
    """A ``with`` block in which what parameters would run is asked for ``trial``."""
    token = _asked.set(Facts(study, trial))
    try:
        yield
    finally:
        _asked.reset(token)


def facts_asked_for() -> Facts:
    """Return the facts of the trial for which the code that runs asks."""
    return _asked.get() or Facts(None, None)


def snapshot_of(trial: optuna.Trial) -> Callable[[str], Any]:
    """Return a function that returns the facts of ``trial``, in a process that reaches no storage.

    Those of the study are taken now. Those of the trial itself are taken as they are asked for, since it has them by itself.
    """
    # the trial itself becomes one that asks for facts
    facts = Facts(trial.study, copy.copy(trial))
    taken = dict[str, Any]()
    for name in _OF_STORAGE:
        try:
            taken[name] = facts.of(name)
        except Exception as error:  # its traceback would keep alive what the frames of the objective hold
            error.__traceback__ = error.__context__ = error.__cause__ = None
            taken[name] = error

    def fact(name: str) -> Any:
        found = taken.get(name)
        if isinstance(found, Exception):
            raise copy.copy(found)
        return facts.of(name) if name not in taken else found

    return fact
