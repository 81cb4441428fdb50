"""How loops of others fetch their batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def ahead(loader: Any) -> Iterator[Any]:
    """Fetch a batch before the last one is used, as Accelerate does."""
    batches = iter(loader)
    current = next(batches)
    for following in batches:
        yield current
        current = following
    yield current
