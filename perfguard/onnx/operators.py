"""Cost of each ONNX operator as in a trace: the aten operator that PyTorch would launch, its FLOPs and its sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from perfguard.graph.costs import attention_flops, convolution_attributes, elementwise_flops, kind_of, product_flops
from perfguard.graph.kernels import Target
from perfguard.onnx.read import Node, TensorType

OWN_DOMAIN = "perfguard"
"""Domain of operators that replace several in the file; see `fusions.py`."""
_INDEX_BYTES = 8

VIEWS = frozenset(
    {"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Split", "Expand", "Dropout",
     "OptionalGetElement", "Optional"}
)  # fmt: skip
"""Operators that move no data in PyTorch. Dropout is none at all in inference."""
HOST = frozenset({"Shape", "Size", "OptionalHasElement", "SequenceLength"})
"""Operators that only look at metadata."""
QUANTISED = frozenset({"QLinearConv", "ConvInteger", "QLinearMatMul", "MatMulInteger", "QuantizeLinear", "DequantizeLinear",
                       "DynamicQuantizeLinear"})  # fmt: skip
IN_PLACE = frozenset({"relu", "silu", "hardswish", "hardtanh", "leaky_relu", "elu", "mish"})
"""Activations that zoos write with inplace=True, and that ONNX runtimes compute in their input's memory."""

_NAMES = {
    "Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div", "Pow": "pow", "Sqrt": "sqrt", "Exp": "exp", "Log": "log",
    "Erf": "erf", "Abs": "abs", "Neg": "neg",
    "Reciprocal": "reciprocal", "Floor": "floor", "Ceil": "ceil", "Round": "round", "Sign": "sign",
    "Sin": "sin", "Cos": "cos", "Tan": "tan", "Asin": "asin", "Acos": "acos", "Atan": "atan", "Sinh": "sinh", "Cosh": "cosh",
    "Asinh": "asinh", "Acosh": "acosh", "Atanh": "atanh", "Equal": "eq", "Greater": "gt", "GreaterOrEqual": "ge", "Less": "lt",
    "LessOrEqual": "le", "Not": "logical_not", "And": "logical_and", "Or": "logical_or", "Xor": "logical_xor",
    "BitShift": "bitwise_left_shift", "BitwiseAnd": "bitwise_and", "BitwiseOr": "bitwise_or", "BitwiseXor": "bitwise_xor",
    "BitwiseNot": "bitwise_not", "Mod": "remainder", "Min": "minimum", "Max": "maximum", "Sum": "add", "Mean": "add",
    "IsNaN": "isnan", "IsInf": "isinf", "QuantizeLinear": "quantize_per_tensor", "DequantizeLinear": "dequantize",
    "DynamicQuantizeLinear": "quantize_per_tensor", "RotaryEmbedding": "mul",
    "Relu": "relu", "LeakyRelu": "leaky_relu", "PRelu": "_prelu_kernel", "Elu": "elu", "Celu": "elu", "Selu": "elu",
    "Sigmoid": "sigmoid", "HardSigmoid": "hardsigmoid", "HardSwish": "hardswish", "Swish": "silu", "Tanh": "tanh",
    "Gelu": "gelu", "Mish": "mish", "Softplus": "softplus",
    "Softsign": "softsign", "ThresholdedRelu": "relu", "Shrink": "hardshrink", "Clip": "hardtanh", "SwiGLU": "glu",
    "Softmax": "_softmax", "LogSoftmax": "_log_softmax", "Hardmax": "_softmax",
    "BatchNormalization": "native_batch_norm", "InstanceNormalization": "native_batch_norm",
    "GroupNormalization": "native_group_norm", "LayerNormalization": "native_layer_norm",
    "RMSNormalization": "fused_rms_norm", "LpNormalization": "linalg_vector_norm",
    "MeanVarianceNormalization": "native_layer_norm", "LRN": "local_response_norm",
    "GlobalAveragePool": "mean", "GlobalMaxPool": "amax", "GlobalLpPool": "linalg_vector_norm",
    "ReduceMean": "mean", "ReduceSum": "sum", "ReduceMax": "amax", "ReduceMin": "amin", "ReduceProd": "prod",
    "ReduceL1": "linalg_vector_norm", "ReduceL2": "linalg_vector_norm", "ReduceSumSquare": "linalg_vector_norm",
    "ReduceLogSum": "logsumexp", "ReduceLogSumExp": "logsumexp", "ArgMax": "argmax", "ArgMin": "argmin", "CumSum": "cumsum",
    "CumProd": "cumsum", "TopK": "topk", "LpPool": "avg_pool2d", "MaxUnpool": "max_unpool2d", "MaxRoiPool": "roi_pool",
    "RoiAlign": "roi_align_pool", "GridSample": "grid_sampler_2d", "AffineGrid": "affine_grid_generator",
    "Concat": "cat", "Cast": "_to_copy", "CastLike": "_to_copy", "BitCast": "_to_copy", "Tile": "repeat", "Where": "where",
    "GatherElements": "gather", "GatherND": "index", "ScatterElements": "scatter", "Scatter": "scatter", "ScatterND": "index_put",
    "TensorScatter": "index_put", "OneHot": "scatter", "Trilu": "tril", "DepthToSpace": "clone", "SpaceToDepth": "clone",
    "ReverseSequence": "flip", "Col2Im": "col2im", "CenterCropPad": "constant_pad_nd", "Compress": "index",
    "ConstantOfShape": "full", "Range": "arange", "EyeLike": "eye", "RandomNormal": "randn", "RandomNormalLike": "randn_like",
    "RandomUniform": "rand", "RandomUniformLike": "rand_like", "Bernoulli": "bernoulli", "Multinomial": "bernoulli",
    "BlackmanWindow": "full", "HannWindow": "full", "HammingWindow": "full",
    "SoftmaxCrossEntropyLoss": "nll_loss_forward", "NegativeLogLikelihoodLoss": "nll_loss_forward",
}  # fmt: skip
"""Operators that do a few operations for each element, and the aten operator that does the same."""
_POOL_NAMES = {"MaxPool": "max_pool{}d_with_indices", "AveragePool": "avg_pool{}d"}
_RESIZE_NAMES = {"linear": "upsample_bilinear2d", "cubic": "upsample_bicubic2d"}
_PAD_NAMES = {"reflect": "reflection_pad2d", "edge": "replication_pad2d"}

