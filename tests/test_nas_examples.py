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
    assert (tmp_path / "nas_evolution.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_elastic_network_runs_and_draws(tmp_path: Path) -> None:
    text = run_example("nas_elastic.py", ["--measured", "8", "--candidates", "8", "--epochs", "1"], tmp_path)
    assert "cuts of one network, trained once (1 epochs)" in text
    assert (tmp_path / "nas_elastic.png").read_bytes().startswith(b"\x89PNG")


def test_elastic_network_cut_equals_its_own_network() -> None:
    example = runpy.run_path(str(EXAMPLES / "nas_elastic.py"))
    torch.manual_seed(0)
    elastic, images = example["Elastic"](), torch.randn(3, 1, 8, 8)
    for cut in ((72,) * 6, (8, 0, 24, 0, 72, 8), (0, 0, 0, 0, 0, 24)):
        assert torch.allclose(elastic(images, cut), elastic.subnet(cut)(images), atol=1e-5)


def test_nas_space_has_benchmark_size_and_runs() -> None:
    space = runpy.run_path(str(EXAMPLES / "nas_space.py"))
    assert len(space["OPERATORS"]) ** len(space["EDGES"]) == 15_625
    cell = ("conv3x3", "skip", "pool3x3", "none", "conv1x1", "skip")
    assert space["is_connected"](cell)
    assert not space["is_connected"](("conv3x3", "none", "none", "none", "none", "none"))
    assert space["network"](cell, width=4, depth=1, channels=1)(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
