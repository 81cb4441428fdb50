"""Buffers: how many tensors of the device a loop holds at most in what it fills and empties.

    deque(maxlen=n)                                              n, and one that the step has made
    if len(kept) > n: kept.pop(0)      kept = kept[-n:]          likewise
    if len(kept) < n: kept.append(...)                           likewise
    if len(kept) == n: kept.clear()    if i % n == 0: kept = []  n

A dry run cuts the loop short, mostly before the buffer is full. So the bound is read off the source of the loop that runs, and
never depends on how many of its rounds were seen. `n` is what :func:`perfguard.capture.loop_heads.number_in` can read.
"""

from __future__ import annotations

import ast
import collections
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

from perfguard.capture.loop_heads import UnreadableError, number_in, value_in
from perfguard.capture.stops import Loop, frames_of_user, loops_of
from perfguard.graph.recorder import tensors_in
from perfguard.graph.shape_rules import is_meta
from perfguard.pytorch import objects_of

_FILLS = {"append", "extend", "appendleft", "insert"}
_EMPTIES = {"clear", "pop", "popleft"}
_LENGTHS = {ast.Gt: 1, ast.GtE: 0, ast.Eq: 0}
"""Of `if len(kept) > n: kept.pop()`: tensors beyond n that are alive in a step, with the one that it has made."""
_ROOM = {ast.Lt: 1, ast.LtE: 2}
"""Of `if len(kept) < n: kept.append(...)`, likewise."""


def most_held() -> float:
    """Return how many tensors of the device the loop that runs holds at most in its buffers. Infinity: no bound is known."""
    return min(_most_in_deques(), _most_in_lists())


def _most_in_deques() -> float:
    bounded = (each for each in objects_of(collections.deque) if each.maxlen is not None)
    return min((each.maxlen + 1 for each in bounded if _holds_tensors(each)), default=math.inf)


def _most_in_lists() -> float:
    """Of lists that the innermost loop of the user's fills. One that is not emptied has no bound."""
    for frame in frames_of_user():
        around = [loop for loop in loops_of(frame.f_code.co_filename) if _is_around(loop, frame)]
        bounds = [_bound_of(buffer, loop, frame) for loop in around for buffer in _filled_in(loop, frame)]
        if bounds:
            return max(bounds)
    return math.inf


def _is_around(loop: Loop, frame: FrameType) -> bool:
    end = loop.body[-1].end_lineno or 0
    return frame.f_code.co_firstlineno <= loop.lineno <= frame.f_lineno <= end


def _filled_in(loop: Loop, frame: FrameType) -> Iterator[str]:
    """Yield the names of lists that ``loop`` fills with tensors of the device."""
    for node in ast.walk(loop):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _FILLS:
            with suppress(Exception):  # it is read from objects of the user's
                if _holds_tensors(value_in(node.func.value, frame)):
                    yield ast.unparse(node.func.value)


def _holds_tensors(buffer: Any) -> bool:
    return isinstance(buffer, (list, collections.deque)) and bool(buffer) and any(map(is_meta, tensors_in(buffer[-1])))


def _bound_of(buffer: str, loop: Loop, frame: FrameType) -> float:
    """Return how many tensors a ``buffer`` may have in a step, by what empties it in ``loop``."""
    found = [math.inf]
    for node in ast.walk(loop):
        with suppress(UnreadableError):
            if isinstance(node, ast.Assign) and (cut := _cut_to(buffer, node)) is not None:
                found.append(1 - number_in(cut, frame))
            elif isinstance(node, ast.If) and any(_empties(buffer, part) for part in node.body):
                found.append(_bound_by(node.test, buffer, frame))
            elif isinstance(node, ast.If) and any(_fills(buffer, part) for part in node.body):
                found.append(_limit_of_length(node.test, buffer, frame, _ROOM))
    return min(found)


def _cut_to(buffer: str, node: ast.Assign) -> ast.expr | None:
    """Return -n of `buffer = buffer[-n:]`. None: it is something else."""
    value = node.value
    is_cut = isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Slice) and value.slice.upper is None
    if not is_cut or {ast.unparse(node.targets[0]), ast.unparse(value.value)} != {buffer}:  # type: ignore[attr-defined]
        return None
    lower: ast.expr | None = value.slice.lower  # type: ignore[attr-defined]
    return lower if isinstance(lower, ast.UnaryOp) else None


def _empties(buffer: str, part: ast.stmt) -> bool:
    """Whether a statement makes a ``buffer`` empty or shorter."""
    for node in ast.walk(part):
        if isinstance(node, ast.Delete):
            return any(isinstance(target, ast.Subscript) and ast.unparse(target.value) == buffer for target in node.targets)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _EMPTIES:
            if ast.unparse(node.func.value) == buffer:
                return True
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == buffer:
            return ast.unparse(node.value) in ("[]", "list()") or _cut_to(buffer, node) is not None
    return False


def _fills(buffer: str, part: ast.stmt) -> bool:
    """Whether a statement adds to a ``buffer``."""
    called = (node.func for node in ast.walk(part) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute))
    return any(func.attr in _FILLS and ast.unparse(func.value) == buffer for func in called)


def _limit_of_length(test: ast.expr, buffer: str, frame: FrameType, more: Mapping[type[ast.cmpop], int]) -> float:
    """Return the limit of a ``test`` on the length of a ``buffer``, with how many ``more`` its comparison lets be alive."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or ast.unparse(test.left) != f"len({buffer})":
        raise UnreadableError
    if type(test.ops[0]) not in more:
        raise UnreadableError
    return number_in(test.comparators[0], frame) + more[type(test.ops[0])]


def _bound_by(test: ast.expr, buffer: str, frame: FrameType) -> float:
    """Return how many tensors are there when ``test`` holds at the latest."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _period_of(test.operand, frame)
    with suppress(UnreadableError):
        return _limit_of_length(test, buffer, frame, _LENGTHS)
    if not isinstance(test, ast.Compare):
        raise UnreadableError
    return _period_of(test.left, frame)


def _period_of(node: ast.expr, frame: FrameType) -> float:
    """Return n of `i % n`."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return number_in(node.right, frame)
    raise UnreadableError
