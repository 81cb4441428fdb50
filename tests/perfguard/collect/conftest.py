"""Two threads on two busy cores take thirty times as long."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _always_one_thread(one_thread: None) -> None:
    pass
