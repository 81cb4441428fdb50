"""Rows of one's own: configurations in a balanced order, really run and measured on the device at hand."""

from perfguard.collect._networks import KINDS
from perfguard.collect._recipe import OPTIMIZERS, SPACES, Recipe, Space
from perfguard.collect._spaces import Draft, drafts, without_missing_packages

__all__ = ["KINDS", "OPTIMIZERS", "SPACES", "Draft", "Recipe", "Space", "drafts", "without_missing_packages"]
