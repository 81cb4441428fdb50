"""A command loads what it needs, and no more: what is loaded decides how long it takes to start."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perfguard.cli import main
from perfguard.cli._compiler import ON_PLAIN_VALUES

MODELS = str(Path(__file__).parents[3] / "examples" / "models.py")
HEAVY = ("torch", "numpy", "scipy", "pandas", "sqlalchemy", "onnx", "rich")
COMPILER = ("torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes", "sympy")
NOT_FOR_A_PREDICTION = ("torch_geometric", "pandas", "sklearn", "scipy", "sqlalchemy", "alembic", "onnx", "matplotlib", *COMPILER)
SCRIPT = """
import torch
from torch import nn
from perfguard import TensorSpec, Workload

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(100, 32)
        self.conv = nn.Sequential(nn.Conv1d(32, 32, 3), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.AdaptiveAvgPool1d(1))
        self.out = nn.Linear(32, 10)

    def forward(self, ids):
        return self.out(self.conv(self.words(ids).transpose(1, 2)).flatten(1))

def build(params):
    classes = TensorSpec((8,), "int64")
    return Workload(Net(), TensorSpec((8, 16), "int64"), classes, nn.functional.cross_entropy, torch.optim.AdamW)
"""


def run(code: str, *arguments: str) -> Any:
    """What ``code`` prints, as JSON. It runs in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


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
        ("predict --gpu", 2),
        ("predict missing.py:build", 1),
        (f"predict {MODELS}:resnet --set width", 1),
        (f"predict {MODELS}:resnet --gpu a1000", 1),
        ("rank missing.py:build", 1),
        ("evaluate missing.csv", 1),
        ("log show --log missing.db", 1),
        ("collect --out rows.csv --minutes -1", 1),
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


def test_prediction_needs_no_compiler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # PyTorch's optimizers and meta kernels would import the compiler and sympy: as long again as torch itself.
    path = tmp_path / "net.py"
    path.write_text(SCRIPT)
    words = ["predict", f"{path}:build", "--gpu", "a100", "--json"]
    _, modules, printed = loaded_by(*words)
    assert not modules.intersection(NOT_FOR_A_PREDICTION)
    assert main(words) == 0  # in this process nothing stands in for the compiler
    assert json.loads(printed) == json.loads(capsys.readouterr().out)


def test_first_pruner_loads_neither_compiler_nor_training() -> None:
    code = """
import json, sys
from perfguard_optuna import PerfGuardPruner
PerfGuardPruner("a100", build=lambda params: None, log=False)
print(json.dumps(sorted(sys.modules)))
"""
    assert not set(run(code)).intersection({*NOT_FOR_A_PREDICTION} - {"sqlalchemy", "alembic", "scipy", "matplotlib"})


@pytest.mark.filterwarnings("ignore:guard_size_oblivious will be removed:FutureWarning")
def test_plain_values_are_answered_as_by_torch() -> None:
    from torch.fx.experimental import symbolic_shapes

    booleans, integers = (False, True), (0, 1, 7)
    arguments: dict[str, list[tuple[Any, ...]]] = {
        "guard_int": [(value,) for value in integers],
        "guarding_hint_or_throw": [(value,) for value in (*integers, *booleans)],
        "has_guarding_hint": [(value,) for value in integers],
        "is_nested_int": [(value,) for value in integers],
        "free_unbacked_symbols": [((1, 2),), (3,)],
        "sym_and": [*itertools.product(booleans, repeat=3), (True,)],
        "sym_or": [*itertools.product(booleans, repeat=3), (False,)],
        "sym_eq": [(1, 2), (2, 2), ((1, 2), [1, 2]), ((1, 2), (1, 3)), ((1, 2), (1,))],
    }
    for name in [name for name in ON_PLAIN_VALUES if hasattr(symbolic_shapes, name)]:
        answer = ON_PLAIN_VALUES[name]
        for values in arguments.get(name, [(value,) for value in booleans]):
            assert answer(*values) == getattr(symbolic_shapes, name)(*values), (name, values)


@pytest.mark.slow
def test_compiler_is_there_when_asked_for() -> None:
    # A file of the user's may compile, or compute with sympy: it must get the modules themselves, once, at any time.
    found = run("""
import json, sys, torch
from perfguard.cli._compiler import _Deferred, compiler_deferred

with compiler_deferred():
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    optimizer.zero_grad()
    torch.empty(2, 3, device="meta").mean(1).div(2)
    before = isinstance(sys.modules["torch._dynamo"], _Deferred)
    import torch._dynamo.config
    doubled = torch.compile(lambda x: 2 * x, backend="eager")(torch.ones(2)).tolist()
    import sympy
    squared = str(sympy.diff(sympy.Symbol("x") ** 2))
same = sys.modules["torch._dynamo.config"] is torch._dynamo.config
deferred = [name for name, module in sys.modules.items() if isinstance(module, _Deferred)]
marked = hasattr(torch.optim.Optimizer.zero_grad.__wrapped__, "__dynamo_disable")
print(json.dumps([before, doubled, squared, same, deferred, marked]))
""")
    assert found == [True, [2.0, 2.0], "2*x", True, [], False]
