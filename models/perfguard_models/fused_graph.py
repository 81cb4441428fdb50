"""Converts the edges that a compiler fuses into kernels, and kernels into the graph that it launches.

A kernel is a set of operators (LILOU's algorithm 1: union-find over the fused edges). Two operators are united only where the
resulting graph still has an order. If a value leaves a kernel and returns through another, no schedule runs that kernel in one
piece. The graph has one operator for each kernel, with all its arithmetic. Its traffic is each input once, and the outputs. A
value that only the kernel's own operators read is never written, and has no storage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from perfguard.graph import Op, OpGraph

FUSED = "fused"
"""Attribute of a fused operator: the names of its parts, in order."""
LIBRARY_KINDS = ("conv", "conv_backward", "matmul", "attention", "rnn")


def kernels_of(graph: OpGraph, fused: npt.NDArray[np.int64]) -> list[list[int]]:
    """The operators of ``graph`` by kernel, each ascending, in the order of their first operators.

    Args:
        graph: any graph.
        fused: columns of ``graph.edges`` that unite the kernels of their ends, the first ones first.
    """
    import networkx as nx  # here, because it takes a quarter of a second, and only compiled steps need it

    order = nx.DiGraph(dependencies(graph))  # of the kernels, each by one of its operators
    order.add_nodes_from(range(len(graph.ops)))
    sets = nx.utils.UnionFind(range(len(graph.ops)))
    for first, second in graph.edges[:, fused].T.tolist():
        a, b = sets[first], sets[second]
        if a == b:
            continue
        direct = [edge for edge in ((a, b), (b, a)) if order.has_edge(*edge)]
        order.remove_edges_from(direct)
        if nx.has_path(order, a, b) or nx.has_path(order, b, a):  # through a third kernel
            order.add_edges_from(direct)
            continue
        sets.union(a, b)
        kept, gone = (a, b) if sets[a] == a else (b, a)
        order.add_edges_from([(kept, after) for after in order.successors(gone)])
        order.add_edges_from([(before, kept) for before in order.predecessors(gone)])
        order.remove_node(gone)
    return sorted(sorted(kernel) for kernel in sets.to_sets())


def dependencies(graph: OpGraph) -> set[tuple[int, int]]:
    """Pairs of operators whose order must stay: one reads what the other wrote, or overwrites what the other read or wrote."""
    pairs = {(first, second) for first, second in graph.edges.T.tolist()}
    users: dict[int, list[int]] = {}  # of each storage: its last writer, and who has read it since
    for index, op in enumerate(graph.ops):
        for storage in op.outputs:
            pairs.update((user, index) for user in users.get(storage, ()))
            users[storage] = [index]
        for storage in op.inputs:
            users.setdefault(storage, []).append(index)
    return {(first, second) for first, second in pairs if first != second}


def merged(graph: OpGraph, kernels: Sequence[Sequence[int]]) -> tuple[OpGraph, list[list[int]]]:
    """The graph in which each of ``kernels`` is one operator, and the operators of ``graph`` in each of them.

    FLOPs are those of ``graph``; no operator moves more bytes than its parts did. Of an operator with several inputs the trace
    knows the bytes read in all; they are divided by the sizes of the storages. A storage without a reader counts as a result.

    Args:
        graph: what eager execution launches.
        kernels: a partition of its operators, such as :func:`kernels_of` makes.

    Raises:
        ValueError: if it is no partition, or no order of the kernels is possible.
    """
    order = _ordered(graph, kernels)
    kernel_of = {op: at for at, kernel in enumerate(order) for op in kernel}
    read_after = _read_elsewhere(graph, kernel_of)
    return _with_lives(graph, [_one(graph, kernel, number, read_after) for number, kernel in enumerate(order)]), order


def _ordered(graph: OpGraph, kernels: Sequence[Sequence[int]]) -> list[list[int]]:
    """The kernels in an order that is possible, as near to the graph's own as can be."""
    import networkx as nx

    kernel_of = {op: at for at, kernel in enumerate(kernels) for op in kernel}
    if len(kernel_of) != len(graph.ops) or sum(map(len, kernels)) != len(graph.ops):
        raise ValueError(f"{len(kernels)} kernels of {sum(map(len, kernels))} operators are no partition of {len(graph.ops)}.")
    pairs = {(kernel_of[first], kernel_of[second]) for first, second in dependencies(graph)}
    waits = nx.DiGraph((a, b) for a, b in pairs if a != b)
    waits.add_nodes_from(range(len(kernels)))
    try:
        order = list(nx.lexicographical_topological_sort(waits, key=lambda at: max(kernels[at])))
    except nx.NetworkXUnfeasible as error:
        raise ValueError("the kernels wait for each other: no order of them is possible.") from error
    return [sorted(kernels[at]) for at in order]


