"""An ONNX file run by ONNX Runtime on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from perfguard.cli import main
from perfguard.exceptions import OnnxError
from perfguard.onnx import measure, measure_onnx

KERAS = Path(__file__).resolve().parents[3] / "examples" / "keras_cnn.onnx"


def one_operator(folder: Path, kind: str, dtype: int, domain: str = "") -> Path:
    tensors = [helper.make_tensor_value_info(name, dtype, ["batch", 4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node(kind, ["x"], ["y"], domain=domain)], "g", [tensors[0]], [tensors[1]])
    imports = [helper.make_opsetid("", 17), *([helper.make_opsetid(domain, 1)] if domain else [])]
    path = folder / "one.onnx"
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), path)
    return path


def test_a_larger_batch_takes_longer() -> None:
    small, large = (measure_onnx(KERAS, batch_size=size) for size in (1, 256))
    assert small.status == large.status == "ok"
    assert small.step_time_s is not None
    assert large.step_time_s is not None
    assert large.step_time_s > 4 * small.step_time_s > 0


@pytest.mark.parametrize("dtype", [TensorProto.INT64, TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.BOOL])
def test_inputs_of_every_kind_are_made_up(dtype: int, tmp_path: Path) -> None:
    assert measure_onnx(one_operator(tmp_path, "Identity", dtype), batch_size=2).num_steps > 5


def test_what_cannot_be_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(OnnxError, match="leaves sizes open"):
        measure_onnx(KERAS)
    with pytest.raises(OnnxError, match=r"one\.onnx cannot be run by ONNX Runtime: .*Mystery"):
        measure_onnx(one_operator(tmp_path, "Mystery", TensorProto.FLOAT, "nobody"), batch_size=2)
    with pytest.raises(OnnxError, match="not numeric"):
        measure_onnx(one_operator(tmp_path, "Identity", TensorProto.STRING), batch_size=2)


@pytest.mark.parametrize("step", ["_random", "_repeat"])
def test_a_batch_that_does_not_fit_is_said(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(measure, step, full)
    with pytest.raises(OnnxError, match=r"keras_cnn\.onnx cannot be run by ONNX Runtime: MemoryError"):
        measure_onnx(KERAS, batch_size=2)


def test_predict_measure_prints_measured_and_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", str(KERAS), "--gpu", "cpu", "--batch-size", "8", "--measure"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["measured"]["step_time_s"] < 1
    assert found["step_time_s"]["median"] > 0
    assert main(words) == 0
    assert "latency, measured" in capsys.readouterr().out
    assert main([*words[:2], "--gpu", "a100", "--batch-size", "8", "--measure"]) != 0
    assert "--gpu cpu" in capsys.readouterr().err
