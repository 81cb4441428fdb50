"""Networks for handwritten digits, of which only those run that are predicted to stay within 64 MiB."""

import optuna
import optunahub
from sklearn.datasets import load_digits
import torch
from torch import nn


perfguard_pruner = optunahub.load_module("pruners/perfguard")
images, digits = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
images = images.float() / 16


def objective(trial: optuna.Trial) -> float:
    width = trial.suggest_int("width", 64, 4096, log=True)
    batch_size = trial.suggest_int("batch_size", 16, 1024, log=True)
    model = nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(20):
        chosen = torch.randint(len(images), (batch_size,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[chosen]), digits[chosen]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        return (model(images).argmax(dim=1) == digits).double().mean().item()


pruner = perfguard_pruner.PerfGuardPruner(gpu="cpu", memory_budget="64MiB")
sampler = optuna.samplers.TPESampler(seed=0)
study = perfguard_pruner.create_study(direction="maximize", sampler=sampler, pruner=pruner)
study.optimize(objective, n_trials=12)
print(perfguard_pruner.summarize(study))
