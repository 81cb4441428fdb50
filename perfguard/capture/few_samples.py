"""FewSamples: of each data set, a dry run reads a few samples, and makes its batches of these again.

A sample that takes long to read is the same work for a dry run as for a trial, and what it shows is a shape. So

    a sample is read     in the first quarter of a second that its data set takes; later, while it is among the first 32 or while
                         samples differ in shape, up to a second
    it is given again    after that, in the place of any other, but not where its samples hold tensors of the device, or objects
                         that nobody can look into, or where samples differ and a sampler groups them

A data set that is quick is thus read as in a trial: its labels and lengths are those of the batch. A loop over a loader before
any model has computed works out something of the data, such as the number of classes, so it gets all of them from its third batch
on. The first sample of each pass is looked at, because a data set may be changed between epochs. A stream has an end that only
reading finds, so its samples are read for a second, and then repeated until its loop is cut. Where a loop is only counted
(`replay.py`), a batch is given again.
"""

from __future__ import annotations

import copy
import functools
import time
import types
from collections.abc import Callable, Collection, Hashable, Mapping, MutableMapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import Subset
from torch.utils.weak import WeakIdKeyDictionary

from perfguard.capture.host import NO_LENGTH


@dataclass(frozen=True, slots=True)
class Budget:
    """How much of a data set a dry run reads."""

    free_s: float = 0.25
    """Seconds of reading in which every sample is read."""
    most_s: float = 1.0
    """Seconds of reading after which none is."""
    most_samples: int = 32
    """Samples that are read after ``free_s``, if all are alike."""
    most_bytes: int = 2**28
    """Bytes of samples that are kept to be given again. At least one is."""
    most_repeated: int = 256
    """Batches of a stream that are made of samples again, after which it is read on: nothing else may end its loop."""


class Sample(NamedTuple):
    """What can be seen of a sample."""

    form: Any
    """Shapes of its tensors and arrays, and lengths of its texts, in its containers."""
    num_bytes: int = 0
    """Bytes of its tensors, arrays and images."""
    tensors: tuple[torch.Tensor, ...] = ()
    is_raw: bool = True
    """Whether it holds more than tensors and arrays and what belongs to them, so that a batch of it may be much work."""

    @property
    def is_on_device(self) -> bool:
        """Whether a tensor in it is one of the device."""
        return any(tensor.is_meta for tensor in self.tensors)


def look_at(sample: Any, *, depth: int = 8) -> Sample | None:
    """Return what can be seen of a sample, ``depth`` containers deep. None: it holds something that nobody can look into."""
    if isinstance(sample, torch.Tensor):
        return Sample((tuple(sample.shape), sample.dtype), sample.numel() * sample.element_size(), (sample,), is_raw=False)
    if isinstance(getattr(sample, "shape", None), tuple) and hasattr(sample, "nbytes"):  # an array or a number of NumPy
        return Sample((sample.shape, str(sample.dtype)), int(sample.nbytes), is_raw=False)
    if isinstance(sample, (str, bytes)):
        return Sample(len(sample), len(sample))
    if isinstance(sample, (torch.dtype, torch.device)):
        return Sample(str(sample), is_raw=False)
    if sample is None or isinstance(sample, (int, float, complex)):
        return Sample(type(sample).__name__, is_raw=False)
    if type(sample).__module__.partition(".")[0] == "PIL":
        width, height = sample.size
        return Sample((width, height, sample.mode), 4 * width * height)
    if not depth:
        return None
    if isinstance(sample, Mapping):
        return _look_at_parts(type(sample).__name__, tuple(map(str, sample)), [*sample.values()], depth - 1)
    if isinstance(sample, list) and sample and all(type(item) is int for item in sample):
        return Sample(("numbers", len(sample)), 8 * len(sample))
    if isinstance(sample, (tuple, list)):
        return _look_at_parts(type(sample).__name__, len(sample), sample, depth - 1)
    if isinstance(sample, type):
        return Sample(sample.__name__, is_raw=False)
    if hasattr(sample, "__dict__") and not isinstance(sample, _HIDING):
        return look_at(vars(sample), depth=depth - 1)
    return None


_HIDING = types.FunctionType, types.MethodType, types.ModuleType, functools.partial
"""What holds more than its attributes."""


def _look_at_parts(kind: str, names: Any, parts: Sequence[Any], depth: int) -> Sample | None:
    seen: list[Sample] = []
    for part in parts:
        found = look_at(part, depth=depth)
        if found is None:
            return None
        seen.append(found)
    form = kind, names, tuple(part.form for part in seen)
    tensors = tuple(tensor for part in seen for tensor in part.tensors)
    return Sample(form, sum(part.num_bytes for part in seen), tensors, any(part.is_raw for part in seen))


