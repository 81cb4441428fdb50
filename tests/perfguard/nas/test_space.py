"""A space of widths gives the verdicts of the networks that it stands for, at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from perfguard import Prediction, Workload
from perfguard.exceptions import BuildError, ConfigurationError, TraceError, WorkloadError
from perfguard.graph import roofline_s
from perfguard.nas import ElasticSpace, LatencyConstraint
from tests.doubles import BARE_A100, TOY_CPU, ReplayPredictor

INPUTS = (4, 3, 16, 16)
WIDTHS = {"stem": range(8, 49), "body": range(8, 65, 4), "hidden": (32, 48, 64, 96)}


def build(stem: int, body: int, hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, stem, 3), nn.BatchNorm2d(stem), nn.ReLU(), nn.Conv2d(stem, body, 3, stride=2), nn.GELU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * body, hidden), nn.ReLU(), nn.Linear(hidden, 10),
    )  # fmt: skip


def described(**widths: int) -> nn.Module:
    with torch.device("meta"):
        return build(**widths)


def candidates(number: int, seed: int = 0) -> list[dict[str, int]]:
    rng = random.Random(seed)
    return [{name: rng.choice(list(values)) for name, values in WIDTHS.items()} for _ in range(number)]


def assert_alike(found: Prediction | None, expected: Prediction) -> None:
    assert found is not None
    for name in ("peak_memory", "step_time"):
        one, other = getattr(found, name), getattr(expected, name)
        assert (one.median, one.log_sigma) == pytest.approx((other.median, other.log_sigma), rel=4e-6)
    assert found.predictor == expected.predictor


@pytest.mark.parametrize("gpu", ["cpu", "t4"])
def test_a_verdict_is_that_of_the_network(gpu: str) -> None:
    constraint = LatencyConstraint(gpu, max_latency_ms=0.5, inputs=INPUTS)
    space = constraint.elastic(build, WIDTHS)
    picked = candidates(40)
    before = space.num_traces
    verdicts = space.verdicts(picked)
    assert space.why_traced is None
    assert space.num_traces - before < 10
    for widths, verdict in zip(picked, verdicts, strict=True):
        expected = constraint(described(**widths))
        assert (verdict.action, verdict.reason) == (expected.action, expected.reason)
        assert verdict.margins == pytest.approx(expected.margins, abs=1e-5)
        assert_alike(verdict.prediction, expected.prediction)  # type: ignore[arg-type]
        assert_alike(space(widths).prediction, expected.prediction)  # type: ignore[arg-type]


def test_candidates_may_be_rows_of_an_array() -> None:
    space = LatencyConstraint("cpu", max_latency_ms=0.5, inputs=INPUTS).elastic(build, WIDTHS)
    picked = candidates(5)
    rows = np.array([list(widths.values()) for widths in picked])
    assert space.seconds(rows).tolist() == space.seconds(picked).tolist()
    assert space.memory_bytes(rows).tolist() == [found.peak_memory.median for found in space.predictions(picked)]
    assert space.verdicts([]) == []


def test_a_filter_gives_back_what_passes_in_order() -> None:
    constraint = LatencyConstraint("cpu", max_latency_ms=100, inputs=INPUTS)
    picked = candidates(30)
    seconds = constraint.elastic(build, WIDTHS).seconds(picked)
    limited = LatencyConstraint("cpu", max_latency_ms=1e3 * float(np.median(seconds)), inputs=INPUTS).elastic(build, WIDTHS)
    expected = [widths for widths, s in zip(picked, seconds, strict=True) if s < np.median(seconds)]
    assert 5 < len(expected) < 25
    assert limited.filter(iter(picked)) == expected


def test_what_is_learnt_holds_for_all_that_follows() -> None:
    constraint = LatencyConstraint("cpu", max_latency_ms=100, inputs=INPUTS)
    space = constraint.elastic(build, WIDTHS)
    rest, told = candidates(6, seed=1), candidates(5, seed=2)
    before = space.seconds(rest)
    for widths, seconds in zip(told, space.seconds(told), strict=True):
        space.learn(widths, 3 * float(seconds))
    assert (space.seconds(rest) > 1.5 * before).all()
    for row, found in zip(rest, space.predictions(rest), strict=True):
        assert_alike(found, constraint.predict(described(**row)))


def test_rates_by_kind_hold_for_all_that_follows() -> None:
    constraint = LatencyConstraint(TOY_CPU, max_latency_ms=100, inputs=INPUTS, predictor=ReplayPredictor())
    space = constraint.elastic(build, WIDTHS)
    for widths in candidates(10, seed=2):
        space.learn(widths, 2 * float(roofline_s(space.graph_of(widths), TOY_CPU).sum()))
    rest = candidates(6, seed=1)
    for row, found in zip(rest, space.predictions(rest), strict=True):
        assert "rates fitted to measured networks" in found.predictor
        assert_alike(found, constraint.predict(described(**row)))


def test_elastic_asks_predictor_without_batches_singly() -> None:
    constraint = LatencyConstraint(BARE_A100, max_memory="200KiB", inputs=INPUTS, predictor=ReplayPredictor())
    space = constraint.elastic(build, WIDTHS)
    picked = candidates(8)
    assert space.memory_bytes(picked).tolist() == [constraint.graph_of(described(**row)).peak_live_bytes for row in picked]
    assert {verdict.action for verdict in space.verdicts(picked)} == {"launch", "prune"}


def test_workloads_can_be_built_too() -> None:
    def half(stem: int) -> Workload:
        return Workload(nn.Conv2d(3, stem, 3), INPUTS, mode="infer", precision="fp16")

    constraint = LatencyConstraint("t4", max_latency_ms=1)
    space = constraint.elastic(half, {"stem": range(8, 72)})
    for stem in (9, 16, 64):
        assert_alike(space.predictions([{"stem": stem}])[0], constraint.predict(half(stem)))


def test_space_constrain_tells_optuna_the_distance() -> None:
    """How far a candidate is from the limit."""
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seconds = LatencyConstraint(TOY_CPU, max_latency_ms=1, inputs=INPUTS).elastic(build, WIDTHS).seconds(candidates(20))
    limit_ms = 1e3 * float(np.median(seconds))
    space = LatencyConstraint(TOY_CPU, max_latency_ms=limit_ms, inputs=INPUTS).elastic(build, WIDTHS)

    def objective(trial: Any) -> float:
        widths = {name: trial.suggest_categorical(name, list(values)) for name, values in space.widths.items()}
        verdict = space.constrain(trial, widths)
        if verdict.action == "prune":
            raise optuna.TrialPruned(verdict.reason)
        return float(sum(widths.values()))

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(objective, n_trials=12)
    assert {trial.state.name for trial in study.trials} == {"PRUNED", "COMPLETE"}
    for trial in study.trials:
        margin = trial.constraints["perfguard:latency"]
        assert (trial.state == optuna.trial.TrialState.PRUNED) == (margin > 0)


def broken(stem: int) -> nn.Module:
    raise RuntimeError(f"no network of {stem}")


def wrong_input(stem: int) -> nn.Module:
    return nn.Conv2d(stem, 8, 3)


@pytest.mark.parametrize(
    ("made_by", "widths", "error", "match"),
    [
        (build, {}, ConfigurationError, "Give 1 to 64 widths by name"),
        (build, [8, 16], ConfigurationError, "Give 1 to 64 widths by name"),
        (broken, {"stem": []}, ConfigurationError, "'stem' must be whole numbers .*; there are none"),
        (broken, {"stem": [8, 8.5]}, ConfigurationError, r"8\.5 is among them"),
        (broken, {"stem": [-1]}, ConfigurationError, "-1 is among them"),
        (broken, {"stem": [True]}, ConfigurationError, "True is among them"),
        (broken, {"stem": "wide"}, ConfigurationError, "must be whole numbers such as"),
        (broken, {"stem": 8}, ConfigurationError, "must be whole numbers such as"),
        (broken, {"the stem": [8]}, ConfigurationError, "named as an argument of build"),
        (broken, {"stem": range(8, 99)}, BuildError, r"build\(stem=\d+\) raised RuntimeError: no network of"),
        (build, {"stem": range(8, 99)}, BuildError, "missing 2 required positional arguments"),
        (wrong_input, {"stem": range(4, 99)}, TraceError, r"build\(stem=\d+\) cannot be traced: "),
        (lambda stem: stem, {"stem": range(4, 99)}, BuildError, "must return a module.*but returned int"),
    ],
)
def test_what_cannot_be_a_space_is_refused(made_by: Callable[..., Any], widths: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        LatencyConstraint("cpu", max_latency_ms=1, inputs=INPUTS).elastic(made_by, widths)


@pytest.mark.parametrize(
    ("candidate", "match"),
    [
        ({"stem": 8, "body": 8, "hidden": 32, "depth": 2}, "there is no width 'depth'"),
        ({"stem": 8, "body": 8}, "'hidden' is missing"),
        ({"stem": 7, "body": 8, "hidden": 32}, "stem=7 is not among the values that were declared"),
        ({"stem": 8, "body": 9, "hidden": 32}, "body=9 is not among the values"),
        ({"stem": 8.0, "body": 8, "hidden": 32}, r"stem=8\.0 is not among the values"),
        (np.array([8, 8]), "widths by name, or a row of an array"),
        ("stem", "widths by name, or a row of an array"),
    ],
)
def test_what_is_no_candidate_is_refused(space: ElasticSpace, candidate: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        space.verdicts([candidate])


@pytest.fixture(scope="module")
def space() -> ElasticSpace:
    return LatencyConstraint("cpu", max_latency_ms=1, inputs=INPUTS).elastic(build, WIDTHS)


def test_elastic_names_unreadable_file_with_widths(tmp_path: Path) -> None:
    constraint = LatencyConstraint(TOY_CPU, max_latency_ms=5, predictor=ReplayPredictor())
    with pytest.raises(WorkloadError, match=r"build\(a=\d+\) cannot be traced: .*missing\.onnx"):
        constraint.elastic(lambda a: tmp_path / "missing.onnx", {"a": range(8, 100)})


def test_one_candidate_alone_is_not_taken_for_several(space: ElasticSpace) -> None:
    with pytest.raises(ConfigurationError, match="Give a list of candidates"):
        space.verdicts({"stem": 8, "body": 8, "hidden": 32})  # type: ignore[arg-type]


def test_the_users_random_numbers_are_left_alone() -> None:
    constraint = LatencyConstraint("cpu", max_latency_ms=1, inputs=INPUTS)
    torch.manual_seed(0)
    random.seed(0)
    expected = torch.rand(()).item(), random.random()
    torch.manual_seed(0)
    random.seed(0)
    constraint.elastic(build, WIDTHS).verdicts(candidates(4))
    assert (torch.rand(()).item(), random.random()) == expected
