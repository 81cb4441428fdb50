"""Expected sizes of selections whose size depends on the data: `nonzero`, `where(condition)`, `x[mask]`, `masked_select`.

A trace has no values. It assumes that choices by index are spread evenly, as a router with a balancing loss spreads tokens over
experts. What is known about a tensor belongs to its storage, so views share it:

    indices by `topk`, `argmax`, `sort` over E elements    each of E values is equally frequent
    `indices == e`, `one_hot(indices, E)`                  1/E of the elements
    `any` or `sum` of n such elements                      n/E of the elements, at most all
    `zeros.scatter(dim, indices, ...)`                     as many as there are indices
    `x[mask] = values`                                     as many as there are values
    any other mask                                         half of the elements

Fractions of an element are rounded up: an expert that is hit has at least one token.

The functions at the end widen intervals for such assumptions, and for opaque operators, whose arithmetic is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from perfguard.graph.arguments import Args, Kwargs, argument_of
from perfguard.graph.shape_rules import META, is_meta
from perfguard.unmodelled import EVEN_CHOICES, GENERATED, GROUPED_PRODUCTS, HALF_CHOSEN, Unmodelled

if TYPE_CHECKING:
    from perfguard.graph.opgraph import OpGraph

aten = torch.ops.aten
_ARG = ("argmax", "argmin")
_KEEPING = ("clone", "_to_copy", "index", "index_select", "gather", "mul", "bitwise_and", "logical_and")
_KEEPING_IN_PLACE = ("mul_", "bitwise_and_", "logical_and_")
_NOTED = {*_ARG, *_KEEPING, "topk", "sort", "max", "min", "arange", "eq", "gt", "ne", "any", "sum", "scatter", "scatter_",
          "index_put", "index_put_"}  # fmt: skip


class _Known(NamedTuple):
    """What is known about the values of a storage."""

    share: Fraction
    """Of a mask: elements that are chosen. Of indices: elements with the same value."""
    kind: Literal["indices", "classes", "mask", "one_hot", "count", "any", "given"]
    """"classes": all indices, in order. "count": the sum of a one-hot mask. "any": of a whole mask. "given": the size is no
    assumption."""
    num_classes: int = 0
    """Of "classes", "one_hot" and "count"."""


class Selections:
    """Follows masks and indices through a trace.

    Args:
        storage_index: identifies the storage of a tensor.
    """

    def __init__(self, storage_index: Callable[[torch.Tensor], int]) -> None:
        self._storage_index = storage_index
        self._by_storage: dict[int, _Known] = {}
        self.assumed: dict[Unmodelled, None] = {}
        """Entries of the graph's ``unmodelled``, in the order of the selections."""
        self.are_read = True
        """False while positions only select: no loop reads them."""
        self.are_few = False
        """Whether they select of fewer elements than change any memory or time, as a metric does."""

    def outputs_of(self, func: torch._ops.OpOverload, args: Args) -> Any:
        """The output of the operator ``func`` if its size depends on values, else NotImplemented."""
        if func is aten.nonzero.default and is_meta(args[0]):
            mask = args[0]
            number = self._expected(mask, mask.shape)
            known = self._known(mask)
            if self.are_read and known.kind == "count" and mask.shape == (known.num_classes,):  # a loop over experts that are hit
                return torch.arange(number, device="cpu")[:, None]
            return torch.empty((number, mask.dim()), dtype=torch.int64, device=META)
        if func is aten.masked_select.default and is_meta(args[1]):
            number = self._expected(args[1], torch.broadcast_shapes(args[0].shape, args[1].shape))
            return torch.empty(number, dtype=args[0].dtype, device=META)
        if func is aten.bincount.default and is_meta(args[0]) and len(args) == 3:
            # Who states a length, states that of all values.
            return torch.empty(args[2], dtype=torch.int64 if args[1] is None else args[1].dtype, device=META)
        return NotImplemented

    def are_some(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is the `any` of a mask of which some elements are chosen, such as the tokens of an expert."""
        known = self._by_storage.get(self._storage_index(tensor))
        if known is None or known.kind != "any" or known.share < 1:
            return False
        self.assumed[EVEN_CHOICES] = None
        return True

    def note(self, func: torch._ops.OpOverload, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
        """Remember what the output of an operator says about its values."""
        if name.endswith("_") and name not in _KEEPING_IN_PLACE and args and is_meta(args[0]):
            self._by_storage.pop(self._storage_index(args[0]), None)
        if name not in _NOTED or func.namespace != "aten":
            return
        if name.startswith("index_put"):
            self._note_assignment(*args[:3])
            return
        result = out[-1] if isinstance(out, tuple) else out
        known = self._result(func, name, args, kwargs, out)
        if known is not None and is_meta(result):
            self._by_storage[self._storage_index(result)] = known

    def _result(self, func: torch._ops.OpOverload, name: str, args: Args, kwargs: Kwargs, out: Any) -> _Known | None:
        if name == "arange":
            return _Known(Fraction(1, max(out.numel(), 1)), "classes", out.numel())
        if name in _ARG or isinstance(out, tuple):
            dim = argument_of(func, args, kwargs, "dim")
            number = args[0].numel() if dim is None or not args[0].dim() else args[0].size(dim)
            return _Known(Fraction(1, max(number, 1)), "indices")
        if name in ("scatter", "scatter_"):
            share = min(Fraction(args[2].numel(), max(args[0].numel(), 1)), Fraction(1))
            return _Known(share, "one_hot", args[0].size(args[1]) if args[0].dim() else 1)
        found = [self._known(tensor) for tensor in args[:2] if is_meta(tensor) and self._is_known(tensor)]
        if not found:
            return None
        least = min([known for known in found if known.kind != "classes"] or found)  # one_hot may have a class that none has
        chooses = least.kind in ("mask", "one_hot", "count")
        if name == "eq":
            classes = next((known.num_classes for known in found if known.kind == "classes"), 0)
            return _Known(least.share, "one_hot" if classes else "mask", classes)
        if name in ("gt", "ne"):
            return least if chooses and not isinstance(args[1], torch.Tensor) and args[1] == 0 else None
        if name in ("any", "sum"):
            share = min(least.share * args[0].numel() / max(out.numel(), 1), Fraction(1))
            if name == "any" and out.numel() == 1:
                return _Known(share, "any") if chooses else None
            return _Known(share, "count" if least.kind == "one_hot" else "mask", least.num_classes) if chooses else None
        return least if name in _KEEPING else None

    def _note_assignment(self, x: torch.Tensor, indices: Sequence[Any], values: torch.Tensor) -> None:
        """In the backward pass, the gradient of the values has their size."""
        mask = indices[0]
        if not is_mask(mask) or any(index is not None for index in indices[1:]) or self._is_known(mask):
            return
        if values.dim() == x.dim() - mask.dim() + 1 and values.shape[0] > 1:
            share = Fraction(values.shape[0], max(mask.numel(), 1))
            self._by_storage[self._storage_index(mask)] = _Known(share, "given")

    def _expected(self, mask: torch.Tensor, shape: Sequence[int]) -> int:
        known = self._known(mask)
        if known.kind != "given" and not self.are_few:
            self.assumed[EVEN_CHOICES if self._is_known(mask) else HALF_CHOSEN] = None
        return math.ceil(math.prod(shape) * known.share)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return self._storage_index(tensor) in self._by_storage

    def _known(self, tensor: torch.Tensor) -> _Known:
        return self._by_storage.get(self._storage_index(tensor), _Known(Fraction(1, 2), "mask"))


def is_mask(index: Any) -> bool:
    """Whether an index is a mask on meta."""
    return is_meta(index) and index.dtype in (torch.bool, torch.uint8)


def has_assumed_sizes(graph: OpGraph) -> bool:
    """Whether sizes in ``graph`` depend on an assumption about the data."""
    return EVEN_CHOICES in graph.unmodelled or HALF_CHOSEN in graph.unmodelled


def assumed_log_sigma(graph: OpGraph, target: str) -> float:
    """Standard deviation of log("memory" or "time") that the assumptions about the data add to a prediction of ``graph``."""
    # Guesses. Half: with a probability of 90% the step needs between half and twice as much. An even spread: only the size of the
    # largest expert is unknown. A grouped product has the same bytes for any spread. Generated text may take ten times as long.
    log_sigmas = {
        EVEN_CHOICES: {"memory": 0.15, "time": 0.1},
        HALF_CHOSEN: {"memory": 0.42, "time": 0.42},
        GROUPED_PRODUCTS: {"memory": 0.0, "time": 0.1},
        GENERATED: {"memory": 0.0, "time": 1.4},
    }
    return math.hypot(*(log_sigmas[gap][target] for gap in graph.unmodelled if gap in log_sigmas))


def unknown_operators(graph: OpGraph) -> dict[int, int]:
    """The opaque operators of ``graph``: by index, how many operators each may launch. Empty: there are none."""
    known = ((index, 1 if op.name == "opaque" else op.attributes.get("unknown", 0)) for index, op in enumerate(graph.ops))
    return {index: number for index, number in known if number}


def unknown_span(graph: OpGraph, op_time_s: Sequence[float], memory_bytes: float) -> dict[str, float]:
    """Upper end, as a logarithm, of the range above a prediction of ``graph`` that treats opaque operators as copies.

    A prediction moves to the middle of that span, and half of the span becomes half of its 90% interval. So both ends are
    equally likely. At the lower end the operator only moves its bytes. At the upper end it takes 30 times as long (times the
    operators that control flow may launch) and holds 4 times its bytes.

    Args:
        graph: traced, or read from a file.
        op_time_s: seconds of each operator. Shape: (len(ops),).
        memory_bytes: the predicted peak.

    Returns:
        For "memory" and "time" a number that is not negative; 0 where nothing is opaque.
    """
    opaque = unknown_operators(graph)
    if not opaque:
        return {"memory": 0.0, "time": 0.0}
    # A matrix product does about 30 times as many operations for a byte beyond what a GPU's memory keeps up with.
    slower = 30
    larger = 4
    more_s = sum(op_time_s[index] * (slower * number - 1) for index, number in opaque.items())
    touched = max(graph.ops[index].bytes_read + graph.ops[index].bytes_written for index in opaque)
    return {
        "memory": math.log1p((larger - 1) * touched / max(memory_bytes, 1.0)),
        "time": math.log1p(more_s / max(sum(op_time_s), 1e-12)),
    }
