"""Optuna's first example for PyTorch: the layers and the optimizer of a network for images, trained on parts of its data."""
# ruff: noqa: PLW2901 - as users write it

from __future__ import annotations

import optuna
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

DEVICE = torch.device("cpu")
BATCHSIZE = 128
CLASSES = 10
EPOCHS = 3
N_TRAIN_EXAMPLES = BATCHSIZE * 30
N_VALID_EXAMPLES = BATCHSIZE * 10


def define_model(trial: optuna.Trial) -> nn.Module:
    n_layers = trial.suggest_int("n_layers", 1, 3)
    layers: list[nn.Module] = []
    in_features = 28 * 28
    for i in range(n_layers):
        out_features = trial.suggest_int(f"n_units_l{i}", 4, 128)
        layers += [nn.Linear(in_features, out_features), nn.ReLU()]
        layers.append(nn.Dropout(trial.suggest_float(f"dropout_l{i}", 0.2, 0.5)))
        in_features = out_features
    return nn.Sequential(*layers, nn.Linear(in_features, CLASSES), nn.LogSoftmax(dim=1))


def get_mnist() -> tuple[DataLoader[tuple[torch.Tensor, ...]], DataLoader[tuple[torch.Tensor, ...]]]:
    train = TensorDataset(torch.rand(50 * BATCHSIZE, 1, 28, 28), torch.randint(0, CLASSES, (50 * BATCHSIZE,)))
    valid = TensorDataset(torch.rand(20 * BATCHSIZE, 1, 28, 28), torch.randint(0, CLASSES, (20 * BATCHSIZE,)))
    return DataLoader(train, BATCHSIZE, shuffle=True), DataLoader(valid, BATCHSIZE, shuffle=True)


def objective(trial: optuna.Trial) -> float:
    model = define_model(trial).to(DEVICE)
    optimizer_name = trial.suggest_categorical("optimizer", ["Adam", "RMSprop", "SGD"])
    lr = trial.suggest_float("lr", 1e-5, 1e-1, log=True)
    optimizer = getattr(optim, optimizer_name)(model.parameters(), lr=lr)
    train_loader, valid_loader = get_mnist()

    for epoch in range(EPOCHS):
        model.train()
        for batch_idx, (data, target) in enumerate(train_loader):
            if batch_idx * BATCHSIZE >= N_TRAIN_EXAMPLES:
                break
            data, target = data.view(data.size(0), -1).to(DEVICE), target.to(DEVICE)
            optimizer.zero_grad()
            output = model(data)
            loss = F.nll_loss(output, target)
            loss.backward()
            optimizer.step()

        model.eval()
        correct = 0
        with torch.no_grad():
            for batch_idx, (data, target) in enumerate(valid_loader):
                if batch_idx * BATCHSIZE >= N_VALID_EXAMPLES:
                    break
                data, target = data.view(data.size(0), -1).to(DEVICE), target.to(DEVICE)
                output = model(data)
                pred = output.argmax(dim=1, keepdim=True)
                correct += pred.eq(target.view_as(pred)).sum().item()
        accuracy = correct / min(len(valid_loader.dataset), N_VALID_EXAMPLES)  # type: ignore[arg-type]
        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise optuna.exceptions.TrialPruned
    return accuracy
