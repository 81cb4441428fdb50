"""The predictors of the papers: their networks, and how they are served."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from perfguard import Workload, trace
from perfguard.devices import resolve_device
from perfguard.exceptions import PredictorError
from perfguard.graph import OP_KINDS, OpGraph, Phase, StorageKind
from perfguard.measure import Measurement
from perfguard.predictor import Observation, Predictor
from perfguard_models.calibration import NEW_GPU, Calibration
from perfguard_research.dataset import Run, folds
from perfguard_research.learners import learner_class, write_trained
from perfguard_research.operators import Operator
from perfguard_research.papers import served
from perfguard_research.papers.dnnperf import NodeEdgeEncoder
from perfguard_research.papers.layers import GLOBAL_COLUMNS, NODE_COLUMNS, kernels, layers_of
from perfguard_research.papers.perfseer import PerfSeer, pcgrad
from tests.laws import fitted, some_graphs, some_runs


@pytest.fixture
def graphs() -> list[OpGraph]:
    return some_graphs()


@pytest.fixture
def runs() -> list[Run]:
    return some_runs("dippm")


@pytest.mark.parametrize("name", ["dnnperf", "perfseer", "dippm", "lilou"])
def test_paper_network_answers_within_its_range(name: str) -> None:
    runs = some_runs(name)
    learner = fitted(name, runs, epochs=2)
    huge = [
        run._replace(view=run.view | {"nodes": run.view["nodes"] * 1e9, "globals": run.view["globals"] * 1e9}) for run in runs
    ]
    seen = [run.labels["time"] for run in runs]
    margin = max(1.0, float(np.std(seen)))
    said = learner.predict(huge)["time"]
    assert ((said >= min(seen) - margin - 1e-3) & (said <= max(seen) + margin + 1e-3)).all()


@pytest.mark.parametrize(
    ("name", "others"), [("dnnperf", "infer"), ("dnnabacus", "infer"), ("dippm", "train"), ("lilou", "train")]
)
def test_paper_is_silent_outside_its_scope(name: str, others: str) -> None:
    runs = some_runs(name)
    learner = fitted(name, runs, **({} if name == "dnnabacus" else {"epochs": 1}))
    assert np.isfinite(learner.predict(runs[:3])["time"]).all()
    outside = [_with(run, globals=_set(run.view["globals"], "train", run.mode == "infer")) for run in runs[:3]]
    assert np.isnan(learner.predict(outside)["time"]).all()


def test_dnnperf_edge_decides_what_its_only_reader_takes() -> None:
    """A softmax over incoming edges gives a node with one of them the weight 1, whatever the edge is."""
    torch.manual_seed(0)
    encoder, h = NodeEdgeEncoder(8), 3 * torch.randn(2, 8)
    edge, forward = torch.randn(1, 8), torch.tensor([[0], [1]])
    (_, small), (_, large) = (encoder(h, size * edge, forward)[0] for size in (1, 10))
    assert (small - large).abs().max() > 0.01


def test_dnnperf_sees_backward_operators_temporaries_and_gradients() -> None:
    graph, view = some_graphs("train")[0], some_runs("dnnperf")[0].view
    assert len(view["kind"]) == len(graph.ops)
    assert set(view["kind"] // len(OP_KINDS)) == set(Phase)
    temporary, gradients = view["nodes"][:, len(NODE_COLUMNS) :].T
    parameters = sum(storage.num_bytes for storage in graph.storages if storage.kind is StorageKind.PARAMETER)
    written = sum(size for size, op in zip(gradients, graph.ops, strict=True) if op.phase is Phase.BACKWARD)
    assert written >= parameters  # each parameter has a gradient of its size
    assert temporary.any()


def test_perfseer_ratios_are_those_of_the_trace(graphs: list[OpGraph]) -> None:
    """Computed from standardised logarithms, the intensity had the wrong sign."""
    graph = graphs[0]
    layers = layers_of(graph, resolve_device("a100"))
    nodes, _, facts = PerfSeer().features(layers)
    flops = np.array([op.flops for op in graph.ops])
    access = np.array([op.bytes_read + op.bytes_written for op in graph.ops])
    columns = len(NODE_COLUMNS)
    np.testing.assert_allclose(nodes[:, columns], access, rtol=1e-5)
    np.testing.assert_allclose(nodes[:, columns + 1], flops / access, rtol=1e-5)
    np.testing.assert_allclose(nodes[:, columns + 2], flops / flops.sum(), rtol=1e-5)
    totals = facts[len(GLOBAL_COLUMNS) + 3 :][:3]
    np.testing.assert_allclose(totals[:2], [flops.sum(), access.sum()], rtol=1e-5)
    assert facts[-1] == pytest.approx(flops.sum() / access.sum())


def test_perfseer_knows_utilisation_only_where_it_was_measured() -> None:
    runs = some_runs("perfseer")
    bare = {name: value for name, value in runs[0].labels.items() if name in ("memory", "time")}
    learner = fitted("perfseer", [run if run.gpu.startswith("a100") else run._replace(labels=bare) for run in runs], epochs=1)
    known, other_card = runs[0], runs[-1]
    other_kind = _with(known, kind=np.full_like(known.view["kind"], OP_KINDS.index("attention")))
    predicted = learner.predict([known, other_card, other_kind])
    assert np.isfinite(predicted["time"]).all()
    assert np.isfinite(predicted["sm_active"]).tolist() == [True, False, False]


def test_lilou_adds_up_the_latencies_of_fused_subgraphs() -> None:
    learner = fitted("lilou", some_runs("lilou"), epochs=2)
    run = some_runs("lilou")[0]
    view = run.view
    alone = view["kernel"]
    pairs = _with(run, kernel=alone // 2)
    twice = _with(
        run,
        **{name: np.concatenate([view[name]] * 2) for name in ("kind", "nodes", "edges")},
        edge_index=np.concatenate([view["edge_index"], view["edge_index"] + len(alone)], axis=1),
        kernel=np.concatenate([alone // 2, alone // 2 + len(alone)]),
    )
    cut = _with(pairs, edge_index=view["edge_index"][:, :0], edges=view["edges"][:0])
    learner._labels[2:] = torch.tensor([[-50.0], [50.0]])  # type: ignore[attr-defined]  # the range does not matter here
    eager, fused, double, without_edges = learner.predict([run, pairs, twice, cut])["time"]
    assert double == pytest.approx(fused + math.log(2), abs=1e-5)
    assert fused != pytest.approx(eager, abs=1e-3)
    assert fused != pytest.approx(without_edges, abs=1e-5)  # attention works within a kernel


def test_lilou_kernels_start_alike_whatever_they_fuse() -> None:
    """GraphSizeNorm takes a kernel of many operators to the bias: with a bias of 0 they took all of it, and learnt alone."""
    run = some_runs("lilou")[0]
    fused = _with(run, kernel=run.view["kernel"] // 5)
    learner = fitted("lilou", [run, fused], epochs=0)
    learner._labels[2:] = torch.tensor([[-50.0], [50.0]])  # type: ignore[attr-defined]
    alone, together = (math.exp(time) for time in learner.predict([run, fused])["time"])
    assert alone / together == pytest.approx(len(set(run.view["kernel"])) / len(set(fused.view["kernel"])), rel=1e-5)


def test_lilou_reads_the_kernels_of_compiled_steps(graphs: list[OpGraph]) -> None:
    device, graph = resolve_device("a100"), graphs[0]
    fused = kernels(dataclasses.replace(graph, options=("compiled",)), device)["kernel"]
    assert len(set(kernels(graph, device)["kernel"])) == len(graph.ops)
    assert len(set(fused)) < len(fused) == len(graph.ops)


def test_dippm_readout_grows_with_the_network() -> None:
    """The authors' code sums the nodes; a mean does not know how many there are."""
    learner = fitted("dippm", some_runs("dippm"), epochs=1)
    run = some_runs("dippm")[0]
    view = run.view
    number = len(view["kind"])
    twice = _with(
        run,
        **{name: np.concatenate([view[name]] * 2) for name in ("kind", "nodes", "edges")},
        edge_index=np.concatenate([view["edge_index"], view["edge_index"] + number], axis=1),
    )
    seen: list[torch.Tensor] = []
    network: Any = learner._network  # type: ignore[attr-defined]
    network.connected[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    learner.predict([run, twice])
    (both,) = seen
    hidden = network.out.in_features
    torch.testing.assert_close(both[1, :hidden], 2 * both[0, :hidden])


def test_pool_has_the_stride_of_its_shapes() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(4))
    graph = trace(Workload(model, inputs=(2, 3, 32, 32), mode="infer"))
    pool = [op.kind for op in graph.ops].index("pool")
    nodes = layers_of(graph, resolve_device("a100"))["nodes"]
    found = {name: nodes[pool, NODE_COLUMNS.index(name)] for name in ("kernel_height", "kernel_width", "stride", "padding")}
    assert found == {"kernel_height": 4, "kernel_width": 4, "stride": 4, "padding": 0}


