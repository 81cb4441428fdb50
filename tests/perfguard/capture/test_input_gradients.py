"""Inputs that need a gradient are dry-run on a machine without a GPU, too, where the objective makes them on the CPU.

Its backward passes are those of the same objective with "cuda". What the host makes by itself, such as random numbers, is no work
of the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import Variable
from torch.func import grad, hessian, vmap
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from perfguard.capture.trial import capture
from perfguard.devices import resolve_device
from perfguard.graph import Phase

A100, CPU = resolve_device("a100"), resolve_device("cpu")
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor, str], torch.Tensor]


def _batches() -> Iterator[list[torch.Tensor]]:
    return itertools.islice(DataLoader(TensorDataset(torch.randn(40, 2), torch.randint(3, (40,))), 10), 4)


def _train(loss_of: Loss, *, device: str) -> None:
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3)).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    for x, y in _batches():
        loss = loss_of(model, x.to(device), y.to(device), device)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _physics(model: nn.Module, _: torch.Tensor, __: torch.Tensor, device: str) -> torch.Tensor:
    x = torch.rand(32, 1, device=device, requires_grad=True)
    t = torch.rand(32, 1, device=device)
    t.requires_grad = True
    u = model(torch.cat([x, t], 1))[:, :1]
    of_x, of_t = torch.autograd.grad(u, (x, t), grad_outputs=torch.ones(32, 1, device=device), create_graph=True)
    of_xx = torch.autograd.grad(of_x, x, torch.ones_like(of_x), create_graph=True)[0]
    residual: torch.Tensor = of_t + u * of_x - of_xx
    return residual.square().mean()


def _adversarial(model: nn.Module, x: torch.Tensor, y: torch.Tensor, _: str) -> torch.Tensor:
    x.requires_grad = True
    nn.functional.cross_entropy(model(x), y).backward()
    assert x.grad is not None
    return nn.functional.cross_entropy(model((x + 0.1 * x.grad.sign()).clamp(0, 1).detach()), y)


def _perturbed(model: nn.Module, x: torch.Tensor, y: torch.Tensor, _: str) -> torch.Tensor:
    delta = torch.zeros_like(x, requires_grad=True)
    gradient = torch.autograd.grad(nn.functional.cross_entropy(model(x + delta), y), delta)[0]
    delta.data = (delta + 0.1 * gradient.sign()).clamp(-1, 1)
    return nn.functional.cross_entropy(model(x + delta.detach()), y)


def _penalized(model: nn.Module, x: torch.Tensor, _: torch.Tensor, device: str) -> torch.Tensor:
    share = torch.rand(10, 1, device=device)
    between = (share * x + (1 - share) * torch.zeros_like(x)).requires_grad_(True)
    output = model(between)
    gradient = torch.autograd.grad(output, between, torch.ones(output.size(), device=device), create_graph=True)[0]
    return (gradient.norm(2, dim=1) - 1).square().mean()  # type: ignore[no-any-return]


def _checkpointed(model: nn.Module, x: torch.Tensor, y: torch.Tensor, _: str) -> torch.Tensor:
    output: torch.Tensor = checkpoint(model, x.requires_grad_(), use_reentrant=True)
    return nn.functional.cross_entropy(output, y)


def _variable(model: nn.Module, x: torch.Tensor, y: torch.Tensor, _: str) -> torch.Tensor:
    return nn.functional.cross_entropy(model(Variable(x, requires_grad=True)), y)


@pytest.mark.parametrize("loss_of", [_physics, _adversarial, _perturbed, _penalized, _checkpointed, _variable])
def test_inputs_of_the_host_that_need_a_gradient_are_on_the_guarded_device(loss_of: Loss) -> None:
    on_host, on_device = (capture(partial(_train, loss_of, device=device), A100) for device in ("cpu", "cuda"))
    assert on_host.steps == on_device.steps == 4
    backwards = [[op.name for op in seen.graph.ops if op.phase is Phase.BACKWARD] for seen in (on_host, on_device)]
    assert backwards[0] == backwards[1]
    assert on_host.graph.peak_live_bytes == pytest.approx(on_device.graph.peak_live_bytes, rel=0.05)


def _transformed(model: nn.Module, x: torch.Tensor, _: torch.Tensor, device: str) -> torch.Tensor:
    def first(point: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = model(point)
        return output[0]

    curvature = vmap(hessian(first))(x).diagonal(dim1=-2, dim2=-1).sum(-1)
    slope = grad(first)(torch.rand(2, device=device))
    loss: torch.Tensor = (curvature - 1).square().mean() + slope.square().sum()
    return loss


def test_inputs_that_torch_func_transforms_are_on_the_guarded_device() -> None:
    """Nothing of them says `requires_grad`, and weights on meta met points of the host in the backward pass."""
    on_host, on_device = (capture(partial(_train, _transformed, device=device), A100) for device in ("cpu", "cuda"))
    assert on_host.steps == on_device.steps == 4
    assert on_host.graph.peak_live_bytes == pytest.approx(on_device.graph.peak_live_bytes, rel=0.05)


@pytest.mark.parametrize("loss_of", [_physics, _adversarial, _penalized])
def test_inputs_that_need_a_gradient_are_on_a_guarded_cpu(loss_of: Loss) -> None:
    assert capture(partial(_train, loss_of, device="cpu"), CPU).steps == 4


def test_a_tensor_of_the_host_stays_there_in_a_program_that_names_the_gpu() -> None:
    def objective() -> None:
        model = nn.Linear(2, 1).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            scale = torch.ones(1, requires_grad=True)
            assert not scale.is_cuda
            (model(torch.rand(4, 2).cuda()) * scale.cuda()).mean().backward()
            assert scale.grad is not None
            assert not scale.grad.is_cuda
            optimizer.step()

    assert capture(objective, A100).steps == 3
