"""Loops that a dry run cuts short: what they would hold at their end that they do not hold yet.

An evaluation may keep its outputs on the device, and so may training. A generation keeps keys and values of each token. Notation:

    k, n       iterations that the dry run has seen, and that the trial makes
    appended   bytes that an iteration leaves behind for good, as `outputs.append(output)` does
    joined     bytes by which tensors grow that each iteration makes anew out of the last one's, as `torch.cat` does
    derived    bytes that are made out of both after the loop, as `torch.cat(outputs)` does

    missing = (n - k) (appended + sum joined) + max((n - k) max joined, (n / k - 1) derived)

Training is judged by one of its first steps. There, what the loop will have kept at its last step is alive already. That is told
from the first steps alone, so it does not depend on how many were seen. A buffer holds no more than its bound (`buffers.py`).
"""

from __future__ import annotations

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
from perfguard.graph.recorder import live_bytes

ITERATIONS = 4
"""Enough to see what an iteration adds: the first may make what lasts, and whoever fetches ahead begins one later."""
_NAME = "what a loop keeps"


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
    most_held: float = math.inf
    """The most tensors that what it fills can hold."""
    trains: bool = False
    """Whether it makes steps. Garbage is collected only after the first ones."""

    def missing(self, ops: Sequence[Op], lives: Sequence[Life], looked_until: int) -> list[Life]:
        """Return storages in the place of all that the loop would hold in its last iteration. Empty: it keeps nothing.

        The step of training that is judged ends before ``looked_until`` operators.
        """
        if self.trains:
            return self._missing_of_training(lives, looked_until)
        if len(self.begins_at) < 4 or not self.num_missing:
            return []
        begins_at = self.begins_at[-4:]
        ended = self.begins_at[-1]
        born = _born(lives, begins_at)
        appended = [_kept_until(ended, made, lives) for made in born][:2]
        joined = _joined(ops[begins_at[1] : ended], lives, born, ended)
        kept = sum(joined.values()) + min(sum(lives[index].num_bytes for index in made) for made in appended)
        if not kept:
            return []
        holders = set().union(*appended, joined)
        derived, most = _derived(ops, ended, lives, holders) if self.is_used_after else (set(), 0)
        peak = max(self.num_missing * max(joined.values(), default=0), most * self.num_missing // self.num_seen)
        death = _last_death(holders | derived, lives)
        until = None if math.isinf(death) else max(int(death), ended)
        return [Life(self.num_missing * kept + peak, None, begins_at[2], until, _NAME, Phase.FORWARD)]

    def _missing_of_training(self, lives: Sequence[Life], looked_until: int) -> list[Life]:
        ended = self.begins_at[-1]
        of_first = [at for at in self.begins_at if at <= looked_until]
        if len(of_first) < 5:
            return []
        looked = of_first[-1]
        born = _born(lives, of_first[1:-1])  # the first makes what lasts, the last may not have freed all
        appended = [_kept_until(looked, made, lives) for made in born]
        kept = min(sum(lives[index].num_bytes for index in made) for made in appended)
        if not kept:
            return []
        of_all = [_kept_until(ended, made, lives) for made in _born(lives, self.begins_at)]
        held = sum(bool(made) for made in of_all)
        is_full = not all(of_all[1:-1])  # a later iteration has left nothing behind for good
        most = min(self.most_held, held + 1 if is_full else self.num_seen + self.num_missing)
        at_end = int(max(0, min(most, self.most_held - 1) - held)) * kept  # no step has made another by then
        at_last_step = int(max(0, most - (len(of_first) - 1))) * kept  # what the first steps leave is there
        if not (at_end or at_last_step):
            return []
        death = _last_death(set().union(*of_all), lives)
        until = None if math.isinf(death) else max(int(death), ended)
        return [
            Life(at_last_step, None, self.begins_at[0], max(min(looked_until, ended) - 1, 0), _NAME, Phase.FORWARD),
            Life(at_end, None, ended, until, _NAME, Phase.FORWARD),
        ]


def _born(lives: Sequence[Life], begins_at: Sequence[int]) -> list[range]:
    """Return the indices of the storages that are made in each iteration."""
    starts = [bisect_left(lives, at, key=lambda life: life.birth) for at in begins_at]  # in the order of births
    return [range(begin, until) for begin, until in itertools.pairwise(starts)]


def _kept_until(at: int, made: Iterable[int], lives: Sequence[Life]) -> set[int]:
    return {index for index in made if not _dies_before(lives[index], at - 1)}


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
    known = {*holders}
    until = _last_death(holders, lives)
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
