"""Attributes that an operator cannot have are refused with its name, theirs, and their value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper

from perfguard.exceptions import OnnxError
from perfguard.onnx import graph_from_onnx
from tests.perfguard.onnx.hostile import convolution, integers, model_of


def refused(tmp_path: Path, model: onnx.ModelProto, match: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(OnnxError, match=match):
        graph_from_onnx(path)


@pytest.mark.parametrize(
    ("attributes", "match"),
    [
        ({"group": 0}, r"has group=0 in operator 0 \(Conv 'stem'\): it must be at least 1"),
        ({"group": -1}, "has group=-1"),
        ({"group": 3}, "has group=3.*does not divide 4 channels"),
        ({"strides": [0, 1]}, r"has strides=\[0, 1\].*at least 1"),
        ({"strides": [-1, 1]}, r"has strides=\[-1, 1\]"),
        ({"dilations": [0, 0]}, r"has dilations=\[0, 0\]"),
        ({"kernel_shape": [0, 3]}, r"has kernel_shape=\[0, 3\]"),
        ({"strides": [1, 1, 1]}, r"has strides=\[1, 1, 1\].*it must have 2 numbers"),
        ({"pads": [-9, 0, 0, 0]}, r"has pads=\[-9, 0, 0, 0\].*cannot be negative"),
        ({"strides": 2}, "has the attribute 'strides' of operator 0 .* as INT, not as INTS"),
    ],
)
def test_convolution_with_wrong_attributes_is_refused(tmp_path: Path, attributes: dict[str, Any], match: str) -> None:
    """group=0 was accepted (finding 5), and would divide by zero further on."""
    refused(tmp_path, convolution(**attributes), match)


def test_a_convolution_with_groups_that_fit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(convolution(weight=(4, 1, 3, 3), group=4).SerializeToString())
    assert graph_from_onnx(path).ops[0].attributes["groups"] == 4


@pytest.mark.parametrize(
    ("node", "match"),
    [
        (helper.make_node("Transpose", ["x"], ["y"], perm=[0, 0, 1]), r"has perm=\[0, 0, 1\].*no permutation of the 3"),
        (helper.make_node("Softmax", ["x"], ["y"], axis=3), "has axis=3 .*no such dimension"),
        (helper.make_node("Concat", ["x", "x"], ["y"], axis=-4), "has axis=-4 .*no such dimension"),
        (helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[0]), r"has kernel_shape=\[0\]"),
        (helper.make_node("DepthToSpace", ["x"], ["y"], blocksize=0), "has blocksize=0"),
        (helper.make_node("Add", ["x", "x", "x"], ["y"]), r"gives operator 0 \(Add\) 3 inputs, but it has 2"),
        (helper.make_node("Conv", ["x"], ["y"]), r"gives operator 0 \(Conv\) 1 inputs, but it has 2 to 3"),
    ],
)
def test_operator_with_wrong_attributes_is_refused(tmp_path: Path, node: onnx.NodeProto, match: str) -> None:
    refused(tmp_path, model_of([node], shape=(2, 3, 4)), match)


def test_pad_that_takes_too_much_is_refused(tmp_path: Path) -> None:
    """Since opset 11 the padding of Pad is an input."""
    older = model_of([helper.make_node("Pad", ["x"], ["y"], pads=[-3, 0, -3, 0])], shape=(4, 4), opset=10)
    refused(tmp_path, older, r"has pads=\[-3, 0, -3, 0\].*takes away more than")
    newer = model_of([helper.make_node("Pad", ["x", "p"], ["y"])], [integers("p", -3, 0, -3, 0)], (4, 4))
    refused(tmp_path, newer, r"has pads=\[-3, 0, -3, 0\] in operator 0 \(Pad\): it takes away more")
