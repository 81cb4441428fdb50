"""What the callbacks for experiment trackers write, read back from a real MLflow store, a W&B file and a TensorBoard file."""

from __future__ import annotations

import io
import logging
import socket
import struct
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import FrozenTrial, TrialState, create_trial
from rich.console import Console
from torch import nn

import perfguard_optuna._study
from perfguard import Workload
from perfguard.exceptions import ConfigurationError, TrackingWarning
from perfguard_optuna import (
    DashboardCallback,
    GuardedStudy,
    MLflowCallback,
    PerfGuardPruner,
    PerfGuardSampler,
    TensorBoardCallback,
    TrialPrinter,
    WandbCallback,
    create_study,
    record_of,
    summarize,
)
from perfguard_optuna._progress import progress_line
from perfguard_optuna.tracking import TrackingCallback, tracked_fields
from tests.doubles import TOY_CPU, ReplayPredictor

GIB, MIB = 2**30, 2**20
WIDTHS = [64, 2**13, 2**9, 2**14, 128]  # the second and the fourth do not fit


@pytest.fixture(autouse=True)
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


def build(params: Mapping[str, Any]) -> Workload:
    return Workload(nn.Linear(64, params["width"]), inputs=(8, 64), loss=torch.mean, steps=3)


def objective(trial: optuna.Trial) -> float:
    width = trial.suggest_categorical("width", WIDTHS)
    model = nn.Linear(64, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(8, 64)).mean().backward()
        optimizer.step()
    return float(width)


def guard() -> PerfGuardPruner:
    return PerfGuardPruner(TOY_CPU, build=build, memory_budget="2MiB", predictor=ReplayPredictor(), log=False)


def tracked_study(*callbacks: Any, draws_again: bool = False, **options: Any) -> GuardedStudy:
    """Some trials fit and some do not. ``draws_again``: PerfGuardSampler turns these down by itself."""
    grid = optuna.samplers.GridSampler({"width": WIDTHS}, seed=1)
    pruner = guard()
    study = create_study(sampler=PerfGuardSampler(grid, pruner) if draws_again else grid, study_name="tracked")
    study.optimize(objective, pruner=pruner, callbacks=[*callbacks], **options)
    assert {record_of(trial).verdict for trial in study.trials} == {"launch", "prune"}
    return study


def numbers_of(study: optuna.Study) -> list[int]:
    return [trial.number for trial in study.trials]


class Kept(TrackingCallback):
    """Keeps what a tracker would send away; the first ``num_failures`` attempts fail."""

    name = "a list"

    def __init__(self, num_failures: int = 0) -> None:
        super().__init__()
        self.num_failures = num_failures
        self.numbers: list[int] = []

    def _write(self, study: optuna.Study, trial: FrozenTrial) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise ConnectionError("the server is down")
        self.numbers.append(trial.number)


def test_fields_by_hand() -> None:
    attributes = {
        "perfguard:schema": 2, "perfguard:verdict": "repair", "perfguard:reason": "needs 1.5 GiB", "perfguard:p_violation": 0.25,
        "perfguard:learnt_from": 4, "perfguard:predictor": "replay-1", "perfguard:status": "ok",
        "perfguard:repair:accumulation": 2, "perfguard:repair:precision": None, "perfguard:repair:checkpointing": True,
        "perfguard:memory:predicted_bytes": 3 * GIB // 2, "perfguard:memory:low_bytes": GIB,
        "perfguard:memory:high_bytes": 2 * GIB, "perfguard:memory:limit_bytes": GIB,
        "perfguard:memory:measured_bytes": 5 * GIB // 4,
        "perfguard:time:predicted_s": 60.0, "perfguard:time:low_s": 30.0, "perfguard:time:high_s": float("inf"),
    }  # fmt: skip
    assert tracked_fields(create_trial(value=0.5, user_attrs=attributes)) == {
        "perfguard/verdict": "repaired", "perfguard/reason": "needs 1.5 GiB", "perfguard/status": "ok",
        "perfguard/predictor": "replay-1", "perfguard/chance_over_budget": 0.25, "perfguard/learnt_from_runs": 4,
        "perfguard/repair_accumulation": 2, "perfguard/repair_checkpointing": 1,
        "perfguard/predicted_memory_gib": 1.5, "perfguard/predicted_memory_low_gib": 1, "perfguard/predicted_memory_high_gib": 2,
        "perfguard/memory_budget_gib": 1, "perfguard/measured_memory_gib": 1.25, "perfguard/over_budget": 1,
        "perfguard/predicted_time_s": 60, "perfguard/predicted_time_low_s": 30,
    }  # fmt: skip
    older = {"perfguard:verdict": "prune", "perfguard:reason": "takes 2 min", "perfguard:time:predicted": 120.0}
    assert tracked_fields(create_trial(state=TrialState.PRUNED, user_attrs=older)) == {
        "perfguard/verdict": "pruned", "perfguard/reason": "takes 2 min",
        "perfguard/predicted_time_s": 120, "perfguard/saved_time_s": 120,
    }  # fmt: skip
    assert tracked_fields(create_trial(value=0.5)) == {"perfguard/verdict": "unguarded"}
    failed = {"perfguard:verdict": "launch", "perfguard:reason": "not judged: BuildError: ..."}  # the guard could not judge it
    assert tracked_fields(create_trial(value=0.5, user_attrs=failed))["perfguard/verdict"] == "unguarded"


