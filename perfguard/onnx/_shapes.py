"""The shape of every value of a model, once the user has bound its free dimensions.

``onnx.shape_inference`` does the work, for one operator after the other, with the small integers (shapes, axes, sizes) that were
worked out on the way. Its own propagation of values stays off, because it makes every value of a Range or a Tile, whatever its
size. Here a value is computed only when its size is known and small.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper, shape_inference
from onnx.reference.ops import load_op

from perfguard.exceptions import ConfigurationError, OnnxError
from perfguard.onnx._attributes import check
from perfguard.onnx._file import graphs_in, label, opset_of
from perfguard.onnx._loops import Trip, Unroller

_LARGEST_DIM = 2**31 - 1
_MOST_ELEMENTS = 2**40
_MOST_KNOWN_VALUES = 4096
"""Elements of a tensor whose values are followed."""
_MOST_KNOWN_IN_ALL = 4 * 2**20
"""Elements of all of them: beyond it only single numbers are followed."""
_HIGHEST_RANK = 64
_MOST_NAMED = 8

Dims = Mapping[str, "int | Sequence[int]"]
Values = npt.NDArray[Any]

_BITS = {
    "FLOAT": ("float32", 32), "UINT8": ("uint8", 8), "INT8": ("int8", 8), "UINT16": ("uint16", 16), "INT16": ("int16", 16),
    "INT32": ("int32", 32), "INT64": ("int64", 64), "STRING": ("string", 64), "BOOL": ("bool", 8), "FLOAT16": ("float16", 16),
    "DOUBLE": ("float64", 64), "UINT32": ("uint32", 32), "UINT64": ("uint64", 64), "COMPLEX64": ("complex64", 64),
    "COMPLEX128": ("complex128", 128), "BFLOAT16": ("bfloat16", 16), "FLOAT8E4M3FN": ("float8_e4m3fn", 8),
    "FLOAT8E4M3FNUZ": ("float8_e4m3fnuz", 8), "FLOAT8E5M2": ("float8_e5m2", 8), "FLOAT8E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "FLOAT8E8M0": ("float8_e8m0fnu", 8), "UINT4": ("uint4", 4), "INT4": ("int4", 4), "FLOAT4E2M1": ("float4_e2m1fn", 4),
    "UINT2": ("uint2", 2), "INT2": ("int2", 2),
}  # fmt: skip
"""torch's name and the number of bits of ONNX's element types."""
_DTYPES = {number: _BITS[key] for key, number in onnx.TensorProto.DataType.items() if key in _BITS}
_BITS_BY_DTYPE = dict(_BITS.values())
_FOLLOWED = frozenset(
    {"Abs", "Add", "And", "Cast", "Ceil", "Concat", "ConstantOfShape", "Div", "Equal", "Expand", "Flatten", "Floor",
     "Gather", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or",
     "Pow", "Range", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Round", "Slice", "Split", "Sqrt",
     "Squeeze", "Sub", "Tile", "Transpose", "Unsqueeze", "Where"}
)  # fmt: skip
"""Operators that are computed on small values; all of them take time in proportion to their (checked) output."""
_LIKE_FIRST_INPUT = frozenset({"BiasGelu", "FastGelu", "Gelu", "QuickGelu", "LayerNormalization", "SimplifiedLayerNormalization",
                               "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "MultiHeadAttention",
                               "QLinearAdd", "QLinearMul", "QLinearSigmoid", "QLinearLeakyRelu"})  # fmt: skip
"""com.microsoft's operators whose output has the shape of their first input."""
_CONTRIBUTED = {"FusedConv": "Conv", "FusedGemm": "Gemm", "FusedMatMul": "MatMul"}
_MOST_PRODUCT_INPUTS = 3
_INPUTS_WITH_AXES = 4
"""Number of inputs of a Pad that lists its axes."""


class TensorType(NamedTuple):
    """Shape and type of a value."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return -(-self.num_elements * _BITS_BY_DTYPE.get(self.dtype, 8) // 8)


class Inferred(NamedTuple):
    """Types, shapes and known contents of a model's values, by name."""

    types: Mapping[str, TensorType]
    """Missing: no tensor, or one whose shape depends on the data."""
    values: Mapping[str, Values]
    """Small tensors whose values are known without running the model."""
    nodes: Sequence[onnx.NodeProto]
    """The operators in order, loops and branches written out where their course is known."""
    weights: frozenset[str]
    """Names of all weights, those of loops and branches among them."""


