"""Values: what is known of the values of tensors on meta.

Labels, lengths and masks have values, because the host has made them. An operator runs on the host, too, if all that it reads is
known and small. So its result is known: `int(labels.max())`, `mask.nonzero()`, `batch.unique()`.

Other values are those of a network, which nobody knows before it is trained. They are 0, and an operator that compares them says
what it says of 0. That answers conditions, such as `(boxes >= 0).all()`, and never the size of a selection.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from perfguard.graph.recorder import operator_of, tensors_in
from perfguard.graph.shape_rules import empty_twin

aten = torch.ops.aten


class _Value(NamedTuple):
    """The values of a storage on meta."""

    like: torch.Tensor
    """A tensor on meta of the whole storage."""
    source: torch.Tensor
    """The same on the host."""
    is_sure: bool
    """Not if it depends on what is 0 because nobody knows it."""


class Values:
    """Remembers values, and works out those that follow.

    Args:
        most_elements: of a tensor that is worked with on the host. Labels and masks have few, images and activations many.
    """

    def __init__(self, *, most_elements: int = 2**18) -> None:
        self.most_elements = most_elements
        self._known: weakref.WeakKeyDictionary[Any, _Value] = weakref.WeakKeyDictionary()
        """By the storage on meta."""

    def remember(self, twin: torch.Tensor, source: torch.Tensor, *, is_sure: bool = True) -> None:
        """Note that ``twin`` on meta has the values of ``source``."""
        with _disable_current_modes():
            self._known[twin.untyped_storage()] = _Value(empty_twin(twin), source.detach(), is_sure)

    def are_known(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` has values that depend on no network."""
        return (found := self._of(tensor)) is not None and found.is_sure

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what the host reads of ``tensor``. What is not known is 0."""
        if not tensor.is_meta:
            return tensor
        with _disable_current_modes():
            found = self._of(tensor)
            if found is None:
                return zeros_on_host(tensor)
            whole = torch.empty_strided(found.like.shape, found.like.stride(), dtype=found.like.dtype).copy_(found.source)
            return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _of(self, tensor: torch.Tensor) -> _Value | None:
        found = self._known.get(tensor.untyped_storage())
        is_changed = not tensor.is_inference() and tensor._version > 0
        return None if found is None or tensor.dtype != found.like.dtype or is_changed else found

    def run(self, func: Any, args: Any, kwargs: Any, record: Callable[[Any, Any, Any, Any], object]) -> Any:
        """Run an operator on meta, and on the host if that says what its result is.

        ``record(func, args, kwargs, out)`` writes one down that meta cannot run, because the size of its result is a value.
        """
        is_sure = self._follows(func, args, kwargs)
        has_size_by_value = torch.Tag.dynamic_output_shape in func.tags and func is not aten.index.Tensor
        if is_sure is None or (has_size_by_value and not is_sure):
            return func(*args, **kwargs)
        out = None if has_size_by_value else self._on_meta(func, args, kwargs, needed=not is_sure)
        if any(tensor.numel() > self.most_elements for tensor in tensors_in(out)):
            return out
        try:
            with _disable_current_modes():
                result = func(*tree_map_only(torch.Tensor, self.read, args), **self._keywords_on_host(kwargs))
                twins = out if out is not None else tree_map_only(torch.Tensor, empty_twin, result)
        except Exception:  # sizes that are assumed need not be those of the values
            return func(*args, **kwargs) if out is None else out
        if out is None:
            record(func, args, kwargs, twins)
        for twin, source in zip(tensors_in(twins), tensors_in(result), strict=True):
            self.remember(twin, source, is_sure=is_sure)
        return twins

    @staticmethod
    def _on_meta(func: Any, args: Any, kwargs: Any, *, needed: bool) -> Any:
        """The result on meta. None: meta has no kernel, and its result is not ``needed``, because the host will have it."""
        try:
            return func(*args, **kwargs)
        except NotImplementedError:
            if needed:
                raise
            return None

    def _follows(self, func: Any, args: Any, kwargs: Any) -> bool | None:
        """Whether the result of an operator follows from what is surely known, or from what is taken for 0. None: neither."""
        name, given = operator_of(func).name, tensors_in((args, kwargs))
        if func.is_view or func.namespace != "aten" or operator_of(func).writes or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        if any(tensor.numel() > self.most_elements for tensor in given):
            return None
        if name in _FILLING:
            return True
        found = [self._of(tensor) for tensor in given if tensor.is_meta]
        if found and all(found):
            return all(value.is_sure for value in found if value)
        is_compared = name in _COMPARING and all(
            tensor.is_floating_point() or self._of(tensor) for tensor in given if tensor.is_meta
        )
        return False if is_compared else None

    def _keywords_on_host(self, kwargs: Any) -> dict[str, Any]:
        return {
            name: torch.device("cpu") if name == "device" and value is not None else tree_map_only(torch.Tensor, self.read, value)
            for name, value in kwargs.items()
        }


_FILLING = {"arange", "zeros", "ones", "full", "eye", "linspace", "scalar_tensor", "tril_indices", "triu_indices",
            "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}  # fmt: skip
"""Their results have values that depend on no tensor."""
_COMPARING = {"eq", "ne", "lt", "le", "gt", "ge", "isfinite", "isnan", "isinf"}
"""Their results are conditions."""


def zeros_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros on the host in the shape of ``tensor``. The system hands out no page of them before it is written to."""
    flat = torch.from_numpy(np.zeros(tensor.numel() * tensor.element_size(), dtype=np.uint8))
    return flat.view(tensor.dtype).reshape(tensor.shape)
