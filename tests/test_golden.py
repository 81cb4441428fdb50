"""Predictions are what they were: a sample of `benchmarks/golden.py` is kept beside the tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import golden  # noqa: E402

SAMPLE = Path(__file__).parent / "golden" / "predictions.json"
ON_ANOTHER_MACHINE = 1e-4
"""Other processors add up in another order; on one machine two runs agree to the bit."""


def test_golden_differences_finds_changes_and_gaps() -> None:
    # The check is worth nothing if it cannot fail.
    expected: dict[str, golden.Row] = {"same": [1.0, None], "moved": [1.0, 2.0], "silent": [1.0, 0.5], "gone": [1.0]}
    found: dict[str, golden.Row] = {"same": [1.0, None], "moved": [1.0, 2.25], "silent": [1.0, None], "new": [1.0]}
    assert {key: worst for worst, key in golden.differences(expected, found)} == {
        "same": 0.0, "moved": 0.25, "silent": float("inf"), "gone": float("inf"), "new": float("inf"),
    }  # fmt: skip


@pytest.mark.slow
def test_golden_predictions_of_every_shipped_predictor(capsys: pytest.CaptureFixture[str]) -> None:
    # A refactoring must not change what is predicted. If a prediction was meant to change, write the file again:
    # python benchmarks/golden.py --write tests/golden/predictions.json --every 24
    made_with = golden.read(SAMPLE)["made_by"]["torch"]
    if made_with != torch.__version__.partition("+")[0]:
        pytest.skip(f"the file was made with torch {made_with}; another version traces other operators")
    status = golden.main(["--check", str(SAMPLE), "--tolerance", str(ON_ANOTHER_MACHINE)])
    assert status == 0, capsys.readouterr().out
