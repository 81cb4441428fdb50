"""Packages that not everybody has."""

from __future__ import annotations


def why_not_imported(error: ImportError, package: str, if_missing: str) -> str:
    """What to tell a user when ``package`` could not be imported: ``if_missing`` only where it is not installed.

    A package that is installed can fail for what it imports itself. Then the answer names the first cause.
    """
    causes: list[BaseException] = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    if any(isinstance(cause, ModuleNotFoundError) and (cause.name or "").partition(".")[0] == package for cause in causes):
        return if_missing
    return f"{package} is installed, but importing it failed with {type(causes[-1]).__name__}: {causes[-1]}"
