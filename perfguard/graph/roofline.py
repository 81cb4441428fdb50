"""Time and memory of a step by operator, by module and by part, without a predictor.

The time is a lower bound on each operator's (Williams et al. 2009): the slower of its arithmetic and its traffic.
:func:`issue_s` is a third roof, of the kernels that PyTorch has today. It is no bound on what a step needs: another kernel may
be faster. So physics (`perfguard.physics`) leaves it out, and predictors read it.

Shapes: N operators.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from perfguard.graph.op import Op, StorageKind
from perfguard.graph.opgraph import OpGraph

if TYPE_CHECKING:
    from perfguard.devices import Device

_CONVOLUTIONS = ("conv", "conv_backward")
_MATRIX_KINDS = frozenset({*_CONVOLUTIONS, "matmul", "attention", "rnn"})
_CUDNN_KINDS = frozenset({*_CONVOLUTIONS, "rnn"})
"""By default these compute float32 in TF32; matrix products do not."""
_PARTS = {
    StorageKind.PARAMETER: "parameters",
    StorageKind.BUFFER: "buffers",
    StorageKind.GRADIENT: "gradients",
    StorageKind.OPTIMIZER_STATE: "optimizer_states",
    StorageKind.INPUT: "inputs",
    StorageKind.ACTIVATION: "activations",
    StorageKind.TEMPORARY: "temporaries",
}
_ELEMENTS_A_CLOCK = {
    "embedding": 0.6,
    "gelu": 2.3,
    "rope": 1.5,
    "silu_mul": 1.2,
    **dict.fromkeys(("fused_rms_norm", "native_layer_norm", "native_group_norm"), 1.2),
    **dict.fromkeys(("native_batch_norm", "native_batch_norm_backward", "_softmax", "_log_softmax"), 1.2),
}
"""Elements that a multiprocessor writes in a clock at most, by operator. They are the 90th percentiles of Vidur's kernels above
50 us on the A100 and the H100: 0.54 and 0.63 of 3,300 and 957 embeddings, 2.17 and 2.36 of GELU, 1.46 and 1.52 of rotary
embeddings, 1.13 and 1.25 of SiLU with a product, 1.20 and 1.16 of RMS norms. The medians are 2 to 10% lower. The other norms and
softmax also reduce a row in a block, and have the rate of the RMS norm. NeuSight's kernels in float32 on five cards never exceed
these rates. An addition has none: it reaches the bandwidth of both cards."""
_STATISTICS = frozenset({"native_layer_norm", "native_group_norm", "native_batch_norm", "native_batch_norm_backward"})
"""Their second output has one element for each block: the mean of a row, a group or a channel, or its gradient."""
_STATISTIC_BYTES = 4
_Floats = npt.NDArray[np.float64]


def roofline_s(graph: OpGraph, device: Device) -> _Floats:
    """Return the seconds of each operator at the device's peak rates, never less than one launch. Shape: (N,).

    On a CPU a convolution computes whole blocks of channels, so it is charged for the lanes that it leaves empty: 17 channels
    take as long as 32.
    """
    return np.maximum(np.maximum(*work_s(graph, device)), device.launch_overhead_s)


def work_s(graph: OpGraph, device: Device) -> tuple[_Floats, _Floats]:
    """Return the seconds of each operator's arithmetic and of its traffic at the device's peak rates. Shapes: (N,)."""
    flops = graph.costs[0].astype(np.float64)
    num_bytes = (graph.costs[1] + graph.costs[2]).astype(np.float64)
    if device.kind == "cpu":
        flops = flops * np.sqrt(np.prod(channel_padding(graph, device), axis=0))
    return flops / _rates(graph, device), num_bytes / device.bandwidth_bytes_per_s


def issue_s(graph: OpGraph, device: Device) -> _Floats:
    """Return the seconds that the multiprocessors of a GPU need to issue the elements of each operator. Shape: (N,).

        s_v = elements_v / (r_v · clock · min(blocks_v, multiprocessors))

    A kernel that computes an index, a reduction or a special function for each element is bound by its instructions, and not by
    the memory. So r_v is about the same on the A100 and the H100, where such a kernel reaches a small share of the bandwidth. A
    norm or a softmax has one block for each row, group or channel, so 16 rows keep 16 multiprocessors busy.

    It is 0 for operators whose rate was not measured, and on a CPU. Of a softmax the last dimension is taken for the row. A batch
    norm of the layout "nhwc" has more blocks than channels, and one with the statistics of the training reduces nothing.
    """
    found = np.zeros(len(graph.ops))
    if device.kind == "cpu":
        return found
    for at, op in enumerate(graph.ops):
        rate = _ELEMENTS_A_CLOCK.get(op.name)
        is_launched = op.bytes_written > 0  # a compiler may have fused it with the next
        if rate is not None and is_launched and not _is_evaluated(graph, op):
            busy = min(_blocks(graph, op), device.num_sms)
            found[at] = math.prod(op.shape) / (rate * device.boost_clock_hz * busy)
    return found


def _is_evaluated(graph: OpGraph, op: Op) -> bool:
    """Whether it is a batch norm with the statistics of the training: a product and a sum for each element."""
    has_statistics = any(graph.storages[storage].kind is StorageKind.BUFFER for storage in op.inputs)
    return op.name == "native_batch_norm" and graph.mode == "infer" and has_statistics


def _blocks(graph: OpGraph, op: Op) -> float:
    """Independent blocks of the kernel of ``op``; infinity where they are many, or not known."""
    if op.kind == "softmax" or op.name == "fused_rms_norm":
        return max(math.prod(op.shape[:-1]), 1)
    is_split = graph.layout == "nhwc" and "batch_norm" in op.name
    if op.name not in _STATISTICS or is_split or len(op.outputs) < 2:
        return math.inf
    return max(graph.storages[op.outputs[1]].num_bytes // _STATISTIC_BYTES, 1)


def _rates(graph: OpGraph, device: Device) -> _Floats:
    """Peak FLOPs a second of each operator. Shape: (N,)."""
    in_tf32 = kinds_in_tf32(graph)
    half = {"float16": "fp16", "bfloat16": "bf16"}

    def rate(kind: str, dtype: str) -> float:
        if kind not in _MATRIX_KINDS:
            return device.flops_per_s("fp32")
        return device.flops_per_s(half.get(dtype, "tf32" if kind in in_tf32 else "fp32"))

    known = {key: rate(*key) for key in {(op.kind, op.dtype) for op in graph.ops}}
    return np.array([known[op.kind, op.dtype] for op in graph.ops], dtype=np.float64)


def channel_padding(graph: OpGraph, device: Device) -> _Floats:
    """Ratio of the channels in whole blocks to the channels of each convolution, for its input and its output. 1 for other
    operators. Shape: (2, N).
    """
    padding = np.ones((2, len(graph.ops)))
    convolutions = [index for index, op in enumerate(graph.ops) if op.kind in _CONVOLUTIONS]
    if convolutions:
        # The floats of an AVX-512 register, and the multiple that tensor cores use.
        lanes, without_blocks = 16 if device.kind == "cpu" else 8, 4  # images and sound have kernels without blocks
        weight = graph.attribute("weight_shape", ops=convolutions)
        groups = graph.attribute("groups", ops=convolutions)
        first = weight[:, 0]
        second = weight[:, 1] * groups[:, 0]
        transposed = np.array([bool(graph.ops[index].attributes["transposed"]) for index in convolutions])
        channels = np.where(transposed, (first, second), (second, first))
        in_blocks = (-(-channels // lanes) * lanes / np.maximum(channels, 1)).astype(np.float64)
        padding[:, convolutions] = np.where(channels > without_blocks, in_blocks, 1.0)
    return padding


def kinds_in_tf32(graph: OpGraph) -> frozenset[str]:
    """Return the kinds of operators that compute float32 in TF32 on GPUs that have it (`torch.backends.cudnn.allow_tf32`)."""
    if "no-tf32" in graph.options:
        return frozenset()
    return _MATRIX_KINDS if "tf32" in graph.options else _CUDNN_KINDS


class OperatorCost(NamedTuple):
    """Cost of all calls of one aten operator in a step."""

    name: str
    calls: int
    flops: int
    num_bytes: int
    """Bytes read and written."""
    seconds: float
    """Time of all calls."""


def memory_parts(graph: OpGraph, device: Device) -> dict[str, int]:
    """Return the bytes that the replay of ``graph`` holds on ``device`` at its peak, by part.

    The parts are "parameters", "buffers", "inputs", "gradients", "optimizer_states", "activations" and "temporaries". On a GPU
    there are also "cache" and "context". The cache is what the allocator reserves beside the tensors: unused blocks, rounding
    and cuBLAS's workspace.
    """
    parts = {_PARTS[kind]: held for kind, held in graph.bytes_by_kind().items()}
    if device.kind == "cuda":
        parts["cache"] = max(graph.reserved_bytes(device) - sum(parts.values()), 0)
        parts["context"] = device.context_bytes
    return parts


def bytes_by_module(graph: OpGraph, *, depth: int = 2, at: int | None = None) -> dict[str, int]:
    """Bytes alive at operator ``at`` (default: at the peak) by path of module, largest first; parameters, gradients and
    activations alike.

    Args:
        graph: a traced step.
        depth: how many parts of a path to keep: "layer1.0.conv1" is "layer1.0" at 2.
        at: index of an operator.
    """
    index = graph.peak_index if at is None else at
    named_by_parameter = (StorageKind.PARAMETER, StorageKind.BUFFER, StorageKind.GRADIENT, StorageKind.OPTIMIZER_STATE)
    totals: dict[str, int] = {}
    for storage, num_alive in zip(graph.storages, graph.num_alive(index).tolist(), strict=True):
        if num_alive:
            path = storage.module.rpartition(".")[0] if storage.kind in named_by_parameter else storage.module
            key = ".".join(path.split(".")[:depth])
            totals[key] = totals.get(key, 0) + num_alive * storage.num_bytes
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def cost_by_operator(graph: OpGraph, device: Device, *, op_time_s: npt.NDArray[np.float64] | None = None) -> list[OperatorCost]:
    """Cost of each aten operator on ``device``, slowest first.

    Args:
        graph: a traced step.
        device: what it runs on.
        op_time_s: seconds of each operator. None: those at the device's peak rates. Shape: (len(ops),).
    """
    totals: dict[str, OperatorCost] = {}
    seconds_of = roofline_s(graph, device) if op_time_s is None else op_time_s
    for op, seconds in zip(graph.ops, seconds_of.tolist(), strict=True):
        before = totals.get(op.name, OperatorCost(op.name, 0, 0, 0, 0.0))
        totals[op.name] = OperatorCost(
            op.name,
            before.calls + 1,
            before.flops + op.flops,
            before.num_bytes + op.bytes_read + op.bytes_written,
            before.seconds + seconds,
        )
    return sorted(totals.values(), key=lambda cost: -cost.seconds)


def timeline(graph: OpGraph) -> dict[str, npt.NDArray[Any]]:
    """Bytes alive while each operator runs, by part of the memory as :func:`memory_parts` names them. They sum to
    ``graph.live_bytes``. Shape of each: (len(ops) + 1,)."""
    return {_PARTS[kind]: graph.live_bytes_of(kind) for kind in StorageKind}
