"""Convolutions for handwritten digits: TPE proposes, and only what is predicted to stay within 64 MiB becomes a trial's turn."""

import functools
from typing import Any

import optuna
import optunahub
from sklearn.datasets import load_digits
import torch
from torch import nn

from perfguard import TensorSpec
from perfguard import Workload


perfguard_sampler = optunahub.load_module("samplers/perfguard")
images, digits = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
images = images.float().reshape(-1, 1, 8, 8) / 16
sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
STEPS = 20


def make_model(params: dict[str, Any]) -> nn.Module:
    channels = params["channels"]
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * channels, 10),
    )


def build(
    params: dict[str, Any],
) -> Workload:  # what a trial would run: called on PyTorch's meta device, which allocates nothing
    batch = params["batch_size"]
    return Workload(
        make_model(params),
        inputs=(batch, 1, 8, 8),
        targets=TensorSpec((batch,), "int64"),
        loss=nn.functional.cross_entropy,
        optimizer=sgd,
        steps=STEPS,
    )


def objective(trial: optuna.Trial) -> float:
    params = {
        "channels": trial.suggest_int("channels", 4, 128, log=True),
        "batch_size": trial.suggest_int("batch_size", 16, 1024, log=True),
    }
    model = make_model(params)
    optimizer = sgd(model.parameters())
    for _ in range(STEPS):
        chosen = torch.randint(len(images), (params["batch_size"],))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[chosen]), digits[chosen]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        return (model(images[:500]).argmax(dim=1) == digits[:500]).double().mean().item()


pruner = perfguard_sampler.PerfGuardPruner(gpu="cpu", build=build, memory_budget="64MiB")
sampler = perfguard_sampler.PerfGuardSampler(optuna.samplers.TPESampler(seed=0), pruner)
study = perfguard_sampler.create_study(direction="maximize", sampler=sampler, pruner=pruner)
study.optimize(objective, n_trials=12)
print(perfguard_sampler.summarize(study))
