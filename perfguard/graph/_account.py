"""Memory and time of a step, by operator and by module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from perfguard.graph._roofline import roofline_s
from perfguard.graph._schema import OpGraph, StorageKind

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.graph._graph_batch import GraphBatch


_NAMED_BY_PARAMETER = (StorageKind.PARAMETER, StorageKind.BUFFER, StorageKind.GRADIENT, StorageKind.OPTIMIZER_STATE)

_PARTS = {
    StorageKind.PARAMETER: "parameters",
    StorageKind.BUFFER: "buffers",
    StorageKind.GRADIENT: "gradients",
    StorageKind.OPTIMIZER_STATE: "optimizer_states",
    StorageKind.INPUT: "inputs",
    StorageKind.ACTIVATION: "activations",
    StorageKind.TEMPORARY: "temporaries",
}


class OperatorCost(NamedTuple):
    """Cost of all calls of one aten operator in a step."""

    name: str
    calls: int
    flops: int
    num_bytes: int
    """Bytes read and written."""
    seconds: float
    """Time of all calls."""


def memory_parts(graphs: GraphBatch, device: Device) -> list[dict[str, int]]:
    """Return for each of ``graphs`` the bytes that the replay holds on ``device`` at its peak.

    The parts are "parameters", "buffers", "inputs", "gradients", "optimizer_states", "activations" and "temporaries". On a GPU
    there are also "cache" and "context". The cache is what the allocator reserves beside the tensors: unused blocks, rounding
    and cuBLAS's workspace.
    """
    names = [_PARTS[kind] for kind in StorageKind]
    found: list[dict[str, int]] = [dict(zip(names, held, strict=True)) for held in graphs.bytes_by_kind().tolist()]
    if device.kind == "cuda":
        for parts, reserved in zip(found, graphs.reserved_bytes.tolist(), strict=True):
            parts["cache"] = max(reserved - sum(parts.values()), 0)
            parts["context"] = device.context_bytes
    return found


def bytes_by_module(graph: OpGraph, *, depth: int = 2, at: int | None = None) -> dict[str, int]:
    """Bytes alive at operator ``at`` (default: at the peak) by path of module, largest first; parameters, gradients and
    activations alike.

    Args:
        graph: a traced step.
        depth: how many parts of a path to keep: "layer1.0.conv1" is "layer1.0" at 2.
        at: index of an operator.
    """
    index = graph.peak_index if at is None else at
    totals: dict[str, int] = {}
    for storage, num_alive in zip(graph.storages, graph.as_batch().num_alive(np.array([index]))[0].tolist(), strict=True):
        if num_alive:
            path = storage.module.rpartition(".")[0] if storage.kind in _NAMED_BY_PARAMETER else storage.module
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
    return {_PARTS[kind]: graph.as_batch().live_bytes_of(kind)[0] for kind in StorageKind}
