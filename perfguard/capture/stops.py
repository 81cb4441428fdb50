"""Stops: what ends the training loop, if it is a value that no dry run knows, as in `while loss > 0.1`, or a number of steps.

Such values are 0 in a dry run, so a loop that they end makes another number of steps there. It is found in the user's source: a
loop around a step has an exit (`while` and its condition, or `break` or `return` in an `if`), and its condition depends on the
value. What depends on it is what is assigned from it, or where it decides, and the object that it is given to.
"""

from __future__ import annotations

import ast
import functools
import linecache
import os
import sys
from collections.abc import Iterator, Set
from pathlib import Path
from types import FrameType

_NO_STOPS = ("isnan", "isinf", "isfinite", "should_prune")
"""A condition on one of these ends no training that goes well, or is the tuner's."""
Loop = ast.For | ast.While
_Place = tuple[str, int]
"""A file and a line."""


class Stops:
    """Notes where the user's code reads values and makes steps."""

    def __init__(self) -> None:
        self._values: set[_Place] = set()
        self._steps: set[_Place] = set()

    def note_value(self) -> None:
        """Note that the user's code reads a value of a network."""
        self._values.update(_places())

    def note_step(self) -> None:
        """Note that an optimizer has made a step."""
        self._steps.update(_places())

    def where(self) -> str:
        """Return the file and the line of the condition by which a value ends the loop. Empty: there is none."""
        for name in sorted({name for name, _ in self._steps}):
            values = {line for file, line in self._values if file == name}
            for loop in self._loops_in(name) if values else ():
                if (line := _exit_by_value(loop, values)) is not None:
                    return _as_text(name, line)
        return ""

    def counts_steps(self) -> bool:
        """Return whether a loop over epochs ends by what the loop over batches within it counts, as `while step < 1000`."""
        for name in {name for name, _ in self._steps}:
            loops = self._loops_in(name)
            for loop in loops:
                if any(_ends_by_count(loop, within) for within in loops if within is not loop and within in ast.walk(loop)):
                    return True
        return False

    def _loops_in(self, name: str) -> list[Loop]:
        return loops_around(name, {line for file, line in self._steps if file == name})


def line_of_user() -> _Place | None:
    """Return the line of the user's code that runs. None: none does."""
    return next(_places(), None)


def place_of_user() -> str:
    """Return the line of the user's code that runs as "train.py:12"."""
    line = line_of_user()
    return "a library" if line is None else _as_text(*line)


def _as_text(name: str, line: int) -> str:
    return f"{Path(name).name}:{line}"


def frames_of_user() -> Iterator[FrameType]:
    """The frames of the user's code that run now, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_of_user(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _places() -> Iterator[_Place]:
    return ((frame.f_code.co_filename, frame.f_lineno) for frame in frames_of_user())


@functools.cache
def is_of_user(name: str) -> bool:
    """Whether the file of this name is none of Python, of a library or of ours."""
    libraries = (str(Path(os.__file__).parent), "site-packages", str(Path(__file__).parents[1]))
    return not name.startswith("<frozen") and not any(part in name for part in libraries)


def loops_around(name: str, lines: Set[int]) -> list[Loop]:
    """Return the loops of a file that are around one of its ``lines``, outermost first."""
    return [loop for loop in loops_of(name) if any(loop.body[0].lineno <= line <= loop.body[-1].end_lineno for line in lines)]  # type: ignore[operator]


@functools.cache
def loops_of(name: str) -> list[Loop]:
    """Return the loops of a file, outermost first."""
    return [node for node in ast.walk(tree_of(name)) if isinstance(node, (ast.For, ast.While))]


@functools.cache
def tree_of(name: str) -> ast.Module:
    """Return the syntax tree of a file. It is empty where that is no Python."""
    try:
        return ast.parse("".join(linecache.getlines(name)))
    except SyntaxError:  # a notebook's own words
        return ast.Module([], [])


def _exit_by_value(loop: Loop, values: Set[int]) -> int | None:
    dependent: set[str] = set()

    def depends(node: ast.AST | None) -> bool:
        return node is not None and (
            any(node.lineno <= line <= node.end_lineno for line in values)  # type: ignore[attr-defined]
            or not dependent.isdisjoint(names_in(node))
        )

    number = -1
    while number != len(dependent):
        number = len(dependent)
        for node in ast.walk(loop):
            if isinstance(node, (ast.If, ast.While)) and depends(node.test):
                dependent.update(*map(assigned, (*node.body, *node.orelse)))
            elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr, ast.Expr)) and depends(node.value):
                dependent.update(assigned(node))
    exits = exits_of(loop)
    for node in ast.walk(loop):
        ends = node is loop or (isinstance(node, ast.If) and not exits.isdisjoint(ast.walk(node)))
        if isinstance(node, (ast.If, ast.While)) and ends and depends(node.test) and not _is_no_stop(node.test):
            return node.lineno
    return None


def _ends_by_count(loop: Loop, within: Loop) -> bool:
    counted = {ast.unparse(node.target) for part in within.body for node in ast.walk(part) if isinstance(node, ast.AugAssign)}
    of_within = {*ast.walk(within)}
    exits = exits_of(loop) - of_within
    tests = [node.test for node in ast.walk(loop) if isinstance(node, ast.If) and not exits.isdisjoint(ast.walk(node))]
    if isinstance(loop, ast.While):
        tests.append(loop.test)
    return any(not counted.isdisjoint(names_in(test)) for test in tests if test not in of_within)


def exits_of(loop: Loop) -> set[ast.AST]:
    """Return what ends ``loop``: each `break` of its own, and each `return`. A `break` of a loop within it ends that one."""
    found: set[ast.AST] = set()
    left: list[tuple[ast.AST, bool]] = [(part, True) for part in loop.body]
    while left:
        node, is_own = left.pop()
        if isinstance(node, ast.Return) or (isinstance(node, ast.Break) and is_own):
            found.add(node)
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            left += [(part, False) for part in node.body]
            left += [(part, is_own) for part in node.orelse]
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            left += [(part, is_own) for part in ast.iter_child_nodes(node)]
    return found


def _is_no_stop(test: ast.expr) -> bool:
    return any(name in ast.unparse(test) for name in _NO_STOPS)


def names_in(node: ast.AST) -> set[str]:
    """Return the names, attributes and items in ``node``."""
    return {ast.unparse(part) for part in ast.walk(node) if isinstance(part, (ast.Name, ast.Attribute, ast.Subscript))}


def assigned(node: ast.AST) -> set[str]:
    """Return what is assigned within ``node``, and the objects that are called there, or whose methods are."""
    found: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, (ast.Name, ast.Attribute, ast.Subscript)) and isinstance(part.ctx, ast.Store):
            found.add(ast.unparse(part))
        elif isinstance(part, ast.Expr) and isinstance(part.value, ast.Call):
            called = part.value.func
            found.add(ast.unparse(called.value if isinstance(called, ast.Attribute) else called))
    return found - {"self"}
