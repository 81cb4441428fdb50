"""Blanks: tensors of the host that have a shape and no data in a dry run, because they are too large for it.

A blank tensor is a real one on the host. Its pages are the system's page of zeros, of which there is one, so whoever reads it
reads zeros: an operator, a data set, NumPy. What an operator makes of it, or writes to it, is not computed. A view of it is blank
too, and so is all that follows from it.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from perfguard.capture.held import held_bytes
from perfguard.exceptions import TooLargeError
from perfguard.graph.recorder import operator_of, tensors_in
from perfguard.graph.shape_rules import META, empty_twin
from perfguard.quantities import format_bytes

_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
"""mmap(2): address space that the system does not account for (linux/mman.h; Python names it since 3.13)."""
_EMPTY = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
"""What they return takes no memory before it is written to."""
_SHARING = (torch.ops.aten._unsafe_view.default,)
"""What they return are views, which their schemas do not say."""


def zeros_on_host(tensor: torch.Tensor, *, least_mapped_bytes: int = 2**16) -> torch.Tensor:
    """Return zeros on the host in the shape of ``tensor``. The system hands out no page of them before it is written to.

    Raises:
        TooLargeError: if this process may not have so much address space.
    """
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes < least_mapped_bytes:
        flat = torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))
    else:
        flat = torch.frombuffer(_address_space(num_bytes), dtype=torch.uint8)
    return flat.view(tensor.dtype).reshape(tensor.shape)


def _address_space(num_bytes: int) -> mmap.mmap:
    try:
        if sys.platform == "win32":
            return mmap.mmap(-1, num_bytes)
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except (OSError, OverflowError, ValueError) as error:
        words = f"A tensor of {format_bytes(num_bytes)} does not fit into the memory of the host: {error}."
        raise TooLargeError(words, num_bytes) from error


def on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what an operator on the host would return, on meta.

    Raises:
        NotImplementedError: if its result, or the size of it, is a value.
    """
    changes: dict[str, Any] = {"device": META, "generator": None}  # a generator is one of the host
    changed = kwargs | {name: value for name, value in changes.items() if name in kwargs}
    with _disable_current_modes():
        twins: Any = tree_map_only(torch.Tensor, empty_twin, (args, changed))
        return func(*twins[0], **twins[1])


def written_by(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the argument that an operator writes to first."""
    position, name = operator_of(func).writes[0]
    return args[position] if position < len(args) else kwargs[name]


class Blanks:
    """Decides which tensors of the host are blank, and runs the operators that make them or read them.

    Args:
        share: of the host's free memory. A larger tensor is blank.
        most_bytes: the memory that a dry run may take while tensors still get data, and no more than half of the free memory.
            Beyond it, each tensor is blank but the smallest.
        smallest_bytes: tensors up to this size have data always.
        available_bytes: the host's free memory. None: what the system says.
    """

    def __init__(
        self,
        *,
        share: float = 1 / 8,
        most_bytes: int = 2 * 2**30,
        smallest_bytes: int = 2**16,
        available_bytes: int | None = None,
    ) -> None:
        available = free_host_bytes() if available_bytes is None else available_bytes
        self._largest_bytes = share * available
        self._most_bytes = min(most_bytes, available // 2)
        self._smallest_bytes = smallest_bytes
        self._before_bytes = held_bytes(os.getpid())
        self._allowance = 0.0
        """Bytes that tensors may take before the memory of this process is looked at again."""
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, None] = weakref.WeakKeyDictionary()
        """Storages of blank tensors."""

    def has(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether one of ``tensors`` is blank."""
        return bool(self._known) and any(_is_dense(x) and not x.is_meta and x.untyped_storage() in self._known for x in tensors)

    def make(self, like: torch.Tensor) -> torch.Tensor:
        """Return a blank tensor on the host in the shape and layout of ``like``."""
        with _disable_current_modes():
            num_elements = like.untyped_storage().nbytes() // like.element_size()
            flat = zeros_on_host(torch.empty(num_elements, dtype=like.dtype, device=META))
            made = flat.as_strided(like.shape, like.stride(), like.storage_offset())
        self._known[made.untyped_storage()] = None
        return made

    def run(self, func: Any, args: Any, kwargs: Any, given: Sequence[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
        """Run an operator on tensors of the host. Nothing is computed if it reads a blank one, or if its result is to be one.

        Returns:
            Its result, and the blank tensors that take memory in a real trial from now on.
        """
        operator = operator_of(func)
        reads_blank = self.has(given)
        is_small = bool(operator.writes) or 8 * most_elements(args, kwargs) <= self._allowance
        if operator.is_view or func.namespace != "aten" or (is_small and not reads_blank):
            return self._with_data(func, args, kwargs), []
        try:
            out = on_meta(func, args, kwargs)
        except Exception:  # what is wrong with its arguments, it says better itself
            out = NotImplemented
        if out is NotImplemented or func in _SHARING or not all(map(_is_dense, tensors_in(out))):
            return self._with_data(func, args, kwargs), []
        if operator.writes:
            written = written_by(func, args, kwargs)
            return out if out is None else written, [x for x in tensors_in(written) if self.has([x])]
        num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(out))
        if not reads_blank and self.has_room_for(num_bytes):
            return func(*args, **kwargs), []
        made = tree_map_only(torch.Tensor, self.make, out)
        return made, [] if operator.name in _EMPTY else tensors_in(made)

    def has_room_for(self, num_bytes: int) -> bool:
        """Whether a tensor of ``num_bytes`` may have data. If so, it is taken to have them from now on."""
        if num_bytes > max(self._largest_bytes, self._smallest_bytes):
            return False
        if num_bytes > self._allowance:
            left = self._most_bytes - (held_bytes(os.getpid()) - self._before_bytes)
            self._allowance = left / 8
            if num_bytes > max(left, self._smallest_bytes):
                return False
        self._allowance -= num_bytes
        return True

    def _with_data(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if not func.is_view and not operator_of(func).writes:
            self._allowance -= sum(tensor.nbytes for tensor in tensors_in(out) if _is_dense(tensor))
        return out


def free_host_bytes() -> int:
    """Return the memory that the host has free, or that the container may still take where that is less."""
    from perfguard.devices.detect import host_memory_bytes

    return min(int(psutil.virtual_memory().available), host_memory_bytes())


def most_elements(args: Any, kwargs: Any) -> float:
    """Return more elements than an operator's result can have: a size is a number that it is given, or one of a tensor's."""
    leaves = tree_leaves((args, kwargs))
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return math.inf  # `arange(0, 1, 1e-9)`
    return math.prod(_sizes(leaves))


def _sizes(leaves: Sequence[Any]) -> Iterator[float]:
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            yield max(1, leaf.numel())
        elif isinstance(leaf, (int, float)) and math.isfinite(leaf):
            yield max(1.0, abs(leaf))


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided
