"""The `perfguard` command: what it prints, and what it says when it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from perfguard import Workload, trace
from perfguard.cli import main
from perfguard.cli.subject import load_build
from perfguard.devices import catalog

ROOT = Path(__file__).resolve().parents[3]
MODELS = str(ROOT / "examples" / "models.py")
SCRIPT = """
from torch import nn

from perfguard import Workload

def build(params):
    model = nn.Linear(64, params.get("width", 32))
    return Workload(model, inputs=(params.get("batch_size", 4), 64), loss=lambda output: output.mean())


def picky(params):
    assert isinstance(params["width"], int), params
    assert params["dropout"] == 0.1, params
    assert params["optimizer"] == "adam", params
    assert params["kernels"] == [3, 5], params
    assert params["text"] == "a=b", params
    return build(params)


def raises(params):
    raise ZeroDivisionError("a mistake in build")


def on_many_gpus(params):
    return Workload(nn.DataParallel(nn.Linear(64, 8)), inputs=(4, 64), loss=lambda output: output.mean())

"""


@pytest.fixture(autouse=True)
def _imports_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command imports the user's file as a top-level module, from its own folder."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", sys.modules)
    for name in ("models", "script"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def predict(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["predict", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_gpus_lists_the_catalog(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpus"]) == 0
    text = capsys.readouterr().out
    for device in catalog().values():
        (line,) = [line for line in text.splitlines() if line.startswith(f"│ {device.id} ")]
        assert f" {device.memory_bytes / 2**30:.1f} " in line
        assert device.name in line
    assert "a100 = a100-pcie-40gb" in text


def test_gpus_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpus", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    by_id = {device["id"]: device for device in document["devices"]}
    assert list(by_id) == list(catalog())
    assert by_id["a100-pcie-40gb"]["memory_bytes"] == catalog()["a100-pcie-40gb"].memory_bytes
    assert set(document["aliases"].values()) <= set(by_id)


def test_a_resnet_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    document = predict(capsys, f"{MODELS}:resnet", "--gpu", "a100", "--batch-size", "64", "--steps", "100")
    for quantity in ("peak_memory_bytes", "step_time_s", "total_time_s"):
        estimate = document[quantity]
        assert 0 < estimate["low"] < estimate["median"] < estimate["high"]
    assert document["total_time_s"]["median"] >= 99 * document["step_time_s"]["median"]
    assert 0 <= document["p_oom"] <= 1
    assert document["gpu"] == "a100-pcie-40gb"
    assert document["capacity_bytes"] == catalog()["a100-pcie-40gb"].memory_bytes
    graph = trace(load_build(f"{MODELS}:resnet")({"batch_size": 64}), target="cuda")
    memory = document["memory_parts_bytes"]
    device = catalog()["a100-pcie-40gb"]
    replayed = graph.reserved_bytes(device) + device.context_bytes
    assert sum(size for part, size in memory.items() if part != "correction") == replayed
    assert memory["context"] == device.context_bytes


def test_set_reads_literals_and_leaves_words_alone(capsys: pytest.CaptureFixture[str], script: str) -> None:
    settings = ["width=32", "dropout=0.1", "optimizer=adam", "kernels=[3, 5]", "text=a=b"]
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    assert predict(capsys, f"{script}:picky", "--gpu", "a100", *arguments)["gpu"] == "a100-pcie-40gb"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{script}:build", "--gpu", "a1000"], "Did you mean 'a100'"),
        (["{folder}/missing.py:build"], "There is no file '{folder}/missing.py'"),
        (["{script}"], "{script} made no step of a torch optimizer. Describe what it runs: {script}:BUILD"),
        (["{script}:build", "--plot", "timeline.png"], "--plot writes a page, so its name ends in .html"),
        (["model.onnx:build"], "Expected FILE.py:BUILD"),
        (["{script}:bulid"], "no function 'bulid' (did you mean 'build'?). Its functions: build, on_many_gpus, picky, raises."),
        (["{script}:raises"], "raised ZeroDivisionError: a mistake in build"),
        (["{broken}:build"], "cannot be imported: SyntaxError"),
    ],
)
def test_an_error_is_explained_on_stderr(
    arguments: list[str], message: str, script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def build(:")
    names = {"script": script, "folder": tmp_path, "broken": broken}
    given = [argument.format(**names) for argument in arguments]
    of_the_file = ("raised", "cannot be imported", "made no step")  # what is in it is no wrong usage
    status = 1 if any(words in message for words in of_the_file) else 2
    assert main(["predict", *given, *([] if "--gpu" in given else ["--gpu", "a100"])]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("perfguard: ")
    assert message.format(**names) in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["prophesy"], "invalid choice: 'prophesy'"),
        (["predict", "f.py:build", "--mode", "dream"], "invalid choice: 'dream'"),
        (["predict", "f.py:build", "--precision", "tf32"], "give --precision fp32 --tf32 on"),
        (["check", "f.onnx", "--tf32", "yes"], "invalid choice: 'yes'"),
        (["predict", "f.py:build", "--batch-size", "0"], "--batch-size: expected a whole number of at least 1, but got '0'"),
        (["predict", "f.py:build", "--steps", "1.5"], "--steps: expected a whole number"),
        (["predict", "f.py:build", "--set", "width"], "--set: must look like NAME=VALUE, but got 'width'"),
    ],
)
def test_a_wrong_command_line_exits_with_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_interrupting_exits_with_130(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    def interrupted(_: Any) -> Workload:
        raise KeyboardInterrupt

    monkeypatch.setattr("perfguard.cli.subject.load_build", lambda _: interrupted)
    assert main(["predict", f"{script}:build", "--gpu", "a100"]) == 130


def test_broken_pipe_ends_quietly() -> None:
    command = [sys.executable, "-m", "perfguard.cli", "gpus", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()  # as `head` does, before anything was written
        assert child.stderr.read() == b""
    assert child.returncode == 141


def test_account_says_what_is_taken_for_granted(capsys: pytest.CaptureFixture[str], script: str) -> None:
    words = ["predict", f"{script}:on_many_gpus", "--gpu", "h100"]
    assert main([*words, "--explain"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    document = predict(capsys, *words[1:])
    notes = [*document["notes"], *document["unmodelled"]]
    assert document["unmodelled_codes"] == ["data-parallel"]
    assert "not modelled [data-parallel]: DataParallel" in out
    texts = "h100 is taken for NVIDIA H100 SXM", "names no optimizer", "DataParallel: judged as one"
    for text, note in zip(texts, notes, strict=True):
        assert text in note
        assert note in out


def test_price_gives_the_cost_of_a_trial(capsys: pytest.CaptureFixture[str], script: str) -> None:
    words = [f"{script}:build", "--gpu", "t4", "--steps", "1000000", "--price-per-hour", "$3.60"]
    document = predict(capsys, *words)
    assert document["cost"]["median"] == pytest.approx(document["total_time_s"]["median"] / 1000)
    assert main(["predict", *words]) == 0
    assert "at $3.60 an hour" in capsys.readouterr().out


@pytest.mark.parametrize("gpu", ["a100", "t4", "cpu"])
@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("network", ["resnet", "transformer"])
def test_every_account_adds_up_to_the_prediction(network: str, mode: str, gpu: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = predict(capsys, f"{MODELS}:{network}", "--gpu", gpu, "--mode", mode, "--batch-size", "4", "--explain")
    step_s, peak_bytes = (document[name]["median"] for name in ("step_time_s", "peak_memory_bytes"))
    explained = document["explain"]
    assert sum(document["time_parts_s"].values()) == pytest.approx(step_s, rel=1e-9)
    assert sum(document["time_by_kind_s"].values()) == pytest.approx(step_s, rel=1e-9)
    assert sum(operator["seconds"] for operator in explained["operators"]) == pytest.approx(step_s, rel=1e-9)
    assert sum(document["memory_parts_bytes"].values()) == pytest.approx(peak_bytes, rel=1e-9)
    assert sum(explained["memory_by_module_bytes"].values()) == pytest.approx(peak_bytes, rel=1e-9)
    assert min(document["time_parts_s"].values()) >= 0
    # Two tables, one clock: a kind of one operator alone has its time.
    of_operator = {operator["name"]: operator["seconds"] for operator in explained["operators"]}
    backward_s = of_operator.get("convolution_backward", 0.0)
    assert document["time_by_kind_s"].get("conv_backward", 0.0) == pytest.approx(backward_s, rel=1e-9)
    before = {name: document["time_by_kind_s"].get(name, 0.0) for name in ("start", "batch_copy")}
    assert before["batch_copy"] == pytest.approx(document["time_parts_s"]["copies"], rel=1e-9)
    assert sum(before.values()) == pytest.approx(explained["operators"][-1]["seconds"], rel=1e-6, abs=1e-9)


def test_plot_writes_a_page(tmp_path: Path, script: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "new" / "timeline.html"
    words = ["predict", f"{script}:build", "--gpu", "a100", "--plot"]
    assert main([*words, str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    for expected in ('"name":"activations"', "predicted peak (band: 90%)", "capacity, 39.4 GiB"):
        assert expected in text
    assert main([*words, str(page / "a.html")]) == 2
    assert "The picture cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["evaluate", "train", "leaderboard", "collect"])
def test_command_of_absent_distribution_names_it(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Someone who installed PerfGuard alone must learn what to install, not that the command does not exist.
    monkeypatch.setattr("perfguard.cli.entry_points", lambda group: ())
    assert main([command, "TABLE.csv"]) == 2
    assert "pip install ./models" in capsys.readouterr().err


# --- ONNX files, parts of a GPU, and several GPUs


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


def of_file(capsys: pytest.CaptureFixture[str], model: str, *more: str, side: int = 64) -> Any:
    """What the command prints of the file, with 32 images of this size."""
    assert main(["predict", model, "--batch-size", "32", "--dim", f"side={side}", *more, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_file_is_predicted(capsys: pytest.CaptureFixture[str], model: str) -> None:
    document = of_file(capsys, model, "--gpu", "a100", "--mode", "infer")
    assert document["flops"] == 2 * 32 * 64 * 64 * 1728
    assert document["throughput_per_s"] == pytest.approx(32 / document["step_time_s"]["median"])
    assert document["most_energy_j"]["median"] == pytest.approx(250 * document["step_time_s"]["median"])
    assert "mig" not in document


def test_predict_states_tf32(capsys: pytest.CaptureFixture[str], model: str) -> None:
    on, default, off = (
        of_file(capsys, model, "--gpu", "a100", "--tf32", tf32)["step_time_s"]["median"] for tf32 in ("on", "default", "off")
    )
    assert on == default != off  # a convolution is in TF32 by default
    rows = of_file(capsys, model, "--gpu", "a100,t4", "--tf32", "off")
    assert pytest.approx(off) in [row["step_time_s"]["median"] for row in rows]


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
    document = of_file(capsys, model, "--gpu", gpu)
    assert (document["trained_on_device"], document["trained_quantities"]) == (False, trained)
    assert main(["predict", model, "--batch-size", "32", "--dim", "side=64", "--gpu", gpu]) == 0
    assert sentence in " ".join(capsys.readouterr().out.split())


def test_the_smallest_mig_profile_is_found_and_timed(capsys: pytest.CaptureFixture[str], model: str) -> None:
    mig = of_file(capsys, model, "--gpu", "a100", "--mig")["mig"]
    assert mig["profile"] == "1g.5gb"
    assert mig["instances"] == 7
    assert mig["needed_bytes"] < mig["memory_bytes"]
    large = of_file(capsys, model, "--gpu", "a100", "--mig", side=1024)["mig"]
    assert large["profile"] in ("2g.10gb", "3g.20gb", "7g.40gb")


def test_another_installed_predictor_is_asked(capsys: pytest.CaptureFixture[str], model: str) -> None:
    document = of_file(capsys, model, "--gpu", "a100", "--mig", "--predictor", "dippm")
    assert document["predictor"].startswith("dippm-")
    assert document["trained_quantities"] == ["time"]  # of inference, with held-out runs; its memory comes from the replay
    assert document["mig"]["profile"] == "1g.5gb"
    assert main(["predict", model, "--batch-size", "8", "--dim", "side=64", "--gpu", "a100", "--predictor", "dipm"]) == 1
    assert "No predictor is called 'dipm'. Installed: dippm" in capsys.readouterr().err


def test_people_get_a_table(capsys: pytest.CaptureFixture[str], model: str) -> None:
    assert main(["predict", model, "--batch-size", "32", "--dim", "x=32x3x64x64", "--gpu", "a100", "--mig"]) == 0
    text = capsys.readouterr().out
    for expected in ("latency", "throughput", "smallest MIG profile", "1g.5gb", "at most, at the power limit of 250 W"):
        assert expected in text


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ([], "leaves sizes open: axis 2 of 'x' (side)"),
        (["--dim", "side=64", "--set", "width=3"], "--set is for FILE.py:BUILD"),
        (["--dim", "side=64", "--mode", "train"], "has only the forward pass"),
        (["--dim", "side=64", "--precision", "amp-fp16"], "runs in fp32, fp16 or bf16"),
        (["--dim", "side=64", "--gpu", "a100/9g.1gb"], "has no MIG profile '9g.1gb'. It has: 1g.5gb"),
        (["--dim", "side=64", "--gpu", "a100,t4", "--mig"], "are for one GPU"),
        (["--dim", "side=64", "--gpu", ","], "--gpu must be 'all' or names"),
    ],
)
def test_mistakes_are_explained(capsys: pytest.CaptureFixture[str], model: str, more: list[str], match: str) -> None:
    assert main(["predict", model, "--batch-size", "8", "--gpu", "a100", *more]) == (1 if "leaves sizes" in match else 2)
    assert match in capsys.readouterr().err


def test_gpus_are_ranked_those_that_fit_first(capsys: pytest.CaptureFixture[str], model: str) -> None:
    rows = of_file(capsys, model, "--gpu", "all")
    assert len(rows) > 20
    times = [row["step_time_s"]["median"] for row in rows if row["fits"]]
    assert times == sorted(times)
    fits = [row["fits"] for row in of_file(capsys, model, "--gpu", "p4,a100,b200", side=2048)]
    assert fits == sorted(fits, reverse=True)
    assert set(fits) == {True, False}
