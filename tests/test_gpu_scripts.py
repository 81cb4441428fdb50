"""The scripts for a machine with a GPU, on the processor: their code runs, whatever the numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "benchmarks"


def run_script(name: str, *arguments: str, gpu: str = "cpu") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPTS / name), "--gpu", gpu, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.slow
def test_the_check_prints_both_sides_of_every_run(tmp_path: Path) -> None:
    done = run_script("gpu_check.py", "--configurations", "4", "--space", "mlp,ops", "--keep", str(tmp_path / "rows.csv.gz"))
    assert done.returncode in (0, 1), done.stderr  # how well a busy machine agrees is not at stake here
    assert done.stdout.count("→") >= 8
    assert "In the median" in done.stdout
    assert (tmp_path / "rows.csv.gz").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpu_check.py", "gpu_study.py"])
def test_without_a_gpu_a_script_says_so(name: str) -> None:
    done = run_script(name, gpu="auto")
    assert done.returncode == 2
    assert "NVML shows no GPU here" in done.stdout + done.stderr


@pytest.mark.slow
def test_the_study_runs_with_and_without_the_guard(tmp_path: Path) -> None:
    done = run_script("gpu_study.py", "--trials", "2", "--task", "images", "--out", str(tmp_path / "study.txt"))
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "study.txt").read_text()
    for words in ("What the probe adds to a step", "Optuna, without", "Optuna, with "):
        assert words in text