@pytest.mark.parametrize("draws_again", [False, True])
def test_each_trial_is_written_once_and_a_rejected_proposal_too(draws_again: bool) -> None:
    kept, later = Kept(), Kept()
    study = tracked_study(kept, draws_again=draws_again)
    assert sorted(kept.numbers) == numbers_of(study)
    later.write(study)
    assert later.numbers == numbers_of(study)
    assert {trial.user_attrs["perfguard:learnt_from"] for trial in study.trials} >= {0, 1, 2}


def test_a_failing_tracker_stops_no_study_and_loses_no_trial() -> None:
    kept = Kept(num_failures=2)
    with pytest.warns(TrackingWarning, match=r"to a list.*ConnectionError: the server is down") as caught:
        study = tracked_study(kept)
    assert [warning.category for warning in caught].count(TrackingWarning) == 1
    assert sorted(kept.numbers) == numbers_of(study)


def test_a_storage_that_fails_in_a_callback_stops_no_study(monkeypatch: pytest.MonkeyPatch) -> None:
    study, kept = _study_of(create_trial(value=1.0), create_trial(value=2.0)), Kept()
    first, second = study.trials

    def broken(*_: Any, **__: Any) -> Any:
        raise optuna.exceptions.StorageInternalError("the database is locked")

    with monkeypatch.context() as patch, progress_line(Terminal(), 1, counts_pruned=False) as line:
        patch.setattr(study._storage, "get_all_trials", broken)
        for callback, message in ((kept, "not write a trial to a list"), (line, "The progress line failed")):
            with pytest.warns(TrackingWarning, match=f"{message}.*the database is locked"):
                callback(study, first)
    shown.clear()
    time.sleep(0.1)  # the tracker is left alone for a moment
    kept(study, second)
    assert kept.numbers == [0, 1]


class Gone(io.StringIO):
    """A terminal that was closed."""

    def write(self, text: str) -> int:
        raise OSError("Input/output error")


