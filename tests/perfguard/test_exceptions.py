"""What PerfGuard says without being asked: where the log is, and how many runs it brings."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from perfguard import Guard, MeasurementStore, exceptions
from tests.doubles import TOY_CPU, ReplayPredictor
from tests.perfguard.log_rows import DEVICE, LAUNCHED, MEASUREMENT, make_graph, record


@pytest.fixture(autouse=True)
def a_fresh_logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As a process finds it that has just begun."""
    monkeypatch.delenv("PERFGUARD_QUIET")
    logger = logging.getLogger("perfguard")
    before = logger.level, list(logger.handlers), logger.propagate
    logger.setLevel(logging.NOTSET)
    logger.handlers.clear()
    logger.propagate = True  # else pytest adds handlers of its own
    monkeypatch.setattr(exceptions, "_said", set())
    yield
    logger.level, logger.handlers[:], logger.propagate = before


def make_guard(log: str | Path | bool) -> Guard:
    return Guard(DEVICE, predictor=ReplayPredictor(), log=str(log) if log else False)


def test_guard_says_once_where_its_log_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says what the log brings, too."""
    # Finding 8: verdicts depended on a file in the home directory that the user was never told of.
    path = tmp_path / "log.db"
    with MeasurementStore(path) as store:
        for trial in range(3):
            decision_id = record(store, trial, graph=make_graph(), device=DEVICE, verdict=LAUNCHED)
            store.record_measurement(decision_id, MEASUREMENT)
    make_guard(path)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"[PerfGuard] The measurement log {path} brings 3 runs of Toy")
    make_guard(path)
    assert capsys.readouterr().err == ""
    make_guard(tmp_path / "new.db")
    assert f"{tmp_path / 'new.db'} has no run of Toy yet. With" in capsys.readouterr().err, "it is not here: nothing to calibrate"
    Guard(TOY_CPU, predictor=ReplayPredictor(), log=str(tmp_path / "cpu.db"))
    assert "has no run of Toy yet; `perfguard calibrate --gpu cpu` measures some in a minute." in capsys.readouterr().err


def test_guard_is_quiet_where_asked_or_without_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_guard(log=False)
    monkeypatch.setenv("PERFGUARD_QUIET", "1")
    make_guard(tmp_path / "a.db")
    monkeypatch.delenv("PERFGUARD_QUIET")
    logging.getLogger("perfguard").setLevel(logging.WARNING)
    make_guard(tmp_path / "b.db")
    assert capsys.readouterr().err == ""


def test_own_handler_replaces_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []

    class Mine(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("perfguard").addHandler(Mine())
    make_guard(tmp_path / "log.db")
    assert len(lines) == 1
    assert capsys.readouterr().err == ""
