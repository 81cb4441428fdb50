"""`perfguard.predict` takes a file, a workload, a graph or a module, and gives the same answer for the same network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from perfguard import Workload, predict, resolve_device, trace
from perfguard.exceptions import ConfigurationError, WorkloadError
from perfguard.onnx import graph_from_onnx
from perfguard.predictor import most_energy


def linear_file(path: Path, width: int, outputs: int) -> Path:
    """``nn.Linear(width, outputs)`` as an ONNX file with a free batch."""
    weights = [
        helper.make_tensor("w", TensorProto.FLOAT, [outputs, width], bytes(4 * outputs * width), raw=True),
        helper.make_tensor("b", TensorProto.FLOAT, [outputs], [0.0] * outputs),
    ]
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=1)], "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", outputs])], weights,
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), path)
    return path


@pytest.fixture
def linear(tmp_path: Path) -> Path:
    return linear_file(tmp_path / "linear.onnx", 64, 10)


def test_predict_agrees_on_file_workload_graph_module(linear: Path) -> None:
    with torch.device("meta"):
        module = nn.Linear(64, 10)
    workload = Workload(module, (32, 64), mode="infer")
    answers = [
        predict(linear, gpu="a100", batch_size=32),
        predict(str(linear), gpu="a100", dims={"x": (32, 64)}),
        predict(workload, gpu="a100"),
        predict(trace(workload), gpu="a100"),
        predict(module, inputs=(32, 64), gpu="a100"),
    ]
    for answer in answers[1:]:
        assert answer.step_time.median == pytest.approx(answers[0].step_time.median, rel=5e-2)  # a file has no views
        assert answer.peak_memory.median == pytest.approx(answers[0].peak_memory.median, rel=5e-3)


@pytest.mark.parametrize("tf32", ["default", "on", "off"])
def test_predict_tf32_is_that_of_the_workload_that_states_it(linear: Path, tf32: Any) -> None:
    with torch.device("meta"):
        module = nn.Linear(64, 10)
    stated = predict(Workload(module, (4096, 64), mode="infer", tf32=tf32), gpu="a100")
    assert predict(module, inputs=(4096, 64), gpu="a100", tf32=tf32) == stated
    assert predict(Workload(module, (4096, 64), mode="infer", tf32="off"), gpu="a100", tf32=tf32) == stated
    traced = trace(Workload(module, (4096, 64), mode="infer", tf32=tf32))
    assert graph_from_onnx(linear, batch_size=4096, tf32=tf32).options == traced.options


def test_predict_infers_unless_workload_trains() -> None:
    with torch.device("meta"):
        workload = Workload(nn.Linear(64, 10), (32, 64), loss=lambda output: output.sum())
    training, inference = predict(workload, gpu="t4"), predict(workload, gpu="t4", mode="infer")
    assert training.step_time.median > inference.step_time.median


@pytest.mark.parametrize(
    ("model", "kwargs", "match"),
    [
        ("network.pt", {}, r"path of an \.onnx file"),
        ("network.onnx", {"mode": "train"}, "has only the forward pass"),
        (nn.Linear(2, 2), {}, "needs its inputs"),
        (nn.Linear(2, 2), {"inputs": (4, 2), "batch_size": 8}, "are for ONNX files"),
        (trace(Workload(nn.Linear(2, 2), (4, 2), mode="infer")), {"tf32": "on"}, "has its arithmetic already"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(model: Any, kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        predict(model, gpu="a100", **kwargs)


@pytest.mark.parametrize(
    ("stated", "match"),
    [
        ({"precision": "tf32"}, 'TF32 is a way to compute fp32: give precision="fp32", tf32="on"'),
        ({"tf32": "yes"}, "tf32 must be one of default, on, off.* but got 'yes'"),
    ],
)
def test_predict_explains_how_to_state_tf32(linear: Path, stated: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        predict(linear, gpu="a100", batch_size=4, **stated)
    with pytest.raises(WorkloadError, match=match):
        predict(nn.Linear(2, 2), inputs=(4, 2), gpu="a100", **stated)


def test_most_energy_is_power_limit_times_latency(linear: Path) -> None:
    device = resolve_device("a100")
    prediction = predict(linear, gpu=device, batch_size=4)
    energy = most_energy(prediction, device)
    assert energy is not None
    assert energy.median == pytest.approx(device.tdp_w * prediction.step_time.median)
    assert most_energy(prediction, resolve_device("cpu")) is None
