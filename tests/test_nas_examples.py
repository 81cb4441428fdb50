"""The examples of architecture search run as scripts."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.mark.slow
def test_the_evolution_runs_measures_and_draws(tmp_path: Path) -> None:
    words = ["--measured", "4", "--trials", "7", "--epochs", "1", "--out", str(tmp_path)]
    command = [sys.executable, str(EXAMPLES / "nas_evolution.py"), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for expected in ("4 random cells measured", "evolution", "error of the predicted latencies"):
        assert expected in done.stdout
    assert (tmp_path / "nas_evolution.png").read_bytes().startswith(b"\x89PNG")


def test_the_space_has_the_size_of_the_benchmark_and_networks_that_run() -> None:
    space = runpy.run_path(str(EXAMPLES / "nas_space.py"))
    assert len(space["OPERATORS"]) ** len(space["EDGES"]) == 15_625
    cell = ("conv3x3", "skip", "pool3x3", "none", "conv1x1", "skip")
    assert space["is_connected"](cell)
    assert not space["is_connected"](("conv3x3", "none", "none", "none", "none", "none"))
    assert space["network"](cell, width=4, depth=1, channels=1)(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
