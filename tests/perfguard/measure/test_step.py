"""The step of a Workload, run for real: inputs by name, integers, layout, the model's own loss."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from perfguard import TensorSpec, Workload
from perfguard.measure.step import run_steps, step_of


class Noting(nn.Module):
    """Keeps what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 1)
        self.seen: list[Any] = []

    def forward(self, images: torch.Tensor, words: torch.Tensor) -> Any:
        self.seen.append((images, words, self.training, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return {"loss": self.layer(images).mean()}


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_step_runs_as_its_workload_says(mode: Any) -> None:
    model = Noting()
    before = model.layer.weight.detach().clone()
    inputs = {"images": (2, 3, 8, 8), "words": TensorSpec((2, 50), "int64")}
    step = step_of(Workload(model, inputs, mode=mode, layout="nhwc", precision="amp-bf16"), high=7)
    step()
    ((images, words, training, has_gradients, autocasts),) = model.seen
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert 0 <= int(words.min()) <= int(words.max()) == 6
    assert (training, has_gradients, autocasts) == (mode == "train", mode == "train", True)
    assert torch.equal(before, model.layer.weight) == (mode == "infer")


def test_the_outputs_are_gone_in_the_backward_pass() -> None:
    """The trace of Workload(retain="nothing") has them no longer, and both must cost the same."""
    outputs: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    class Updating(torch.optim.SGD):
        def step(self, *args: Any) -> None:  # type: ignore[override]
            alive.append(outputs[-1]() is not None)

    def loss(output: torch.Tensor) -> torch.Tensor:
        outputs.append(weakref.ref(output))
        return output.mean()

    step_of(Workload(nn.Linear(3, 4), (2, 3), loss=loss, optimizer=Updating, retain="nothing"))()
    assert alive == [False]


def test_number_of_steps_follows_from_their_time() -> None:
    marked: list[int] = []
    run: Any = SimpleNamespace(step=lambda: marked.append(len(ran)))
    ran: list[int] = []
    for seconds, number in ((0.0, 4), (1e9, 200)):
        ran.clear()
        marked.clear()
        assert run_steps(lambda: ran.append(0), run, seconds=seconds, synchronize=lambda: None) == number
        assert marked == list(range(4, 5 + number)), "a mark before the first and after each, none in the warm-up"
