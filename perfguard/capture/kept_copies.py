"""KeptCopies: where a loop keeps a copy of weights, the next copy is made while the last one is alive.

    if value > best_value: best = copy.deepcopy(model.state_dict())     two copies are alive at once
    best = {name: w.clone() for name, w in average.items()}             likewise; of an optimizer's states, too
    best = None; best = copy.deepcopy(...)                              one is
    best = {name: w.cpu() for ...}                                      none is on the device

A value is 0 in a dry run, so it never improves twice, and the line runs once at most. So where its loop begins anew, the copy is
made once more, beside the one that is there, and freed. Notation:

    a binding     a statement that binds a name or an attribute to what a call returns
    the loop      the innermost one around what the user's code runs now, in its innermost function that has one

A binding in a loop of its own, such as one over parameters, replaces them one by one, and is left alone.
"""

from __future__ import annotations

import ast
import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import NamedTuple

import torch

from perfguard.capture.stops import frames_of_user, loops_of, tree_of
from perfguard.graph.recorder import Recorder
from perfguard.graph.shape_rules import META

_Loop = tuple[str, int]
"""A file and the line of the head."""


class _Binding(NamedTuple):
    """A statement that binds a place to what it computes."""

    target: str
    lines: range
    function: int
    """Line of the function that it stands in. 0: it stands in none."""
    loops: frozenset[_Loop]
    """Loops of that function around it."""
    frees_first: bool
    """Whether the statements before it let go of what was bound."""


class _Running(NamedTuple):
    """A binding that runs."""

    file: str
    binding: _Binding
    around: frozenset[_Loop]
    """Loops of the functions that have called its own."""


@dataclass(slots=True)
class _Kept:
    """Copies that one statement has made."""

    bindings: frozenset[_Running]
    """Statements of the user's that ran then."""
    sources: dict[int, weakref.ref[torch.UntypedStorage]] = field(default_factory=dict)
    """What was copied, by the index of its storage."""
    copies: list[int] = field(default_factory=list)
    is_made_again: bool = False


class KeptCopies:
    """Follows copies that the user's code makes beside models and steps, and makes some again.

    Args:
        recorder: writes down what is made.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._kept: list[_Kept] = []
        self._makes_again = False

    def note(self, source: torch.Tensor, copied: torch.Tensor) -> None:
        """Note that the user's code has made a copy of ``source``."""
        if self._makes_again:
            return
        bindings = frozenset(_running(frames_of_user()))
        if not bindings:
            return
        index = self._recorder.index_of(source)
        if not self._kept or self._kept[-1].bindings != bindings or index in self._kept[-1].sources:
            self._kept.append(_Kept(bindings))
        self._kept[-1].sources[index] = weakref.ref(source.untyped_storage())
        self._kept[-1].copies.append(self._recorder.index_of(copied))

    def make_again(self, last_step: int) -> None:
        """Make copies again that the loop which begins anew repeats. What it copies is older than operator ``last_step``."""
        waiting = [kept for kept in self._kept if not kept.is_made_again]
        if not waiting:
            return
        frames = [*frames_of_user()]
        loop = _innermost(frames)
        running = _loops_around(frames, with_heads=True)
        if loop is None:
            return
        repeated = [kept for kept in waiting if _repeats(kept, loop, running)]
        if not repeated:  # asked at each step, and what is written down of all storages is long
            return
        lives = self._recorder.lives()
        for kept in repeated:
            sources = [ref() for index, ref in kept.sources.items() if lives[index].birth < last_step]
            are_alive = not any(self._recorder.are_dead([index]) for index in kept.copies)
            if are_alive and all(sources) and len(sources) == len(kept.sources):
                kept.is_made_again = True
                self._make(source for source in sources if source is not None)

    def _make(self, sources: Iterable[torch.UntypedStorage]) -> None:
        self._makes_again = True
        try:
            with torch.no_grad():
                made = [torch.empty(0, dtype=torch.uint8, device=META).set_(source).clone() for source in sources]
            del made
        finally:
            self._makes_again = False


def _repeats(kept: _Kept, loop: _Loop, running: frozenset[_Loop]) -> bool:
    """Whether a ``loop`` binds anew what holds the copies. It and the loops that it is in are ``running``."""
    return any(
        not other.frees_first
        and other.loops <= running
        and (loop in other.loops or (not other.loops and _is_called_in(loop, mine, other)))
        for mine in kept.bindings
        for other in _bindings_of(mine.file)
        if other.target == mine.binding.target and (other.function == mine.binding.function or "." in other.target)
    )


