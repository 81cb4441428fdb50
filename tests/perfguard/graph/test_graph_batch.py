"""A batch of graphs computes for each of them what plain loops find in its operators and storages."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from perfguard.graph import GraphBatch, OpGraph, replay_allocator, trace
from perfguard.workload import Workload
from tests.models import oracle


def network(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3, groups=width), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(width, 10),
    )  # fmt: skip


def graph_of(width: int, batch: int = 4, make: Callable[[int], nn.Module] = network) -> OpGraph:
    with torch.device("meta"):
        model = make(width)
    return trace(Workload(model, (batch, 3, 16, 16), loss=lambda y: y.float().mean(), optimizer=torch.optim.Adam))


GRAPHS = [graph_of(width, batch) for width, batch in ((8, 4), (5, 64), (40, 1))]
HUGE = GRAPHS[0].with_sizes(GRAPHS[0].sizes.astype(object) * 2**50)


@pytest.mark.parametrize("graphs", [GRAPHS, GRAPHS[:1], [*GRAPHS, HUGE]], ids=["three", "one", "beyond 64 bits"])
def test_batch_equals_oracle(graphs: list[OpGraph]) -> None:
    batch = GraphBatch.of(graphs)
    assert len(batch) == len(graphs)
    for at, graph in enumerate(graphs):
        assert batch[at].content_hash == graph.content_hash
        assert batch.live_bytes[at].tolist() == oracle.live_bytes(graph)
        assert batch.peak_index[at] == oracle.peak_index(graph)
        assert batch.peak_live_bytes[at] == max(oracle.live_bytes(graph))
        assert batch.bytes_by_kind()[at].tolist() == list(oracle.bytes_by_kind(graph).values())
        assert batch.reserved_bytes[at] == replay_allocator(graph).reserved_bytes
        assert batch.flops[at] == sum(op.flops for op in graph.ops)
        assert batch.costs[:, at].T.tolist() == [[op.flops, op.bytes_read, op.bytes_written] for op in graph.ops]


def test_batch_with_columns_equals_batch_of_all_sizes() -> None:
    whole = GraphBatch.of(GRAPHS)
    sizes, columns = np.unique(np.stack([graph.sizes for graph in GRAPHS]), axis=1, return_inverse=True)
    batch = GraphBatch(whole.skeleton, sizes, columns.reshape(-1))
    assert [graph.content_hash for graph in batch] == [graph.content_hash for graph in GRAPHS]
    assert batch[1:].reserved_bytes.tolist() == whole.reserved_bytes[1:].tolist()
    assert batch[np.array([2, 0])].live_bytes.tolist() == whole.live_bytes[[2, 0]].tolist()
    assert batch.attribute("in_shape").tolist() == whole.attribute("in_shape").tolist()


def test_attribute_fills_up_what_operators_do_not_have() -> None:
    batch = GraphBatch.of(GRAPHS)
    index = next(at for at, op in enumerate(GRAPHS[0].ops) if op.attributes.get("groups", 1) > 1)
    found = batch.attribute("groups", ops=np.array([index, len(GRAPHS[0].ops) - 1]), length=2, default=0)
    assert found.tolist() == [[[width, 0], [0, 0]] for width in (8, 5, 40)]
    assert batch.attribute("shape", length=7)[0, index, 4:].tolist() == [1, 1, 1]


def test_names_and_flags_are_no_sizes() -> None:
    # A fused kernel names its operators in a tuple.
    ops = tuple(op._replace(attributes={**op.attributes, "fused": ("relu", "add"), "flag": True}) for op in GRAPHS[0].ops)
    graph = replace(GRAPHS[0], ops=ops)
    assert graph.sizes.tolist() == GRAPHS[0].sizes.tolist()
    assert graph.with_sizes(graph.sizes).content_hash == graph.content_hash


def test_graph_batch_refuses_different_operators() -> None:
    with pytest.raises(ValueError, match="must run the same operators"):
        GraphBatch.of([GRAPHS[0], graph_of(8, make=lambda width: nn.Conv2d(3, width, 1))])


def test_with_sizes_shares_only_the_skeleton() -> None:
    other = GRAPHS[0].with_sizes(GRAPHS[1].sizes)
    assert other.skeleton is GRAPHS[0].skeleton is other.skeleton.skeleton
    assert other.edges is GRAPHS[0].edges
    assert "ops" not in other.__dict__  # until somebody reads them
    assert other.content_hash == GRAPHS[1].content_hash
    again: Any = pickle.loads(pickle.dumps(other))
    assert (again.content_hash, again.live_bytes.tolist()) == (other.content_hash, other.live_bytes.tolist())


def test_graph_that_nobody_holds_is_freed_at_once() -> None:
    graph = graph_of(8)
    assert graph.reserved_bytes > graph.peak_live_bytes
    reference = weakref.ref(graph)
    gc.disable()
    try:
        del graph
        assert reference() is None
    finally:
        gc.enable()
