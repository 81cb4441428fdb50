"""Whatever a file says, it is answered or refused within ten seconds of processor time and one GiB of memory.

A refusal is one line that names the file, the place in it, and what to do.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from perfguard import load_predictor
from perfguard.devices import resolve_device
from perfguard.exceptions import ConfigurationError, OnnxError
from perfguard.onnx import graph_from_onnx
from perfguard.onnx.read import read_network
from tests.perfguard.onnx import hostile
from tests.perfguard.onnx.hostile import Sparse, convolution, model_of
from tests.warm import run_fresh

FLOAT = TensorProto.FLOAT


def node(op_type: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs.split(), [output], **attributes)


IDENTITY = node("Exp", "x", "y")


def refused(tmp_path: Path, model: onnx.ModelProto | bytes, match: str, **kwargs: Any) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    with pytest.raises(OnnxError, match=match) as caught:
        read_network(path, **kwargs)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OnnxError, match=r"absent\.onnx cannot be read: No such file"):
        graph_from_onnx(tmp_path / "absent.onnx")


def test_a_folder_and_a_pipe_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.onnx")
    for path in (tmp_path, tmp_path / "pipe.onnx"):
        with pytest.raises(OnnxError, match="not a regular file"):
            graph_from_onnx(path)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "is empty"),
        (b"\x0f" * 64, "no protocol buffer at byte 0"),
        (b"import torch\n", "damaged"),
        (b"\xff" * 64, "does not end"),
    ],
)
def test_a_file_of_another_kind_is_no_onnx(tmp_path: Path, data: bytes, match: str) -> None:
    refused(tmp_path, data, match)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_a_truncated_file_is_damaged_at_a_byte(tmp_path: Path, share: float) -> None:
    weights = [numpy_helper.from_array(np.zeros((64, 64), dtype=np.float32), "w")]
    data = model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], weights, (4, 64)).SerializeToString()
    refused(tmp_path, data[: int(len(data) * share)], "damaged: the field at byte")


def test_a_file_over_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.onnx"
    with path.open("wb") as file:
        file.truncate(3 * 2**30)
    with pytest.raises(OnnxError, match=r"has 3\.00 GiB, more than the limit of 2\.00 GiB\. If you trust it, raise max_bytes"):
        graph_from_onnx(path)
    with pytest.raises(ConfigurationError, match="max_bytes must be a positive number"):
        graph_from_onnx(path, max_bytes=0)


def test_weights_of_two_gigabytes_are_passed_over(tmp_path: Path) -> None:
    """The file is sparse: 1.9 GiB of zeros where the values of a weight would be."""
    made: Sparse = hostile.CASES["two gigabytes of a weight"]()
    path = tmp_path / "large.onnx"
    with path.open("wb") as file:
        file.write(made.head)
        file.truncate(made.size)
    assert graph_from_onnx(path).flops == 2 * 4 * 500_000_000


def test_a_newer_version_says_what_to_update(tmp_path: Path) -> None:
    refused(tmp_path, model_of([IDENTITY], opset=999), "has opset 999.*Update onnx")
    model = model_of([IDENTITY])
    model.ir_version = 999
    refused(tmp_path, model, "has IR version 999.*Update onnx")


@pytest.mark.parametrize(
    ("nodes", "match"),
    [
        (
            [node("Add", "x b", "a"), node("Exp", "a", "b"), node("Exp", "b", "y")],
            r"reads 'b' in operator 0 \(Add\) before it is made",
        ),
        ([node("Sqrt", "a", "y"), node("Exp", "x", "a")], r"reads 'a' in operator 0 \(Sqrt\) before it is made"),
        ([node("Exp", "nothing", "y")], "reads 'nothing' in operator 0"),
        ([node("Exp", "x", "y"), node("Exp", "x", "y")], "makes 'y' twice"),
        ([node("Exp", "x", "z")], "never makes its output 'y'"),
        ([], "has no operators"),
        ([node("Transpose", "x", "y", perm=[0, 0, 1])], r"operator 0 \(Transpose\).*perm"),
        ([node("Softmax", "x", "y", axis=3)], r"operator 0 \(Softmax\).*axis"),
        ([node("MaxPool", "x", "y", kernel_shape=[0])], r"kernel_shape=\[0\] in operator 0 \(MaxPool\)"),
        ([node("DepthToSpace", "x", "y", blocksize=0)], r"blocksize=\[0\] in operator 0"),
        ([node("Add", "x x x", "y")], r"operator 0 \(Add\): .* input size 3"),
    ],
)
def test_a_graph_that_contradicts_the_specification_is_refused(tmp_path: Path, nodes: list[onnx.NodeProto], match: str) -> None:
    refused(tmp_path, model_of(nodes, shape=(2, 3, 4)), match)


@pytest.mark.parametrize("shape", [(0, 3), (2**40, 3), (-5, 3), (2**31 - 1, 2**31 - 1)])
def test_absurd_sizes_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    refused(tmp_path, model_of([IDENTITY], shape=shape), r"with size .* on axis|more than 2\^31 - 1|more than 2\^40 elements")


def test_an_input_without_a_shape_asks_for_one(tmp_path: Path) -> None:
    refused(tmp_path, model_of([IDENTITY], shape=None), r"leaves sizes open: all of 'x'.*dims=\{'input': \(8, 3, 224, 224\)\}")


def test_operator_making_absurd_tensor_is_refused(tmp_path: Path) -> None:
    sizes = numpy_helper.from_array(np.array([2**30, 2**30], dtype=np.int64), "s")
    refused(tmp_path, model_of([helper.make_node("Expand", ["x", "s"], ["y"])], [sizes]), r"more than 2\^40 elements")


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "link/secret", "", "a\0b"])
def test_external_values_are_never_opened(tmp_path: Path, location: str) -> None:
    (tmp_path / "link").symlink_to("/etc")
    os.mkfifo(tmp_path.parent / "secret")  # whoever opens it waits for ever
    tensor = onnx.TensorProto(dims=[16], data_type=FLOAT, name="w", data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    path = tmp_path / "model.onnx"
    path.write_bytes(model_of([helper.make_node("Add", ["x", "w"], ["y"])], weights=[tensor]).SerializeToString())
    try:
        assert [op.name for op in graph_from_onnx(path).ops] == ["add"]
    finally:
        (tmp_path.parent / "secret").unlink()


def test_functions_that_grow_without_end_are_refused(tmp_path: Path) -> None:
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)]

    def refused_functions(calls: dict[str, list[str]], match: str) -> None:
        functions = []
        for name, names in calls.items():
            values = ["a", *(f"m{at}" for at in range(len(names) - 1)), "b"]
            body = [
                helper.make_node(called, [values[at]], [values[at + 1]], domain="" if called == "Exp" else "mine")
                for at, called in enumerate(names)
            ]
            functions.append(helper.make_function("mine", name, ["a"], ["b"], body, opsets))
        model = model_of([helper.make_node("F0", ["x"], ["y"], domain="mine")])
        model.functions.extend(functions)
        refused(tmp_path, model, match, cpu_s=1)

    laughs = {**{f"F{at}": [f"F{at + 1}"] * 8 for at in range(12)}, "F12": ["Exp"]}
    refused_functions(laughs, r"(takes more than .*|stops the onnx library .*) in its functions")
    refused_functions({"F0": ["F1"], "F1": ["F0"]}, r"in its functions|recursi")


@pytest.mark.parametrize(
    ("attributes", "match"),
    [
        ({"group": 0}, r"has group=\[0\] in operator 0 \(Conv 'stem'\): it must be at least 1"),
        ({"strides": [-1, 1]}, r"has strides=\[-1, 1\]"),
        ({"strides": [1, 1, 1]}, r"operator 0 \(Conv 'stem'\).*strides"),
        ({"pads": [-9, 0, 0, 0]}, r"operator 0 \(Conv 'stem'\).*pads"),
        ({"strides": 2}, r"operator 0 \(Conv 'stem'\).*Expected: 'INTS', actual: 'INT'"),
    ],
)
def test_convolution_with_wrong_attributes_is_refused(tmp_path: Path, attributes: dict[str, Any], match: str) -> None:
    refused(tmp_path, convolution(**attributes), match)


def test_a_refusal_is_one_line_whatever_the_names(tmp_path: Path) -> None:
    """A name in a file may hold line breaks and codes that move a terminal's cursor."""
    model = convolution(group=0)
    model.graph.node[0].name = "stem\n\x1b[2J" * 100
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(OnnxError) as caught:
        graph_from_onnx(path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_a_file_beyond_the_limits_of_its_process_is_refused_at_its_place(tmp_path: Path) -> None:
    """The study goes on: it is the child that ends."""
    path = tmp_path / "model.onnx"
    chain = [helper.make_node("Exp", [f"v{at}" if at else "x"], [f"v{at + 1}"]) for at in range(100_000)]
    path.write_bytes(model_of([*chain, IDENTITY]).SerializeToString())
    with pytest.raises(OnnxError, match=r"model\.onnx takes more than 1 s in (operator \d+ \(Exp\)|its \w+)\."):
        read_network(path, cpu_s=1, most_nodes=10**6)
    path.write_bytes(hostile.CASES["names of 30 MB"]().SerializeToString())
    with pytest.raises(OnnxError, match=r"model\.onnx (takes more than|stops the onnx library)"):
        read_network(path, memory_bytes=150 * 2**20)


@pytest.mark.timeout(600)
def test_small_files_neither_hang_nor_fill_memory(tmp_path: Path) -> None:
    within_limits(list(hostile.SMALL), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_large_files_neither_hang_nor_fill_memory(tmp_path: Path) -> None:
    """A million operators, names of 100 MB, two gigabytes of weights; two bytes of a file can be an object of two hundred."""
    within_limits(list(hostile.LARGE), tmp_path)


def within_limits(names: list[str], folder: Path) -> None:
    rows = [line.split("\t") for line in run_fresh(hostile.__file__, folder, *names, timeout_s=1400).splitlines()]
    assert [row[0] for row in rows] == names
    for name, seconds, peak_mib, text in rows:
        assert float(seconds) < 10, name
        assert int(peak_mib) < 1024, name
        assert text.startswith(("read: ", "refused: ")), name


@pytest.mark.parametrize("name", ["range 10^9", "Expand 2^30", "Loop of 10^9"])
def test_what_is_read_can_be_predicted(name: str, tmp_path: Path) -> None:
    """A hang in the replay or in the predictor would be a hang all the same."""
    path = tmp_path / "model.onnx"
    path.write_bytes(hostile.SMALL[name]().SerializeToString())
    prediction = load_predictor().predict(graph_from_onnx(path), resolve_device("a100"))
    assert prediction.step_time.median > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_damaged_files_are_read_or_refused(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """`pytest --fuzz-files 10000` reads more of them."""
    number = request.config.getoption("--fuzz-files")
    printed = run_fresh(Path(__file__).with_name("fuzz.py"), number, 8, tmp_path, timeout_s=3000)
    counts = {name: int(value) for name, value in map(str.split, printed.splitlines())}
    assert counts["read"] + counts["refused"] >= number
    assert min(counts["read"], counts["refused"]) >= 0.02 * number, "all of one sort: the damage is too great or too small"
    assert counts["peak_mib"] < 1024
