"""A workload as a graph of the operators that its step executes."""

from perfguard.graph._costs import OP_KINDS
from perfguard.graph._roofline import roofline_s
from perfguard.graph._schema import Op, OpGraph, Phase, Storage, StorageKind
from perfguard.graph._trace import trace

__all__ = ["OP_KINDS", "Op", "OpGraph", "Phase", "Storage", "StorageKind", "roofline_s", "trace"]
