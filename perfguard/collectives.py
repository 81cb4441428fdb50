"""What the links between GPUs add to a step: the time of each collective, and how much of it the computation waits for.

Notation, for a collective of S bytes among n ranks, g of them in each of m nodes:

    T = latency(m) + S · ring(n) / (efficiency · bus)

    S       the larger of its two buffers: what all ranks give or get together
    ring    bytes that pass the slowest link for each byte of S: 2 (n - 1) / n of an all-reduce, (n - 1) / n of an all-gather, a
            reduce-scatter or an all-to-all, 1 of a broadcast (NVIDIA/nccl-tests, doc/PERFORMANCE.md)
    bus     the link of a GPU within a node; between nodes min(link, g · network), because each GPU of a node has a part of it

Two queues are played over the operators in their order. The computation takes each in turn, and waits for what it reads. The link
takes the collectives, and what FSDP runs on streams of its own; each begins when the link is free and its inputs are there. So an
all-reduce of DDP runs beside the rest of the backward pass, and an all-gather of FSDP2 beside the layer before. Kernels beside
the computation take the device's time too: on links without end, the step takes as long as without them.

    step = (end of both queues) · exp(jitter · z(n)),    z(n) = expected largest of n standard normal values

because each collective waits for the slowest rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from perfguard.graph import Op, OpGraph
from perfguard.unmodelled import LINK_ASSUMED, NETWORK_ASSUMED, Unmodelled

if TYPE_CHECKING:
    from perfguard.devices import Device

_Floats = npt.NDArray[np.float64]
_IN_FLIGHT = 2
"""All-gathers that FSDP2 has under way: the next waits until the one before the last is copied out (`wait_for_unshard`)."""

_NVLINK = 80e9
"""Bytes per second of its first generation; PCIe has less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """What is assumed of links. `python benchmarks/links.py` fits what is called fitted, and shows the errors.

    A sigma is the standard deviation of a logarithm.
    """

    latency_s: float = 30e-6
    """Of a collective within a node; fitted."""
    hop_s: float = 12e-6
    """What each further node in the ring adds; fitted. An all-reduce among many nodes goes through a tree."""
    efficiency: float = 0.63
    """Share of the link's peak that NCCL reaches; fitted."""
    nvlink_log_sigma: float = 0.2
    """Of the time on a link of at least 80 GB/s (NVLink); from the fit's error."""
    log_sigma: float = 0.5
    """Of the time on PCIe, which was not fitted. A guess: without peer-to-peer copies, bytes take the way through the host."""
    jitter: float = 0.052
    """Standard deviation between the step times of ranks; fitted."""
    network_bytes_per_s: float = 12.5e9
    """For each GPU, where nobody states it: 100 Gbit/s. A guess."""
    link_bytes_per_s: float = 16e9
    """Of a GPU that the catalog does not know: PCIe 3.0 x16. A guess."""
    guess_log_sigma: float = 1.2
    """Of these guesses: rented nodes have 25 Gbit/s for eight GPUs to 400 Gbit/s for each."""
    nccl_bytes: int = 336 * 2**20
    """What NCCL holds beside PyTorch's allocator. On H100s, nvidia-smi shows 1,519 MiB for one of 8 GPUs, 1,449 for one of 2, and
    1,183 for one alone (logs of KellerJordan/modded-nanogpt)."""
    nccl_sigma_bytes: int = 128 * 2**20
    """Of these, on other cards. A guess: NCCL holds more for each channel and each peer."""


LINKS = LinkConfig()


class LinkTimes(NamedTuple):
    """What the links add to a step of N operators."""

    waits_s: _Floats  # shape: (N,), longer step by each collective; stragglers included
    log_sigma: float
    """What is not known of the step time because of the links and the other ranks."""
    assumed: tuple[Unmodelled, ...]
    """What of the links nobody has stated."""


