"""Intervals of runs that were held out, and what the leaderboard makes of them."""

from __future__ import annotations

import numpy as np
import pytest

from perfguard_research.dataset import Fold, Run
from perfguard_research.intervals import FoldPredictions, judged
from perfguard_research.leaderboard import as_markdown, entries, fit_scores
from tests.rows import run_on, step_on

NUMBER = 300
PART = NUMBER // 2


def run(index: int, log_bytes: float, *, fits: bool = True) -> Run:
    labels = {"memory": log_bytes} if fits else {}
    return run_on(step_on(), table="workload", family=f"f{index}", structure=f"s{index}", labels=labels, fits=fits)


@pytest.fixture
def runs() -> list[Run]:
    """Logarithms around 20 with a standard deviation of 0.1."""
    return [run(index, value) for index, value in enumerate(np.random.default_rng(0).normal(20, 0.1, NUMBER))]


def predictions(runs: list[Run], values: list[float]) -> FoldPredictions:
    """Two folds. A predictor that says 20 of everything, ``values`` of what comes after."""
    folds = []
    for start in (0, PART):
        judge = list(range(start, start + PART)) + (list(range(NUMBER, len(runs))) if start else [])
        said = np.array([20.0] * PART + (values if start else []))
        nothing = np.full(len(judge), np.nan)
        spread = np.full(len(judge), 0.05)
        folds.append(
            (
                Fold("", [], judge),
                {"memory": said, "time": nothing, "gpu_util": nothing, "sm_active": nothing}
                | {"spread memory": spread, "spread time": spread},
            )
        )
    return folds


def test_interval_is_calibrated_on_the_other_folds(runs: list[Run]) -> None:
    shifted = [one._replace(labels={"memory": one.labels["memory"] + 3}) if i < PART else one for i, one in enumerate(runs)]
    lines = judged(shifted, "family", predictions(shifted, []))
    sigmas = lines[lines["target"] == "memory"].groupby("fold")["log_sigma"]
    assert np.allclose(sigmas.get_group(0), 0.1, rtol=0.2)  # from the second fold, which is near
    assert (sigmas.get_group(1) > 1).all()  # from the first, which is far off
    assert lines[lines["target"] == "time"]["log_sigma"].isna().all()


def test_leaderboard_has_interval_coverage_and_width(runs: list[Run]) -> None:
    found = {("family", "p"): predictions(runs, [])}
    errors, fits = entries(runs, found), fit_scores(runs, found)
    (line,) = (line for _, line in errors.iterrows())
    assert line.coverage == pytest.approx(0.9, abs=0.04)
    assert line.width == pytest.approx(2 * 1.645 * 0.1, rel=0.2)
    assert "| t4 train fp32 nchw | 300 | " in as_markdown(errors, fits, ["p"])
    assert "### 90% intervals of memory, split by family" in as_markdown(errors, fits, ["p"])


def test_fit_scores_refuse_at_risk_within_the_interval(runs: list[Run]) -> None:
    """At the default risk a run is refused whose interval reaches the memory of the card."""
    limit = float(np.log(1e10))
    some = [*runs, *(run(NUMBER + at, 0, fits=False) for at in range(3))]
    scores = fit_scores(some, {("family", "p"): predictions(some, [limit + 0.01, limit - 0.05, limit - 0.5])})
    (score,) = (line for _, line in scores.iterrows())
    assert (score.failed, score.fitting) == (3, NUMBER)
    assert score.caught == pytest.approx(1 / 3)  # the median
    assert score.caught_at_risk == pytest.approx(2 / 3)  # 1.645 standard deviations of 0.1 reach the limit
    assert score.pruned == score.pruned_at_risk == 0


def test_new_gpu_has_an_error_group_of_its_own(runs: list[Run]) -> None:
    found = predictions(runs, [])
    assert set(judged(runs, "gpu", found)["group"]) == {"new gpu"}
    assert set(judged(runs, "family", found)["group"]) == {"t4 train fp32"}
