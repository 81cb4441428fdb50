"""Loops that a dry run cuts short: what they would hold at their end that they do not hold yet.

An evaluation may keep its outputs on the device, and so may training. A generation keeps keys and values of each token. Notation:

    k, n       iterations that the dry run has seen, and that the trial makes
    appended   bytes that an iteration leaves behind for good, as `outputs.append(output)` does
    joined     bytes by which tensors grow that each iteration makes anew out of the last one's, as `torch.cat` does
    derived    bytes that are made out of both after the loop, as `torch.cat(outputs)` does

    missing = (n - k) (appended + sum joined) + max((n - k) max joined, (n / k - 1) derived)

Training is judged by one of its first steps. There, what the loop will have kept at its last step is alive already.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from perfguard.graph.libraries import Replace
from perfguard.graph.op import Life, Op, Phase
from perfguard.graph.recorder import live_bytes, tensors_in
from perfguard.graph.shape_rules import is_meta
from perfguard.pytorch import objects_of

ITERATIONS = 4
"""Enough to see what an iteration adds: the first may make what lasts, and whoever fetches ahead begins one later."""


@dataclass(slots=True, eq=False)
class CutLoop:
    """A loop of which the dry run has seen the first iterations."""

    begins_at: list[int] = field(default_factory=list)
    """Number of operators before each iteration, and before the first one that was not seen."""
    num_seen: int = 0
    num_missing: int = 0
    """Iterations that the trial makes beyond those."""
    is_used_after: bool = True
    """Whether what it keeps is read after it."""
    trains: bool = False
    """Whether it makes steps. Garbage is collected only after the first ones."""

    def missing(self, ops: Sequence[Op], lives: Sequence[Life], looked_until: int) -> list[Life]:
        """Return storages in the place of all that the loop would hold in its last iteration. Empty: it keeps nothing.

        The step of training that is judged ends before ``looked_until`` operators.
        """
        if len(self.begins_at) < 4 + self.trains or not (self.num_missing or self.trains):
            return []
        begins_at, ended = self.begins_at[-4:], self.begins_at[-1]
        if self.trains:
            begins_at = self.begins_at[1:-1]  # the first makes what lasts, the last may not have freed all
        starts = [bisect_left(lives, at, key=lambda life: life.birth) for at in begins_at]  # in the order of births
        born = [range(begin, until) for begin, until in itertools.pairwise(starts)]
        appended = [{index for index in made if not _dies_before(lives[index], ended - 1)} for made in born]
        joined: dict[int, int] = {}
        if not self.trains:
            joined, appended = _joined(ops[begins_at[1] : ended], lives, born, ended), appended[:2]
        kept = sum(joined.values()) + min(sum(lives[index].num_bytes for index in made) for made in appended)
        if not kept:
            return []
        holders = set().union(*appended, joined)
        derived, most = _derived(ops, ended, lives, holders) if self.is_used_after else (set(), 0)
        peak = max(self.num_missing * max(joined.values(), default=0), most * self.num_missing // self.num_seen)
        death = _last_death(holders | derived, lives)
        until = None if math.isinf(death) else max(int(death), ended)
        name, num_bytes = "what a loop keeps", self.num_missing * kept + peak
        if not self.trains:
            return [Life(num_bytes, None, begins_at[2], until, name, Phase.FORWARD)]
        at_last_step = max(0, self.num_seen + self.num_missing - 5) * kept  # what the first steps leave is there
        return [
            Life(at_last_step, None, self.begins_at[0], max(min(looked_until, ended) - 1, 0), name, Phase.FORWARD),
            Life(num_bytes, None, ended, until, name, Phase.FORWARD),
        ]


def room_in_buffers() -> float:
    """Return how many more tensors of the device fit into what is bounded, a `deque(maxlen=50)`. Infinity: nothing is."""
    bounded = (each for each in objects_of(collections.deque) if each.maxlen is not None and each)
    rooms = [each.maxlen - len(each) for each in bounded if any(map(is_meta, tensors_in(each[-1])))]
    return min(rooms, default=math.inf)


def _last_death(indices: Iterable[int], lives: Sequence[Life]) -> float:
    deaths = [lives[index].death for index in indices]
    return max((math.inf if death is None else death for death in deaths), default=-1)


def _dies_before(life: Life, at: int) -> bool:
    return life.death is not None and life.death < at


def _joined(ops: Sequence[Op], lives: Sequence[Life], born: Sequence[Collection[int]], end: int) -> dict[int, int]:
    """By how much each tensor has grown that the last iteration made of one that the iteration before had made so, too."""
    read: dict[int, set[int]] = {}
    for op in ops:
        inputs = set(op.inputs)
        if op.name == "cat":  # beam search puts the cache in the order of its beams before
            inputs.update(*(read.get(index, ()) for index in op.inputs))
        for index in op.outputs:
            read.setdefault(index, set()).update(inputs)

    def smaller(index: int, made: Collection[int]) -> list[int]:
        sources = (source for source in read.get(index, ()) if source in made and _dies_before(lives[source], end))
        return [source for source in sources if lives[source].num_bytes < lives[index].num_bytes]

    found = {}
    for index in born[2]:
        sources = [source for source in smaller(index, born[1]) if smaller(source, born[0])]
        if sources and not _dies_before(lives[index], end - 1):
            found[index] = lives[index].num_bytes - max(lives[source].num_bytes for source in sources)
    return found


def _derived(ops: Sequence[Op], begin: int, lives: Sequence[Life], holders: Collection[int]) -> tuple[set[int], int]:
    """What is computed from ``holders``, from operator ``begin`` to the next backward pass or update, and its peak in bytes."""
    found: set[int] = set()
    known, until = {*holders}, _last_death(holders, lives)
    for at in range(begin, len(ops)):
        if at > until or ops[at].phase is not Phase.FORWARD:
            break
        if not known.isdisjoint(ops[at].inputs):
            found.update(index for index in ops[at].outputs if lives[index].birth >= begin)
            known |= found
            until = max(until, _last_death(found, lives))
    return found, int(live_bytes((lives[index] for index in found), len(ops)).max(initial=0))


class Generations:
    """Lets `generate` of transformers end on the stage, where no value says that a sequence has ended: at its longest.

    After a few tokens, the loop is cut, and what it returns is made as long as it could become (transformers 4.50 to 5.24).

    Args:
        num_operators: counts the operators recorded so far.
    """

    def __init__(self, num_operators: Callable[[], int]) -> None:
        self._num_operators = num_operators
        self.loops: list[CutLoop] = []
        self._longest = 0
        """Tokens of the sequences that the loop makes, prompt included."""
        self._keeps_cache = True
        """Whether it keeps keys and values."""

    def follow(self, replace: Replace) -> None:
        """Replace what asks whether to go on, if it is imported. Call it again where it may be by now."""
        utils: Any = sys.modules.get("transformers.generation.utils")
        if utils is None or hasattr(utils.GenerationMixin._has_unfinished_sequences, "__wrapped__"):
            return
        replace(utils.GenerationMixin, "generate", self._generating)
        replace(utils.GenerationMixin, "_has_unfinished_sequences", self._going_on)
        replace(utils.StoppingCriteriaList, "__call__", self._counting_tokens)

    def are_cut(self, begin: int, end: int) -> bool:
        """Whether a loop that lacks tokens begins between two numbers of operators."""
        return any(loop.num_missing and begin <= loop.begins_at[0] < end for loop in self.loops if loop.begins_at)

    def _generating(self, own: Any) -> Any:
        @functools.wraps(own)
        def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
            self.loops.append(CutLoop(is_used_after=False))
            config = kwargs.get("generation_config") or model.generation_config
            self._keeps_cache = kwargs.get("use_cache", config.use_cache) is not False
            found = own(model, *args, **kwargs)
            ids = getattr(found, "sequences", found)
            if ids.is_meta and ids.shape[1] < self._longest:
                longest = ids.new_empty(ids.shape[0], self._longest)
                if ids is found:
                    return longest
                found.sequences = longest
            return found

        return generate

    def _going_on(self, own: Any) -> Any:
        @functools.wraps(own)
        def _has_unfinished_sequences(*_: Any, **__: Any) -> bool:
            loop = self.loops[-1]
            is_cut = self._keeps_cache and loop.num_seen >= ITERATIONS  # without, each token is a longer forward pass
            return not loop.num_seen or (loop.num_missing > 0 and not is_cut)

        return _has_unfinished_sequences

    def _counting_tokens(self, own: Any) -> Any:
        @functools.wraps(own)
        def __call__(criteria: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            loop = self.loops[-1]
            loop.begins_at.append(self._num_operators())
            loop.num_seen += 1
            self._longest = criteria.max_length or input_ids.shape[1]
            loop.num_missing = self._longest - input_ids.shape[1]
            return own(criteria, input_ids, *args, **kwargs)

        return __call__
