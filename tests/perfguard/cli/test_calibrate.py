"""`perfguard calibrate`, for real on the processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfguard import MeasurementStore
from perfguard.cli import main
from perfguard.learning import CALIBRATION


def test_calibrate_prints_the_summary_of_its_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.db"
    assert main(["calibrate", "--gpu", "cpu", "--seconds", "1", "--log", str(path)]) == 0
    printed, told = capsys.readouterr()
    assert "calibrate" not in told, "it does not advise itself"
    with MeasurementStore(path) as log:
        records = log.records()
    assert {record.study for record in records} == {CALIBRATION}
    number = sum(record.status == "ok" for record in records)
    assert "prediction error, step time" in printed
    last = printed.splitlines()[-1]
    assert last.startswith(f"{number} steps in ")
    assert last.endswith(f"in the log {path}.")


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--seconds", "0"], 2, "--seconds must be positive, but is 0."),
        (["--gpu", "b100000"], 2, "b100000"),
        (["--gpu", "t4"], 1, "but this machine has the"),
    ],
)
def test_what_cannot_be_calibrated_is_explained(
    words: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["calibrate", *words]) == status
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
