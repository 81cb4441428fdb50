"""Loaders: which DataLoader feeds the steps of a dry run, how many steps that makes, and which batches show nothing new."""

from __future__ import annotations

import dis
import gc
import inspect
import itertools
import math
import random
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import dataloader

from perfguard.capture import stage
from perfguard.capture.buffers import most_held
from perfguard.capture.fastai_learner import begun_anew
from perfguard.capture.few_samples import ReadOnce
from perfguard.capture.host import NO_LENGTH
from perfguard.capture.loops import ITERATIONS, CutLoop
from perfguard.capture.stage import LoaderEvent
from perfguard.capture.stopwatch import Stopwatch
from perfguard.pytorch import objects_of

_FILES = (Path(__file__), Path(stage.__file__), Path(dataloader.__file__))


@dataclass(slots=True, eq=False)
class _Pass:
    """One pass over a loader."""

    begins_at: int = 0
    """Number of operators before it."""
    num_batches: int = 0
    num_used: int = 0
    """Batches that the steps so far have used."""
    feeds: bool = False
    """Whether a step was made with its batches."""
    evaluates: bool = False
    """Whether a model has read its batches without gradients."""
    has_ended: bool = False
    is_for: bool = False
    """Whether a `for` asks for its batches, so that its end ends the loop, be it beside others in a `zip`."""
    repeats: bool = False
    """Whether it is one over a stream that repeats itself, so it has no end of its own."""
    iterator: weakref.ref[Any] | None = None
    """What gives its batches. None: it is not known."""
    loop: CutLoop = field(default_factory=CutLoop)

    @property
    def is_left(self) -> bool:
        """Whether nothing can ask for its next batch: it was a look at the data, as `next(iter(loader))`."""
        return self.iterator is not None and self.iterator() is None


@dataclass(slots=True)
class _Longest:
    """The longest batches of the loader that feeds the steps."""

    name: str = ""
    num_steps: int = 0
    """Steps that are made of them."""
    left: list[Any] | None = None
    """Those that are still to be given. None: they were not looked for yet."""


class Allowance:
    """Time to spend on work: some ``seconds`` of the processor, or three times as many on the wall.

    A busy machine takes longer for the same work, and a slow disk waits without any.
    """

    def __init__(self, seconds: float) -> None:
        self._work_ends_at = time.process_time() + seconds
        self._wait_ends_at = time.monotonic() + 3 * seconds

    @property
    def is_spent(self) -> bool:
        """Whether it has run out."""
        return time.process_time() > self._work_ends_at or time.monotonic() > self._wait_ends_at