def bind(path: Path, model: onnx.ModelProto, *, batch_size: int | None, dims: Dims) -> None:
    """Write sizes into the shapes of the model's inputs, in place.

    Raises:
        OnnxError: if a size stays open, is zero (which often stands for "open"), or is absurd.
        ConfigurationError: for a name that the model does not have, or a size that is no positive integer.
    """
    _check_sizes(batch_size, dims)
    inputs = network_inputs(model.graph)
    tensors = {value.name: value.type.tensor_type for value in inputs if value.type.HasField("tensor_type")}
    symbols = {dim.dim_param for tensor in tensors.values() for dim in tensor.shape.dim if dim.dim_param}
    unknown = sorted(set(dims) - symbols - set(tensors))
    if unknown:
        known = ", ".join(sorted(symbols | set(tensors))[:_MOST_NAMED]) or "none"
        raise ConfigurationError(f"dims names {unknown[0]!r}, which {path} does not have. Its inputs and dimensions: {known}.")
    bound: dict[str, int] = {name: size for name, size in dims.items() if isinstance(size, int) and name in symbols}
    if batch_size is not None:
        bound = _batch_symbols(tensors.values(), batch_size) | bound
    open_: list[str] = []
    for name, tensor in tensors.items():
        _bind_one(path, name, tensor, bound, dims.get(name), batch_size, open_)
    if open_:
        more = f" and {len(open_) - _MOST_NAMED} more" if len(open_) > _MOST_NAMED else ""
        raise OnnxError(
            path,
            f"leaves sizes open: {', '.join(open_[:_MOST_NAMED])}{more}",
            "Give batch_size=..., or dims={'name of the dimension': 8} or dims={'input': (8, 3, 224, 224)} "
            "(--batch-size 8, --dim NAME=8, --dim INPUT=8x3x224x224).",
        )


def _check_sizes(batch_size: int | None, dims: Dims) -> None:
    def check(what: str, size: object, least: int) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or not least <= size <= _LARGEST_DIM:
            raise ConfigurationError(f"{what} must be an integer from {least} to 2^31 - 1, but got {size!r}.")

    if batch_size is not None:
        check("batch_size", batch_size, 1)
    for name, size in dims.items():
        for part in (size,) if isinstance(size, int) else size:
            check(f"dims[{name!r}]", part, 1 if isinstance(size, int) else 0)


def network_inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """The inputs that the user feeds (before IR version 4 the weights were inputs too)."""
    weights = {tensor.name for tensor in graph.initializer} | {sparse.values.name for sparse in graph.sparse_initializer}
    return [value for value in graph.input if value.name not in weights]


def _batch_symbols(tensors: Any, batch_size: int) -> dict[str, int]:
    """The names of first dimensions."""
    firsts = (tensor.shape.dim[0].dim_param for tensor in tensors if tensor.HasField("shape") and tensor.shape.dim)
    return {symbol: batch_size for symbol in firsts if symbol}


def _bind_one(
    path: Path,
    name: str,
    tensor: onnx.TypeProto.Tensor,
    bound: Mapping[str, int],
    given: int | Sequence[int] | None,
    batch_size: int | None,
    open_: list[str],
) -> None:
    if isinstance(given, Sequence):
        del tensor.shape.dim[:]
        tensor.shape.SetInParent()
        for size in given:
            tensor.shape.dim.add().dim_value = size
        _check_elements(path, name, tuple(given))
        return
    if not tensor.HasField("shape"):
        open_.append(f"all of {name!r}")
        return
    for axis, dim in enumerate(tensor.shape.dim):
        if dim.dim_param in bound and dim.dim_param:
            dim.dim_value = bound[dim.dim_param]
        elif axis == 0 and batch_size is not None:
            dim.dim_value = batch_size
        elif not dim.HasField("dim_value"):
            open_.append(repr(dim.dim_param) if dim.dim_param else f"axis {axis} of {name!r}")
        elif not 0 < dim.dim_value <= _LARGEST_DIM:
            raise OnnxError(
                path,
                f"has an input {name!r} with size {dim.dim_value} on axis {axis}",
                f"A size must lie between 1 and 2^31 - 1. Bind it: dims={{{name!r}: (...)}}, or batch_size= for axis 0.",
            )
    _check_elements(path, name, tuple(dim.dim_value for dim in tensor.shape.dim))


