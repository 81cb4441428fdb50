"""What the tests of dry runs share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from perfguard.capture import Ask, DryRuns
from perfguard.devices import resolve_device


@pytest.fixture
def dry() -> Iterator[Callable[..., DryRuns]]:
    """Makes dry runs of an objective on an A100, and ends them."""
    made: list[DryRuns] = []

    def make(objective: Callable[[Ask], object], **settings: Any) -> DryRuns:
        made.append(DryRuns(objective, resolve_device("a100"), **settings))
        return made[-1]

    yield make
    for runs in made:
        runs.close()
