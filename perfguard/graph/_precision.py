"""Another precision of a step that is known: its own operators, with the sizes that were traced in the known one.

A precision decides how many bytes an element has, and which casts run between the other operators; how many elements there are
it does not decide. So where one step in the new precision was traced, each of its numbers is a count of elements of the known
precision times bytes that the new trace shows: operators are matched one by one, what a cast moves is what its input holds, and
what GradScaler does is about scalars and gradients. All of it must give the new trace, number by number, at the sizes of that
trace. A model that looks at a dtype may do another thing at another size in one precision alone: its steps are traced.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from perfguard.graph._graph_batch import attributes_key
from perfguard.graph._optimizer_part import OptimizerPart, StepWithGap
from perfguard.graph._recorder import Moved
from perfguard.graph._schema import OpGraph, StorageKind
from perfguard.graph._template import LARGEST, Sample, Sizes, Template

_CAST = "_to_copy"
_Term = tuple[int, int]
"""A place among the template's numbers, the sizes after them and the one at the end, and a factor."""


class InAnotherPrecision:
    """A step whose numbers follow from those of a template in another precision.

    Args:
        sample: traced in this precision.
        sizes: of the sample.
        template: of another.
        terms: what each number of the step is the sum of.
    """

    def __init__(self, sample: Sample, sizes: Sizes, template: Template, terms: Sequence[Sequence[_Term]]) -> None:
        self.step = sample.step
        self._sample = sample
        self._sizes = sizes
        self._template = template
        self._places, self._factors = np.array([term for row in terms for term in row], dtype=np.int64).T
        self._starts = np.cumsum([0, *map(len, terms)])[:-1]

    @property
    def agrees(self) -> bool:
        """With what was traced."""
        numbers = self.numbers_at(self._sizes)
        return numbers is not None and np.array_equal(numbers, self.step.graph.sizes)

    def through(self, template: Template) -> InAnotherPrecision | None:
        """The same by another template of the same step, through more traces; None if it has to be matched again."""
        mine = self._template
        if template.step is not mine.step or not template.reaches(self._sizes):
            return None
        if not np.array_equal(template.is_constant, mine.is_constant):
            return None
        found = copy.copy(self)
        found._template = template
        return found if found.agrees else None

    def reaches(self, sizes: Sizes) -> bool:
        """As of :class:`Template`."""
        return self._template.reaches(sizes)

    def at(self, sizes: Sizes, optimizer: Hashable, part: OptimizerPart | None) -> OpGraph | None:
        """As of :class:`Template`."""
        numbers = self.numbers_at(sizes)
        return None if numbers is None else self._sample.frames.filled(numbers, optimizer, part)

    def numbers_at(self, sizes: Sizes) -> npt.NDArray[Any] | None:
        """Of the step at ``sizes``; None if they would not be whole."""
        known = self._template.numbers_at(sizes)
        if known is None:
            return None
        values = np.concatenate([known, sizes, [1]])[self._places]
        largest = np.add.reduceat(values.astype(np.float64) * self._factors, self._starts).max()
        if values.dtype != np.int64 or largest > LARGEST:
            values = values.astype(object)
        return np.asarray(np.add.reduceat(values * self._factors, self._starts))


def in_another_precision(sample: Sample, sizes: Sizes, template: Template) -> InAnotherPrecision | None:
    """What ``template``, of another precision, says of ``sample``, traced at ``sizes``; None if it cannot say it for sure."""
    step = sample.step
    if step.reads_dtype or template.step.reads_dtype or not template.reaches(sizes):
        return None
    known = template.numbers_at(sizes)
    terms = None if known is None else _Matching(step, sizes, template, known).terms()
    found = None if terms is None else InAnotherPrecision(sample, sizes, template, terms)
    return found if found is not None and found.agrees else None


