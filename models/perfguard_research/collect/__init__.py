"""Rows of one's own: configurations in a balanced order, really run and measured on the device at hand."""

from perfguard_research.collect.loop import COLUMNS, CPU_MEMORY_BYTES, CollectReport, collect, collecting_device
from perfguard_research.collect.spaces import SPACES, Draft, Space, drafts, without_missing_packages

__all__ = [
    "COLUMNS",
    "CPU_MEMORY_BYTES",
    "SPACES",
    "CollectReport",
    "Draft",
    "Space",
    "collect",
    "collecting_device",
    "drafts",
    "without_missing_packages",
]
