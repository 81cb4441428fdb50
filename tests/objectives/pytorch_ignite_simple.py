"""Ignite's supervised trainer and evaluator, with Optuna's pruning handler."""

from __future__ import annotations

from typing import Any

import optuna
import torch
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy
from optuna_integration import PyTorchIgnitePruningHandler
from torch import nn
from torch.nn import functional as F
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 3
TRAIN_BATCH_SIZE = 64
VAL_BATCH_SIZE = 256


class Net(nn.Module):
    def __init__(self, trial: optuna.Trial) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d(p=trial.suggest_float("dropout_rate", 0, 1))
        fc2_input_dim = trial.suggest_int("fc2_input_dim", 40, 80)
        self.fc1 = nn.Linear(320, fc2_input_dim)
        self.fc2 = nn.Linear(fc2_input_dim, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = x.view(-1, 320)
        x = F.relu(self.fc1(x))
        x = F.dropout(x, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


def images(number: int, batch_size: int, *, shuffle: bool) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.rand(number, 1, 28, 28), torch.randint(0, 10, (number,))), batch_size, shuffle=shuffle)


def objective(trial: optuna.Trial) -> float:
    model = Net(trial)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    optimizer = Adam(model.parameters())
    trainer = create_supervised_trainer(model, optimizer, F.nll_loss, device=device)
    evaluator = create_supervised_evaluator(model, metrics={"accuracy": Accuracy()}, device=device)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: None)
    evaluator.add_event_handler(Events.COMPLETED, PyTorchIgnitePruningHandler(trial, "accuracy", trainer))
    train_loader = images(20 * TRAIN_BATCH_SIZE, TRAIN_BATCH_SIZE, shuffle=True)
    val_loader = images(2 * VAL_BATCH_SIZE, VAL_BATCH_SIZE, shuffle=False)

    @trainer.on(Events.EPOCH_COMPLETED)
    def log_results(engine: Engine) -> None:
        evaluator.run(val_loader)
        print(f"Epoch: {engine.state.epoch} Validation accuracy: {evaluator.state.metrics['accuracy']:.2f}")

    trainer.run(train_loader, max_epochs=EPOCHS)
    evaluator.run(val_loader)
    return float(evaluator.state.metrics["accuracy"])
