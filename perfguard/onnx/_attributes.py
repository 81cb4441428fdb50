"""Checks operators against ONNX's specification: the number of inputs, and the types and values of attributes.

Shape inference checks some of this and computes with the rest: a convolution in no groups divides by zero, one with a stride of
zero never ends. So every operator is looked at before anything is computed from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import onnx

from perfguard.exceptions import OnnxError
from perfguard.onnx._file import label

_MEND = "The file contradicts the ONNX specification. Export it again."
_POSITIVE = frozenset({"group", "offset_group", "strides", "dilations", "kernel_shape", "blocksize", "hidden_size", "num_groups",
                       "num_outputs", "num_heads", "q_num_heads", "kv_num_heads"})  # fmt: skip
"""Attributes of which every number is at least 1, whatever the operator."""
_CONVOLUTIONS = {"Conv": 1, "ConvInteger": 1, "QLinearConv": 3, "DeformConv": 1, "FusedConv": 1, "NhwcFusedConv": 1}
"""Index of the weight among the inputs."""
_WINDOWS = frozenset({*_CONVOLUTIONS, "ConvTranspose", "MaxPool", "AveragePool", "LpPool"})
"""Operators that slide a window over the last dimensions."""
_WITH_AXIS = frozenset({"ArgMax", "ArgMin", "Compress", "Concat", "Flatten", "Gather", "GatherElements", "GroupNormalization",
                        "Hardmax", "LayerNormalization", "LogSoftmax", "LpNormalization", "RMSNormalization", "Scatter",
                        "ScatterElements", "Softmax", "Split", "TopK"})  # fmt: skip
"""Operators whose ``axis`` names a dimension of their first input."""
_REDUCED = "Reduce"

Shape = tuple[int, ...]


class _Signature(NamedTuple):
    inputs: tuple[int, int]
    outputs: tuple[int, int]
    attributes: dict[str, int]
    """Types, as numbers of ``AttributeProto.AttributeType``."""


@lru_cache(maxsize=4096)
def _signature(op_type: str, opset: int) -> _Signature | None:
    try:
        schema = onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return None
    kinds: dict[str, Any] = {name: attribute.type for name, attribute in schema.attributes.items()}  # an enum of C++'s
    types = {name: int(kind.value) for name, kind in kinds.items()}
    return _Signature((schema.min_input, schema.max_input), (schema.min_output, schema.max_output), types)


def check(
    path: Path,
    node: onnx.NodeProto,
    index: int,
    opset: int,
    shapes: Sequence[Shape | None],
    pads: tuple[int, ...] | None = None,
) -> None:
    """Refuse a node with attributes or inputs that its operator cannot have.

    Args:
        path: for the message.
        node: a node of any domain. Unknown domains and operators pass.
        index: its position, for the message.
        opset: version of the standard operators.
        shapes: shapes of its inputs. None: the input is left out or its shape is unknown.
        pads: the pads of a Pad node that has them as an input. None: it has no such input, or its value is unknown.

    Raises:
        OnnxError: with the operator, the attribute and its value.
    """
    is_standard = node.domain in ("", "ai.onnx")
    signature = _signature(node.op_type, opset) if is_standard else None
    if not is_standard and node.domain not in ("com.microsoft", "com.ms.internal.nhwc"):
        return
    if signature is not None:
        _check_signature(path, node, index, signature)
    values = {attribute.name: _value(attribute) for attribute in node.attribute}
    if pads is not None:
        values["pads"] = pads
    for name, value in values.items():
        problem = _problem(node.op_type, name, value, shapes)
        if problem is None and name == "group":
            problem = _problem_of_groups(node.op_type, value, shapes)
        if problem is not None:
            text = str(list(value)[:8] if isinstance(value, tuple) else value)[:80]
            raise OnnxError(path, f"has {name}={text} in {label(node, index)}: {problem}", _MEND)


def _check_signature(path: Path, node: onnx.NodeProto, index: int, signature: _Signature) -> None:
    for what, names, (fewest, most) in (("inputs", node.input, signature.inputs), ("outputs", node.output, signature.outputs)):
        if not fewest <= len(names) <= most:
            expected = str(fewest) if fewest == most else f"{fewest} to {most}" if most < 2**31 - 1 else f"at least {fewest}"
            raise OnnxError(path, f"gives {label(node, index)} {len(names)} {what}, but it has {expected}", _MEND)
    for attribute in node.attribute:
        expected_type = signature.attributes.get(attribute.name)
        if expected_type is not None and attribute.type not in (expected_type, 0):
            kinds = onnx.AttributeProto.AttributeType
            found, wanted = (kinds.Name(kind) if kind in kinds.values() else kind for kind in (attribute.type, expected_type))
            name = f"{attribute.name[:40]!r}"
            raise OnnxError(path, f"has the attribute {name} of {label(node, index)} as {found}, not as {wanted}", _MEND)


def _value(attribute: onnx.AttributeProto) -> int | tuple[int, ...] | None:
    """Numeric interpretation of an attribute; None: it holds no integers."""
    if attribute.type == onnx.AttributeProto.INT:
        return int(attribute.i)
    return tuple(attribute.ints) if attribute.type == onnx.AttributeProto.INTS else None


def _problem(op_type: str, name: str, value: Any, shapes: Sequence[Shape | None]) -> str | None:
    """Error of an attribute; None: no known error."""
    if value is None:
        return None
    numbers = value if isinstance(value, tuple) else (value,)
    if name in _POSITIVE and any(number < 1 for number in numbers):
        return "it must be at least 1"
    shape = shapes[0] if shapes else None
    rank = None if shape is None else len(shape)
    if op_type in _WINDOWS and name == "pads" and any(number < 0 for number in numbers):
        return "padding cannot be negative"
    if rank is None or shape is None:
        return None
    if op_type in _WINDOWS and name in ("strides", "dilations", "kernel_shape", "pads"):
        expected = (rank - 2) * (2 if name == "pads" else 1)
        return None if len(numbers) == expected else f"it must have {expected} numbers, for an input of shape {shape[:8]}"
    if name == "perm" and sorted(numbers) != list(range(rank)):
        return f"it is no permutation of the {rank} dimensions of {shape[:8]}"
    if name == "axis" and op_type in _WITH_AXIS and not -rank <= value < max(rank + (op_type == "Flatten"), 1):
        return f"an input of shape {shape[:8]} has no such dimension"
    is_reduction = op_type.startswith(_REDUCED) or op_type == "Squeeze"
    if name == "axes" and is_reduction and any(not -rank <= axis < rank for axis in numbers):
        return f"an input of shape {shape[:8]} has no such dimension"
    if op_type == "Pad" and name in ("pads", "paddings") and len(numbers) == 2 * rank:
        after = [size + numbers[axis] + numbers[axis + rank] for axis, size in enumerate(shape)]
        return f"it takes away more than the input of shape {shape[:8]} has" if min(after, default=0) < 0 else None
    return None


def _problem_of_groups(op_type: str, group: Any, shapes: Sequence[Shape | None]) -> str | None:
    at = _CONVOLUTIONS.get(op_type)
    if at is None or at >= len(shapes) or not isinstance(group, int):
        return None
    data, weight = shapes[0], shapes[at]
    if data is None or weight is None or min(len(data), len(weight)) < 2 or op_type == "NhwcFusedConv":
        return None
    if data[1] != weight[1] * group or weight[0] % group:
        return f"it does not divide {data[1]} channels into groups of {weight[1]}, and {weight[0]} filters, evenly"
    return None
