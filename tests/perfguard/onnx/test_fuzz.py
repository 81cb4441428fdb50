"""Damaged files neither crash nor hang the reader, nor take more than a gigabyte: `pytest --fuzz-files 10000` reads more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).with_name("fuzz.py")
_LEAST_SHARE = 0.02


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_damaged_files_are_read_or_refused(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    number = request.config.getoption("--fuzz-files")
    command = [sys.executable, str(FUZZ), str(number), "8", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    counts = {name: int(value) for name, value in map(str.split, done.stdout.splitlines())}
    assert counts["read"] + counts["refused"] >= number
    assert min(counts["read"], counts["refused"]) >= _LEAST_SHARE * number, (
        "all of one sort: the damage is too great or too small"
    )
    assert counts["peak_mib"] < 1024
