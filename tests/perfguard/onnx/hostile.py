"""Small and large files that would hang a reader or fill its memory. A script, so that each is read in a process of its own.

python hostile.py FOLDER [CASE...]
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from perfguard.exceptions import OnnxError
from perfguard.onnx import graph_from_onnx

LONGEST_S = 10.0
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def model_of(nodes: list[onnx.NodeProto], weights: Any = (), shape: Any = (1,), opset: int = 20) -> onnx.ModelProto:
    """From "x" to "y"."""
    inputs = [helper.make_tensor_value_info("x", FLOAT, shape)]
    outputs = [helper.make_tensor_value_info("y", FLOAT, None)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(weights))
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("mine", 1)]
    return helper.make_model(graph, opset_imports=opsets)


def integers(name: str, *values: int, scalar: bool = False) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values[0] if scalar else values, dtype=np.int64), name)


def _range(limit: int) -> onnx.ModelProto:
    weights = [integers(name, value, scalar=True) for name, value in (("a", 0), ("b", limit), ("c", 1))]
    nodes = [helper.make_node("Range", ["a", "b", "c"], ["v"]), helper.make_node("Cast", ["v"], ["y"], to=FLOAT)]
    return model_of(nodes, weights)


def _filled(op_type: str, inputs: list[str], size: int, **attributes: Any) -> onnx.ModelProto:
    """Integers, because onnx propagates their values."""
    nodes = [helper.make_node(op_type, inputs, ["v"], **attributes), helper.make_node("Cast", ["v"], ["y"], to=FLOAT)]
    return model_of(nodes, [integers("one", 1), integers("s", size)])


def _doubled(times: int) -> onnx.ModelProto:
    nodes = [helper.make_node("Concat", [f"v{at}", f"v{at}"], [f"v{at + 1}"], axis=0) for at in range(times)]
    return model_of([*nodes, helper.make_node("Cast", [f"v{times}"], ["y"], to=FLOAT)], [integers("v0", 1)])


def loop(trips: int | None, *, condition: str = "goes_on", nodes: int = 1) -> onnx.ModelProto:
    """y = exp(exp(... x)), ``trips`` times; None: as often as an input says."""
    chain = ["state", *(f"h{at}" for at in range(nodes - 1)), "next"]
    body = helper.make_graph(
        [helper.make_node("Exp", [chain[at]], [chain[at + 1]]) for at in range(nodes)],
        "body",
        [
            helper.make_tensor_value_info("i", INT64, []),
            helper.make_tensor_value_info("goes_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", FLOAT, [16]),
        ],
        [helper.make_tensor_value_info(condition, TensorProto.BOOL, []), helper.make_tensor_value_info("next", FLOAT, [16])],
    )
    weights = [numpy_helper.from_array(np.array(True), "yes")]
    weights += [] if trips is None else [integers("trips", trips, scalar=True)]
    model = model_of([helper.make_node("Loop", ["trips", "yes", "x"], ["y"], body=body, name="loop")], weights, (16,))
    if trips is None:
        model.graph.input.append(helper.make_tensor_value_info("trips", INT64, []))
    return model


def convolution(shape: Any = (1, 4, 8, 8), weight: Any = (4, 4, 3, 3), **attributes: Any) -> onnx.ModelProto:
    weights = [numpy_helper.from_array(np.zeros(weight, dtype=np.float32), "w")]
    return model_of([helper.make_node("Conv", ["x", "w"], ["y"], name="stem", **attributes)], weights, shape)


def _chain(number: int, name: str = "") -> onnx.ModelProto:
    return model_of([helper.make_node("Exp", [_v(at, name)], [_v(at + 1, name, number)]) for at in range(number)])


def _v(at: int, name: str, last: int = -1) -> str:
    return "x" if at == 0 else "y" if at == last else f"{name}{at}"


def _one_gate_for_all(number: int) -> onnx.ModelProto:
    """A sigmoid that every product reads: a search for SiLU looks at all readers for each."""
    nodes = [helper.make_node("Sigmoid", ["x"], ["s"])]
    nodes += [helper.make_node("Mul", ["x", "s"], [f"p{at}"]) for at in range(number)]
    return model_of([*nodes, helper.make_node("Sum", [f"p{at}" for at in range(number)], ["y"])])


def _small_nodes(text: bytes, number: int, times: int) -> bytes:
    """``number`` operators, each with ``times`` fields of ``text``: two bytes in the file, an object each in memory."""
    node = text * times
    part = b"\x0a" + _varint(len(node)) + node
    return b"\x08\x0a\x42\x04\x0a\x00\x10\x14\x3a" + _varint(len(part) * number) + part * number


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _nested(depth: int) -> onnx.ModelProto:
    """``If`` in both branches of ``If``; onnx looks into each."""
    out = helper.make_tensor_value_info("b", FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Exp", ["x"], ["b"])], "b", [], [out])
    empty = helper.make_graph([helper.make_node("Relu", ["x"], ["b"])], "e", [], [out])
    for _ in range(depth):
        graph = helper.make_graph([helper.make_node("If", ["c"], ["b"], then_branch=graph, else_branch=graph)], "b", [], [out])
    nodes = [
        helper.make_node("Cast", ["x"], ["m"], to=TensorProto.BOOL),
        helper.make_node("Squeeze", ["m"], ["c"]),
        helper.make_node("If", ["c"], ["y"], then_branch=graph, else_branch=empty),
    ]
    return model_of(nodes)


def _many_values(number: int) -> onnx.ModelProto:
    """Each operator has four thousand values that can be known."""
    nodes = [helper.make_node("Expand", ["one", "s"], [f"v{at}"]) for at in range(number)]
    nodes.append(helper.make_node("Cast", ["v0"], ["y"], to=FLOAT))
    return model_of(nodes, [integers("one", 1), integers("s", 4096)])


def _constant_in_function(calls: int) -> onnx.ModelProto:
    constant = numpy_helper.from_array(np.zeros(7000, dtype=np.float32), "c")
    body = [helper.make_node("Constant", [], ["k"], value=constant), helper.make_node("Exp", ["a"], ["b"])]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)]
    function = helper.make_function("mine", "F", ["a"], ["b"], body, opsets)
    nodes = [helper.make_node("F", [_v(at, "n")], [_v(at + 1, "n", calls)], domain="mine") for at in range(calls)]
    model = model_of(nodes)
    model.functions.append(function)
    return model


class Sparse(NamedTuple):
    """The first bytes of a file; the others are zeros that take no room on the disk."""

    head: bytes
    size: int


def _two_gigabytes() -> Sparse:
    """A weight of 2,000 MB before the graph's operator."""
    size = 500_000_000
    weight = onnx.TensorProto(dims=[1, size], data_type=FLOAT, name="w").SerializeToString()
    raw = b"\x4a" + _varint(4 * size)  # TensorProto.raw_data
    initializer = b"\x2a" + _varint(len(weight) + len(raw) + 4 * size) + weight + raw
    graph = model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], shape=(4, 1)).graph.SerializeToString()
    head = b"\x08\x0a\x42\x04\x0a\x00\x10\x14\x3a" + _varint(len(graph) + len(initializer) + 4 * size) + graph + initializer
    return Sparse(head, len(head) + 4 * size)


