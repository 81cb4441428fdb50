"""Arguments of operators by their names: each operator has them at places of its own, and may get them as keywords."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

Args = Sequence[Any]
"""What an operator is called with, by position."""
Kwargs = Mapping[str, Any]
"""And by name."""


def argument_of(func: torch._ops.OpOverload, args: Args, kwargs: Kwargs, name: str) -> Any:
    """Return the argument ``name`` of a call of the operator ``func``, or its default. None: the operator has no such argument.

    Example:
        >>> table, rows = torch.zeros(5, 2), torch.tensor([1])
        >>> argument_of(torch.ops.aten.embedding.default, (table, rows), {"sparse": True}, "sparse")
        True
    """
    place = _places(func).get(name)
    if place is None:
        return None
    position, default = place
    return args[position] if position < len(args) else kwargs.get(name, default)


@functools.cache
def _places(func: torch._ops.OpOverload) -> Mapping[str, tuple[int, Any]]:
    """Position and default of each argument, by its name."""
    return {argument.name: (at, argument.default_value) for at, argument in enumerate(func._schema.arguments)}
