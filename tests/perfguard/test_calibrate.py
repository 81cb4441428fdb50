"""A calibration runs PerfGuard's own steps for real, the least known first, and leaves them to every guard of the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perfguard import Device, Estimate, Guard, MeasurementStore, OpGraph, Prediction, resolve_device
from perfguard import calibrate as module
from perfguard.calibrate import CalibrationStep, build, calibrate, candidates
from perfguard.exceptions import MeasuringError
from perfguard.learning import CALIBRATION
from perfguard.measure.step import run_steps, step_of
from tests.doubles import TOY_CPU, ReplayPredictor

WIDTHS = (8, 16, 32)


class ByHeart(ReplayPredictor):
    """A double that knows the time of the steps that it has learnt, and is less sure of larger ones than of smaller ones."""

    def predict(self, graph: OpGraph, device: Device, *, steps: int | None = None) -> Prediction:
        known = [run.measured("time") for run in self.learnt if run.graph.content_hash == graph.content_hash]
        time = Estimate(known[-1] or 0.01, 0.001) if known else Estimate(0.01, 1e-6 * graph.peak_live_bytes)
        return replace(super().predict(graph, device, steps=steps), step_time=time)


@pytest.fixture
def log() -> MeasurementStore:
    return MeasurementStore(":memory:")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three small steps of few repetitions."""
    params = {"network": "perceptron", "batch_size": 2, "mode": "train", "precision": "fp32"}
    monkeypatch.setattr(module, "candidates", lambda device: [params | {"width": width} for width in WIDTHS])
    monkeypatch.setattr(module, "run_steps", lambda *args, **named: run_steps(*args, **(named | {"seconds": 0.0})))


def run_widths(steps: Sequence[CalibrationStep]) -> list[int]:
    return [step.params["width"] for step in steps if step.after]


def test_calibration_is_a_study_from_which_other_studies_learn(log: MeasurementStore) -> None:
    steps = calibrate(TOY_CPU, log, predictor=ByHeart())
    assert run_widths(steps) == list(WIDTHS)
    records = log.records()
    assert {(record.study, record.status) for record in records} == {(CALIBRATION, "ok")}
    by_number = sorted((record.number, record.params["width"]) for record in records)
    assert by_number == [(0, 32), (1, 16), (2, 8)], "the first is the one from which most is learnt"
    assert Guard(TOY_CPU, log=log, predictor=ByHeart()).num_learnt == 3


def test_a_step_is_judged_by_the_runs_of_the_others(log: MeasurementStore) -> None:
    calibrate(TOY_CPU, log, predictor=ByHeart())
    again = calibrate(TOY_CPU, log, predictor=ByHeart())
    for step in again:
        assert step.before.step_time.median != 0.01, "the log had it"
        assert step.after is not None
        assert step.after.step_time.median == 0.01, "not known from itself, or from its earlier run"


def test_a_trial_learns_no_overhead_from_calibration(log: MeasurementStore) -> None:
    calibrate(TOY_CPU, log, predictor=ByHeart())
    for run in log.observations(TOY_CPU):
        measured = run.measurement
        assert measured.total_time_s == pytest.approx(measured.num_steps * (run.measured("time") or 0))


def test_ctrl_c_keeps_what_was_measured(log: MeasurementStore, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = module.measured_step

    def interrupted(make: Any, device: Device) -> Any:
        if len(log.observations(device)) == 2:
            raise KeyboardInterrupt
        return measure(make, device)

    monkeypatch.setattr(module, "measured_step", interrupted)
    assert run_widths(calibrate(TOY_CPU, log, predictor=ByHeart())) == [16, 32]
    assert len(log.observations(TOY_CPU)) == 2


def test_no_step_runs_where_memory_is_too_small(log: MeasurementStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=2 * 2**20))
    monkeypatch.setattr(module, "candidates", lambda device: [params for params in candidates(device) if params["width"] > 500])
    with pytest.raises(MeasuringError, match=r"No step was measured on Toy: needs at least .* the budget is 1.00 MiB"):
        calibrate(TOY_CPU, log, predictor=ByHeart())
    assert not log.records()


def test_a_step_that_fails_is_noted_and_the_others_run(log: MeasurementStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(workload: Any) -> Any:
        if next(workload.model.parameters()).shape[0] == 16:
            raise RuntimeError("a kernel is missing")
        return step_of(workload)

    monkeypatch.setattr(module, "step_of", fails)
    steps = calibrate(TOY_CPU, log, predictor=ByHeart())
    assert run_widths(steps) == [8, 32]
    assert steps[1].measurement is not None
    assert (steps[1].measurement.status, steps[1].measurement.note) == ("failed", "RuntimeError: a kernel is missing")


def test_time_that_is_over_starts_no_step(log: MeasurementStore) -> None:
    with pytest.raises(MeasuringError, match="there was no time for one"):
        calibrate(TOY_CPU, log, seconds=-1.0, predictor=ByHeart())


@pytest.mark.parametrize("params", list(candidates(TOY_CPU))[::8] + list(candidates(TOY_CPU))[1::8])
def test_each_network_runs_and_trains(params: dict[str, Any]) -> None:
    workload = build(params)
    before = [parameter.clone() for parameter in workload.model.parameters()]
    step_of(workload)()
    changed = [not torch.equal(old, new) for old, new in zip(before, workload.model.parameters(), strict=True)]
    assert any(changed) == (params["mode"] == "train")


@pytest.mark.parametrize(("gpu", "half"), [("a100", "amp-bf16"), ("t4", "amp-fp16"), ("cpu", None)])
def test_gpus_run_half_precision_too(gpu: str, half: str | None) -> None:
    device = TOY_CPU if gpu == "cpu" else resolve_device(gpu)
    assert {params["precision"] for params in candidates(device)} == {"fp32", half} - {None}
