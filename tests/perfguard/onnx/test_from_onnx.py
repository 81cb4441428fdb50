"""An ONNX file gives the operators, FLOPs, bytes and lifetimes that can be worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from perfguard import OpGraph, load_predictor
from perfguard.devices import resolve_device
from perfguard.exceptions import ConfigurationError, OnnxError
from perfguard.graph import StorageKind
from perfguard.onnx import graph_from_onnx
from tests.perfguard.onnx import hostile

FLOAT = TensorProto.FLOAT


def weight(name: str, *shape: int, dtype: Any = np.float32) -> onnx.TensorProto:
    return numpy_helper.from_array(np.zeros(shape, dtype=dtype), name)


def integers(name: str, *values: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, dtype=np.int64), name)


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Sequence[Any] | None],
    outputs: Sequence[str],
    weights: Sequence[onnx.TensorProto] = (),
    *,
    elem_type: int = FLOAT,
    opset: int = 20,
) -> Path:
    graph = helper.make_graph(
        list(nodes),
        "test",
        [helper.make_tensor_value_info(name, elem_type, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs],
        list(weights),
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("mine", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets), path)
    return path


def read(path: Path, **kwargs: Any) -> OpGraph:
    return graph_from_onnx(path, **kwargs)


def names(graph: OpGraph) -> list[str]:
    return [op.name for op in graph.ops]


@pytest.fixture
def convolution(tmp_path: Path) -> Path:
    """Two images of 3 x 8 x 8, 4 filters of 3 x 3, and a ReLU."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1], name="/stem/conv/Conv"),
        helper.make_node("Relu", ["y"], ["z"]),
    ]
    return save(tmp_path / "conv.onnx", nodes, {"x": [2, 3, 8, 8]}, ["z"], [weight("w", 4, 3, 3, 3)])


def test_convolution_costs_two_flops_per_multiply_add(convolution: Path) -> None:
    first, second = read(convolution).ops
    assert (first.name, first.kind, first.module) == ("convolution", "conv", "stem.conv")
    assert first.flops == 2 * (2 * 8 * 8) * (4 * 3 * 3 * 3)
    assert (first.bytes_read, first.bytes_written) == (4 * (2 * 3 * 64 + 108), 4 * 2 * 4 * 64)
    assert first.attributes["padding"] == (1, 1)
    assert first.attributes["weight_shape"] == (4, 3, 3, 3)
    assert (second.name, second.flops) == ("relu_", 4 * 2 * 4 * 64)


