"""A trial whose set-up cannot be dry-run is dry-run from its first training forward pass on, in the middle of its real run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from perfguard import resolve_device
from perfguard.capture.first_forward import FirstForward
from perfguard.capture.trial import capture
from perfguard.exceptions import CaptureError
from perfguard.workload import CapturedTrial

CPU = resolve_device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


class Ended(Exception):
    """Ends a trial where it is judged."""


def judged(objective: Callable[[], object], **settings: Any) -> CapturedTrial | Exception:
    """What the guard gets of an objective that then ends."""
    found: list[CapturedTrial | Exception] = []

    def judge(seen: CapturedTrial | Exception) -> None:
        found.append(seen)
        raise Ended

    with pytest.raises(Ended), FirstForward(CPU, judge, lambda: None, problem=CaptureError("why"), **settings):
        objective()
    assert len(found) == 1
    return found[0]


def train(step: Callable[..., None], *, epochs: int = 2, **loading: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters())
    data = TensorDataset(torch.randn(96, 20), torch.randint(0, 3, (96,)))
    loader = DataLoader(data, batch_size=8, shuffle=True, **loading)
    for _ in range(epochs):
        model.train()
        for x, y in loader:
            step(model, optimizer, x, y)
        with torch.no_grad():
            model.eval()(data.tensors[0])
    return model


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def with_a_closure(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.item()

    optimizer.step(closure)


def with_autocast(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        plain(model, optimizer, x, y)


@pytest.mark.parametrize(
    ("step", "loading"),
    [
        (plain, {"num_workers": 1}),
        (plain, {"num_workers": 1, "persistent_workers": True}),
        (with_a_closure, {}),
        (with_autocast, {}),
    ],
)
def test_what_is_seen_is_what_a_dry_run_from_the_first_line_sees(step: Callable[..., None], loading: dict[str, Any]) -> None:
    seen, whole = judged(lambda: train(step, **loading)), capture(lambda: train(step, **loading), CPU)
    assert isinstance(seen, CapturedTrial)
    assert seen.graph.content_hash == whole.graph.content_hash
    assert (seen.steps, seen.steps_per_epoch, seen.samples_per_step) == (24, 12, 8)
    assert seen.phases.keys() == whole.phases.keys() == {"the evaluation"}
    assert seen.source != whole.source


def test_the_trial_goes_on_as_if_nothing_had_happened() -> None:
    def weights(judge: Callable[[Any], object] | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        if judge is None:
            return list(train(plain, num_workers=1).state_dict().values())
        with FirstForward(CPU, judge, lambda: None, problem=CaptureError("why")):
            return list(train(plain, num_workers=1).state_dict().values())

    found: list[Any] = []
    for guarded, alone in zip(weights(found.append), weights(None), strict=True):
        assert torch.equal(guarded, alone)
    assert isinstance(found[0], CapturedTrial)


def test_a_model_of_the_set_up_is_not_taken_for_the_trained_one() -> None:
    def objective() -> None:
        features = nn.Linear(20, 4)(torch.randn(8, 20))
        if not features.any():  # on the stage it is nothing but zeros
            raise ValueError("degenerate")
        train(plain)

    seen = judged(objective)
    assert isinstance(seen, CapturedTrial)
    assert seen.steps == 24


def test_a_dry_run_that_fails_is_said_at_the_first_step() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        loss = F.cross_entropy(model(x), y)
        if not loss.item():
            raise ValueError("no loss")
        loss.backward()
        optimizer.step()

    assert str(judged(lambda: train(step))).startswith("why; from a first forward pass on, the dry run of the objective ends at")


def test_a_dry_run_that_hangs_is_ended() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        loss = F.cross_entropy(model(x), y)
        while not loss.item():
            time.sleep(0.01)
        loss.backward()
        optimizer.step()

    assert "did not end within 3 s" in str(judged(lambda: train(step), most_seconds=3))


def test_a_trial_without_training_is_judged_at_its_end() -> None:
    found: list[Any] = []
    with FirstForward(CPU, found.append, lambda: None, problem=CaptureError("why")), torch.no_grad():
        nn.Linear(2, 2)(torch.ones(2))
    assert [str(error) for error in found] == ["why"]


def test_a_trial_that_fails_before_is_not_judged() -> None:
    found: list[Any] = []
    with pytest.raises(ValueError, match="its own"), FirstForward(CPU, found.append, lambda: None, problem=CaptureError("why")):
        raise ValueError("its own")
    assert not found
