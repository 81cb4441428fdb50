"""What can be trained from tables: each learns, and is kept in a file as it was."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from sklearn.ensemble import ExtraTreesRegressor, HistGradientBoostingRegressor

from perfguard_models.calibration import OPERATOR, on_new_gpu
from perfguard_models.learner import column
from perfguard_models.trees import Forest
from perfguard_research.dataset import Run
from perfguard_research.intervals import calibrated
from perfguard_research.learners import NAMES, Trainable, learner_class
from perfguard_research.memory_forest import TrainableMemory
from perfguard_research.trees import forest_of_bagging, forest_of_boosting, tensors_of
from tests.laws import fitted, some_runs


@pytest.fixture
def runs() -> list[Run]:
    return some_runs()


PAPERS = ("dnnperf", "perfseer", "dippm", "lilou", "dnnabacus")
"""They learn by the same loop as the two clocks, for sixty epochs."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in PAPERS else ()) for name in NAMES])
def test_learner_state_is_complete_after_training(name: str) -> None:
    runs = some_runs(name)
    learner = fitted(name, runs)
    predicted = learner.predict(runs)
    for target, values in predicted.items():
        assert values.shape == (len(runs),), target
        known = np.isfinite(values)
        assert known.all() or not known.any(), target
    target = "memory" if name == "memory-forest" else "time"
    measured = np.array([run.labels[target] for run in runs])
    before = np.abs(measured - np.median(measured)).mean()
    assert np.abs(predicted[target] - measured).mean() < before
    tensors, settings = learner.state()
    kept = load_tensors(save_tensors({key: value.contiguous() for key, value in tensors.items()}))
    again = learner_class(name).from_state(kept, json.loads(json.dumps(settings))).predict(runs)
    for target, values in predicted.items():
        np.testing.assert_allclose(again[target], values, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize(("name", "targets"), [("memory-forest", ["memory"]), ("trees", ["memory", "time"])])
def test_physics_with_a_constant_is_learnt_closely(name: str, targets: list[str], runs: list[Run]) -> None:
    kind: Any = learner_class(name)
    learner: Trainable = kind(trees=300)
    learner.fit(runs)
    predicted = learner.predict(runs)
    for target in targets:
        error = np.abs(np.exp(predicted[target] - np.array([run.labels[target] for run in runs])) - 1)
        assert np.median(error) < 0.06, target


def test_bracketing_pair_moves_the_prediction_between(runs: list[Run]) -> None:
    """No memory is measured; of each network one batch fitted and the next did not. The truth is twice the live bytes."""
    start = column(runs, "log_live")
    bounded = []
    for index, run in enumerate(runs):
        capacity = math.exp(start[index // 5 * 5 + 2]) * 2  # the third batch of each five is at the limit
        fits = math.exp(start[index]) * 2 <= capacity
        bounded.append(run._replace(labels={}, capacity_bytes=int(capacity), fits=fits, structure=f"s{index // 5}"))
    learner = TrainableMemory(trees=60)
    learner.fit(bounded)
    says = learner.predict(bounded)["memory"]
    right = [(value <= math.log(run.capacity_bytes)) == run.fits for value, run in zip(says, bounded, strict=True)]
    assert np.mean(right) > 0.9
    physics = [(value <= math.log(run.capacity_bytes)) == run.fits for value, run in zip(start, bounded, strict=True)]
    assert np.mean(physics) < 0.85


@pytest.fixture(scope="module")
def table() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    x = random.normal(size=(300, 5)).astype(np.float32)
    return x, np.sin(x[:, 0]) + x[:, 1] * x[:, 2]


def test_trees_as_arrays_say_what_scikit_learn_says(table: tuple[Any, Any]) -> None:
    x, y = table
    boosting = HistGradientBoostingRegressor(max_iter=30).fit(x, y)
    np.testing.assert_allclose(forest_of_boosting(boosting).predict(x), boosting.predict(x), atol=1e-5)
    bagging = ExtraTreesRegressor(20, max_leaf_nodes=30, random_state=0).fit(x, y)
    np.testing.assert_allclose(forest_of_bagging(bagging).predict(x), bagging.predict(x), atol=1e-5)


def test_trees_that_lead_astray_are_refused(table: tuple[Any, Any]) -> None:
    x, y = table
    tensors = tensors_of({"t": forest_of_boosting(HistGradientBoostingRegressor(max_iter=3).fit(x, y))})
    number = x.shape[1]
    assert np.array_equal(
        Forest.from_tensors(tensors, "t", number).predict(x), Forest.from_tensors(dict(tensors), "t", number).predict(x)
    )
    for field, value in (("left", 10**6), ("right", 0), ("roots", -1), ("feature", -1), ("feature", number)):
        changed = {key: tensor.clone() for key, tensor in tensors.items()}
        changed[f"t.{field}"][0] = value
        with pytest.raises(ValueError, match="damaged"):
            Forest.from_tensors(changed, "t", number)


def errors_of(target: str, group: str, residuals: Any, spreads: Any) -> pd.DataFrame:
    """Held-out runs of one source."""
    return pd.DataFrame({"residual": residuals, "spread": spreads}).assign(
        target=target, group=group, source="", measured=lambda lines: lines["residual"], predicted=0.0
    )


def test_intervals_hold_on_what_is_drawn_alike() -> None:
    random = np.random.default_rng(1)
    spreads = random.uniform(0.01, 0.2, size=4000)
    residuals = random.standard_t(4, size=4000) * (spreads + 0.02)
    calibration = calibrated(errors_of("memory", "a", residuals[:2000], spreads[:2000]))
    sigmas = [calibration.log_sigma("memory", "a", spread) for spread in spreads[2000:]]
    assert 0.87 < np.mean(np.abs(residuals[2000:]) <= 1.645 * np.array(sigmas)) < 0.93


def test_operators_do_not_widen_intervals_of_steps() -> None:
    steps = errors_of("time", "a", np.tile([0.1, -0.1], 100), 0.02)
    operators = [errors_of("time", group, np.tile([3.0, -3.0], 1000), 0.0) for group in (OPERATOR, on_new_gpu(OPERATOR))]
    with_them, alone = calibrated(pd.concat([steps, *operators])), calibrated(steps)
    assert with_them.log_sigma("time", "b", 0.02) == alone.log_sigma("time", "b", 0.02)
    assert with_them.log_sigma("time", OPERATOR, 0.0) == pytest.approx(3.0 / 1.645, rel=1e-3)
    assert with_them.scale_of("time", "a", known_gpu=False) == alone.scale_of("time", "a")  # no whole step on a new GPU
