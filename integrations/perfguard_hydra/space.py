"""SearchSpace: what Hydra's overrides say of a sweep, as distributions of Optuna, and back as the overrides of one job.

The grammar is that of Hydra's Optuna sweeper, so ``hydra.sweeper.params`` stay as they are:

    override                                    distribution
    x=choice(a, b)                              CategoricalDistribution, and no range of numbers
    x=range(1, 8, step=2)                       IntDistribution from 1 to 7 in steps of 2; with a float, FloatDistribution
    x=shuffle(range(1, 4))                      CategoricalDistribution
    x=interval(0.0, 1.0)                        FloatDistribution; int(interval(1, 8)): IntDistribution
    x=tag(log, interval(1e-5, 1e-2))            the same, in logarithms
    x=5                                         no distribution: each job has it
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optuna
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep, Transformer
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from perfguard.exceptions import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """The parameters of a sweep. A key is that of the override, for instance "lr", "+lr" or "model/optimizer"."""

    distributions: Mapping[str, BaseDistribution] = field(default_factory=dict)
    fixed: Mapping[str, str] = field(default_factory=dict)
    """Overrides that all jobs have, as they were written, by key."""
    extend: Callable[[optuna.Trial], object] | None = None
    """Suggests more parameters to a trial. None: there are no more."""

    @classmethod
    def parse(cls, arguments: Sequence[str], *, extend: Callable[[optuna.Trial], object] | None = None) -> SearchSpace:
        """Return the space of the overrides ``arguments``. Of several with the same key, the last counts.

        Raises:
            ConfigurationError: for a sweep that has no distribution.
            hydra.errors.OverrideParseException: for what is no override.
        """
        distributions: dict[str, BaseDistribution] = {}
        fixed: dict[str, str] = {}
        for override in OverridesParser.create().parse_overrides(list(arguments)):
            key = override.get_key_element()
            distributions.pop(key, None)
            fixed.pop(key, None)
            if override.is_sweep_override():
                distributions[key] = distribution_of(override)
            else:
                fixed[key] = str(override.input_line)
        return cls(distributions=distributions, fixed=fixed, extend=extend)

    def suggest(self, trial: optuna.Trial) -> Mapping[str, Any]:
        """Let ``trial`` have all parameters, and return them."""
        params = {name: _suggest(trial, name, distribution) for name, distribution in self.distributions.items()}
        if self.extend is None:
            return params
        self.extend(trial)
        return trial.params

    def overrides(self, params: Mapping[str, object]) -> tuple[str, ...]:
        """Return the overrides of a job with ``params``, as a launcher takes them."""
        return (*(f"{name}={value}" for name, value in params.items()), *self.fixed.values())

    def grid(self) -> Mapping[str, Sequence[Any]]:
        """Return all values of each parameter.

        Raises:
            ConfigurationError: for a parameter that is continuous.
        """
        return {name: _values_of(name, distribution) for name, distribution in self.distributions.items()}


def distribution_of(override: Override) -> BaseDistribution:
    """Return the distribution of an override that sweeps.

    Raises:
        ConfigurationError: if it has none.
    """
    value = override.value()
    is_shuffled_range = isinstance(value, RangeSweep) and value.shuffle
    if override.is_choice_sweep() or is_shuffled_range:
        choices: list[Any] = [*override.sweep_iterator(transformer=Transformer.encode)]  # numbers and texts, once encoded
        return CategoricalDistribution(choices)
    if isinstance(value, RangeSweep) and value.start is not None and value.stop is not None:
        return _distribution_of_range(value.start, value.stop, value.step)
    if isinstance(value, IntervalSweep) and value.start is not None and value.end is not None:
        is_log = "log" in value.tags
        if isinstance(value.start, int) and isinstance(value.end, int):
            return IntDistribution(value.start, value.end, log=is_log)
        return FloatDistribution(float(value.start), float(value.end), log=is_log)
    raise ConfigurationError(
        f"The perfguard sweeper has no distribution for {override.input_line!r}. Write choice(...), range(start, stop) or "
        "interval(start, end)."
    )


def _distribution_of_range(start: float, stop: float, step: float) -> BaseDistribution:
    """Return the distribution of a range. As in Hydra's Optuna sweeper, its end belongs to it."""
    num_steps = int((stop - start) / step + 1e-9)
    last = start + num_steps * step  # Optuna warns of an end that is no whole number of steps away
    if all(isinstance(number, int) for number in (start, stop, step)):
        return IntDistribution(int(start), int(last), step=int(step))
    return FloatDistribution(float(start), float(last), step=float(step))


def _suggest(trial: optuna.Trial, name: str, distribution: BaseDistribution) -> Any:
    if isinstance(distribution, CategoricalDistribution):
        return trial.suggest_categorical(name, distribution.choices)
    if isinstance(distribution, IntDistribution):
        return trial.suggest_int(name, distribution.low, distribution.high, step=distribution.step, log=distribution.log)
    assert isinstance(distribution, FloatDistribution)
    return trial.suggest_float(name, distribution.low, distribution.high, step=distribution.step, log=distribution.log)


def _values_of(name: str, distribution: BaseDistribution) -> Sequence[Any]:
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices
    if isinstance(distribution, IntDistribution) and not distribution.log:
        return range(distribution.low, distribution.high + 1, distribution.step)
    if isinstance(distribution, FloatDistribution) and distribution.step is not None:
        numbers = (distribution.low + index * distribution.step for index in itertools.count())
        return [*itertools.takewhile(lambda number: number <= distribution.high + 1e-9, numbers)]
    raise ConfigurationError(f"A grid needs a choice or a range for {name!r}, but it is continuous: {distribution}.")