# What a file of a few bytes can say.
SMALL: dict[str, Callable[[], Any]] = {
    "range 10^15": lambda: _range(10**15),
    "range 10^9": lambda: _range(10**9),
    "ConstantOfShape 2^31": lambda: _filled("ConstantOfShape", ["s"], 2**31, value=integers("value", 1)),
    "Expand 2^30": lambda: _filled("Expand", ["one", "s"], 2**30),
    "34 Concat(v, v)": lambda: _doubled(34),
    "Loop of 10^9": lambda: loop(10**9),
    "Loop of an unknown number": lambda: loop(None),
    "group=0": lambda: convolution(group=0),
}
LARGE: dict[str, Callable[[], Any]] = {
    "If 15 deep": lambda: _nested(15),
    "20,000 Exp": lambda: _chain(20_000),
    "a million Exp": lambda: _chain(1_000_000),
    "one gate for 19,000": lambda: _one_gate_for_all(19_000),
    "names of 30 MB": lambda: _chain(2, name="n" * 20_000_000),
    "names of 100 MB": lambda: _chain(2, name="n" * 100_000_000),
    "long names in all": lambda: _chain(20_000, name="n" * 1000),
    "attributes of two bytes": lambda: _small_nodes(b"\x2a\x00", 2000, 16_000),
    "values that can be known": lambda: _many_values(19_000),
    "a constant in a function": lambda: _constant_in_function(5_000),
    "dimensions": lambda: model_of([helper.make_node("Exp", ["x"], ["y"])], shape=[2**31 - 1] * 200_000),
    "two gigabytes of a weight": _two_gigabytes,
}
CASES = SMALL | LARGE


def main(folder: Path, names: list[str]) -> None:
    """Print a line for each file: name, seconds of processor time, peak MiB, and what came."""
    for number, name in enumerate(names):
        path = folder / f"{number}.onnx"
        if not (writer := os.fork()):  # what it takes to write a file is not what it takes to read it
            made = CASES[name]()
            with path.open("wb") as file:
                if isinstance(made, Sparse):
                    file.write(made.head)
                    file.truncate(made.size)
                else:
                    file.write(made if isinstance(made, bytes) else made.SerializeToString())
            os._exit(0)
        assert os.waitpid(writer, 0)[1] == 0
        if not (reader := os.fork()):
            before, start = resource.getrusage(resource.RUSAGE_SELF), sum(os.times()[:4])
            try:
                graph = graph_from_onnx(path)
                outcome = f"read: {len(graph.ops)} operators, {len(graph.unmodelled)} notes"
            except OnnxError as error:
                outcome = f"refused: {error}"
            own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before.ru_maxrss
            peak_kib = own + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
            print(name, f"{sum(os.times()[:4]) - start:.2f}", peak_kib // 1024, outcome, sep="\t", flush=True)
            os._exit(0)
        assert os.waitpid(reader, 0)[1] == 0
        path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(CASES))
