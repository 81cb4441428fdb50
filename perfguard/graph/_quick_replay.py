"""What the allocator reserves with its default settings, fast: the same as `replay_allocator`, without its objects.

A decision asks for one graph, a search for thousands of one form. What a step allocates and frees in which order is worked out
once for a form; the replay then runs on numbers in units of 512 bytes, for one graph on sorted lists, for many on arrays.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from perfguard.graph._allocator import (
    LARGE_SEGMENT,
    MIN_BLOCK,
    MIN_LARGE_REQUEST,
    MOST_STEPS,
    ROUND_LARGE,
    SMALL_REQUEST,
    SMALL_SEGMENT,
    AllocatorSettings,
    plan_of,
    segment_size,
)

if TYPE_CHECKING:
    from perfguard.graph._schema import OpGraph

_MOST_ROUNDED = LARGE_SEGMENT // MIN_BLOCK + 1
"""Units by which a segment is at most larger than its request, and the address that is left out after it."""
_SIZE_AT = 30
"""Bits of an address in :class:`_FreeBlocks`, and of a size."""
_ADDRESS = (1 << _SIZE_AT) - 1
_POOL_AT = 2 * _SIZE_AT
_NO_BLOCK = (1 << _POOL_AT + 2) - 1
"""Of :class:`_FreeBlocks`: its address and its size are what no block has, and it is larger than every block."""
_SMALL_UNITS = SMALL_REQUEST // MIN_BLOCK
_MANY = 128
"""Graphs from which arrays are faster than lists."""
_ROOM = 12


class _Program(NamedTuple):
    """What a step asks of the allocator, whatever its sizes: i allocates storage i, ~i frees it if it is there."""

    lasting: list[int]
    first: list[int]
    """The first step. Index len(storages) is cuBLAS's workspace."""
    later: list[int]
    """Any other; indices from len(storages) + 1 are the batch before."""
    inputs: list[int]


_programs: WeakKeyDictionary[OpGraph, _Program] = WeakKeyDictionary()


def _program_of(graph: OpGraph) -> _Program:
    known = _programs.get(graph)
    if known is None:
        known = _programs[graph] = _make_program(graph)
    return known


def _make_program(graph: OpGraph) -> _Program:
    plan, number, end = plan_of(graph), len(graph.storages), len(graph.ops)

    def made(indices: Iterable[int]) -> list[int]:
        return [event for index in indices for event in ((index, ~index) if index in plan.dies_unused else (index,))]

    def freed(indices: Iterable[int]) -> list[int]:
        return [~index for index in indices]

    first = made(plan.inputs)
    later = [*first, *freed(range(number + 1, number + 1 + len(plan.inputs))), *freed(plan.leftover)]
    for i in range(end):
        both = made(plan.births[i]) + freed(plan.deaths[i])
        first += [number] * (i == plan.first_product) + (made(plan.state) if i == plan.first_update else []) + both
        later += both
    last = made(plan.births[end])
    return _Program(made(plan.lasting), first + last, later + last, plan.inputs)