def copied(sample: Any) -> Any:
    """Return a copy of a sample that shares nothing with it. A tensor's copy has its own bytes, and not all of its storage."""
    memo: dict[int, Any] = {}
    for tensor in _tensors_of(sample):
        with torch._C.DisableTorchFunction() if type(tensor) is torch.Tensor else nullcontext():
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return copy.deepcopy(sample, memo)


def _shared(batch: Any) -> Any:
    """Return a batch that has containers and shapes of its own, and shares the bytes of its tensors."""
    return copy.deepcopy(
        batch, {id(tensor): tensor.detach().requires_grad_(tensor.requires_grad) for tensor in _tensors_of(batch)}
    )


def _tensors_of(value: Any) -> tuple[torch.Tensor, ...]:
    with torch._C.DisableTorchFunction():  # the modes of a dry run cost more than what is asked here
        seen = look_at(value)
    return () if seen is None else seen.tensors


class Samples:
    """What was read of one data set, and whether more of it is to be read.

    Args:
        budget: how much is read.
        clock: returns the time in seconds.
    """

    def __init__(self, budget: Budget, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget = budget
        self._clock = clock
        self._kept: list[Any] = []
        self._kept_bytes = 0
        self._held_bytes = 0
        """Bytes of what is kept that a trial holds in each sample, and not in its data set."""
        self._batches: dict[Hashable, Any] = {}
        self._form: Any = None
        self._num_read = 0
        self._spent_s = 0.0
        self._looked_s = 0.0
        self.differ = False
        """Whether two of the first samples differ in shape."""
        self._cannot_repeat = False

    @property
    def sample_bytes(self) -> int:
        """Mean bytes of a sample beside its data set."""
        return self._held_bytes // max(1, len(self._kept))

    @property
    def has_any(self) -> bool:
        """Whether samples were read that can be given again."""
        return bool(self._kept)

    def must_read(self, number: int = 1, *, is_stream: bool = False) -> bool:
        """Whether the next ``number`` of samples are to be read. In a ``stream``, it does not matter how many were."""
        if self._cannot_repeat or not self._kept:
            return True
        will_be_s = self._spent_s + (number - 1) * self._spent_s / self._num_read
        if will_be_s < self.budget.free_s:
            return True
        is_among_first = is_stream or self.differ or self._num_read < self.budget.most_samples
        return is_among_first and will_be_s < self.budget.most_s

    def read(self, get: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """Return the samples that ``get`` reads. The first of them are kept."""
        began = self._clock()
        found = get()
        self._spent_s += self._clock() - began
        for sample in found:
            if self._num_read < self.budget.most_samples and not self._cannot_repeat:
                self._cannot_repeat = not self._keep(sample)
            self._num_read += 1
        if self._cannot_repeat:
            self._kept.clear()
        return found

    def _keep(self, sample: Any) -> bool:
        """Keep a sample, if there is room for it. Return whether it can be given again."""
        with torch._C.DisableTorchFunction():
            seen = look_at(sample)
        if seen is None or seen.is_on_device:
            return False
        self._form = seen.form if self._form is None else self._form
        self.differ |= seen.form != self._form
        if self._kept and self._kept_bytes + seen.num_bytes > self.budget.most_bytes:
            return True
        try:
            self._kept.append(copied(sample))  # who gets it may change it
        except Exception:
            return False
        self._kept_bytes += seen.num_bytes
        views = (tensor for tensor in seen.tensors if tensor.untyped_storage().nbytes() > tensor.nbytes)
        self._held_bytes += seen.num_bytes - sum(tensor.nbytes for tensor in views)
        return True

    def look_again(self, get: Callable[[], Sequence[Any]]) -> None:
        """Forget what was read, if the sample that ``get`` reads has another shape than all before: its data set was changed."""
        if not self._kept or self.differ or self._looked_s > self.budget.most_s:
            return
        began = self._clock()
        (sample,) = get()
        self._looked_s += self._clock() - began
        with torch._C.DisableTorchFunction():
            seen = look_at(sample)
        if seen is None or seen.form != self._form:
            self._kept.clear()
            self._batches.clear()
            self._form = None
            self._num_read = self._kept_bytes = self._held_bytes = 0
            self._spent_s = 0.0

    def note_batch(self, key: Hashable, batch: Any, *, most: int = 4) -> None:
        """Keep a batch, if its samples can be given again and none of it is on the device."""
        if not self._kept or len(self._batches) >= most:
            return
        with torch._C.DisableTorchFunction():
            seen = look_at(batch)
        if seen is not None and not seen.is_on_device:
            with suppress(Exception):  # what cannot be copied is made again
                self._batches[key] = _shared(batch)

    def batch_again(self, key: Hashable) -> Any:
        """Return a batch that was kept, in containers of its own. None: none was."""
        batch = self._batches.get(key)
        return None if batch is None else _shared(batch)

    def again(self, number: int) -> Any:
        """Return a sample that was read, in the place of sample ``number``. It is not to be changed."""
        return self._kept[number % len(self._kept)]


class ReadOnce:
    """Reads each sample of a data set once, as long as those that were read have few bytes.

    Args:
        dataset: gives a sample by its number.
        most_bytes: of samples that are kept. Others are read again.
    """

    def __init__(self, dataset: Any, most_bytes: int = 2**28) -> None:
        self._dataset = dataset
        self._bytes_left = most_bytes
        self._kept: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if index in self._kept:
            return copied(self._kept[index])  # who gets it may change it
        sample = self._dataset[index]
        with torch._C.DisableTorchFunction():
            seen = look_at(sample)
        if seen is not None and not seen.is_on_device and seen.num_bytes <= self._bytes_left:
            with suppress(Exception):  # what cannot be copied is read again
                self._kept[index] = copied(sample)
                self._bytes_left -= seen.num_bytes
        return sample


class Loops(Protocol):
    """Knows where the loops over loaders stand."""

    is_replayed: bool
    """Whether the loops are only counted, so what a batch holds does not matter."""

    def is_set_up(self, loader: Any) -> bool:
        """Whether a loop over ``loader`` is none of a model."""

    def note_repeated(self, loader: Any) -> None:
        """Note that ``loader`` is a stream that repeats itself, so that nothing but a cut ends its loop."""


class Makes(Protocol):
    """Makes batches of samples."""

    def make(self, collate: Callable[[Any], Any], samples: Sequence[Any], own: Callable[[], Sequence[Any]]) -> Any:
        """Return what ``collate`` makes of ``samples``. If it may change them, it gets those that ``own()`` returns."""


class FewSamples:
    """Lets iterators over loaders read few samples.

    Args:
        loops: know where a loop stands.
        batches: make batches of samples.
        note_held: called with the bytes of samples that a trial holds beside a batch, and a dry run does not.
        budget: how much is read of each data set.
    """

    def __init__(self, loops: Loops, batches: Makes, note_held: Callable[[int], object], budget: Budget | None = None) -> None:
        self._loops = loops
        self._batches = batches
        self._note_held = note_held
        self._budget = Budget() if budget is None else budget
        self._of: MutableMapping[Any, Samples] = WeakIdKeyDictionary()
        """By the data set itself, for a tensor is a data set and equals none; or by the loader of one that cannot be referred to
        weakly, such as a list."""

    @property
    def replays(self) -> bool:
        """Whether loops are only counted."""
        return self._loops.is_replayed

    def follow(self, loader: Any, iterator: Any) -> None:
        """Let an ``iterator`` over ``loader``, which reads in this process, make its batches of few samples."""
        fetcher = iterator._dataset_fetcher
        if fetcher.auto_collation:  # else the data set makes the batches, of which the last may be smaller
            kind = _OneAfterTheOther if hasattr(fetcher, "dataset_iter") else _ByNumber
            iterator._dataset_fetcher = kind(self, loader, fetcher)

    def samples_of(self, loader: Any) -> Samples:
        """Return what was read of the data set of ``loader``."""
        try:
            return self._of.setdefault(loader.dataset, Samples(self._budget))
        except TypeError:
            return self._of.setdefault(loader, Samples(self._budget))

    def must_read_all(self, loader: Any, samples: Samples) -> bool:
        """Whether nothing may be given again: the loop is none of a model, or a sampler groups samples that differ."""
        has_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        return self._loops.is_set_up(loader) or (samples.differ and not has_size)

    def batch_of(self, fetcher: Any, samples: Samples, found: Sequence[Any], repeated: Collection[int]) -> Any:
        """Return a batch of the samples in ``found``. Those in the places ``repeated`` are given again."""

        def own() -> Sequence[Any]:
            return [copied(sample) if at in repeated else sample for at, sample in enumerate(found)]

        batch = self._batches.make(fetcher.collate_fn, found, own)
        self._note_held(len(repeated) * samples.sample_bytes)
        return batch

    def note_repeated(self, loader: Any) -> None:
        """Note that the stream of ``loader`` repeats itself."""
        self._loops.note_repeated(loader)


class _Fetcher:
    """Stands in the place of PyTorch's ``fetcher`` of an iterator over ``loader``."""

    def __init__(self, few: FewSamples, loader: Any, fetcher: Any) -> None:
        self._few = few
        self._loader = loader
        self._fetcher = fetcher
        self._samples = few.samples_of(loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetcher, name)


class _ByNumber(_Fetcher):
    """Reads a data set by the numbers of its samples."""

    def __init__(self, few: FewSamples, loader: Any, fetcher: Any) -> None:
        super().__init__(few, loader, fetcher)
        self._is_first = True
        """Whether no batch of this pass was made."""

    def fetch(self, indices: Any) -> Any:
        """Return the batch of the samples at ``indices``."""
        if not isinstance(indices, (list, tuple)):
            return self._fetcher.fetch(indices)
        key = id(self._fetcher.collate_fn), len(indices)
        is_given_again = self._few.replays or not self._samples.must_read()
        if self._is_first and is_given_again and not _many_at_once(self._fetcher.dataset):
            self._samples.look_again(functools.partial(self._read_one, indices[0]))
        self._is_first = False
        if not self._few.replays:
            return self._made(indices)
        batch = self._samples.batch_again(key)
        if batch is None:
            batch = self._made(indices)
            self._samples.note_batch(key, batch)
        return batch

    def _made(self, indices: Sequence[Any]) -> Any:
        if _many_at_once(self._fetcher.dataset):
            return self._fetch_at_once(indices)
        reads_all = self._few.must_read_all(self._loader, self._samples)
        found: list[Any] = []
        repeated: set[int] = set()
        for at, index in enumerate(indices):
            if reads_all or self._samples.must_read():
                found += self._samples.read(functools.partial(self._read_one, index))
                reads_all = reads_all or (self._samples.differ and self._few.must_read_all(self._loader, self._samples))
            else:
                found.append(self._samples.again(index if isinstance(index, int) else at))
                repeated.add(at)
        return self._few.batch_of(self._fetcher, self._samples, found, repeated)

    def _read_one(self, index: Any) -> Sequence[Any]:
        return [self._fetcher.dataset[index]]

    def _fetch_at_once(self, indices: Sequence[Any]) -> Any:
        """Make a batch of samples that the data set gives together, and may have padded together."""
        samples = self._samples
        number = len(indices)
        reads_all = self._few.must_read_all(self._loader, samples)
        found: Sequence[Any] = ()
        if not reads_all and not samples.has_any:  # the first show how long they take
            found = self._read(indices[: samples.budget.most_samples])
        if len(found) < number and (reads_all or samples.must_read(number)):
            found = self._read(indices)
        if len(found) == number:
            return self._few.batch_of(self._fetcher, samples, found, ())
        again = [samples.again(at) for at in range(number)]
        return self._few.batch_of(self._fetcher, samples, again, range(number))

    def _read(self, indices: Sequence[Any]) -> Sequence[Any]:
        return self._samples.read(lambda: self._fetcher.dataset.__getitems__([*indices]))


class _OneAfterTheOther(_Fetcher):
    """Reads a stream."""

    def __init__(self, few: FewSamples, loader: Any, fetcher: Any) -> None:
        super().__init__(few, loader, fetcher)
        self._num_given = 0
        self._num_repeated = 0
        """Batches that have samples given again."""

    def fetch(self, indices: Sequence[Any]) -> Any:
        """Return the batch of as many samples as ``indices`` has."""
        fetcher = self._fetcher
        samples = self._samples
        if fetcher.ended:
            raise StopIteration
        reads_all = self._num_repeated >= samples.budget.most_repeated or self._few.must_read_all(self._loader, samples)
        found: list[Any] = []
        repeated: set[int] = set()
        for at in range(len(indices)):
            if reads_all or samples.must_read(is_stream=True):
                try:
                    found += samples.read(lambda: [next(fetcher.dataset_iter)])
                except StopIteration:
                    fetcher.ended = True
                    break
            elif self._num_given == self._length():
                fetcher.ended = True
                break
            else:
                found.append(samples.again(self._num_given))
                repeated.add(at)
            self._num_given += 1
        if not found or (fetcher.drop_last and len(found) < len(indices)):
            raise StopIteration
        if repeated:
            self._num_repeated += 1
            self._few.note_repeated(self._loader)
        return self._few.batch_of(fetcher, samples, found, repeated)

    def _length(self) -> int | None:
        try:
            return len(self._fetcher.dataset)
        except NO_LENGTH:
            return None


def _many_at_once(dataset: Any) -> bool:
    """Whether a data set gives many samples in one call. A subset of one that does not has the call all the same."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))
