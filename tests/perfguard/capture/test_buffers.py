"""What a loop fills and empties holds no more than its bound, however many of its rounds a dry run has seen."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from perfguard.capture.trial import capture
from perfguard.devices import resolve_device
from perfguard.workload import CapturedTrial

A100 = resolve_device("a100")
KEPT_BYTES = 32 * 5000 * 4
LIMIT = 12


def _batches() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(60 * 32, 20)), 32)


class _Training:
    """A model whose steps return an output that takes ``KEPT_BYTES``."""

    def __init__(self) -> None:
        self._model = nn.Linear(20, 5000).cuda()
        self._optimizer = torch.optim.SGD(self._model.parameters())

    def step(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self._model(x.cuda())
        self._optimizer.zero_grad()
        output.sum().backward()
        self._optimizer.step()
        return output.detach()


def _popped() -> None:
    training = _Training()
    kept: list[torch.Tensor] = []
    for _ in range(2):
        for (x,) in _batches():
            kept.append(training.step(x))
            if len(kept) > LIMIT:
                kept.pop(0)


def _cut() -> None:
    training = _Training()
    kept: list[torch.Tensor] = []
    for _ in range(2):
        for (x,) in _batches():
            kept.append(training.step(x))
            kept = kept[-LIMIT:]


def _cleared() -> None:
    training = _Training()
    kept: list[torch.Tensor] = []
    for _ in range(2):
        for (x,) in _batches():
            kept.append(training.step(x))
            if len(kept) == LIMIT:
                kept.clear()


def _begun_anew() -> None:
    training = _Training()
    kept: list[torch.Tensor] = []
    for _ in range(2):
        for at, (x,) in enumerate(_batches()):
            kept.append(training.step(x))
            if (at + 1) % LIMIT == 0:
                kept = []


def _deleted() -> None:
    training = _Training()
    kept: list[torch.Tensor] = []
    for _ in range(2):
        for (x,) in _batches():
            kept.append(training.step(x))
            if len(kept) >= LIMIT:
                del kept[0]


def _full() -> None:
    training = _Training()
    kept: list[torch.Tensor] = []
    for _ in range(2):
        for (x,) in _batches():
            output = training.step(x)
            if len(kept) < LIMIT:
                kept.append(output)


def _bounded() -> None:
    training = _Training()
    kept: collections.deque[torch.Tensor] = collections.deque(maxlen=LIMIT)
    for _ in range(2):
        for (x,) in _batches():
            kept.append(training.step(x))


def _peak(found: CapturedTrial) -> int:
    return max(graph.peak_live_bytes for graph in (found.graph, *found.phases.values()))


@pytest.mark.parametrize("loop", [_popped, _cut, _cleared, _begun_anew, _deleted, _full, _bounded])
def test_a_buffer_holds_its_bound_however_much_of_the_loop_was_seen(loop: Callable[[], object]) -> None:
    whole, cut = (_peak(capture(loop, A100, spares=spares)) for spares in (True, False))
    assert LIMIT * KEPT_BYTES < cut < (LIMIT + 4) * KEPT_BYTES
    assert whole == pytest.approx(cut, abs=2 * KEPT_BYTES)


def test_a_list_that_nothing_empties_has_no_bound_beside_one_that_has() -> None:
    def objective() -> None:
        training = _Training()
        last: list[torch.Tensor] = []
        kept: list[torch.Tensor] = []
        for (x,) in _batches():
            last.append(training.step(x))
            kept.append(last[-1])
            if len(last) > LIMIT:
                last.pop(0)

    assert _peak(capture(objective, A100, spares=False)) > 55 * KEPT_BYTES
