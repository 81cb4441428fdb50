"""Rows of one's own: configurations in a balanced order, really run and measured on the device at hand."""

from perfguard_research.collect.loop import CPU_MEMORY_BYTES, CollectReport, collect, collecting_device
from perfguard_research.collect.rows import COLUMNS
from perfguard_research.collect.spaces import Draft, drafts, without_missing_packages
from perfguard_research.tables.networks import KINDS
from perfguard_research.tables.recipe import OPTIMIZERS, SPACES, Recipe, Space

Summary = CollectReport  # its name before version 0.2; goes in the next one

__all__ = [
    "COLUMNS",
    "CPU_MEMORY_BYTES",
    "KINDS",
    "OPTIMIZERS",
    "SPACES",
    "CollectReport",
    "Draft",
    "Recipe",
    "Space",
    "Summary",
    "collect",
    "collecting_device",
    "drafts",
    "without_missing_packages",
]