def test_layers_of_a_kernel_of_the_backward_pass_are_none() -> None:
    # Tables of single operators have such rows; one of them ended the training of a paper's predictor.
    graph = Operator(name="lstm", sizes=(2, 8, 5), direction="backward_input").graph("train")
    assert layers_of(graph, resolve_device("v100"))["nodes"].shape == (0, len(NODE_COLUMNS))


@pytest.mark.parametrize("name", ["dnnperf", "dippm"])
def test_training_keeps_the_epoch_with_the_smallest_validation_error(name: str) -> None:
    runs = [run._replace(family=f"f{at % 10}") for at, run in enumerate(some_runs(name))]
    errors: list[float] = []
    learner = fitted(name, runs, epochs=6, on_epoch=lambda done, of, error: errors.append(error))
    held_out = folds(runs, "family", number=8, seed=0)[-1].judge
    chosen = [runs[at] for at in held_out]
    predicted = learner.predict(chosen)
    scale = learner._labels[1]  # type: ignore[attr-defined]
    error = sum(
        np.abs(predicted[target] - [run.labels[target] for run in chosen]).mean() / float(scale[at])
        for at, target in enumerate(("memory", "time"))
    )
    assert error <= min(errors) + 1e-4


def test_training_stops_a_third_of_its_epochs_after_the_best() -> None:
    learner: Any = learner_class("perfseer")
    errors: list[float] = []
    at_rest = learner(epochs=9, hidden=8, learning_rate=0.0)  # no epoch is better than the first
    at_rest.fit(some_runs("perfseer"), on_epoch=lambda done, of, error: errors.append(error))
    assert len(errors) == 1 + 9 // 3 + 1


