"""Files that are damaged, absurd or malicious end in an error that names the file and what to do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from perfguard.exceptions import ConfigurationError, OnnxError, PerfGuardError
from perfguard.onnx import graph_from_onnx

FLOAT = TensorProto.FLOAT


def model_of(nodes: list[onnx.NodeProto], shape: Any = (16,), weights: Any = (), **kwargs: Any) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", FLOAT, shape)],
        [helper.make_tensor_value_info("y", FLOAT, None)],
        list(weights),
    )
    return helper.make_model(graph, **({"opset_imports": [helper.make_opsetid("", 20)]} | kwargs))


def identity() -> onnx.NodeProto:
    return helper.make_node("Exp", ["x"], ["y"])


def refused(tmp_path: Path, model: onnx.ModelProto | bytes, match: str, **kwargs: Any) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    with pytest.raises(OnnxError, match=match) as caught:
        graph_from_onnx(path, **kwargs)
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
    data = model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], (4, 64), weights).SerializeToString()
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
    size = 500_000_000
    hollow = model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], (4, 1000)).SerializeToString()
    tensor = onnx.TensorProto(dims=[1000, size // 1000], data_type=FLOAT, name="w").SerializeToString()
    raw = b"\x4a" + _varint(4 * size)  # TensorProto.raw_data
    initializer = b"\x2a" + _varint(len(tensor) + len(raw) + 4 * size) + tensor + raw
    graph = onnx.ModelProto.FromString(hollow).graph.SerializeToString()
    head = (
        b"\x08\x0a"
        + b"\x42\x04\x0a\x00\x10\x14"
        + b"\x3a"
        + _varint(len(graph) + len(initializer) + 4 * size)
        + graph
        + initializer
    )
    path = tmp_path / "large.onnx"
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + 4 * size)
    graph_read = graph_from_onnx(path)
    assert graph_read.flops == 2 * 4 * size


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def test_a_newer_version_says_what_to_update(tmp_path: Path) -> None:
    refused(tmp_path, model_of([identity()], opset_imports=[helper.make_opsetid("", 999)]), "has opset 999.*Update onnx")
    model = model_of([identity()])
    model.ir_version = 999
    refused(tmp_path, model, "has IR version 999.*Update onnx")


def test_a_cycle_is_named(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Add", ["x", "b"], ["a"], name="first"),
        helper.make_node("Exp", ["a"], ["b"]),
        helper.make_node("Exp", ["b"], ["y"]),
    ]
    refused(tmp_path, model_of(nodes), r"is cyclic: operator 0 \(Add 'first'\)")


def test_operators_out_of_order_are_sorted(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(model_of([helper.make_node("Sqrt", ["a"], ["y"]), helper.make_node("Exp", ["x"], ["a"])]), path)
    assert [op.name for op in graph_from_onnx(path).ops] == ["exp", "sqrt"]


def test_missing_and_duplicate_values_are_named(tmp_path: Path) -> None:
    refused(tmp_path, model_of([helper.make_node("Exp", ["nothing"], ["y"])]), "lacks 'nothing', which operator 0")
    refused(tmp_path, model_of([identity(), identity()]), "makes 'y' twice")
    refused(tmp_path, model_of([helper.make_node("Exp", ["x"], ["z"])]), "never makes its output 'y'")
    refused(tmp_path, model_of([]), "has no operators")


@pytest.mark.parametrize("shape", [(0, 3), (2**40, 3), (-5, 3), (2**31 - 1, 2**31 - 1)])
def test_absurd_sizes_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    refused(tmp_path, model_of([identity()], shape), "size (must lie|.* on axis)|more than 2\\^40 elements")


def test_an_input_without_a_shape_asks_for_one(tmp_path: Path) -> None:
    refused(tmp_path, model_of([identity()], None), r"leaves sizes open: all of 'x'.*dims=\{'input': \(8, 3, 224, 224\)\}")


def test_operator_making_absurd_tensor_is_refused(tmp_path: Path) -> None:
    sizes = numpy_helper.from_array(np.array([2**30, 2**30], dtype=np.int64), "s")
    refused(tmp_path, model_of([helper.make_node("Expand", ["x", "s"], ["y"])], (1,), [sizes]), r"more than 2\^40 elements")


@pytest.mark.parametrize(
    "location", ["../secret", "/etc/passwd", "a/../../secret", "link/secret", "", "..\\secret", "x" * 5000, "a\0b"]
)
def test_external_values_stay_in_the_models_folder(tmp_path: Path, location: str) -> None:
    (tmp_path / "link").symlink_to("/etc")
    tensor = onnx.TensorProto(dims=[16], data_type=FLOAT, name="w", data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    refused(
        tmp_path, model_of([helper.make_node("Add", ["x", "w"], ["y"])], weights=[tensor]), "outside its folder|but not where"
    )


def test_external_values_in_subgraphs_are_checked(tmp_path: Path) -> None:
    """So are those in constants."""
    tensor = onnx.TensorProto(dims=[16], data_type=FLOAT, name="w", data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="../secret")
    refused(tmp_path, model_of([helper.make_node("Constant", [], ["c"], value=tensor), identity()]), "outside its folder")
    branch = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["b"])], "b", [], [helper.make_tensor_value_info("b", FLOAT, [16])], [tensor]
    )
    condition = numpy_helper.from_array(np.array(True), "c")
    refused(
        tmp_path,
        model_of([helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)], weights=[condition]),
        "outside its folder",
    )


def functions(calls: list[tuple[str, list[str]]]) -> list[onnx.FunctionProto]:
    def body(names: list[str]) -> list[onnx.NodeProto]:
        made = ["a", *(f"m{at}" for at in range(len(names) - 1)), "b"]
        return [
            helper.make_node(name, [made[at]], [made[at + 1]], domain="mine" if name != "Exp" else "")
            for at, name in enumerate(names)
        ]

    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)]
    return [helper.make_function("mine", name, ["a"], ["b"], body(names), opsets) for name, names in calls]


def test_functions_that_grow_without_end_are_refused(tmp_path: Path) -> None:
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)]
    call = [helper.make_node("F0", ["x"], ["y"], domain="mine")]
    laughs = [*((f"F{at}", [f"F{at + 1}"] * 8) for at in range(12)), ("F12", ["Exp"])]
    refused(
        tmp_path,
        model_of(call, functions=functions(laughs), opset_imports=opsets),
        "more than 20,000 operators once its functions",
    )
    refused(tmp_path, model_of(call, functions=functions([("F0", ["F1"]), ("F1", ["F0"])]), opset_imports=opsets), "calls itself")


def test_subgraphs_nested_without_end_are_refused(tmp_path: Path) -> None:
    condition = numpy_helper.from_array(np.array(True), "c")
    out = helper.make_tensor_value_info("b", FLOAT, [16])
    graph = helper.make_graph([helper.make_node("Exp", ["x"], ["b"])], "b", [], [out])
    for _ in range(25):
        graph = helper.make_graph(
            [helper.make_node("If", ["c"], ["b"], then_branch=graph, else_branch=onnx.GraphProto())], "b", [], [out]
        )
    node = helper.make_node("If", ["c"], ["y"], then_branch=graph, else_branch=onnx.GraphProto())
    path = tmp_path / "m.onnx"
    path.write_bytes(model_of([node], weights=[condition]).SerializeToString())
    with pytest.raises(PerfGuardError, match="nests subgraphs more than 20 deep"):
        graph_from_onnx(path)


def test_million_fields_are_refused_before_parsing(tmp_path: Path) -> None:
    refused(tmp_path, b"\x3a" + _varint(2 * 2**21) + b"\x0a\x00" * 2**21, "more than 1,000,000 fields")
