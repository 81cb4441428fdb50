"""LoopHeads: how many steps a trial makes, read off the heads of its loops, where a dry run does not come to its end.

    for i in range(3, n)             n - 3 rounds, also in `trange(n)` and `tqdm(range(n))`
    for batch in loader              the steps of an epoch
    while step < n                   (n - step) / growth: `step` at the first step, and what it grows by from one step to the next
    if step >= n: break              likewise
    if args.dry_run: break           never, while it is false

`n` is made of names, attributes, numbers and arithmetic. The steps are the product of the loops around a step. A loop that ends
by a counter must be the only one. Where a loop has any other end, nothing is said.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from perfguard.capture.stops import Loop, assigned, exits_of, frames_of_user, loops_around

_MORE_ROUNDS = {ast.Lt: 0, ast.NotEq: 0, ast.LtE: 1}
"""Of `while counter < bound`: rounds beyond bound - counter."""
_MORE_ROUNDS_TO_BREAK = {ast.GtE: 0, ast.Eq: 0, ast.Gt: 1}
"""Of `if counter >= bound: break`."""
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {"int": int, "len": len, "max": max, "min": min}
_STEPS_SEEN = 3


class UnreadableError(Exception):
    """A loop does not say how often it goes round."""


@dataclass(slots=True)
class _Head:
    """What was read of a loop at each step that was seen."""

    loop: Loop
    rounds: list[int] = field(default_factory=list)
    """Of a loop over a range."""
    counts: dict[ast.Compare, list[tuple[float, float]]] = field(default_factory=dict)
    """Counter and bound of each condition that ends the loop."""

    def steps_by_count(self) -> int | None:
        """Return after how many steps a counter ends the loop. None: it has none."""
        return min((_steps_of(test, values) for test, values in self.counts.items()), default=None)


class LoopHeads:
    """Reads the loops around the first steps of an objective."""

    def __init__(self) -> None:
        self._heads: dict[tuple[str, int], list[_Head]] = {}
        """By the function that they are in, outermost first."""
        self._problem = False
        self._num_steps = 0

    def note_step(self) -> None:
        """Note that a step was made: the user's code that runs now is within its loops."""
        if self._num_steps == _STEPS_SEEN or self._problem:
            return
        self._num_steps += 1
        try:
            for frame in reversed([*frames_of_user()]):
                for head in self._heads_of(frame):
                    _read(head, frame)
        except Exception:  # what is read are objects of the user's
            self._problem = True

    def _heads_of(self, frame: FrameType) -> list[_Head]:
        code = frame.f_code
        place = code.co_filename, code.co_firstlineno
        if place not in self._heads:
            loops = loops_around(code.co_filename, {frame.f_lineno})
            self._heads[place] = [_Head(loop) for loop in loops if loop.lineno >= code.co_firstlineno]
        return self._heads[place]

    def steps(self, per_epoch: int | None) -> int | None:
        """Return the steps of the trial. None: the heads of its loops do not say it.

        Args:
            per_epoch: steps of the loop over the loader that feeds them. None: none does, or its length is not known.
        """
        heads = [head for own in self._heads.values() for head in own]
        if self._problem or self._num_steps < _STEPS_SEEN or not heads:
            return None
        fed = [head for head in heads if isinstance(head.loop, ast.For) and not head.rounds]
        with suppress(UnreadableError):
            counted = [steps for head in heads if (steps := head.steps_by_count()) is not None]
            if len(fed) != (per_epoch is not None) or (counted and len(heads) > 1):
                return None
            ranges = [rounds for head in heads for rounds in head.rounds[:1]]
            if counted:
                return min(*counted, *ranges) if ranges else min(counted)
            if len(ranges) + len(fed) == len(heads):
                return math.prod(ranges) * (per_epoch or 1)
        return None


def _read(head: _Head, frame: FrameType) -> None:
    loop = head.loop
    if isinstance(loop, ast.For):
        with suppress(UnreadableError):  # a loader
            head.rounds.append(_rounds_of(loop.iter, frame))
    tests = [loop.test] if isinstance(loop, ast.While) and not _is_true(loop.test) else []
    for test in [*tests, *_tests_of_exits(loop)]:
        if isinstance(test, ast.Compare):
            if len(test.ops) != 1:
                raise UnreadableError
            values = _number(test.left, frame), _number(test.comparators[0], frame)
            head.counts.setdefault(test, []).append(values)
        elif not isinstance(test, (ast.Name, ast.Attribute)) or ast.unparse(test) in assigned(loop) or _value(test, frame):
            raise UnreadableError


def _tests_of_exits(loop: Loop) -> Iterator[ast.expr]:
    """The condition of each `break` and `return` of ``loop``: that of the innermost `if` that it is the body of."""
    exits = exits_of(loop)
    conditions = [node for node in ast.walk(loop) if isinstance(node, ast.If)]
    for each in exits:
        around = [node for node in conditions if each in node.body]
        if not around:
            raise UnreadableError
        yield around[0].test


def _steps_of(test: ast.Compare, values: list[tuple[float, float]]) -> int:
    more = (_MORE_ROUNDS | _MORE_ROUNDS_TO_BREAK).get(type(test.ops[0]))
    grown = {later[0] - earlier[0] for earlier, later in itertools.pairwise(values)}
    if more is None or len(grown) != 1 or len({bound for _, bound in values}) != 1:
        raise UnreadableError
    (growth,) = grown
    if growth <= 0:
        raise UnreadableError
    counter, bound = values[0]
    return math.ceil((bound + more - counter) / growth)


def _is_true(test: ast.expr) -> bool:
    return isinstance(test, ast.Constant) and bool(test.value)


def _rounds_of(iterated: ast.expr, frame: FrameType) -> int:
    """Rounds of a loop over a range, or over what shows the progress of one."""
    if isinstance(iterated, (ast.Name, ast.Attribute)):
        value = _value(iterated, frame)
        if isinstance(value, range):
            return len(value)
    if not isinstance(iterated, ast.Call) or not iterated.args:
        raise UnreadableError
    name = ast.unparse(iterated.func).rpartition(".")[-1]
    if name in ("range", "trange"):
        return len(range(*(int(_value(each, frame)) for each in iterated.args)))
    return _rounds_of(iterated.args[0], frame)  # tqdm, for instance


def _number(node: ast.expr, frame: FrameType) -> float:
    value = _value(node, frame)
    if type(value) not in (int, float):  # a tensor has a value that no dry run knows
        raise UnreadableError
    return float(value)


def _named(name: str, frame: FrameType) -> Any:
    known = frame.f_locals
    value = known.get(name, frame.f_globals.get(name))
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13):
        known.clear()  # a copy, which would keep the tensors of the loop alive
    return value


def _value(node: ast.expr, frame: FrameType) -> Any:
    """Return what an expression is worth in a frame, without calling anything of the user's."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return _named(node.id, frame)
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, frame), node.attr)
    if isinstance(node, ast.Subscript):
        return _value(node.value, frame)[_value(node.slice, frame)]
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_value(node.left, frame), _value(node.right, frame))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords:
        return _FUNCTIONS[node.func.id](*(_value(each, frame) for each in node.args))
    raise UnreadableError
