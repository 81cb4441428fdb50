"""The garbage collector, out of the way for a moment."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector. A trace makes thousands of small objects, which would start many collections, and no cycles
    that matter. A storage also dies with its last reference, and not at a later collection.

    A graph is thousands of small objects, none in cycles that matter, and to make them would set the collector off again and
    again. While a step is traced, a storage then also dies with its last name, and not when a collection happens to run.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
