"""PerfGuardSampler passes Optuna's own suites around samplers of every kind, with a guard that finds that everything fits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import optuna
import pytest
import torch
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.testing.pytest_samplers import BasicSamplerTestCase, MultiObjectiveSamplerTestCase, RelativeSamplerTestCase
from torch import nn

from perfguard import Workload
from perfguard_optuna import OptunaGuard, PerfGuardSampler
from tests.doubles import ReplayPredictor

pytestmark = [
    pytest.mark.usefixtures("pretended_gpu"),
    pytest.mark.filterwarnings("ignore::perfguard.exceptions.UnguardedTrialWarning"),  # the suites have studies without a pruner
]

MODEL = nn.Linear(2, 1)


def build(params: Mapping[str, Any]) -> Workload:
    """Looks at two of the suites' parameters, one of them only where it is there."""
    size = 1 + int(params["x"] not in (0, "a")) + int(params.get("y", 0) not in (0, "b"))
    return Workload(MODEL, inputs=(size, 2), loss=torch.mean)


def guarded(make_inner: Callable[[], BaseSampler]) -> Callable[[], BaseSampler]:
    def make() -> BaseSampler:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return PerfGuardSampler(make_inner(), OptunaGuard("a100", build=build, predictor=ReplayPredictor(), log=False))

    return make


class _MultivariateTPE:
    @pytest.fixture
    def sampler(self) -> Callable[[], BaseSampler]:
        return guarded(lambda: TPESampler(n_startup_trials=0, multivariate=True))


class TestMultivariateTPE(_MultivariateTPE, BasicSamplerTestCase, RelativeSamplerTestCase, MultiObjectiveSamplerTestCase):
    pass


class _GP:
    @pytest.fixture
    def sampler(self) -> Callable[[], BaseSampler]:
        return guarded(lambda: GPSampler(n_startup_trials=0, deterministic_objective=True))


@pytest.mark.slow
class TestGP(_GP, BasicSamplerTestCase, RelativeSamplerTestCase, MultiObjectiveSamplerTestCase):
    # A proposal takes a quarter of a second. TestMultivariateTPE has every pair of distributions.
    @pytest.mark.parametrize("x_distribution", [IntDistribution(1, 100, log=True)])
    @pytest.mark.parametrize("y_distribution", [FloatDistribution(-10, 10, step=0.5)])
    def test_sample_relative_numerical(self, sampler: Any, x_distribution: Any, y_distribution: Any) -> None:
        super().test_sample_relative_numerical(sampler, x_distribution, y_distribution)

    @pytest.mark.parametrize("x_distribution", [FloatDistribution(1e-7, 1.0, log=True)])
    def test_sample_relative_mixed(self, sampler: Any, x_distribution: Any) -> None:
        super().test_sample_relative_mixed(sampler, x_distribution)


class _Random:
    @pytest.fixture
    def sampler(self) -> Callable[[], BaseSampler]:
        return guarded(RandomSampler)


class TestRandom(_Random, BasicSamplerTestCase, MultiObjectiveSamplerTestCase):
    pass
