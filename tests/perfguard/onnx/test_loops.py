"""Loops and branches whose course is known are written out; what is opaque makes intervals wider."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from perfguard import OpGraph, load_predictor
from perfguard.devices import resolve_device
from perfguard.exceptions import OnnxError
from perfguard.onnx import graph_from_onnx
from perfguard.predictor import Prediction
from tests.perfguard.onnx.hostile import integers, loop, model_of

FLOAT = TensorProto.FLOAT


def read(tmp_path: Path, model: onnx.ModelProto) -> OpGraph:
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return graph_from_onnx(path)


def names(graph: OpGraph) -> list[str]:
    return [op.name for op in graph.ops]


def predicted(graph: OpGraph, predictor: str = "guardnet") -> Prediction:
    return load_predictor(predictor).predict(graph, resolve_device("a100"))


@pytest.mark.parametrize("trips", [0, 1, 7])
def test_a_loop_costs_its_body_times_its_trips(tmp_path: Path, trips: int) -> None:
    """A loop of any length cost as much as moving what goes in and comes out, once (finding 5)."""
    graph = read(tmp_path, loop(trips, nodes=3))
    assert names(graph) == ["exp"] * 3 * trips
    assert not graph.unmodelled


def test_a_loop_costs_what_its_body_costs_by_hand(tmp_path: Path) -> None:
    straight = [helper.make_node("Exp", ["x" if at == 0 else f"a{at}"], ["y" if at == 3 else f"a{at + 1}"]) for at in range(4)]
    by_hand = read(tmp_path, model_of(straight, shape=(16,)))
    graph = read(tmp_path, loop(4))
    assert (graph.flops, graph.peak_live_bytes) == (by_hand.flops, by_hand.peak_live_bytes)


def test_a_loop_ends_when_its_condition_says_so(tmp_path: Path) -> None:
    """TensorFlow's loops have no trip count: they count in their body."""
    model = loop(2**63 - 1, condition="again")
    body = model.graph.node[0].attribute[0].g
    body.node.extend([helper.make_node("Less", ["i", "last"], ["again"])])
    model.graph.initializer.append(integers("last", 4, scalar=True))
    assert names(read(tmp_path, model)) == ["exp"] * 5


def test_what_a_loop_collects_is_put_together(tmp_path: Path) -> None:
    model = loop(3)
    body = model.graph.node[0].attribute[0].g
    body.node.append(helper.make_node("Relu", ["next"], ["seen"]))
    body.output.append(helper.make_tensor_value_info("seen", FLOAT, [16]))
    model.graph.node[0].output.append("all")
    model.graph.output.append(helper.make_tensor_value_info("all", FLOAT, None))
    graph = read(tmp_path, model)
    assert names(graph) == ["exp", "relu"] * 3 + ["cat"]
    assert graph.ops[-1].shape == (3, 16)


def test_loops_in_loops_are_written_out(tmp_path: Path) -> None:
    inner = loop(2).graph.node[0]
    inner.input[:] = ["trips", "yes", "state"]
    inner.output[:] = ["next"]
    model = loop(3)
    body = model.graph.node[0].attribute[0].g
    del body.node[:]
    body.node.append(inner)
    model.graph.initializer[1].CopyFrom(integers("trips", 3, scalar=True))
    assert names(read(tmp_path, model)) == ["exp"] * 9


def test_if_costs_the_branch_taken(tmp_path: Path) -> None:
    out = helper.make_tensor_value_info("b", FLOAT, [16])
    branches = {
        name: helper.make_graph([helper.make_node(op_type, ["x"], ["b"])], name, [], [out])
        for name, op_type in (("then_branch", "Exp"), ("else_branch", "Sqrt"))
    }
    for taken, name in ((True, "exp"), (False, "sqrt")):
        condition = numpy_helper.from_array(np.array(taken), "c")
        graph = read(tmp_path, model_of([helper.make_node("If", ["c"], ["y"], **branches)], [condition], (16,)))
        assert names(graph) == [name]
        assert not graph.unmodelled


def test_a_body_that_does_not_fit_its_loop_is_refused(tmp_path: Path) -> None:
    model = loop(3)
    del model.graph.node[0].attribute[0].g.output[1:]
    with pytest.raises(OnnxError, match=r"has a body of operator 0 \(Loop 'loop'\) that does not fit"):
        read(tmp_path, model)


@pytest.mark.parametrize("predictor", ["guardnet", "dnnabacus"])
def test_a_loop_of_unknown_length_widens_the_interval(tmp_path: Path, predictor: str) -> None:
    """37 us (14 to 98) was the answer for any number of trips: the interval says now how little is known."""
    known, unknown = (predicted(read(tmp_path, loop(trips)), predictor) for trips in (1, None))
    lowest, highest = unknown.step_time.interval()
    assert highest / lowest > 1000
    assert lowest < 3 * known.step_time.median < highest
    assert unknown.step_time.log_sigma > 2 * known.step_time.log_sigma
    assert any("Loop (1)" in text and "intervals are wider" in text for text in unknown.unmodelled)


def test_an_opaque_operator_widens_by_its_share(tmp_path: Path) -> None:
    """One unknown operator in a hundred is no reason to know nothing."""

    def interval_width(known: int) -> float:
        chain = [helper.make_node("Exp", ["x" if at == 0 else f"a{at}"], [f"a{at + 1}"]) for at in range(known)]
        chain.append(helper.make_node("Wonder", [f"a{known}" if known else "x"], ["y"], domain="mine"))
        low, high = predicted(read(tmp_path, model_of(chain, shape=(64, 64)))).step_time.interval()
        return high / low

    alone, one_of_many = interval_width(0), interval_width(300)
    assert alone > 30
    assert one_of_many < alone / 2


def test_an_opaque_operators_memory_is_unsure(tmp_path: Path) -> None:
    shape = (1024, 1024, 64)
    sure = predicted(read(tmp_path, model_of([helper.make_node("Exp", ["x"], ["y"])], shape=shape)))
    unsure = predicted(read(tmp_path, model_of([helper.make_node("Wonder", ["x"], ["y"], domain="mine")], shape=shape)))
    assert unsure.peak_memory.log_sigma > sure.peak_memory.log_sigma


def test_time_by_kind_still_adds_up(tmp_path: Path) -> None:
    chain = [helper.make_node("Exp", ["x"], ["a"]), helper.make_node("Wonder", ["a"], ["y"], domain="mine")]
    prediction = predicted(read(tmp_path, model_of(chain, shape=(64, 64))))
    assert sum(prediction.time_by_kind_s.values()) == pytest.approx(prediction.step_time.median, rel=1e-3)
    assert max(prediction.time_by_kind_s, key=lambda kind: prediction.time_by_kind_s[kind]) == "other"


def test_scan_is_opaque_for_each_of_its_steps(tmp_path: Path) -> None:
    """Its operators are launched for each slice of its input; that many may be what it takes."""
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "e"], ["t"])],
        "body",
        [helper.make_tensor_value_info(name, FLOAT, [4]) for name in ("s", "e")],
        [helper.make_tensor_value_info("t", FLOAT, [4])],
    )
    model = model_of([helper.make_node("Scan", ["z", "x"], ["y"], body=body, num_scan_inputs=1)], shape=(500, 4))
    model.graph.input.append(helper.make_tensor_value_info("z", FLOAT, [4]))
    assert read(tmp_path, model).ops[0].attributes["unknown"] == 500
