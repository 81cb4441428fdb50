"""Nothing runs unguarded in silence: whatever the way in, a trial without a verdict is counted, and the first is warned of."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import optuna
import pytest
import torch
from torch import nn

from perfguard import Workload
from perfguard.exceptions import ConfigurationError, UnguardedTrialError, UnguardedTrialWarning
from perfguard.rejections import Search
from perfguard_optuna import OptunaGuard, PerfGuardSampler, create_study, summarize
from tests.integrations.one_layer import COMPLETE, FAIL, LARGE, PRUNED, SMALL, build, make_pruner, settings

pytestmark = pytest.mark.usefixtures("pretended_gpu")


def typo(params: Mapping[str, Any]) -> Workload:
    return build({"width": params["widht"]})


def attribute_typo(params: Mapping[str, Any]) -> Workload:
    return build({"width": params.width})  # type: ignore[attr-defined]


def argument_typo(params: Mapping[str, Any]) -> Workload:
    return Workload(nn.Linear(64, params["width"]), inputs=(32, 64), los=torch.mean)  # type: ignore[call-arg]


class Branching(nn.Module):
    """Takes another way for another batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def never_asks(trial: optuna.Trial) -> float:
    return float(trial.suggest_int("width", SMALL, LARGE))


def asks(trial: optuna.Trial) -> float:
    width = trial.suggest_int("width", SMALL, LARGE)
    if trial.should_prune():
        raise optuna.TrialPruned
    return float(width)


def unguarded(caught: pytest.WarningsRecorder) -> list[warnings.WarningMessage]:
    return [warning for warning in caught if warning.category is UnguardedTrialWarning]


def test_objective_that_never_asks_is_warned_of() -> None:
    """20 of 20 trials ran unguarded, without a word: Optuna calls a pruner only where the objective asks."""
    study = optuna.create_study(pruner=make_pruner())
    with pytest.warns(UnguardedTrialWarning) as caught:  # by the second trial
        study.optimize(never_asks, n_trials=2)
    (warning,) = unguarded(caught)
    assert "does not call trial.should_prune()" in str(warning.message)
    assert "study = perfguard_optuna.create_study(...)" in str(warning.message)
    assert warning.filename == __file__
    study.optimize(never_asks, n_trials=18)  # a second warning would be an error here
    summary = summarize(study)
    assert (summary.num_launched, summary.num_unguarded) == (20, 20)


def test_sampler_without_its_pruner_is_warned_of() -> None:
    """An enqueued trial of 65,536 x 65,536 launched without a verdict, and without a word."""
    study = optuna.create_study(sampler=PerfGuardSampler(optuna.samplers.RandomSampler(seed=0), make_pruner()))
    study.enqueue_trial({"width": LARGE})
    with pytest.warns(UnguardedTrialWarning, match="does not call"):
        study.optimize(never_asks, n_trials=1)
    assert "does not call" in summarize(study).why_unguarded


def test_guarded_study_without_a_pruner_is_warned_of() -> None:
    with pytest.warns(UnguardedTrialWarning, match="runs without a PerfGuardPruner.*pruner=") as caught:
        create_study().optimize(never_asks, n_trials=3)
    assert len(unguarded(caught)) == 1


def test_block_that_is_never_entered_is_warned_of() -> None:
    guard = make_pruner(build=None).guard

    def objective(trial: optuna.Trial) -> float:
        guard.trial(trial, nn.Linear(64, LARGE), (32, 64), loss=torch.mean)
        return never_asks(trial)

    with pytest.warns(UnguardedTrialWarning, match=r"Write `with guard.trial\(...\) as run:`"):
        optuna.create_study().optimize(objective, n_trials=1)


def test_slip_in_a_default_is_warned_of() -> None:
    """Every trial of the plain study was judged at 8."""
    study = optuna.create_study(pruner=make_pruner(build=lambda params: build({"width": params.get("widht", SMALL)})))
    with pytest.warns(UnguardedTrialWarning, match=r"reads 'widht' \(did you mean 'width'\?\).*its default counts") as caught:
        study.optimize(asks, n_trials=3)
    assert len(unguarded(caught)) == 1


