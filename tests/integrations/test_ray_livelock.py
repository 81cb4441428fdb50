"""A search in a space of which nearly nothing fits ends with its trials or a clear word, and repeats nothing."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray import cloudpickle, tune
from ray.tune.experiment import Experiment
from ray.tune.search import BasicVariantGenerator, ConcurrencyLimiter, Searcher
from ray.tune.search.hyperopt import HyperOptSearch
from ray.tune.search.optuna import OptunaSearch
from torch import nn

import perfguard_ray
from perfguard import Estimate, Guard, Workload
from perfguard.exceptions import NothingFeasibleWarning
from perfguard.session import HowEnded
from perfguard_ray import PerfGuardCallback, PerfGuardSearcher, PerfGuardVariantGenerator
from tests.doubles import BARE_A100, ReplayPredictor

FITS_UP_TO = 1600
"""Widths up to this one need less than the budget of 1 MiB, by far or by little."""
OPTIONS: dict[str, Any] = {"gpu": BARE_A100, "memory_budget": "1MiB", "log": False, "predictor": ReplayPredictor()}
NUM_SAMPLES = 6


def build(config: Mapping[str, Any]) -> Workload:
    return Workload(nn.Linear(64, round(config["width"])), inputs=(32, 64), loss=torch.mean, steps=3)


def bayesopt() -> Searcher:
    pytest.importorskip("bayes_opt", reason="bayesian-optimization is not installed")
    from ray.tune.search.bayesopt import BayesOptSearch

    return BayesOptSearch(random_search_steps=4, random_state=1)


SEARCHERS: dict[str, Callable[[], Searcher]] = {
    "optuna": lambda: OptunaSearch(seed=1),
    "hyperopt": lambda: HyperOptSearch(random_state_seed=1, n_initial_points=3),
    "bayesopt": bayesopt,
    "limited": lambda: ConcurrencyLimiter(HyperOptSearch(random_state_seed=2), max_concurrent=2),
}


def drive(search: PerfGuardSearcher, space: Mapping[str, Any], *, patience: int = 50) -> tuple[int, bool]:
    """As Tune would, one trial at a time: how many ran, and whether the search said that it ends."""
    search.set_search_properties("loss", "min", dict(space))
    launched = 0
    for call in range(patience):
        suggestion = search.suggest(f"t{call}")
        if suggestion == Searcher.FINISHED:
            return launched, True
        if suggestion is None:
            continue
        launched += 1
        search.on_trial_complete(f"t{call}", {"loss": 1 / suggestion["width"], "training_iteration": 1})
        if launched == NUM_SAMPLES:
            return launched, False
    raise AssertionError(f"{patience} questions, {launched} trials, and no end")


def rejected(search: Any) -> Counter[str]:
    rows = search.ledger.guard.log.records()
    return Counter(repr(sorted(row.params.items())) for row in rows if row.is_pruned)


def summarized(search: Any) -> int:
    """Configurations that the summary counts as pruned."""
    return perfguard_ray.summarize(search).num_pruned


@pytest.mark.parametrize("name", SEARCHERS)
def test_no_livelock_where_5_percent_of_the_space_fit(name: str) -> None:
    search = PerfGuardSearcher(SEARCHERS[name](), build=build, **OPTIONS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        launched, ended = drive(search, {"width": tune.uniform(1, 20 * FITS_UP_TO)})
    said = any(one.category is NothingFeasibleWarning for one in caught)
    assert launched == NUM_SAMPLES or (ended and (launched or said)), "a searcher may have its own reason to end, but not at 0"
    assert set(rejected(search).values()) <= {1}


@pytest.mark.parametrize("name", SEARCHERS)
def test_clear_end_where_nothing_of_the_space_fits(name: str) -> None:
    search = PerfGuardSearcher(SEARCHERS[name](), build=build, **OPTIONS)
    with pytest.warns(NothingFeasibleWarning, match=r"the budget of NVIDIA A100.*, so the search ends"):
        assert drive(search, {"width": tune.uniform(2000, 40_000)}) == (0, True)
    found = rejected(search)
    assert 0 < len(found) <= 100
    assert set(found.values()) == {1}


class Repeating(Searcher):
    """Proposes the same width for ever."""

    num_proposals = 0
    width = 4096

    def suggest(self, trial_id: str) -> Any:
        self.num_proposals += 1
        return {"width": self.width}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        pass


def test_insistent_searcher_ends_with_one_row() -> None:
    """A searcher that proposes the same misfit over and over leaves one row in the log."""
    searcher = Repeating("loss", "min")
    search = PerfGuardSearcher(searcher, build=build, **OPTIONS)
    with pytest.warns(NothingFeasibleWarning, match="Repeating proposed 100 configurations in a row that do not fit"):
        assert search.suggest("a") == Searcher.FINISHED
    assert (len(rejected(search)), search.ledger.num_repeated) == (1, 99)
    assert searcher.num_proposals == 100


def test_search_launches_at_once_what_likely_fits() -> None:
    """Otherwise a predictor that is unsure of a new machine would end a run that has trials to launch."""
    searcher = Repeating("loss", "min")
    searcher.width = 8  # which surely fits by its least memory
    unsure = ReplayPredictor(memory=Estimate(0.7 * 2**20, 0.5))  # 24% to break the budget of 1 MiB
    search = PerfGuardSearcher(searcher, build=build, **{**OPTIONS, "predictor": unsure})
    assert search.suggest("a") == {"width": 8}
    summary = perfguard_ray.summarize(search)
    assert (summary.num_launched, summary.num_pruned, summary.num_repeated) == (1, 0, 0)


@pytest.mark.parametrize("name", SEARCHERS)
def test_least_doubtful_configuration_runs_before_a_search_ends_with_nothing(name: str) -> None:
    """All are predicted to need a hundred times the budget, and each of them would fit. One trial that ran shows it."""
    predictor = ReplayPredictor(factor=100.0)
    search = PerfGuardSearcher(SEARCHERS[name](), build=build, **{**OPTIONS, "predictor": predictor})
    space = {"width": tune.uniform(600, 1200)}
    search.set_search_properties("loss", "min", space)
    first: Any = None
    for call in range(5):
        first = search.suggest(f"w{call}")
        if first is not None:
            break
    proposed = [row.params["width"] for row in search.ledger.guard.log.records() if row.verdict and row.verdict.action == "prune"]
    assert first == {"width": min(proposed)}
    (launched,) = [row for row in search.ledger.guard.log.records() if not row.is_pruned]
    assert "(but it is the least doubtful of all proposals, and none fits)" in launched.reason
    predictor.factor = 1.0  # learnt
    search.on_trial_result(f"w{call}", {"loss": 1.0, "training_iteration": 1})
    end_a_trial(search, f"w{call}")
    search.on_trial_complete(f"w{call}", {"loss": 1.0, "training_iteration": 1})
    assert drive(search, space)[0] > 0


def test_random_search_runs_its_least_doubtful_configuration_before_it_ends(tmp_path: Path) -> None:
    options = {**OPTIONS, "predictor": ReplayPredictor(factor=100.0)}
    with pytest.warns(NothingFeasibleWarning, match="1 of 2 points were left out"):
        search, configs = draw({"width": tune.uniform(600, 1200)}, 2, tmp_path, **options)
    proposed = [row.params["width"] for row in search.ledger.guard.log.records()]
    assert [config["width"] for config in configs] == [min(proposed)]
    assert search.total_samples == 1
    with pytest.warns(NothingFeasibleWarning, match="Nothing in the search space fits"):
        careful, none = draw({"width": tune.uniform(600, 1200)}, 1, tmp_path / "careful", **options, risk=0)
    assert none == []
    assert careful.total_samples == 0


def end_a_trial(search: Any, trial_id: str) -> None:
    search.ledger.start(trial_id, search.ledger.entries[trial_id].config)
    search.ledger.finish(trial_id, HowEnded("failed"))


@pytest.mark.parametrize("restored", [False, True])
@pytest.mark.parametrize("learns", [False, True])
def test_rejection_is_judged_again_after_a_trial_ends(learns: bool, restored: bool) -> None:
    # A guard that was wrong at first held it against a configuration for ever, also in the run that Tuner.restore makes.
    predictor = ReplayPredictor(factor=100.0)
    options: dict[str, Any] = {"guard": Guard(BARE_A100, memory_budget="1MiB", log=False, predictor=predictor)}
    search = PerfGuardSearcher(Repeating("loss", "min"), build=build, **options)
    ledger = search.ledger
    for _ in range(2):
        assert ledger.judge({"width": 512}).rejected
    ledger.entries["a"] = ledger.judge({"width": 1})
    assert ledger.judge({"width": 512}).rejected, "a trial that was launched has taught nothing yet"
    assert (summarized(search), ledger.num_repeated) == (1, 2)
    end_a_trial(search, "a")
    if restored:
        again = PerfGuardSearcher(Repeating("loss", "min"), build=build, **options)
        again.set_state(cloudpickle.loads(cloudpickle.dumps(search.get_state())))
        search, ledger = again, again.ledger
    predictor.factor = 1.0 if learns else 50.0
    ledger.entries["b"] = ledger.judge({"width": 512})
    assert ledger.entries["b"].rejected != learns
    summary = perfguard_ray.summarize(search)
    if learns:
        assert (summary.num_pruned, summary.num_launched) == (0, 2)
        return
    assert (summary.num_pruned, summary.num_launched) == (1, 1), "one configuration"
    del ledger.entries["b"]
    ledger.entries["c"] = ledger.judge({"width": 1})
    end_a_trial(search, "c")
    assert ledger.judge({"width": 512}).rejected
    assert ledger.judge({"width": 512}).rejected
    assert (summarized(search), ledger.num_repeated) == (1, 3)
    assert rejected(search) == {"[('width', 512)]": 3}, "once for each trial that has ended"


def test_search_does_not_wait_for_a_trial_that_is_ended_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tune reports neither a result nor an error of it, so a searcher without pruned trials would wait for ever."""
    monkeypatch.setattr("perfguard_ray.callback._stop", lambda trial: None)
    monkeypatch.setattr(PerfGuardCallback, "_how_failed", lambda *_: HowEnded("oom"))
    searcher = Repeating("loss", "min")
    searcher.width = 8
    search = PerfGuardSearcher(ConcurrencyLimiter(searcher, 1), build=build, **OPTIONS)
    callback = PerfGuardCallback(search)
    assert search.suggest("a") is not None
    trial: Any = SimpleNamespace(trial_id="a", config=search.ledger.entries["a"].config, latest_checkpoint_result=None)
    callback.on_trial_start(0, [], trial)
    callback.on_trial_recover(0, [], trial)  # Tune starts it again
    search.on_trial_complete("a")
    callback.on_trial_complete(0, [], trial)
    assert search._untold == ["a"], "it gets the score of the worst result"
    assert search.suggest("b") is not None, "the limiter has a free slot"
    assert [row.status for row in search.ledger.guard.log.records()][:1] == ["oom"]