def test_storages_live_until_their_last_reader(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Exp", ["x"], ["a"]),
        helper.make_node("Sqrt", ["a"], ["b"]),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    graph = read(save(tmp_path / "m.onnx", nodes, {"x": [16]}, ["y"]))
    assert graph.live_bytes.tolist() == [64, 128, 192, 256]
    assert [(storage.kind, storage.birth, storage.death) for storage in graph.storages] == [
        (StorageKind.INPUT, -1, 3),
        (StorageKind.TEMPORARY, 0, 2),
        (StorageKind.TEMPORARY, 1, 2),
        (StorageKind.TEMPORARY, 2, 2),
    ]


def test_matmul_and_bias_are_one_linear_layer(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Add", ["b", "p"], ["y"])]
    graph = read(save(tmp_path / "m.onnx", nodes, {"x": [2, 5, 16]}, ["y"], [weight("w", 16, 8), weight("b", 8)]))
    (op,) = graph.ops
    assert (op.name, op.attributes["product"], op.flops) == ("addmm", (1, 10, 8, 16), 2 * 10 * 8 * 16)


def attention_nodes(*, masked: bool) -> list[onnx.NodeProto]:
    nodes = [
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("Mul", ["q", "s"], ["qs"]),
        helper.make_node("Mul", ["kt", "s"], ["ks"]),
        helper.make_node("MatMul", ["qs", "ks"], ["scores"]),
        helper.make_node("Add", ["scores", "mask"], ["masked"]),
        helper.make_node("Softmax", ["masked" if masked else "scores"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "v"], ["y"]),
    ]
    return nodes if masked else [node for node in nodes if node.op_type != "Add"]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("precision", "target", "fused"), [
    ("fp32", "cuda", "_scaled_dot_product_efficient_attention"),
    ("fp16", "cuda", "_scaled_dot_product_flash_attention"),
    ("fp32", "cpu", "_scaled_dot_product_flash_attention_for_cpu"),
])  # fmt: skip
def test_attention_is_put_together_again(tmp_path: Path, masked: bool, precision: str, target: str, fused: str) -> None:
    inputs = {**dict.fromkeys("qkv", (2, 3, 10, 16)), **({"mask": [10, 10]} if masked else {})}
    path = save(tmp_path / "m.onnx", attention_nodes(masked=masked), inputs, ["y"], [weight("s")])
    (op,) = read(path, precision=precision, target=target).ops
    if masked and precision == "fp16":  # flash attention takes no mask
        fused = "_scaled_dot_product_efficient_attention"
    assert op.name == fused
    assert op.flops == 2 * 2 * (2 * 3 * 10 * 10) * 16
    assert op.bytes_read == (2 if precision == "fp16" else 4) * (3 * 2 * 3 * 10 * 16 + (100 if masked else 0))


@pytest.mark.parametrize("is_causal", [0, 1])
def test_a_causal_attention_of_the_standard_leaves_out_what_a_query_does_not_meet(tmp_path: Path, is_causal: int) -> None:
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], q_num_heads=4, kv_num_heads=2, is_causal=is_causal)
    shapes = {"q": [2, 10, 64], "k": [2, 10, 32], "v": [2, 10, 32]}
    (op,) = read(save(tmp_path / "m.onnx", [node], shapes, ["y"], opset=23)).ops
    assert op.flops == 2 * 2 * 4 * (55 if is_causal else 100) * (16 + 16)


def test_gelu_and_silu_are_fused(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Div", ["h", "two"], ["hs"]),
        helper.make_node("Erf", ["hs"], ["e"]),
        helper.make_node("Add", ["e", "two"], ["e1"]),
        helper.make_node("Mul", ["h", "e1"], ["he"]),
        helper.make_node("Mul", ["he", "two"], ["a"]),
        helper.make_node("Sigmoid", ["a"], ["sa"]),
        helper.make_node("Mul", ["a", "sa"], ["y"]),
    ]
    graph = read(save(tmp_path / "m.onnx", nodes, {"h": [4, 8]}, ["y"], [weight("two")]))
    assert names(graph) == ["gelu", "silu_"]