@pytest.mark.parametrize(
    ("arguments", "fields", "words"),
    [
        (("trial", "model"), {"loss_fn": torch.mean}, r"Workload has no field 'loss_fn' \(did you mean 'loss'\?\)"),
        (("model", "trial"), {}, "takes the trial that Optuna hands to the objective, and then the model, but got Linear"),
    ],
)
def test_wrong_argument_of_a_block_is_an_error(arguments: tuple[str, ...], fields: dict[str, Any], words: str) -> None:
    """They were launched unguarded, with a warning in Python's own words."""
    known: dict[str, Any] = {"trial": optuna.create_study().ask(), "model": nn.Linear(64, 8)}
    with pytest.raises(ConfigurationError, match=words):
        make_pruner().trial(known[arguments[0]], known[arguments[1]], (32, 64), **fields)


def test_an_objective_that_asks_and_goes_on_saved_nothing() -> None:
    def objective(trial: optuna.Trial) -> float:
        trial.suggest_int("width", LARGE, LARGE)
        return float(trial.should_prune())

    study = optuna.create_study(pruner=make_pruner(memory_budget="100KiB"))
    study.optimize(objective, n_trials=3)
    summary = summarize(study)
    assert [trial.value for trial in study.trials] == [1.0, 1.0, 1.0]
    assert (summary.num_launched, summary.num_pruned, summary.num_unguarded) == (3, 0, 3)


def test_failed_and_self_pruned_trials_are_counted() -> None:
    def objective(trial: optuna.Trial) -> float:
        trial.suggest_int("width", SMALL, LARGE)
        raise (ValueError if trial.number else optuna.TrialPruned)

    study = optuna.create_study(pruner=make_pruner())
    study.optimize(objective, n_trials=2, catch=ValueError)  # a warning would be an error here
    assert [trial.state for trial in study.trials] == [PRUNED, FAIL]
    summary = summarize(study)
    assert summary.num_unguarded == 2
    with pytest.warns(UnguardedTrialWarning, match="never judged"):  # the warning was not spent on those
        study.optimize(never_asks, n_trials=2)


@pytest.mark.parametrize("options", [{}, {"build": None}])
@pytest.mark.parametrize("new_study", [optuna.create_study, create_study])
@pytest.mark.parametrize("error", [ValueError, optuna.TrialPruned, KeyboardInterrupt])
def test_strict_guard_leaves_trial_errors_as_they_are(
    error: type[BaseException], new_study: Callable[..., optuna.Study], options: dict[str, Any]
) -> None:
    """It put its own in the place of a failure before the question, so catch= caught nothing, and Ctrl-C was an error."""

    def objective(trial: optuna.Trial) -> float:
        if not trial.number:
            raise error("its own")
        return asks(trial)

    study = new_study(pruner=make_pruner(strict=True, **options))
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt, match="its own"):
            study.optimize(objective, n_trials=1)
    else:
        study.optimize(objective, n_trials=1, catch=ValueError)
    assert [trial.state for trial in study.trials] == [PRUNED if error is optuna.TrialPruned else FAIL]
    assert summarize(study).num_unguarded == 1


@pytest.mark.parametrize("options", [{"build": None}, {"build": typo}, {"build": build}])
def test_strict_error_does_not_say_that_trials_run(options: dict[str, Any]) -> None:
    study = optuna.create_study(pruner=make_pruner(strict=True, **options))
    with pytest.raises(UnguardedTrialError) as raised:
        study.optimize(never_asks if options["build"] is build else asks, n_trials=3)
    assert "unguarded" not in str(raised.value)
    if options["build"] is build:  # nobody can know before its first trial has ended; the second fails at its first suggestion
        assert "does not call trial.should_prune()" in str(raised.value)
        assert [trial.state for trial in study.trials] == [COMPLETE, FAIL]