def _check_elements(path: Path, name: str, shape: tuple[int, ...]) -> None:
    mend = "Check the sizes that you bound."
    if len(shape) > _HIGHEST_RANK:
        raise OnnxError(path, f"has a value {name[:80]!r} of {len(shape):,} dimensions, more than {_HIGHEST_RANK}", mend)
    largest = max(shape, default=0)
    if largest > _LARGEST_DIM:
        raise OnnxError(path, f"has a value {name[:80]!r} of shape {shape}: {largest} is more than 2^31 - 1", mend)
    if math.prod(shape) > _MOST_ELEMENTS:
        raise OnnxError(path, f"has a value {name[:80]!r} of shape {shape}: more than 2^40 elements", mend)


def infer(path: Path, model: onnx.ModelProto, *, rebatched: bool) -> Inferred:
    """Shapes, types and small values of a model whose inputs are bound.

    Args:
        path: for messages.
        model: the model. Its nodes are in order, and it has no functions.
        rebatched: the user gave other sizes than the file has. Then the inner shapes that the file declares are ignored.

    Raises:
        OnnxError: If a Reshape contradicts the sizes (a batch that was fixed at export). If a value is absurdly large. If an
            operator has inputs or attributes that it cannot have. If a loop runs too often.
    """
    declared = {value.name: value.type for value in (*model.graph.value_info, *model.graph.output)}
    return _Inference(path, model, {} if rebatched else declared).run()