def test_a_closed_terminal_stops_no_study(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Console(file=Gone(), force_terminal=True, force_jupyter=False)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(perfguard_optuna._study, "Console", lambda **_: terminal)
    streams = sys.stdout, sys.stderr
    with pytest.warns(TrackingWarning, match="The progress line failed.*Input/output error"):
        study = tracked_study(show_progress_bar=True, n_trials=3)
    assert summarize(study).num_launched == 3
    assert (sys.stdout, sys.stderr) == streams


@pytest.mark.parametrize(
    ("make", "modules", "extra"),
    [
        (MLflowCallback, ["mlflow"], "mlflow"),
        (WandbCallback, ["wandb"], "wandb"),
        (lambda: TensorBoardCallback("runs"), ["torch.utils.tensorboard", "tensorboard"], "tensorboard"),
        (DashboardCallback, ["optuna_dashboard"], "dashboard"),
    ],
)
def test_a_missing_package_is_named_when_the_callback_is_made(
    make: Any, modules: list[str], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in modules[:-1]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, modules[-1], None)
    with pytest.raises(ConfigurationError, match=rf"pip install 'perfguard\[{extra}\]'"):
        make()


class Terminal(Console):
    """A terminal without colours and cursor."""

    def __init__(self, **_: Any) -> None:
        super().__init__(file=io.StringIO(), force_terminal=True, force_jupyter=False, width=100, color_system=None)
        shown.append(self)


shown: list[Console] = []


@pytest.mark.parametrize(("draws_again", "count"), [(False, "launched"), (True, "launched"), (False, "proposed")])
def test_the_progress_line_counts_what_the_summary_counts(draws_again: bool, count: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(perfguard_optuna._study, "Console", Terminal)
    streams = [getattr(handler, "stream", None) for handler in logging.getLogger("optuna").handlers]
    study = tracked_study(show_progress_bar=True, draws_again=draws_again, n_trials=3, count=count)
    text = shown.pop().file.getvalue()  # type: ignore[attr-defined]
    last = text[text.rindex("launched") - 2 :]
    summary = summarize(study)
    assert summary.num_pruned
    saved = f"{30 * summary.num_pruned}.0 ms saved"
    assert f"{summary.num_launched} launched · {summary.num_pruned} pruned · 0 over budget · {saved}" in last
    assert "100%" in last
    assert "100%" in last
    assert [getattr(handler, "stream", None) for handler in logging.getLogger("optuna").handlers] == streams


def test_no_progress_line_in_ci_in_a_pipe_or_unasked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tracked_study(show_progress_bar=True)  # in a pipe
    monkeypatch.setattr(perfguard_optuna._study, "Console", Terminal)
    monkeypatch.setenv("CI", "true")
    tracked_study(show_progress_bar=True)
    monkeypatch.delenv("CI")
    tracked_study()
    assert [console.file.getvalue() for console in shown] == ["", ""]  # type: ignore[attr-defined]
    shown.clear()
    assert "launched" not in "".join(capsys.readouterr())


def test_lines_of_trials_appear_above_the_progress_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written past Rich, they garbled the line that it redraws."""
    terminal, stdout = Terminal(), io.StringIO()
    monkeypatch.setattr(stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", stdout)
    study = _study_of(create_trial(value=0.5))
    with progress_line(terminal, 1, counts_pruned=False):
        TrialPrinter()(study, study.trials[0])
    shown.clear()
    assert stdout.getvalue() == ""
    lines = [line.rstrip() for line in terminal.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert any(line.endswith("    0  unguarded          - → -                 - → -         0.5") for line in lines)


@pytest.fixture
def mlflow_uri(tmp_path: Path) -> Iterator[str]:
    pytest.importorskip("mlflow")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The ``noload`` loader strategy is deprecated")  # MLflow 3.17, SQLAlchemy 2.1
        warnings.simplefilter("ignore", ResourceWarning)
        yield f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.mark.slow
def test_mlflow_has_a_run_for_each_trial(mlflow_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.delenv("MLFLOW_EXPERIMENT_ID", raising=False)
    client = mlflow.MlflowClient(mlflow_uri)
    callback = MLflowCallback(mlflow_uri)
    study = tracked_study(callback, draws_again=True)
    callback.write(study)  # changes nothing
    experiment = client.get_experiment_by_name("tracked")
    assert experiment is not None
    runs = {int(run.info.run_name): run for run in client.search_runs([experiment.experiment_id])}
    assert sorted(runs) == numbers_of(study)
    for trial in study.trials:
        run, fields = runs[trial.number], tracked_fields(trial)
        pruned = trial.state == TrialState.PRUNED
        assert run.info.status == ("KILLED" if pruned else "FINISHED")
        assert run.data.params == {name: f"{value}" for name, value in trial.params.items()}
        values = {} if pruned else {"value": trial.value}
        assert run.data.metrics == {name: value for name, value in fields.items() if not isinstance(value, str)} | values
        assert {name: run.data.tags[name] for name, value in fields.items() if isinstance(value, str)}
        assert run.data.tags["perfguard/verdict"] == ("pruned" if pruned else "launched")
        assert ("perfguard/measured_memory_gib" in run.data.metrics) is not pruned
        assert run.info.end_time == int(1000 * trial.datetime_complete.timestamp())  # type: ignore[union-attr]

    # A run of the user's keeps its status and its parameters; with a run active, new ones are its children.
    own = client.create_run(experiment.experiment_id, run_name="mine")
    mlflow.set_tracking_uri(mlflow_uri)
    with mlflow.start_run(experiment_id=experiment.experiment_id) as parent:
        assert MLflowCallback("http://127.0.0.1:1")._parent is None, "another server does not know the active run"
        assert MLflowCallback(mlflow_uri)._parent is not None
        callback = MLflowCallback()
        callback.write(_study_of(create_trial(value=1.0, user_attrs={"mlflow_run_id": own.info.run_id}), create_trial(value=2.0)))
    mine = client.get_run(own.info.run_id)
    assert mine.info.status == "RUNNING"
    assert mine.data.metrics == {}
    assert mine.data.tags["perfguard/verdict"] == "unguarded"
    children = client.search_runs([experiment.experiment_id], f"tags.mlflow.parentRunId = '{parent.info.run_id}'")
    assert [run.data.metrics for run in children] == [{"value": 2.0}]


def _study_of(*trials: FrozenTrial) -> optuna.Study:
    study = optuna.create_study()
    study.add_trials(trials)
    return study


@pytest.mark.slow
def test_mlflow_that_is_away_or_misspelt(mlflow_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"MLflow cannot open 'htp://mlflow:5000': .* must look like 'http://host:5000'"):
        MLflowCallback("htp://mlflow:5000")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        callback = MLflowCallback(f"http://127.0.0.1:{closed.getsockname()[1]}")
        with pytest.warns(TrackingWarning, match=r"(?s)to MLflow .*ConnectionError") as caught:
            tracked_study(callback)
    assert [warning.category for warning in caught].count(TrackingWarning) == 1


def wandb_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows that W&B would send, from its file, once its own process has written that to the end."""
    [path] = (folder / "wandb").glob("offline-run-*/*.wandb")
    for _ in range(300):
        records = list(wandb_records(path.read_bytes()))
        if any(record.HasField("exit") for record in records):
            break
        time.sleep(0.1)
    items = [record.history.item for record in records if record.HasField("history")]
    return [{item.key or ".".join(item.nested_key): item.value_json for item in row} for row in items]


def wandb_records(data: bytes) -> Iterator[Any]:
    """The records of a W&B file: LevelDB's log format, after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    position, record = 7, b""
    while position + 7 <= len(data):
        if 2**15 - position % 2**15 < 7:  # no header fits into the rest of the block
            position += 2**15 - position % 2**15
        length, kind = struct.unpack_from("<HB", data, position + 4)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield wandb_internal_pb2.Record.FromString(record)  # type: ignore[attr-defined]
            record = b""


@pytest.mark.slow
@pytest.mark.parametrize("active", [False, True])
def test_wandb_has_a_row_for_each_trial(active: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        if active:
            with wandb.init(mode="offline", dir=tmp_path) as run:
                run.log({"mine": 1})
                study = tracked_study(WandbCallback(), draws_again=True)
                assert wandb.run is run
        else:
            callback = WandbCallback(mode="offline", dir=tmp_path)
            study = tracked_study(callback, draws_again=True)
            assert wandb.run is None
            callback.close()
    rows = [row for row in wandb_rows(tmp_path) if "perfguard/trial" in row]
    assert sorted(int(row["perfguard/trial"]) for row in rows) == numbers_of(study)
    for row in rows:
        trial = study.trials[int(row["perfguard/trial"])]
        assert ("width" in row) is ("width" in trial.params and not active), "a run of the user's gets only perfguard/..."
        assert row["perfguard/verdict"] == ('"pruned"' if record_of(trial).verdict == "prune" else '"launched"')
        numbers = {name: value for name, value in tracked_fields(trial).items() if not isinstance(value, str)}
        assert {name: float(row[name]) for name in numbers} == pytest.approx(numbers)


@pytest.mark.slow
def test_tensorboard_has_scalars_at_the_trials_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        callback = TensorBoardCallback(tmp_path / "runs")
        study = tracked_study(callback, draws_again=True)
        callback.close()
        events = EventAccumulator(str(tmp_path / "runs")).Reload()
        scalars = {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    expected: dict[str, dict[int, Any]] = {}
    for trial in study.trials:
        values = {"value": trial.value} if trial.state == TrialState.COMPLETE else {}
        for name, value in (tracked_fields(trial) | values).items():
            if value is not None and not isinstance(value, str):
                expected.setdefault(name, {})[trial.number] = pytest.approx(value)
    assert scalars == expected
    texts = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("perfguard/verdict/text_summary")]
    assert sum(text.startswith("**pruned** needs ") for text in texts) == summarize(study).num_pruned
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="TensorBoard cannot write to log_dir="):
        TensorBoardCallback(tmp_path / "file" / "runs")
