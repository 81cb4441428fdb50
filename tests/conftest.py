"""What every test gets: a log of its own, one thread, property tests without deadlines, and PostgreSQL for the asking."""

from __future__ import annotations

import gc
import itertools
import os
import sys

import pytest
from hypothesis import settings

from tests.postgres import postgres, postgres_url

__all__ = ["postgres", "postgres_url"]

# Tests compute little, and several processes run them at once: more threads would only wait for each other. PyTorch, scikit-learn
# and child processes read this when they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray gives its workers a niceness of 15. Beside two busy processes on two processors they then take more than a minute to start.
os.environ.setdefault("RAY_worker_niceness", "0")

_numbers = itertools.count()

settings.register_profile("ci", deadline=None)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-models", action="store_true", help="trace every timm model of the coverage list, not a sample")
    parser.addoption("--fuzz-files", type=int, default=50, help="damaged ONNX files to read (default: 50)")


@pytest.fixture(autouse=True, scope="module")
def _little_to_collect() -> None:
    """Measurements and dry runs collect garbage. What was imported before need not be looked at each time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _own_measurement_log(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not mktemp, which lists all folders of all tests before it makes another.
    monkeypatch.setenv("PERFGUARD_LOG", str(tmp_path_factory.getbasetemp() / f"log-{next(_numbers)}" / "perfguard.db"))
    monkeypatch.setenv("PERFGUARD_QUIET", "1")


@pytest.fixture(autouse=True)
def _accelerate_begins_anew() -> None:
    """It keeps its device, its precision and its ranks for the whole process."""
    if "accelerate" in sys.modules:
        sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)
