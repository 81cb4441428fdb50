"""What CUDA's caching allocator reserves for a step: a model of `c10/cuda/CUDACachingAllocator.cpp` of PyTorch 2.13.

A tensor does not take what it needs but what the allocator has: requests are rounded to 512 bytes and cut from segments of
2 MiB (small requests) or at least 20 MiB (large ones); freed blocks are kept, merged with their neighbours and used again. What
the driver sees is the segments. One stream is assumed, as in ordinary training.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from perfguard.graph._schema import OpGraph, Phase, StorageKind

_MIN_BLOCK = 512
_SMALL_REQUEST = 2**20
"""kSmallSize: up to here a request is served from the small pool."""
_SMALL_SEGMENT = 2 * 2**20
"""kSmallBuffer."""
_LARGE_SEGMENT = 20 * 2**20
"""kLargeBuffer: the segment of a large request below 10 MiB."""
_MIN_LARGE_REQUEST = 10 * 2**20
"""kMinLargeAlloc: from here a segment is as large as its request, rounded up to 2 MiB."""
_ROUND_LARGE = 2 * 2**20
_MOST_STEPS = 4
"""The first step makes the optimizer's state in the middle, the second finds the cache as it left it; a step that takes nothing
more from the driver is the last."""


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """What `PYTORCH_CUDA_ALLOC_CONF` says, and what cuBLAS takes from the allocator."""

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    """`max_split_size_mb` in bytes: larger blocks are not split, and not given to smaller requests."""
    cublas_workspace_bytes: int = 8_519_680
    """What PyTorch sets aside at the first matrix product: ":4096:2:16:8" before Hopper, 32 MiB since."""


class AllocatorReplay(NamedTuple):
    """What a replay found, in bytes."""

    reserved_bytes: int
    """Most bytes in segments at once, `torch.cuda.max_memory_reserved()`."""
    allocated_bytes: int
    """Most bytes in blocks at once, `torch.cuda.max_memory_allocated()`."""


class Block:
    """A piece of a segment, in use or free."""

    __slots__ = ("address", "allocated", "next", "pool", "previous", "size")

    def __init__(self, address: int, size: int, pool: _Pool) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.allocated = False
        self.previous: Block | None = None
        self.next: Block | None = None


class _Pool:
    """Free blocks, ordered by size and address, and the last block of an expandable segment."""

    __slots__ = ("free", "is_small", "tail")

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.free: list[tuple[int, int, Block]] = []
        self.tail: Block | None = None

    def add(self, block: Block) -> None:
        bisect.insort(self.free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        del self.free[bisect.bisect_left(self.free, (block.size, block.address))]


class CachingAllocator:
    """One device's allocator. ``malloc`` returns a handle for ``free``."""

    def __init__(self, settings: AllocatorSettings = AllocatorSettings()) -> None:
        self._settings = settings
        self._pools = _Pool(is_small=True), _Pool(is_small=False)
        self._next_address = 0
        self.reserved_bytes = 0
        self.allocated_bytes = 0
        self.peak_allocated_bytes = 0

    def malloc(self, num_bytes: int) -> Block | None:
        """A block of at least ``num_bytes``; None for none."""
        if num_bytes <= 0:
            return None
        size = -(-num_bytes // _MIN_BLOCK) * _MIN_BLOCK
        pool = self._pools[0 if size <= _SMALL_REQUEST else 1]
        block = self._best_fit(pool, size) or self._new_block(pool, size)
        if block.size != size and self._should_split(block, size):
            self._split(block, size)
        block.allocated = True
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def free(self, block: Block | None) -> None:
        """Give ``block`` back; it is merged with free neighbours."""
        if block is None:
            return
        self.allocated_bytes -= block.size
        block.allocated = False
        pool = block.pool
        left, right = block.previous, block.next
        if left is not None and not left.allocated:
            pool.remove(left)
            block.address = left.address
            block.size += left.size
            block.previous = left.previous
            if left.previous is not None:
                left.previous.next = block
        if right is not None and not right.allocated:
            pool.remove(right)
            block.size += right.size
            block.next = right.next
            if right.next is not None:
                right.next.previous = block
            if pool.tail is right:
                pool.tail = block
        pool.add(block)

    def _best_fit(self, pool: _Pool, size: int) -> Block | None:
        index = bisect.bisect_left(pool.free, (size,))
        if index == len(pool.free):
            return None
        if self._settings.expandable_segments and pool.free[index][2] is pool.tail and index + 1 < len(pool.free):
            index += 1  # the tail can grow, so it counts as the largest
        block = pool.free[index][2]
        limit = self._settings.max_split_bytes
        if limit is not None and not pool.is_small:
            if size < limit <= block.size:
                return None
            if size >= limit and block.size >= size + _LARGE_SEGMENT:
                return None
        del pool.free[index]
        return block

    def _new_block(self, pool: _Pool, size: int) -> Block:
        if self._settings.expandable_segments:
            return self._expand(pool, size)
        segment = _segment_size(size)
        block = Block(self._next_address, segment, pool)
        self._next_address += segment
        self.reserved_bytes += segment
        return block

    def _expand(self, pool: _Pool, size: int) -> Block:
        page = _SMALL_SEGMENT if pool.is_small else _LARGE_SEGMENT
        tail = pool.tail
        have = tail.size if tail is not None and not tail.allocated else 0
        mapped = -(-(size - have) // page) * page
        self.reserved_bytes += mapped
        if tail is not None and have:
            pool.remove(tail)
            tail.size += mapped
            return tail
        address = (1 << 60 if pool.is_small else 0) if tail is None else tail.address + tail.size
        block = Block(address, mapped, pool)
        block.previous = tail
        if tail is not None:
            tail.next = block
        pool.tail = block
        return block

    def _should_split(self, block: Block, size: int) -> bool:
        remaining = block.size - size
        if block.pool.is_small or self._settings.expandable_segments:
            return remaining >= _MIN_BLOCK
        limit = self._settings.max_split_bytes
        return (limit is None or size < limit) and remaining > _SMALL_REQUEST

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.pool)
        block.size = size
        rest.previous, rest.next = block, block.next
        if rest.next is not None:
            rest.next.previous = rest
        block.next = rest
        if block.pool.tail is block:
            block.pool.tail = rest
        block.pool.add(rest)


def _segment_size(size: int) -> int:
    if size <= _SMALL_REQUEST:
        return _SMALL_SEGMENT
    if size < _MIN_LARGE_REQUEST:
        return _LARGE_SEGMENT
    return -(-size // _ROUND_LARGE) * _ROUND_LARGE


class _Plan(NamedTuple):
    """When the storages of a step are made and freed, as indices; sizes are no part of it."""

    lasting: list[int]
    inputs: list[int]
    state: list[int]
    leftover: list[int]
    births: list[list[int]]
    """Of each operator, and after the last one."""
    deaths: list[list[int]]
    dies_unused: frozenset[int]
    """Freed before an operator used it."""
    first_update: int
    first_product: int | None


def _plan_of(graph: OpGraph) -> _Plan:
    storages = graph.storages
    end = len(graph.ops)
    births: list[list[int]] = [[] for _ in range(end + 1)]
    deaths: list[list[int]] = [[] for _ in range(end + 1)]
    lasting: list[int] = []
    inputs: list[int] = []
    state: list[int] = []
    leftover: list[int] = []
    for index, storage in enumerate(storages):
        if storage.birth >= 0:
            births[storage.birth].append(index)
        elif storage.kind is StorageKind.INPUT:
            inputs.append(index)
        else:
            (state if storage.kind is StorageKind.OPTIMIZER_STATE else lasting).append(index)
        if 0 <= storage.death < end:
            deaths[storage.death].append(index)
        elif storage.birth >= 0:
            leftover.append(index)
    return _Plan(
        lasting,
        inputs,
        state,
        leftover,
        births,
        deaths,
        frozenset(index for index, storage in enumerate(storages) if storage.death < storage.birth),
        next((i for i, op in enumerate(graph.ops) if op.phase is Phase.OPTIMIZER), end),
        next((i for i, op in enumerate(graph.ops) if op.kind == "matmul"), None),
    )


def replay_allocator(graph: OpGraph, settings: AllocatorSettings | None = None) -> AllocatorReplay:
    """Reserved and allocated peaks of the first steps of training, or of inference, on a fresh allocator."""
    sizes = [storage.num_bytes for storage in graph.storages]
    return _replayed(_plan_of(graph), sizes, settings or AllocatorSettings())


def _replayed(plan: _Plan, sizes: Sequence[int], settings: AllocatorSettings) -> AllocatorReplay:
    """The replay of a step whose storages have ``sizes``."""
    allocator = CachingAllocator(settings)
    blocks: dict[int, Block | None] = {}
    end = len(plan.births) - 1

    def allocate(indices: Sequence[int]) -> None:
        for index in indices:
            blocks[index] = allocator.malloc(sizes[index])
            if index in plan.dies_unused:
                allocator.free(blocks.pop(index))

    def release(indices: Sequence[int]) -> None:
        for index in indices:
            if index in blocks:
                allocator.free(blocks.pop(index))

    allocate(plan.lasting)
    for step in range(_MOST_STEPS):
        reserved = allocator.reserved_bytes
        before = [blocks.pop(index) for index in plan.inputs if index in blocks]
        allocate(plan.inputs)  # the next batch is there before the name of the last one is bound to it
        for block in before:
            allocator.free(block)
        release(plan.leftover)
        for i in range(end):
            if step == 0 and i == plan.first_product:
                allocator.malloc(settings.cublas_workspace_bytes)
            if step == 0 and i == plan.first_update:
                allocate(plan.state)
            allocate(plan.births[i])
            release(plan.deaths[i])
        allocate(plan.births[end])
        if step and allocator.reserved_bytes == reserved:
            break
    return AllocatorReplay(allocator.reserved_bytes, allocator.peak_allocated_bytes)


def reserved_bytes_of(form: OpGraph, storage_bytes: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """The reserved bytes of graphs of one form, with the default settings.

    Args:
        form: any graph of the form.
        storage_bytes: of each graph the bytes of its storages. Shape: (C, S).

    Returns:
        Shape: (C,).
    """
    if form not in _events:
        _events[form] = _events_of(_plan_of(form), len(form.storages))
    units = -(-storage_bytes // _MIN_BLOCK)
    workspace = np.full((len(units), 1), -(-AllocatorSettings().cublas_workspace_bytes // _MIN_BLOCK))
    sizes = np.concatenate([units, units, workspace], axis=1).T
    is_empty = sizes == 0
    is_nothing = is_empty.all(axis=1).tolist()
    steps = [[event for event in events if not is_nothing[max(event, ~event)]] for events in _events[form]]
    alike = not (is_empty.any(axis=1) & ~is_empty.all(axis=1)).any()
    found = _reserved_units_of_many(steps, sizes) if len(units) >= _MANY and alike else None
    if found is None:
        found = np.array([_reserved_units(steps, row) for row in sizes.T.tolist()])
    return found.astype(np.float64) * _MIN_BLOCK


_events: WeakKeyDictionary[OpGraph, list[list[int]]] = WeakKeyDictionary()


def _events_of(plan: _Plan, num_storages: int) -> list[list[int]]:
    """What :func:`_replayed` does, for what lasts and for each step: i to allocate the i-th size, ~i to free it again.

    The i-th storage has the i-th size. Of an input two may live at once, so the second is called ``num_storages + i``. The last
    size is that of cuBLAS's workspace.
    """
    end = len(plan.births) - 1
    named: dict[int, int] = {}
    """What each storage that lives is called."""
    events: list[int] = []

    def allocate(indices: Sequence[int], others: Mapping[int, int] = {}) -> None:
        for index in indices:
            name = index + num_storages if others.get(index) == index else index
            events.append(name)
            if index in plan.dies_unused:
                events.append(~name)
            else:
                named[index] = name

    def release(indices: Sequence[int]) -> None:
        events.extend(~named.pop(index) for index in indices if index in named)

    allocate(plan.lasting)
    found = [events]
    for step in range(_MOST_STEPS):
        events = []
        before = {index: named.pop(index) for index in plan.inputs if index in named}
        allocate(plan.inputs, before)
        events += [~name for name in before.values()]
        release(plan.leftover)
        for i in range(end):
            if step == 0 and i == plan.first_product:
                events.append(2 * num_storages)
            if step == 0 and i == plan.first_update:
                allocate(plan.state)
            allocate(plan.births[i])
            release(plan.deaths[i])
        allocate(plan.births[end])
        found.append(events)
    return found


_WIDE = 60
"""Bits of an address in :func:`_reserved_units`, whose integers have no end."""
_SIZE_AT = 30
_ADDRESS = (1 << _SIZE_AT) - 1
_POOL_AT = 2 * _SIZE_AT
_NO_BLOCK = (1 << _POOL_AT + 2) - 1
"""Of :class:`_FreeBlocks`: its address and its size are what no block has, and it is larger than every block."""
_SMALL_UNITS = _SMALL_REQUEST // _MIN_BLOCK
_MANY = 128
"""Graphs from which arrays are faster than lists."""
_ROOM = 12


def _reserved_units(steps: Sequence[Sequence[int]], sizes: Sequence[int]) -> int:
    """:class:`CachingAllocator` with the default settings for thousands of graphs: no objects, no calls, units of 512 bytes.

    A free block is one number, its size above its address, in a sorted list; two tables find it by its start and by its end.
    Segments are one unit apart, so that blocks of two never look like neighbours.
    """
    small: tuple[list[int], dict[int, int], dict[int, int]] = [], {}, {}
    large: tuple[list[int], dict[int, int], dict[int, int]] = [], {}, {}
    held: dict[int, tuple[int, int, bool]] = {}
    next_address = reserved = 0
    find, insert = bisect.bisect_left, bisect.insort
    for step, events in enumerate(steps):
        before = reserved
        for event in events:
            if event >= 0:
                size = sizes[event]
                if not size:
                    continue
                is_small = size <= _SMALL_UNITS
                free, size_from, start_to = small if is_small else large
                at = find(free, size << _WIDE)
                if at < len(free):
                    code = free.pop(at)
                    have, address = code >> _WIDE, code & ((1 << _WIDE) - 1)
                    del size_from[address], start_to[address + have]
                else:
                    have, address = _segment_size(size * _MIN_BLOCK) // _MIN_BLOCK, next_address
                    next_address += have + 1
                    reserved += have
                rest = have - size
                if rest > (0 if is_small else _SMALL_UNITS):
                    start = address + size
                    insert(free, rest << _WIDE | start)
                    size_from[start] = rest
                    start_to[address + have] = start
                    have = size
                held[event] = address, have, is_small
            elif ~event in held:
                address, have, is_small = held.pop(~event)
                free, size_from, start_to = small if is_small else large
                end = address + have
                if end in size_from:
                    more = size_from.pop(end)
                    del free[find(free, more << _WIDE | end)], start_to[end + more]
                    have += more
                if address in start_to:
                    start = start_to.pop(address)
                    more = size_from[start]
                    del free[find(free, more << _WIDE | start)]
                    address, have = start, have + more
                insert(free, have << _WIDE | address)
                size_from[address] = have
                start_to[address + have] = address
        if step > 1 and reserved == before:
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


def _reserved_units_of_many(steps: Sequence[Sequence[int]], sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
    """:func:`_reserved_units` of C allocators at once; None for more than :class:`_FreeBlocks` can count (512 GiB).

    Shapes: (sizes, C) → (C,).
    """
    if sizes.max(initial=0) >= _ADDRESS:
        return None
    number = sizes.shape[1]
    found = np.zeros(number, dtype=np.int64)
    columns = np.arange(number)
    blocks = _FreeBlocks(number)
    next_address, reserved = np.zeros(number, dtype=np.int64), np.zeros(number, dtype=np.int64)
    held: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}
    pools = (sizes > _SMALL_UNITS).astype(np.int64) << _POOL_AT
    segments = _segment_units(sizes)
    for step, events in enumerate(steps):
        before = reserved
        for event in events:
            codes = blocks.codes
            if event < 0:
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
        if step == len(steps) - 1 or (step > 1 and settled.any()):
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
    """As :func:`_segment_size`, in units."""
    rounded = -(-sizes // (_ROUND_LARGE // _MIN_BLOCK)) * (_ROUND_LARGE // _MIN_BLOCK)
    large = np.where(sizes < _MIN_LARGE_REQUEST // _MIN_BLOCK, _LARGE_SEGMENT // _MIN_BLOCK, rounded)
    return np.where(sizes <= _SMALL_UNITS, _SMALL_SEGMENT // _MIN_BLOCK, large)