def _read_elsewhere(graph: OpGraph, kernel_of: Mapping[int, int]) -> set[tuple[int, int]]:
    """Pairs (kernel, storage): another kernel reads what the kernel writes there."""
    writer: dict[int, int] = {}
    found: set[tuple[int, int]] = set()
    for index, op in enumerate(graph.ops):
        here = kernel_of[index]
        found.update((writer[storage], storage) for storage in op.inputs if writer.get(storage, here) != here)
        writer.update(dict.fromkeys(op.outputs, here))
    return found


def _one(graph: OpGraph, kernel: Sequence[int], number: int, read_after: set[tuple[int, int]]) -> Op:
    """The operator of the ``number``-th kernel."""
    ops = [graph.ops[index] for index in kernel]
    if len(ops) == 1:
        return ops[0]
    reads: dict[int, float] = {}
    writes: dict[int, float] = {}
    unread: set[int] = set()
    for op in ops:
        unread.difference_update(op.inputs)
        unread.update(op.outputs)
        for storage, num_bytes in _shared_out(graph, op.inputs, op.bytes_read):
            if storage not in writes:  # else it was made in here
                reads[storage] = max(reads.get(storage, 0.0), num_bytes)
        for storage, num_bytes in _shared_out(graph, op.outputs, op.bytes_written):
            writes[storage] = max(writes.get(storage, 0.0), num_bytes)
    stays = {at for at in writes if graph.storages[at].death >= len(graph.ops) or graph.storages[at].birth < 0}
    writes = {at: size for at, size in writes.items() if at in unread or at in stays or (number, at) in read_after}
    main = max(ops, key=lambda op: (op.kind in LIBRARY_KINDS, op.flops))
    return main._replace(
        flops=sum(op.flops for op in ops),
        bytes_read=int(sum(reads.values())),
        bytes_written=int(sum(writes.values())),
        inputs=tuple(reads),
        outputs=tuple(writes),
        shape=ops[-1].shape,
        dtype=ops[-1].dtype,
        attributes={**main.attributes, FUSED: tuple(op.name for op in ops)},
    )


def _shared_out(graph: OpGraph, storages: Sequence[int], num_bytes: int) -> list[tuple[int, float]]:
    """``num_bytes`` over ``storages``, by their sizes."""
    sizes = [graph.storages[storage].num_bytes for storage in storages]
    total = sum(sizes)
    return [
        (storage, num_bytes * (size / total if total else 1 / len(sizes))) for storage, size in zip(storages, sizes, strict=True)
    ]


def _with_lives(graph: OpGraph, ops: Sequence[Op]) -> OpGraph:
    """``graph`` with ``ops``; of its storages those that are left, freed after their last reader."""
    uses = [(storage, index) for index, op in enumerate(ops) for storage in (*op.inputs, *op.outputs)]
    first, last = dict(reversed(uses)), dict(uses)
    end = len(ops)
    kept = [index for index, storage in enumerate(graph.storages) if index in last or storage.birth < 0]
    storages = [
        old._replace(
            birth=-1 if old.birth < 0 else first[index], death=end if old.death >= len(graph.ops) else last.get(index, -1)
        )
        for index, old in ((index, graph.storages[index]) for index in kept)
    ]
    at = {index: position for position, index in enumerate(kept)}
    renamed = (op._replace(inputs=tuple(at[s] for s in op.inputs), outputs=tuple(at[s] for s in op.outputs)) for op in ops)
    return dataclasses.replace(graph, ops=tuple(renamed), storages=tuple(storages))