def link_times(graph: OpGraph, device: Device, op_time_s: _Floats, links: LinkConfig = LINKS) -> LinkTimes | None:
    """Return how much longer a step takes because of its collectives. None: it has none among several ranks, or is on a CPU.

    Args:
        graph: a captured step of one rank.
        device: with its links.
        op_time_s: seconds of each operator on the device. Shape: (N,).
        links: what is assumed of links.
    """
    groups = [op.attributes.get("ranks", (1, 1)) for op in graph.ops]
    num_ranks = max((ranks for ranks, _ in groups), default=1)
    if num_ranks < 2 or device.kind == "cpu":
        return None
    num_bytes = _buffer_bytes(graph.ops)
    computed_s = float(op_time_s.sum())
    crosses_nodes = any(ranks > on_a_node for ranks, on_a_node in groups)
    assumed = []
    if crosses_nodes and not device.network_bytes_per_s:
        rate = f"{links.network_bytes_per_s / 1e9:g} GB/s"
        assumed.append(NETWORK_ASSUMED.of(rate))
    if not device.link_bytes_per_s:
        assumed.append(LINK_ASSUMED.of(device.name, f"{links.link_bytes_per_s / 1e9:g}"))
    sigma = links.nvlink_log_sigma if device.link_bytes_per_s >= _NVLINK else links.log_sigma
    sigma = links.guess_log_sigma if assumed else sigma

    def played(slower: float) -> tuple[float, _Floats]:
        own = replace(links, efficiency=links.efficiency / slower)
        of_each = zip(graph.ops, num_bytes, groups, strict=True)
        on_link_s = np.array([collective_s(op.name, size, n, g, device, own) for op, size, (n, g) in of_each])
        return makespan_s(graph.ops, op_time_s, on_link_s), on_link_s

    (step_s, on_link_s), (fast_s, _), (slow_s, _) = (played(math.exp(shift)) for shift in (0.0, -sigma, sigma))
    straggling = links.jitter * largest_normal(num_ranks)
    added_s = max(step_s * math.exp(straggling) - computed_s, 0.0)
    log_sigma = math.hypot(math.log(slow_s / fast_s) / 2, straggling)
    return LinkTimes(added_s * on_link_s / on_link_s.sum(), log_sigma, tuple(assumed))


def collective_s(name: str, num_bytes: int, ranks: int, on_a_node: int, device: Device, links: LinkConfig = LINKS) -> float:
    """Return the seconds of a collective on the link; see the module's docstring. 0 for one rank, and for other operators.

    Args:
        name: of the operator, for instance "allreduce_" or "_allgather_base_".
        num_bytes: S.
        ranks: n.
        on_a_node: g.
        device: with its links.
        links: what is assumed of links.
    """
    if ranks < 2:
        return 0.0
    nodes = -(-ranks // on_a_node)
    bus = device.link_bytes_per_s or links.link_bytes_per_s
    if nodes > 1:
        bus = min(bus, on_a_node * (device.network_bytes_per_s or links.network_bytes_per_s))
    hops = 2 * math.log2(nodes) if "allreduce" in _plain(name) else nodes - 1
    return links.latency_s + hops * links.hop_s + num_bytes * ring_factor(name, ranks) / (links.efficiency * bus)


def ring_factor(name: str, ranks: int) -> float:
    """Return the bytes that pass the slowest link for each byte of the buffer.

    Example:
        >>> ring_factor("allreduce_", 8), ring_factor("_allgather_base_", 8)
        (1.75, 0.875)
    """
    plain = _plain(name)
    if "allreduce" in plain:
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if any(word in plain for word in ("gather", "scatter", "alltoall")) else 1.0


def _plain(name: str) -> str:
    """The name without lines: c10d's collective is "allreduce_", and the functional one "all_reduce"."""
    return name.replace("_", "")


def largest_normal(number: int) -> float:
    """Return the expected largest of ``number`` standard normal values (Blom 1958): 0 for one, 1.42 for 8, 3.04 for 512."""
    return NormalDist().inv_cdf((number - 0.375) / (number + 0.25))


def makespan_s(ops: Sequence[Op], op_time_s: _Floats, on_link_s: _Floats) -> float:
    """Return when both queues have ended, in seconds.

    Args:
        ops: of the step, in their order.
        op_time_s: seconds of each on the device. Shape: (N,).
        on_link_s: seconds of each on the link. Shape: (N,).
    """
    device_free = link_free = 0.0
    ready: dict[int, float] = {}
    """When each storage has been written."""
    gathered: list[int] = []
    copied_out: dict[int, float] = {}
    for op, own_s, link_s in zip(ops, op_time_s.tolist(), on_link_s.tolist(), strict=True):
        begin = max((ready.get(storage, 0.0) for storage in op.inputs), default=0.0)
        if link_s or "stream" in op.attributes:
            if link_s and "gather" in op.name:
                if len(gathered) >= _IN_FLIGHT:
                    begin = max(begin, copied_out.get(gathered[-_IN_FLIGHT], 0.0))
                gathered.extend(op.outputs[:1])
            link_free = end = max(begin, link_free) + max(own_s, link_s)
            device_free += own_s
        else:
            device_free = end = max(begin, device_free) + own_s
            for storage in op.inputs:
                copied_out.setdefault(storage, end)
        ready.update(dict.fromkeys(op.outputs, end))
    return max(device_free, link_free)


def _buffer_bytes(ops: Sequence[Op]) -> list[int]:
    """The larger buffer of each collective. One in place (its name ends with a line) reads both, and writes one of them."""
    return [max(op.bytes_written, op.bytes_read - op.bytes_written * op.name.endswith("_")) for op in ops]
