"""What the tracker writes, read back from a real MLflow store, a W&B file and a TensorBoard file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perfguard.exceptions import ConfigurationError, TrackingWarning
from perfguard.tracking import Tracker, fields_of
from tests.perfguard.test_explain import record as explained_record
from tests.perfguard.test_record import GIB, record

RAN = record("launched", status="ok", measured={"memory": 4 * GIB, "time": 80.0})


def test_the_fields_are_those_of_the_record() -> None:
    fields = fields_of(RAN)
    assert fields["perfguard/verdict"] == "launched"
    assert fields["perfguard/memory_predicted_bytes"] == 5 * GIB
    assert fields["perfguard/memory_limit_bytes"] == 10 * GIB
    assert fields["perfguard/time_measured_s"] == 80.0
    assert fields["perfguard/over_budget"] == 1.0
    assert "perfguard/energy_predicted_j" not in fields
    assert fields_of(record("pruned for memory"))["perfguard/verdict"] == "pruned"
    assert "perfguard/account" not in fields_of(explained_record()), "a text of a thousand characters is for `perfguard explain`"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's own, with SQLAlchemy 2.1
def test_mlflow(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    tracker = Tracker("mlflow", tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    tracker.write("trial 3", RAN, {"value": 0.5})
    (run,) = mlflow.search_runs(output_format="list")
    assert run.info.run_name == "trial 3"
    assert run.data.metrics["perfguard/time_measured_s"] == 80.0
    assert run.data.metrics["value"] == 0.5
    assert run.data.tags["perfguard/verdict"] == "launched"


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracker = Tracker("wandb", project="perfguard", mode="offline", dir=str(tmp_path))
    tracker.write("trial 0", RAN)
    assert wandb.run.summary["perfguard/time_measured_s"] == 80.0
    wandb.finish()
    assert list(tmp_path.rglob("*.wandb"))


def test_a_tracker_that_fails_warns_once_and_catches_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    tracker = Tracker("tensorboard", log_dir=str(tmp_path))
    written: list[str] = []
    is_away = True

    def write(name: str, fields: Any) -> None:
        if is_away:
            raise ConnectionError("no answer")
        written.append(name)

    monkeypatch.setattr(tracker, "_write", write)
    with pytest.warns(TrackingWarning, match="could not write into tensorboard .*ConnectionError: no answer"):
        tracker.write("trial 0", RAN)
    tracker._not_before_s = 0.0
    tracker.write("trial 1", RAN)  # a second warning would be an error here
    is_away, tracker._not_before_s = False, 0.0
    tracker.write("trial 2", RAN)
    assert written == ["trial 0", "trial 1", "trial 2"]


def test_an_unknown_tracker_is_named() -> None:
    with pytest.raises(ConfigurationError, match="must be one of mlflow, wandb, tensorboard, but got 'comet'"):
        Tracker("comet")  # type: ignore[arg-type]