def _is_called_in(loop: _Loop, mine: _Running, other: _Binding) -> bool:
    """Whether a ``loop`` calls a function whose own loops are not around its binding: it has, or it is another method."""
    return loop in mine.around if other == mine.binding else "." in other.target


def _innermost(frames: Iterable[FrameType]) -> _Loop | None:
    for frame in frames:
        found = _loops_around([frame], with_heads=False)
        if found:
            return max(found, key=lambda loop: loop[1])
    return None


def _loops_around(frames: Iterable[FrameType], *, with_heads: bool) -> frozenset[_Loop]:
    """Return the loops that are around the lines of ``frames``, with or without those whose head runs."""
    found = set()
    for frame in frames:
        name = frame.f_code.co_filename
        line = frame.f_lineno
        for loop in loops_of(name):
            first = loop.lineno if with_heads else loop.body[0].lineno
            if frame.f_code.co_firstlineno <= loop.lineno and first <= line <= (loop.body[-1].end_lineno or 0):
                found.add((name, loop.lineno))
    return frozenset(found)


def _running(frames: Iterable[FrameType]) -> Iterator[_Running]:
    """Yield the bindings that the user's code runs in ``frames``, of which the innermost comes first."""
    frames = [*frames]
    for depth, frame in enumerate(frames):
        name = frame.f_code.co_filename
        for binding in _bindings_at(name).get(frame.f_lineno, ()):
            yield _Running(name, binding, _loops_around(frames[depth + 1 :], with_heads=False))


@functools.cache
def _bindings_at(name: str) -> Mapping[int, list[_Binding]]:
    """Return the bindings of a file by their lines."""
    found: dict[int, list[_Binding]] = {}
    for each in _bindings_of(name):
        for line in each.lines:
            found.setdefault(line, []).append(each)
    return found


@functools.cache
def _bindings_of(name: str) -> list[_Binding]:
    """Return the statements of a file that bind a name, an attribute or an item of a constant key to what a call returns."""
    return [*_bindings_in(tree_of(name).body, name, 0, frozenset())]


def _bindings_in(body: list[ast.stmt], name: str, function: int, loops: frozenset[_Loop]) -> Iterator[_Binding]:
    for at, node in enumerate(body):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            yield from _bindings_by(node, body[:at], function, loops)
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        within = loops | {(name, node.lineno)} if isinstance(node, (ast.For, ast.While)) else loops
        for part in _bodies_of(node):
            yield from _bindings_in(part, name, node.lineno if is_function else function, frozenset() if is_function else within)


def _bodies_of(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    yield from (part for field_name in ("body", "orelse", "finalbody") if (part := getattr(node, field_name, None)))
    yield from (part.body for field_name in ("handlers", "cases") for part in getattr(node, field_name, ()))


def _bindings_by(
    node: ast.Assign | ast.AnnAssign, before: list[ast.stmt], function: int, loops: frozenset[_Loop]
) -> Iterator[_Binding]:
    if node.value is None or not any(isinstance(part, ast.Call) for part in ast.walk(node.value)):
        return
    lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    for whole in node.targets if isinstance(node, ast.Assign) else [node.target]:
        for target in whole.elts if isinstance(whole, (ast.Tuple, ast.List)) else [whole]:
            if isinstance(target, ast.Subscript) and not isinstance(target.slice, ast.Constant):
                continue
            place = ast.unparse(target)
            frees_first = any(_lets_go(place, each) for each in before)
            yield _Binding(place, lines, function, loops, frees_first)


def _lets_go(place: str, node: ast.stmt) -> bool:
    """Whether a statement frees what is bound to ``place``: `del best`, `best = None`, `best.clear()`."""
    if isinstance(node, ast.Delete):
        return place in map(ast.unparse, node.targets)
    if isinstance(node, ast.Expr):
        return ast.unparse(node.value) == f"{place}.clear()"
    is_empty = isinstance(node, ast.Assign) and ast.unparse(node.value) in ("None", "{}", "[]", "dict()", "list()")
    return is_empty and place in map(ast.unparse, node.targets)  # type: ignore[attr-defined]