@pytest.mark.parametrize("strict", [False, True])
def test_block_with_nothing_to_judge_warns_or_raises(strict: bool) -> None:
    guard = make_pruner(build=None, strict=strict).guard

    def objective(trial: optuna.Trial) -> float:
        with guard.trial(trial):
            return never_asks(trial)

    study = optuna.create_study()
    if strict:
        with pytest.raises(UnguardedTrialError, match="does not know what the trials run"):
            study.optimize(objective, n_trials=2)
        return
    with pytest.warns(UnguardedTrialWarning, match="does not know what the trials run") as caught:
        study.optimize(objective, n_trials=2)
    assert len(unguarded(caught)) == 1
    assert [record.status for record in guard.log.records()] == ["ok", "ok"]


def test_watched_study_leaves_the_sampler_as_it_is() -> None:
    """The way in must not change what Optuna proposes."""

    def proposed(pruner: optuna.pruners.BasePruner | None) -> list[dict[str, Any]]:
        study = optuna.create_study(pruner=pruner, sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=3))
        study.optimize(asks, n_trials=12)
        return [trial.params for trial in study.trials]

    assert proposed(make_pruner(memory_budget="1GiB")) == proposed(None)


def test_stopping_a_watched_study_stops_it() -> None:
    study = optuna.create_study(pruner=make_pruner(), sampler=optuna.samplers.GridSampler({"width": [SMALL, 9, 10]}))
    study.optimize(asks, n_trials=20)
    assert len(study.trials) == 3


@pytest.mark.parametrize(
    ("faulty", "words"),
    [
        (typo, r"reads 'widht' \(did you mean 'width'\?\), which the trial has not suggested"),
        (attribute_typo, r"has no attribute 'width' \(parameters are items: params\['width'\]\)"),
        (lambda trial: build({"width": trial.suggest_int("width", 1, 2)}), "build gets the parameters .* and not the trial"),
        (lambda params: Workload(nn.Linear(64, 8).cuda(), inputs=(32, 64)), r"leave out \.cuda\(\)"),
        (lambda params: Workload(nn.Linear(64, 8), inputs=(32, 64), loss=nn.MSELoss), r"loss=MSELoss\(\)"),  # type: ignore[arg-type]
        (lambda params: Workload(nn.Linear(64, 8), inputs=(32.0, 64), loss=torch.mean), r"whole numbers, but got \(32\.0, 64\)"),
        (lambda params: nn.Linear(64, params["width"]), "must return a perfguard.Workload, but returned Linear"),
        (lambda params: Workload(nn.Sequential(nn.Linear(64, 8), Branching()), (32, 64), loss=torch.mean), "TraceError"),
        (argument_typo, r"unexpected keyword argument 'los' \(did you mean 'loss'\?\)"),
        (lambda params: Workload(nn.Liner(64, 8), inputs=(32, 64)), r"no attribute 'Liner' \(did you mean 'Linear'\?\)"),  # type: ignore[attr-defined]
    ],
)
def test_failing_build_says_what_to_mend(faulty: Callable[..., Any], words: str) -> None:
    study = create_study(pruner=make_pruner(build=faulty))
    with pytest.warns(UnguardedTrialWarning, match=words) as caught:
        study.optimize(never_asks, n_trials=3)
    assert len(unguarded(caught)) == 1
    assert summarize(study).num_unguarded == 3
    assert all(trial.constraints == {"perfguard:memory": 0.0} for trial in study.trials)
    assert summarize(study).why_unguarded


def workload(**fields: Any) -> Workload:
    return Workload(nn.Linear(64, 8), inputs=(32, 64), loss=torch.mean if fields.get("mode") != "infer" else None, **fields)


