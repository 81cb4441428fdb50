"""Deprecated: packing is a package of its own, `perfguard_packing`."""

from __future__ import annotations

import importlib
import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    warnings.warn(
        f"perfguard.packing is deprecated and goes in the next version. Import {name} from perfguard_packing instead.",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(importlib.import_module("perfguard_packing"), name)
