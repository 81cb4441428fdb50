"""A workload as a graph of the operators that its step executes."""

import warnings
from typing import TYPE_CHECKING, Any

from perfguard.graph._account import OperatorCost, bytes_by_module, cost_by_operator, memory_parts, timeline
from perfguard.graph._allocator import AllocatorReplay, AllocatorSettings, CachingAllocator, replay_allocator
from perfguard.graph._cache import TraceCache
from perfguard.graph._costs import KIND_INDEX, OP_KINDS
from perfguard.graph._graph_batch import GraphBatch
from perfguard.graph._op import Op, Phase, Storage, StorageKind
from perfguard.graph._opaque import opaque
from perfguard.graph._parametric import ParametricGraph
from perfguard.graph._roofline import batch_roofline_s, batch_work_s, kinds_in_tf32, roofline_s
from perfguard.graph._schema import OpGraph
from perfguard.graph._sequence import SequenceTracer
from perfguard.graph._trace import TRACED_AS_EAGER, trace
from perfguard.graph._unknown import assumed_log_sigma, has_assumed_sizes, unknown_operators, unknown_span

__all__ = [
    "KIND_INDEX",
    "OP_KINDS",
    "TRACED_AS_EAGER",
    "AllocatorReplay",
    "AllocatorSettings",
    "CachingAllocator",
    "GraphBatch",
    "Op",
    "OpGraph",
    "OperatorCost",
    "ParametricGraph",
    "Phase",
    "SequenceTracer",
    "Storage",
    "StorageKind",
    "TraceCache",
    "assumed_log_sigma",
    "batch_roofline_s",
    "batch_work_s",
    "bytes_by_module",
    "cost_by_operator",
    "has_assumed_sizes",
    "kinds_in_tf32",
    "memory_parts",
    "opaque",
    "replay_allocator",
    "roofline_s",
    "timeline",
    "trace",
    "unknown_operators",
    "unknown_span",
]


if not TYPE_CHECKING:  # a checker would take any name for one that is here

    def __getattr__(name: str) -> Any:
        if name != "ElasticGraph":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        warnings.warn(
            "perfguard.graph.ElasticGraph is deprecated and goes in the next version. Its name is ParametricGraph.",
            DeprecationWarning,
            stacklevel=2,
        )
        return ParametricGraph
