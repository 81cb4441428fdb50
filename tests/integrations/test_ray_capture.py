"""A training function that nobody described: Tune runs what fits of it, because a dry run of it shows what a trial would run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
import torch
from ray import tune
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from ray.tune.integration.ray_train import TuneReportCallback
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, PopulationBasedTraining
from ray.tune.search import ConcurrencyLimiter
from ray.tune.search.optuna import OptunaSearch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import perfguard_ray
from perfguard.exceptions import (
    CaptureError,
    ConfigurationError,
    DriftWarning,
    NothingFeasibleWarning,
    UnguardedTrialError,
    UnguardedTrialWarning,
)
from perfguard_ray import PerfGuardSearcher
from perfguard_ray.capture import TrainableBuild
from tests.doubles import BARE_A100, ReplayPredictor

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("local_ray"),
    pytest.mark.filterwarnings("ignore:.*the trial ran on:perfguard.exceptions.MeasurementWarning"),  # no A100 here
]

SMALL, LARGE = 8, 4096
"""Widths that need about 17 KiB and 2.5 MiB."""
OPTIONS: dict[str, Any] = {"gpu": BARE_A100, "memory_budget": "1MiB", "log": False, "predictor": ReplayPredictor()}


def train(config: dict[str, Any]) -> dict[str, float]:
    """Leaves a file where it really runs, and asks Tune what a training function may ask."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    (Path(config["folder"]) / f"ran-{config['width']}").write_text(device)
    assert tune.get_checkpoint() is None
    (Path(tune.get_context().get_trial_dir()) / str(tune.get_context().get_trial_id())).touch()
    model = nn.Linear(64, config["width"]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.get("lr", 0.1))
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(32, 64, device=device)).mean()
        loss.backward()
        optimizer.step()
        tune.report({"loss": 1 / config["width"]})
    return {"loss": 1 / config["width"]}


def train_without_steps(config: dict[str, Any]) -> dict[str, float]:
    (Path(config["folder"]) / "ran").touch()
    return {"loss": 1 / len(config["missing"]) if "missing" in config else 1.0}


def train_as_named(config: dict[str, Any]) -> None:
    """Is large in trials whose id, name or resources a dry run makes up."""
    context = tune.get_context()
    asked = str(context.get_trial_id()), str(context.get_trial_name()), context.get_trial_resources()
    is_real = len(asked[0]) >= 8 and asked[1] == f"train_as_named_{asked[0]}" and (not config["has_resources"] or asked[2])
    train(config | {"width": config["width"] if is_real else LARGE})


def train_and_yield(config: dict[str, Any]) -> Iterator[dict[str, float]]:
    model = nn.Linear(64, config["width"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(32, 64)).mean().backward()
        optimizer.step()
        yield {"loss": 1 / config["width"]}


class Train(tune.Trainable):
    def setup(self, config: dict[str, Any]) -> None:
        self.model = nn.Linear(64, config["width"])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self) -> dict[str, Any]:
        self.model(torch.ones(32, 64)).mean().backward()
        self.optimizer.step()
        return {"loss": 1.0, "done": self.iteration >= 2}


def train_by_values(config: dict[str, Any]) -> None:
    """Reads in its set-up what is 0 in a dry run."""
    trial = TrainByValues(config)
    for _ in range(12):
        tune.report(trial.step())


class TrainByValues(Train):
    def setup(self, config: dict[str, Any]) -> None:
        assert nn.Linear(8, 8).weight.square().sum().item() > 0
        super().setup(config)
        self.folder = Path(config["folder"])

    def step(self) -> dict[str, Any]:
        result = super().step()
        (self.folder / f"stepped-{self.config['width']}").touch()
        return result

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.setup(new_config)
        return True


