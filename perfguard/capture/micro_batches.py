"""MicroBatches: of a step that adds up the gradients of many batches, the first few and the last are recorded.

A micro-batch begins at the first forward pass with gradients after a backward pass, or after a step. Once two of a step were
alike, each further one with inputs of the same shapes is left out: a copy of the last is written into the recording
(:mod:`perfguard.graph.repetition`), and its forward pass returns what the last has returned, without a graph of the model.

    step        recorded                                                   because
    the first   until two are alike                                        the first one makes the gradients; none knows the last
    later ones  until two are alike, and the last                          what clips gradients runs after it, before the step

What is beside the models runs all the same. Two kinds of steps are recorded whole: one whose graphs outlive their micro-batches,
as with `retain_graph=True`, and one where later micro-batches make more beside their models than those that were recorded.

How many a step has is known from the one before. A later step that ends too early was not seen, so it must be recorded whole.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor

from perfguard.capture.replay import Key, Replay
from perfguard.graph.op import Phase
from perfguard.graph.recorder import Recorder, tensors_in
from perfguard.graph.repetition import Place, Repetition


class _MicroBatch(NamedTuple):
    """Where a micro-batch begins."""

    place: Place
    num_batches: int
    """Batches that models have read before."""
    key: Key | None
    """What its first forward pass depends on. None: nobody can tell, or nobody has asked yet."""


class MicroBatches:
    """Knows where the micro-batches of a step begin, and which are left out.

    Args:
        recorder: has the recording.
        replay: knows what forward passes return, and counts backward passes.
        batches: what models have read, one entry for each pass.
    """

    def __init__(self, recorder: Recorder, replay: Replay, batches: list[tuple[int, int]]) -> None:
        self._recorder = recorder
        self._replay = replay
        self._batches = batches
        self._read: list[tuple[int, int]] = []
        """What models have read in the micro-batch that is repeated."""
        self._begun: list[_MicroBatch] = []
        """Micro-batches of this step that were recorded in a row."""
        self._number: Counter[int] = Counter()
        """Micro-batches of this step, by the model that begins them."""
        self._number_before: dict[int, int] = {}
        """Of the latest step that had some."""
        self._repetition: Repetition | None = None
        self._first_made = 0
        """Of the storages that the forward pass which runs makes."""
        self._made: set[int] = set()
        """Storages that forward passes have made in the micro-batches that were recorded in a row."""
        self._returned: set[int] = set()
        """Those of them that the forward passes have returned."""
        self._num_bytes_beside = 0
        """What the micro-batch that is repeated makes beside its models."""
        self._num_backward = 0
        """Backward passes before the micro-batch that is left out."""
        self.key: Key | None = None
        """What the forward pass that runs next depends on."""
        self.are_left_out = False
        """Whether any was."""

    @property
    def are_many(self) -> bool:
        """Whether this step has more than one."""
        return len(self._begun) > 1

    def begin_forward(self, model: int, *, evaluates: bool) -> None:
        """Note that the model with this id begins to compute, and is recorded. It ``evaluates`` if it has no gradients."""
        place = self._recorder.place
        self._first_made = place.num_lives
        if evaluates or (self._begun and not self._has_backward(self._begun[-1].place)):
            return
        self._begun.append(_MicroBatch(place, len(self._batches), self.key))
        self._number[model] += 1

    def end_forward(self, output: Any) -> None:
        """Note what the model has returned."""
        self._made.update(range(self._first_made, self._recorder.place.num_lives))
        of_device = (tensor for tensor in tensors_in(output) if tensor.is_meta and not is_functorch_wrapped_tensor(tensor))
        self._returned.update(self._recorder.index_of(tensor) for tensor in of_device)

    def _has_backward(self, since: Place) -> bool:
        return any(op.phase is Phase.BACKWARD for op in self._recorder.ops[since.num_ops :])

    def is_within(self) -> bool:
        """Whether the forward pass that is asked for is a part of a micro-batch that is left out."""
        return self._replay.leaves_out and self._replay.num_backward == self._num_backward

    def may_leave_out(self, key: Key | None, model: nn.Module) -> bool:
        """Whether a micro-batch is known that begins with a forward pass of ``model`` with this ``key``."""
        if key is None or self._is_last(key[0]) or len(self._begun) < 2 or key != self._begun[-1].key:
            return False
        if self._repetition is not None:
            return True
        if not self._has_backward(self._begun[-1].place) or not self._replay.knows(key, model):
            return False
        start = self._begun[-2].place
        middle = self._begun[-1].place
        of_graph = {*range(start.num_lives, middle.num_lives)} & (self._made - self._returned)
        if not self._recorder.are_dead(of_graph):  # a graph that is kept, of which nothing would be there
            return False
        self._repetition = self._recorder.repetition(start, middle)
        if self._repetition is None:
            return False
        self._num_bytes_beside = self._repetition.num_bytes_beside(self._made)
        return True

    def _is_last(self, model: int) -> bool:
        return self._number[model] + 1 == self._number_before.get(model)

    def makes_more(self) -> bool:
        """Whether the micro-batch that was left out has made more beside its models than the one that stands for it."""
        return self._replay.leaves_out and self._recorder.num_bytes_in_pause > self._num_bytes_beside

    def leave_out(self) -> None:
        """Leave out the micro-batch that would begin now."""
        repetition = self._repetition
        latest = self._begun[-1]
        assert repetition is not None
        assert latest.key is not None
        if not self._replay.leaves_out:
            self._read = self._batches[latest.num_batches :]
        self._batches += self._read
        self._recorder.pause(repetition)
        self._number[latest.key[0]] += 1
        self._replay.leaves_out = self.are_left_out = True
        self._num_backward = self._replay.num_backward

    def output_of(self, key: Key | None, model: nn.Module) -> tuple[Any] | None:
        """Return what a forward pass of a ``model`` returns while a micro-batch is left out. None: it is not known."""
        found = self._replay.known_output(key, model)
        for tensor in tensors_in(found):
            self._recorder.index_of(tensor)  # the next micro-batch may read it, such as what a teacher says
        return found

    def go_on(self) -> None:
        """Record what runs from now on."""
        if self._replay.leaves_out:
            self._replay.leaves_out = False
            self._recorder.go_on()
        self._repetition = None
        self._begun.clear()
        self._made.clear()
        self._returned.clear()

    def end_step(self) -> bool:
        """Note that an optimizer steps. Return whether the last micro-batch was seen, of all but the first step."""
        was_seen = not (self._replay.leaves_out and self._number.keys() <= self._number_before.keys())
        self.go_on()
        self._number_before |= self._number
        self._number.clear()
        return was_seen
