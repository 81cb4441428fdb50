"""OwnUpdates: where a step ends that no optimizer of PyTorch makes.

    `p.data.add_(-lr * p.grad)`, `torch._foreach_add_(...)`    it ends as all that a backward pass has reached is written
    `p.data = p.data - lr * p.grad`                            likewise
    `params = {name: p - lr * g ...}`                          it ends where the loop comes back to the line of its backward pass

What is not written in one step is not waited for in the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor


class OwnUpdates:
    """Follows backward passes and what is written after them.

    Args:
        place: returns how much was seen so far.
        end_step: called at the end of each step, with what ``place`` has returned there.
    """

    def __init__(self, place: Callable[[], Any], end_step: Callable[[Any], object]) -> None:
        self._place = place
        self._end_step = end_step
        self._awaited: dict[int, int] = {}
        """Parameters of the last backward passes: their ids, by the address of their storage."""
        self._written: set[int] = set()
        """Addresses of those that were written since."""
        self._never_written: set[int] = set()
        self._last: Any = None
        """Where the last of them was written. None: none was."""
        self._lines: set[Any] = set()
        """Where the user's code has begun backward passes since the last step that return gradients."""

    def begin_backward(self, outputs: Sequence[torch.Tensor], line: Any, *, accumulates: bool) -> None:
        """Note that a backward pass begins from ``outputs``, at a ``line`` of the user's code.

        With ``accumulates``, it adds to the gradients of the pass before, so that one needs no update.
        """
        if not self._end_pending() and line in self._lines:
            self._end(self._place())
        if not accumulates:
            self._lines.add(line)
        for variable in _leaves_of(outputs):
            if not is_functorch_wrapped_tensor(variable):
                self._awaited[variable.untyped_storage()._cdata] = id(variable)

    def begin_forward(self) -> None:
        """Note that a model begins to compute with gradients."""
        self._end_pending()

    def begin_batch(self) -> None:
        """Note that a loader is asked for a batch. What no backward pass has added to any gradient was used by then."""
        if not self._end_pending() and self._lines:
            self._end(self._place())

    def note_written(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note what an operator has written in no backward pass."""
        if self._awaited:
            self._note({tensor.untyped_storage()._cdata for tensor in tensors} & self._awaited.keys())

    def note_assigned(self, tensor: torch.Tensor) -> None:
        """Note that the data of ``tensor`` are another tensor now."""
        self._note({address for address, identity in self._awaited.items() if identity == id(tensor)})

    def _note(self, addresses: set[int]) -> None:
        if not addresses:
            return
        self._written |= addresses
        self._last = self._place()
        if self._written | self._never_written >= self._awaited.keys():
            self._end(self._last)

    def _end_pending(self) -> bool:
        """End a step of which some parameters were written, if it has not ended."""
        if self._last is None:
            return False
        self._never_written = {*self._awaited} - self._written
        self._end(self._last)
        return True

    def _end(self, place: Any) -> None:
        self._awaited.clear()
        self._written.clear()
        self._lines.clear()
        self._last = None
        self._end_step(place)


def _leaves_of(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return what a backward pass from ``outputs`` gives gradients."""
    found = []
    seen = set()
    waiting: list[Any] = [tensor.grad_fn for tensor in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [next_node for next_node, _ in node.next_functions]
    return found
