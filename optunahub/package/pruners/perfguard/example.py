"""Networks for handwritten digits, of which only those run that are predicted to stay within 64 MiB."""

import functools

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn

import optunahub
from perfguard import TensorSpec, Workload

perfguard_pruner = optunahub.load_module("pruners/perfguard")
images, digits = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
images = images.float() / 16
sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
STEPS = 20


def make_model(params):
    width = params["width"]
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def build(params):  # what a trial would run: called on PyTorch's meta device, which allocates nothing
    batch = params["batch_size"]
    return Workload(
        make_model(params),
        inputs=(batch, 64),
        targets=TensorSpec((batch,), "int64"),
        loss=nn.functional.cross_entropy,
        optimizer=sgd,
        steps=STEPS,
    )


def objective(trial):
    params = {
        "width": trial.suggest_int("width", 64, 4096, log=True),
        "batch_size": trial.suggest_int("batch_size", 16, 1024, log=True),
    }
    if trial.should_prune():  # a study of Optuna's own asks here; one of create_study is judged before this line
        raise optuna.TrialPruned
    model = make_model(params)
    optimizer = sgd(model.parameters())
    for _ in range(STEPS):
        chosen = torch.randint(len(images), (params["batch_size"],))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[chosen]), digits[chosen]).backward()
        optimizer.step()
    with torch.no_grad():
        return (model(images).argmax(dim=1) == digits).double().mean().item()


pruner = perfguard_pruner.PerfGuardPruner(gpu="cpu", build=build, memory_budget="64MiB")
sampler = optuna.samplers.TPESampler(seed=0)
study = perfguard_pruner.create_study(direction="maximize", sampler=sampler, pruner=pruner)
study.optimize(objective, n_trials=12)
print(perfguard_pruner.summarize(study))
