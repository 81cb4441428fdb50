"""What the guard lets through to Tune: searchers, random and grid search, saved and restored."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from ray import tune
from ray.tune.experiment import Experiment, Trial
from ray.tune.search import BasicVariantGenerator, ConcurrencyLimiter, Searcher
from ray.tune.search.optuna import OptunaSearch
from torch import nn

import perfguard_ray
from perfguard import MeasurementStore, Workload
from perfguard.exceptions import ConfigurationError, UnguardedTrialWarning
from perfguard.record import TrialRecord
from perfguard_ray import PerfGuardCallback, PerfGuardSearcher, PerfGuardVariantGenerator
from tests.doubles import BARE_A100, ReplayPredictor

pytestmark = pytest.mark.filterwarnings("ignore:.*the trial ran on:perfguard.exceptions.MeasurementWarning")  # no A100 here

SMALL, LARGE = 8, 4096
"""Widths that need about 17 KiB and 2.5 MiB."""
WIDTHS = tune.choice([SMALL, 16, 2048, LARGE])
OPTIONS: dict[str, Any] = {"gpu": BARE_A100, "memory_budget": "1MiB", "log": False}


def build(config: Mapping[str, Any]) -> Workload:
    return Workload(nn.Linear(64, config["width"]), inputs=(32, 64), loss=torch.mean, steps=3)


def build_batch(config: Mapping[str, Any]) -> Workload:
    """The batch is as large as "width" says."""
    return Workload(nn.Linear(64, 64), inputs=(config["width"], 64), loss=torch.mean)


def train(config: dict[str, Any]) -> None:
    with perfguard_ray.measure():
        tune.report({"loss": 1 / config["width"]})


class ListSearcher(Searcher):
    """A deterministic searcher: proposes ``widths`` in order, then is finished; writes down what it is told."""

    def __init__(self, widths: list[int], *, metric: str = "loss", mode: str = "min") -> None:
        super().__init__(metric=metric, mode=mode)
        self.widths = widths
        self.suggested: dict[str, int] = {}
        self.told: dict[int, Any] = {}

    def suggest(self, trial_id: str) -> Any:
        if not self.widths:
            return Searcher.FINISHED
        self.suggested[trial_id] = self.widths.pop(0)
        return {"width": self.suggested[trial_id]}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        self.told[self.suggested[trial_id]] = "error" if error else (result or {}).get("loss")

    def save(self, checkpoint_path: str) -> None:
        Path(checkpoint_path).write_bytes(pickle.dumps(self.__dict__))

    def restore(self, checkpoint_path: str) -> None:
        self.__dict__.update(pickle.loads(Path(checkpoint_path).read_bytes()))


def guarded(searcher: Searcher, **options: Any) -> PerfGuardSearcher:
    return PerfGuardSearcher(searcher, **{"build": build, "predictor": ReplayPredictor(), **OPTIONS, **options})


def guarded_generator(generator: BasicVariantGenerator | None = None, **options: Any) -> PerfGuardVariantGenerator:
    return PerfGuardVariantGenerator(generator, **{"build": build, "predictor": ReplayPredictor(), **OPTIONS, **options})


def make_tuner(search: Any, folder: Path, space: Mapping[str, Any], num_samples: int, **options: Any) -> tune.Tuner:
    callbacks = [PerfGuardCallback(search), *options.pop("callbacks", [])]
    return tune.Tuner(
        options.pop("trainable", train),
        param_space=dict(space),
        tune_config=tune.TuneConfig(
            search_alg=search, num_samples=num_samples, metric="loss", mode="min", reuse_actors=True, **options
        ),
        run_config=tune.RunConfig(storage_path=str(folder), name="run", verbose=0, callbacks=callbacks),
    )


def widths_of(results: tune.ResultGrid) -> list[int]:
    return sorted((results[number].config or {})["width"] for number in range(len(results)))


# --- without a cluster: what the wrapped searcher sees


def test_constants_of_the_space_reach_build() -> None:
    seen: list[Mapping[str, Any]] = []

    def remembering(config: Mapping[str, Any]) -> Workload:
        seen.append(config)
        return build(config)

    search = guarded(ListSearcher([SMALL]), build=remembering)
    search.set_search_properties("loss", "min", {"width": WIDTHS, "epochs": 3, "data": {"path": "here"}})
    search.suggest("a")
    assert seen[-1] == {"width": SMALL, "epochs": 3, "data": {"path": "here"}}


def test_rejected_config_scores_as_the_worst_that_ran() -> None:
    searcher = ListSearcher([LARGE, SMALL, 16, 2048, 32])
    search = guarded(searcher)
    search.suggest("a")
    search.suggest("b")
    assert searcher.told == {}
    search.on_trial_complete("a", {"loss": 0.7})
    assert searcher.told == {SMALL: 0.7, LARGE: 0.7}
    search.on_trial_complete("b", {"loss": 0.3})
    search.suggest("c")
    assert searcher.told == {SMALL: 0.7, LARGE: 0.7, 16: 0.3, 2048: 0.7}


class Waiting(ListSearcher):
    """Proposes two widths, then waits for the results of both, as BayesOptSearch does in its random phase."""

    def suggest(self, trial_id: str) -> Any:
        return None if len(self.suggested) - len(self.told) >= 2 else super().suggest(trial_id)


def test_waiting_searcher_gets_error_if_nothing_runs() -> None:
    """Without it, a searcher that waits for a rejected proposal's result would wait for ever."""
    searcher = Waiting([LARGE, 2048, SMALL])
    assert guarded(searcher).suggest("a") == {"width": SMALL}
    assert searcher.told == {LARGE: "error", 2048: "error"}