def reserved_bytes_of(skeleton: OpGraph, storage_bytes: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """As ``replay_allocator(graph).reserved_bytes`` for each of C graphs with one skeleton, faster.

    Args:
        skeleton: what they have in common.
        storage_bytes: of each graph the bytes of its storages. Shape: (C, S).

    Returns:
        int64, or Python's integers where these would not fit. Shape: (C,).
    """
    program = _program_of(skeleton)
    wanted = _wanted(program, storage_bytes)
    found = _reserved_units_of_many(program, wanted) if len(storage_bytes) >= _MANY else None
    units = [_reserved_units(program, column) for column in wanted.T.tolist()] if found is None else found.tolist()
    num_bytes = [MIN_BLOCK * number for number in units]
    return np.array(num_bytes, dtype=np.int64 if max(num_bytes, default=0) < 2**63 else object)


def _wanted(program: _Program, storage_bytes: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Units of the storages, of cuBLAS's workspace, and of the inputs once more. Shapes: (C, S) → (S + 1 + inputs, C)."""
    units = -(-storage_bytes // MIN_BLOCK)
    workspace = np.full((len(units), 1), AllocatorSettings().cublas_workspace_bytes // MIN_BLOCK)
    return np.ascontiguousarray(np.concatenate([units, workspace, units[:, program.inputs]], axis=1).T)


def _reserved_units(program: _Program, wanted: list[int]) -> int:
    """A free block is one number, its size and then its address, so that sorted numbers are in the order of the best fit. Between
    two segments an address is left out, so that only neighbours in one segment meet.

    An address has bits enough for every request of every step in a segment of its own, so that no size is too large.
    """
    inputs = program.inputs
    number = len(wanted) - len(inputs) - 1
    most_requests = len(program.lasting) + len(program.first) + MOST_STEPS * len(program.later)
    address_bits = (most_requests * (max(wanted) + _MOST_ROUNDED) + 1).bit_length()
    small, mask = _SMALL_UNITS, (1 << address_bits) - 1
    free_small: list[int] = []
    free_large: list[int] = []
    size_from: dict[int, int] = {}  # of the free block that starts at an address
    size_to: dict[int, int] = {}  # of the one that ends there
    blocks: list[int] = [0] * len(wanted)  # numbers as in the lists of free ones; 0: none
    next_address, reserved = 1, 0
    bisect_left, insort = bisect.bisect_left, bisect.insort

    def run(events: list[int]) -> None:
        nonlocal next_address, reserved
        for event in events:
            if event >= 0:
                size = wanted[event]
                if not size:
                    continue
                is_small = size <= small
                free = free_small if is_small else free_large
                at = bisect_left(free, size << address_bits)
                if at < len(free):
                    block = free.pop(at)
                    has, address = block >> address_bits, block & mask
                    del size_from[address], size_to[address + has]
                else:
                    has, address = segment_size(size * MIN_BLOCK) // MIN_BLOCK, next_address
                    next_address += has + 1
                    reserved += has
                rest = has - size
                if rest > (0 if is_small else small):
                    start = address + size
                    insort(free, rest << address_bits | start)
                    size_from[start] = size_to[address + has] = rest
                    has = size
                blocks[event] = has << address_bits | address
                continue
            block = blocks[event := ~event]
            if not block:
                continue
            blocks[event] = 0
            free = free_small if wanted[event] <= small else free_large
            has, address = block >> address_bits, block & mask
            if left := size_to.pop(address, 0):
                address -= left
                del free[bisect_left(free, left << address_bits | address)], size_from[address]
                has += left
            if right := size_from.pop(address + has, 0):
                del free[bisect_left(free, right << address_bits | address + has)], size_to[address + has + right]
                has += right
            insort(free, has << address_bits | address)
            size_from[address] = size_to[address + has] = has

    run(program.lasting)
    run(program.first)
    for _ in range(1, MOST_STEPS):
        before = reserved
        for at, index in enumerate(inputs, number + 1):
            blocks[at], blocks[index] = blocks[index], 0
        run(program.later)
        if reserved == before:
            break
    return reserved


class _FreeBlocks:
    """The free blocks of C allocators, one column each, in no order: pool, size and address in one number.

    A row may be taken in some columns and not in others. What is freed goes into a new row; rows are sorted together when there
    are no more.
    """

    def __init__(self, number: int) -> None:
        self._codes = np.full((_ROOM, number), _NO_BLOCK, dtype=np.int64)
        self._used = 0

    @property
    def codes(self) -> npt.NDArray[np.int64]:
        """Shape: (rows, C)."""
        return self._codes[: self._used]

    def add(self, codes: npt.NDArray[np.int64]) -> None:
        """Of each column a block, or none. Shape: (C,)."""
        if self._used == len(self._codes):
            self._codes.sort(axis=0)
            self._used = int((self._codes != _NO_BLOCK).sum(axis=0).max(initial=0))
            wider = np.full((self._used + _ROOM, self._codes.shape[1]), _NO_BLOCK, dtype=np.int64)
            wider[: self._used] = self._codes[: self._used]
            self._codes = wider
        self._codes[self._used] = codes
        self._used += 1

    def keep(self, columns: npt.NDArray[np.bool_]) -> None:
        """Forget the others."""
        self._codes = np.ascontiguousarray(self._codes[:, columns])


def _reserved_units_of_many(program: _Program, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
    """:func:`_reserved_units` of C allocators at once. Shapes: (sizes, C) → (C,).

    None: they need more than :class:`_FreeBlocks` can count (512 GiB), or a storage is empty in some of them alone.
    """
    is_empty = sizes == 0
    if sizes.max(initial=0) >= _ADDRESS or (is_empty.any(axis=1) & ~is_empty.all(axis=1)).any():
        return None
    sizes = sizes.astype(np.int64, copy=False)
    is_nothing = is_empty.all(axis=1).tolist()
    lasting, first, later = (
        [event for event in events if not is_nothing[max(event, ~event)]]
        for events in (program.lasting, program.first, program.later)
    )
    again = len(sizes) - len(program.inputs)
    number = sizes.shape[1]
    found = np.zeros(number, dtype=np.int64)
    columns = np.arange(number)
    blocks = _FreeBlocks(number)
    next_address, reserved = np.zeros(number, dtype=np.int64), np.zeros(number, dtype=np.int64)
    held: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}
    pools = (sizes > _SMALL_UNITS).astype(np.int64) << _POOL_AT
    segments = _segment_units(sizes)
    for step, events in enumerate([lasting, first, *[later] * (MOST_STEPS - 1)]):
        before = reserved
        if events is later:
            held |= {at: held.pop(index) for at, index in enumerate(program.inputs, again) if index in held}
        for event in events:
            codes = blocks.codes
            if event < 0:
                if ~event not in held:
                    continue
                address, have, pool = held.pop(~event)
                starts = codes & _ADDRESS
                lengths = (codes >> _SIZE_AT) & _ADDRESS
                is_left, is_right = starts + lengths == address, starts == address + have
                left, right = (lengths * is_left).sum(axis=0), (lengths * is_right).sum(axis=0)
                codes[is_left | is_right] = _NO_BLOCK
                blocks.add(pool | (have + left + right) << _SIZE_AT | (address - left))
                continue
            size, pool = sizes[event], pools[event]
            best = np.where(codes >= (pool | size << _SIZE_AT), codes, _NO_BLOCK).min(axis=0, initial=_NO_BLOCK)
            fits = best < pool + (1 << _POOL_AT)
            address, have = best & _ADDRESS, (best >> _SIZE_AT) & _ADDRESS
            if not fits.all():
                address, have = np.where(fits, address, next_address), np.where(fits, have, segments[event])
                next_address = next_address + np.where(fits, 0, have + 1)
                reserved = reserved + np.where(fits, 0, have)
            rest = have - size
            splits = rest > np.where(pool, _SMALL_UNITS, 0)
            left_over = np.where(splits, pool | rest << _SIZE_AT | (address + size), _NO_BLOCK)
            np.copyto(codes, left_over, where=codes == np.where(fits, best, -1))
            if not fits.all():
                blocks.add(np.where(fits, _NO_BLOCK, left_over))
            held[event] = address, np.where(splits, size, have), pool
        if next_address.max() >= _ADDRESS:
            return None
        settled = reserved == before
        if step == MOST_STEPS or (step > 1 and settled.any()):
            found[columns] = reserved
            goes_on = ~settled
            if not goes_on.any():
                break
            columns, reserved, next_address = columns[goes_on], reserved[goes_on], next_address[goes_on]
            sizes, pools, segments = sizes[:, goes_on], pools[:, goes_on], segments[:, goes_on]
            held = {name: (address[goes_on], have[goes_on], pool[goes_on]) for name, (address, have, pool) in held.items()}
            blocks.keep(goes_on)
    return found


def _segment_units(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """As :func:`segment_size`, in units."""
    rounded = -(-sizes // (ROUND_LARGE // MIN_BLOCK)) * (ROUND_LARGE // MIN_BLOCK)
    large = np.where(sizes < MIN_LARGE_REQUEST // MIN_BLOCK, LARGE_SEGMENT // MIN_BLOCK, rounded)
    return np.where(sizes <= _SMALL_UNITS, SMALL_SEGMENT // MIN_BLOCK, large)
