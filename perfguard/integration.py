"""Functions of the core for integrations with tuners and trainers, beside the public objects of `perfguard`."""

from perfguard._compiled import is_compiled
from perfguard._optional import why_not_imported
from perfguard._random import random_numbers_kept
from perfguard._warn import warn_user

__all__ = ["is_compiled", "random_numbers_kept", "warn_user", "why_not_imported"]