def train_deeper(config: dict[str, Any]) -> None:
    """Twice the layers where something is computed."""
    depth = 4 if nn.Linear(1, 1).weight.is_meta else 8
    model = nn.Sequential(nn.Linear(20, 64), *(nn.Linear(64, 64) for _ in range(depth)), nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    for (x,) in DataLoader(TensorDataset(torch.randn(640, 20)), 32):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    tune.report({"loss": loss.item()})


def train_without_end(config: dict[str, Any]) -> None:
    """Where losses are 0, it fails after its first report, so a dry run does not see its steps."""
    model = nn.Linear(64, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(32, 64)).square().mean()
            loss.backward()
            optimizer.step()
        tune.report({"loss": 1 / (loss.item() > 1e-6)})


def work(config: dict[str, Any]) -> None:
    model = prepare_model(nn.Linear(64, config["width"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for (x,) in prepare_data_loader(DataLoader(TensorDataset(torch.ones(256, 64)), 8)):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        ray.train.report({"loss": 1.0})


def train_on_many(config: dict[str, Any]) -> None:
    scaling = ScalingConfig(num_workers=config["workers"], use_gpu=True)
    callbacks: list[Any] = [TuneReportCallback()]
    run = ray.train.RunConfig(callbacks=callbacks)
    TorchTrainer(work, train_loop_config=config, scaling_config=scaling, run_config=run).fit()


class StopFirst(FIFOScheduler):
    """Stops the first trial at its first report."""

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        return str(self.STOP if trial.config["number"] == 0 else self.CONTINUE)


@ray.remote
def elsewhere() -> None: ...


def train_elsewhere(config: dict[str, Any]) -> None:
    ray.get(elsewhere.remote())


def fit(trainable: Any, folder: Path, space: Mapping[str, Any], **options: Any) -> list[Any]:
    options = {"metric": "loss", "mode": "min", **options}
    tuner = tune.Tuner(
        trainable,
        param_space={**space, "folder": str(folder)},
        tune_config=tune.TuneConfig(**options),
        run_config=tune.RunConfig(storage_path=str(folder / "tune"), name="run", verbose=0),
    )
    results = tuner.fit()
    return [results[number] for number in range(len(results))]


def test_a_trial_that_fits_runs_and_one_that_does_not_never_starts(tmp_path: Path) -> None:
    guarded = perfguard_ray.guarded(train, **OPTIONS)
    space = {"width": tune.grid_search([SMALL, LARGE, 16])}
    with pytest.warns(NothingFeasibleWarning, match="1 of 3 points were left out"):
        results = fit(guarded, tmp_path, space)
    assert sorted(file.name for file in tmp_path.glob("ran-*")) == ["ran-16", f"ran-{SMALL}"]
    assert ["no " + BARE_A100.name in result.metrics["perfguard/not_measured"] for result in results] == [True, True]
    summary = perfguard_ray.summarize(guarded)
    assert (summary.num_launched, summary.num_pruned) == (2, 1)
    (rejected,) = [record for record in guarded.perfguard.ledger.records() if record.in_words == "pruned"]
    assert "the budget is 1.00 MiB" in rejected.verdict.reason


@pytest.mark.parametrize("gpu", [BARE_A100, "cpu"], ids=["gpu", "cpu"])
def test_model_that_the_host_cannot_hold_never_starts(tmp_path: Path, gpu: Any) -> None:
    """Its dry run failed for want of memory, so it was launched."""
    guarded = perfguard_ray.guarded(train, **OPTIONS | {"gpu": gpu})
    with pytest.warns(NothingFeasibleWarning, match="1 of 2 points were left out"):
        fit(guarded, tmp_path, {"width": tune.grid_search([SMALL, 10**9])})  # 238 GiB
    assert [file.name for file in tmp_path.glob("ran-*")] == [f"ran-{SMALL}"]
    (rejected,) = [record for record in guarded.perfguard.ledger.records() if record.in_words == "pruned"]
    assert "needs at least" in rejected.verdict.reason


def test_dry_run_has_the_id_the_name_and_the_resources_of_the_trial(tmp_path: Path) -> None:
    """It had those of nobody, so it was another training."""
    space = {"width": tune.grid_search([SMALL, 16]), "has_resources": True}
    assert len(fit(perfguard_ray.guarded(train_as_named, **OPTIONS), tmp_path, space)) == 2
    assert sorted(file.name for file in tmp_path.glob("ran-*")) == ["ran-16", f"ran-{SMALL}"]
    searched = {"width": tune.choice([SMALL]), "has_resources": False}
    (tmp_path / f"ran-{SMALL}").unlink()
    guarded = perfguard_ray.guarded(train_as_named, **OPTIONS)
    fit(guarded, tmp_path, searched, num_samples=1, search_alg=OptunaSearch(seed=1))
    assert (tmp_path / f"ran-{SMALL}").exists()


def test_a_searcher_is_guarded_and_its_resources_come_from_predictions(tmp_path: Path) -> None:
    guarded = perfguard_ray.guarded(train, **OPTIONS | {"gpu": "cpu"})
    trainable = tune.with_resources(guarded, perfguard_ray.resources(guarded))
    space = {"width": tune.choice([SMALL, LARGE]), "lr": tune.loguniform(1e-4, 1e-1)}
    results = fit(trainable, tmp_path, space, num_samples=3, search_alg=OptunaSearch(seed=1))
    assert [result.config["width"] for result in results] == [SMALL] * 3
    assert [file.name for file in tmp_path.glob("ran-*")] == [f"ran-{SMALL}"]
    assert all(result.metrics["perfguard/peak_memory_bytes"] > 0 for result in results)
    assert perfguard_ray.summarize(guarded).num_measured == 3


def test_steps_come_from_the_trials_that_the_scheduler_let_finish(tmp_path: Path) -> None:
    guarded = perfguard_ray.guarded(train_without_end, gpu="cpu", log=False, time_budget="1h", predictor=ReplayPredictor())
    space = {"number": tune.grid_search([0, 1, 2])}
    with pytest.warns(UnguardedTrialWarning, match="did not see them: ZeroDivisionError"):
        fit(
            guarded,
            tmp_path,
            space,
            scheduler=StopFirst(),  # type: ignore[no-untyped-call]
            max_concurrent_trials=1,
        )
    stopped, whole, last = guarded.perfguard.ledger.records()
    assert [stopped.cut_short, whole.cut_short, last.cut_short] == ["by the tuner", "", ""]
    assert ["time" in record.predicted for record in (stopped, whole, last)] == [False, False, True]
    assert last.reason.endswith("steps: about 12, from 1 finished trial")


def test_what_cannot_be_dry_run_is_launched_with_the_cause(tmp_path: Path) -> None:
    with pytest.warns(UnguardedTrialWarning, match="made no step of a torch optimizer") as caught:
        results = fit(perfguard_ray.guarded(train_without_steps, **OPTIONS), tmp_path, {"x": tune.grid_search([1, 2])})
    assert (tmp_path / "ran").exists()
    assert len(results) == 2
    assert len([one for one in caught if issubclass(one.category, UnguardedTrialWarning)]) == 1


def test_a_strict_guard_ends_a_run_of_what_it_cannot_judge(tmp_path: Path) -> None:
    with pytest.raises(UnguardedTrialError, match="made no step of a torch optimizer"):
        fit(perfguard_ray.guarded(train_without_steps, strict=True, **OPTIONS), tmp_path, {})


def test_a_trial_that_fails_before_its_first_forward_pass_is_counted(tmp_path: Path) -> None:
    guarded = perfguard_ray.guarded(train_without_steps, **OPTIONS)
    (result,) = fit(guarded, tmp_path, {"missing": 3})
    assert "TypeError" in str(result.error)
    (record,) = guarded.perfguard.ledger.records()
    assert (record.status, record.in_words) == ("failed", "unguarded")
    assert "with TypeError" in record.reason


def train_from_checkpoint(config: dict[str, Any]) -> None:
    """Four epochs. It fails in the last one until there is a file named "go"."""
    model = nn.Linear(64, SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    checkpoint, start = tune.get_checkpoint(), 0
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            start = int((Path(folder) / "epoch").read_text()) + 1
    for epoch in range(start, 4):
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(torch.ones(32, 64)).pow(2).mean()
            loss.backward()
            optimizer.step()
        if epoch == 3 and not (Path(config["folder"]) / "go").exists():
            raise ValueError("not yet")
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "epoch").write_text(str(epoch))
            tune.report({"loss": loss.item()}, checkpoint=tune.Checkpoint.from_directory(folder))


@pytest.mark.filterwarnings("ignore:Consider boosting PBT performance")
def test_pause_at_the_last_epoch_keeps_the_measurement(tmp_path: Path) -> None:
    """PBT pauses a trial at its last report, and its last start has nothing left to do. The log had no measurement then."""
    (tmp_path / "go").touch()
    guarded = perfguard_ray.guarded(train_from_checkpoint, **OPTIONS | {"gpu": "cpu", "memory_budget": "1GiB"})
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=2,
        quantile_fraction=0.0,
        hyperparam_mutations={"lr": tune.uniform(1e-3, 1e-2)},
    )
    results = fit(guarded, tmp_path, {"lr": tune.grid_search([1e-3, 1e-2])}, scheduler=scheduler)
    assert [result.metrics["training_iteration"] for result in results] == [4, 4]
    rows = guarded.perfguard.ledger.records()
    assert [(row.status, row.note) for row in rows] == [("ok", ""), ("ok", "")]
    assert all(row.measured.keys() >= {"memory", "step_time", "time"} for row in rows)
    assert [run.measurement.num_steps for run in guarded.perfguard.ledger.guard.log.observations("cpu")] == [20, 20]


@pytest.mark.parametrize("search_alg", [None, OptunaSearch(seed=1)])
def test_summary_of_a_restored_run_shows_the_run(search_alg: Any, tmp_path: Path) -> None:
    """Another process makes the guarded function again, and `summarize(guarded)` was that of a run without trials."""
    options = OPTIONS | {"gpu": "cpu", "memory_budget": "1GiB", "log": str(tmp_path / "log.db")}
    begun = perfguard_ray.guarded(train_from_checkpoint, **options)
    (failed,) = fit(begun, tmp_path, {"lr": 0.01 if search_alg is None else tune.uniform(0.01, 0.02)}, search_alg=search_alg)
    assert "not yet" in str(failed.error)
    (tmp_path / "go").touch()
    again = perfguard_ray.guarded(train_from_checkpoint, **options)
    tuner = tune.Tuner.restore(str(Path(failed.path).parent), trainable=again, resume_errored=True)
    before = perfguard_ray.summarize(again)
    assert (before.title, before.num_failed) == (perfguard_ray.summarize(begun).title, 1)
    assert tuner.fit().num_errors == 0
    after = perfguard_ray.summarize(again)
    assert (after.num_launched, after.num_measured) == (before.num_launched + 1, 1)


def test_run_that_was_begun_without_a_guard_says_so_when_it_is_restored(tmp_path: Path) -> None:
    (begun,) = fit(train_from_checkpoint, tmp_path, {"lr": 0.01})
    guarded = perfguard_ray.guarded(train_from_checkpoint, **OPTIONS)
    with pytest.warns(UnguardedTrialWarning, match="begun without a guard"):
        tune.Tuner.restore(str(Path(begun.path).parent), trainable=guarded)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("trainable", [train_by_values, TrainByValues])
def test_a_trial_whose_set_up_needs_values_is_judged_where_its_training_begins(trainable: Any, tmp_path: Path) -> None:
    """One that does not fit ends there, as a trial without a result: no error, and no other try."""
    guarded = perfguard_ray.guarded(trainable, **OPTIONS | {"gpu": "cpu"})
    space = {"width": tune.grid_search([LARGE, SMALL, 16])}
    rejected, *launched = fit(guarded, tmp_path, space, scheduler=ASHAScheduler(max_t=9), reuse_actors=True)
    assert (rejected.error, "loss" in rejected.metrics) == (None, False)
    assert [result.metrics["perfguard/source"] for result in launched] == ["captured at the first forward pass"] * 2
    assert all(result.metrics["perfguard/memory_measured_bytes"] > 0 for result in launched)
    assert sorted(file.name for file in tmp_path.glob("stepped-*")) == ["stepped-16", f"stepped-{SMALL}"]
    assert [record.in_words for record in guarded.perfguard.ledger.records()] == ["pruned", "launched", "launched"]
    assert "captured at the first forward pass 3" in str(perfguard_ray.summarize(guarded))


def test_a_searcher_learns_of_a_trial_that_is_rejected_where_its_training_begins(tmp_path: Path) -> None:
    search: Any = OptunaSearch(seed=1, points_to_evaluate=[{"width": width} for width in (LARGE, SMALL, LARGE)])
    guarded = perfguard_ray.guarded(train_by_values, **OPTIONS | {"gpu": "cpu"})
    fit(guarded, tmp_path, {"width": tune.choice([SMALL, LARGE])}, num_samples=3, search_alg=ConcurrencyLimiter(search, 1))
    trials = search._ot_study.trials
    assert [trial.state.name for trial in trials[:3]] == ["PRUNED", "COMPLETE", "PRUNED"]
    assert [trial.constraints["perfguard:memory"] > 0 for trial in trials[:3]] == [True, False, True]


def test_a_real_step_is_held_against_the_dry_run_and_learnt(tmp_path: Path) -> None:
    guarded = perfguard_ray.guarded(train_deeper, **OPTIONS | {"gpu": "cpu", "memory_budget": "1GiB"})
    with pytest.warns(DriftWarning, match=r"runs 19 matrix products \(11 in the dry run\)") as warned:
        fit(guarded, tmp_path, {"number": tune.grid_search([1, 2])}, max_concurrent_trials=1)
    assert sum(issubclass(warning.category, DriftWarning) for warning in warned) == 1
    ledger = guarded.perfguard.ledger
    first, second = (run.graph.flops for run in ledger.guard.log.observations(ledger.guard.device))
    assert first == second > 1.5 * ledger.build({"number": 1}).graph.flops
    assert ["the real step differs" in record.verdict.remark for record in ledger.records()] == [True, False]


def test_only_values_that_change_the_step_are_dry_run_again(tmp_path: Path) -> None:
    def train_share(config: dict[str, Any]) -> None:
        train({"width": int(64 * config["net"]["share"]), "folder": str(tmp_path)})

    build = TrainableBuild(train, BARE_A100)
    first = build({"width": SMALL, "lr": 0.1, "folder": str(tmp_path)})
    assert build({"width": SMALL, "lr": 0.02, "folder": str(tmp_path)}) is first
    assert not list(tmp_path.iterdir())
    build = TrainableBuild(train_share, BARE_A100)
    half, whole = build({"net": {"share": 0.5}}), build({"net": {"share": 1.0}})
    assert whole.graph.content_hash != half.graph.content_hash


def test_a_function_that_yields_its_results_is_dry_run_and_measured(tmp_path: Path) -> None:
    guarded = perfguard_ray.guarded(train_and_yield, **OPTIONS | {"gpu": "cpu"})
    with pytest.warns(NothingFeasibleWarning, match="1 of 2 points"):
        results = fit(guarded, tmp_path, {"width": tune.grid_search([SMALL, LARGE])})
    found = [(result.config["width"], result.metrics["loss"], result.metrics["perfguard/num_steps"]) for result in results]
    assert found == [(SMALL, 1 / SMALL, 3)]


def test_a_class_is_dry_run_and_measured(tmp_path: Path) -> None:
    guarded = perfguard_ray.guarded(Train, **OPTIONS | {"gpu": "cpu"})
    with pytest.warns(NothingFeasibleWarning, match="1 of 2 points"):
        results = fit(guarded, tmp_path, {"width": tune.grid_search([SMALL, LARGE])})
    assert [(result.config["width"], result.metrics["perfguard/num_steps"]) for result in results] == [(SMALL, 3)]


def test_a_trainer_of_ray_train_is_dry_run_as_its_first_worker() -> None:
    captured = TrainableBuild(train_on_many, BARE_A100)({"width": SMALL, "workers": 4})
    assert (captured.num_ranks, captured.steps, captured.samples_per_step) == (4, 16, 8)
    assert captured.graph.options == ("ddp",)


def test_a_function_that_starts_tasks_of_ray_is_not_dry_run() -> None:
    with pytest.raises(CaptureError, match="starts other processes of Ray"):
        TrainableBuild(train_elsewhere, BARE_A100)({})


def test_a_dry_run_that_hangs_or_dies_is_a_cause() -> None:
    def end_badly(config: dict[str, Any]) -> None:
        while config["hangs"]:
            pass
        os._exit(1)

    with pytest.raises(CaptureError, match="did not end within 8 s"):
        TrainableBuild(end_badly, BARE_A100, most_seconds=8)({"hangs": True})
    # On a busy machine the process itself takes more than 8 s to begin.
    with pytest.raises(CaptureError, match=r"has ended the process of its dry run \(exit status 1\)"):
        TrainableBuild(end_badly, BARE_A100)({"hangs": False})


def test_parameters_belong_inside(tmp_path: Path) -> None:
    def train_data(config: dict[str, Any], data: int) -> None:
        train(config | {"width": data})

    with pytest.raises(ConfigurationError, match="Write guarded"):
        fit(tune.with_parameters(perfguard_ray.guarded(train_data, **OPTIONS), data=SMALL), tmp_path, {})
    fit(perfguard_ray.guarded(tune.with_parameters(train_data, data=SMALL), **OPTIONS), tmp_path, {})
    assert [file.name for file in tmp_path.glob("ran-*")] == [f"ran-{SMALL}"]


def test_a_guarded_search_for_a_guarded_function_is_refused(tmp_path: Path) -> None:
    guarded = perfguard_ray.guarded(train, **OPTIONS)
    search = PerfGuardSearcher(OptunaSearch(), build=lambda config: None, **OPTIONS)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigurationError, match="Both"):
        fit(guarded, tmp_path, {}, search_alg=search)
