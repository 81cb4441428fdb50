"""From fused edges to kernels, and from kernels to a graph: laws, and numbers worked by hand."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfguard.graph import Op, OpGraph, Phase, Storage, StorageKind
from perfguard_models.fused_graph import FUSED, kernels_of, merged

MIB = 2**20


def traffic(graph: OpGraph) -> int:
    return sum(op.bytes_read + op.bytes_written for op in graph.ops)


def op(name: str, inputs: tuple[int, ...], outputs: tuple[int, ...], read: int, written: int, flops: int = 10) -> Op:
    return Op(name, "elementwise", Phase.FORWARD, flops, read, written, inputs, outputs, "", (4,), "float32", {})


def chain(*ops: Op, sizes: tuple[int, ...], output: int) -> OpGraph:
    """Storage 0 is the input; every other one is made by the first operator that writes it and dies with its last reader."""
    storages = [Storage(sizes[0], StorageKind.INPUT, -1, len(ops), "x")]
    for index in range(1, len(sizes)):
        birth = next(at for at, made in enumerate(ops) if index in made.outputs)
        death = max(at for at, used in enumerate(ops) if index in (*used.inputs, *used.outputs))
        storages.append(Storage(sizes[index], StorageKind.TEMPORARY, birth, len(ops) if index == output else death, ""))
    return OpGraph(ops, tuple(storages), "infer", "fp32", "nchw")


@st.composite
def graphs(draw: st.DrawFn) -> OpGraph:
    """Random graphs of up to 14 operators, some of which run in place."""
    storages = [Storage(draw(st.integers(0, 64)), StorageKind.INPUT, -1, 0, "x")]
    ops = []
    for index in range(draw(st.integers(1, 14))):
        inputs = tuple(sorted(draw(st.sets(st.integers(0, len(storages) - 1), min_size=1, max_size=3))))
        if draw(st.booleans()) and storages[inputs[-1]].birth >= 0:
            outputs: tuple[int, ...] = (inputs[-1],)
        else:
            outputs = (len(storages),)
            storages.append(Storage(draw(st.integers(0, 64)), StorageKind.TEMPORARY, index, 0, ""))
        read = draw(st.integers(0, 3)) * sum(storages[s].num_bytes for s in inputs)
        ops.append(op(f"op{index}", inputs, outputs, read, sum(storages[s].num_bytes for s in outputs), draw(st.integers(0, 9))))
    lives = []
    for at, storage in enumerate(storages):
        used = [index for index, made in enumerate(ops) if at in (*made.inputs, *made.outputs)]
        death = len(ops) if storage.birth < 0 or draw(st.booleans()) else max(used)
        lives.append(storage._replace(death=death))
    return OpGraph(tuple(ops), tuple(lives), "infer", "fp32", "nchw")


def some_edges(graph: OpGraph, seed: int) -> npt.NDArray[np.int64]:
    """About half of the edges, in a random order."""
    order = np.random.default_rng(seed).permutation(graph.edges.shape[1])
    return order[: len(order) // 2]


@given(graphs(), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_fusion_keeps_flops_and_never_adds_bytes(graph: OpGraph, seed: int) -> None:
    kernels = kernels_of(graph, some_edges(graph, seed))
    fused, _ = merged(graph, kernels)
    assert sorted(index for kernel in kernels for index in kernel) == list(range(len(graph.ops)))
    assert fused.flops == graph.flops
    assert traffic(fused) <= traffic(graph)
    assert len(fused.ops) == len(kernels)
    OpGraph.from_bytes(fused.to_bytes())  # which checks every index
    for index, made in enumerate(fused.ops):
        for storage in made.inputs:
            assert fused.storages[storage].birth <= index <= fused.storages[storage].death


def test_what_only_the_kernel_reads_is_never_written() -> None:
    graph = chain(
        op("convolution", (0,), (1,), MIB, 2 * MIB),
        op("native_batch_norm", (1,), (2,), 2 * MIB, 2 * MIB),
        op("relu", (2,), (3,), 2 * MIB, 2 * MIB),
        sizes=(MIB, 2 * MIB, 2 * MIB, 2 * MIB),
        output=3,
    )
    fused, _ = merged(graph, [[0], [1, 2]])
    kernel = fused.ops[1]
    assert (kernel.bytes_read, kernel.bytes_written, kernel.flops) == (2 * MIB, 2 * MIB, 20)
    assert kernel.attributes[FUSED] == ("native_batch_norm", "relu")
    assert len(fused.storages) == 3  # the input, the convolution's output, and the kernel's
    assert traffic(graph) - traffic(fused) == 4 * MIB
    assert fused.peak_live_bytes == 5 * MIB


def test_kernel_waiting_for_itself_is_not_made() -> None:
    graph = chain(
        op("relu", (0,), (1,), MIB, MIB),
        op("convolution", (1,), (2,), MIB, MIB),
        op("add", (1, 2), (3,), 2 * MIB, MIB),
        sizes=(MIB, MIB, MIB, MIB),
        output=3,
    )
    relu_to_add = np.array([at for at, edge in enumerate(graph.edges.T.tolist()) if edge == [0, 2]])
    assert kernels_of(graph, relu_to_add) == [[0], [1], [2]]
    with pytest.raises(ValueError, match="no order of them is possible"):
        merged(graph, [[0, 2], [1]])
