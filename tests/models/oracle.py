"""Live bytes of a graph and the time of a step as plain loops: slow, and easy to read."""

from __future__ import annotations

from collections.abc import Sequence

from perfguard.graph import OpGraph, Storage, StorageKind


def times_alive(storage: Storage, at: int, graph: OpGraph) -> int:
    """An operator of this step meets this step's storage, and that of the last one if it dies later than that."""
    end = len(graph.ops)
    of_this, of_last = range(storage.birth, storage.death + 1), range(-1, storage.death - end)
    return (at in of_this) + (storage.death > end and at in of_last)


def live_bytes(graph: OpGraph) -> list[int]:
    return [
        sum(times_alive(storage, at, graph) * storage.num_bytes for storage in graph.storages) for at in range(-1, len(graph.ops))
    ]


def peak_index(graph: OpGraph) -> int:
    live = live_bytes(graph)
    return live.index(max(live)) - 1


def bytes_by_kind(graph: OpGraph) -> dict[StorageKind, int]:
    at = peak_index(graph)
    return {kind: sum(times_alive(s, at, graph) * s.num_bytes for s in graph.storages if s.kind == kind) for kind in StorageKind}


def step_s_by_simulation(host_s: Sequence[float], device_s: Sequence[float]) -> float:
    """The end of the last operator, where the host launches one after the other and the device computes one at a time."""
    launched, free = 0.0, 0.0
    for host, device in zip(host_s, device_s, strict=True):
        launched += host
        free = max(free, launched) + device
    return free
