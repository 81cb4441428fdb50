"""The predictors of the papers: their networks, and how they are served."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from perfguard.devices import resolve_device
from perfguard.exceptions import PredictorError
from perfguard.graph import OpGraph
from perfguard.measure import Measurement
from perfguard.predictor import Observation, Predictor
from perfguard_models import guardnet
from perfguard_models.calibration import NEW_GPU, Calibration
from perfguard_models.trained import write_trained
from perfguard_research.dataset import Run
from perfguard_research.papers import served
from perfguard_research.papers.layers import FEATURE_SETS
from perfguard_research.papers.perfseer import pcgrad
from tests.laws import fitted, some_graphs, some_runs


@pytest.fixture
def graphs() -> list[OpGraph]:
    return some_graphs()


@pytest.fixture
def runs() -> list[Run]:
    return some_runs()


@pytest.mark.parametrize("name", ["dnnperf", "perfseer", "dippm", "lilou"])
def test_paper_network_answers_within_its_range(name: str, runs: list[Run]) -> None:
    learner = fitted(name, runs, epochs=5)
    huge = [
        run._replace(view=run.view | {"nodes": run.view["nodes"] * 1e9, "globals": run.view["globals"] * 1e9}) for run in runs
    ]
    seen = [run.labels["time"] for run in runs]
    margin = max(1.0, float(np.std(seen)))
    said = learner.predict(huge)["time"]
    assert ((said >= min(seen) - margin - 1e-3) & (said <= max(seen) + margin + 1e-3)).all()


def test_gradient_surgery_takes_out_what_conflicts() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    first, second = torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 1.0])
    pcgrad([(parameter * first).sum(), (parameter * second).sum()], [parameter])
    # (1, 0) loses its part along (-1, 1), and becomes (0.5, 0.5); (-1, 1) loses its part along (1, 0), and becomes (0, 1).
    assert parameter.grad is not None
    torch.testing.assert_close(parameter.grad, torch.tensor([0.5, 1.5]))


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
    assert first.gpu_util is not None
    assert 0 < first.gpu_util < 1
    slow = Measurement("ok", known.id, known.name, None, first.step_time.median * 3, 1.0, 10, "test", "")
    predictor.fine_tune([Observation(graphs[0], known, slow)] * 9)
    assert 2 < predictor.predict(graphs[0], known).step_time.median / first.step_time.median < 3
    assert predictor.predict(graphs[0], known).peak_memory == first.peak_memory


def test_paper_without_an_answer_uses_physics_unsurely(runs: list[Run], graphs: list[OpGraph], tmp_path: Path) -> None:
    card = {"version": 1, "trained_devices": []}
    learner = fitted("lilou", runs)
    write_trained(tmp_path / "lilou", "lilou", learner, card, Calibration({}, {}), feature_sets=FEATURE_SETS)
    prediction = served.load("lilou", tmp_path / "lilou").predict(graphs[0], resolve_device("a100"))
    assert prediction.peak_memory.median >= graphs[0].peak_live_bytes
    assert prediction.peak_memory.log_sigma == 1.0
    assert prediction.gpu_util is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 99}, "another format"),
        ({"sha256": "0" * 64}, "do not match the hash"),
        ({"columns": "0"}, "made for other features"),
        ({"settings": {"hidden": 8}}, "do not fit the predictor"),
        ({"predictor": "unknown"}, "No predictor that can be trained is called 'unknown'"),
    ],
)
def test_weights_that_cannot_be_right_are_refused(weights: Path, change: dict[str, Any], message: str) -> None:
    path = weights.with_suffix(".json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(PredictorError, match=message):
        served.load("dippm", weights)


def test_missing_weights_say_how_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(PredictorError, match="perfguard train TABLE --predictor dippm"):
        served.load("dippm", tmp_path / "nothing")


def test_guardnet_refuses_weights_of_another_predictor() -> None:
    # GuardNet is installed without the other predictors' code: it must say so, not fail on a missing class.
    with pytest.raises(PredictorError, match=r"GuardNet has no learner 'trees'.*another predictor's weights"):
        guardnet.load(Path(str(files("perfguard_research") / "weights" / "trees")))