class Loaders:
    """Follows the loaders of an objective, and cuts them short: an epoch is a pass over a loader that feeds steps.

    Args:
        num_operators: counts the operators recorded so far.
        stopwatch: counts the time in which batches are made.
        seconds_spared: for how many seconds of work batches that show nothing new are given all the same, before the first step
            and after the third: an epoch may end before its loader does, and a metric may ask for as many outputs as there are
            labels.
    """

    def __init__(self, num_operators: Callable[[], int], stopwatch: Stopwatch, *, seconds_spared: float) -> None:
        self._num_operators = num_operators
        self.stopwatch = stopwatch
        self._seconds_spared = seconds_spared
        self._allowance: Allowance | None = None
        """None: that has not begun."""
        self.must_spare = False
        """Whether nothing may be cut yet: an optimizer that was made has not stepped."""
        self.is_replayed = False
        """Whether the loops are only counted."""
        self._passes: weakref.WeakKeyDictionary[Any, _Pass] = weakref.WeakKeyDictionary()
        """The latest pass over each loader. The id of one that is gone may be that of the next."""
        self._giving: list[Any] = []
        """Loaders that have given a batch since the last step, and have not ended."""
        self._trainer: Any = None
        """The loader that feeds the steps."""
        self._beside: set[Any] = set()
        """Loaders that have given a batch in each step of the first epoch, as that one has."""
        self._used: list[int] = []
        """Batches that each step has used."""
        self._num_steps = 0
        self._stated_steps: list[tuple[Any, float]] = []
        """Steps of the trainers that state them. Infinite: one may stop at any step."""
        self._lengths: list[int | None] = []
        """Batches of the loader of each epoch. None: it does not say."""
        self._num_unfed = 0
        """Steps since a loader has given a batch."""
        self._feeding = _Pass()
        """The pass that has fed the latest step."""
        self._are_mixed = False
        """Whether different loaders have fed steps."""
        self._counts_steps = False
        """Whether the objective ends after a number of steps, and begins its loader again as often as it must."""
        self._evaluates = False
        """Whether the latest forward pass had no gradients."""
        self._was_cut = False
        """Whether the first epoch was cut short."""
        self._has_just_cut = False
        """Whether the latest that happened to any loader is that it was cut short."""
        self._steps_of_first: int | None = None
        """Steps of the first epoch, if it came to its own end."""
        self.first_ended_at: int | None = None
        """Number of operators where the second epoch begins. None: there is none."""
        self._longest = _Longest()
        self.loops: list[CutLoop] = []
        """Evaluations that were cut short, and the first epoch."""
        self.make_batch: Callable[[Callable[[Any], Any], Sequence[Any]], Any] = lambda collate, samples: collate(samples)
        """``make_batch(collate, samples)`` returns a batch."""
        self.on_asked: Callable[[], object] = lambda: None
        """Called as a loader is asked for a batch."""
        self.on_begun: Callable[[], object] = lambda: None
        """Called as a pass over a loader begins."""

    @property
    def may_spare(self) -> bool:
        """Whether there is time for what shows nothing new."""
        return self._allowance is None or not self._allowance.is_spent

    @property
    def spares(self) -> bool:
        """Whether batches that show nothing new are given for a while."""
        return self._seconds_spared > 0

    @property
    def longest(self) -> str:
        """Name of the longest batches, of which steps are made after the third. Empty: all are alike, as far as one can see."""
        return self._longest.name

    @property
    def _num_epochs(self) -> int:
        return len(self._lengths)

    @property
    def feed_steps(self) -> bool:
        """Whether the batches of the steps come from a loader."""
        return self._trainer is not None

    def join(self, begun: Mapping[Any, int]) -> None:
        """Follow the passes over loaders in the middle. They go on with batches that this process reads itself.

        ``begun`` holds the :func:`batches_given` when the trial began. Those that have given more feed the first step.
        """
        gc.collect()  # an iterator that is gone feeds nothing
        loaders = objects_of(dataloader.DataLoader)
        feeding = []
        ended = []
        for iterator, number in batches_given().items():
            loader = next((each for each in loaders if each._index_sampler is iterator._index_sampler), None)
            if loader is None and iterator._auto_collation:  # `for batch in DataLoader(...)` keeps the iterator alone
                loader = _loader_of(iterator)
            own: Any = begun_anew(iterator) if loader is None else dataloader.DataLoader.__iter__(loader)  # without workers
            if own is None:
                continue
            loader = own._loader
            with _disable_current_modes(), suppress(StopIteration):
                for _ in range(number):
                    own._next_data() if own._dataset_kind == dataloader._DatasetKind.Iterable else next(own._sampler_iter)
            iterator.__class__ = type(own)
            iterator.__dict__ = vars(own)
            self._passes[loader] = _Pass(num_batches=number)
            if number != begun.get(iterator, 0):
                with suppress(*NO_LENGTH):
                    if number >= len(loader):
                        ended.append(loader)
                        continue
                feeding.append(loader)
        self._giving = feeding or ended

    def load(self, loader: Any, event: LoaderEvent) -> Any:
        """Follow a loader that begins, is asked for a batch, has given it, or has ended.

        Returns:
            A batch in the place of the loader's own. None: it gives its own.

        Raises:
            StopIteration: if its next batches show nothing new.
        """
        if event == "begins":
            self.on_begun()
            before = self._passes.get(loader)
            self._counts_steps |= before is not None and before.feeds and _gives_without_end()
            self._passes[loader] = _Pass(self._num_operators())
            self._giving = [other for other in self._giving if not _are_alike(other, loader)]  # its pass was left by a `break`
            self._evaluates = False
        latest = self._passes.setdefault(loader, _Pass())
        ends_too = event == "asked" and self._has_just_cut and any(_are_alike(loader, other) for other in self._beside)
        self._has_just_cut = False
        if event == "asked":
            self.on_asked()
            latest.loop.begins_at.append(self._num_operators())
            latest.is_for = latest.is_for if latest.num_batches else _is_asked_by_for()
        if event == "gave":
            latest.num_batches += 1
            if loader not in self._giving:
                self._giving.append(loader)
        elif event == "asked" and latest.feeds and self._num_epochs == 1 and (batch := self._longest_batch(loader)) is not None:
            return batch
        elif event != "asked" or ends_too or (self._shows_nothing_new(latest) and not _fails_at_end()):
            latest.has_ended = event != "begins"
            self._giving = [other for other in self._giving if other is not loader]
            if event == "asked" or (event == "ended" and latest.feeds):
                self._note_loop(loader, latest)
            if event == "asked":
                self._has_just_cut = True  # `zip(..., strict=True)` asks the others whether they end, too
                raise StopIteration
        return None

    def begin(self, loader: Any, iterator: Any) -> None:
        """Note the ``iterator`` of a pass over ``loader`` that has begun."""
        self._passes[loader].iterator = weakref.ref(iterator)

    def is_set_up(self, loader: Any) -> bool:
        """Whether a loop over ``loader`` is none of a model: it has two batches, and no model has computed yet."""
        return self._allowance is None and self._passes[loader].num_batches >= 2

    def note_repeated(self, loader: Any) -> None:
        """Note that ``loader`` is a stream that repeats itself, so that nothing but a cut ends its loop."""
        self._passes[loader].repeats = True

    def _note_loop(self, loader: Any, latest: _Pass) -> None:
        loop = latest.loop
        loop.trains = latest.feeds
        with suppress(*NO_LENGTH):
            loop.num_seen = latest.num_batches
            loop.num_missing = max(0, len(loader) - latest.num_batches)
            if not loop.trains or self._num_epochs == 1:
                loop.most_held = most_held() if loop.trains else math.inf
                self.loops.append(loop)

    def _longest_batch(self, loader: Any) -> Any:
        if self._longest.left is None and len(self._used) >= 3 and not self.must_spare:
            with self.stopwatch.within("batches"):
                name, batches = longest_batches(loader, self.make_batch)
            left = [batch for batch in batches for _ in range(self._batches_per_step)]
            self._longest = _Longest(name, len(batches), left)
        return self._longest.left.pop() if self._longest.left else None

    def _shows_nothing_new(self, latest: _Pass) -> bool:
        if self.must_spare:
            return False
        if not latest.feeds:
            enough = ITERATIONS if self._num_epochs < 2 else 2
            return self._evaluates and latest.num_batches >= enough and not self.may_spare
        if len(self._used) < 4:
            return False
        if self._num_epochs > 1:
            return latest.num_batches >= self._batches_per_step
        self._was_cut |= latest.repeats or not self.may_spare
        return self._was_cut

    def begin_forward(self, *, is_first: bool, evaluates: bool) -> None:
        """Note a forward pass of a model. What was given since the last step feeds an evaluation, if it has no gradients."""
        if is_first:
            self._allowance = Allowance(self._seconds_spared)
        self._evaluates = evaluates
        if evaluates:
            for loader in self._giving:
                self._passes[loader].evaluates = True

    @property
    def evaluated_data(self) -> tuple[tuple[str, int | None], ...]:
        """Kind and length of the data of the loaders that have given a batch since the last step."""
        return tuple((type(loader.dataset).__name__, _length_of(loader)) for loader in self._giving)

    def begin_anew(self) -> None:
        """Forget the steps so far: another optimizer belongs to a step."""
        self._used = []
        for latest in self._passes.values():
            latest.num_used = 0

    def state_steps(self, trainer: Any, number: float | None) -> None:
        """Note how many steps ``trainer`` will make. None: it may stop early."""
        if all(one is not trainer for one, _ in self._stated_steps):
            self._stated_steps.append((trainer, math.inf if number is None else number))

    @property
    def may_stop_early(self) -> bool:
        """Whether somebody makes steps who may stop at any, or makes some that nothing shows."""
        return any(math.isinf(number) for _, number in self._stated_steps)

    def end_step(self, num_steps: int) -> None:
        """Note a step, with the number of steps so far. Of several loaders, the one asked first feeds it: that of the loop. One
        whose iterator is gone was looked at, and feeds none.

        Where that one has ended and the steps go on with another that was beside it, the loop is the other's: `zip(cycle(a), b)`.
        """
        self._num_steps = num_steps
        passes = self._passes
        trainer = self._trainer

        def rank(loader: Any) -> tuple[bool, ...]:
            latest = passes[loader]
            is_made_anew = trainer is not None and _are_alike(loader, trainer)
            return loader is not trainer, not is_made_anew, not latest.feeds, latest.evaluates, latest.is_left

        likely = sorted(self._giving, key=rank)
        if likely and likely[0] in self._beside and passes[trainer].has_ended:
            self._trainer = likely[0]
            passes[likely[0]].feeds = True
        loader = likely[0] if likely else trainer
        self._giving.clear()
        self._num_unfed = 0 if likely else self._num_unfed + 1
        self._trainer = loader if self._trainer is None else self._trainer
        latest = _Pass() if loader is None else passes[loader]
        self._used.append(latest.num_batches - latest.num_used)
        for each in (*likely, *([] if loader is None else [loader])):
            passes[each].num_used = passes[each].num_batches
        # itertools.cycle keeps what it was given. So do those who fetch ahead, for a few steps.
        self._counts_steps |= loader is not None and self._num_unfed > 5 and 0 not in self._used[:3]
        self._feeding = latest
        self._are_mixed |= loader is not None and not _are_alike(loader, self._trainer)
        if loader is not None and not latest.feeds:
            latest.feeds = True
            if self._num_epochs == 1:
                self.first_ended_at = latest.begins_at
                self._end_first_epoch(num_steps - 1)
            self._lengths.append(_length_of(loader))
        if self._num_epochs < 2 and likely:  # loaders may be made anew for the next; the second optimizer of a step is given none
            self._beside = self._beside.intersection(likely[1:]) if len(self._used) > 1 else {*likely[1:]}
        if len(self._used) == 2 or (len(self._used) == 3 and self.may_spare):  # a third step that takes all of it is enough
            self._allowance = Allowance(self._seconds_spared)

    def _end_first_epoch(self, num_steps: int) -> None:
        most = self._steps_of_all_batches()
        is_longer = most is None or num_steps > most  # a trainer that counts makes no step more
        self._steps_of_first = None if self._was_cut else max(0, num_steps - is_longer * self._longest.num_steps)

    @property
    def _batches_per_step(self) -> int:
        return max(1, statistics.median_high(self._used[:3]))  # the first or the last step of an epoch may be another

    @property
    def samples_per_step(self) -> int | None:
        """Samples of the batches that a step uses. None: they do not come from one loader, or it does not say."""
        if self._trainer is None or self._are_mixed or 0 in self._used[:3]:
            return None
        size = samples_in_batch(self._trainer)
        return None if size is None else size * self._batches_per_step

    def steps(self, *, is_over: bool, are_counted: bool = False) -> tuple[int | None, int | None]:
        """Return the steps of an epoch and of the trial. None: they are not known.

        Args:
            is_over: whether the objective came to its end.
            are_counted: whether epochs end when the objective has counted enough steps. It has counted those of the dry run.
        """
        if is_over and self._num_epochs == 1:
            self._end_first_epoch(self._num_steps)
        per_epoch = self._steps_per_epoch()
        if self._stated_steps:
            stated = sum(number for _, number in self._stated_steps)
            return per_epoch, None if math.isinf(stated) else max(int(stated), self._num_steps)
        if not is_over:
            return per_epoch, None
        left = not self._feeding.has_ended  # by `break` or `return`, so whoever counted has counted the steps of the dry run
        if self._num_steps < 3 or self._trainer is None or self._counts_steps or left:
            return per_epoch, self._num_steps
        if self._are_mixed:
            return None, None
        if per_epoch is None:
            return None, None
        if are_counted:
            return per_epoch, per_epoch * math.ceil(self._num_steps / per_epoch)
        return per_epoch, per_epoch * self._num_epochs + self._steps_beyond_first(per_epoch)

    def _steps_beyond_first(self, per_epoch: int) -> int:
        """Steps that later epochs make more than the first, whose loaders are longer: the data grow, or a fold is smaller."""
        steps = [math.ceil((number or 0) / self._batches_per_step) for number in self._lengths]
        if 0 in steps or steps[0] != per_epoch:  # one does not say, or something else than its loader ends an epoch
            return 0
        return sum(steps) - per_epoch * len(steps)

    def _steps_per_epoch(self) -> int | None:
        if self._trainer is None:
            return None
        if 0 in self._used[:3]:
            return self._steps_of_few_batches()
        if self._steps_of_first and not self._counts_steps:
            return self._steps_of_first
        return self._steps_of_whole()

    def _steps_of_few_batches(self) -> int | None:
        """Steps of an epoch whose every batch feeds as many, as those of several tasks. None: they do not, as far as was seen."""
        fed = [at for at, number in enumerate(self._used) if number]
        of_a_batch = {later - earlier for earlier, later in itertools.pairwise(fed)}
        are_alike = fed[:1] == [0] and len(fed) > 2 and len(of_a_batch) == 1 and {self._used[at] for at in fed} == {1}
        batches = self._steps_of_whole() if are_alike else None
        return None if batches is None else of_a_batch.pop() * batches

    def _steps_of_whole(self) -> int | None:
        """Steps of an epoch to the end of the loader. None: it streams, or another in a `zip` with it may end before."""
        with suppress(*NO_LENGTH):
            if any(len(other) < len(self._trainer) for other in self._beside if self._passes[other].is_for):
                return None
        return self._steps_of_all_batches()

    def _steps_of_all_batches(self) -> int | None:
        try:
            return max(1, math.ceil(len(self._trainer) / self._batches_per_step))
        except NO_LENGTH:
            return None


