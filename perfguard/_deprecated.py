"""Names that moved: their old modules answer for one version more."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

_MISSING = object()


def moved(old: str, new: str, renamed: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """Return a module's ``__getattr__`` (PEP 562) that finds a name of the module ``old`` in ``new``, and warns.

    Args:
        old: the module that is deprecated.
        new: the module that has the names now.
        renamed: the new name of each that changed.
    """

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        present = (renamed or {}).get(name, name)
        value = getattr(importlib.import_module(new), present, _MISSING)
        if value is _MISSING:
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        message = f"{old}.{name} is deprecated and goes in the next version. Import {present} from {new} instead."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return value

    return find
