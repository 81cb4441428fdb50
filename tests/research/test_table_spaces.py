"""The search on measured tables (`benchmarks/search_quality.py`): which rows count, and that its guard is the one of users."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import optuna
import pytest

from perfguard import Workload
from perfguard_models.calibration import Setting
from perfguard_models.features.step import STEP_FEATURES
from perfguard_research.dataset import Run

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from _table_guard import guard_of, measurement_of
from _table_spaces import Point, Space, is_impossible
from search_quality import Outcome, Study, _one_trial

GIB = 2**30
LIMIT = 16 * GIB


def sums_of(live_bytes: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    sums = np.zeros(len(STEP_FEATURES), dtype=np.float32)
    sums[[STEP_FEATURES.index(name) for name in ("log_live", "log_reserved")]] = math.log(live_bytes)
    return sums


def run(*, live_gib: float, read_gib: float | None = None, fits: bool = True) -> Run:
    setting = Setting("rtx3090", "train", "fp32", "fp32", "nchw", False, True, False, False)
    labels = {} if read_gib is None else {"memory": math.log(read_gib * GIB)}
    return Run(
        "workload", "source", "family", "model", "structure", 8, setting, labels, LIMIT, fits, {"sums": sums_of(live_gib * GIB)}
    )


def point(name: str, *, live_gib: float, truth_gib: float, predicted_gib: float, time_s: float = 0.1) -> Point:
    return Point(
        name=name,
        ran=True,
        memory_bytes=truth_gib * GIB,
        is_read=True,
        live_bytes=live_gib * GIB,
        step_s=time_s,
        sums=sums_of(live_gib * GIB),
        memory=(predicted_gib * GIB, 0.1),
        time=(time_s, 0.1),
        loss=0.0,
    )


def space_of(*points: Point, time_budget_s: float | None = None) -> Space:
    return Space(
        "space", "rtx3090", LIMIT, time_budget_s, ("a",), {"rank": len(points)}, {("a", i): p for i, p in enumerate(points)}
    )


@pytest.mark.parametrize(
    ("one", "is_so"),
    [
        (run(live_gib=17), True),
        (run(live_gib=15), False),
        (run(live_gib=9, read_gib=8), True),
        (run(live_gib=7, read_gib=8), False),
        (run(live_gib=17, fits=False), False),
    ],
)
def test_run_that_fitted_in_less_than_its_tensors_is_impossible(one: Run, is_so: bool) -> None:
    """A search on such rows would blame the guard for what no allocator can do."""
    assert is_impossible(one) == is_so


def test_guard_of_a_table_learns_from_its_trials() -> None:
    space = space_of(*(point(str(i), live_gib=8 + i, truth_gib=9 + i, predicted_gib=1.25 * (9 + i)) for i in range(4)))
    guard = guard_of(space, knows=False).guard
    graph = guard.trace(Workload(space.at({"family": "a", "rank": 3}), inputs=(1,)))  # type: ignore[arg-type]
    before = guard.predict(graph).peak_memory.median
    for rank in range(3):
        read = space.at({"family": "a", "rank": rank})
        decision = guard.decide(Workload(read, inputs=(1,), optimizer=None), study="s")  # type: ignore[arg-type]
        guard.learn(decision, measurement_of(space, read, lasts_s=read.trial_s))
    assert before == pytest.approx(15 * GIB)
    assert guard.predict(graph).peak_memory.median == pytest.approx(12 * GIB, rel=0.08)


def test_physics_rules_a_point_of_a_table_out() -> None:
    space = space_of(point("a", live_gib=17, truth_gib=20, predicted_gib=15))
    verdict = guard_of(space, knows=False).guard.preview(Workload(space.at({"family": "a", "rank": 0}), inputs=(1,)))  # type: ignore[arg-type]
    assert (verdict.action, "at least 17.0 GiB" in verdict.bound) == ("prune", True)


def test_trial_over_the_time_budget_is_stopped_and_its_pace_is_read() -> None:
    slow = point("a", live_gib=1, truth_gib=2, predicted_gib=2, time_s=0.5)
    space = space_of(slow, time_budget_s=900)
    measured = measurement_of(space, slow, lasts_s=100)
    assert space.fails_by(slow) == "time"
    assert (measured.status, measured.cut_short, measured.num_steps, measured.step_time_s) == ("ok", "too slow", 200, 0.5)


@pytest.mark.parametrize("is_free", [True, False])
def test_a_configuration_that_has_run_takes_time_again_unless_repeats_are_free(is_free: bool) -> None:
    fitting = point("a", live_gib=1, truth_gib=2, predicted_gib=2)
    work = Study(space_of(fitting), "none", seed=0, has_free_repeats=is_free)
    study, outcome = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)), Outcome()
    for _ in range(3):
        _one_trial(study, work, None, outcome)
    assert outcome.launched == 3
    assert outcome.finished == {"a"}
    assert outcome.time_s == pytest.approx(fitting.trial_s * (1 if is_free else 3))