Types = Sequence["TensorType | None"]


class Launch(NamedTuple):
    """One kernel."""

    name: str
    kind: str
    flops: int
    attributes: Mapping[str, Any] = {}
    scratch_bytes: int = 0
    """Written beside the outputs and freed at once."""
    is_known: bool = True
    """False: only its bytes are counted."""


def launch_of(node: Node, inputs: Types, outputs: Types, target: Target) -> Launch:
    """The launch of ``node``.

    Args:
        node: an operator that is neither a view nor worked out beforehand.
        inputs: the types of ``node.inputs``. None: the input is left out or unknown.
        outputs: those of ``node.outputs``.
        target: decides which kernel computes attention.
    """
    if not (node.is_standard or node.domain == OWN_DOMAIN) or node.most_launches:
        return _opaque(node)
    if node.domain == OWN_DOMAIN and node.op_type == "Attention":
        return _attention(node.attributes["flops"], inputs, target, masked=node.attributes["masked"])
    rule = _RULES.get(node.op_type)
    if rule is not None:
        return rule(node, inputs, outputs, target) or _opaque(node)
    name = _name_of(node, inputs, outputs)
    if name is None:
        return _opaque(node)
    kind = kind_of(name)
    num_inputs = max((found.num_elements for found in inputs if found is not None), default=0)
    num_outputs = max((found.num_elements for found in outputs if found is not None), default=0)
    indices = _INDEX_BYTES * num_outputs if name.endswith("_with_indices") and len(_named(node.outputs)) == 1 else 0
    return Launch(name, kind, elementwise_flops(kind, num_inputs, num_outputs), scratch_bytes=indices)


