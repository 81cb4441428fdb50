"""Compiled inference: which operators torch.compile launches as one kernel, and what is left of each one's time.

A convolution, a product, attention and a recurrent layer are library kernels. Inductor fuses what is left with its neighbours
wherever an order of kernels stays possible. The nearest operators are united first. This rule has 1.4 to 2.3 points fewer
of Inductor's own decisions right than LILOU's network, which learns them (docs/results/fusion.md).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from perfguard.devices import Device
from perfguard.graph import TRACED_AS_EAGER, OpGraph, roofline_s
from perfguard_models.fused_graph import LIBRARY_KINDS, kernels_of, merged

_NOTE = "torch.compile: operators merged into kernels as Inductor is expected to ({kernels} kernels for {ops} operators)"


class Compiled(NamedTuple):
    """A compiled inference: what eager execution would launch, and what is launched."""

    eager: OpGraph
    """The graph without the option "compiled", for weights that were trained on eager runs only."""
    graph: OpGraph
    """One operator for each kernel."""
    kernels: list[list[int]]
    """Operators of ``eager`` in each operator of ``graph``."""

    def time_shares(self, device: Device) -> npt.NDArray[np.float64]:
        """The share of each eager operator's time that is left after fusion.

        It is the roofline of its kernel over the sum of the rooflines of the kernel's operators. So a learnt factor over an
        operator's roofline stays. In (0, 1]. Shape: (len(eager.ops),).
        """
        alone, together = roofline_s(self.eager, device), roofline_s(self.graph, device)
        shares = np.ones(len(self.eager.ops))
        for kernel, seconds in zip(self.kernels, together, strict=True):
            shares[kernel] = min(1.0, float(seconds) / float(alone[kernel].sum()))
        return shares

    def memory_share(self, device: Device) -> float:
        """The peak with the kernels over the eager peak, both with the context."""
        peaks = (graph.peak_live_bytes + device.context_bytes for graph in (self.graph, self.eager))
        kernels, eager = (max(peak, 1) for peak in peaks)
        return kernels / eager


_compiled: WeakKeyDictionary[OpGraph, Compiled] = WeakKeyDictionary()


def as_compiled(graph: OpGraph) -> Compiled | None:
    """The kernels that are launched for ``graph``, if it is a compiled inference.

    None: it is not compiled, or it is training. Nobody compared the rule with backward operators, so its operators stay those of
    eager code, and ``unmodelled`` says so. Weights that know the option "compiled" may still predict a shorter time.
    """
    if "compiled" not in graph.options or graph.mode != "infer":
        return None
    if graph not in _compiled:
        eager = dataclasses.replace(graph, options=tuple(option for option in graph.options if option != "compiled"))
        made, kernels = merged(eager, kernels_of(eager, fused_edges(eager)))
        note = _NOTE.format(kernels=len(made.ops), ops=len(graph.ops))
        unmodelled = (note, *(text for text in graph.unmodelled if text != TRACED_AS_EAGER))
        _compiled[graph] = Compiled(eager, dataclasses.replace(made, unmodelled=unmodelled), kernels)
    return _compiled[graph]


def fused_edges(graph: OpGraph) -> npt.NDArray[np.int64]:
    """The edges whose ends a compiler fuses, by their columns in ``graph.edges``, the shortest first."""
    is_library = np.array([op.kind in LIBRARY_KINDS for op in graph.ops], dtype=bool)
    source, sink = graph.edges
    edges = np.flatnonzero(~(is_library[source] | is_library[sink]))
    return edges[np.argsort((sink - source)[edges], kind="stable")]


__all__ = ["Compiled", "as_compiled", "fused_edges"]
