"""Parameters that the user's own code updates are a step, with its memory and its number, as those of an optimizer are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad
from torch.utils.data import DataLoader, TensorDataset

from perfguard.capture.trial import capture
from perfguard.devices import resolve_device
from perfguard.exceptions import CaptureError
from perfguard.graph import Phase

A100 = resolve_device("a100")
Update = Callable[[nn.Module, torch.Tensor, torch.Tensor], None]


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 3)).cuda()


def _train(update: Update, *, epochs: int = 3) -> None:
    model = _model()
    loader = DataLoader(TensorDataset(torch.randn(40, 8), torch.randint(3, (40,))), 10)
    for _ in range(epochs):
        for x, y in loader:
            update(model, x.cuda(), y.cuda())


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y)


def _in_data(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    model.zero_grad()
    _loss(model, x, y).backward()
    for parameter in model.parameters():
        parameter.data.add_(-0.1 * parameter.grad)  # type: ignore[operator]


def _without_gradients(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    _loss(model, x, y).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad  # type: ignore[operator, misc]  # noqa: PLW2901 - in place
            parameter.grad.zero_()  # type: ignore[union-attr]


def _together(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    parameters: list[torch.Tensor] = [*model.parameters()]
    gradients = torch.autograd.grad(_loss(model, x, y), parameters)
    with torch.no_grad():
        torch._foreach_add_(parameters, gradients, alpha=-0.1)


def _assigned(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    model.zero_grad()
    _loss(model, x, y).backward()
    for parameter in model.parameters():
        parameter.data = parameter.data - 0.1 * parameter.grad  # type: ignore[operator]


def _of_a_part(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    model.zero_grad()
    _loss(model, x, y).backward()
    for parameter in [*model.parameters()][:2]:
        parameter.data.sub_(0.1 * parameter.grad)  # type: ignore[operator]


@pytest.mark.parametrize("update", [_in_data, _without_gradients, _together, _assigned, _of_a_part])
def test_an_update_of_the_users_own_ends_a_step(update: Update) -> None:
    seen = capture(lambda: _train(update), A100)
    assert (seen.steps, seen.steps_per_epoch) == (12, 4)
    phases = [op.phase for op in seen.graph.ops]
    assert phases.count(Phase.OPTIMIZER) >= 1
    assert sum(op.name == "_log_softmax" for op in seen.graph.ops) == 1


def test_an_update_of_the_users_own_takes_the_memory_of_plain_descent() -> None:
    def descend(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
        optimizer.zero_grad()
        _loss(model, x, y).backward()
        optimizer.step()

    def update(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        model.zero_grad()
        _loss(model, x, y).backward()
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.1)  # type: ignore[arg-type]

    own, of_pytorch = (capture(partial(_train, step, epochs=1), A100).graph for step in (update, descend))
    assert own.peak_live_bytes == of_pytorch.peak_live_bytes


def test_parameters_that_are_made_anew_end_a_step() -> None:
    def objective() -> None:
        model = _model()
        parameters = {name: value.detach() for name, value in model.named_parameters()}

        def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(functional_call(model, parameters, (x,)), y)

        for x, y in DataLoader(TensorDataset(torch.randn(40, 8), torch.randint(3, (40,))), 10):
            gradients = grad(loss)(parameters, x.cuda(), y.cuda())
            parameters = {name: value - 0.1 * gradients[name] for name, value in parameters.items()}

    assert capture(objective, A100).steps == 4


def test_tensors_without_a_module_end_a_step() -> None:
    def objective() -> None:
        weights = [torch.randn(8, 64, device="cuda", requires_grad=True), torch.randn(64, 3, device="cuda", requires_grad=True)]
        x = torch.randn(10, 8, device="cuda")
        for _ in range(500):
            (x @ weights[0]).relu().mm(weights[1]).square().mean().backward()
            with torch.no_grad():
                for weight in weights:
                    weight -= 0.1 * weight.grad  # type: ignore[operator]  # noqa: PLW2901 - in place
                    weight.grad = None

    assert [op.name for op in capture(objective, A100).graph.ops].count("relu") == 1


def test_gradients_that_accumulate_end_no_step() -> None:
    def objective() -> None:
        model = _model()
        for number, (x, y) in enumerate(DataLoader(TensorDataset(torch.randn(200, 8), torch.randint(3, (200,))), 10)):
            _loss(model, x.cuda(), y.cuda()).backward()
            if number % 2:
                for parameter in model.parameters():
                    parameter.data.add_(-0.1 * parameter.grad)  # type: ignore[operator]
                model.zero_grad()

    assert capture(objective, A100).steps == 10


def test_an_average_of_weights_ends_no_step_of_an_optimizer() -> None:
    def objective() -> None:
        model, average = _model(), _model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in DataLoader(TensorDataset(torch.randn(40, 8), torch.randint(3, (40,))), 10):
            optimizer.zero_grad()
            (_loss(model, x.cuda(), y.cuda()) + _loss(average, x.cuda(), y.cuda())).backward()
            for ours, theirs in zip(model.parameters(), average.parameters(), strict=True):
                theirs.data.lerp_(ours.data, 0.1)
            optimizer.step()

    assert capture(objective, A100).steps == 4


def test_a_backward_pass_without_an_update_is_no_step() -> None:
    def objective() -> None:
        _loss(_model(), torch.randn(4, 8).cuda(), torch.zeros(4, dtype=torch.int64).cuda()).backward()

    with pytest.raises(CaptureError, match="no step of a torch optimizer"):
        capture(objective, A100)
