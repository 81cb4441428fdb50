"""What every test gets: a measurement log of its own, and property tests without deadlines."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("ci", deadline=None)
settings.load_profile("ci")


@pytest.fixture(autouse=True)
def _own_measurement_log(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFGUARD_LOG", str(tmp_path_factory.mktemp("log") / "perfguard.db"))
