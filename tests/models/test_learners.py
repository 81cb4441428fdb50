"""What can be trained from tables: each learns, is kept in a file as it was, and goes on where it was killed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from sklearn.ensemble import ExtraTreesRegressor, HistGradientBoostingRegressor
from torch import nn

from perfguard import Workload
from perfguard.devices import resolve_device
from perfguard.exceptions import PredictorError
from perfguard.graph import OpGraph, trace
from perfguard.measure import Measurement
from perfguard.predictor import Observation, Predictor
from perfguard_models import registry, served
from perfguard_models.calibration import NEW_GPU, OPERATOR, Calibration, Error, calibrated, on_new_gpu
from perfguard_models.dataset import VIEWS, Run
from perfguard_models.ensemble import GuardEnsemble
from perfguard_models.learner import Epochs, Learner
from perfguard_models.perfseer import pcgrad
from perfguard_models.registry import NAMES, learner_class, source_of
from perfguard_models.trees import Forest, forest_of_bagging, forest_of_boosting

SMALL: dict[str, dict[str, Any]] = {
    "guardnet": {"epochs": 4, "trees": 20, "forests": 2},
    "guardnet-network": {"epochs": 4, "hidden": 16},
    "dnnabacus": {"trees": 4},
    "trees": {"trees": 30},
    "trees-no-replay": {"trees": 30},
    **{name: {"epochs": 60, "hidden": 16, "learning_rate": 0.01} for name in ("dnnperf", "perfseer", "dippm", "lilou")},
}


def graph_of(width: int, depth: int, batch: int) -> OpGraph:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(depth):
        layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
    with torch.device("meta"):
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    return trace(Workload(model, inputs=(batch, 3, 32, 32), mode="infer"))


@pytest.fixture(scope="module")
def graphs() -> list[OpGraph]:
    return [graph_of(width, depth, batch) for width in (8, 16, 32) for depth in (1, 3) for batch in (4, 8, 16, 32, 64)]


@pytest.fixture(scope="module")
def runs(graphs: list[OpGraph]) -> list[Run]:
    """Runs whose memory and time are simple functions of the replay and the roofline."""
    found = []
    for gpu in ("a100", "t4"):
        device = resolve_device(gpu)
        for graph in graphs:
            view = {name: value for item in VIEWS.values() for name, value in item.see(graph, device).items()}
            memory = math.log(graph.reserved_bytes + device.context_bytes + 1.2e9)
            time = float(np.log((view["count"] * view["roofline"]).sum())) + (0.9 if gpu == "t4" else 0.5)
            labels = {"memory": memory, "time": time, "gpu_util": 0.3, "sm_active": -0.4}
            batch = graph.ops[0].shape[0]
            found.append(Run("workload", "", "f", "m", gpu, "infer", "", "s", batch, labels, device.memory_bytes, True, view))
    return found


def fitted(name: str, runs: list[Run], *, epochs: int | None = None, **options: Any) -> Learner:
    learner = learner_class(name)(**SMALL.get(name, {}) | ({} if epochs is None else {"epochs": epochs}))
    learner.fit(runs, **options)
    return learner


PAPERS = ("dnnperf", "perfseer", "dippm", "lilou", "dnnabacus")
"""They learn by the same loop as GuardNet's network, for sixty epochs."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in PAPERS else ()) for name in NAMES])
def test_a_learner_learns_and_its_tensors_are_all_of_it(name: str, runs: list[Run]) -> None:
    learner = fitted(name, runs)
    predicted = learner.predict(runs)
    for target, values in predicted.items():
        assert values.shape == (len(runs),), target
        known = np.isfinite(values)
        assert known.all() or not known.any(), target
    time = np.array([run.labels["time"] for run in runs])
    before = np.abs(time - np.median(time)).mean()
    if name != "flops":  # a line through FLOPs is worse than the median here, where launches count
        assert np.abs(predicted["time"] - time).mean() < before
    tensors, settings = learner.state()
    kept = load_tensors(save_tensors({key: value.contiguous() for key, value in tensors.items()}))
    again = learner_class(name).from_state(kept, json.loads(json.dumps(settings))).predict(runs)
    for target, values in predicted.items():
        np.testing.assert_allclose(again[target], values, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", ["guardnet", "trees"])
def test_physics_with_a_constant_is_learnt_closely(name: str, runs: list[Run]) -> None:
    learner = learner_class(name)(**({"trees": 200, "epochs": 40} if name == "guardnet" else {"trees": 300}))
    learner.fit(runs)
    predicted = learner.predict(runs)
    for target in ("memory", "time"):
        error = np.abs(np.exp(predicted[target] - np.array([run.labels[target] for run in runs])) - 1)
        assert np.median(error) < 0.06, target


@pytest.mark.parametrize("name", ["guardnet-network", "dippm"])
def test_a_killed_training_ends_as_if_it_had_not_been(name: str, runs: list[Run], tmp_path: Path) -> None:
    whole = fitted(name, runs, epochs=4).predict(runs)
    path = tmp_path / "checkpoint"

    def kill(done: int, of: int, loss: float) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fitted(name, runs, epochs=4, on_epoch=kill, checkpoint=path)
    assert path.is_file()
    epochs: list[int] = []
    resumed = fitted(name, runs, epochs=4, on_epoch=lambda done, of, loss: epochs.append(done), checkpoint=path)
    assert epochs[0] > 1
    for target, values in resumed.predict(runs).items():
        np.testing.assert_allclose(values, whole[target], rtol=1e-5, equal_nan=True)


def test_anothers_checkpoint_is_not_read(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    assert list(Epochs(3, tmp_path / "c", "a", layer=layer)) == [0, 1, 2]
    assert list(Epochs(3, tmp_path / "c", "b", layer=layer)) == [0, 1, 2]
    assert list(Epochs(3, tmp_path / "c", "b", layer=layer)) == []


def test_a_pair_that_brackets_the_card_moves_the_prediction_between_them(runs: list[Run]) -> None:
    """No memory is measured; of each network one batch fitted and the next did not. The truth is twice the live bytes."""
    from perfguard_models.baselines import column

    start = column(runs, "log_live")
    bounded = []
    for index, run in enumerate(runs):
        capacity = math.exp(start[index // 5 * 5 + 2]) * 2  # the third batch of each five is at the limit
        fits = math.exp(start[index]) * 2 <= capacity
        bounded.append(run._replace(labels={}, capacity_bytes=int(capacity), fits=fits, structure=f"s{index // 5}"))
    learner = GuardEnsemble(networks=0, trees=60)
    learner.fit(bounded)
    says = learner.predict(bounded)["memory"]
    right = [(value <= math.log(run.capacity_bytes)) == run.fits for value, run in zip(says, bounded, strict=True)]
    assert np.mean(right) > 0.9
    physics = [(value <= math.log(run.capacity_bytes)) == run.fits for value, run in zip(start, bounded, strict=True)]
    assert np.mean(physics) < 0.85


@pytest.mark.parametrize("name", ["dnnperf", "perfseer", "dippm", "lilou"])
def test_a_papers_network_answers_within_what_it_has_seen(name: str, runs: list[Run]) -> None:
    learner = fitted(name, runs, epochs=5)
    huge = [
        run._replace(view=run.view | {"nodes": run.view["nodes"] * 1e9, "globals": run.view["globals"] * 1e9}) for run in runs
    ]
    seen = [run.labels["time"] for run in runs]
    margin = max(1.0, float(np.std(seen)))
    said = learner.predict(huge)["time"]
    assert ((said >= min(seen) - margin - 1e-3) & (said <= max(seen) + margin + 1e-3)).all()


def test_a_quantity_without_labels_is_not_guessed(runs: list[Run]) -> None:
    learner = fitted("dippm", [run._replace(labels={"time": run.labels["time"]}) for run in runs], epochs=5)
    said = learner.predict(runs)
    assert np.isfinite(said["time"]).all()
    assert np.isnan(said["memory"]).all()


def test_predictions_are_made_again_when_the_code_changes_but_not_for_a_comment(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: source_of(name) for name in ("trees", "dippm")}
    read = Path.read_text

    def changed(added: str) -> None:
        registry._code_of.cache_clear()
        monkeypatch.setattr(Path, "read_text", lambda path, **k: read(path, **k) + (added if path.name == "trees.py" else ""))

    changed("# nothing\n")
    assert source_of("trees") == before["trees"]
    changed("X = 1\n")
    assert source_of("trees") != before["trees"]
    assert source_of("dippm") == before["dippm"]  # it has no trees
    monkeypatch.undo()
    registry._code_of.cache_clear()


@pytest.fixture(scope="module")
def table() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    x = random.normal(size=(300, 5)).astype(np.float32)
    return x, np.sin(x[:, 0]) + x[:, 1] * x[:, 2]


def test_trees_as_arrays_say_what_scikit_learn_says(table: tuple[Any, Any]) -> None:
    x, y = table
    boosting = HistGradientBoostingRegressor(max_iter=30).fit(x, y)
    np.testing.assert_allclose(forest_of_boosting(boosting).predict(x), boosting.predict(x), atol=1e-5)
    bagging = ExtraTreesRegressor(20, max_leaf_nodes=30, random_state=0).fit(x, y)
    np.testing.assert_allclose(forest_of_bagging(bagging).predict(x), bagging.predict(x), atol=1e-5)


def test_trees_that_lead_astray_are_refused(table: tuple[Any, Any]) -> None:
    x, y = table
    tensors = forest_of_boosting(HistGradientBoostingRegressor(max_iter=3).fit(x, y)).tensors("t")
    assert np.array_equal(Forest.from_tensors(tensors, "t").predict(x), Forest.from_tensors(dict(tensors), "t").predict(x))
    for field, value in (("left", 10**6), ("right", 0), ("roots", -1), ("feature", -1)):
        changed = {key: tensor.clone() for key, tensor in tensors.items()}
        changed[f"t.{field}"][0] = value
        with pytest.raises(ValueError, match="damaged"):
            Forest.from_tensors(changed, "t")


def test_gradient_surgery_takes_out_what_conflicts() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    first, second = torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 1.0])
    pcgrad([(parameter * first).sum(), (parameter * second).sum()], [parameter])
    # (1, 0) loses its part along (-1, 1), and becomes (0.5, 0.5); (-1, 1) loses its part along (1, 0), and becomes (0, 1).
    assert parameter.grad is not None
    torch.testing.assert_close(parameter.grad, torch.tensor([0.5, 1.5]))


# Calibration


def test_intervals_hold_on_what_is_drawn_alike() -> None:
    random = np.random.default_rng(1)
    spreads = random.uniform(0.01, 0.2, size=4000)
    residuals = random.standard_t(4, size=4000) * (spreads + 0.02)
    errors = [Error("memory", "a", float(r), float(s)) for r, s in zip(residuals, spreads, strict=True)]
    calibration = calibrated(errors[:2000])
    inside = [abs(e.residual) <= 1.645 * calibration.log_sigma("memory", "a", e.spread) for e in errors[2000:]]
    assert 0.87 < np.mean(inside) < 0.93


def test_a_gpu_that_was_never_seen_has_its_own_width() -> None:
    seen = [Error("time", "a", 0.1 * (-1) ** i, 0.01) for i in range(200)]
    unseen = [Error("time", NEW_GPU, 0.4 * (-1) ** i, 0.01) for i in range(200)]
    calibration = calibrated(seen + unseen)
    known, new = (calibration.log_sigma("time", "a", 0.01, known_gpu=flag) for flag in (True, False))
    assert new == pytest.approx(4 * known)
    assert calibration.log_sigma("time", "b", 0.01) == pytest.approx(known)


def test_single_operators_do_not_widen_the_intervals_of_whole_steps() -> None:
    steps = [Error("time", "a", 0.1 * (-1) ** i, 0.02) for i in range(200)]
    operators = [Error("time", group, 3.0 * (-1) ** i, 0.0) for group in (OPERATOR, on_new_gpu(OPERATOR)) for i in range(2000)]
    with_them, alone = calibrated(steps + operators), calibrated(steps)
    assert with_them.log_sigma("time", "b", 0.02) == alone.log_sigma("time", "b", 0.02)
    assert with_them.log_sigma("time", OPERATOR, 0.0) == pytest.approx(3.0 / 1.645, rel=1e-3)
    assert with_them.scale_of("time", "a", known_gpu=False) == alone.scale_of("time", "a")  # no whole step on a new GPU


# Served


@pytest.fixture
def weights(runs: list[Run], tmp_path: Path) -> Path:
    calibration = Calibration({"memory": 0.02, "time": 0.05}, {"memory": 1.5, "time": 1.5, f"time/{NEW_GPU}": 6.0})
    card = {"version": 1, "trained_devices": ["a100-pcie-40gb"]}
    served.write_trained(tmp_path / "dippm", "dippm", fitted("dippm", runs), card, calibration)
    return tmp_path / "dippm"


def test_served_weights_predict_and_learn_an_offset(weights: Path, graphs: list[OpGraph]) -> None:
    predictor = served.load("dippm", weights)
    assert isinstance(predictor, Predictor)
    known, new = resolve_device("a100"), resolve_device("h100")
    first = predictor.predict(graphs[0], known, steps=10)
    assert first.trained_on_device
    assert not predictor.predict(graphs[0], new).trained_on_device
    assert predictor.predict(graphs[0], new).step_time.log_sigma > 3 * first.step_time.log_sigma
    assert first.total_time is not None
    assert first.total_time.median == pytest.approx(10 * first.step_time.median)
    assert first.gpu_util is not None
    assert 0 < first.gpu_util < 1
    slow = Measurement("ok", known.id, known.name, None, first.step_time.median * 3, 1.0, 10, "test", "")
    predictor.fine_tune([Observation(graphs[0], known, slow)] * 9)
    assert 2 < predictor.predict(graphs[0], known).step_time.median / first.step_time.median < 3
    assert predictor.predict(graphs[0], known).peak_memory == first.peak_memory


def test_what_a_paper_cannot_say_comes_from_physics_and_is_unsure(runs: list[Run], graphs: list[OpGraph], tmp_path: Path) -> None:
    card = {"version": 1, "trained_devices": []}
    served.write_trained(tmp_path / "lilou", "lilou", fitted("lilou", runs), card, Calibration({}, {}))
    prediction = served.load("lilou", tmp_path / "lilou").predict(graphs[0], resolve_device("a100"))
    assert prediction.peak_memory.median >= graphs[0].peak_live_bytes
    assert prediction.peak_memory.log_sigma == 1.0
    assert prediction.gpu_util is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 99}, "another format"),
        ({"sha256": "0" * 64}, "do not match the hash"),
        ({"columns": "0"}, "made for other features"),
        ({"settings": {"hidden": 8}}, "do not fit the predictor"),
        ({"predictor": "unknown"}, "No predictor that can be trained is called 'unknown'"),
    ],
)
def test_weights_that_cannot_be_right_are_refused(weights: Path, change: dict[str, Any], message: str) -> None:
    path = weights.with_suffix(".json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(PredictorError, match=message):
        served.load("dippm", weights)


def test_missing_weights_say_how_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(PredictorError, match="perfguard train TABLE --predictor dippm"):
        served.load("dippm", tmp_path / "nothing")
