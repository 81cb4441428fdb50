"""What a configuration needed when it ran before decides on it, and no prediction does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from perfguard import Device, Observation
from perfguard.budget import Limit
from perfguard.own_runs import by_graph, judged_by
from perfguard.verdict import Verdict
from tests.perfguard.log_rows import CPU, DEVICE, MEASUREMENT, PREDICTION, make_graph

GRAPH = make_graph()


def pruned(**limits: float) -> Verdict:
    """A verdict on a trial that is predicted to exceed all of ``limits``."""
    estimates = {"memory": PREDICTION.peak_memory, "step_time": PREDICTION.step_time, "time": PREDICTION.total_time}
    found: list[Any] = [Limit(name, limit, estimates[name]) for name, limit in limits.items()]  # type: ignore[arg-type]
    verdict = Verdict.of(PREDICTION, found, accepted=0.5)
    assert verdict.action == "prune"
    return verdict


def runs(*changes: dict[str, Any]) -> Sequence[Observation]:
    return [Observation(GRAPH, DEVICE, replace(MEASUREMENT, **change)) for change in changes]


@pytest.mark.parametrize(
    ("limits", "readings", "action"),
    [
        ({"memory": 900.0}, [{"peak_memory_bytes": 800}], "launch"),
        ({"memory": 900.0}, [{"peak_memory_bytes": 950}], "prune"),
        ({"memory": 900.0}, [{"peak_memory_bytes": 800}, {"peak_memory_bytes": 810}, {"peak_memory_bytes": 1300}], "launch"),
        ({"memory": 900.0}, [{"peak_memory_bytes": None}], "prune"),
        ({"memory": 900.0}, [{"peak_memory_bytes": 800, "cut_short": "by the tuner"}], "prune"),
        ({"step_time": 0.2}, [{"step_time_s": 0.15}], "launch"),
        ({"time": 20.0}, [{"total_time_s": 15.0, "num_steps": 100}], "launch"),
        ({"time": 20.0}, [{"total_time_s": 15.0, "num_steps": 50}], "prune"),  # half of the steps
        ({"time": 20.0, "memory": 900.0}, [{"total_time_s": 15.0, "peak_memory_bytes": 950}], "prune"),
        ({"time": 20.0, "memory": 900.0}, [{"total_time_s": 15.0, "peak_memory_bytes": 850}], "launch"),
    ],
)
def test_own_readings_decide(limits: dict[str, float], readings: list[dict[str, Any]], action: str) -> None:
    verdict = judged_by(pruned(**limits), runs(*readings), steps=100)
    assert verdict.action == action
    assert not verdict.is_overruled
    assert bool(verdict.grounds) == (action == "launch")


@pytest.mark.parametrize(("device", "action"), [(DEVICE, "prune"), (CPU, "launch")])
def test_a_resident_set_is_doubted_by_what_equal_readings_scatter_by(device: Device, action: str) -> None:
    verdict = replace(pruned(memory=900.0), accepted=0.8)
    read = [Observation(GRAPH, device, replace(MEASUREMENT, peak_memory_bytes=930))]
    assert judged_by(verdict, read, steps=100).action == action


def test_without_a_run_the_prediction_decides() -> None:
    verdict = pruned(memory=900.0)
    assert judged_by(verdict, [], steps=100) is verdict
    assert judged_by(replace(verdict, is_ruled_out=True), runs({"peak_memory_bytes": 1}), steps=100).action == "prune"


def test_a_larger_phase_than_the_step_is_not_known_from_runs_of_the_step() -> None:
    verdict = replace(pruned(memory=900.0), phase="the evaluation")
    assert judged_by(verdict, runs({"peak_memory_bytes": 10}), steps=100) is verdict
    assert judged_by(verdict, runs({"status": "oom"}), steps=100) is verdict


def test_what_ran_out_of_memory_whenever_it_ran_is_ruled_out_while_it_is_doubtful() -> None:
    failed = judged_by(pruned(memory=900.0), runs({"status": "oom", "peak_memory_bytes": 700}), steps=100)
    assert failed.is_ruled_out
    assert failed.reason.startswith("needs more than the 700 B at which it ran out of memory before")
    mixed = runs({"status": "oom"}, {"peak_memory_bytes": 850})
    assert judged_by(pruned(memory=900.0), mixed, steps=100).action == "launch", "another program held memory, that time"


def test_runs_are_found_by_their_graph() -> None:
    other = Observation(make_graph(4), DEVICE, MEASUREMENT)
    found = by_graph([*runs({}, {}), other])
    assert [len(found[one.content_hash]) for one in (GRAPH, other.graph)] == [2, 1]
