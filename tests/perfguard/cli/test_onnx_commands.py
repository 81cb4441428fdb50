"""`perfguard predict FILE.onnx` and `perfguard rank`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from perfguard.cli import main


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A convolution with a free batch and free sizes."""
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, "side", "side"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [helper.make_tensor("w", TensorProto.FLOAT, [64, 3, 3, 3], [0.0] * 1728)],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), tmp_path / "model.onnx")
    return str(tmp_path / "model.onnx")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def predict(capsys: pytest.CaptureFixture[str], model: str, *more: str) -> Any:
    return run(capsys, "predict", model, "--batch-size", "32", "--dim", "side=64", "--gpu", "a100", *more)


def rank(capsys: pytest.CaptureFixture[str], model: str, *more: str) -> Any:
    return run(capsys, "rank", model, "--batch-size", "32", "--dim", "side=64", *more)


def test_a_file_is_predicted(capsys: pytest.CaptureFixture[str], model: str) -> None:
    document = predict(capsys, model, "--mode", "infer")
    assert document["flops"] == 2 * 32 * 64 * 64 * 1728
    assert document["throughput_per_s"] == pytest.approx(32 / document["step_time_s"]["median"])
    assert document["most_energy_j"]["median"] == pytest.approx(250 * document["step_time_s"]["median"])
    assert "mig" not in document


def test_predict_and_rank_state_tf32(capsys: pytest.CaptureFixture[str], model: str) -> None:
    on, default, off = (predict(capsys, model, "--tf32", tf32)["step_time_s"]["median"] for tf32 in ("on", "default", "off"))
    assert on == default != off  # a convolution is in TF32 by default
    row = rank(capsys, model, "--gpus", "a100", "--tf32", "off")[0]
    assert row["step_time_s"]["median"] == pytest.approx(off)


@pytest.mark.parametrize(
    ("gpu", "trained", "sentence"),
    [
        ("rtx3090", ["time"], "was not trained on the memory of such steps on GeForce RTX 3090. Read its interval"),
        ("h100", [], "was not trained on such steps on NVIDIA H100 "),
    ],
)
def test_predict_names_what_was_not_measured(
    capsys: pytest.CaptureFixture[str], model: str, gpu: str, trained: list[str], sentence: str
) -> None:
    words = ["predict", model, "--batch-size", "8", "--dim", "side=64", "--gpu", gpu]
    document = run(capsys, *words)
    assert (document["trained_on_device"], document["trained_quantities"]) == (False, trained)
    assert main(words) == 0
    assert sentence in " ".join(capsys.readouterr().out.split())


def test_the_smallest_mig_profile_is_found_and_timed(capsys: pytest.CaptureFixture[str], model: str) -> None:
    mig = predict(capsys, model, "--mig", "auto")["mig"]
    assert mig["profile"] == "1g.5gb"
    assert mig["instances"] == 7
    assert mig["needed_bytes"] < mig["memory_bytes"]
    large = run(capsys, "predict", model, "--batch-size", "32", "--dim", "side=1024", "--gpu", "a100", "--mig", "auto")["mig"]
    assert large["profile"] in ("2g.10gb", "3g.20gb", "7g.40gb")


def test_predict_takes_mig_profile_and_mps_share(capsys: pytest.CaptureFixture[str], model: str) -> None:
    assert predict(capsys, model, "--mig", "3g.20gb")["gpu"] == "a100-pcie-40gb:3g.20gb"
    assert predict(capsys, model, "--mps", "0.5")["gpu"] == "a100-pcie-40gb:mps50%"


def test_people_get_a_table(capsys: pytest.CaptureFixture[str], model: str) -> None:
    assert main(["predict", model, "--batch-size", "32", "--dim", "x=32x3x64x64", "--gpu", "a100", "--mig", "auto"]) == 0
    text = capsys.readouterr().out
    for expected in ("latency", "throughput", "smallest MIG profile", "1g.5gb", "at most, at the power limit of 250 W"):
        assert expected in text


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ([], "leaves sizes open: 'side'"),
        (["--dim", "side=64", "--set", "width=3"], "--set is for FILE.py:BUILD"),
        (["--dim", "side=64", "--mode", "train"], "has only the forward pass"),
        (["--dim", "side=64", "--precision", "amp-fp16"], "runs in fp32, fp16 or bf16"),
        (["--dim", "side=64", "--mig", "9g.1gb"], "has no MIG profile '9g.1gb'. It has: 1g.5gb"),
        (["--dim", "side=64", "--mig", "auto", "--mps", "0.5"], "exclude each other"),
    ],
)
def test_mistakes_are_explained(capsys: pytest.CaptureFixture[str], model: str, more: list[str], match: str) -> None:
    assert main(["predict", model, "--batch-size", "8", "--gpu", "a100", *more]) == (1 if "leaves sizes" in match else 2)
    assert match in capsys.readouterr().err


def test_gpus_are_ranked_those_that_fit_first(capsys: pytest.CaptureFixture[str], model: str) -> None:
    rows = rank(capsys, model)
    assert len(rows) > 20
    times = [row["step_time_s"]["median"] for row in rows if row["fits"]]
    assert times == sorted(times)
    fits = [
        row["fits"] for row in run(capsys, "rank", model, "--batch-size", "32", "--dim", "side=2048", "--gpus", "p4,a100,b200")
    ]
    assert fits == sorted(fits, reverse=True)
    assert set(fits) == {True, False}
