"""Collated: makes the batch of a loader without assembling what is large.

    default_collate     A large tensor has no data: its shape and type are those of two samples. All else is what it is.
    any other function  It gets all samples, if they are few, or tensors of few bytes. Otherwise it may take long, or make much,
                        by what it makes of 4 samples and of 8. Then a batch is told from these two, if each tensor of it
                        either grows in step with the samples, or is the same.

The 4 samples are the smallest of the batch and the 8 its largest, so that a batch that is padded cannot be told. Then the
function gets all samples.
"""

from __future__ import annotations

import copy
import math
import time
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate as collate_by_type
from torch.utils.data._utils.collate import default_collate_fn_map

from perfguard.capture.few_samples import copied, look_at
from perfguard.graph.shape_rules import META
from perfguard.pytorch import random_numbers_kept

Collate = Callable[[Any], Any]
Make = Callable[[torch.Tensor], torch.Tensor]
"""Returns a tensor without data of the host in the shape and layout of one on meta."""
Repeat = Callable[[torch.Tensor, torch.Tensor, int | None], torch.Tensor]
"""``make(like, one, dim)`` returns a tensor in the shape of ``like``, in which ``one`` is repeated along ``dim``. None: it is the
same for any number of samples."""


class CannotTellError(Exception):
    """The batch of many samples cannot be told from those of a few."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a batch may take that is assembled."""

    most_bytes: int = 2**25
    """Bytes of a tensor. A larger one has no data."""
    most_s: float = 0.1
    """Seconds of a collate function of the user's own."""
    few: tuple[int, int] = (4, 8)
    """Numbers of samples from which a batch is told."""
    most_compared: int = 64
    """Samples of a batch among which the smallest and the largest are looked for."""


class _Found(NamedTuple):
    """What was found of a collate function."""

    most_samples: float
    """The most samples for which it was."""
    few: tuple[tuple[int, Any], ...] = ()
    """Two batches that tell the others, with the numbers of their samples. Empty: it gets all samples."""


