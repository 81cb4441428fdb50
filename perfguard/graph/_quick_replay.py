"""`replay_allocator` with default settings for thousands of graphs at once, which differ in their sizes alone.

Each event of the step's program is run on arrays, in units of 512 bytes. A search is ten times faster for it than one by one.
"""

from __future__ import annotations

from typing import Any

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
    Program,
    Step,
    program_of,
    replay_program,
)

_SIZE_AT = 30
"""Bits of an address in :class:`_FreeBlocks`, and of a size."""
_ADDRESS = (1 << _SIZE_AT) - 1
_POOL_AT = 2 * _SIZE_AT
_NO_BLOCK = (1 << _POOL_AT + 2) - 1
"""Code of an empty entry in :class:`_FreeBlocks`. It is larger than the code of every block."""
_SMALL_UNITS = SMALL_REQUEST // MIN_BLOCK
_MANY = 128
"""From this number of graphs, arrays are faster than a loop."""
_ROOM = 12


def reserved_bytes_of(skeleton: Step, storage_bytes: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """``replay_allocator(graph).reserved_bytes`` for each of C graphs with one skeleton.

    Args:
        skeleton: what they have in common.
        storage_bytes: of each graph the bytes of its storages. Shape: (C, S).

    Returns:
        int64, or Python's integers where these would not fit. Shape: (C,).
    """
    program, settings = program_of(skeleton), AllocatorSettings()
    units = _reserved_units(program, _wanted(program, storage_bytes)) if len(storage_bytes) >= _MANY else None
    if units is not None:
        return units * MIN_BLOCK
    found = [replay_program(program, row, settings).reserved_bytes for row in storage_bytes]
    return np.array(found, dtype=np.int64 if max(found, default=0) < 2**63 else object)


def _wanted(program: Program, storage_bytes: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Units of the storages, of cuBLAS's workspace, and of what is carried once more. Shapes: (C, S) → (S + 1 + carried, C)."""
    units = -(-storage_bytes // MIN_BLOCK)
    workspace = np.full((len(units), 1), AllocatorSettings().cublas_workspace_bytes // MIN_BLOCK)
    return np.ascontiguousarray(np.concatenate([units, workspace, units[:, program.carried]], axis=1).T)


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
        """Add a block, or none, to each column. Shape: (C,)."""
        if self._used == len(self._codes):
            self._codes.sort(axis=0)
            self._used = int((self._codes != _NO_BLOCK).sum(axis=0).max(initial=0))
            wider = np.full((self._used + _ROOM, self._codes.shape[1]), _NO_BLOCK, dtype=np.int64)
            wider[: self._used] = self._codes[: self._used]
            self._codes = wider
        self._codes[self._used] = codes
        self._used += 1

    def keep(self, columns: npt.NDArray[np.bool_]) -> None:
        """Keep these columns alone."""
        self._codes = np.ascontiguousarray(self._codes[:, columns])


def _reserved_units(program: Program, sizes: npt.NDArray[Any]) -> npt.NDArray[np.int64] | None:
    """:func:`replay_program` on C allocators at once. Shapes: (sizes, C) → (C,).

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
    again = len(sizes) - len(program.carried)
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
            held |= {at: held.pop(index) for at, index in enumerate(program.carried, again) if index in held}
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
    """`segment_size` of the allocator, in units."""
    rounded = -(-sizes // (ROUND_LARGE // MIN_BLOCK)) * (ROUND_LARGE // MIN_BLOCK)
    large = np.where(sizes < MIN_LARGE_REQUEST // MIN_BLOCK, LARGE_SEGMENT // MIN_BLOCK, rounded)
    return np.where(sizes <= _SMALL_UNITS, SMALL_SEGMENT // MIN_BLOCK, large)
