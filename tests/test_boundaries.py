"""Imports point one way and are light."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.warm import run_fresh

ROOT = Path(__file__).resolve().parents[1]
MAIN = (
    "perfguard",
    "integrations/perfguard_optuna",
    "integrations/perfguard_ray",
    "integrations/perfguard_hydra",
    "integrations/perfguard_mcp",
    "models/perfguard_models",
)
RESEARCH = ("models/perfguard_research",)
"""What the second distribution, perfguard-research, holds."""
PACKAGES = (*MAIN, *RESEARCH)
_PLUGINS = {"perfguard_optuna", "perfguard_ray", "perfguard_hydra", "perfguard_mcp"}
_MODELS = {"perfguard_models", "perfguard_research"}
FORBIDDEN = {
    "perfguard": {*_PLUGINS, *_MODELS, "optuna", "ray", "hydra", "mcp"},
    "models/perfguard_models": {*_PLUGINS, "perfguard_research", "optuna", "ray"},
    "models/perfguard_research": {*_PLUGINS, "optuna", "ray"},
    "integrations/perfguard_optuna": {"perfguard_ray", "perfguard_hydra", *_MODELS, "ray", "hydra"},
    "integrations/perfguard_ray": {"perfguard_optuna", "perfguard_hydra", *_MODELS, "hydra"},
    "integrations/perfguard_hydra": {"perfguard_ray", *_MODELS, "ray"},  # its sweeper is one over Optuna
    "integrations/perfguard_mcp": {*_PLUGINS - {"perfguard_mcp"}, *_MODELS, "optuna", "ray", "hydra"},
}
HEAVY = ("torch", "torch_geometric", "sklearn", "sqlalchemy", "optuna", "ray")


def imported_packages(source: str) -> Iterator[str]:
    """The top-level name of each absolute import in ``source``, those inside functions included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


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


def module_imports(*, for_types: bool = True) -> Iterator[tuple[str, str]]:
    """Each of our modules, with each name that it imports from another of ours; ``for_types``: for annotations alone, too."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            module = ".".join(path.relative_to((ROOT / package).parent).with_suffix("").parts).removesuffix(".__init__")
            tree = ast.parse(path.read_text(encoding="utf-8"))
            guarded = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
            left_out = set() if for_types else {inner for node in guarded for inner in ast.walk(node)}
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("perfguard") and node not in left_out:
                    yield from ((module, f"{node.module}.{alias.name}") for alias in node.names)


def test_no_circle_of_imports() -> None:
    pairs = list(module_imports(for_types=False))
    modules = {module for module, _ in pairs}
    imports: dict[str, set[str]] = {module: set() for module in modules}
    for module, name in pairs:
        imports[module].add(name if name in modules else name.rpartition(".")[0])
    graphlib.TopologicalSorter(imports).prepare()  # a CycleError names the circle


@pytest.mark.parametrize("package", [path.rpartition("/")[2] for path in PACKAGES])
def test_no_private_name_of_another_package(package: str) -> None:
    others = {
        (module, name) for module, name in module_imports() if module.partition(".")[0] == package != name.partition(".")[0]
    }
    assert not {pair for pair in others if "._" in pair[1]}


@pytest.mark.parametrize(("package", "needed"), [("perfguard", ""), ("perfguard_optuna", "optuna")])
def test_import_loads_nothing_heavy(package: str, needed: str) -> None:
    """A study's script imports PerfGuard before anything needs torch."""
    printed = run_fresh("-c", f"import sys, {package}; print(*sorted(set(sys.modules) & set({HEAVY!r})))")
    assert printed.strip() == needed


@pytest.mark.parametrize("host", ["optuna", "ray", "hydra"])
def test_integration_without_host_names_the_pip_line(host: str) -> None:
    code = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {host!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
try:
    import perfguard_{host}
except ImportError as error:
    print(error)
"""
    assert f"pip install 'perfguard[{host}]'" in run_fresh("-c", code)
