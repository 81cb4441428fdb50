"""LoopHeads: how many steps a trial makes, read off the heads of its loops, where a dry run does not come to its end.

    for i in range(3, n)             n - 3 rounds, also in `trange(n)` and `tqdm(range(n))`
    for batch in loader              the steps of an epoch
    while step < n                   (n - step) / growth: `step` at the first step, and what it grows by from one step to the next
    if step >= n: break              likewise
    if args.dry_run: break           never, while it is false

`n` is made of names, attributes, numbers and arithmetic. The steps are the product of the loops around a step, divided by the
rounds of the innermost one from one step to the next, as `if i % 8 == 0` makes them. A loop that ends by a counter must be the
only one. Where a loop has any other end, or other rounds in each round of a loop around it, nothing is said.
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

from perfguard.capture.stops import Loop, assigned, exits_of, frames_of_user, loops_around, names_in

_MORE_ROUNDS = {ast.Lt: 0, ast.NotEq: 0, ast.LtE: 1, ast.GtE: 0, ast.Eq: 0, ast.Gt: 1}
"""Of `while counter < bound`, and of `if counter >= bound: break`: rounds beyond bound - counter."""
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {"int": int, "len": len, "max": max, "min": min}
_MAKING_RANGES = {"range", "trange"}
_SHOWING_PROGRESS = {"tqdm", "track", "progress_bar", "progressbar", "master_bar", "alive_it"}
_STEPS_SEEN = 3


class UnreadableError(Exception):
    """A loop does not say how often it goes round."""


@dataclass(slots=True)
class _Head:
    """What was read of a loop at each step that was seen."""

    loop: Loop
    rounds: list[int] = field(default_factory=list)
    """Of a loop over a range."""
    rounds_before: list[int] = field(default_factory=list)
    """Those that had ended at each step."""
    counts: dict[ast.Compare, list[tuple[float, float]]] = field(default_factory=dict)
    """Counter and bound of each condition that ends the loop."""

    def steps_by_count(self) -> int | None:
        """Return after how many steps a counter ends the loop. None: it has none."""
        return min((_steps_of(test, values) for test, values in self.counts.items()), default=None)

    def rounds_of_a_step(self) -> int:
        """Return the rounds of a loop over a range from one step to the next."""
        rounds = self.rounds[0]
        grown = {(later - earlier) % rounds for earlier, later in itertools.pairwise(self.rounds_before)}
        if len(grown) != 1 or grown == {0}:
            raise UnreadableError
        return grown.pop()


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
                for head in self._heads_in(frame):
                    _read(head, frame)
        except Exception:  # what is read are objects of the user's
            self._problem = True

    def _heads_in(self, frame: FrameType) -> list[_Head]:
        code = frame.f_code
        around = loops_around(code.co_filename, {frame.f_lineno})
        loops = [loop for loop in around if loop.lineno >= code.co_firstlineno]
        heads = self._heads.setdefault((code.co_filename, code.co_firstlineno), [_Head(loop) for loop in loops])
        if [head.loop for head in heads] != loops:  # a step of another loop
            raise UnreadableError
        for outer, inner in itertools.pairwise(loops):
            if isinstance(inner, ast.For) and _range_of(inner.iter, frame) and assigned(outer) & names_in(inner.iter):
                raise UnreadableError
        return heads

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
            ranges = [head for head in heads if head.rounds]
            several = [head for head in ranges if head.rounds[0] > 1]
            of_a_step = several[-1].rounds_of_a_step() if several and not fed else 1
            rounds = math.prod(head.rounds[0] for head in ranges) * (per_epoch or 1) // of_a_step
            if counted:
                return min(*counted, rounds) if ranges else min(counted)
            if len(ranges) + len(fed) == len(heads):
                return rounds
        return None


def _read(head: _Head, frame: FrameType) -> None:
    loop = head.loop
    if isinstance(loop, ast.For):
        numbers = _range_of(loop.iter, frame)
        if numbers is not None:
            head.rounds.append(len(numbers))
            if assigned(loop.target).isdisjoint(
                set().union(*map(assigned, loop.body))
            ):  # else a loop within it has the same name
                head.rounds_before.append(numbers.index(value_in(loop.target, frame)))
    tests = [loop.test] if isinstance(loop, ast.While) and not _is_true(loop.test) else []
    for test in [*tests, *_tests_of_exits(loop)]:
        if isinstance(test, ast.Compare):
            if len(test.ops) != 1:
                raise UnreadableError
            values = number_in(test.left, frame), number_in(test.comparators[0], frame)
            head.counts.setdefault(test, []).append(values)
        elif not isinstance(test, (ast.Name, ast.Attribute)) or ast.unparse(test) in assigned(loop) or value_in(test, frame):
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
    more = _MORE_ROUNDS.get(type(test.ops[0]))
    grown = {later[0] - earlier[0] for earlier, later in itertools.pairwise(values)}
    if more is None or len(grown) != 1 or len({bound for _, bound in values}) != 1:
        raise UnreadableError
    (growth,) = grown
    if growth <= 0:
        raise UnreadableError
    counter, bound = values[0]
    if not counter < bound + more < math.inf:  # -1 or infinity, for instance: the loop has another end
        raise UnreadableError
    return math.ceil((bound + more - counter) / growth)


def _is_true(test: ast.expr) -> bool:
    return isinstance(test, ast.Constant) and bool(test.value)


def _range_of(iterated: ast.expr, frame: FrameType) -> range | None:
    """Return the range that a loop is over, or that of what shows its progress. None: it is over something else."""
    if isinstance(iterated, (ast.Name, ast.Attribute)):
        value = value_in(iterated, frame)
        return value if isinstance(value, range) else None
    if _MAKING_RANGES.isdisjoint(names_in(iterated)):
        return None
    if not isinstance(iterated, ast.Call) or not iterated.args:
        raise UnreadableError
    name = ast.unparse(iterated.func).rpartition(".")[-1]
    if name in _MAKING_RANGES:
        return range(*(int(value_in(each, frame)) for each in iterated.args))
    if name not in _SHOWING_PROGRESS:  # `random.sample(range(n), 5)`, for instance
        raise UnreadableError
    return _range_of(iterated.args[0], frame)


def number_in(node: ast.expr, frame: FrameType) -> float:
    """Return the number that an expression is worth in a frame.

    Raises:
        UnreadableError: if it is none.
    """
    value = value_in(node, frame)
    if type(value) not in (int, float):  # a tensor has a value that no dry run knows
        raise UnreadableError
    return float(value)


def _named(name: str, frame: FrameType) -> Any:
    known = frame.f_locals
    value = known.get(name, frame.f_globals.get(name))
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13):
        known.clear()  # a copy, which would keep the tensors of the loop alive
    return value


def value_in(node: ast.expr, frame: FrameType) -> Any:
    """Return what an expression is worth in a frame, without calling anything of the user's.

    Raises:
        UnreadableError: if that cannot be told so.
    """
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return _named(node.id, frame)
    if isinstance(node, ast.Attribute):
        return getattr(value_in(node.value, frame), node.attr)
    if isinstance(node, ast.Subscript):
        return value_in(node.value, frame)[value_in(node.slice, frame)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value_in(node.operand, frame)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](value_in(node.left, frame), value_in(node.right, frame))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords:
        return _FUNCTIONS[node.func.id](*(value_in(each, frame) for each in node.args))
    raise UnreadableError
