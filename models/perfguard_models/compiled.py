"""Compiled inference: which tensors torch.compile never writes, and what is left of the time and the memory.

A convolution, a product, attention and a recurrent layer are library kernels. Inductor generates kernels for what is left. Here
an edge is fused, and its ends are in one kernel, if neither is a library kernel and as many library kernels run before one as
before the other. So no kernel waits for itself: a library kernel between two operators raises that number.

A kernel reads each of its inputs once, and writes what another kernel reads, and results. What remains inside is never written
and has no storage. docs/results/fusion.md compares this rule with the decisions of Inductor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from perfguard.devices import Device
from perfguard.graph import OpGraph, roofline_s, work_s
from perfguard.unmodelled import COMPILED_KERNELS, TRACED_AS_EAGER
from perfguard_models.features.step import MATRIX_KINDS


class Compiled(NamedTuple):
    """A compiled inference with N operators: what eager execution would launch, and what is launched."""

    eager: OpGraph
    """The graph without the option "compiled", for weights that were trained on eager runs only."""
    graph: OpGraph
    """The same operators with the bytes that their kernels move. A storage that is never written has no bytes."""
    kernel: npt.NDArray[np.int64]  # shape: (N,), the number of the kernel of each operator

    def time_shares(self, device: Device) -> npt.NDArray[np.float64]:
        """The share of each eager operator's time that is left after fusion.

        It is the roofline of its kernel over the sum of the rooflines of the kernel's operators. So a learnt factor over an
        operator's roofline stays. In (0, 1]. Shape: (N,).
        """
        compute_s, traffic_s = (np.bincount(self.kernel, seconds) for seconds in work_s(self.graph, device))
        together = np.maximum(np.maximum(compute_s, traffic_s), device.launch_overhead_s)
        alone = np.bincount(self.kernel, roofline_s(self.eager, device))
        return np.asarray(np.minimum(1.0, together / alone)[self.kernel])

    def memory_share(self, device: Device) -> float:
        """The peak with the kernels over the eager peak, both with the context."""
        peaks = (graph.peak_live_bytes + device.context_bytes for graph in (self.graph, self.eager))
        kernels, eager = (max(peak, 1) for peak in peaks)
        return kernels / eager


def as_compiled(graph: OpGraph) -> Compiled | None:
    """The kernels that are launched for ``graph``, if it is a compiled inference.

    None: it is not compiled, or it is training. Nobody compared the rule with backward operators, so its operators stay those of
    eager code, and ``unmodelled`` says so. Weights that know the option "compiled" may still predict a shorter time.
    """
    if "compiled" not in graph.options or graph.mode != "infer":
        return None
    eager = dataclasses.replace(graph, options=tuple(option for option in graph.options if option != "compiled"))
    kernel = kernels_of(eager)
    note = COMPILED_KERNELS.of(len(set(kernel.tolist())), len(graph.ops))
    unmodelled = (note, *(gap for gap in graph.unmodelled if gap != TRACED_AS_EAGER))
    return Compiled(eager, dataclasses.replace(without_inner_tensors(eager, kernel), unmodelled=unmodelled), kernel)


def fused_edges(graph: OpGraph) -> npt.NDArray[np.bool_]:
    """Whether a compiler fuses the ends of each edge. Shape: (num_edges,)."""
    is_library = np.array([op.kind in MATRIX_KINDS for op in graph.ops], dtype=bool)
    before = np.zeros(len(graph.ops), dtype=np.int64)  # library kernels that must run before each operator, one after the other
    source, sink = graph.edges
    for first, then in graph.edges.T.tolist():  # ordered by the second
        before[then] = max(before[then], before[first] + is_library[first])
    return np.asarray(~is_library[source] & ~is_library[sink] & (before[source] == before[sink]))


def kernels_of(graph: OpGraph) -> npt.NDArray[np.int64]:
    """The number of the kernel of each operator: operators that fused edges connect are in one. Shape: (N,)."""
    kernel = np.arange(len(graph.ops))
    for first, then in graph.edges[:, fused_edges(graph)].T.tolist():
        kernel[kernel == kernel[then]] = kernel[first]
    return np.unique(kernel, return_inverse=True)[1]


class _Tensor(NamedTuple):
    """What one operator writes to a storage. Others may write there before and after."""

    storage: int
    writer: int
    """-1: it was there before the step."""


def without_inner_tensors(graph: OpGraph, kernel: npt.NDArray[np.int64]) -> OpGraph:
    """``graph`` without the traffic and the storages of tensors that never leave their ``kernel`` (N,).

    Of an operator with several inputs, the trace knows the bytes read in all. They are divided by the sizes of the storages, and
    so are the bytes written.
    """
    own = kernel.tolist()
    sizes = [storage.num_bytes for storage in graph.storages]
    reads = list(_reads(graph))
    passing = {at for at, storage in enumerate(graph.storages) if storage.birth >= 0 and storage.death < len(own)}
    outside = {tensor for at, tensors in enumerate(reads) for tensor in tensors if own[tensor.writer] != own[at]}
    inner = {t for tensors in reads for t in tensors if t.storage in passing and t.writer >= 0} - outside
    held: set[tuple[int, _Tensor]] = set()  # kernels, and the tensors that they have read or made
    written: set[int] = set()
    ops = []

    def part(num_bytes: int, kept: Sequence[int], storages: Sequence[int]) -> int:
        return int(num_bytes * (sum(sizes[s] for s in kept) / max(sum(sizes[s] for s in storages), 1)))

    for at, op in enumerate(graph.ops):
        read = [tensor for tensor in reads[at] if (own[at], tensor) not in held]
        made = [_Tensor(storage, at) for storage in op.outputs]
        left = [tensor.storage for tensor in made if tensor not in inner]
        held.update((own[at], tensor) for tensor in (*read, *made))
        written.update(left)
        num_read = part(op.bytes_read, [tensor.storage for tensor in read], op.inputs)
        ops.append(op._replace(bytes_read=num_read, bytes_written=part(op.bytes_written, left, op.outputs)))
    deaths = _last_reads(reads, inner)
    gone = {tensor.storage for tensor in inner} - written
    storages = (
        old._replace(num_bytes=0 if at in gone else old.num_bytes, death=deaths.get(at, old.death)) if at in passing else old
        for at, old in enumerate(graph.storages)
    )
    return dataclasses.replace(graph, ops=tuple(ops), storages=tuple(storages))


def _reads(graph: OpGraph) -> Iterator[list[_Tensor]]:
    """Yield the tensors that each operator reads."""
    writer: dict[int, int] = {}
    for at, op in enumerate(graph.ops):
        yield [_Tensor(storage, writer.get(storage, -1)) for storage in op.inputs]
        writer.update(dict.fromkeys(op.outputs, at))


def _last_reads(reads: Sequence[Sequence[_Tensor]], inner: Container[_Tensor]) -> dict[int, int]:
    """The operator after which each storage is free. A reader of what is never written runs with its own readers."""
    runs = list(range(len(reads)))
    found = dict[int, int]()
    for at in reversed(range(len(reads))):
        for tensor in reads[at]:
            found[tensor.storage] = max(found.get(tensor.storage, 0), runs[at])
            if tensor in inner:
                runs[tensor.writer] = max(runs[tensor.writer], runs[at])
    return found
