"""OpGraph: liveness, data flow, and the way to bytes and back."""

from __future__ import annotations

import gc
import json
import weakref
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfguard.devices import resolve_device
from perfguard.exceptions import WorkloadError
from perfguard.graph import Op, OpGraph, Phase, Storage, StorageKind
from perfguard.unmodelled import Unmodelled
from tests.models import oracle


def op(inputs: tuple[int, ...], outputs: tuple[int, ...], **attributes: Any) -> Op:
    return Op("relu", "activation", Phase.FORWARD, 6, 8, 8, inputs, outputs, "net.1", (2, 1), "float32", attributes)


def graph_of(ops: tuple[Op, ...], storages: tuple[Storage, ...]) -> OpGraph:
    return OpGraph(
        ops, storages, mode="train", precision="fp32", layout="nchw", unmodelled=(Unmodelled("little", "nothing much"),)
    )


#                        -1     0     1     2
#   0  weight   100       ■     ■     ■     ■   outlives the step
#   1  input     20       ■     ■                read by the first operator only
#   2  hidden     8             ■     ■          in place at 1
#   3  output     3                         ■   outlives the step
#   4  scratch   50                   ■
BY_HAND = graph_of(
    ops=(op((0, 1), (2,)), op((0, 2), (2, 4)), op((2, 4), (3,))),
    storages=(
        Storage(100, StorageKind.PARAMETER, -1, 3, "weight"),
        Storage(20, StorageKind.INPUT, -1, 0, "inputs"),
        Storage(8, StorageKind.ACTIVATION, 0, 1, ""),
        Storage(3, StorageKind.ACTIVATION, 2, 3, ""),
        Storage(50, StorageKind.TEMPORARY, 1, 1, ""),
    ),
)


@st.composite
def graphs(draw: st.DrawFn) -> OpGraph:
    num_ops = draw(st.integers(0, 8))
    storages = []
    for _ in range(draw(st.integers(1, 8))):
        birth = draw(st.integers(-1, num_ops - 1))
        death = draw(st.integers(birth, num_ops) | st.integers(num_ops, 2 * num_ops))
        storages.append(Storage(draw(st.integers(0, 2**40)), draw(st.sampled_from(StorageKind)), birth, death, "m"))
    indices = st.lists(st.integers(0, len(storages) - 1), max_size=3, unique=True).map(tuple)
    ops = [op(draw(indices), draw(indices), groups=draw(st.integers(1, 4))) for _ in range(num_ops)]
    return graph_of(tuple(ops), tuple(storages))


def test_live_bytes_by_hand() -> None:
    assert BY_HAND.live_bytes.tolist() == [120, 128, 158, 103]
    assert (BY_HAND.peak_index, BY_HAND.peak_live_bytes) == (1, 158)


def test_bytes_by_kind_at_the_peak_and_before_the_step() -> None:
    at_peak = {kind: num_bytes for kind, num_bytes in BY_HAND.bytes_by_kind().items() if num_bytes}
    assert at_peak == {StorageKind.PARAMETER: 100, StorageKind.ACTIVATION: 8, StorageKind.TEMPORARY: 50}
    assert BY_HAND.bytes_by_kind(-1)[StorageKind.INPUT] == 20


@settings(max_examples=30)
@given(graphs())
def test_live_bytes_equal_a_slow_replay(graph: OpGraph) -> None:
    replayed = oracle.live_bytes(graph)
    assert graph.live_bytes.tolist() == replayed
    assert sum(graph.bytes_by_kind().values()) == graph.peak_live_bytes


@given(graphs())
def test_edges_go_from_earlier_to_later_operators(graph: OpGraph) -> None:
    earlier, later = graph.edges
    assert np.all(earlier < later)
    slow = {
        (max(i for i in range(j) if s in graph.ops[i].outputs), j)
        for j, reader in enumerate(graph.ops)
        for s in reader.inputs
        if any(s in graph.ops[i].outputs for i in range(j))
    }
    assert set(map(tuple, graph.edges.T.tolist())) == slow


@settings(max_examples=30)
@given(graphs())
def test_a_graph_survives_the_way_to_bytes_and_back(graph: OpGraph) -> None:
    again = OpGraph.from_bytes(graph.to_bytes())
    assert again.content_hash == graph.content_hash
    assert (again.ops, again.storages, again.unmodelled) == (graph.ops, graph.storages, graph.unmodelled)
    assert all(isinstance(storage.kind, StorageKind) for storage in again.storages)


@pytest.mark.parametrize(
    "other",
    [
        replace(BY_HAND, mode="infer"),
        replace(BY_HAND, precision="bf16"),
        replace(BY_HAND, ops=BY_HAND.ops[:2]),
        replace(BY_HAND, ops=(op((0, 1), (2,), groups=2), *BY_HAND.ops[1:])),
        replace(BY_HAND, storages=(*BY_HAND.storages[:4], BY_HAND.storages[4]._replace(num_bytes=51))),
    ],
)
def test_another_content_has_another_hash(other: OpGraph) -> None:
    assert other.content_hash != BY_HAND.content_hash


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: b"not zlib",
        lambda data: data[: len(data) // 2],
        lambda data: zlib.compress(b"[1, 2]"),
        lambda data: zlib.compress(b'{"schema": 1}'),
        lambda data: zlib.compress(zlib.decompress(data).replace(b'"ops":[', b'"ops":[[1,2],')),
        lambda data: zlib.compress(zlib.decompress(data).replace(b'"float32",{}', b'"float32",[]')),
    ],
)
def test_damaged_bytes_are_refused(damage: Any) -> None:
    with pytest.raises(WorkloadError, match=r"A stored graph is damaged .*trace the workload again"):
        OpGraph.from_bytes(damage(BY_HAND.to_bytes()))


def test_a_graph_of_a_newer_perfguard_is_refused() -> None:
    document = json.loads(zlib.decompress(BY_HAND.to_bytes()))
    document["schema"] += 1
    with pytest.raises(WorkloadError, match=r"has schema 5, this PerfGuard reads up to 4.*Update perfguard"):
        OpGraph.from_bytes(zlib.compress(json.dumps(document).encode()))


def test_from_bytes_refuses_endless_unpacking() -> None:
    with pytest.raises(WorkloadError, match="larger than 268435456 bytes; it is refused"):
        OpGraph.from_bytes(zlib.compress(b" " * (2**28 + 1), 1))


def test_arrays_beyond_64_bits_equal_oracle() -> None:
    storages = tuple(storage._replace(num_bytes=storage.num_bytes * 2**60) for storage in BY_HAND.storages)
    huge = replace(BY_HAND, storages=storages, ops=tuple(one._replace(flops=2**63) for one in BY_HAND.ops))
    assert huge.live_bytes.tolist() == oracle.live_bytes(huge)
    assert huge.peak_index == oracle.peak_index(huge)
    assert huge.bytes_by_kind() == oracle.bytes_by_kind(huge)
    assert (huge.flops, huge.costs[0].tolist()) == (3 * 2**63, [2**63] * 3)


def test_graph_that_nobody_holds_is_freed_at_once() -> None:
    # A study makes thousands; a cycle of references would keep each until the garbage collector runs.
    graph = replace(BY_HAND)
    assert graph.reserved_bytes(resolve_device("a100")) > graph.peak_live_bytes
    reference = weakref.ref(graph)
    gc.disable()
    try:
        del graph
        assert reference() is None
    finally:
        gc.enable()
