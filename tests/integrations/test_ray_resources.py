"""What trials ask Ray for."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from ray import cloudpickle, tune
from torch import nn

import perfguard_ray
from perfguard import Workload
from perfguard.devices import catalog
from perfguard.exceptions import ConfigurationError, UnguardedTrialWarning
from perfguard_ray import PerfGuardVariantGenerator
from tests.doubles import ReplayPredictor

GIB = 2**30


def build(config: Mapping[str, Any]) -> Workload:
    """SGD on one matrix: weights and gradients of ``gib`` in all."""
    if config["gib"] < 0:
        raise ValueError("less than nothing")
    width = int(config["gib"] * GIB / 2 / 4 / 1024)
    return Workload(nn.Linear(1024, width, bias=False), inputs=(1, 1024), loss=torch.mean)


def search(gpu: str = "a100-sxm-40gb", **options: Any) -> PerfGuardVariantGenerator:
    return PerfGuardVariantGenerator(gpu=gpu, build=build, predictor=ReplayPredictor(), log=False, **options)


@pytest.mark.parametrize(("gib", "expected"), [(0.1, 0.01), (4.0, 0.11), (19.0, 0.49), (30.0, 0.78), (60.0, 1.0)])
def test_trial_asks_for_the_gpu_share_it_needs(gib: float, expected: float) -> None:
    asked = perfguard_ray.resources(search(), cpus=2).of({"gib": gib})
    assert asked == {"CPU": 2, "GPU": pytest.approx(expected, abs=0.011)}
    needed = gib * GIB * 1.016 / catalog()["a100-sxm-40gb"].memory_bytes  # the double knows it to 1%; 95% are under 1.016
    assert asked["GPU"] >= min(1.0, needed)


def test_risk_of_the_study_does_not_change_what_a_trial_asks_for() -> None:
    shares = {perfguard_ray.resources(search(risk=risk)).of({"gib": 30.0})["GPU"] for risk in (0, 0.05, 0.9)}
    assert len(shares) == 1


@pytest.mark.parametrize(
    ("gib", "expected"), [(1.0, "mig-1g.5gb"), (6.0, "mig-2g.10gb"), (25.0, "mig-7g.40gb"), (60.0, "mig-7g.40gb")]
)
def test_mig_trial_asks_for_the_smallest_profile(gib: float, expected: str) -> None:
    assert perfguard_ray.resources(search(), mig=True).of({"gib": gib}) == {"CPU": 1, expected: 1}


def test_on_a_cpu_a_trial_asks_for_main_memory() -> None:
    asked = perfguard_ray.resources(search("cpu")).of({"gib": 1.0})
    assert asked["CPU"] == 1
    assert GIB < asked["memory"] < 1.1 * GIB


def test_unpredictable_trial_asks_for_a_whole_gpu() -> None:
    trial_resources = perfguard_ray.resources(search())
    with pytest.warns(UnguardedTrialWarning, match="requests a whole device .*less than nothing") as caught:
        assert [trial_resources.of({"gib": -1.0}) for _ in range(2)] == [{"CPU": 1, "GPU": 1.0}] * 2
    assert len(caught) == 1


def test_mig_on_a_card_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"MIG cannot split .*RTX 3090"):
        perfguard_ray.resources(search("rtx3090"), mig=True)


def test_the_guard_does_not_travel_with_the_trainable() -> None:
    trial_resources = perfguard_ray.resources(search())
    pickled = cloudpickle.dumps(trial_resources)
    assert len(pickled) < 1000
    assert cloudpickle.loads(pickled).of({"gib": 30.0})["GPU"] > 0.5, "a copy in the same process"
    del trial_resources
    gc.collect()
    with pytest.raises(ConfigurationError, match="outside the process that called"):
        cloudpickle.loads(pickled).of({"gib": 30.0})


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_tune_gives_a_trial_what_it_asks_for(tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> dict[str, float]:
        return tune.get_context().get_trial_resources().required_resources  # type: ignore[no-any-return]

    guarded = search("cpu")
    tuner = tune.Tuner(
        tune.with_resources(train, perfguard_ray.resources(guarded)),
        param_space={"gib": tune.grid_search([0.001, 0.002])},
        tune_config=tune.TuneConfig(search_alg=guarded, reuse_actors=False),
        run_config=tune.RunConfig(storage_path=str(tmp_path), name="run", verbose=0),
    )
    results = tuner.fit()
    assert results.num_errors == 0
    for result in (results[0], results[1]):
        assert result.metrics is not None
        assert result.config is not None
        assert result.metrics["CPU"] == 1
        assert 1 < result.metrics["memory"] / (result.config["gib"] * GIB) < 1.1, "the upper end: equal readings scatter by 5%"
