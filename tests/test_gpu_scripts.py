"""The scripts for a machine with a GPU, on the processor: their code runs, whatever the numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.warm import run_warm

SCRIPTS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def run_script(name: str, *arguments: str, gpu: str = "cpu") -> tuple[int, str]:
    return run_warm(str(SCRIPTS / name), "--gpu", gpu, *arguments, cwd=SCRIPTS, timeout_s=280)


@pytest.mark.slow
def test_without_a_gpu_a_script_says_so() -> None:
    status, printed = run_script("gpu_study.py", gpu="auto")
    assert status == 2
    assert "NVML shows no GPU here" in printed


@pytest.mark.slow
def test_the_study_runs_with_and_without_the_guard(tmp_path: Path) -> None:
    status, printed = run_script("gpu_study.py", "--trials", "2", "--task", "images", "--out", str(tmp_path / "study.txt"))
    assert status == 0, printed
    text = (tmp_path / "study.txt").read_text()
    assert "│ images │ without " in text
    assert "│ images │ with  " in text