class Exhausted(Repeating):
    """Has three proposals."""

    def suggest(self, trial_id: str) -> Any:
        self.num_proposals += 1
        return {"width": 4000 + self.num_proposals} if self.num_proposals <= 3 else Searcher.FINISHED


def test_exhausted_searcher_ends_where_nothing_fits() -> None:
    search = PerfGuardSearcher(Exhausted("loss", "min"), build=build, **OPTIONS)
    with pytest.warns(NothingFeasibleWarning, match="Exhausted has no more proposals: none of 3 fits the budget"):
        assert search.suggest("a") == Searcher.FINISHED


# --- Tune's own random and grid search


def draw(space: Mapping[str, Any], num_samples: int, folder: Path, **options: Any) -> tuple[PerfGuardVariantGenerator, list[Any]]:
    """The configurations that would run."""
    search = PerfGuardVariantGenerator(BasicVariantGenerator(random_state=3), build=build, **{**OPTIONS, **options})
    experiment = Experiment("run", lambda _: None, config=dict(space), num_samples=num_samples, storage_path=str(folder))
    search.add_configurations([experiment])
    configs = []
    while (trial := search.next_trial()) is not None:
        configs.append(trial.config)
    assert search.is_finished()
    return search, configs


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_grid_point_is_judged_once_for_all_draws(tmp_path: Path) -> None:
    """Each such point wrote a hundred rows, one for each learning rate that was drawn with it: 408 decisions for 8 launches."""
    space = {"width": tune.grid_search([8, 4096, 16, 8192, 5000, 6000]), "lr": tune.loguniform(1e-4, 1e-1)}
    with pytest.warns(NothingFeasibleWarning, match="16 of 24 points were left out"):
        search, configs = draw(space, 4, tmp_path)
    assert [config["width"] for config in configs] == [8, 16] * 4
    rows = search.ledger.guard.log.records()
    assert Counter(row.params["width"] for row in rows if row.is_pruned) == {4096: 1, 8192: 1, 5000: 1, 6000: 1}
    assert len(rows) == 12
    assert search.ledger.num_repeated == 4 * 99, "a part is given up once"


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_random_search_ends_where_nothing_fits(tmp_path: Path) -> None:
    with pytest.warns(NothingFeasibleWarning, match="Nothing in the search space fits, so no trial ran"):
        search, configs = draw({"width": tune.randint(2000, 40_000)}, 50, tmp_path)
    assert configs == []
    assert len(rejected(search)) <= 100
    assert set(rejected(search).values()) == {1}
