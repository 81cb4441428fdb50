"""What CUDA's caching allocator reserves for a step: a model of `c10/cuda/CUDACachingAllocator.cpp` of PyTorch 2.13.

A tensor does not take what it needs but what the allocator has: requests are rounded to 512 bytes and cut from segments of
2 MiB (small requests) or at least 20 MiB (large ones); freed blocks are kept, merged with their neighbours and used again. What
the driver sees is the segments. One stream is assumed, as in ordinary training.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from perfguard.graph._op import Phase, StorageKind

if TYPE_CHECKING:
    from perfguard.graph._schema import OpGraph

MIN_BLOCK = 512
SMALL_REQUEST = 2**20
"""kSmallSize: up to here a request is served from the small pool."""
SMALL_SEGMENT = 2 * 2**20
"""kSmallBuffer."""
LARGE_SEGMENT = 20 * 2**20
"""kLargeBuffer: the segment of a large request below 10 MiB."""
MIN_LARGE_REQUEST = 10 * 2**20
"""kMinLargeAlloc: from here a segment is as large as its request, rounded up to 2 MiB."""
ROUND_LARGE = 2 * 2**20
MOST_STEPS = 4
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
        size = -(-num_bytes // MIN_BLOCK) * MIN_BLOCK
        pool = self._pools[0 if size <= SMALL_REQUEST else 1]
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
            if size >= limit and block.size >= size + LARGE_SEGMENT:
                return None
        del pool.free[index]
        return block

    def _new_block(self, pool: _Pool, size: int) -> Block:
        if self._settings.expandable_segments:
            return self._expand(pool, size)
        segment = segment_size(size)
        block = Block(self._next_address, segment, pool)
        self._next_address += segment
        self.reserved_bytes += segment
        return block

    def _expand(self, pool: _Pool, size: int) -> Block:
        page = SMALL_SEGMENT if pool.is_small else LARGE_SEGMENT
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
            return remaining >= MIN_BLOCK
        limit = self._settings.max_split_bytes
        return (limit is None or size < limit) and remaining > SMALL_REQUEST

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


def segment_size(size: int) -> int:
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < MIN_LARGE_REQUEST:
        return LARGE_SEGMENT
    return -(-size // ROUND_LARGE) * ROUND_LARGE


class Plan(NamedTuple):
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


def plan_of(graph: OpGraph) -> Plan:
    """Of one step of ``graph``."""
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
    return Plan(
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
    settings = settings or AllocatorSettings()
    plan, storages = plan_of(graph), graph.storages
    allocator = CachingAllocator(settings)
    blocks: dict[int, Block | None] = {}
    end = len(plan.births) - 1

    def allocate(indices: Sequence[int]) -> None:
        for index in indices:
            blocks[index] = allocator.malloc(storages[index].num_bytes)
            if index in plan.dies_unused:
                allocator.free(blocks.pop(index))

    def release(indices: Sequence[int]) -> None:
        for index in indices:
            if index in blocks:
                allocator.free(blocks.pop(index))

    allocate(plan.lasting)
    for step in range(MOST_STEPS):
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
