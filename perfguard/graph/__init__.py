"""A workload as a graph of the operators that its step executes."""

from perfguard.graph.allocator import AllocatorReplay, replay_allocator
from perfguard.graph.cache import TraceCache
from perfguard.graph.costs import KIND_INDEX, OP_KINDS
from perfguard.graph.kernels import opaque
from perfguard.graph.op import Op, Phase, Storage, StorageKind
from perfguard.graph.opgraph import OpGraph
from perfguard.graph.roofline import (
    OperatorCost,
    bytes_by_module,
    cost_by_operator,
    kinds_in_tf32,
    memory_parts,
    roofline_s,
    timeline,
    work_s,
)
from perfguard.graph.selections import assumed_log_sigma, has_assumed_sizes, unknown_operators, unknown_span
from perfguard.graph.trace import trace

__all__ = [
    "KIND_INDEX",
    "OP_KINDS",
    "AllocatorReplay",
    "Op",
    "OpGraph",
    "OperatorCost",
    "Phase",
    "Storage",
    "StorageKind",
    "TraceCache",
    "assumed_log_sigma",
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
    "work_s",
]