def test_views_are_free_but_reshaped_transpose_copies(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Reshape", ["x", "four"], ["r"]),
        helper.make_node("Transpose", ["r"], ["t"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["t", "two"], ["f"]),
        helper.make_node("Exp", ["f"], ["y"]),
    ]
    shapes = [integers("four", 2, 4, 3, 5), integers("two", 2, -1)]
    graph = read(save(tmp_path / "m.onnx", nodes, {"x": [2, 60]}, ["y"], shapes))
    assert names(graph) == ["clone", "exp"]
    assert all(storage.kind is not StorageKind.PARAMETER for storage in graph.storages)


def test_computed_shapes_launch_nothing(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["n"]),
        helper.make_node("Mul", ["n", "two"], ["n2"]),
        helper.make_node("Concat", ["n2", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["r"]),
        helper.make_node("Exp", ["r"], ["y"]),
    ]
    graph = read(
        save(
            tmp_path / "m.onnx",
            nodes,
            {"x": ["batch", 6]},
            ["y"],
            [integers("zero", 0), integers("two", 2), integers("rest", -1)],
        ),
        batch_size=5,
    )
    assert names(graph) == ["exp"]
    assert graph.ops[0].shape == (10, 3)


def test_sizes_are_bound_by_batch_by_name_and_by_input(tmp_path: Path) -> None:
    path = save(
        tmp_path / "m.onnx",
        [helper.make_node("Add", ["x", "z"], ["y"])],
        {"x": ["batch", "length"], "z": ["batch", "length"]},
        ["y"],
    )
    assert read(path, batch_size=3, dims={"length": 7}).ops[0].shape == (3, 7)
    assert read(path, dims={"batch": 2, "length": 7}).ops[0].shape == (2, 7)
    assert read(path, dims={"x": (2, 9), "z": (2, 9)}).ops[0].shape == (2, 9)
    with pytest.raises(OnnxError, match=r"leaves sizes open: axis \d of '\w+' \(length\).*dims="):
        read(path, batch_size=3)
    with pytest.raises(ConfigurationError, match=r"dims names 'lenght'.*length"):
        read(path, batch_size=3, dims={"lenght": 7})


@pytest.mark.parametrize("size", [0, -1, 2.5, True, 2**40, "8"])
def test_a_batch_that_is_no_size_is_refused(convolution: Path, size: Any) -> None:
    with pytest.raises(ConfigurationError, match="batch_size must be an integer from 1"):
        read(convolution, batch_size=size)


def test_a_batch_that_was_fixed_at_export_is_found(tmp_path: Path) -> None:
    nodes = [helper.make_node("Reshape", ["x", "s"], ["r"]), helper.make_node("Exp", ["r"], ["y"])]
    path = save(tmp_path / "m.onnx", nodes, {"x": [2, 6]}, ["y"], [integers("s", 2, 3, 2)])
    assert read(path).ops[0].shape == (2, 3, 2)
    with pytest.raises(OnnxError, match=r"reshapes \(4, 6\) to \(2, 3, 2\).*fixed at export"):
        read(path, batch_size=4)


def test_foreign_operator_keeps_bytes_and_is_named(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Exp", ["x"], ["a"]),
        helper.make_node("Wonder", ["a"], ["b"], domain="mine"),
        helper.make_node("Relu", ["x"], ["y"]),
    ]
    graph = read(save(tmp_path / "m.onnx", nodes, {"x": [16]}, ["y", "b"]))
    assert [(op.name, op.kind, op.flops, op.bytes_read) for op in graph.ops][1] == ("Wonder", "other", 0, 64)
    assert any("Wonder (1)" in text for text in map(str, graph.unmodelled))


def test_functions_of_the_model_are_inlined(tmp_path: Path) -> None:
    opset = helper.make_opsetid("", 20)
    twice = helper.make_function(
        "mine", "Twice", ["a"], ["b"], [helper.make_node("Exp", ["a"], ["m"]), helper.make_node("Exp", ["m"], ["b"])], [opset]
    )
    graph = helper.make_graph(
        [helper.make_node("Twice", ["x"], ["y"], domain="mine")], "g",
        [helper.make_tensor_value_info("x", FLOAT, [8])], [helper.make_tensor_value_info("y", FLOAT, [8])],
    )  # fmt: skip
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, functions=[twice], opset_imports=[opset, helper.make_opsetid("mine", 1)]), path)
    assert names(read(path)) == ["exp", "exp"]


def test_quantised_weights_take_a_byte_each(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("DequantizeLinear", ["wq", "s", "z"], ["w"]),
        helper.make_node("Conv", ["x", "w"], ["y"]),
        helper.make_node("QuantizeLinear", ["y", "s", "z"], ["q"]),
    ]
    weights = [weight("wq", 4, 3, 3, 3, dtype=np.int8), weight("s"), weight("z", dtype=np.int8)]
    graph = read(save(tmp_path / "m.onnx", nodes, {"x": [1, 3, 8, 8]}, ["q"], weights))
    assert names(graph) == ["convolution", "quantize_per_tensor"]
    assert graph.bytes_by_kind()[StorageKind.PARAMETER] == 108
    assert graph.ops[1].bytes_written == 4 * 36
    assert any("quantised" in text for text in map(str, graph.unmodelled))


