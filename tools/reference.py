"""Write docs/reference.md, the page of every public object, from signatures and docstrings: python tools/reference.py"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = ("perfguard", "perfguard_optuna", "perfguard_ray")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference.md"
HEAD = """# Reference

This page lists every public object of the three packages, for people who write code with PerfGuard. Units are bytes, seconds and
joules unless a name has another unit.
<!-- Made by `python tools/reference.py` from the docstrings. Change those, then run the command again. -->"""
_SECTION = re.compile(r"^(Args|Example|Raises|Returns|Yields):\n((?:    .*\n|\n)*)|^((?:    .*\n)+)", re.MULTILINE)


def markdown(doc: str | None) -> str:
    """Return a docstring in Google's style as Markdown: examples become code, arguments and errors lists."""

    def section(match: re.Match[str]) -> str:
        title, body = match[1], textwrap.dedent(match[2] or match[3]).strip()
        if title in ("Example", None):
            return f"```{'pycon' if '>>>' in body else 'text'}\n{body}\n```\n\n"
        items = [" ".join(item.split()) for item in re.split(r"\n(?=\S)", body)]
        named = [re.sub(r"^([\w., *]+?):", r"- `\1`:", item) for item in items]
        return f"{title}:\n\n" + "\n".join(named if title in ("Args", "Raises") else items) + "\n\n"

    text = re.sub(r" +# doctest:.*", "", inspect.cleandoc(doc or "").replace("``", "`").replace("::\n", ":\n"))
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return re.sub(r"\n{3,}", "\n\n", _SECTION.sub(section, text + "\n")).strip()


def signature(name: str, value: Any) -> str:
    """Return the call of ``value`` with its arguments, one a line where they are many."""
    text = re.sub(r"(: |-> )(['\"])(.+?)\2(?=[,)]| =|$)", r"\1\3", f"{name}{inspect.signature(value)}".replace("(self, ", "("))
    line = re.sub(r"<class '(\w+)'>", r"\1", re.sub(r"\((self|cls)\)", "()", text).removesuffix(" -> None"))
    return line if len(line) <= 110 else re.sub(r", (?=[*\w]+: |\*, )", ",\n    ", line.replace("(", "(\n    ", 1))


def fields(cls: type) -> Iterator[str]:
    """Yield the fields of a data class as rows of a table, with the strings that stand below them in the source."""
    notes: dict[str, str] = {}
    bases = [base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base)]
    for body in (ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body for base in bases):  # type: ignore[attr-defined]
        for before, after in itertools.pairwise(body):
            if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr):
                notes[ast.unparse(before.target)] = ast.literal_eval(after.value)
    yield from ("| field | type | default | meaning |", "| --- | --- | --- | --- |")
    for field in dataclasses.fields(cls):
        known = "required" if field.default_factory is dataclasses.MISSING else "empty"
        known = known if field.default is dataclasses.MISSING else f"`{field.default!r}`"
        cells = (f"`{field.name}`", f"`{field.type}`", known, " ".join(markdown(notes.get(field.name)).split()))
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def section(name: str, value: Any, heading: str = "###") -> Iterator[str]:
    """Yield the paragraphs on one object, and on the methods and properties that it has of ours."""
    yield f"{heading} {name}"
    if isinstance(value, (classmethod, staticmethod)):
        value = value.__func__
    made_here = not inspect.isclass(value) or getattr(value.__init__, "__module__", "").startswith("perfguard")
    if callable(value) and made_here and not dataclasses.is_dataclass(value):
        yield f"```text\n{signature(name, value)}\n```"
    yield markdown(value.__doc__)
    if dataclasses.is_dataclass(value) and isinstance(value, type):
        yield "\n".join(fields(value))
    ours = [base for base in value.__mro__ if base.__module__.startswith("perfguard")] if inspect.isclass(value) else []
    for member in sorted({name for base in ours for name in vars(base) if not name.startswith("_")}):
        found = inspect.getattr_static(value, member)
        if inspect.isfunction(found) or isinstance(found, (property, classmethod, staticmethod)):
            yield from section(f"{name}.{member}", found, "####")


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for package in PACKAGES:
        module = importlib.import_module(package)
        parts += [f"## {package}", *(part for name in module.__all__ for part in section(name, getattr(module, name)))]
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
