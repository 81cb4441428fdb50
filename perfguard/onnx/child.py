"""Describes an ONNX file with the onnx library, in a process that may crash, hang or run out of memory without harm.

`read.py` runs this file as a script under limits of memory and time. It imports onnx and nothing of PerfGuard, so that it starts
in a fifth of a second. It reads a request as JSON from standard input and writes its answer as JSON to standard output, a file.
The first bytes of that file hold the place at which the work is, for the error message after a crash.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import mmap
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import inliner, numpy_helper, shape_inference
from onnx.helper import get_attribute_value, make_tensor_type_proto
from onnx.reference.ops import load_op

PLACE_BYTES = 256
"""Length of the place at the start of the answer's file."""
MOST_ANSWER_BYTES = 32 * 2**20
_STANDARD = ("", "ai.onnx")
_EXPORT_AGAIN = "Export it again."
_FIXED = "A size was fixed at export. Leave it as it is in the file, or export with a dynamic batch dimension."
_CONTRADICTION = "The file contradicts the ONNX specification. Export it again."
_POSITIVE = (
    "group", "offset_group", "strides", "dilations", "kernel_shape", "blocksize", "hidden_size", "num_groups", "num_outputs",
    "q_num_heads", "kv_num_heads",
)  # fmt: skip
"""Attributes by which shape inference divides, and which it does not check in all operators."""


class Refusal(Exception):
    """The file cannot be used: ``problem`` is a sentence that begins with the verb, ``hint`` what to do about it."""

    def __init__(self, problem: str, hint: str, *, is_argument: bool = False) -> None:
        super().__init__(problem, hint)
        self.answer = {"problem": problem, "hint": hint, "is_argument": is_argument}


def main() -> None:
    """Answer one request: a description of the file, or why there is none."""
    request = json.load(sys.stdin)
    # The file is mapped, and only the pages that are kept take memory.
    _limit(request["memory_bytes"] + Path(request["path"]).stat().st_size, request["cpu_s"])
    try:
        answer = _Description(request).answer()
        text = json.dumps(answer)
        if len(text) > MOST_ANSWER_BYTES:
            raise Refusal(
                f"has a graph whose description takes {len(text) >> 20} MiB", f"At most {MOST_ANSWER_BYTES >> 20} are read."
            )
    except Refusal as refusal:
        text = json.dumps(refusal.answer)
    except MemoryError:
        text = json.dumps({"is_out_of_memory": True})
    except Exception as error:  # whatever a damaged file leads to, here or in C++, is a reason to refuse it
        reason = _reason(error) or type(error).__name__
        text = json.dumps({"problem": f"is no ONNX model, or damaged: {reason}", "hint": "Export or download it again."})
    _write(text.encode(), PLACE_BYTES)


def _limit(memory_bytes: int, cpu_s: int) -> None:
    """Bound this process. On Windows nothing does, but for who waits."""
    try:
        import resource
    except ImportError:
        return
    answer_bytes = PLACE_BYTES + MOST_ANSWER_BYTES
    limits = {resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_CPU: cpu_s, resource.RLIMIT_FSIZE: answer_bytes}
    for kind, limit in limits.items():
        with contextlib.suppress(ValueError, OSError):  # a stricter limit is already there
            resource.setrlimit(kind, (limit, limit + 1))  # one more, so that the signal names the limit and is not SIGKILL


def _at(place: str) -> None:
    """Leave word of where the work is."""
    _write(place.encode(errors="replace")[:PLACE_BYTES].ljust(PLACE_BYTES), 0)


def _write(text: bytes, at: int) -> None:
    os.lseek(1, at, os.SEEK_SET)
    os.write(1, text)


def _label(node: onnx.NodeProto, index: int) -> str:
    return f"operator {index} ({node.op_type[:40]}{f' {node.name[:80]!r}' if node.name else ''})"


