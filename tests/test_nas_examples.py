"""The examples of architecture search run as scripts."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from tests.warm import run_warm

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run_example(name: str, words: list[str], cwd: Path) -> str:
    status, printed = run_warm(str(EXAMPLES / name), *words, "--out", str(cwd), cwd=cwd, timeout_s=280)
    assert status == 0, printed
    return printed


@pytest.mark.slow
def test_the_evolution_runs_measures_and_draws(tmp_path: Path) -> None:
    text = run_example("nas_evolution.py", ["--measured", "4", "--trials", "7", "--epochs", "1"], tmp_path)
    for expected in ("4 random cells measured", "evolution", "error of the predicted latencies"):
        assert expected in text
    assert "plotly" in (tmp_path / "nas_evolution.html").read_text(encoding="utf-8")


def test_nas_space_has_benchmark_size_and_runs() -> None:
    space = runpy.run_path(str(EXAMPLES / "nas_space.py"))
    assert len(space["OPERATORS"]) ** len(space["EDGES"]) == 15_625
    cell = ("conv3x3", "skip", "pool3x3", "none", "conv1x1", "skip")
    assert space["is_connected"](cell)
    assert not space["is_connected"](("conv3x3", "none", "none", "none", "none", "none"))
    assert space["network"](cell, width=4, depth=1, channels=1)(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
