"""What a step needs at the least on a device, whatever its predictor has learnt.

These are bounds that no honest run crosses, not predictions. So each leaves out what a real run can save:

    memory, GPU    The parameters, buffers, gradients and optimizer state that are alive at once, less a tenth. The allocator
                   counts them exactly. Activations are left out, because recomputation saves most of them.
    memory, CPU    Half of the gradients and optimizer state that are alive at once, and a tenth of all that the step makes. A
                   CPU's reading is the growth of the resident set since the run began. What existed before, often the model and
                   its data, is not in it, and some allocators reuse memory that was mapped before.
    time           Half of one launch, because a step launches at least one operator. On a GPU also the products at the fastest
                   rate that the card has for any precision, 25% above its boost clock, where convolutions take a quarter of
                   their FLOPs (Winograd's F(4x4, 3x3); Lavin and Gray 2016) and attention half (a causal mask); and the
                   gradients, written once at the peak bandwidth as far as the cache does not hold them. Rates of a GPU that is
                   not in the catalog are guesses, so its bound is a tenth of that. On a CPU the rates are measured, now and then
                   while other work runs, and caches outrun the memory, so the bound is a tenth of its float32 products alone;
                   a third where the run's memory says as well that nothing ran.

No traffic of activations is counted: caches and fusion save it. Nothing here needs a replay of the allocator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from perfguard.devices import catalog
from perfguard.graph import StorageKind

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.graph import OpGraph
    from perfguard.predictor import Target

_COUNTED_MEMORY = 0.9
_NEWLY_MAPPED, _MAPPED_OF_ALL = 0.5, 0.1
_SHARE_OF_FLOPS = {"conv": 0.25, "conv_backward": 0.25, "attention": 0.5, "matmul": 1.0, "rnn": 1.0}
"""What the fastest algorithm computes of an operator's FLOPs, by the kind of operator."""
_OVERCLOCKED = 1.25
_UNSURE_OF_RATES, _UNSURE_WHERE_IDLE = 10.0, 3.0
"""Honest steps take half of their products at the measured rate and more (2 busy cores, 10 networks, 2026-11-22)."""
_SHORTEST_LAUNCH = 0.5


class _Needs(NamedTuple):
    """What a step needs on any device."""

    held_bytes: float
    """Parameters, buffers, gradients and optimizer state, the most that are alive at once."""
    update_bytes: float
    """Gradients and optimizer state, the most that are alive at once."""
    gradient_bytes: float
    made_bytes: float
    """All but parameters, buffers and inputs, the most that is alive at once."""
    product_flops: float


def least(target: Target, graph: OpGraph, device: Device, *, idle: bool = False) -> float:
    """Return the least that a step of ``graph`` needs on ``device``: bytes at the peak, or seconds.

    Args:
        target: "memory" as a Measurement has it: of a GPU what the process takes, of a CPU the growth of the resident set.
        graph: one step.
        device: on which it runs.
        idle: whether the run's memory says that nothing ran, so that less trust is due to its time. Matters on a CPU.
    """
    needs = _needs(graph)
    if target == "memory":
        if device.kind == "cuda":
            return _COUNTED_MEMORY * needs.held_bytes
        return max(_NEWLY_MAPPED * needs.update_bytes, _MAPPED_OF_ALL * needs.made_bytes)
    launch_s = _SHORTEST_LAUNCH * device.launch_overhead_s
    if device.kind == "cpu":
        products_s = needs.product_flops / device.peak_flops["fp32"] if graph.precision == "fp32" else 0.0
        return max(launch_s, products_s / (_UNSURE_WHERE_IDLE if idle else _UNSURE_OF_RATES))
    faster = _OVERCLOCKED * (1.0 if device.id.partition(":")[0] in catalog() else _UNSURE_OF_RATES)
    products_s = needs.product_flops / max(device.peak_flops.values())
    traffic_s = max(0.0, needs.gradient_bytes - device.l2_bytes) / device.bandwidth_bytes_per_s
    return max(launch_s, products_s / faster, traffic_s / faster)


_known: WeakKeyDictionary[OpGraph, _Needs] = WeakKeyDictionary()


def _needs(graph: OpGraph) -> _Needs:
    if graph not in _known:
        update = StorageKind.GRADIENT, StorageKind.OPTIMIZER_STATE
        shares = [_SHARE_OF_FLOPS.get(op.kind, 0.0) for op in (graph.twin or graph).ops]
        _known[graph] = _Needs(
            _most_alive(graph, StorageKind.PARAMETER, StorageKind.BUFFER, *update),
            _most_alive(graph, *update),
            _most_alive(graph, StorageKind.GRADIENT),
            _most_alive(graph, *update, StorageKind.ACTIVATION, StorageKind.TEMPORARY),
            float(graph.costs[0].astype(np.float64) @ np.array(shares)) if shares else 0.0,
        )
    return _known[graph]


def _most_alive(graph: OpGraph, *kinds: StorageKind) -> float:
    """Most bytes of storages of these ``kinds`` that are alive at once."""
    kind, births, deaths = graph.lifetimes
    chosen = np.isin(kind, kinds)
    change = np.zeros(len(graph.op_starts) + 2)
    num_bytes = graph.storage_bytes[chosen].astype(np.float64)
    np.add.at(change, births[chosen] + 1, num_bytes)
    np.subtract.at(change, deaths[chosen] + 2, num_bytes)
    return float(np.cumsum(change).max())
