"""Parses PyTorch's errors on tensors that fit into no memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from perfguard.exceptions import TooLargeError

NO_MEMORY_BYTES = 2**63
"""PyTorch counts bytes in 64 bits with a sign; a tensor that it cannot count has at least so many."""
_UNCOUNTABLE = re.compile(
    r"Storage size calculation overflowed|Stride calculation overflowed|integer multiplication overflow"
    r"|argument '(size|shape)' failed to unpack .*Overflow"
)
_NOT_ALLOCATED = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")
_MORE_THAN_ANY_BYTES = 2**42
"""A failed allocation of at least this size is too large for any device. A smaller one may only be too large for this machine."""
_MOST_CHARACTERS = 240
"""Length at which PyTorch's message is cut."""


@contextmanager
def too_large_named() -> Iterator[None]:
    """Raise TooLargeError instead of PyTorch's errors for a tensor that is too large for any device."""
    try:
        yield
    except TooLargeError:
        raise
    except Exception as error:
        found = _too_large_cause(error)
        if found is None:
            raise
        cause, num_bytes = found
        words = str(cause).splitlines()[0][:_MOST_CHARACTERS].rstrip(".")
        raise TooLargeError(f"A tensor of the workload does not fit into any memory: {words}.", num_bytes) from error


def _too_large_cause(error: BaseException) -> tuple[BaseException, int] | None:
    """The cause of ``error`` that reports too large a tensor, and a lower bound on its bytes; None: there is no such cause."""
    cause: BaseException | None = error
    while cause is not None:
        if _UNCOUNTABLE.search(str(cause)):
            return cause, NO_MEMORY_BYTES
        if (allocation := _NOT_ALLOCATED.search(str(cause))) and int(allocation[1]) >= _MORE_THAN_ANY_BYTES:
            return cause, int(allocation[1])
        cause = cause.__cause__
    return None
