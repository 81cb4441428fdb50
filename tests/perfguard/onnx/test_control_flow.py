"""Loops and branches are opaque operators, which make intervals wider."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from perfguard import OpGraph, load_predictor
from perfguard.devices import resolve_device
from perfguard.onnx import graph_from_onnx
from perfguard.predictor import Prediction
from tests.perfguard.onnx.hostile import loop, model_of

FLOAT = TensorProto.FLOAT


def read(tmp_path: Path, model: onnx.ModelProto) -> OpGraph:
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return graph_from_onnx(path)


def names(graph: OpGraph) -> list[str]:
    return [op.name for op in graph.ops]


def predicted(graph: OpGraph, predictor: str = "guardnet") -> Prediction:
    return load_predictor(predictor).predict(graph, resolve_device("a100"))


@pytest.mark.parametrize(("trips", "launches"), [(0, 3), (1, 3), (7, 21), (2**63 - 1, 3000), (None, 3000)])
def test_a_loop_is_one_operator_that_launches_its_body_for_each_trip(tmp_path: Path, trips: int | None, launches: int) -> None:
    """TensorFlow's loops count in their body and have the largest number as their limit: a thousand trips are assumed."""
    graph = read(tmp_path, loop(trips, nodes=3))
    assert names(graph) == ["Loop"]
    assert graph.ops[0].attributes["unknown"] == launches
    assert any("control flow: Loop (1)" in text for text in graph.unmodelled)


@pytest.mark.parametrize("predictor", ["guardnet", "dnnabacus"])
def test_a_loop_of_unknown_length_widens_the_interval(tmp_path: Path, predictor: str) -> None:
    """37 us (14 to 98) was the answer for any number of trips: the interval says now how little is known."""
    once = model_of([helper.make_node("Exp", ["x"], ["y"])], shape=(16,))
    known, unknown = (predicted(read(tmp_path, model), predictor) for model in (once, loop(None)))
    lowest, highest = unknown.step_time.interval()
    assert highest / lowest > 1000
    assert lowest < 3 * known.step_time.median < highest
    assert unknown.step_time.log_sigma > 2 * known.step_time.log_sigma
    assert any("Loop (1)" in text and "intervals are wider" in text for text in unknown.unmodelled)
