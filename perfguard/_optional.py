"""Optional packages."""

from __future__ import annotations


def why_not_imported(error: ImportError, package: str, if_missing: str) -> str:
    """Error message for a ``package`` that could not be imported: ``if_missing`` if it is not installed.

    An installed package can fail because of its own imports. Then the message names the first cause.
    """
    causes: list[BaseException] = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    if any(isinstance(cause, ModuleNotFoundError) and (cause.name or "").partition(".")[0] == package for cause in causes):
        return if_missing
    return f"{package} is installed, but importing it failed with {type(causes[-1]).__name__}: {causes[-1]}"
