"""Deprecated: packing is a package of its own, `perfguard_packing`."""

from perfguard._deprecated import moved

__getattr__ = moved("perfguard.packing", "perfguard_packing")