# Reading the file. A file of two gigabytes is two gigabytes of weights and some kilobytes of graph. The parser would copy all of
# it, so the values of the graph's weights are cut out before it runs.


def _slimmed(data: memoryview, start: int, end: int, path: tuple[int, ...], most_bytes: int = 64 * 2**20) -> bytearray:
    """The protocol buffer between two bytes without the values of large weights.

    Args:
        data: a mapped file. Only pages that are kept are read.
        start, end: the first byte and that after the last.
        path: numbers of the fields that lead to a weight. Empty: the message is one.
        most_bytes: limit of what is left. 20,000 operators with a kilobyte of names each take a third of it.
    """
    values = (4, 5, 6, 7, 9, 10, 11)  # of TensorProto: float_data, int32_data, string_data, int64_data, raw_data and so on
    large = 32 * 2**10  # shapes, axes and other small values stay
    out = bytearray()
    position = start
    while position < end:
        begin = position
        key, position = _varint(data, position)
        content = position
        if key >> 3 == 0:
            raise ValueError(f"there is no protocol buffer at byte {begin}")
        if key & 7 == 0:
            _, position = _varint(data, position)
        elif key & 7 == 2:
            length, content = _varint(data, position)
            position = content + length
        elif key & 7 in (1, 5):
            position += 8 if key & 7 == 1 else 4
        else:
            raise ValueError(f"there is no protocol buffer at byte {begin}")
        if position > end:
            raise ValueError(f"the field at byte {begin} ends at byte {position}, but the data ends at byte {end}")
        if len(out) > most_bytes:
            raise ValueError(f"the graph without its weights takes more than {most_bytes >> 20} MiB at byte {begin}")
        if position - content <= large or key & 7 != 2:
            out += data[begin:position]
        elif path and key >> 3 == path[0]:
            inner = _slimmed(data, content, position, path[1:])
            out += _as_varint(key) + _as_varint(len(inner)) + inner
        elif path or key >> 3 not in values:
            out += data[begin:position]
    return out


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position + shift // 7 >= len(data):
            break
        byte = data[position + shift // 7]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position + shift // 7 + 1
    raise ValueError(f"a number at byte {position} does not end")


def _as_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _loaded(path: str, most_nodes: int) -> onnx.ModelProto:
    """The model without the values of its large weights, with its functions inlined. Its operators are in order."""
    with (
        Path(path).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as data,
    ):
        slim = bytes(_slimmed(data, 0, len(data), (7, 5)))  # ModelProto.graph, GraphProto.initializer
    _at("its protocol buffer")
    model: onnx.ModelProto = onnx.ModelProto.FromString(slim)
    _at("its graph")
    if not model.HasField("graph"):
        raise Refusal("holds no graph", "Is it an ONNX model? Export it again.")
    hint = f"Update onnx (installed: {onnx.__version__}), or export for it."
    newest = onnx.defs.onnx_opset_version()
    if model.ir_version > onnx.IR_VERSION:
        raise Refusal(f"has IR version {model.ir_version}, the installed onnx knows up to {onnx.IR_VERSION}", hint)
    if not 1 <= _opset(model) <= newest:
        raise Refusal(f"has opset {_opset(model)}, the installed onnx knows 1 to {newest}", hint)
    number = _num_operators(model.graph)
    if number <= most_nodes and model.functions:
        _at("its functions")
        model = inliner.inline_local_functions(model)
        number = _num_operators(model.graph)
    if number > most_nodes:
        raise Refusal(f"has {number:,} operators", f"At most {most_nodes:,} are read.")
    if not number:
        raise Refusal("has no operators", "Export the network again.")
    _check_order(model.graph)
    return model


def _opset(model: onnx.ModelProto) -> int:
    """The version of the standard operators; 1 for models from before versions were written down."""
    return max((entry.version for entry in model.opset_import if entry.domain in _STANDARD), default=1)


def _graphs_in(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The subgraphs of a control-flow operator."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _is_control_flow(node: onnx.NodeProto) -> bool:
    return any(True for _ in _graphs_in(node))


def _num_operators(graph: onnx.GraphProto) -> int:
    """Operators of ``graph`` and of its subgraphs."""
    return len(graph.node) + sum(_num_operators(inner) for node in graph.node for inner in _graphs_in(node))


def _names_read_by(node: onnx.NodeProto) -> Iterator[str]:
    """Inputs of ``node``, and what its subgraphs read from outside."""
    yield from filter(None, node.input)
    for graph in _graphs_in(node):
        made = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        for inner in graph.node:
            yield from (name for name in _names_read_by(inner) if name not in made)
            made.update(inner.output)
        yield from (value.name for value in graph.output if value.name not in made)


def _check_order(graph: onnx.GraphProto) -> None:
    """Refuse values that are made twice, never, or after they are read: the specification wants operators in order."""
    made = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    made |= {sparse.values.name for sparse in graph.sparse_initializer}
    for index, node in enumerate(graph.node):
        absent = next((name for name in _names_read_by(node) if name not in made), None)
        if absent is not None:
            raise Refusal(f"reads {absent[:80]!r} in {_label(node, index)} before it is made", _EXPORT_AGAIN)
        for name in filter(None, node.output):
            if name in made:
                raise Refusal(f"makes {name[:80]!r} twice, the second time by {_label(node, index)}", _EXPORT_AGAIN)
            made.add(name)
    for value in graph.output:
        if value.name not in made:
            raise Refusal(f"never makes its output {value.name[:80]!r}", _EXPORT_AGAIN)


def _refuse_attributes_below_one(node: onnx.NodeProto, index: int) -> None:
    """Refuse an operator of which a divisor of shape inference is 0 or negative."""
    for attribute in node.attribute:
        numbers = (attribute.i,) if attribute.type == onnx.AttributeProto.INT else attribute.ints
        if attribute.name in _POSITIVE and any(number < 1 for number in numbers):
            text = f"has {attribute.name}={list(numbers)[:8]} in {_label(node, index)}: it must be at least 1"
            raise Refusal(text, _CONTRADICTION)


# Sizes that the user gives.


def _bind(inputs: list[onnx.ValueInfoProto], batch_size: int | None, dims: Mapping[str, object], path: str) -> None:
    """Write sizes into the shapes of the model's inputs, in place."""
    tensors = {value.name: value.type.tensor_type for value in inputs if value.type.HasField("tensor_type")}
    symbols = {dim.dim_param for tensor in tensors.values() for dim in tensor.shape.dim if dim.dim_param}
    unknown = sorted(set(dims) - symbols - set(tensors))
    if unknown:
        known = ", ".join(sorted(symbols | set(tensors))[:8]) or "none"
        raise Refusal(
            f"dims names {unknown[0]!r}, which {path} does not have", f"Its inputs and dimensions: {known}.", is_argument=True
        )
    bound = {name: size for name, size in dims.items() if isinstance(size, int) and name in symbols}
    if batch_size is not None:
        firsts = (tensor.shape.dim[0].dim_param for tensor in tensors.values() if tensor.shape.dim)
        bound = {symbol: batch_size for symbol in firsts if symbol} | bound
    open_: list[str] = []
    for name, tensor in tensors.items():
        given = dims.get(name)
        if isinstance(given, list):
            tensor.shape.CopyFrom(make_tensor_type_proto(onnx.TensorProto.FLOAT, given).tensor_type.shape)
            continue
        if not tensor.HasField("shape"):
            open_.append(f"all of {name!r}")
        open_ += _bind_axes(name, tensor, bound, batch_size)
    if open_:
        more = f" and {len(open_) - 8} more" if len(open_) > 8 else ""
        raise Refusal(
            f"leaves sizes open: {', '.join(open_[:8])}{more}",
            "Give batch_size=..., or dims={'name of the dimension': 8} or dims={'input': (8, 3, 224, 224)} "
            "(--batch-size 8, --dim NAME=8, --dim INPUT=8x3x224x224).",
        )


def _bind_axes(name: str, tensor: onnx.TypeProto.Tensor, bound: Mapping[str, int], batch_size: int | None) -> Iterator[str]:
    """Write the sizes of ``bound``, and the batch size, into the shape of the input ``name``. Yield the axes that stay open."""
    for axis, dim in enumerate(tensor.shape.dim):
        if dim.dim_param in bound:
            dim.dim_value = bound[dim.dim_param]
        elif axis == 0 and batch_size is not None:
            dim.dim_value = batch_size
        elif not dim.HasField("dim_value"):
            yield f"axis {axis} of {name!r}{f' ({dim.dim_param})' if dim.dim_param else ''}"
        elif dim.dim_value < 1:
            hint = f"A size must be at least 1. Bind it: dims={{{name!r}: (...)}}, or batch_size= for axis 0."
            raise Refusal(f"has an input {name!r} with size {dim.dim_value} on axis {axis}", hint)


# Shapes. The onnx library infers the outputs of one operator after the other, from the shapes of its inputs and from small values
# (shapes, axes, sizes). These its reference implementation computes. The library's inference of a whole model with data_prop=True
# knows fewer of them (no Equal, Where or ConstantOfShape, which exporters write into shapes), and does not say what it knows.


class _Description:
    """The file as JSON: its operators in order, and the types of its values."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._most_elements = request["most_elements"]
        self._model = _loaded(request["path"], request["most_nodes"])
        graph = self._model.graph
        self._weights = {one.name for one in graph.initializer} | {one.values.name for one in graph.sparse_initializer}
        # Before IR version 4 the weights were inputs too.
        self._inputs = [value for value in graph.input if value.name not in self._weights]
        as_in_file = [value.SerializeToString() for value in self._inputs]
        _bind(self._inputs, request["batch_size"], request["dims"], request["path"])
        self._is_rebatched = as_in_file != [value.SerializeToString() for value in self._inputs]
        # Inner shapes that the file declares are those of its own sizes.
        declared = () if self._is_rebatched else (*graph.value_info, *graph.output)
        self._declared = {value.name: value.type for value in declared}
        self._opset = _opset(self._model)
        self._context = onnx.checker.DEFAULT_CONTEXT
        self._context.ir_version = self._model.ir_version
        self._context.opset_imports = {entry.domain: entry.version for entry in self._model.opset_import} | {"": self._opset}
        self._protos: dict[str, onnx.TypeProto] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._values: dict[str, Any] = {}

    def answer(self) -> dict[str, Any]:
        """The description, after all operators have been checked and followed."""
        graph = self._model.graph
        for value in graph.input:
            self._learn(value.name, value.type)
        for tensor in graph.initializer:
            self._learn_tensor(tensor.name, tensor)
        for sparse in graph.sparse_initializer:
            self._learn(sparse.values.name, make_tensor_type_proto(sparse.values.data_type, sparse.dims))
        whole = self._whole() if any(map(_is_control_flow, graph.node)) else {}
        for index, node in enumerate(graph.node):
            _at(_label(node, index))
            self._follow(node, index, whole)
        _at("its description")
        return {
            "nodes": [self._node(node) for node in graph.node],
            "types": {
                name: [onnx.TensorProto.DataType.Name(self._protos[name].tensor_type.elem_type), *shape]
                for name, shape in self._shapes.items()
            },
            "inputs": [value.name for value in self._inputs if value.name in self._shapes],
            "outputs": [value.name for value in graph.output],
            "weights": sorted(self._weights),
            "known": sorted(self._values),
        }

    def _whole(self) -> dict[str, onnx.TypeProto]:
        """Result of shape inference over the whole model, for the outputs of control flow."""
        _at("its control flow")
        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        del model.graph.value_info[:]
        for value in model.graph.output:
            value.ClearField("type")
        try:
            inferred = shape_inference.infer_shapes(model).graph
        except Exception:  # of an operator that it cannot do; those that are wrong are found one by one
            return {}
        return {value.name: value.type for value in (*inferred.value_info, *inferred.output)}

    def _follow(self, node: onnx.NodeProto, index: int, whole: Mapping[str, onnx.TypeProto]) -> None:
        """Check an operator, and find the types and small values of its outputs."""
        is_standard = node.domain in _STANDARD
        is_control_flow = _is_control_flow(node)
        if node.op_type == "Constant" and is_standard:
            self._learn_constant(node)
            return
        if is_standard and not is_control_flow:
            try:
                onnx.checker.check_node(node, self._context)
            except onnx.checker.ValidationError as error:
                raise Refusal(f"has {_label(node, index)}: {_reason(error)}", _CONTRADICTION) from None
        _refuse_attributes_below_one(node, index)
        outputs = [name for name in node.output if name]
        found = {name: whole[name] for name in outputs if name in whole}
        if not is_control_flow:
            found |= self._inferred(node, index)
        for name, proto in found.items():
            self._learn(name, proto)
        is_inferred = all(name in self._shapes for name in outputs)
        for name in outputs:
            if name not in self._shapes and name in self._declared:
                self._learn(name, self._declared[name])
        if not is_standard:
            return
        if node.op_type == "Reshape":
            self._refuse_another_size(node, index)
        if is_inferred and not is_control_flow:  # what a file declares of a value may be far from what it takes to compute it
            self._compute(node)

    def _refuse_another_size(self, node: onnx.NodeProto, index: int) -> None:
        """Refuse a Reshape to another number of elements.

        A batch that was written into the target shape at export contradicts the one that the user gives.
        """
        shapes = [self._shapes.get(name) for name in (*node.input[:1], *node.output)]
        if None not in shapes and math.prod(shapes[0] or ()) != math.prod(shapes[1] or ()):
            raise Refusal(f"reshapes {shapes[0]} to {shapes[1]} in {_label(node, index)}", _FIXED)

    def _inferred(self, node: onnx.NodeProto, index: int) -> dict[str, onnx.TypeProto]:
        """Types of the outputs, as far as the inputs are known."""
        names = [name for name in node.input if name]
        if any(name not in self._protos for name in names):
            return {}
        domain = "" if node.domain in _STANDARD else node.domain
        try:
            schema = onnx.defs.get_schema(node.op_type, self._context.opset_imports.get(domain, 1), domain)
        except onnx.defs.SchemaError:  # an operator that onnx does not define
            return {}
        protos = {name: self._protos[name] for name in names}
        values = {name: self._values[name] for name in names if name in self._values}
        if node.op_type == "Range":  # runtimes take vectors of one number, shape inference does not
            values = {name: value.reshape(()) if value.size == 1 else value for name, value in values.items()}
            protos |= {
                name: make_tensor_type_proto(protos[name].tensor_type.elem_type, value.shape) for name, value in values.items()
            }
        try:
            return shape_inference.infer_node_outputs(
                schema,
                node,
                protos,
                {name: numpy_helper.from_array(value, name) for name, value in values.items()},
                opset_imports=list(self._model.opset_import),
                ir_version=self._model.ir_version,
            )
        except Exception as error:  # the binding raises whatever C++ raised
            if any(name not in self._shapes for name in names):
                return {}
            shapes = ", ".join(str(self._shapes[name]) for name in names[:4])
            raise Refusal(
                f"gives {_label(node, index)} inputs of shapes {shapes}, which do not fit: {_reason(error)}",
                _FIXED if self._is_rebatched else _CONTRADICTION,
            ) from None

    def _learn(self, name: str, proto: onnx.TypeProto) -> None:
        self._protos[name] = proto
        tensor = proto.tensor_type
        if proto.HasField("tensor_type") and tensor.HasField("shape"):
            dims = tensor.shape.dim
            if all(dim.HasField("dim_value") and dim.dim_value >= 0 for dim in dims):
                self._shapes[name] = tuple(dim.dim_value for dim in dims)
                self._check_elements(name, self._shapes[name])

    def _check_elements(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a shape that overflows the arithmetic of C++ further on."""
        problem = None
        if len(shape) > 64:
            problem = f"more than 64 dimensions, {len(shape):,}"
            shape = shape[:8]
        elif max(shape, default=0) > 2**31 - 1:
            problem = f"{max(shape)} is more than 2^31 - 1"
        elif math.prod(shape) > self._most_elements:
            problem = f"more than 2^{self._most_elements.bit_length() - 1} elements"
        if problem is not None:
            raise Refusal(f"has a value {name[:80]!r} of shape {shape}: {problem}", "Check the sizes that you bound.")

    def _learn_tensor(self, name: str, tensor: onnx.TensorProto) -> None:
        """The type of a weight or constant, and its values if they are few."""
        if any(size < 0 for size in tensor.dims):
            raise Refusal(
                f"has a weight {name[:80]!r} of shape {tuple(tensor.dims[:8])}", "Sizes cannot be negative; export it again."
            )
        self._learn(name, make_tensor_type_proto(tensor.data_type, tensor.dims))
        is_here = tensor.data_location != onnx.TensorProto.EXTERNAL and tensor.data_type != onnx.TensorProto.STRING
        if is_here and math.prod(tensor.dims) <= _MOST_VALUES:
            with contextlib.suppress(Exception):  # damaged, or of an exotic type: only its shape is known
                self._learn_value(name, numpy_helper.to_array(tensor))

    def _learn_constant(self, node: onnx.NodeProto) -> None:
        """The value of a Constant is in one of eight attributes; texts stay unknown."""
        for attribute in node.attribute:
            if attribute.name == "sparse_value" and attribute.HasField("sparse_tensor"):
                value = attribute.sparse_tensor
                self._learn(node.output[0], make_tensor_type_proto(value.values.data_type, value.dims))
            elif attribute.name == "value" and attribute.HasField("t"):  # old files do not give an attribute's type
                self._learn_tensor(node.output[0], attribute.t)
            elif attribute.name in ("value_int", "value_ints", "value_float", "value_floats"):
                dtype = np.int64 if "int" in attribute.name else np.float32
                value = get_attribute_value(attribute)
                self._learn_tensor(node.output[0], numpy_helper.from_array(np.array(value, dtype=dtype)))

    def _learn_value(self, name: str, value: Any) -> None:
        if value.dtype.kind in "biuf" and value.size <= _MOST_VALUES:
            self._values[name] = value

    def _compute(self, node: onnx.NodeProto) -> None:
        """The values of the outputs, if they are few and follow from known ones."""
        attributes = {attribute.name: get_attribute_value(attribute) for attribute in node.attribute}
        if node.op_type in ("Shape", "Size"):  # known although the values of the input are not
            shape = self._shapes.get(node.input[0])
            if shape is not None:
                limits = slice(attributes.get("start", 0), attributes.get("end"))
                value = math.prod(shape) if node.op_type == "Size" else shape[limits]
                self._learn_value(node.output[0], np.array(value, dtype=np.int64))
            return
        given = list(node.input[: 1 if node.op_type == "CastLike" else None])  # of its second input, only the type matters
        size = sum(math.prod(self._shapes[name]) for name in node.output if name)
        if node.op_type not in _COMPUTED or size > _MOST_VALUES or any(name and name not in self._values for name in given):
            return
        inputs: list[Any] = [self._values.get(name) for name in given]
        if node.op_type == "CastLike":
            dtype = onnx.helper.tensor_dtype_to_np_dtype(self._protos[node.output[0]].tensor_type.elem_type)
            self._learn_value(node.output[0], inputs[0].astype(dtype))
            return
        if node.op_type == "Range":
            inputs = [value.reshape(()) for value in inputs]
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                results = load_op("", node.op_type, self._opset).eval(*inputs, n_outputs=len(node.output), **attributes)
        except Exception:  # the values stay unknown; the shapes are known all the same
            return
        for name, value in zip(node.output, results if isinstance(results, tuple) else (results,), strict=False):
            if name and isinstance(value, np.ndarray | np.generic):
                self._learn_value(name, np.asarray(value))

    def _node(self, node: onnx.NodeProto) -> list[Any]:
        """An operator as `perfguard.onnx.read.Node` has it; what a subgraph reads from outside counts as inputs."""
        given = node.input[:1] if node.op_type == "CastLike" else node.input
        is_control_flow = _is_control_flow(node)
        captured = [name for name in dict.fromkeys(_names_read_by(node)) if name not in node.input] if is_control_flow else []
        attributes: dict[str, Any] = {}
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.INT:
                attributes[attribute.name] = attribute.i
            elif attribute.type == onnx.AttributeProto.INTS and len(attribute.ints) <= _MOST_VALUES:
                attributes[attribute.name] = list(attribute.ints)
            elif attribute.type == onnx.AttributeProto.STRING:
                attributes[attribute.name] = attribute.s[:200].decode(errors="replace")
        return [
            node.op_type[:80],
            node.domain[:80],
            [*given, *captured],
            [*node.output],
            attributes,
            _module(node),
            self._most_launches(node) if is_control_flow else 0,
        ]

    def _most_launches(self, node: onnx.NodeProto) -> int:
        """Most operators that control flow may launch: those of its subgraphs, times its trips."""
        assumed = 1000  # trips of a loop whose number depends on the data
        trips = 1
        if node.op_type == "Loop":
            limit = self._values.get(node.input[0]) if node.input else None
            trips = int(limit.reshape(-1)[0]) if limit is not None and limit.size == 1 and limit.dtype.kind in "iu" else assumed
            if trips >= 2**31:  # TensorFlow's loops count in their body, and have the largest number as their limit
                trips = assumed
        elif node.op_type == "Scan":
            number = next((attribute.i for attribute in node.attribute if attribute.name == "num_scan_inputs"), 1)
            trips = max((max(self._shapes.get(name, ()), default=1) for name in node.input[-max(number, 1) :]), default=assumed)
        return max(trips, 1) * max(sum(map(_num_operators, _graphs_in(node))), 1)


_MOST_VALUES = 1024
"""Elements of a tensor whose values are followed: shapes have a handful, and 20,000 operators of them fit into the memory."""
_COMPUTED = frozenset(
    {"Abs", "Add", "And", "Cast", "CastLike", "Ceil", "Concat", "ConstantOfShape", "Div", "Equal", "Expand", "Flatten", "Floor",
     "Gather", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or",
     "Pow", "Range", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Round", "Slice", "Split", "Sqrt",
     "Squeeze", "Sub", "Tile", "Transpose", "Unsqueeze", "Where"}
)  # fmt: skip
"""Operators that are computed on small values: what exporters write into shapes, all deterministic."""


def _reason(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].removesuffix(".")[:200]


def _module(node: onnx.NodeProto) -> str:
    """Module path of a node: from the metadata of torch's dynamo exporter, else from the name, as in
    "/layer1/layer1.0/conv1/Conv"."""
    for entry in node.metadata_props:
        if entry.key == "pkg.torch.onnx.name_scopes" and len(entry.value) <= 2000:
            try:
                scopes = ast.literal_eval(entry.value)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
            if isinstance(scopes, list) and len(scopes) > 1 and isinstance(scopes[-2], str):
                return scopes[-2][:200]
    path = ""
    for part in node.name[:2000].strip("/").split("/")[:-1]:
        path = part if not path or part.startswith(f"{path}.") else f"{path}.{part}"
    return path[:200]


if __name__ == "__main__":
    main()