UNBOUND = [
    ({"time_budget": "1ms"}, {}, "time_budget needs the number of steps of a trial"),
    ({"cost_budget": 1, "price_per_hour": 360}, {}, "cost_budget needs the number of steps of a trial"),
    ({"epoch_time_budget": "1min"}, {}, "epoch_time_budget needs the number of steps of an epoch"),
    ({"epoch_time_budget": "1min"}, {"mode": "infer"}, "epoch_time_budget limits training"),
    ({"latency_budget": "1ms"}, {}, "latency_budget limits inference, but the workload trains"),
    ({"energy_budget": "1J"}, {}, "energy_budget limits inference, but the workload trains"),
    ({"energy_budget": "1J"}, {"mode": "infer"}, "energy_budget needs a predictor that knows energy"),
]


@pytest.mark.parametrize(("budget", "fields", "words"), UNBOUND)
def test_budget_that_never_binds_is_warned_of(budget: dict[str, Any], fields: dict[str, Any], words: str) -> None:
    """These were accepted, never enforced, and nothing said so."""
    pruner = make_pruner(build=lambda params: params["width"] and workload(**fields), **budget)
    study = create_study(pruner=pruner)
    with pytest.warns(UnguardedTrialWarning, match=words) as caught:
        study.optimize(never_asks, n_trials=3)
    (warning,) = unguarded(caught)
    assert warning.filename == __file__
    with pytest.raises(UnguardedTrialError, match=words):
        create_study(pruner=make_pruner(build=lambda _: workload(**fields), strict=True, **budget)).optimize(
            never_asks, n_trials=3
        )
    with pytest.raises(ConfigurationError, match=words):
        make_pruner(strict=True, **budget).guard.check(workload(**fields))


def run_strictly(objective: Callable[[optuna.Trial], float], way: str = "guarded", **options: Any) -> optuna.Study:
    pruner = make_pruner(strict=True, **options)
    sampler = PerfGuardSampler(optuna.samplers.RandomSampler(seed=0), pruner) if way == "sampler" else None
    study = (create_study if way == "guarded" else optuna.create_study)(sampler=sampler, pruner=pruner)
    study.optimize(objective, n_trials=3)
    return study


@pytest.mark.parametrize("way", ["plain", "guarded", "sampler"])
@pytest.mark.parametrize("faulty", [typo, attribute_typo])
def test_a_strict_guard_raises_instead_of_launching(way: str, faulty: Callable[..., Any]) -> None:
    trained = []

    def objective(trial: optuna.Trial) -> float:
        value = asks(trial)
        trained.append(value)
        return value

    with pytest.raises(UnguardedTrialError, match=r"widht|params"):
        run_strictly(objective, way, build=faulty)
    assert not trained
    assert len(run_strictly(objective, way).trials) >= 3


def test_strict_error_quoting_oom_does_not_prune() -> None:
    """It would pass for a trial that ran out of memory, and the study would go on."""

    def failing(params: Mapping[str, Any]) -> Workload:
        raise ValueError("CUDA out of memory")

    with pytest.raises(UnguardedTrialError, match="out of memory"):
        run_strictly(never_asks, build=failing)


def test_warnings_point_at_the_line_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them pointed at perfguard/guard.py. One of these comes from a thread of Optuna's."""
    monkeypatch.setattr("perfguard_optuna.guard.Search", functools.partial(Search, most_rejected=4))
    guard = OptunaGuard(**settings(on_violation="warn"))

    def inline(trial: optuna.Trial) -> float:
        with guard.trial(trial, nn.Linear(64, LARGE), (32, 64), loss=torch.mean):
            return 0.0

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optuna.create_study().optimize(inline, n_trials=1)
        guard.check(nn.Linear(64, LARGE), (32, 64), loss=torch.mean)
        create_study().optimize(
            lambda trial: float(trial.suggest_int("width", LARGE, 2 * LARGE)), pruner=make_pruner(), n_trials=1, n_jobs=2
        )
        create_study().optimize(never_asks, pruner=make_pruner(build=typo), n_trials=1)
    ours = [warning for warning in caught if warning.category.__module__ == "perfguard.exceptions"]
    assert len(ours) >= 3
    assert {warning.filename for warning in ours} == {__file__}
