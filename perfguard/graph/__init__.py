"""A workload as a graph of the operators that its step executes."""

import warnings
from typing import Any

from perfguard.graph._account import OperatorCost, bytes_by_module, cost_by_operator, timeline
from perfguard.graph._allocator import AllocatorReplay, AllocatorSettings, CachingAllocator, replay_allocator
from perfguard.graph._cache import TraceCache
from perfguard.graph._costs import KIND_INDEX, OP_KINDS
from perfguard.graph._opaque import opaque
from perfguard.graph._parametric import ParametricGraph
from perfguard.graph._roofline import channel_padding, channel_padding_of_all, roofline_of_all, roofline_s
from perfguard.graph._schema import Op, OpGraph, Phase, Storage, StorageKind, are_sizes
from perfguard.graph._sequence import SequenceTracer
from perfguard.graph._sized import SizedGraphs
from perfguard.graph._trace import TRACED_AS_EAGER, trace
from perfguard.graph._unknown import unknown_operators, unknown_span

__all__ = [
    "KIND_INDEX",
    "OP_KINDS",
    "TRACED_AS_EAGER",
    "AllocatorReplay",
    "AllocatorSettings",
    "CachingAllocator",
    "Op",
    "OpGraph",
    "OperatorCost",
    "ParametricGraph",
    "Phase",
    "SequenceTracer",
    "SizedGraphs",
    "Storage",
    "StorageKind",
    "TraceCache",
    "are_sizes",
    "bytes_by_module",
    "channel_padding",
    "channel_padding_of_all",
    "cost_by_operator",
    "opaque",
    "replay_allocator",
    "roofline_of_all",
    "roofline_s",
    "timeline",
    "trace",
    "unknown_operators",
    "unknown_span",
]


def __getattr__(name: str) -> Any:
    if name != "ElasticGraph":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        "perfguard.graph.ElasticGraph is deprecated and goes in the next version. Its name is ParametricGraph.",
        DeprecationWarning,
        stacklevel=2,
    )
    return ParametricGraph
