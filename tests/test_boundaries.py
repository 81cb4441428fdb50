"""Imports point one way, integrations → perfguard ← perfguard_models; imports are light; the wheel holds what it must."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("perfguard", "integrations/perfguard_optuna", "integrations/perfguard_ray", "models/perfguard_models")
FORBIDDEN = {
    "perfguard": {"perfguard_optuna", "perfguard_ray", "perfguard_models", "optuna", "ray"},
    "models/perfguard_models": {"perfguard_optuna", "perfguard_ray", "optuna", "ray"},
    "integrations/perfguard_optuna": {"perfguard_ray", "perfguard_models", "ray"},
    "integrations/perfguard_ray": {"perfguard_optuna", "perfguard_models"},
}
HEAVY = ("torch", "torch_geometric", "sklearn", "sqlalchemy", "optuna", "ray")


def imported_packages(source: str) -> Iterator[str]:
    """The top-level name of each absolute import in ``source``, those inside functions included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_imports_are_found_wherever_they_stand() -> None:
    source = "import a.b, c\nfrom d.e import f\nfrom . import g\ndef h():\n    import i\n"
    assert set(imported_packages(source)) == {"a", "c", "d", "i"}


@pytest.mark.parametrize("folder", ["integrations", "models"])
def test_a_folder_that_holds_packages_is_none_itself(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_that_it_is_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_to_the_core(package: str) -> None:
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in (ROOT / package).rglob("*.py")
        for name in imported_packages(path.read_text(encoding="utf-8"))
        if name in FORBIDDEN[package]
    }
    assert not wrong


def test_importing_perfguard_loads_nothing_heavy() -> None:
    done = run_python(f"import sys, perfguard; print(*sorted(set(sys.modules) & set({HEAVY!r})))")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


@pytest.mark.parametrize(
    ("package", "host", "extra"), [("perfguard_optuna", "optuna", "optuna"), ("perfguard_ray", "ray", "ray")]
)
def test_an_integration_without_its_host_names_the_pip_line(package: str, host: str, extra: str) -> None:
    done = run_python(
        f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {host!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
try:
    import {package}
except ImportError as error:
    print(error)
"""
    )
    assert done.returncode == 0, done.stderr
    assert f"pip install 'perfguard[{extra}]'" in done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names of the files in a freshly built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("perfguard-*.whl")
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


@pytest.mark.slow
def test_the_wheel_has_four_packages_at_the_top_and_nothing_else(wheel: list[str]) -> None:
    top = {name.partition("/")[0] for name in wheel}
    assert {name for name in top if not name.endswith(".dist-info")} == {Path(package).name for package in PACKAGES}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "pattern"), [("perfguard/devices", "*.json"), ("models/perfguard_models/weights", "*.safetensors")]
)
def test_the_wheel_ships_the_data_files(wheel: list[str], folder: str, pattern: str) -> None:
    paths = list((ROOT / folder).glob(pattern))
    assert paths, f"no {pattern} in {folder}"
    assert {str(path.relative_to(ROOT)).removeprefix("models/") for path in paths} <= set(wheel)
