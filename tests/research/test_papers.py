"""The predictors of the papers: their networks, and how they are served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfguard.devices import resolve_device
from perfguard.exceptions import PredictorError
from perfguard.graph import OP_KINDS, OpGraph
from perfguard.measure import Measurement
from perfguard.predictor import Observation, Predictor
from perfguard_models.calibration import NEW_GPU, Calibration
from perfguard_models.trained import write_trained
from perfguard_research.dataset import Run, folds
from perfguard_research.learners import learner_class
from perfguard_research.papers import served
from perfguard_research.papers.layers import FEATURE_SETS, GLOBAL_COLUMNS
from tests.laws import fitted, some_graphs, some_runs


@pytest.fixture
def graphs() -> list[OpGraph]:
    return some_graphs()


@pytest.fixture
def runs() -> list[Run]:
    return some_runs("dippm")


@pytest.mark.parametrize("name", ["dnnperf", "perfseer", "dippm", "lilou"])
def test_paper_network_answers_within_its_range(name: str) -> None:
    runs = some_runs(name)
    learner = fitted(name, runs, epochs=2)
    huge = [
        run._replace(view=run.view | {"nodes": run.view["nodes"] * 1e9, "globals": run.view["globals"] * 1e9}) for run in runs
    ]
    seen = [run.labels["time"] for run in runs]
    margin = max(1.0, float(np.std(seen)))
    said = learner.predict(huge)["time"]
    assert ((said >= min(seen) - margin - 1e-3) & (said <= max(seen) + margin + 1e-3)).all()


@pytest.mark.parametrize(
    ("name", "others"), [("dnnperf", "infer"), ("dnnabacus", "infer"), ("dippm", "train"), ("lilou", "train")]
)
def test_paper_is_silent_outside_its_scope(name: str, others: str) -> None:
    runs = some_runs(name)
    learner = fitted(name, runs, **({} if name == "dnnabacus" else {"epochs": 1}))
    assert np.isfinite(learner.predict(runs[:3])["time"]).all()
    outside = [_with(run, globals=_set(run.view["globals"], "train", run.mode == "infer")) for run in runs[:3]]
    assert np.isnan(learner.predict(outside)["time"]).all()


def test_perfseer_knows_utilisation_only_where_it_was_measured() -> None:
    runs = some_runs("perfseer")
    bare = {name: value for name, value in runs[0].labels.items() if name in ("memory", "time")}
    learner = fitted("perfseer", [run if run.gpu.startswith("a100") else run._replace(labels=bare) for run in runs], epochs=1)
    known, other_card = runs[0], runs[-1]
    other_kind = _with(known, kind=np.full_like(known.view["kind"], OP_KINDS.index("attention")))
    predicted = learner.predict([known, other_card, other_kind])
    assert np.isfinite(predicted["time"]).all()
    assert np.isfinite(predicted["sm_active"]).tolist() == [True, False, False]


@pytest.mark.parametrize("name", ["dnnperf", "dippm"])
def test_training_keeps_the_epoch_with_the_smallest_validation_error(name: str) -> None:
    runs = [run._replace(family=f"f{at % 10}") for at, run in enumerate(some_runs(name))]
    errors: list[float] = []
    learner = fitted(name, runs, epochs=6, on_epoch=lambda done, of, error: errors.append(error))
    held_out = folds(runs, "family", number=8, seed=0)[-1].judge
    chosen = [runs[at] for at in held_out]
    predicted = learner.predict(chosen)
    scale = learner._labels[1]  # type: ignore[attr-defined]
    error = sum(
        np.abs(predicted[target] - [run.labels[target] for run in chosen]).mean() / float(scale[at])
        for at, target in enumerate(("memory", "time"))
    )
    assert error <= min(errors) + 1e-4


def test_training_stops_a_third_of_its_epochs_after_the_best() -> None:
    learner: Any = learner_class("perfseer")
    errors: list[float] = []
    at_rest = learner(epochs=9, hidden=8, learning_rate=0.0)  # no epoch is better than the first
    at_rest.fit(some_runs("perfseer"), on_epoch=lambda done, of, error: errors.append(error))
    assert len(errors) == 1 + 9 // 3 + 1


def _with(run: Run, **arrays: Any) -> Run:
    return run._replace(view=run.view | arrays)


def _set(facts: Any, name: str, value: float) -> Any:
    changed = facts.copy()
    changed[GLOBAL_COLUMNS.index(name)] = value
    return changed


# Calibration


@pytest.fixture
def weights(runs: list[Run], tmp_path: Path) -> Path:
    calibration = Calibration({"memory": 0.02, "time": 0.05}, {"memory": 1.5, "time": 1.5, f"time/{NEW_GPU}": 6.0})
    card = {"version": 1, "trained_devices": ["a100-pcie-40gb"]}
    learner = fitted("dippm", runs)
    write_trained(tmp_path / "dippm", "dippm", learner, card, calibration, feature_sets=FEATURE_SETS)
    return tmp_path / "dippm"


def test_served_weights_predict_and_learn_an_offset(weights: Path, graphs: list[OpGraph]) -> None:
    predictor = served.load("dippm", weights)
    assert isinstance(predictor, Predictor)
    known, new = resolve_device("a100"), resolve_device("h100")
    first = predictor.predict(graphs[0], known, steps=10)
    assert first.trained_on_device
    assert not predictor.predict(graphs[0], new).trained_on_device
    assert predictor.predict(graphs[0], new).step_time.log_sigma > 3 * first.step_time.log_sigma
    assert first.total_time is not None
    assert first.total_time.median == pytest.approx(10 * first.step_time.median)
    assert first.gpu_util is None  # no paper but PerfSeer has it
    slow = Measurement("ok", known.id, known.name, None, first.step_time.median * 3, 1.0, 10, "test", "")
    predictor.fine_tune([Observation(graphs[0], known, slow)] * 9)
    assert 2 < predictor.predict(graphs[0], known).step_time.median / first.step_time.median < 3
    assert predictor.predict(graphs[0], known).peak_memory == first.peak_memory


def test_paper_without_an_answer_uses_physics_unsurely(graphs: list[OpGraph], tmp_path: Path) -> None:
    card = {"version": 1, "trained_devices": []}
    learner = fitted("lilou", some_runs("lilou"), epochs=2)
    write_trained(tmp_path / "lilou", "lilou", learner, card, Calibration({}, {}), feature_sets=FEATURE_SETS)
    prediction = served.load("lilou", tmp_path / "lilou").predict(graphs[0], resolve_device("a100"))
    assert prediction.peak_memory.median >= graphs[0].peak_live_bytes
    assert prediction.peak_memory.log_sigma == 1.0
    assert prediction.gpu_util is None


def test_weights_that_cannot_be_right_are_refused(weights: Path, tmp_path: Path) -> None:
    """The files are those of GuardNet's weights, whose test damages them in every way."""
    path = weights.with_suffix(".json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"predictor": "unknown"}))
    with pytest.raises(PredictorError, match="No predictor that can be trained is called 'unknown'"):
        served.load("dippm", weights)
    with pytest.raises(PredictorError, match="perfguard train TABLE --predictor dippm"):
        served.load("dippm", tmp_path / "nothing")


@pytest.mark.parametrize("name", ["dnnperf", "dnnabacus", "perfseer", "dippm", "lilou", "trees"])
def test_shipped_weights_fit_the_code(name: str, graphs: list[OpGraph]) -> None:
    prediction = served.load(name).predict(graphs[0], resolve_device("rtx3090"))
    assert prediction.predictor.startswith(name)
    assert prediction.sm_active is None  # a network of convolutions: no such run was measured
