"""Recording: what a dry run has seen, as data, and by which parts of it a trial is judged.

    operators and storages      in the order in which they ran and were made
    a span                      operators from a number up to another one: a step, an evaluation, work between two steps

A trial is judged by the second step, or by the third one where that has less beside it; by the evaluation after the first epoch;
and by what runs wherever else more is alive. Nothing here asks PyTorch.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from perfguard.graph.op import Life, Op, Phase, Storage, StorageKind
from perfguard.graph.recorder import kind_by_lifetime, live_bytes
from perfguard.pytorch import path_inside
from perfguard.workload import Mode


class Span(NamedTuple):
    """Operators ``begin`` to ``end``."""

    begin: int
    end: int
    after: int | None = None
    """Of a step of a loop: where the next step ends, which frees what the loop keeps of this one. None: it is none."""


@dataclass(slots=True)
class Events:
    """What happened while a dry run was recorded, by the number of operators before it."""

    steps: list[int] = field(default_factory=list)
    """Ends of steps, since the last optimizer began that belongs to a step."""
    copies: list[int] = field(default_factory=list)
    """Number of tensors copied to the device, at these."""
    batches: list[int] = field(default_factory=list)
    """Number of batches that models have read, likewise."""
    stages: list[Span] = field(default_factory=list)
    """A step of each earlier optimizer."""
    forwards: list[tuple[int, bool]] = field(default_factory=list)
    """Forward passes of models, and whether each had no gradients."""
    clean: list[int] = field(default_factory=list)
    """After the first steps: where there was no garbage."""


@dataclass(frozen=True, slots=True)
class Recording:
    """What was recorded of an objective."""

    ops: Sequence[Op]
    lives: Sequence[Life]
    """Of each storage, and of what loops that were cut short would hold besides."""
    lasting: Mapping[int, tuple[StorageKind, str]]
    """Kind and name of what models hold, by the index of the storage, in the order of a described workload."""
    events: Events
    left_at: Sequence[int] = ()
    """Where a model has left the device."""
    first_ended_at: int | None = None
    """Where the second epoch begins. None: there is none."""

    @property
    def first_forward(self) -> int:
        """Where the first forward pass begins."""
        found = (index for index, op in enumerate(self.ops) if op.module and op.phase is Phase.FORWARD)
        return next(found, 0)

    @property
    def end_of_first_epoch(self) -> int:
        """Where the last step of the first epoch ends."""
        ops = self.ops[: self.first_ended_at]
        return 1 + max((index for index, op in enumerate(ops) if op.phase is not Phase.FORWARD), default=-1)

    @property
    def num_later_steps(self) -> int:
        """Steps after the first epoch."""
        return num_later_steps(self.events.steps, self.first_ended_at)

    def step(self, number: int) -> Span:
        """Return the step after the end of step ``number``. If there is but one, return that."""
        steps = self.events.steps
        return Span(self.first_forward, steps[0]) if len(steps) < 2 else step_of(steps, number)

    def usual_step(self, first: int) -> int:
        """Return the number of the step that is most as others are: ``first`` or the one after it."""
        candidates = range(first, min(first + 2, len(self.events.steps) - 1))
        return min(candidates, key=self._is_unusual, default=first)

    def _is_unusual(self, number: int) -> tuple[bool, bool]:
        """Whether a step has an evaluation, and whether the next one is another: an average of weights begins with a copy."""
        begin, end = self.events.steps[number : number + 2]
        evaluates = any(evaluates and begin <= at < end for at, evaluates in self.events.forwards)
        lengths = [end - begin for begin, end in itertools.pairwise(self.events.steps[number : number + 3])]
        return evaluates, len(set(lengths)) != 1 or len(lengths) < 2

    @property
    def evaluation(self) -> Span | None:
        """What was computed between the last step of the first epoch and the second epoch. None: nothing was."""
        begin = self.end_of_first_epoch
        end = len(self.ops) if self.first_ended_at is None else self.first_ended_at
        return Span(begin, end) if any(op.module for op in self.ops[begin:end]) else None

    def largest_beside(self, judged: Sequence[Span], *, share: float = 0.01) -> tuple[str, Mode, Span] | None:
        """Return what runs where more is alive than in all that is ``judged``, by a ``share`` at least, named. None: nothing.

        What comes before the first forward pass does not count: the host may have made it. Nor do steps after which no garbage is
        collected: of the first epoch, all but five, and after it, all but three. Evaluations and larger inputs do.
        """
        ops = self.ops
        steps = self.events.steps
        forwards = self.events.forwards
        live = live_bytes(self.lives, len(ops))
        counts = self._where_garbage_is_gone()
        is_judged = np.zeros(len(ops), np.bool_)
        for span in judged:
            is_judged[span.begin : span.end] = True
        live_beside = np.where(counts & ~is_judged, live, 0.0)
        if live_beside.max(initial=0.0) <= (1 + share) * live[is_judged].max(initial=0.0):
            return None
        at = int(live_beside.argmax())
        forward, evaluates = max((seen for seen in forwards if seen[0] <= at), default=(0, False))
        step = bisect_right(steps, at)
        begin = steps[step - 1] if step else self.first_forward
        end = steps[step] if step < len(steps) else len(ops)
        if evaluates and all(op.phase is Phase.FORWARD for op in ops[forward : at + 1]):
            trains = (where for where, evaluates in forwards if where > at and not evaluates)
            return "an evaluation", "infer", Span(begin, min(end, next(trains, end)))
        if step and forward < begin:
            return "work between two steps, such as a checkpoint", "infer", Span(begin, end)
        return "a later step" if step else "the first step", "train", Span(begin, end)

    def _where_garbage_is_gone(self) -> npt.NDArray[np.bool_]:
        ops = self.ops
        steps = self.events.steps
        found = np.zeros(len(ops), np.bool_)
        found[steps[0] if self.events.stages else self.first_forward : steps[:5][-1]] = True
        found[self.end_of_first_epoch : steps[: len(steps) - self.num_later_steps + 3][-1]] = True
        for at in self.events.clean:
            found[at : next((step for step in steps if step > at), len(ops))] = True
        found[steps[-1] : min([len(ops), *(at for at in self.left_at if at >= steps[-1])])] = True
        return found

    def cut(self, span: Span) -> tuple[tuple[Op, ...], tuple[Storage, ...]]:
        """Cut a span out, see :func:`cut_step`."""
        return cut_step(self.ops, self.lives, self.lasting, *span)


def step_of(steps: Sequence[int], number: int) -> Span:
    """Return the step after the end of step ``number``."""
    after = steps[number + 2] if len(steps) > number + 2 else None
    return Span(steps[number], steps[number + 1], after)


def num_later_steps(steps: Sequence[int], first_ended_at: int | None) -> int:
    """Return the number of ``steps`` that end in a later epoch than the first."""
    return 0 if first_ended_at is None else sum(step > first_ended_at for step in steps)


def dtype_of_most_arithmetic(ops: Sequence[Op]) -> str:
    """Return the dtype of most of the arithmetic. Empty: there is none."""
    flops: Counter[str] = Counter()
    for op in ops:
        flops[op.dtype] += op.flops
    return max(flops, key=lambda dtype: flops[dtype], default="")


def cut_step(
    ops: Sequence[Op],
    lives: Sequence[Life],
    lasting: Mapping[int, tuple[StorageKind, str]],
    begin: int,
    end: int,
    after: int | None,
) -> tuple[tuple[Op, ...], tuple[Storage, ...]]:
    """Cut operators ``begin`` to ``end`` out of a recording as one step of a loop, with indices of their own.

    A batch is there before the step, until nothing holds it: `model(x.cuda())` may free it early. Those of micro-batches are
    there to the end.
    What the step before has left is not cut out: it is the same as what this step leaves to the next one, which ends at
    ``after``. None: what is cut out is no step of a loop, and has before it what came before.
    """
    number = end - begin
    window = ops[begin:end]
    rows: list[tuple[tuple[int, int], int, Storage]] = []
    place = {index: rank for rank, index in enumerate(lasting)}
    alias: dict[int, int] = {}
    latest: dict[tuple[str, int], tuple[int, float]] = {}
    held_until: dict[int, int] = {}
    order = {StorageKind.INPUT: 1, StorageKind.OPTIMIZER_STATE: 2, StorageKind.BUFFER: 3, StorageKind.GRADIENT: 4}
    for index, life in enumerate(lives):
        kind, name = lasting.get(index, (life.kind, life.name))
        birth = life.birth - begin
        death = math.inf if life.death is None else life.death - begin
        if death < birth:  # a batch that was copied in a replayed part of the loop, and that no operator has read
            continue
        if index in place and birth <= 0:  # one that is assigned later, as by `parameter.data = ...`, is not there before
            rows.append(((0, place[index]), index, Storage(life.num_bytes, lasting[index][0], -1, number, name)))
        elif birth >= number or death < 0 or (birth < 0 and death < number and after is not None):
            continue
        elif kind is StorageKind.INPUT and (birth >= 0 or death >= number):
            same, until = latest.get((name, life.num_bytes), (index, -1))
            latest[name, life.num_bytes] = same, death
            if same != index and until < birth:  # the next micro-batch takes the place of the last
                alias[index] = same
                continue
            held_until[index] = int(min(death, number - 1))
            rows.append(((1, index), index, Storage(life.num_bytes, kind, -1, number - 1, name)))
        elif birth < 0:  # it outlives steps, or was left behind by what came before
            kind = StorageKind.TEMPORARY if death < number else StorageKind.BUFFER if kind is None else kind
            storage = Storage(life.num_bytes, kind, -1, int(min(death, number)), path_inside(name))
            rows.append(((order.get(kind, 5), index), index, storage))
        else:
            final = int(death) if death < number else number
            if after is not None and life.death is not None and number <= death < after - begin:
                final = number + 1 + min(life.death - end, number - 1)  # in the next step
            kind = kind_by_lifetime(life.birth_phase, None if final == number else final, window) if kind is None else kind
            rows.append(((6, index), index, Storage(life.num_bytes, kind, birth, final, path_inside(name))))
    rows.sort(key=lambda row: row[0])
    new = {index: position for position, (_, index, _) in enumerate(rows)}
    new |= {index: new[same] for index, same in alias.items()}
    renumbered = tuple(
        op._replace(inputs=tuple(new[i] for i in op.inputs if i in new), outputs=tuple(new[i] for i in op.outputs if i in new))
        for op in window
    )
    has_micro_batches = len(held_until) + len(alias) > len(latest)
    if has_micro_batches:  # when the inputs of one that is a copy die is not followed
        return renumbered, tuple(storage for _, _, storage in rows)
    return renumbered, tuple(storage._replace(death=held_until.get(index, storage.death)) for _, index, storage in rows)
