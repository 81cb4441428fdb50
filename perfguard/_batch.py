"""A batch as a user describes it: tensors, specifications and shapes, nested in tuples, lists and dicts."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from typing import Any

from perfguard.workload import TensorSpec


def _is_shape(value: Any) -> bool:
    """Whether ``value`` stands for a float32 tensor of that shape: a tuple or list of integers, NumPy's too, at least one.

    A slip such as (32.0, 64) counts, and :class:`TensorSpec` refuses it by name. Floats alone are an argument of the model.
    """
    if not isinstance(value, (tuple, list)) or not all(isinstance(size, (int, float, numbers.Integral)) for size in value):
        return False
    is_whole = all(not isinstance(size, bool) and (not isinstance(size, float) or size.is_integer()) for size in value)
    return is_whole and any(isinstance(size, numbers.Integral) for size in value)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The nest ``value`` with ``change(leaf)`` in the place of each leaf; a shape is handed over as a TensorSpec."""
    if _is_shape(value):
        return change(TensorSpec(tuple(value)))
    if isinstance(value, Mapping):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return change(value)


def shape_of(leaf: Any) -> tuple[int, ...] | None:
    """The shape of a tensor or TensorSpec; None for anything else."""
    return tuple(leaf.shape) if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else None


def shapes_in(value: Any) -> list[tuple[int, ...]]:
    """The shapes of all tensors and specifications in ``value``, in order."""
    found: list[tuple[int, ...]] = []

    def note(leaf: Any) -> None:
        shape = shape_of(leaf)
        if shape is not None:
            found.append(shape)

    mapped(value, note)
    return found
