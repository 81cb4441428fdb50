"""DryTrial: the trial of a dry run. It says of itself and of its study what the real one does, and keeps what is written."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Callable, Container, Sequence
from typing import Any, cast

import optuna
from optuna.distributions import BaseDistribution
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

Fact = Callable[[str], Any]
"""``fact(name)`` returns one of :mod:`perfguard_optuna.facts`, or raises what the real study raises instead."""
_STUDY = 0
"""The only study of the storage of a dry run."""
_OWN = -1
"""The trial of the dry run itself. Its number is asked for where the objective reads it, and nowhere else."""


class DryTrial(optuna.Trial):
    """The trial of a dry run. It suggests what the real one would. What is written to it stays here, and can be read here.

    Args:
        suggest: ``suggest(name, distribution)`` returns the value of a parameter.
        fact: returns what the real trial and its study say of themselves.
        directions: those of the study.
    """

    def __init__(self, suggest: Callable[[str, BaseDistribution], Any], fact: Fact, directions: Sequence[StudyDirection]) -> None:
        self._trial_id = _OWN
        self._ask_for = suggest
        self._facts: dict[str, Any] = {}
        self._ask_fact = fact
        self._cached_frozen_trial = create_trial(state=TrialState.RUNNING)
        """What the dry run itself has suggested and written."""
        self.storage = cast("BaseStorage", DryStorage(self, directions))
        self.study = DryStudy(self)

    def fact(self, name: str) -> Any:
        """Return a fact, which does not change while the dry run goes on."""
        if name not in self._facts:
            self._facts[name] = self._ask_fact(name)
        return self._facts[name]

    def as_now(self, real: FrozenTrial) -> FrozenTrial:
        """Return ``real`` with what the dry run has suggested and written."""
        found = copy.copy(real)
        written = self._written
        for name in ("params", "_distributions", "user_attrs", "system_attrs", "intermediate_values"):
            setattr(found, name, {**getattr(real, name), **getattr(written, name)})
        return found

    @property
    def _written(self) -> FrozenTrial:
        return self._cached_frozen_trial

    def _suggest(self, name: str, distribution: BaseDistribution) -> Any:
        """What all three ``suggest_...`` call (Optuna 0.18 to 5.0)."""
        known = self._written.params
        if name not in known:
            known[name] = self._ask_for(name, distribution)
            self._written._distributions[name] = distribution
        return known[name]

    @property
    def number(self) -> int:
        return int(self.fact("number"))

    @property
    def params(self) -> dict[str, Any]:
        return copy.deepcopy({**self.fact("params")[0], **self._written.params})

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        return copy.deepcopy({**self.fact("params")[1], **self._written._distributions})

    @property
    def relative_params(self) -> dict[str, Any]:
        return copy.deepcopy(dict(self.fact("relative_params")))

    @property
    def user_attrs(self) -> dict[str, Any]:
        return copy.deepcopy({**self.fact("user_attrs"), **self._written.user_attrs})

    @property
    def system_attrs(self) -> dict[str, Any]:
        return copy.deepcopy({**self.fact("system_attrs"), **self._written.system_attrs})

    @property
    def constraints(self) -> dict[str, float]:
        return {**self.fact("constraints"), **self._written.constraints}

    @property
    def datetime_start(self) -> datetime.datetime | None:
        return cast("datetime.datetime | None", self.fact("datetime_start"))

    def should_prune(self) -> bool:
        """Prune nothing: a dry run has no values to judge by."""
        if len(self.study.directions) > 1:
            raise NotImplementedError("Trial.should_prune is not supported for multi-objective optimization.")
        return False


class DryStudy(optuna.Study):
    """The study of a dry run."""

    def __init__(self, trial: DryTrial) -> None:
        self._trial = trial
        super().__init__("", trial.storage, optuna.samplers.RandomSampler(), optuna.pruners.NopPruner())
        self._thread_local.in_optimize_loop = True  # an objective may stop its study

    @property
    def study_name(self) -> str:
        return str(self._trial.fact("study_name"))

    @study_name.setter
    def study_name(self, name: str) -> None:
        """Keep the real one."""


class DryStorage:
    """The storage of a dry run. It asks for what is read, and keeps what is written.

    It has all methods of a storage: those that are not here are those of a storage in memory, which is filled when one is called.
    """

    def __init__(self, trial: DryTrial, directions: Sequence[StudyDirection]) -> None:
        self._trial = trial
        self._directions = list(directions)
        self._attrs: dict[str, dict[str, Any]] = {"study_user_attrs": {}, "study_system_attrs": {}}
        self._memory: InMemoryStorage | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # such as those that `copy` and `pickle` look for
            raise AttributeError(name)
        return lambda *args, **kwargs: self._run(name, *args, **kwargs)

    def _run(self, name: str, *args: object, **kwargs: object) -> Any:
        if args and args[0] == _OWN:
            args = self._trial.number, *args[1:]
        return getattr(self._filled(), name)(*args, **kwargs)

    def _filled(self) -> InMemoryStorage:
        if self._memory is None:
            memory = InMemoryStorage()
            memory.create_new_study(self._directions, self._trial.fact("study_name"))
            for each in self._trials():
                memory.create_new_trial(_STUDY, each)
            self._memory = memory
        return self._memory

    def _trials(self) -> list[FrozenTrial]:
        trials = [*self._trial.fact("trials")]
        number = self._trial.number
        if number == len(trials):  # a proposal, of which no trial is made yet
            trials.append(create_trial(state=TrialState.RUNNING))
        trials[number] = self._trial.as_now(trials[number])
        return trials

    def get_study_id_from_name(self, study_name: str) -> int:
        return _STUDY

    def get_study_name_from_id(self, study_id: int) -> str:
        return str(self._trial.fact("study_name"))

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        return [*self._directions]

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        return {**self._trial.fact("study_user_attrs"), **self._attrs["study_user_attrs"]}

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        return {**self._trial.fact("study_system_attrs"), **self._attrs["study_system_attrs"]}

    def set_study_user_attr(self, study_id: int, key: str, value: object) -> None:
        self._attrs["study_user_attrs"][key] = value

    def set_study_system_attr(self, study_id: int, key: str, value: object) -> None:
        self._attrs["study_system_attrs"][key] = value

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        if self._memory is not None:
            return self._memory.get_all_trials(study_id, deepcopy, states)
        found = [each for each in self._trials() if states is None or each.state in states]
        return copy.deepcopy(found) if deepcopy else found

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        if self._memory is not None:
            return self._memory.get_best_trial(study_id)
        return copy.deepcopy(cast("FrozenTrial", self._trial.fact("best_trial")))

    # Of the trial itself, until the memory is filled.

    def get_trial_system_attrs(self, trial_id: int) -> dict[str, Any]:
        is_own = self._memory is None and trial_id == _OWN
        return self._trial.system_attrs if is_own else dict(self._run("get_trial_system_attrs", trial_id))

    def set_trial_user_attr(self, trial_id: int, key: str, value: object) -> None:
        self._write("set_trial_user_attr", trial_id, key, value)

    def set_trial_system_attr(self, trial_id: int, key: str, value: object) -> None:
        self._write("set_trial_system_attr", trial_id, key, value)

    def set_trial_intermediate_value(self, trial_id: int, step: int, value: float) -> None:
        self._write("set_trial_intermediate_value", trial_id, step, value)

    def _write(self, method: str, trial_id: int, *args: object) -> None:
        """Write to a trial. That of the dry run keeps what is written to it by itself, and fills the memory with it."""
        if self._memory is not None or trial_id != _OWN:
            self._run(method, trial_id, *args)
