"""What is published: both distributions hold what they must and install, and all files state the same of them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import perfguard
from tests.test_boundaries import MAIN, RESEARCH

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
_ON_CONDA = {"ortools": "ortools-python", "ray": "ray-tune", "torch": "pytorch", "torch-geometric": "pytorch_geometric"}
"""Names of packages that conda-forge calls otherwise than PyPI."""


def project(folder: str = ".") -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def read_yaml(file: str) -> Any:
    return yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))


def on_conda(requirements: list[str]) -> set[str]:
    parsed = map(Requirement, requirements)
    return {f"{_ON_CONDA.get(needed.name, needed.name)} {needed.specifier}" for needed in parsed}


def run(*command: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """What the command prints."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=cwd, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_module(*arguments: str) -> str:
    return run(sys.executable, "-m", *arguments)


def test_one_version_everywhere() -> None:
    version = perfguard.__version__
    research = project("models")
    stated = {
        "pyproject.toml": project()["version"],
        "models/pyproject.toml": research["version"],
        "what perfguard-research needs": research["dependencies"][0].removeprefix("perfguard=="),
        "CITATION.cff": read_yaml("CITATION.cff")["version"],
        "conda/recipe.yaml": read_yaml("conda/recipe.yaml")["context"]["version"],
        "CHANGELOG.md": re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[0],
    }
    assert stated == dict.fromkeys(stated, version)


def test_the_conda_recipe_needs_what_the_project_needs() -> None:
    recipe, described = read_yaml("conda/recipe.yaml"), project()
    low, high = described["requires-python"].split(",")
    python = f"python {low},{high}"
    extras = [needed for extra in described["optional-dependencies"].values() for needed in extra]
    assert set(recipe["requirements"]["run"]) == {python, *on_conda(described["dependencies"])}
    others = [needed for needed in extras if not needed.startswith("perfguard[")]
    assert set(recipe["requirements"]["run_constraints"]) == on_conda(others)
    assert python in recipe["requirements"]["host"]
    assert recipe["build"]["noarch"] == "python"
    assert recipe["build"]["python"]["entry_points"] == [f"{name} = {at}" for name, at in described["scripts"].items()]
    assert recipe["about"]["summary"] == described["description"]
    assert recipe["about"]["license"] == described["license"]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both distributions: their sdists, and the wheels that were built from these."""
    folder = tmp_path_factory.mktemp("dist")
    for source in (ROOT, ROOT / "models"):
        run_module("build", "--no-isolation", "--skip-dependency-check", "--outdir", str(folder), str(source))
    return folder


@pytest.fixture(params=["perfguard", "perfguard_research"])
def wheel(request: pytest.FixtureRequest, dist: Path) -> tuple[str, dict[str, int]]:
    """Which distribution, and the files in its wheel with their sizes in bytes."""
    (path,) = dist.glob(f"{request.param}-*.whl")
    with zipfile.ZipFile(path) as archive:
        return request.param, {item.filename: item.file_size for item in archive.infolist()}


@pytest.mark.slow
def test_wheel_has_only_its_packages_at_the_top(wheel: tuple[str, dict[str, int]]) -> None:
    name, files = wheel
    top = {file.partition("/")[0] for file in files}
    # Hydra looks for plugins in a package that all distributions share.
    packages = (*MAIN, "integrations/hydra_plugins") if name == "perfguard" else RESEARCH
    expected = {Path(package).name for package in packages}
    assert {folder for folder in top if not folder.endswith(".dist-info")} == expected


@pytest.mark.slow
def test_a_wheel_ships_its_data_files(wheel: tuple[str, dict[str, int]]) -> None:
    # Hatchling leaves out whatever .gitignore names, silently.
    name, files = wheel
    data = {
        "perfguard": [
            ("perfguard/devices", "*.json"),
            ("perfguard", "report.[cj]s*"),
            ("models/perfguard_models/weights", "*.safetensors"),
        ],
        "perfguard_research": [("models/perfguard_research/weights", "*.safetensors")],
    }[name]
    for folder, pattern in data:
        paths = list((ROOT / folder).glob(pattern))
        assert paths, f"no {pattern} in {folder}"
        assert {str(path.relative_to(ROOT)).removeprefix("models/") for path in paths} <= set(files)
    assert [file for file in files if file.endswith(".dist-info/licenses/LICENSE")]


@pytest.mark.slow
def test_main_wheel_ships_default_weights_only(wheel: tuple[str, dict[str, int]]) -> None:
    # Everyone who installs PerfGuard downloads them.
    name, files = wheel
    num_bytes = sum(size for file, size in files.items() if file.endswith(".safetensors"))
    assert num_bytes < (5.5e6 if name == "perfguard" else 5e6)


@pytest.mark.slow
def test_pypi_would_show_the_distributions(dist: Path) -> None:
    files = sorted(map(str, dist.iterdir()))
    assert len(files) == 4
    run_module("twine", "check", "--strict", *files)


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with both wheels, in which the packages of this one can be imported, but not the checkout's."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    # A line of a .pth file adds a folder to the path, but the .pth files in that folder, such as the checkout's, are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    wheels = map(str, dist.glob("*.whl"))
    run_module("pip", "--python", str(python), "install", "--no-index", "--no-deps", "--ignore-installed", *wheels)
    return folder / "bin"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("perfguard --version", f"perfguard {perfguard.__version__}"),
        (f"perfguard predict {ROOT}/examples/models.py:resnet --gpu a100 --batch-size 2", "peak memory"),
        (f"perfguard predict {ROOT}/examples/keras_cnn.onnx --gpu a100 --mode infer --batch-size 2", "peak memory"),
        ("perfguard leaderboard --help", "usage: perfguard leaderboard"),
        ("python -c 'import perfguard_research as last; print(last.__file__)'", "site-packages/perfguard_research/"),
    ],
)
def test_the_wheels_run_once_installed(installed: Path, command: str, expected: str, tmp_path: Path) -> None:
    program, *arguments = shlex.split(command)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    assert expected in run(str(installed / program), *arguments, cwd=tmp_path, env=environment)
