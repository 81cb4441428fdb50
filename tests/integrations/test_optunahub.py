"""The packages for OptunaHub load as OptunaHub loads them, and guard real studies."""

from __future__ import annotations

import functools
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from optuna.trial import TrialState

import optunahub
import perfguard_optuna

ROOT = Path(__file__).resolve().parents[2]
REGISTRY = ROOT / "optunahub" / "package"
CODE_OF = runpy.run_path(str(ROOT / "tools" / "stranger.py"))["code_of"]
PACKAGES = ("pruners/perfguard", "samplers/perfguard")
FRONT_MATTER = {"author", "title", "description", "tags", "optuna_versions", "license"}
"""What the README of each package of the registry begins with, as of November 2026."""


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """``optunahub.load_module`` finds this checkout instead of asking GitHub."""
    local = functools.partial(optunahub.load_local_module, registry_root=str(REGISTRY))
    monkeypatch.setattr(optunahub, "load_module", local)


def assert_guarded(study: optuna.Study) -> None:
    summary = perfguard_optuna.summarize(study)
    completed = [trial for trial in study.trials if trial.state == TrialState.COMPLETE]
    assert summary.num_unguarded == 0
    assert summary.num_launched == summary.num_measured == len(completed) >= 10
    assert summary.num_pruned == len(study.trials) - len(completed)
    assert summary.num_pruned or summary.num_violations  # part of the search space is over the budget


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("package", PACKAGES)
def test_the_readme_of_a_hub_package_runs_a_guarded_study(package: str) -> None:
    text = (REGISTRY / package / "README.md").read_text(encoding="utf-8")
    (code,) = CODE_OF(text, "python")
    names: dict[str, Any] = {}
    exec(code, names)
    assert_guarded(names["study"])


@pytest.mark.parametrize("package", PACKAGES)
def test_a_hub_package_has_the_files_of_the_registry(package: str) -> None:
    folder = REGISTRY / package
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"} == {
        "LICENSE", "README.md", "__init__.py", "example.py", "images/thumbnail.png", "requirements.txt",
    }  # fmt: skip
    _, front, page = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    fields = yaml.safe_load(front)
    assert set(fields) == FRONT_MATTER
    assert all(fields.values())
    assert fields["license"] == "MIT License"
    assert optuna.__version__ in fields["optuna_versions"]
    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == ["Abstract", "APIs", "Installation", "Example", "Others"]
    assert (folder / "LICENSE").read_text(encoding="utf-8").startswith("MIT License\n")
    picture = (folder / "images" / "thumbnail.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) <= 100_000


@pytest.mark.parametrize("package", PACKAGES)
def test_a_hub_package_without_perfguard_names_the_pip_line(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "perfguard_optuna", None)
    with pytest.raises(ModuleNotFoundError, match=rf"^{package} needs PerfGuard: pip install 'perfguard\[optuna\]>="):
        optunahub.load_local_module(package, registry_root=str(REGISTRY))


@pytest.mark.slow
@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("package", PACKAGES)
def test_the_example_of_a_hub_package_runs(package: str) -> None:
    study = runpy.run_path(str(REGISTRY / package / "example.py"))["study"]
    assert_guarded(study)