def _with(run: Run, **arrays: Any) -> Run:
    return run._replace(view=run.view | arrays)


def _set(facts: Any, name: str, value: float) -> Any:
    changed = facts.copy()
    changed[GLOBAL_COLUMNS.index(name)] = value
    return changed


def test_gradient_surgery_takes_out_what_conflicts() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    first, second = torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 1.0])
    pcgrad([(parameter * first).sum(), (parameter * second).sum()], [parameter])
    # (1, 0) loses its part along (-1, 1), and becomes (0.5, 0.5); (-1, 1) loses its part along (1, 0), and becomes (0, 1).
    assert parameter.grad is not None
    torch.testing.assert_close(parameter.grad, torch.tensor([0.5, 1.5]))


# Calibration


@pytest.fixture
def weights(runs: list[Run], tmp_path: Path) -> Path:
    calibration = Calibration({"memory": 0.02, "time": 0.05}, {"memory": 1.5, "time": 1.5, f"time/{NEW_GPU}": 6.0})
    card = {"version": 1, "trained_devices": ["a100-pcie-40gb"]}
    learner = fitted("dippm", runs)
    write_trained(tmp_path / "dippm", learner, card, calibration)
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
    assert first.gpu_util is None  # no paper but PerfSeer has it
    slow = Measurement("ok", known.id, known.name, None, first.step_time.median * 3, 1.0, 10, "test", "")
    predictor.fine_tune([Observation(graphs[0], known, slow)] * 9)
    assert 2 < predictor.predict(graphs[0], known).step_time.median / first.step_time.median < 3
    assert predictor.predict(graphs[0], known).peak_memory == first.peak_memory


def test_paper_without_an_answer_uses_physics_unsurely(graphs: list[OpGraph], tmp_path: Path) -> None:
    card = {"version": 1, "trained_devices": []}
    learner = fitted("lilou", some_runs("lilou"), epochs=2)
    write_trained(tmp_path / "lilou", learner, card, Calibration({}, {}))
    prediction = served.load("lilou", tmp_path / "lilou").predict(graphs[0], resolve_device("a100"))
    assert prediction.peak_memory.median >= graphs[0].peak_live_bytes
    assert prediction.peak_memory.log_sigma == 1.0
    assert prediction.gpu_util is None


def test_a_quantity_that_no_held_out_run_has_judged_comes_from_physics(weights: Path, graphs: list[OpGraph]) -> None:
    card = json.loads(weights.with_suffix(".json").read_text())
    card["calibration"]["scale"].pop("memory")
    weights.with_suffix(".json").write_text(json.dumps(card))
    prediction = served.load("dippm", weights).predict(graphs[0], resolve_device("a100"))
    assert prediction.peak_memory.median >= graphs[0].peak_live_bytes
    assert prediction.peak_memory.log_sigma == 1.0
    assert prediction.trained_quantities == ("time",)
    assert not prediction.trained_on_device


def test_weights_that_cannot_be_right_are_refused(weights: Path, tmp_path: Path) -> None:
    """The files are those of GuardNet's weights, whose test damages them in every way."""
    path = weights.with_suffix(".json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"predictor": "unknown"}))
    with pytest.raises(PredictorError, match="No predictor that can be trained is called 'unknown'"):
        served.load("dippm", weights)
    with pytest.raises(PredictorError, match=r"'nothing' cannot be read: .*perfguard train TABLE"):
        served.load("dippm", tmp_path / "nothing")


@pytest.mark.parametrize("name", ["dnnperf", "dnnabacus", "perfseer", "dippm", "lilou", "trees"])
def test_shipped_weights_fit_the_code(name: str, graphs: list[OpGraph]) -> None:
    prediction = served.load(name).predict(graphs[0], resolve_device("rtx3090"))
    assert prediction.predictor.startswith(name)
    assert prediction.sm_active is None  # a network of convolutions: no such run was measured