class _Matching:
    """The operators of a step beside those of another precision at the same sizes."""

    def __init__(self, step: StepWithGap, sizes: Sizes, template: Template, known: npt.NDArray[Any]) -> None:
        self._mine, self._theirs = step, template.step
        self._sizes = sizes
        self._known = known.tolist()
        self._one = len(known) + len(sizes)
        self._is_constant = [*template.is_constant.tolist(), *[False] * len(sizes), True]
        graph, elements = self._theirs.graph, self._theirs.elements
        self._starts = graph.size_layout.starts.tolist()
        self._storage_counts_at = len(graph.sizes)
        moved = [len(read) + len(written) for read, written in zip(elements.read, elements.written, strict=True)]
        self._moved_at = np.cumsum([self._storage_counts_at + len(graph.storages), *moved]).tolist()
        self._my_births, self._their_births = _births_of(step), _births_of(self._theirs)
        self._same_casts = _num_casts(step) == _num_casts(self._theirs)
        self._columns = template.columns
        self._counts: dict[int, _Term] = {}
        """How many elements each storage of mine has."""
        self._rows: list[list[list[_Term]]] = []
        """The terms of each number of each operator."""

    def terms(self) -> list[list[_Term]] | None:
        """Of each number of the step; None if it does not match."""
        mine, theirs = self._mine.graph, self._theirs.graph
        if not self._match_births(-1, -1):
            return None
        their_at = 0
        for at, op in enumerate(mine.ops):
            place = None if op.name == _CAST and not self._same_casts else self._place_of(at, their_at)
            if place is not None:
                rows = self._matched(at, place)
                their_at = place + 1
            else:
                rows = self._cast(at) if op.name == _CAST else self._of_scalars(at)
            if rows is None:
                return None
            self._rows.append(rows)
        if not self._match_births(len(mine.ops), len(theirs.ops)):
            return None
        storages: list[list[_Term]] = []
        for index, element_bytes in enumerate(self._mine.elements.element_bytes):
            if mine.storages[index].num_bytes == 0:  # it was there in vain
                storages.append([(self._one, 0)])
                continue
            place, factor = self._count_of(index) or (self._one, 0)
            storages.append([(place, factor * element_bytes)])
        return storages + [row for rows in self._rows for row in rows]

    def _place_of(self, my_at: int, start: int) -> int | None:
        """The next operator of theirs that is mine, past those that mine may not have."""
        for at in range(start, len(self._theirs.graph.ops)):
            if self._is_same(my_at, at):
                return at
            counts = range(self._moved_at[at], self._moved_at[at + 1])
            is_cast = self._theirs.graph.ops[at].name == _CAST and not self._same_casts
            if not is_cast and not (counts and all(self._is_constant[c] for c in counts)):
                return None
        return None

    def _is_same(self, my_at: int, their_at: int) -> bool:
        mine, theirs = self._mine.graph.ops[my_at], self._theirs.graph.ops[their_at]
        if (mine.name, mine.phase, mine.module, len(mine.shape)) != (theirs.name, theirs.phase, theirs.module, len(theirs.shape)):
            return False
        read, written = self._moved(my_at)
        at, end = self._moved_at[their_at : their_at + 2]
        same_number = len(read) == len(self._theirs.elements.read[their_at]) and len(read) + len(written) == end - at
        counts = [moved.num_elements for moved in (*read, *written)]
        return (
            same_number and counts == self._known[at:end] and attributes_key(mine.attributes) == attributes_key(theirs.attributes)
        )

    def _moved(self, at: int) -> tuple[tuple[Moved, ...], tuple[Moved, ...]]:
        return self._mine.elements.read[at], self._mine.elements.written[at]

    def _matched(self, my_at: int, their_at: int) -> list[list[_Term]] | None:
        if not self._match_births(my_at, their_at):
            return None
        read, written = self._moved(my_at)
        at = self._moved_at[their_at]
        flops, _, _, *sizes = ([(place, 1)] for place in range(*self._starts[their_at : their_at + 2]))
        read_terms = [(at + index, moved.element_bytes) for index, moved in enumerate(read)]
        written_terms = [(at + len(read) + index, moved.element_bytes) for index, moved in enumerate(written)]
        return [flops, read_terms or [(self._one, 0)], written_terms or [(self._one, 0)], *sizes]

    def _match_births(self, my_at: int, their_at: int) -> bool:
        mine, theirs = self._my_births.get(my_at, []), self._their_births.get(their_at, [])
        for my_index, their_index in zip(mine, theirs, strict=False):
            place = self._storage_counts_at + their_index
            if self._known[place] != self._elements_of(my_index):
                return False
            self._counts[my_index] = place, 1
        return len(mine) == len(theirs)

    def _elements_of(self, storage: int) -> int:
        return self._mine.graph.storages[storage].num_bytes // self._mine.elements.element_bytes[storage]

    def _count_of(self, storage: int) -> _Term | None:
        return (self._one, 1) if self._mine.elements.is_scalar[storage] else self._counts.get(storage)

    def _whole(self, moved: Moved) -> _Term | None:
        """The elements of a tensor that is all of its storage; None: it may be a part."""
        return self._count_of(moved.storage) if moved.num_elements == self._elements_of(moved.storage) else None

    def _cast(self, at: int) -> list[list[_Term]] | None:
        """What is read is written, in another dtype."""
        op, (read, written), born = self._mine.graph.ops[at], self._moved(at), self._my_births.get(at, [])
        source = self._whole(read[0]) if len(read) == len(written) == 1 else None
        if (
            source is None
            or op.flops
            or op.attributes
            or read[0].num_elements != written[0].num_elements
            or born != [written[0].storage]
        ):
            return None
        dimensions = self._dimensions(op.shape, read[0].storage, source)
        if dimensions is None:
            return None
        place, factor = self._counts[written[0].storage] = source
        moved = [[(place, factor * tensor.element_bytes)] for tensor in (read[0], written[0])]
        return [[(self._one, 0)], *moved, *dimensions]

    def _dimensions(self, shape: tuple[int, ...], storage: int, count: _Term) -> list[list[_Term]] | None:
        """Of a tensor that is all of ``storage``."""
        if self._is_constant[count[0]]:  # so is each factor of a product
            return [[(self._one, size)] for size in shape]
        _, kind, birth, _, _ = self._mine.graph.storages[storage]
        if kind is StorageKind.INPUT:
            starts = [at for at in range(len(self._sizes)) if self._sizes[at : at + len(shape)] == shape]
            first = len(self._known) + starts[0] if len(starts) == 1 else None
            return None if first is None else [[(first + index, 1)] for index in range(len(shape))]
        if not 0 <= birth < len(self._rows):
            return None
        made, written = self._mine.graph.ops[birth].shape, self._mine.elements.written[birth]
        if not written or written[0].storage != storage:
            return None
        rows = self._rows[birth][3 : 3 + len(made)]
        return self._permuted(shape, made, rows) if sorted(made) == sorted(shape) else self._merged(shape, made, rows)

    def _permuted(self, shape: Sequence[int], made: Sequence[int], rows: Sequence[list[_Term]]) -> list[list[_Term]] | None:
        """The same shape, or the same dimensions in another order."""
        by_size: dict[int, list[_Term]] = {}
        for size, row in zip(made, rows, strict=True):
            if not self._is_same_everywhere(by_size.setdefault(size, row), row):
                return None
        return [by_size[size] for size in shape]

    def _merged(self, shape: Sequence[int], made: Sequence[int], rows: Sequence[list[_Term]]) -> list[list[_Term]] | None:
        """Each dimension a product of neighbours, of which one at most varies."""
        found: list[list[_Term]] = []
        rest = list(zip(made, rows, strict=True))
        for size in shape:
            term, product = (self._one, 1), 1
            while rest and (product < size or rest[0][0] == 1 or product == 0):
                has, ((place, factor),) = rest.pop(0)
                if self._is_constant[place]:
                    term = term[0], term[1] * has
                elif term[0] == self._one:
                    term = place, term[1] * factor
                else:
                    return None
                product *= has
            if product != size:
                return None
            found.append([term])
        return None if rest else found

    def _is_same_everywhere(self, some: list[_Term], other: list[_Term]) -> bool:
        """Whether two sizes that are equal here are equal at all sizes."""
        ((a, factor), (b, other_factor)) = some[0], other[0]
        if some == other:
            return True
        in_known = max(a, b) < len(self._known) and factor == other_factor == 1
        return in_known and bool((self._columns[:, a] == self._columns[:, b]).all())

    def _of_scalars(self, at: int) -> list[list[_Term]] | None:
        """What does not depend on sizes, such as GradScaler's: from scalars and whole storages that are constant, to the like."""
        op, (read, written) = self._mine.graph.ops[at], self._moved(at)
        counts = [self._whole(moved) for moved in (*read, *written)]
        if self._my_births.get(at) or op.attributes or any(c is None or not self._is_constant[c[0]] for c in counts):
            return None
        sizes = (op.flops, op.bytes_read, op.bytes_written, *op.shape)
        return [[(self._one, size)] for size in sizes]


def _num_casts(step: StepWithGap) -> int:
    return sum(op.name == _CAST for op in step.graph.ops)


def _births_of(step: StepWithGap) -> dict[int, list[int]]:
    """The storages by the operator that made them, without scalars."""
    found: dict[int, list[int]] = {}
    for index, (storage, is_scalar) in enumerate(zip(step.graph.storages, step.elements.is_scalar, strict=True)):
        if not is_scalar:
            found.setdefault(storage.birth, []).append(index)
    return found
