"""Run time needs what it uses: what only training, research and exports import may be absent."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.test_boundaries import MAIN, RESEARCH, imported_packages
from tests.test_publishing import project
from tests.warm import run_fresh

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "examples" / "models.py"
ABSENT = ("scipy", "sklearn", "pandas", "pyarrow", "networkx", "matplotlib", "perfguard_research")
DISTRIBUTIONS = {
    "nvidia-ml-py": "pynvml",
    "optuna-integration": "optuna_integration",
    "scikit-learn": "sklearn",
    "torch-geometric": "torch_geometric",
}
"""Distributions whose module has another name."""
_BLOCK = f"""
import sys
for name in {ABSENT!r}:
    sys.modules[name] = None  # an import of it raises a ModuleNotFoundError
"""
_SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(64, 8), torch.randint(2, (64,)))
for x, y in DataLoader(data, batch_size=16):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
_STUDY = """
import torch, warnings
from torch import nn
import optuna
import perfguard_optuna
from perfguard_optuna import PerfGuardPruner, summarize

warnings.simplefilter("ignore")
optuna.logging.disable_default_handler()

def objective(trial):
    width = trial.suggest_categorical("width", [8, 2**30])
    model = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    return 1.0

study = perfguard_optuna.create_study()
study.enqueue_trial({"width": 2**30})
study.enqueue_trial({"width": 8})
study.optimize(objective, n_trials=1, pruner=PerfGuardPruner(gpu="a100", log=LOG))
summarize(study)
print([trial.state.name for trial in study.trials])
"""
_TUNE = """
import torch
from ray.tune.search import Searcher
from torch import nn
from perfguard import Workload
from perfguard_ray import PerfGuardSearcher

class One(Searcher):
    def suggest(self, trial_id):
        return {"width": 8}
    def on_trial_complete(self, *args, **kwargs):
        pass

def build(config):
    return Workload(nn.Linear(64, config["width"]), inputs=(32, 64), loss=torch.mean)

searcher = PerfGuardSearcher(One(metric="loss", mode="min"), gpu="a100", build=build, log=False)
print(searcher.suggest("first")["width"])
"""


def imports_of(packages: tuple[str, ...]) -> set[str]:
    """Other people's modules that the ``packages`` import anywhere."""
    found: set[str] = set()
    for package in packages:
        for path in (ROOT / package).rglob("*.py"):
            found.update(imported_packages(path.read_text(encoding="utf-8")))
    return {name for name in found - sys.stdlib_module_names if not name.startswith("perfguard")}


def modules_of(requirements: list[str]) -> set[str]:
    names = (Requirement(needed).name for needed in requirements)
    return {DISTRIBUTIONS.get(name, name.replace("-", "_")) for name in names}


@pytest.mark.parametrize(("folder", "packages"), [(".", MAIN), ("models", RESEARCH)])
def test_each_dependency_is_imported(folder: str, packages: tuple[str, ...]) -> None:
    needed = modules_of(project(folder)["dependencies"]) - {"perfguard"}
    # A name in a list of libraries that are followed is no import, and NVML is imported by its name.
    assert needed - imports_of(packages) <= {"pynvml"}
    assert not needed & set(ABSENT) or folder == "models"


def top_level_imports(path: Path) -> Iterator[str]:
    """Packages that a module imports as it is imported itself."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imported_packages(ast.unparse(node))


def test_what_a_module_of_the_core_imports_at_its_top_is_declared() -> None:
    declared = modules_of(project()["dependencies"])
    undeclared = {
        f"{path.relative_to(ROOT)} imports {name}"
        for package in ("perfguard", "models/perfguard_models")
        for path in (ROOT / package).rglob("*.py")
        for name in top_level_imports(path)
        if name not in sys.stdlib_module_names | declared and not name.startswith("perfguard")
    }
    assert not undeclared


def test_predict_runs_without_what_training_needs() -> None:
    arguments = ["predict", f"{MODELS}:resnet", "--gpu", "a100", "--batch-size", "2"]
    printed = run_fresh("-c", f"{_BLOCK}from perfguard.cli import main\nsys.argv[1:] = {arguments}\nmain()")
    assert "peak memory" in printed


def test_a_dry_run_runs_without_what_training_needs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT, encoding="utf-8")
    arguments = ["dry-run", str(script), "--gpu", "a100"]
    printed = run_fresh("-c", f"{_BLOCK}from perfguard.cli import main\nsys.argv[1:] = {arguments}\nmain()")
    assert "peak memory" in printed


def test_a_guarded_study_of_optuna_runs_without_what_training_needs(tmp_path: Path) -> None:
    printed = run_fresh("-c", _BLOCK + _STUDY.replace("LOG", repr(str(tmp_path / "log.db"))))
    assert printed.splitlines()[-1] == "['PRUNED', 'COMPLETE']"


def test_the_plugin_for_ray_needs_only_what_ray_needs() -> None:
    # Ray Tune itself imports pandas and pyarrow.
    block = _BLOCK.replace("'pandas', 'pyarrow', ", "")
    assert run_fresh("-c", block + _TUNE).splitlines()[-1] == "8"
