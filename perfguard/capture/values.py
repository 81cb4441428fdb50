"""Values: what is known of the values of tensors on meta.

Labels, lengths and masks have values, because the host has made them. An operator runs on the host, too, if all that it reads is
known and small. So its result is known: `int(labels.max())`, `mask.nonzero()`, `batch.unique()`.

Other values are those of a network, which nobody knows before it is trained. They are 0, and an operator that compares them says
what it says of 0. That answers conditions, such as `(boxes >= 0).all()`, and never the size of a selection.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from perfguard.capture.blanks import zeros_on_host
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
    version: int = 0
    """PyTorch's count of the writes to the storage that are in ``source``."""

    def copied(self) -> torch.Tensor:
        """The values in a storage of their own that is laid out as the one on meta."""
        return torch.empty_strided(self.like.shape, self.like.stride(), dtype=self.like.dtype, device="cpu").copy_(self.source)


class Values:
    """Remembers values, and works out those that follow.

    Args:
        most_elements: of a tensor that is worked with on the host. Labels and masks have few, images and activations many.
    """

    def __init__(self, *, most_elements: int = 2**18) -> None:
        self.most_elements = most_elements
        self._known: weakref.WeakKeyDictionary[Any, _Value] = weakref.WeakKeyDictionary()
        """By the storage on meta."""
        self.on_unknown: Callable[[], object] = lambda: None
        """Called as the host reads what depends on a network."""

    def remember(self, twin: torch.Tensor, source: torch.Tensor, *, is_sure: bool = True) -> None:
        """Note that ``twin`` on meta has the values of ``source``."""
        with _disable_current_modes():
            self._known[twin.untyped_storage()] = _Value(empty_twin(twin), source.detach(), is_sure, _version_of(twin))

    def are_known(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` has values that depend on no network."""
        return (found := self._of(tensor)) is not None and found.is_sure

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what the host reads of ``tensor``. What is not known is 0."""
        if tensor.is_meta and not self.are_known(tensor):
            self.on_unknown()
        return self._on_host(tensor)

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        with _disable_current_modes():
            found = self._of(tensor)
            if found is None:
                return zeros_on_host(tensor)
            return _part_of(found.copied(), tensor)

    def _of(self, tensor: torch.Tensor) -> _Value | None:
        found = self._known.get(tensor.untyped_storage())
        is_lost = found is None or tensor.dtype != found.like.dtype or _version_of(tensor) > found.version
        return None if is_lost else found

    def run(self, func: Any, args: Any, kwargs: Any, record: Callable[[Any, Any, Any, Any], object]) -> Any:
        """Run an operator on meta, and on the host if that says what its result is.

        ``record(func, args, kwargs, out)`` writes one down that meta cannot run, because the size of its result is a value.
        """
        writes = operator_of(func).writes
        if operator_of(func).name == "set_":  # it changes what a tensor is of, as `torch.save` does, and no values
            return func(*args, **kwargs)
        if [position for position, _ in writes] == [0] and args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            return self._write(func, args, kwargs)
        if [position for position, _ in writes] == [0] and args and isinstance(args[0], list):
            return self._write_each(func, args, kwargs)
        is_sure = self._follows(func, args, kwargs)
        has_size_by_value = torch.Tag.dynamic_output_shape in func.tags and func is not aten.index.Tensor
        if is_sure is None or (has_size_by_value and not is_sure):
            return func(*args, **kwargs)
        out = None if has_size_by_value else self._on_meta(func, args, kwargs, needed=not is_sure)
        if any(tensor.numel() > self.most_elements for tensor in tensors_in(out)):
            return out
        try:
            with _disable_current_modes():
                result = func(*tree_map_only(torch.Tensor, self._on_host, args), **self._keywords_on_host(kwargs))
                twins = out if out is not None else tree_map_only(torch.Tensor, empty_twin, result)
        except Exception:  # sizes that are assumed need not be those of the values
            return func(*args, **kwargs) if out is None else out
        if out is None:
            record(func, args, kwargs, twins)
        for twin, source in zip(tensors_in(twins), tensors_in(result), strict=True):
            self.remember(twin, source, is_sure=is_sure)
        return twins

    def _write(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that changes its first argument, such as `counter.add_(1)` or `labels[labels == 2] = 0`."""
        target = args[0]
        others = tensors_in((args[1:], kwargs))
        found = self._of(target)
        is_whole = target.numel() <= self.most_elements and target.nbytes == target.untyped_storage().nbytes()
        if operator_of(func).name in _OVERWRITING and is_whole and not target.is_floating_point():
            with _disable_current_modes():
                found = _Value(empty_twin(target), zeros_on_host(target), is_sure=True)
        follows = all(self.are_known(tensor) for tensor in others if tensor.is_meta)
        is_from_host = func is aten.copy_.default and not args[1].is_meta
        out = func(*((target, target, *args[2:]) if is_from_host else args), **kwargs)
        if found is None or not follows or sum(tensor.numel() for tensor in others) > self.most_elements:
            self._known.pop(target.untyped_storage(), None)
            return out
        with _disable_current_modes(), suppress(Exception):  # then it is not known any longer
            whole, others_on_host = found.copied(), tree_map_only(torch.Tensor, self._on_host, args[1:])  # parts of it, perhaps
            self._known.pop(target.untyped_storage(), None)
            func(_part_of(whole, target), *others_on_host, **self._keywords_on_host(kwargs))
            version = _version_of(target) + 1  # PyTorch counts this write when it has returned
            self._known[target.untyped_storage()] = found._replace(source=whole, version=version)
        return out

    def _write_each(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that changes a list of tensors, such as the numbers of steps of an optimizer that was resumed.

        Their values stay known if those of all are, and they are numbers.
        """
        targets = args[0]
        others = tensors_in((args[1:], kwargs))
        are_numbers = all(isinstance(x, torch.Tensor) and x.numel() == 1 for x in (*targets, *others))
        found = [self._of(target) for target in targets] if are_numbers else [None]
        out = func(*args, **kwargs)
        if None in found or not all(self.are_known(tensor) for tensor in others if tensor.is_meta):
            return out
        with _disable_current_modes(), suppress(Exception):  # then they are not known any longer
            wholes = [value.copied() for value in found if value is not None]
            parts = [_part_of(whole, target) for whole, target in zip(wholes, targets, strict=True)]
            func(parts, *tree_map_only(torch.Tensor, self._on_host, args[1:]), **self._keywords_on_host(kwargs))
            for target, value, whole in zip(targets, found, wholes, strict=True):
                version = _version_of(target) + 1  # PyTorch counts this write when it has returned
                self._known[target.untyped_storage()] = value._replace(source=whole, version=version)  # type: ignore[union-attr]
        return out

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
        name = operator_of(func).name
        given = tensors_in((args, kwargs))
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
            name: torch.device("cpu")
            if name == "device" and value is not None
            else tree_map_only(torch.Tensor, self._on_host, value)
            for name, value in kwargs.items()
        }


def _part_of(whole: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """What ``tensor`` is of its storage on meta, of one on the host that is laid out alike."""
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _version_of(tensor: torch.Tensor) -> int:
    """How often the storage of ``tensor`` was written to. 0 in inference mode, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


_FILLING = {"arange", "zeros", "ones", "full", "eye", "linspace", "scalar_tensor", "tril_indices", "triu_indices",
            "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}  # fmt: skip
"""Their results have values that depend on no tensor."""
_OVERWRITING = {"zero_", "fill_", "copy_"}
"""After them, nothing is left of the values before."""
_COMPARING = {"eq", "ne", "lt", "le", "gt", "ge", "isfinite", "isnan", "isinf"}
"""Their results are conditions."""
