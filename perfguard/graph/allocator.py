"""Computes what CUDA's caching allocator reserves for a step: a model of `c10/cuda/CUDACachingAllocator.cpp` of PyTorch 2.13.

A tensor often takes more memory than it needs. The allocator rounds requests to 512 bytes. It cuts them from segments of 2 MiB
(small requests) or at least 20 MiB (large ones). Freed blocks are kept, merged with their neighbours and used again. What the
driver sees is the segments. One stream is assumed, as in ordinary training.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from perfguard.graph.op import Op, Phase, Storage, StorageKind

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.graph.opgraph import OpGraph

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
_ADDRESS_BITS = 96
"""Enough for any number of requests of 2^63 bytes, so that no size is too large."""
_ADDRESS = (1 << _ADDRESS_BITS) - 1
_LARGE_POOL = 1 << _ADDRESS_BITS - 1
"""The first address of the large pool."""


def cublas_workspace_bytes(device: Device) -> int:
    """What PyTorch allocates at a thread's first matrix product, for good: 32 MiB since Hopper, before ":4096:2:16:8".

    So `CublasHandlePool.cpp` says, an H100, and the snapshots of `benchmarks/snapshots.py`.
    """
    return 32 * 2**20 if device.architecture in ("Hopper", "Blackwell") else 8_519_680


class AllocatorReplay(NamedTuple):
    """Result of a replay, in bytes."""

    reserved_bytes: int
    """Most bytes in segments at once, `torch.cuda.max_memory_reserved()`."""
    allocated_bytes: int
    """Most bytes in blocks at once, `torch.cuda.max_memory_allocated()`."""


class CachingAllocator:
    """One device's allocator, with PyTorch's default settings.

    A free block is one integer, its size and then its address, so that sorted integers are in the order of the best fit. Between
    two segments an address is left out, so that only neighbours in one segment are merged.
    """

    def __init__(self) -> None:
        self._free: tuple[list[int], list[int]] = [], []
        """The small and the large pool."""
        self._size_from: dict[int, int] = {}
        """Size of the free block that begins at an address."""
        self._size_to: dict[int, int] = {}
        """Size of the free block that ends at an address."""
        self._ends = [1, _LARGE_POOL]
        """Behind the last segment of each pool."""
        self.reserved_bytes = 0
        self.allocated_bytes = 0
        self.peak_allocated_bytes = 0

    def run(self, events: Iterable[int], sizes: Sequence[int], blocks: list[int]) -> None:
        """Allocate and free in the order of ``events``, all in one loop: a step has thousands.

        Args:
            events: i allocates block i, ~i frees it if it is there.
            sizes: of the blocks, from :func:`rounded`.
            blocks: those that are there; 0: not there. They are changed in place.
        """
        both = self._free
        size_from = self._size_from
        size_to = self._size_to
        allocated = self.allocated_bytes
        peak = self.peak_allocated_bytes
        for event in events:
            if event < 0:
                block = blocks[~event]
                if not block:
                    continue
                blocks[~event] = 0
                has = block >> _ADDRESS_BITS
                address = block & _ADDRESS
                allocated -= has
                free = both[address >= _LARGE_POOL]
                if left := size_to.pop(address, 0):
                    address -= left
                    del free[bisect_left(free, left << _ADDRESS_BITS | address)], size_from[address]
                    has += left
                if right := size_from.pop(address + has, 0):
                    del free[bisect_left(free, right << _ADDRESS_BITS | address + has)], size_to[address + has + right]
                    has += right
                insort(free, has << _ADDRESS_BITS | address)
                size_from[address] = size_to[address + has] = has
                continue
            size = sizes[event]
            if not size:
                continue
            is_large = size > SMALL_REQUEST
            free = both[is_large]
            at = bisect_left(free, size << _ADDRESS_BITS)
            if at < len(free):
                block = free.pop(at)
                has = block >> _ADDRESS_BITS
                address = block & _ADDRESS
                del size_from[address], size_to[address + has]
            else:
                has = segment_size(size)
                address = self._ends[is_large]
                self._ends[is_large] += has + MIN_BLOCK
                self.reserved_bytes += has
            rest = has - size
            if rest > (SMALL_REQUEST if is_large else 0):  # a smaller rest is not split off
                start = address + size
                insort(free, rest << _ADDRESS_BITS | start)
                size_from[start] = size_to[start + rest] = rest
                has = size
            blocks[event] = has << _ADDRESS_BITS | address
            allocated += has
            if allocated > peak:
                peak = allocated
        self.allocated_bytes = allocated
        self.peak_allocated_bytes = peak


def rounded(num_bytes: int) -> int:
    """The size of a block for ``num_bytes``."""
    return -(-num_bytes // MIN_BLOCK) * MIN_BLOCK


def segment_size(size: int) -> int:
    """The size of a new segment for a block of ``size`` bytes."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < MIN_LARGE_REQUEST:
        return LARGE_SEGMENT
    return -(-size // ROUND_LARGE) * ROUND_LARGE


class _Program(NamedTuple):
    """The requests of a step to the allocator: i allocates storage i, ~i frees it if it is there."""

    lasting: list[int]
    first: list[int]
    """The first step. Indices len(storages) and the next one are cuBLAS's workspaces."""
    later: list[int]
    """Any other; indices from len(storages) + 2 are what the step before left, in the order of ``carried``."""
    carried: list[int]
    """Storages of which the one of the step before is there while the step makes its own: the batch, kept outputs."""


def _program_of(ops: Sequence[Op], storages: Sequence[Storage]) -> _Program:
    """The requests of a training loop: what a step allocates and frees, in order."""
    end = len(ops)
    number = len(storages)
    births: list[list[int]] = [[] for _ in range(end + 1)]
    deaths: list[list[int]] = [[] for _ in range(end + 1)]
    lasting: list[int] = []
    inputs: list[int] = []
    state: list[int] = []
    leftover: list[int] = []
    kept: list[int] = []
    for index, storage in enumerate(storages):
        if storage.birth >= 0:
            births[storage.birth].append(index)
        elif storage.kind is StorageKind.INPUT:
            inputs.append(index)
        else:
            (state if storage.kind is StorageKind.OPTIMIZER_STATE else lasting).append(index)
        if 0 <= storage.death < end:
            deaths[storage.death].append(index)
        elif storage.birth >= 0 and storage.death > end:
            kept.append(index)
        elif storage.birth >= 0:
            leftover.append(index)
    first_update = next((i for i, op in enumerate(ops) if op.phase is Phase.OPTIMIZER), end)
    first_products: dict[bool, int] = {}
    for i, op in enumerate(ops):
        if op.kind == "matmul":  # the backward pass has a thread of its own, with another handle of cuBLAS
            first_products.setdefault(op.phase is Phase.BACKWARD, i)
    workspaces = {i: [number + is_backward] for is_backward, i in first_products.items()}

    def made(indices: Iterable[int]) -> list[int]:
        """A storage that dies before an operator uses it is freed at once."""
        dies = (storages[index].death < storages[index].birth for index in indices)
        return [event for index, unused in zip(indices, dies, strict=True) for event in ((index, ~index) if unused else (index,))]

    def freed(indices: Iterable[int]) -> list[int]:
        return [~index for index in indices]

    first = made(inputs)
    # The next batch is there before the name of the last one is bound to it.
    slots = range(number + 2, number + 2 + len(inputs) + len(kept))
    later = [*first, *freed(slots[: len(inputs)]), *freed(leftover)]
    ends: dict[int, list[int]] = {}
    for slot, index in zip(slots[len(inputs) :], kept, strict=True):
        ends.setdefault(storages[index].death - end - 1, []).append(slot)
    for i in range(end):
        outputs = made(births[i])
        ended = freed(deaths[i])
        of_cublas = workspaces.get(i, [])  # a kernel asks for it after its outputs
        first += (made(state) if i == first_update else []) + outputs + of_cublas + ended
        later += outputs + ended + freed(ends.get(i, ()))
    last = made(births[end])
    return _Program(made(lasting), first + last, later + last, [*inputs, *kept])


def replay_allocator(graph: OpGraph, device: Device) -> AllocatorReplay:
    """Reserved and allocated peaks of the first steps of training, or of inference, on a fresh allocator of ``device``."""
    program = _program_of(graph.ops, graph.storages)
    number = len(graph.storages)
    sizes = [*(rounded(storage.num_bytes) for storage in graph.storages), *[rounded(cublas_workspace_bytes(device))] * 2]
    sizes += [0] * len(program.carried)
    blocks = [0] * len(sizes)
    allocator = CachingAllocator()
    allocator.run(program.lasting, sizes, blocks)
    allocator.run(program.first, sizes, blocks)
    # The first step makes the optimizer's state in the middle, the second finds the cache as it left it. A step that takes
    # nothing more from the driver is the last.
    for _ in range(3):
        before = allocator.reserved_bytes
        for at, index in enumerate(program.carried, number + 2):
            blocks[at] = blocks[index]
            blocks[index] = 0
        allocator.run(program.later, sizes, blocks)
        if allocator.reserved_bytes == before:
            break
    return AllocatorReplay(allocator.reserved_bytes, allocator.peak_allocated_bytes)
