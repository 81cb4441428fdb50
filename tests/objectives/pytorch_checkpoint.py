"""Checkpoints of a trial as artifacts: it goes on where an earlier trial of the same parameters was ended."""
# ruff: noqa: PLW2901 - as users write it

from __future__ import annotations

import tempfile
from pathlib import Path

import optuna
import torch
import torch.nn.functional as F
from optuna.artifacts import FileSystemArtifactStore, download_artifact, upload_artifact
from optuna.storages import RetryFailedTrialCallback
from torch import optim
from torch.utils.data import DataLoader, TensorDataset

from tests.objectives.pytorch_simple import define_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCHSIZE = 128
CLASSES = 10
EPOCHS = 3
FOLDER = Path(tempfile.gettempdir()) / "pytorch_checkpoint"


def get_mnist() -> tuple[DataLoader[tuple[torch.Tensor, ...]], DataLoader[tuple[torch.Tensor, ...]]]:
    train = TensorDataset(torch.rand(10 * BATCHSIZE, 1, 28, 28), torch.randint(0, CLASSES, (10 * BATCHSIZE,)))
    valid = TensorDataset(torch.rand(4 * BATCHSIZE, 1, 28, 28), torch.randint(0, CLASSES, (4 * BATCHSIZE,)))
    return DataLoader(train, BATCHSIZE, shuffle=True), DataLoader(valid, BATCHSIZE, shuffle=True)


def objective(trial: optuna.Trial) -> float:
    FOLDER.mkdir(exist_ok=True)
    artifact_store = FileSystemArtifactStore(FOLDER)
    model = define_model(trial).to(DEVICE)
    optimizer_name = trial.suggest_categorical("optimizer", ["Adam", "RMSprop", "SGD"])
    lr = trial.suggest_float("lr", 1e-5, 1e-1, log=True)
    optimizer = getattr(optim, optimizer_name)(model.parameters(), lr=lr)

    artifact_id = None
    for number in reversed(RetryFailedTrialCallback.retry_history(trial.study.trials[trial.number])):
        artifact_id = trial.study.trials[number].user_attrs.get("artifact_id")
        if artifact_id is not None:
            break
    epoch_begin = 0
    if artifact_id is not None:
        download_artifact(artifact_store=artifact_store, file_path=str(FOLDER / f"{artifact_id}.pt"), artifact_id=artifact_id)
        checkpoint = torch.load(FOLDER / f"{artifact_id}.pt")
        epoch_begin = checkpoint["epoch"] + 1
        model.load_state_dict(checkpoint["model_state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
        accuracy = checkpoint["accuracy"]

    train_loader, valid_loader = get_mnist()
    path = FOLDER / f"model_{trial.number}.pt"
    for epoch in range(epoch_begin, EPOCHS):
        model.train()
        for data, target in train_loader:
            data, target = data.view(data.size(0), -1).to(DEVICE), target.to(DEVICE)
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()

        model.eval()
        correct = 0
        with torch.no_grad():
            for data, target in valid_loader:
                data, target = data.view(data.size(0), -1).to(DEVICE), target.to(DEVICE)
                pred = model(data).argmax(dim=1, keepdim=True)
                correct += pred.eq(target.view_as(pred)).sum().item()
        accuracy = correct / len(valid_loader.dataset)  # type: ignore[arg-type]
        trial.report(accuracy, epoch)
        state = {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}
        torch.save({"epoch": epoch, "accuracy": accuracy, **state}, path)
        artifact_id = upload_artifact(artifact_store=artifact_store, file_path=str(path), study_or_trial=trial)
        trial.set_user_attr("artifact_id", artifact_id)
        if trial.should_prune():
            raise optuna.exceptions.TrialPruned
    return float(accuracy)