class Batches:
    """Makes batches of samples.

    Args:
        make_blank: makes a tensor without data.
        limits: what a batch may take that is assembled.
        clock: returns the time in seconds.
    """

    def __init__(self, make_blank: Make, limits: Limits | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._make_blank = make_blank
        self._limits = Limits() if limits is None else limits
        self._clock = clock
        self._found: dict[int, tuple[weakref.ref[Any], _Found]] = {}
        """What was found of the collate functions of the user's own, by their ids."""

    def make(self, collate: Collate, samples: Sequence[Any], own: Callable[[], Sequence[Any]] | None = None) -> Any:
        """Return what ``collate`` makes of ``samples``, with no data in what is large.

        If it may change them, it gets those that ``own()`` returns. None: it may change ``samples``.
        """
        if collate is default_collate:
            return collate_by_type(samples, collate_fn_map={**default_collate_fn_map, torch.Tensor: self._stacked})
        own = own or (lambda: samples)
        if len(samples) <= 2 * max(self._limits.few) or self._is_little_work(samples):
            return collate(own())
        reference, found = self._found.get(id(collate), (None, None))
        if found is None or reference is None or reference() is not collate or len(samples) > found.most_samples:
            found = self._find(collate, samples)
            with suppress(TypeError):  # then it is looked at anew for each batch
                self._found[id(collate)] = weakref.ref(collate), found
        if found.few:
            with suppress(CannotTellError):  # then 7 samples may make what 8 do not
                return told(found.few, len(samples), self._made)
        return collate(own())

    def _is_little_work(self, samples: Sequence[Any]) -> bool:
        first = look_at(samples[0])
        if first is None or first.is_raw or not first.num_bytes:  # numbers alone may stand for files
            return False
        return len(samples) * first.num_bytes <= self._limits.most_bytes

    def _find(self, collate: Collate, samples: Sequence[Any]) -> _Found:
        few: list[tuple[int, Any]] = []
        by_size = sorted(samples[: self._limits.most_compared], key=_size_of)
        fewer, more = self._limits.few
        with random_numbers_kept(beside_threads=True):
            for chosen in (by_size[:fewer], by_size[-more:]):
                began = self._clock()
                try:
                    batch = collate([copied(sample) for sample in chosen])
                except Exception:  # what is wrong, it says better of all samples
                    return _Found(len(samples))
                share = len(samples) / len(chosen)
                is_quick = share * (self._clock() - began) <= self._limits.most_s
                if is_quick and share * _largest_bytes(batch) <= self._limits.most_bytes:
                    return _Found(len(samples))
                few.append((len(chosen), batch))
        try:
            told(few, len(samples), lambda like, *_: like)
        except CannotTellError:
            return _Found(math.inf)
        return _Found(math.inf, tuple(few))

    def _stacked(self, tensors: Sequence[torch.Tensor], **kwargs: Any) -> Any:
        own: Any = default_collate_fn_map[torch.Tensor]
        first = tensors[0]
        number = len(tensors)
        num_bytes = number * first.numel() * first.element_size()
        is_small = number < 3 or num_bytes <= self._limits.most_bytes
        if is_small or first.layout is not torch.strided:
            return own(tensors, **kwargs)
        if any(one.shape != first.shape or one.dtype != first.dtype or one.is_meta for one in tensors):
            return own(tensors, **kwargs)
        two = own(tensors[:2], **kwargs)
        if type(two) is not torch.Tensor or two.layout is not torch.strided or two.stride(0) != first.numel():
            return own(tensors, **kwargs)
        like = torch.empty_strided((number, *two.shape[1:]), two.stride(), dtype=two.dtype, device=META)
        return self._make_blank(like)

    def _made(self, like: torch.Tensor, few: torch.Tensor, dim: int | None) -> torch.Tensor:
        if like.nbytes > self._limits.most_bytes:
            return self._make_blank(like)
        if dim is None:
            return few.clone()
        return few.index_select(dim, torch.arange(like.shape[dim], device="cpu") % few.shape[dim])


def told(few: Sequence[tuple[int, Any]], number: int, make: Repeat) -> Any:
    """Return the batch of ``number`` samples, told from two batches with the numbers of their samples.

    Args:
        few: the two numbers, which differ, and the two batches.
        number: of samples in the batch.
        make: makes each tensor.

    Raises:
        CannotTellError: if a part of the batches neither grows in step with the samples, nor is the same in both.
    """
    (fewer, one), (more, other) = few
    if type(one) is not type(other):
        raise CannotTellError
    if isinstance(one, torch.Tensor):
        return _told_tensor(one, other, fewer, more, number, make)
    if isinstance(one, MutableMapping):
        if [*one] != [*other]:
            raise CannotTellError
        clone = copy.copy(one)
        for key in one:
            clone[key] = told([(fewer, one[key]), (more, other[key])], number, make)
        return clone
    if isinstance(one, (tuple, list)) and not isinstance(one, Mapping):
        if len(one) != len(other):
            raise CannotTellError
        parts = [told([(fewer, part), (more, twin)], number, make) for part, twin in zip(one, other, strict=True)]
        return type(one)(*parts) if hasattr(one, "_fields") else type(one)(parts)
    if isinstance(one, (str, bytes, int, float, type(None))) and one == other:
        return one
    raise CannotTellError


def _told_tensor(
    one: torch.Tensor,
    other: torch.Tensor,
    fewer: int,
    more: int,
    number: int,
    make: Repeat,
) -> torch.Tensor:
    is_plain = type(one) is torch.Tensor and one.layout is torch.strided and one.device.type == "cpu"
    if not is_plain or one.dtype != other.dtype or one.dim() != other.dim() or not one.numel():
        raise CannotTellError
    grown = [dim for dim, (few, many) in enumerate(zip(one.shape, other.shape, strict=True)) if few != many]
    if not grown:
        return make(torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=META), one, None)
    dim, *others = grown
    size, rest = divmod(one.shape[dim] * number, fewer)
    if others or rest or one.shape[dim] * more != other.shape[dim] * fewer:
        raise CannotTellError
    shape = (*one.shape[:dim], size, *one.shape[dim + 1 :])
    if one.is_contiguous():
        return make(torch.empty(shape, dtype=one.dtype, device=META), one, dim)
    if one.dim() == 4 and one.is_contiguous(memory_format=torch.channels_last):
        return make(torch.empty(shape, dtype=one.dtype, device=META, memory_format=torch.channels_last), one, dim)
    raise CannotTellError


def _size_of(sample: Any) -> int:
    seen = look_at(sample)
    return 0 if seen is None else seen.num_bytes


def _largest_bytes(value: Any) -> int:
    """Bytes of the largest tensor in ``value``."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return max(map(_largest_bytes, parts), default=0)