def _loader_of(iterator: Any) -> Any:
    """A loader that makes what the loader of ``iterator`` made, which is gone."""
    sampler = iterator._index_sampler
    data = iterator._dataset
    if iterator._dataset_kind == dataloader._DatasetKind.Iterable:
        return dataloader.DataLoader(data, sampler.batch_size, collate_fn=iterator._collate_fn, drop_last=sampler.drop_last)
    loader = dataloader.DataLoader(data, batch_sampler=sampler, collate_fn=iterator._collate_fn)
    vars(loader)["batch_size"] = getattr(sampler, "batch_size", None)
    return loader


def batches_given() -> Mapping[Any, int]:
    """Return the iterators over loaders of this process, with the number of batches that each has given."""
    return weakref.WeakKeyDictionary({each: each._num_yielded for each in objects_of(dataloader._BaseDataLoaderIter)})


def samples_in_batch(loader: Any) -> int | None:
    """Return the number of samples in a batch of ``loader``. None: it does not say."""
    return loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)


def longest_batches(
    loader: Any,
    make_batch: Callable[[Callable[[Any], Any], Sequence[Any]], Any],
    *,
    most_samples: int = 1000,
    most_seconds: float = 2.0,
) -> tuple[str, list[Any]]:
    """Return the longest batches that ``loader`` can make, with their name. ("", []): all samples are alike, or cannot be seen.

    The collate function gets the largest of ``most_samples`` samples, evenly spread over the data set and looked at in a random
    order after both ends: a data set may be sorted, and be slow. If it does not pad, their lengths add up, and the largest
    hardly ever meet. Then it gets the largest of as many random batches as three epochs have.
    Where a sampler makes batches of different numbers of samples, these are looked through.
    """
    size = samples_in_batch(loader)
    data = loader.dataset
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        return "", []
    ends_at = time.monotonic() + most_seconds
    number = min(len(data), most_samples)
    sizes: dict[int, int] = {}
    read = ReadOnce(data)
    with _disable_current_modes():
        if size is None:
            return _longest_of_sampler(loader, most_samples, ends_at)
        spread = range(0, len(data), max(1, len(data) // number))
        in_turn = random.Random(0).sample(spread, len(spread))
        for index in dict.fromkeys([*spread[:1], *spread[-1:], *in_turn]):  # one that is sorted has its longest at an end
            sizes[index] = _size_of(read[index])
            if time.monotonic() > ends_at or (len(sizes) == 16 and len(set(sizes.values())) == 1):
                break
        if len(set(sizes.values())) < 2:
            return "", []
        largest = sorted(sorted(sizes), key=lambda index: sizes[index], reverse=True)
        chosen = [*itertools.islice(itertools.cycle(largest), size)]
        mixed, equal = (_size_of(loader.collate_fn([read[largest[0]], read[other]])) for other in (largest[-1], largest[0]))
        if mixed < equal:
            draw = random.Random(0)
            number = min(10_000, 3 * max(1, len(data) // size))
            drawn = (draw.choices(largest, k=size) for _ in range(number))
            chosen = max(drawn, key=lambda batch: sum(sizes[index] for index in batch))
        return f"the longest batch of {len(sizes)} samples", [make_batch(loader.collate_fn, [read[index] for index in chosen])]


def _longest_of_sampler(loader: Any, most: int, ends_at: float) -> tuple[str, list[Any]]:
    """:func:`longest_batches` among ``most`` batches of the loader's own sampler, evenly spread over an epoch.

    One has the most numbers when padded. One has the most numbers times the length, as attention that is written out.
    """
    data = loader.dataset
    batches = [*itertools.islice(() if loader.batch_sampler is None else loader.batch_sampler, 10_000)]
    spread = batches[:: max(1, len(batches) // 16)]
    sizes = {_size_of(data[index]) for indices in spread[:16] for index in indices[:1]}
    are_alike = len(spread) >= 16 and len(sizes) == 1
    found: list[tuple[int, int, Any]] = []
    for indices in batches[:: max(1, len(batches) // most)]:
        longest = max(sizes if are_alike else (_size_of(data[index]) for index in indices))
        found.append((len(indices) * longest, longest, indices))
        if time.monotonic() > ends_at:
            break
    if len({(numbers, longest) for numbers, longest, _ in found}) < 2:
        return "", []
    largest = [max(found, key=lambda each: each[0])[-1], max(found, key=lambda each: each[0] * each[1])[-1]]
    chosen = largest[:1] if largest[0] is largest[1] else largest
    return f"the longest of {len(found)} batches", [loader.collate_fn([data[index] for index in indices]) for indices in chosen]


def _size_of(sample: Any) -> int:
    """How much there is in a sample: numbers, letters, tokens."""
    if isinstance(sample, Mapping):
        return sum(map(_size_of, sample.values()))
    if hasattr(sample, "shape"):
        return math.prod(sample.shape)
    if isinstance(sample, str):
        return len(sample)
    return sum(map(_size_of, sample)) if isinstance(sample, (tuple, list)) else 1


def _length_of(loader: Any) -> int | None:
    try:
        return len(loader)
    except NO_LENGTH:
        return None


def _are_alike(one: Any, other: Any) -> bool:
    """Whether one loader is the other, made anew for another epoch or fold."""
    if type(one.dataset) is not type(other.dataset) or one.batch_size != other.batch_size:
        return False
    with suppress(*NO_LENGTH):
        fewer, more = sorted((len(one.dataset), len(other.dataset)))
        return more <= 1.5 * fewer
    return True


def _asking_frame() -> Any:
    """The frame that has asked a loader for something."""
    frame: Any = sys._getframe(1)
    while frame is not None and Path(frame.f_code.co_filename) in _FILES:
        frame = frame.f_back
    return frame


def _is_asked_by_for() -> bool:
    """Whether the head of a loop asks for a batch, and no call of `next`."""
    frame = _asking_frame()
    return frame is not None and dis.opname[frame.f_code.co_code[frame.f_lasti]] == "FOR_ITER"


def _fails_at_end() -> bool:
    """Whether a batch is asked for by the user's own `next(iterator)`, and nothing up to the objective catches the end."""
    frame = _asking_frame()
    while frame is not None and frame.f_code.co_name == "__next__":
        frame = frame.f_back
    if frame is None or "next" not in frame.f_code.co_names or sys.version_info < (3, 11):
        return False
    operator, argument = frame.f_code.co_code[frame.f_lasti : frame.f_lasti + 2]
    has_default = dis.opname[operator].startswith("CALL") and argument == 2
    if has_default or dis.opname[operator] == "FOR_ITER" or "site-packages" in frame.f_code.co_filename:
        return False
    while frame is not None and Path(frame.f_code.co_filename).parent != Path(__file__).parent:
        tried: Any = dis.Bytecode(frame.f_code)
        if any(entry.start <= frame.f_lasti < entry.end for entry in tried.exception_entries):
            return False
        frame = frame.f_back
    return True


def _gives_without_end() -> bool:
    """Whether a loader begins again because it ended, in `except StopIteration`, or in a loop of a generator."""
    if isinstance(sys.exc_info()[1], StopIteration):
        return True
    frame = _asking_frame()
    if frame is None or not frame.f_code.co_flags & inspect.CO_GENERATOR:
        return False
    jumps = (item for item in dis.get_instructions(frame.f_code) if item.opname.startswith("JUMP_BACKWARD"))
    return any(jump.argval <= frame.f_lasti < jump.offset for jump in jumps)