def test_waiting_searcher_gets_results_of_what_runs() -> None:
    searcher = Waiting([SMALL, LARGE, 16])
    search = guarded(searcher)
    search.suggest("a")
    assert search.suggest("b") is None
    assert searcher.told == {}
    search.on_trial_complete("a", {"loss": 0.7})
    assert searcher.told == {SMALL: 0.7, LARGE: 0.7}
    assert search.suggest("b") == {"width": 16}


def test_batch_limiter_is_not_blocked_by_rejections() -> None:
    searcher = ListSearcher([LARGE, SMALL, 2048, 16, 32])
    search = guarded(ConcurrencyLimiter(searcher, max_concurrent=2, batch=True))
    assert [search.suggest(name) for name in "abc"] == [{"width": SMALL}, {"width": 16}, None]
    search.on_trial_complete("a", {"loss": 0.7})
    assert search.suggest("c") is None, "the batch is not complete"
    search.on_trial_complete("b", {"loss": 0.3})
    assert searcher.told == {LARGE: 0.7, 2048: 0.7, SMALL: 0.7, 16: 0.3}
    assert search.suggest("c") == {"width": 32}


def test_older_ray_import_says_what_to_install() -> None:
    code = "import ray; ray.__version__ = '2.9.3'\nimport perfguard_ray"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: perfguard_ray needs Ray 2.43 or newer, but 2.9.3 is installed: pip install --upgrade" in done.stderr


def test_optuna_search_learns_pruning_and_constraints() -> None:
    searcher = OptunaSearch(seed=0)
    search = guarded(searcher)
    search.set_search_properties("loss", "min", {"width": WIDTHS})
    launched = 0
    while launched < 4:
        assert search.suggest(f"trial{launched}")["width"] in (SMALL, 16)
        search.on_trial_complete(f"trial{launched}", {"loss": 0.5})
        launched += 1
    study: Any = searcher._ot_study
    trials = study.get_trials()
    assert {trial.state.name for trial in trials} == {"COMPLETE", "PRUNED"}
    for trial in trials:
        assert (trial.constraints["perfguard:memory"] > 0) == (trial.state.name == "PRUNED")


def test_vain_search_waits_for_the_running_trial() -> None:
    """While a trial runs, a searcher whose proposals do not fit is not asked again."""
    searcher = ListSearcher([SMALL] + [LARGE] * 10 + [16])
    search = guarded(searcher, max_proposals=10)
    search.suggest("a")
    assert [search.suggest("b") for _ in range(3)] == [None, None, None]
    assert len(searcher.widths) == 1
    search.on_trial_complete("a", {"loss": 1.0})
    assert search.suggest("b") == {"width": 16}


