"""A LightningModule, its DataModule, and Optuna's pruning callback."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import optuna
import torch
import torch.nn.functional as F
from optuna_integration import PyTorchLightningPruningCallback
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset, random_split

PERCENT_VALID_EXAMPLES = 0.5
BATCHSIZE = 128
CLASSES = 10
EPOCHS = 3


class Net(nn.Module):
    def __init__(self, dropout: float, output_dims: list[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        input_dim = 28 * 28
        for output_dim in output_dims:
            layers += [nn.Linear(input_dim, output_dim), nn.ReLU(), nn.Dropout(dropout)]
            input_dim = output_dim
        self.layers = nn.Sequential(*layers, nn.Linear(input_dim, CLASSES))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(self.layers(data), dim=1)


class LightningNet(pl.LightningModule):
    def __init__(self, dropout: float, output_dims: list[int]) -> None:
        super().__init__()
        self.model = Net(dropout, output_dims)

    def forward(self, data: torch.Tensor) -> Any:
        return self.model(data.view(-1, 28 * 28))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        data, target = batch
        return F.nll_loss(self(data), target)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        data, target = batch
        pred = self(data).argmax(dim=1, keepdim=True)
        accuracy = pred.eq(target.view_as(pred)).float().mean()
        self.log("val_acc", accuracy)
        self.log("hp_metric", accuracy, on_step=False, on_epoch=True)

    def configure_optimizers(self) -> optim.Optimizer:
        return optim.Adam(self.model.parameters())


class FashionMNISTDataModule(pl.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str | None = None) -> None:
        number = 50 * BATCHSIZE
        data = TensorDataset(torch.rand(number, 1, 28, 28), torch.randint(0, CLASSES, (number,)))
        self.train, self.val = random_split(data, [45 * BATCHSIZE, 5 * BATCHSIZE])

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, pin_memory=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val, batch_size=self.batch_size, shuffle=False, pin_memory=True)


def objective(trial: optuna.Trial) -> float:
    n_layers = trial.suggest_int("n_layers", 1, 3)
    dropout = trial.suggest_float("dropout", 0.2, 0.5)
    output_dims = [trial.suggest_int(f"n_units_l{i}", 4, 128, log=True) for i in range(n_layers)]
    model = LightningNet(dropout, output_dims)
    trainer = pl.Trainer(
        logger=False,
        limit_val_batches=PERCENT_VALID_EXAMPLES,
        enable_checkpointing=False,
        max_epochs=EPOCHS,
        accelerator="auto",
        devices=1,
        callbacks=[PyTorchLightningPruningCallback(trial, monitor="val_acc")],
    )
    trainer.fit(model, datamodule=FashionMNISTDataModule(batch_size=BATCHSIZE))
    return float(trainer.callback_metrics["val_acc"].item())
