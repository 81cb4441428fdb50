"""What every test gets: a measurement log of its own, property tests without deadlines, and PostgreSQL for the asking."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.postgres import postgres, postgres_url

__all__ = ["postgres", "postgres_url"]

settings.register_profile("ci", deadline=None)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-models", action="store_true", help="trace every timm model of the coverage list, not a sample")
    parser.addoption("--fuzz-files", type=int, default=500, help="damaged ONNX files to read (default: 500)")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Of PyTorch, for tensors so small that threads would only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _own_measurement_log(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFGUARD_LOG", str(tmp_path_factory.mktemp("log") / "perfguard.db"))
    monkeypatch.setenv("PERFGUARD_QUIET", "1")
