"""Repetition: what ran twice alike is written down again without running.

A recording has operators and, for each storage, its life. What ran from ``start`` to ``middle`` is the model of what ran from
there to ``end``: the same operators, on storages made in the same order. A copy is ``n`` operators later, and

    birth, death         of a storage in the copy are those in the model, later by as much
    a storage that       outlives the next n operators has no bytes in a copy: what keeps it is not repeated, and is there really
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from perfguard.graph.op import Life, Op, Phase, StorageKind


class Place(NamedTuple):
    """A place in a recording: how many operators and storages are before it."""

    num_ops: int
    num_lives: int


class Repetition:
    """Appends copies of the last part of a recording to it.

    Args:
        ops, lives: the recording.
        start, middle, end: of the model and of what is like it (:func:`are_alike`). The recording ends at ``end``.
    """

    def __init__(self, ops: list[Op], lives: list[Life], start: Place, middle: Place, end: Place) -> None:
        self._ops = ops
        self._lives = lives
        self._middle = middle
        self._own_ops = ops[middle.num_ops : end.num_ops]
        model = lives[start.num_lives : middle.num_lives]
        for at, (one, own) in enumerate(zip(model, lives[middle.num_lives : end.num_lives], strict=True), middle.num_lives):
            lives[at] = own._replace(kind=one.kind, name=one.name)  # what reads an input tells it from a target
        self._own_lives = lives[middle.num_lives : end.num_lives]
        self._ends_after = [
            None if life.death is None or life.death >= end.num_ops else life.death - start.num_ops for life in model
        ]
        """Operators from the beginning of a part to the death of each of its storages. None: it outlives the next part."""
        self._first_of_before = start.num_lives
        self._first_of_latest = middle.num_lives

    @property
    def num_ops(self) -> int:
        """Operators of a copy."""
        return len(self._own_ops)

    @property
    def latest(self) -> range:
        """Indices of the storages of the latest copy, or of what is copied."""
        return range(self._first_of_latest, self._first_of_latest + len(self._own_lives))

    def num_bytes_beside(self, indices: Set[int]) -> int:
        """Bytes that forward work has made in what is copied, but for inputs and storages of these ``indices``."""
        return forward_bytes(life for index, life in enumerate(self._own_lives, self._middle.num_lives) if index not in indices)

    def append(self) -> dict[int, int]:
        """Append a copy. Return when the storages die that it and what is copied have made, by their indices."""
        is_first = self._first_of_latest == self._middle.num_lives
        deaths = self._deaths(self._middle) if is_first else {}
        place = Place(len(self._ops), len(self._lives))
        shift = place.num_ops - self._middle.num_ops
        for life, after in zip(self._own_lives, self._ends_after, strict=True):
            num_bytes = 0 if after is None else life.num_bytes
            birth = life.birth + shift
            self._lives.append(life._replace(num_bytes=num_bytes, birth=birth, death=birth))
        before = self._first_of_before
        own = self._middle.num_lives

        def moved(index: int) -> int:
            if index >= own:
                return index - own + place.num_lives
            return index - before + self._first_of_latest if index >= before else index

        for op in self._own_ops:
            self._ops.append(op._replace(inputs=tuple(map(moved, op.inputs)), outputs=tuple(map(moved, op.outputs))))
        self._first_of_latest = place.num_lives
        return deaths | self._deaths(place)

    def end(self, there: Mapping[int, int]) -> None:
        """End the repetition: in the latest copy, storages that are there take the place of those that it has made, by index."""
        for index, real in there.items():
            made = self._lives[index]
            self._lives[real] = self._lives[real]._replace(kind=made.kind, birth=made.birth, name=made.name)
            self._lives[index] = made._replace(death=made.birth - 1)

        def put(index: int) -> int:
            return there.get(index, index)

        for at, op in enumerate(self._ops[-self.num_ops :], len(self._ops) - self.num_ops):
            self._ops[at] = op._replace(inputs=tuple(map(put, op.inputs)), outputs=tuple(map(put, op.outputs)))

    def _deaths(self, begin: Place) -> dict[int, int]:
        return {begin.num_lives + at: begin.num_ops + after for at, after in enumerate(self._ends_after) if after is not None}


def forward_bytes(lives: Iterable[Life]) -> int:
    """Bytes of the storages that forward work has made, but for inputs."""
    return sum(life.num_bytes for life in lives if life.birth_phase is Phase.FORWARD and life.kind is not StorageKind.INPUT)


def are_alike(ops: Sequence[Op], lives: Sequence[Life], start: Place, middle: Place, end: Place) -> bool:
    """Whether the same operators ran from ``start`` to ``middle`` as from there to ``end``, on storages made in the same order.

    Both may read what the part before them has left, and what was there before: the same, or inputs of as many bytes.
    """
    number = middle.num_ops - start.num_ops
    shift = middle.num_lives - start.num_lives
    if not number or (end.num_ops - middle.num_ops, end.num_lives - middle.num_lives) != (number, shift):
        return False
    made = zip(lives[start.num_lives : middle.num_lives], lives[middle.num_lives : end.num_lives], strict=True)
    if any(one.num_bytes != other.num_bytes or one.birth + number != other.birth for one, other in made):
        return False

    def are_same(one: int, other: int) -> bool:
        if one >= start.num_lives:
            return other == one + shift
        return other == one or start.num_lives <= other < middle.num_lives or are_inputs(one, other)

    def are_inputs(*indices: int) -> bool:
        """Whether they are batches that were read ahead."""
        alike = {(lives[index].kind, lives[index].num_bytes) for index in indices}
        return len(alike) == 1 and alike.pop()[0] is StorageKind.INPUT

    return all(
        one._replace(inputs=(), outputs=()) == other._replace(inputs=(), outputs=())
        and len(one.inputs) == len(other.inputs)
        and len(one.outputs) == len(other.outputs)
        and all(map(are_same, (*one.inputs, *one.outputs), (*other.inputs, *other.outputs)))
        for one, other in zip(ops[start.num_ops : middle.num_ops], ops[middle.num_ops : end.num_ops], strict=True)
    )
