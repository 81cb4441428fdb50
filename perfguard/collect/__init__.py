"""Rows of one's own: configurations in a balanced order, really run and measured on the device at hand."""

from perfguard.collect._collect import CPU_MEMORY_BYTES, CollectReport, collect, collecting_device
from perfguard.collect._rows import COLUMNS
from perfguard.collect._spaces import Draft, drafts, without_missing_packages
from perfguard.tables._networks import KINDS
from perfguard.tables._recipe import OPTIMIZERS, SPACES, Recipe, Space

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
