"""What users may rely on: every name of `perfguard` is there, is documented, and lives where the package says."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import perfguard

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", perfguard.__all__)
def test_public_name_imports_and_has_a_docstring(name: str) -> None:
    value = getattr(perfguard, name)
    assert value is getattr(importlib.import_module(f"perfguard.{perfguard._HOMES[name]}"), name)
    assert (value.__doc__ or "").strip()
    assert not value.__doc__.startswith(f"{name}("), "a docstring that dataclass made up"


def test_public_names_are_sorted_and_match_their_homes() -> None:
    assert perfguard.__all__ == sorted(perfguard._HOMES)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(perfguard.__file__).read_text(encoding="utf-8"))
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        (alias.name, statement.module)
        for statement in guarded.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
        if statement.module
    }
    assert seen == {(name, f"perfguard.{home}") for name, home in perfguard._HOMES.items()}


def test_dir_lists_the_names() -> None:
    assert set(perfguard.__all__) <= set(dir(perfguard))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'perfguard' has no attribute 'Guards'"):
        perfguard.Guards  # noqa: B018


def test_the_version_is_that_of_the_distribution() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'^version = "(.+)"$', project, re.MULTILINE)[1] == perfguard.__version__  # type: ignore[index]
