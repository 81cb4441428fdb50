"""Two objectives: the FLOPs of a network, counted by PyTorch, and its accuracy."""
# ruff: noqa: PLW2901 - as users write it

from __future__ import annotations

import optuna
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from tests.objectives.pytorch_simple import define_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCHSIZE = 128
CLASSES = 10
EPOCHS = 3
Loader = DataLoader[tuple[torch.Tensor, ...]]


def images(number: int) -> Loader:
    return DataLoader(TensorDataset(torch.rand(number, 1, 28, 28), torch.randint(0, CLASSES, (number,))), BATCHSIZE, shuffle=True)


def train_model(model: nn.Module, optimizer: optim.Optimizer, train_loader: Loader) -> None:
    model.train()
    for data, target in train_loader:
        data, target = data.view(-1, 28 * 28).to(DEVICE), target.to(DEVICE)
        optimizer.zero_grad()
        F.nll_loss(model(data), target).backward()
        optimizer.step()


def eval_model(model: nn.Module, valid_loader: Loader) -> tuple[int, float]:
    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in valid_loader:
            data, target = data.view(-1, 28 * 28).to(DEVICE), target.to(DEVICE)
            pred = model(data).argmax(dim=1, keepdim=True)
            correct += int(pred.eq(target.view_as(pred)).sum().item())
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(1, 28 * 28).to(DEVICE))
    return counter.get_total_flops(), correct / len(valid_loader.dataset)  # type: ignore[arg-type]


def objective(trial: optuna.Trial) -> tuple[int, float]:
    train_loader, valid_loader = images(10 * BATCHSIZE), images(4 * BATCHSIZE)
    model = define_model(trial).to(DEVICE)
    optimizer = optim.Adam(model.parameters(), trial.suggest_float("lr", 1e-5, 1e-1, log=True))
    for _epoch in range(EPOCHS):
        train_model(model, optimizer, train_loader)
    return eval_model(model, valid_loader)
