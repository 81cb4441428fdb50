"""The two clocks learn a world that follows them: real graphs, and times by a formula that a loop computes."""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt
import pytest

from perfguard import OpGraph
from perfguard.devices import Device, resolve_device
from perfguard_models.features import Arrays
from perfguard_models.features.launches import launches
from perfguard_models.features.step import step_features
from perfguard_models.learner import sums_table
from perfguard_models.trees import DIRECTIONS, forest_columns
from perfguard_research.dataset import Run
from perfguard_research.step_time import TrainableStepTime
from tests.doubles import TOY_CPU
from tests.laws import graph_of
from tests.models.oracle import step_s_by_simulation
from tests.rows import run_on, step_on

GPUS = ("a100-pcie-40gb", "t4", "rtx3090")
HOST_S, VIEW_S, LATENCY_S, CONSTANT_S, COPY_S_PER_BYTE = 25e-6, 3e-6, 5e-6, 150e-6, 1 / 8e9
CONVOLUTION, OTHER = 3.0, 1.5
"""Times over the roofline."""


def step_s(view: Arrays, *, host: float = 1.0) -> float:
    """Seconds of a step on a machine whose host takes ``host`` times as long as usual."""
    device_s = [
        LATENCY_S + (CONVOLUTION if view["name"][row] == 0 else OTHER) * float(view["roofline"][row]) for row in view["order"]
    ]
    host_s = [host * (HOST_S + VIEW_S * int(views)) for views in view["views"]]
    if view["is_cpu"][0]:
        return host * (CONSTANT_S + sum(host_s)) + sum(device_s)
    return host * CONSTANT_S + float(view["copied"][0]) * COPY_S_PER_BYTE + step_s_by_simulation(host_s, device_s)


@functools.cache
def views() -> list[tuple[str, int, Arrays]]:
    """Steps from small ones, of which the host is the bound, to large ones, of which the device is."""
    found = []
    for width in (8, 32, 128):
        for depth in (1, 2, 4):
            for batch in (2, 8, 32, 128, 512, 2048):
                graph = graph_of(width, depth, batch)
                found += [(gpu, batch, view_of(graph, resolve_device(gpu))) for gpu in GPUS]
    return found


def view_of(graph: OpGraph, device: Device) -> Arrays:
    return launches(graph, device) | {"sums": step_features(graph, device)}


def run(source: str, gpu: str, batch: int, view: Arrays, host: float = 1.0, folder: str = "") -> Run:
    labels = {"time": math.log(step_s(view, host=host))}
    return run_on(step_on(gpu, "infer"), source=source, batch_size=batch, labels=labels, view=view, host=folder)


def is_held_out(batch: int) -> bool:
    return batch in (32, 512)


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return [run("a", *one) for one in views()]


@pytest.fixture(scope="module")
def learner(runs: list[Run]) -> TrainableStepTime:
    made = TrainableStepTime(epochs=60, hidden=32, trees=0)
    made.fit([one for one in runs if not is_held_out(one.batch_size)])
    return made


@pytest.fixture(scope="module")
def with_trees(runs: list[Run]) -> TrainableStepTime:
    made = TrainableStepTime(epochs=2, hidden=8, trees=100)
    made.fit([one for one in runs if not is_held_out(one.batch_size)])
    return made


def errors(learner: TrainableStepTime, runs: list[Run]) -> npt.NDArray[np.float64]:
    return np.asarray(np.abs(np.exp(learner.predict(runs)["time"] - np.array([one.labels["time"] for one in runs])) - 1))


def test_a_world_of_two_clocks_is_learnt_closely(learner: TrainableStepTime, runs: list[Run]) -> None:
    of_held_out = errors(learner, [one for one in runs if is_held_out(one.batch_size)])
    assert np.median(of_held_out) < 0.02
    assert of_held_out.mean() < 0.03


def test_learnt_host_slows_the_steps_that_it_bounds(learner: TrainableStepTime, runs: list[Run]) -> None:
    usual, slow_host, *_ = learner.log_step_s(runs)
    expected = [math.log(step_s(one.view, host=math.exp(0.5))) - one.labels["time"] for one in runs]
    np.testing.assert_allclose(slow_host - usual, expected, atol=0.05)


def test_trees_keep_laws_whatever_the_measurements_say(runs: list[Run]) -> None:
    """Here larger steps were measured to be faster."""
    opposite = [one._replace(labels={"time": -one.labels["time"]}) for one in runs]
    learner = TrainableStepTime(epochs=1, hidden=8, trees=50)
    learner.fit(opposite)
    assert learner.forest is not None
    columns = forest_columns(sums_table(runs))
    before = learner.forest.forest.predict(columns)
    for at, direction in enumerate(DIRECTIONS.values()):
        if direction:
            after = learner.forest.forest.predict(columns + np.eye(len(DIRECTIONS), dtype=np.float32)[at])
            assert (direction * (after - before)).min() >= -1e-6


@pytest.mark.parametrize("field", ["forest.columns", "forest.largest", "forest.feature"])
def test_trees_of_other_columns_are_refused(field: str, with_trees: TrainableStepTime) -> None:
    tensors, settings = with_trees.state()
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    changed[field][0] = math.nan if field == "forest.largest" else 1000
    with pytest.raises(ValueError, match="damaged"):
        TrainableStepTime.from_state(changed, settings)


@pytest.mark.parametrize("machines", [(("fast", ""), ("slow", "")), (("lab", "results/fast"), ("lab", "results/slow"))])
def test_a_machine_with_a_slow_host_is_learnt_as_one(machines: tuple[tuple[str, str], tuple[str, str]]) -> None:
    """The same steps were measured by two laboratories, or in two machines of one. One host takes twice as long."""
    runs = [
        run(source, *one, host, folder)
        for one in views()
        if one[0] == "t4"
        for (source, folder), host in zip(machines, (1.0, 2.0), strict=True)
    ]
    learner = TrainableStepTime(epochs=40, hidden=16, trees=0)
    learner.fit(runs)
    fast, slow = (learner.machines.factor[learner.machines.index[source, "t4", folder]].tolist() for source, folder in machines)
    assert slow[0] - fast[0] == pytest.approx(math.log(2), abs=0.1)
    assert abs(slow[1] - fast[1]) < 0.05  # the cards are alike
    says = learner.predict(runs)["time"]
    np.testing.assert_array_equal(says[::2], says[1::2])  # when serving, no machine is known


def test_processor_is_its_own_host(runs: list[Run]) -> None:
    """Host and device work one after the other, and the host's speed is the network's, not that of a machine."""
    graphs = [(batch, graph_of(width, 2, batch)) for width in (8, 32, 128) for batch in (2, 8, 32, 128, 512)]
    steps = [run("c", "cpu", batch, view_of(graph, TOY_CPU), host=0.7) for batch, graph in graphs]
    learner = TrainableStepTime(epochs=40, hidden=32, trees=0)
    learner.fit(steps * 3)
    assert errors(learner, steps).mean() < 0.05
    assert not learner.machines.of(steps).any()
