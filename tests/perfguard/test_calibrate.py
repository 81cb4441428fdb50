"""A calibration runs PerfGuard's own steps for real, and leaves them to every guard of the device."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perfguard import Device, Guard, MeasurementStore, resolve_device
from perfguard import calibrate as module
from perfguard.calibrate import build, calibrate, candidates
from perfguard.exceptions import MeasuringError
from perfguard.learning import CALIBRATION
from perfguard.measure.step import run_steps, step_of
from perfguard.record import TrialRecord
from tests.doubles import TOY_CPU, ReplayPredictor


@pytest.fixture
def log() -> MeasurementStore:
    return MeasurementStore(":memory:")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three small steps of few repetitions."""
    params = {"network": "perceptron", "batch_size": 2, "mode": "train", "precision": "fp32"}
    monkeypatch.setattr(module, "candidates", lambda device: [params | {"width": width} for width in (8, 16, 32)])
    monkeypatch.setattr(module, "run_steps", lambda *args, **named: run_steps(*args, **(named | {"seconds": 0.0})))


def run_widths(records: Sequence[TrialRecord]) -> set[int]:
    return {record.params["width"] for record in records if record.status == "ok"}


def test_calibration_is_a_study_from_which_other_studies_learn(log: MeasurementStore) -> None:
    assert run_widths(calibrate(TOY_CPU, log, predictor=ReplayPredictor())) == {8, 16, 32}
    assert {record.study for record in log.records()} == {CALIBRATION}
    assert Guard(TOY_CPU, log=log, predictor=ReplayPredictor()).num_learnt == 3
    for run in log.observations(TOY_CPU):  # a trial learns no overhead from it
        measured = run.measurement
        assert measured.total_time_s == pytest.approx(measured.num_steps * (run.measured("time") or 0))


def test_ctrl_c_keeps_what_was_measured(log: MeasurementStore, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = module.measured_step

    def interrupted(make: Any, device: Device) -> Any:
        if len(log.observations(device)) == 2:
            raise KeyboardInterrupt
        return measure(make, device)

    monkeypatch.setattr(module, "measured_step", interrupted)
    assert len(run_widths(calibrate(TOY_CPU, log, predictor=ReplayPredictor()))) == 2


def test_no_step_runs_where_memory_is_too_small(log: MeasurementStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=2 * 2**20))
    params = {"network": "perceptron", "width": 2048, "batch_size": 2, "mode": "train", "precision": "fp32"}
    monkeypatch.setattr(module, "candidates", lambda device: [params])
    with pytest.raises(MeasuringError, match=r"No step was measured on Toy: needs at least .* the budget is 1.00 MiB"):
        calibrate(TOY_CPU, log, predictor=ReplayPredictor())
    assert not log.observations(TOY_CPU)


def test_a_step_that_fails_is_noted_and_the_others_run(log: MeasurementStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(workload: Any) -> Any:
        if next(workload.model.parameters()).shape[0] == 16:
            raise RuntimeError("a kernel is missing")
        return step_of(workload)

    monkeypatch.setattr(module, "step_of", fails)
    records = calibrate(TOY_CPU, log, predictor=ReplayPredictor())
    assert run_widths(records) == {8, 32}
    (failed,) = (record for record in records if record.status != "ok")
    assert (failed.status, failed.note) == ("failed", "RuntimeError: a kernel is missing")


def test_time_that_is_over_starts_no_step(log: MeasurementStore) -> None:
    with pytest.raises(MeasuringError, match="there was no time for one"):
        calibrate(TOY_CPU, log, seconds=-1.0, predictor=ReplayPredictor())


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
