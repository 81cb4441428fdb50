"""Estimates are what they say, and predictors are found by their entry point."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfguard.exceptions import PredictorError
from perfguard.predictor import ENTRY_POINT_GROUP, Estimate, Prediction, Predictor, load_predictor

estimates = st.builds(Estimate, st.floats(1e-6, 1e12), st.floats(0.01, 2))


@pytest.mark.parametrize(
    ("probability", "value"), [(0.5, 100.0), (0.95, 117.88), (0.05, 84.83), (0.975, 121.65), (0.8413, 110.52)]
)
def test_quantiles_are_those_of_a_lognormal(probability: float, value: float) -> None:
    estimate = Estimate(median=100.0, log_sigma=0.1)
    assert estimate.quantile(probability) == pytest.approx(value, abs=0.01)
    assert estimate.p_exceeds(value) == pytest.approx(1 - probability, abs=1e-3)


def test_scaled_estimate_adds_doubt_of_the_factor() -> None:
    scaled = Estimate(2.0, 0.3).scaled(10, log_sigma=0.4)
    assert scaled.median == 20.0
    assert scaled.log_sigma == pytest.approx(0.5)
    assert Estimate(2.0, 0.3).scaled(10) == Estimate(20.0, 0.3)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
def test_an_estimate_is_positive_and_finite(wrong: float) -> None:
    with pytest.raises(PredictorError, match="An estimate must be positive and finite"):
        Estimate(wrong, 0.1)
    with pytest.raises(PredictorError, match="log_sigma must be positive and finite"):
        Estimate(1.0, wrong)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with two predictors, one of which is none."""
    (tmp_path / "toy_predictors.py").write_text(
        "class Toy:\n"
        "    name = 'toy-1'\n"
        "    def predict(self, graph, device, *, steps=None): ...\n"
        "    def fine_tune(self, observations): ...\n"
        "def nothing(): return 3\n"
    )
    metadata = tmp_path / "toy_predictors-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-predictors\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        f"[{ENTRY_POINT_GROUP}]\ntoy = toy_predictors:Toy\nnothing = toy_predictors:nothing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@given(estimates, estimates, st.floats(1e-3, 1e13), st.floats(1e-3, 1e13))
def test_parts_add_up_whatever_changes_the_prediction(
    memory: Estimate, step_time: Estimate, memory_bytes: float, step_s: float
) -> None:
    prediction = Prediction(
        *(memory, step_time, None, "double-1", "toy", True),
        memory_parts_bytes={"activations": 3e5, "context": 7e5},
        time_parts_s={"host": 1.0, "device": 2.0},
        time_by_kind_s={"conv": 5.0, "start": 1.0},
    )
    for changed in (prediction, prediction.at_least(memory_bytes, step_s), prediction.widened({"time": 2.0})):
        expected = pytest.approx(changed.peak_memory.median, rel=1e-9, abs=1e-6)
        assert sum(changed.memory_parts_bytes.values()) == expected
        assert changed.memory_parts_bytes["context"] == 7e5
        assert sum(changed.time_parts_s.values()) == pytest.approx(changed.step_time.median, rel=1e-9)
        assert sum(changed.time_by_kind_s.values()) == pytest.approx(changed.step_time.median, rel=1e-9)
        assert changed.time_parts_s["device"] == pytest.approx(2 * changed.time_parts_s["host"], rel=1e-9)


@pytest.mark.usefixtures("installed")
def test_load_predictor_finds_entry_point_by_name() -> None:
    predictor = load_predictor("toy")
    assert isinstance(predictor, Predictor)
    assert predictor.name == "toy-1"
    with pytest.raises(PredictorError, match="'toy_predictors:nothing' of predictor 'nothing' did not return a Predictor"):
        load_predictor("nothing")
    with pytest.raises(PredictorError, match=r"No predictor is called 'guardnot'\. Installed: .*toy"):
        load_predictor("guardnot")