class _Inference:
    def __init__(self, path: Path, model: onnx.ModelProto, declared: Mapping[str, onnx.TypeProto]) -> None:
        self._path = path
        self._model = model
        self._declared = declared
        self._opset = opset_of(model)
        self._opsets = {entry.domain: entry.version for entry in model.opset_import} | {"": self._opset}
        self._protos: dict[str, onnx.TypeProto] = {}
        self._types: dict[str, TensorType] = {}
        self._values: dict[str, Values] = {}
        self._values_left = _MOST_KNOWN_IN_ALL
        self._weights: set[str] = set()
        self._unroller = Unroller(path, self._opset, self._values, self._learn_weight)

    def run(self) -> Inferred:
        graph = self._model.graph
        for value in graph.input:
            self._learn(value.name, value.type)
        for tensor in graph.initializer:
            self._learn_weight(tensor)
        for sparse in graph.sparse_initializer:
            self._weights.add(sparse.values.name)
            self._learn_sparse(sparse.values.name, sparse)
        whole = self._whole() if any(True for node in graph.node for _ in graphs_in(node)) else {}
        nodes: list[onnx.NodeProto] = []
        waiting: list[onnx.NodeProto | Trip] = list(reversed(graph.node))
        while waiting:
            node = waiting.pop()
            written_out = self._unroller.written_out(node, len(nodes))
            if written_out is not None:
                waiting.extend(reversed(written_out))
            elif isinstance(node, onnx.NodeProto):
                self._follow(node, len(nodes), whole)
                nodes.append(node)
        return Inferred(self._types, self._values, nodes, frozenset(self._weights))

    def _whole(self) -> dict[str, onnx.TypeProto]:
        """Result of shape inference over the whole model, for the outputs of control flow."""
        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        del model.graph.value_info[:]
        for value in model.graph.output:
            value.ClearField("type")
        try:
            inferred = shape_inference.infer_shapes(model)
        except Exception:  # an operator that it cannot do, or a damaged one: the second pass finds out which
            return {}
        return {value.name: value.type for value in (*inferred.graph.value_info, *inferred.graph.output)}

    def _follow(self, node: onnx.NodeProto, index: int, whole: Mapping[str, onnx.TypeProto]) -> None:
        names = [name for name in node.output if name]
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
            self._learn_attribute(node)
            return
        shapes = [self._types[name].shape if name in self._types else None for name in node.input]
        check(self._path, node, index, self._opset, shapes, self._pads(node))
        for name in names:
            if name in whole:
                self._learn(name, whole[name])
        if any(name not in self._types for name in names) and not any(True for _ in graphs_in(node)):
            for name, proto in self._one(node, index).items():
                self._learn(name, proto)
        is_inferred = all(name in self._types for name in names)
        for name in names:
            if name not in self._types and name in self._declared:
                self._learn(name, self._declared[name])
        for name in names:
            if name in self._types:
                _check_elements(self._path, name, self._types[name].shape)
        self._check_reshape(node, index)
        if is_inferred:  # what a file declares of a value may be far from what it takes to compute it
            self._compute(node)

    def _pads(self, node: onnx.NodeProto) -> tuple[int, ...] | None:
        """Padding of all dimensions of a Pad since opset 11, where it is an input."""
        if node.op_type != "Pad" or not 1 < len(node.input) < _INPUTS_WITH_AXES or node.input[1] not in self._values:
            return None
        return tuple(map(int, self._values[node.input[1]].reshape(-1).tolist()))

    def _one(self, node: onnx.NodeProto, index: int) -> dict[str, onnx.TypeProto]:
        """Result of shape inference for this operator, with the known values."""
        if any(name not in self._protos for name in node.input if name):
            return {}
        domain = "" if node.domain == "ai.onnx" else node.domain
        try:
            schema = onnx.defs.get_schema(node.op_type, self._opsets.get(domain, 1), domain)
        except onnx.defs.SchemaError:  # an operator of another domain
            return self._contributed(node, index)
        protos = {name: self._protos[name] for name in node.input if name}
        values = {name: self._values[name] for name in node.input if name in self._values}
        if node.op_type == "Range":  # runtimes take vectors of one number, shape inference does not
            values = {name: value.reshape(()) if value.size == 1 else value for name, value in values.items()}
            protos |= {name: _type_like(protos[name], value.shape) for name, value in values.items()}
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
            shapes = [self._types[name].shape for name in node.input if name in self._types]
            if len(shapes) < len([name for name in node.input if name]):
                return {}
            reason = str(error).strip().splitlines()[-1][-160:]
            raise OnnxError(
                self._path,
                f"gives {label(node, index)} inputs of shapes {', '.join(map(str, shapes[:4]))}, which do not fit: {reason}",
                "If you changed the batch, it was fixed at export: leave it, or export with a dynamic batch dimension.",
            ) from None

    def _contributed(self, node: onnx.NodeProto, index: int) -> dict[str, onnx.TypeProto]:
        """Operators that ONNX Runtime puts in when it optimises a model; all others stay opaque."""
        if node.domain != "com.microsoft" or not node.input:
            return {}
        if node.op_type in _LIKE_FIRST_INPUT:
            return {node.output[0]: self._protos[node.input[0]]}
        if node.op_type not in _CONTRIBUTED:
            return {}
        standard = onnx.NodeProto()
        standard.CopyFrom(node)
        standard.op_type, standard.domain = _CONTRIBUTED[node.op_type], ""
        del standard.input[_MOST_PRODUCT_INPUTS:]
        known = onnx.defs.get_schema(standard.op_type, self._opset).attributes
        for at in reversed(range(len(standard.attribute))):
            if standard.attribute[at].name not in known:
                del standard.attribute[at]
        return self._one(standard, index)

    def _learn(self, name: str, proto: onnx.TypeProto) -> None:
        self._protos[name] = proto
        if not proto.HasField("tensor_type") or not proto.tensor_type.HasField("shape"):
            return
        dims = proto.tensor_type.shape.dim
        if all(dim.HasField("dim_value") and dim.dim_value >= 0 for dim in dims):
            self._types[name] = TensorType(tuple(dim.dim_value for dim in dims), _dtype(proto.tensor_type.elem_type))

    def _learn_weight(self, tensor: onnx.TensorProto) -> None:
        self._weights.add(tensor.name)
        self._learn_constant(tensor.name, tensor)

    def _learn_sparse(self, name: str, sparse: onnx.SparseTensorProto) -> None:
        _check_elements(self._path, name, tuple(sparse.dims))
        self._types[name] = TensorType(tuple(sparse.dims), _dtype(sparse.values.data_type))

    def _learn_value(self, name: str, value: Values) -> None:
        """Numbers alone: an array of texts takes as much for each as the longest does."""
        if value.dtype.kind in "biuf" and (value.size <= 1 or value.size <= min(_MOST_KNOWN_VALUES, self._values_left)):
            self._values[name] = value
            self._values_left -= value.size

    def _learn_constant(self, name: str, tensor: onnx.TensorProto) -> None:
        shape = tuple(tensor.dims)
        if any(size < 0 for size in shape):
            raise OnnxError(
                self._path, f"has a weight {name[:80]!r} of shape {shape}", "Sizes cannot be negative; export it again."
            )
        _check_elements(self._path, name, shape)
        self._learn(name, onnx.helper.make_tensor_type_proto(tensor.data_type, shape))
        is_text = tensor.data_type == onnx.TensorProto.STRING
        if math.prod(shape) <= _MOST_KNOWN_VALUES and tensor.data_location != onnx.TensorProto.EXTERNAL and not is_text:
            try:
                self._learn_value(name, numpy_helper.to_array(tensor))
            except Exception:  # damaged, of an exotic type, or its values were left out: only its shape is known
                pass

    def _learn_attribute(self, node: onnx.NodeProto) -> None:
        """The value of a Constant is in one of eight attributes."""
        for attribute in node.attribute:
            if attribute.HasField("t"):
                self._learn_constant(node.output[0], attribute.t)
            elif attribute.name == "sparse_value":
                self._learn_sparse(node.output[0], attribute.sparse_tensor)
            elif attribute.name in ("value_int", "value_ints", "value_float", "value_floats"):
                found = onnx.helper.get_attribute_value(attribute)
                dtype = np.int64 if "int" in attribute.name else np.float32
                self._learn_constant(node.output[0], numpy_helper.from_array(np.array(found, dtype=dtype)))

    def _check_reshape(self, node: onnx.NodeProto, index: int) -> None:
        """A batch that was written into the target shape at export contradicts the one that the user gives."""
        if node.op_type != "Reshape" or node.domain not in ("", "ai.onnx"):
            return
        before, after = self._types.get(node.input[0]), self._types.get(node.output[0])
        if before is not None and after is not None and before.num_elements != after.num_elements:
            raise OnnxError(
                self._path,
                f"reshapes {before.shape} to {after.shape} in {label(node, index)}",
                "A size was fixed at export. Leave it as it is in the file, or export with a dynamic batch dimension.",
            )

    def _compute(self, node: onnx.NodeProto) -> None:
        """The values of the outputs, if they are small and follow from known ones."""
        if node.domain not in ("", "ai.onnx") or not node.output:
            return
        if node.op_type in ("Shape", "Size"):
            known = self._types.get(node.input[0])
            if known is not None:
                found = _shape_of(node, known)
                self._learn_value(node.output[0], found)
                self._learn(node.output[0], onnx.helper.make_tensor_type_proto(onnx.TensorProto.INT64, found.shape))
            return
        if node.op_type == "CastLike" and node.input[0] in self._values and node.output[0] in self._protos:
            elem_type = self._protos[node.output[0]].tensor_type.elem_type
            dtype = onnx.helper.tensor_dtype_to_np_dtype(elem_type)
            self._learn_value(node.output[0], self._values[node.input[0]].astype(dtype))
            return
        types = [self._types.get(name) for name in node.output if name]
        inputs = [self._values.get(name) for name in node.input if name]
        if node.op_type not in _FOLLOWED or any(value is None for value in inputs) or any(found is None for found in types):
            return
        size = sum(found.num_elements for found in types if found is not None)
        if size > _MOST_KNOWN_VALUES or (size > 1 and size > self._values_left):
            return
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                operator = load_op("", node.op_type, self._opset)
                attributes = {found.name: onnx.helper.get_attribute_value(found) for found in node.attribute}
                given = [self._values[name] if name else None for name in node.input]
                if node.op_type == "Range":
                    given = [value.reshape(()) if value is not None else None for value in given]
                results = operator.eval(*given, n_outputs=len(node.output), **attributes)
        except Exception:  # the values stay unknown; the shapes are known all the same
            return
        results = results if isinstance(results, tuple) else (results,)
        for name, value in zip(node.output, results, strict=False):
            if name and isinstance(value, np.ndarray | np.generic):
                self._learn_value(name, np.asarray(value))


def _type_like(proto: onnx.TypeProto, shape: tuple[int, ...]) -> onnx.TypeProto:
    return onnx.helper.make_tensor_type_proto(proto.tensor_type.elem_type, shape)


def _shape_of(node: onnx.NodeProto, known: TensorType) -> Values:
    if node.op_type == "Size":
        return np.array(known.num_elements, dtype=np.int64)
    limits: dict[str, Any] = {found.name: found.i for found in node.attribute}
    return np.array(known.shape[limits.get("start", 0) : limits.get("end")], dtype=np.int64)


def _dtype(elem_type: int) -> str:
    return _DTYPES.get(elem_type, ("unknown", 8))[0]
