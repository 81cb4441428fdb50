"""A command loads what it needs, and no more: what is loaded decides how long it takes to start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.warm import run_fresh

MODELS = str(Path(__file__).parents[3] / "examples" / "models.py")
HEAVY = ("torch", "numpy", "scipy", "pandas", "sqlalchemy", "onnx", "rich")
NOT_FOR_A_PREDICTION = ("sklearn", "scipy", "sqlalchemy", "alembic", "onnx", "matplotlib", "perfguard_research")
"""PyTorch Geometric imports pandas and PyTorch's compiler."""


def run(code: str, *arguments: str) -> Any:
    """What ``code`` prints, as JSON. It runs in a process of its own."""
    return json.loads(run_fresh("-c", code, *arguments).splitlines()[-1])


def loaded_by(*words: str) -> tuple[int, set[str], str]:
    """Exit status of a command, the modules that are loaded after it, and what it printed."""
    code = """
import contextlib, io, json, sys
from perfguard.cli import main
printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    try:
        status = main()
    except SystemExit as end:
        status = end.code or 0
print(json.dumps([status, sorted(sys.modules), printed.getvalue()]))
"""
    status, modules, printed = run(code, *words)
    return status, set(modules), printed


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("--help", 0),
        ("--version", 0),
        ("prophesy", 2),
        ("predict --help", 0),
        ("dry-run --help", 0),
        ("plan --help", 0),
        ("predict --gpu", 2),
        ("predict missing.py:build", 2),
        ("dry-run missing.py -- --batch-size 64", 2),
        (f"predict {MODELS}:resnet --set width", 2),
        (f"predict {MODELS}:resnet --gpu a1000", 2),
        ("rank missing.py:build", 2),
        ("plan missing.py", 2),
        ("log show --log missing.db", 2),
    ],
)
def test_help_and_slips_load_nothing_heavy(words: str, status: int) -> None:
    # Whoever mistypes a name is answered at once, not after the seconds that torch takes.
    ended, modules, _ = loaded_by(*words.split())
    assert ended == status
    assert not modules.intersection(HEAVY)


def test_gpus_loads_no_torch() -> None:
    _, modules, printed = loaded_by("gpus")
    assert "rtx3090" in printed
    assert not modules.intersection({*HEAVY} - {"rich"})


def test_prediction_loads_no_log_and_no_training() -> None:
    status, modules, _ = loaded_by("predict", f"{MODELS}:resnet", "--gpu", "a100", "--json")
    assert status == 0
    assert not modules.intersection(NOT_FOR_A_PREDICTION)


def test_first_pruner_loads_no_training() -> None:
    code = """
import json, sys
from perfguard_optuna import PerfGuardPruner
PerfGuardPruner("a100", build=lambda params: None, log=False)
print(json.dumps(sorted(sys.modules)))
"""
    assert not set(run(code)).intersection({*NOT_FOR_A_PREDICTION} - {"sqlalchemy", "alembic", "scipy", "matplotlib"})