def test_half_precision_halves_every_float_tensor(convolution: Path) -> None:
    full, half = read(convolution), read(convolution, precision="fp16")
    assert half.precision == "fp16"
    assert 2 * half.peak_live_bytes == full.peak_live_bytes
    assert half.flops == full.flops
    with pytest.raises(ConfigurationError, match="runs in fp32, fp16 or bf16"):
        read(convolution, precision="amp-fp16")


def test_the_precision_is_that_of_the_stored_weights(tmp_path: Path) -> None:
    path = save(
        tmp_path / "m.onnx",
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        {"x": [4, 8]},
        ["y"],
        [weight("w", 8, 8, dtype=np.float16)],
        elem_type=TensorProto.FLOAT16,
    )
    assert read(path).precision == "fp16"


def test_external_weight_values_may_be_missing(tmp_path: Path) -> None:
    model = onnx.load(
        save(tmp_path / "m.onnx", [helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": [4, 64]}, ["y"], [weight("w", 64, 64)])
    )
    onnx.save(model, tmp_path / "e.onnx", save_as_external_data=True, location="e.bin", size_threshold=0)
    (tmp_path / "e.bin").unlink()
    assert read(tmp_path / "e.onnx").bytes_by_kind()[StorageKind.PARAMETER] == 4 * 64 * 64


def test_a_keras_model_comes_in_through_tf2onnx() -> None:
    """`examples/keras_cnn.onnx`: TensorFlow and tf2onnx wrote it from the layers that docs/inference.md shows."""
    graph = read(Path(__file__).resolve().parents[3] / "examples/keras_cnn.onnx", batch_size=2)
    assert names(graph) == [
        "convolution", "relu_", "convolution", "max_pool2d_with_indices", "convolution", "silu_", "mean", "mm", "relu_", "mm",
        "_softmax",
    ]  # fmt: skip
    convolutions = 2 * 2 * (32 * 32 * 16 * 27 + 32 * 32 * 16 * 9 + 8 * 8 * 32 * 144)
    assert sum(op.flops for op in graph.ops if op.kind == "conv") == convolutions
    assert graph.bytes_by_kind()[StorageKind.PARAMETER] == 4 * (16 * 27 + 16 * 9 + 32 * 144 + 32 * 64 + 64 * 10)
    assert not graph.unmodelled


def saved(path: Path, model: onnx.ModelProto) -> Path:
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(("trips", "launches"), [(0, 3), (1, 3), (7, 21), (2**63 - 1, 3000), (None, 3000)])
def test_a_loop_is_one_operator_that_launches_its_body_for_each_trip(tmp_path: Path, trips: int | None, launches: int) -> None:
    """TensorFlow's loops count in their body and have the largest number as their limit: a thousand trips are assumed."""
    graph = read(saved(tmp_path / "m.onnx", hostile.loop(trips, nodes=3)))
    assert names(graph) == ["Loop"]
    assert graph.ops[0].attributes["unknown"] == launches
    assert any("control flow: Loop (1)" in text for text in map(str, graph.unmodelled))


@pytest.mark.parametrize("predictor", ["guardnet", "dnnabacus"])
def test_a_loop_of_unknown_length_widens_the_interval(tmp_path: Path, predictor: str) -> None:
    """37 us (14 to 98) was the answer for any number of trips: the interval says now how little is known."""
    once = hostile.model_of([helper.make_node("Exp", ["x"], ["y"])], shape=(16,))
    graphs = (read(saved(tmp_path / "m.onnx", model)) for model in (once, hostile.loop(None)))
    known, unknown = (load_predictor(predictor).predict(graph, resolve_device("a100")) for graph in graphs)
    lowest, highest = unknown.step_time.interval()
    assert highest / lowest > 1000
    assert lowest < 3 * known.step_time.median < highest
    assert unknown.step_time.log_sigma > 2 * known.step_time.log_sigma
    assert any("Loop (1)" in text and "intervals are wider" in text for text in map(str, unknown.unmodelled))