def _opaque(node: Node) -> Launch:
    return Launch(node.op_type[:80], "other", 0, is_known=False)


def _named(names: Sequence[str]) -> list[str]:
    return [name for name in names if name]


def _name_of(node: Node, inputs: Types, outputs: Types) -> str | None:
    op_type = node.op_type
    if op_type in _POOL_NAMES:
        rank = len(outputs[0].shape) if outputs and outputs[0] is not None else 0
        return _POOL_NAMES[op_type].format(max(rank - 2, 1))
    if op_type in ("Resize", "Upsample"):
        return _RESIZE_NAMES.get(node.attributes.get("mode", "nearest"), "upsample_nearest2d")
    if op_type == "Pad":
        return _PAD_NAMES.get(node.attributes.get("mode", "constant"), "constant_pad_nd")
    if op_type == "Gather":
        table = inputs[0] if inputs else None
        is_table = table is not None and len(table.shape) == 2 and not node.attributes.get("axis", 0)
        return "embedding" if is_table and table is not None and "float" in table.dtype else "index_select"
    return _NAMES.get(op_type)


def _convolution(node: Node, inputs: Types, outputs: Types, _: Target) -> Launch | None:
    data = _at(inputs, 0)
    weight = _at(inputs, 3 if node.op_type == "QLinearConv" else 1)
    out = _at(outputs, 0)
    if data is None or weight is None or out is None:
        return None
    rank = len(data.shape) - 2
    if rank < 1 or not len(weight.shape) == len(out.shape) == rank + 2:
        return None
    transposed = node.op_type == "ConvTranspose"
    kernel = weight.shape[2:]
    dilation = _sizes(node, "dilations", rank, 1)
    pads = _sizes(node, "pads", 2 * rank, 0)[:rank]
    if node.attributes.get("auto_pad", "NOTSET").startswith("SAME"):
        pads = tuple((size - 1) * step // 2 for size, step in zip(kernel, dilation, strict=True))
    attributes = convolution_attributes(
        data.shape,
        weight.shape,
        stride=_sizes(node, "strides", rank, 1),
        padding=pads,
        dilation=dilation,
        groups=max(_integer(node, "group", 1), 1),
        transposed=transposed,
    )
    return Launch("convolution", "conv", product_flops(data.shape, weight.shape, out.shape, transposed=transposed), attributes)


def _at(types: Types, index: int) -> TensorType | None:
    return types[index] if index < len(types) else None


def _sizes(node: Node, name: str, number: int, default: int) -> tuple[int, ...]:
    value = node.attributes.get(name)
    return value if isinstance(value, tuple) and len(value) == number else (default,) * number


def _integer(node: Node, name: str, default: int) -> int:
    value = node.attributes.get(name, default)
    return value if isinstance(value, int) else default


def _product(node: Node, inputs: Types, outputs: Types, _: Target) -> Launch | None:
    left = _at(inputs, 0)
    right = _at(inputs, 3 if node.op_type == "QLinearMatMul" else 1)
    out = _at(outputs, 0)
    if left is None or right is None or out is None or not left.shape or not right.shape:
        return None
    k = left.shape[-2 if _integer(node, "transA", 0) and len(left.shape) > 1 else -1]
    if len(right.shape) <= 2:  # PyTorch flattens the rest into one matrix
        n = math.prod(right.shape) // max(k, 1)
        return _matrix_product(node, (1, out.num_elements // max(n, 1), n, k))
    m = left.shape[-2] if len(left.shape) > 1 else 1
    n = out.shape[-1] if out.shape else 1
    return _matrix_product(node, (out.num_elements // max(m * n, 1), m, n, k))


def _matrix_product(node: Node, product: tuple[int, int, int, int]) -> Launch:
    """A product (batch, m, n, k)."""
    has_bias = node.op_type == "Linear" or (node.op_type == "Gemm" and len(_named(node.inputs)) > 2)
    name = "bmm" if product[0] > 1 else "addmm" if has_bias else "mm"
    return Launch(name, "matmul", 2 * math.prod(product), {"product": product})


def _einsum(node: Node, inputs: Types, outputs: Types, _: Target) -> Launch | None:
    """Two factors: a batch of products, by which letters each of the three has."""
    left = _at(inputs, 0)
    right = _at(inputs, 1)
    out = _at(outputs, 0)
    terms, arrow, result = str(node.attributes.get("equation", "")).replace(" ", "").partition("->")
    letters = terms.split(",")
    if left is None or right is None or out is None or len(inputs) != 2 or len(letters) != 2 or not arrow or "." in terms:
        return None
    if any(len(names) != len(found.shape) for names, found in zip(letters, (left, right), strict=True)):
        return None
    sizes = dict(zip("".join(letters), (*left.shape, *right.shape), strict=True))
    first = set(letters[0])
    second = set(letters[1])
    third = set(result)
    groups = first & second & third, (first & third) - second, (second & third) - first, (first & second) - third
    batch, rows, columns, inner = (math.prod(sizes[name] for name in group) for group in groups)
    return _matrix_product(node, (batch, rows, columns, inner))


def _attention(flops: int, inputs: Types, target: Target, *, masked: bool) -> Launch:
    query = _at(inputs, 0)
    is_half = query is not None and query.dtype in ("float16", "bfloat16")
    if target.is_cpu:
        name = "_scaled_dot_product_flash_attention_for_cpu"
    elif is_half and target.flash_attention and not masked:
        name = "_scaled_dot_product_flash_attention"
    else:
        name = "_scaled_dot_product_efficient_attention"
    return Launch(name, "attention", flops)


def _standard_attention(node: Node, inputs: Types, outputs: Types, target: Target) -> Launch | None:
    """Attention of opset 23: (batch, heads, length, width), or heads side by side."""
    query, key, value = (_at(inputs, index) for index in range(3))
    if query is None or key is None or value is None or not len(query.shape) == len(key.shape) == len(value.shape) in (3, 4):
        return None
    if len(query.shape) == 4:
        shapes = [query.shape, key.shape, value.shape]
    else:
        heads = max(_integer(node, "q_num_heads", 1), 1)
        kv_heads = max(_integer(node, "kv_num_heads", heads), 1)
        side_by_side = ((query, heads), (key, kv_heads), (value, kv_heads))
        shapes = [(one.shape[0], count, one.shape[1], one.shape[2] // count) for one, count in side_by_side]
    flops = attention_flops(*shapes, causal=_integer(node, "is_causal", 0) == 1)
    return _attention(flops, inputs, target, masked=len(_named(node.inputs[3:4])) > 0)


def _recurrent(node: Node, inputs: Types, outputs: Types, _: Target) -> Launch | None:
    """Launch of a recurrent layer. Each weight is used once at each position, as in `perfguard.graph.kernels`."""
    data, weight, recurrence = (_at(inputs, index) for index in range(3))
    if data is None or weight is None or recurrence is None or len(data.shape) != 3:
        return None
    positions = data.shape[0] * data.shape[1]
    return Launch("fused_rnn", "rnn", 2 * positions * (weight.num_elements + recurrence.num_elements))


_RULES: dict[str, Callable[[Node, Types, Types, Target], Launch | None]] = {
    **dict.fromkeys(("Conv", "ConvInteger", "ConvTranspose", "DeformConv", "QLinearConv"), _convolution),
    **dict.fromkeys(("Linear", "Gemm", "MatMul", "MatMulInteger", "QLinearMatMul"), _product),
    "Einsum": _einsum,
    "Attention": _standard_attention,
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
}
