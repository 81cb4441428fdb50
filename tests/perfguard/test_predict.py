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
from perfguard._predict import most_energy
from perfguard.devices import mig_instance, mig_profiles, mps_share
from perfguard.exceptions import ConfigurationError
from perfguard.onnx import graph_from_onnx
from tests.doubles import ReplayPredictor


@pytest.fixture
def linear(tmp_path: Path) -> Path:
    """``nn.Linear(64, 10)`` as an ONNX file with a free batch."""
    weights = [
        helper.make_tensor("w", TensorProto.FLOAT, [10, 64], [0.0] * 640),
        helper.make_tensor("b", TensorProto.FLOAT, [10], [0.0] * 10),
    ]
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=1)], "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 10])], weights,
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), tmp_path / "linear.onnx")
    return tmp_path / "linear.onnx"


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


def test_predict_infers_unless_workload_trains() -> None:
    with torch.device("meta"):
        workload = Workload(nn.Linear(64, 10), (32, 64), loss=lambda output: output.sum())
    training, inference = predict(workload, gpu="t4"), predict(workload, gpu="t4", mode="infer")
    assert training.step_time.median > inference.step_time.median


def test_a_part_of_a_gpu_is_a_device_like_any_other(linear: Path) -> None:
    a100 = resolve_device("a100")
    part = mig_instance(a100, mig_profiles(a100)[0])
    assert predict(linear, gpu=part, batch_size=8).device_id == "a100-pcie-40gb:1g.5gb"
    big = graph_from_onnx(linear, batch_size=2**22)
    whole, half = (predict(big, gpu=device).step_time.median for device in (a100, mps_share(a100, 0.1)))
    assert half > whole


def test_another_predictor_can_be_given(linear: Path) -> None:
    assert predict(linear, gpu="a100", batch_size=4, predictor=ReplayPredictor()).predictor == "replay-1"


@pytest.mark.parametrize(
    ("model", "kwargs", "match"),
    [
        ("network.pt", {}, r"path of an \.onnx file"),
        (nn.Linear(2, 2), {}, "needs its inputs"),
        (nn.Linear(2, 2), {"inputs": (4, 2), "batch_size": 8}, "are for ONNX files"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(model: Any, kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        predict(model, gpu="a100", **kwargs)


def test_an_onnx_file_cannot_be_trained(linear: Path) -> None:
    with pytest.raises(ConfigurationError, match="has only the forward pass"):
        predict(linear, gpu="a100", batch_size=4, mode="train")


def test_most_energy_is_power_limit_times_latency(linear: Path) -> None:
    device = resolve_device("a100")
    prediction = predict(linear, gpu=device, batch_size=4)
    energy = most_energy(prediction, device)
    assert energy is not None
    assert energy.median == pytest.approx(device.tdp_w * prediction.step_time.median)
    assert most_energy(prediction, resolve_device("cpu")) is None