REPAIRS: dict[str, Any] = {"build": build_batch, "memory_budget": "160KiB", "on_violation": "repair"}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: guarded(BasicVariantGenerator()), ConfigurationError, "use PerfGuardVariantGenerator"),  # type: ignore[arg-type]
        (lambda: guarded_generator(OptunaSearch()), ConfigurationError, "Wrap a Searcher .* in PerfGuardSearcher"),  # type: ignore[arg-type]
        (lambda: guarded(ListSearcher([]), max_proposals=0), ConfigurationError, "max_proposals must be at least 1"),
        (lambda: guarded(ListSearcher([]), build=None), ConfigurationError, "build must be a function"),
        (lambda: guarded(ListSearcher([]), gpu="a1000"), ConfigurationError, "a1000"),
        (lambda: perfguard_ray.guarded(train, on_oom="repair"), ConfigurationError, "on_oom='repair' needs build="),
        (lambda: PerfGuardCallback(OptunaSearch()), ConfigurationError, "PerfGuardCallback takes the PerfGuardSearcher"),
    ],
)
def test_what_cannot_be_right_is_refused_at_once(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


# --- with Tune


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_num_samples_counts_the_trials_that_run(tmp_path: Path) -> None:
    search = guarded(OptunaSearch(seed=1))
    results = make_tuner(search, tmp_path, {"width": WIDTHS, "epochs": 3}, 5).fit()
    assert len(results) == 5
    assert set(widths_of(results)) <= {SMALL, 16}
    rows = search.ledger.records()
    launched = [row for row in rows if not row.is_pruned]
    assert len(launched) < len(rows)
    metrics: list[Any] = [results[number].metrics for number in range(5)]
    assert {row.trial_id for row in launched} == {found["trial_id"] for found in metrics}, "Tune's own ids"
    numbers = {found["trial_id"]: int(found["experiment_tag"].partition("_")[0]) for found in metrics}
    assert {row.trial_id: row.number for row in launched} == numbers, "and Tune's own numbers"
    assert all(found["perfguard/not_measured"].startswith("the worker used no NVIDIA A100") for found in metrics)
    assert all(row.not_measured for row in launched)
    assert perfguard_ray.summarize(search).num_measured == 0


def train_repaired(config: dict[str, Any]) -> None:
    """Trains with what the guard says, and reports which batch it used."""
    repair = perfguard_ray.repair_of(config)
    batch_size = repair.micro_batch_size or config["width"]
    with perfguard_ray.measure():
        model = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(repair.accumulation):
            (model(torch.ones(batch_size, 64)).mean() / repair.accumulation).backward()
        optimizer.step()
        tune.report({"loss": 0.0, "batch_size": batch_size, "passes": repair.accumulation})


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_repair_reaches_training_function_and_log(tmp_path: Path) -> None:
    search = guarded_generator(**REPAIRS, log=str(tmp_path / "log.db"))
    space = {"width": tune.grid_search([256, SMALL])}
    results = make_tuner(search, tmp_path, space, 1, trainable=train_repaired).fit()
    assert results.num_errors == 0
    metrics: dict[int, Any] = {(result.config or {})["width"]: result.metrics for result in map(results.__getitem__, range(2))}
    assert metrics[256]["batch_size"] * metrics[256]["passes"] == 256
    assert metrics[256]["passes"] > 1
    assert (metrics[SMALL]["batch_size"], metrics[SMALL]["passes"]) == (SMALL, 1)
    logged = {row.params["width"]: row for row in search.ledger.records()}
    assert {width: row.in_words for width, row in logged.items()} == {256: "repaired", SMALL: "launched"}
    assert f"micro-batch {metrics[256]['batch_size']} accumulated {metrics[256]['passes']} times" in logged[256].reason


def train_or_run_out(config: dict[str, Any]) -> None:
    """Has memory for so many samples at once."""
    batch_size = perfguard_ray.repair_of(config).micro_batch_size or config["width"]
    with perfguard_ray.measure():
        if batch_size > config["most"]:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
    train_repaired(config)


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize(
    ("on_oom", "most", "tries"),
    [
        ("repair", 128, [("launched", "oom"), ("repaired", "ok")]),
        ("repair", 100, [("launched", "oom"), ("repaired", "oom")]),
        ("prune", 128, [("launched", "oom")]),
    ],
)
def test_trial_that_runs_out_of_memory_starts_again_once_and_only_with_a_repair(
    on_oom: str, most: int, tries: list[tuple[str, str]], tmp_path: Path
) -> None:
    """Tune would start it five times more. As it was, it would run out of memory each time."""
    search = guarded_generator(build=build_batch, memory_budget="1MiB", on_oom=on_oom)
    config = tune.RunConfig(
        storage_path=str(tmp_path),
        callbacks=[PerfGuardCallback(search)],
        failure_config=tune.FailureConfig(max_failures=5),
        verbose=0,
    )
    tune_config = tune.TuneConfig(search_alg=search, num_samples=1)
    space = {"width": tune.grid_search([256, SMALL]), "most": most}
    results = tune.Tuner(train_or_run_out, param_space=space, tune_config=tune_config, run_config=config).fit()
    assert results.num_errors == 0, "a trial that PerfGuard ends is no error"
    batches: dict[int, Any] = {(result.config or {})["width"]: result.metrics for result in map(results.__getitem__, range(2))}
    if tries[-1][1] == "ok":
        assert batches[256]["batch_size"] * batches[256]["passes"] == 256
    logged = {256: [], SMALL: []}  # type: dict[int, list[tuple[str, str | None]]]
    for row in search.ledger.records():
        logged[row.params["width"]].append((row.in_words, row.status))
    assert logged == {256: tries, SMALL: [("launched", "ok")]}


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_a_value_that_the_search_cannot_see_is_judged_when_it_is_there(tmp_path: Path) -> None:
    """Tune calls the function of sample_from after the search has proposed the trial, which is launched in any case."""
    search = guarded_generator()
    space = {"layers": 2, "width": tune.sample_from(lambda config: LARGE * config["layers"])}
    with pytest.warns(UnguardedTrialWarning) as caught:
        make_tuner(search, tmp_path, space, 1).fit()
    first, second = (str(one.message) for one in caught if one.category is UnguardedTrialWarning)
    assert "could not judge a trial and launches it unguarded" in first
    assert re.search(r"would have rejected: it needs .* the budget is 1.00 MiB.* tune.sample_from", second)
    summary = perfguard_ray.summarize(search)
    assert (summary.num_launched, summary.num_pruned, summary.num_unguarded) == (1, 0, 1), "the trial counts once"


def draw(search: PerfGuardVariantGenerator, space: Mapping[str, Any], num_samples: int, folder: Path) -> list[dict[str, Any]]:
    """The configurations that ``search`` would run, without running them."""
    search.add_configurations([Experiment("run", train, config=dict(space), num_samples=num_samples, storage_path=str(folder))])
    configs = []
    while (trial := search.next_trial()) is not None:
        configs.append(trial.config)
        assert trial.evaluated_params == trial.config
        assert f"width={trial.config['width']}" in trial.experiment_tag
    return configs


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_random_points_that_do_not_fit_are_drawn_again(tmp_path: Path) -> None:
    space = {"width": WIDTHS, "lr": tune.loguniform(1e-4, 1e-1)}
    runs = [draw(guarded_generator(BasicVariantGenerator(random_state=3)), space, 8, tmp_path) for _ in range(2)]
    assert len(runs[0]) == 8
    assert {config["width"] for config in runs[0]} <= {SMALL, 16}
    assert runs[0] == runs[1], "a seed fixes the run"


def has_ended(row: TrialRecord) -> bool:
    """Whether the trial ran to its end, on whatever device."""
    return row.status == "ok" or bool(row.not_measured)


class CutOff(tune.Callback):
    """Ends the driver after the first trial, as long as there is a file."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        if self.flag.exists() and any(trial.status == Trial.TERMINATED for trial in trials):
            self.flag.unlink()
            raise RuntimeError("the driver is gone")


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_interrupted_run_is_restored_and_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a searcher; test_ray_interrupted.py has that of Tune's own search."""
    monkeypatch.setenv("TUNE_GLOBAL_CHECKPOINT_S", "1")
    log = MeasurementStore(str(tmp_path / "log.db"))
    flag = tmp_path / "flag"
    flag.touch()
    widths = [LARGE, SMALL, 2048, 16, LARGE, 32]
    search = guarded(ListSearcher(widths), log=log, study="run")
    tuner = make_tuner(search, tmp_path, {}, 3, callbacks=[CutOff(flag)])
    with pytest.raises(RuntimeError, match="the driver is gone"):
        tuner.fit()
    assert sum(has_ended(row) for row in log.records("run")) < 3
    results = tune.Tuner.restore(str(tmp_path / "run"), trainable=train).fit()
    assert widths_of(results) == [SMALL, 16, 32]
    rows = log.records("run")
    assert sorted(row.params["width"] for row in rows if has_ended(row)) == [SMALL, 16, 32]
    assert {row.params["width"] for row in rows if row.is_pruned} == {LARGE, 2048}
