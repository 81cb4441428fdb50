"""The verdict of rank 0 is that of all ranks under the launchers of others: Accelerate, Transformers' Trainer and Lightning."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from perfguard.exceptions import ConfigurationError
from perfguard.log import MeasurementStore
from perfguard_optuna import guarded
from tests.doubles import TOY_CPU
from tests.integrations.one_layer import LARGE, SMALL, settings
from tests.integrations.test_optuna_ranks import ends_of, play

integration = pytest.importorskip("optuna_integration")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def data() -> TensorDataset:
    return TensorDataset(torch.ones(64, 64), torch.ones(64))


def with_accelerate(width: int, folder: str) -> float:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Linear(64, width)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(), 8))
    for x, _ in loader:
        optimizer.zero_grad()
        loss = model(x).mean()
        accelerator.backward(loss)
        optimizer.step()
    return float(accelerator.gather(loss.detach()).mean())


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(64), "labels": torch.ones(1)}


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(64, width)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).mean()}


def with_trainer(width: int, folder: str) -> float:
    transformers = pytest.importorskip("transformers")
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    arguments = transformers.TrainingArguments(folder, per_device_train_batch_size=8, num_train_epochs=1, **quiet)
    return float(transformers.Trainer(model=Wide(width), args=arguments, train_dataset=Rows()).train().training_loss)


def with_lightning(width: int, folder: str) -> float:
    pl = pytest.importorskip("lightning.pytorch")

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, width)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.layer(batch[0]).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=1, strategy="ddp", devices=int(os.environ["WORLD_SIZE"]), accelerator="cpu", **off)
    trainer.fit(Module(), DataLoader(data(), 8))
    return 0.0


def main(rank: int, train: Callable[[int, str], float], folder: str, options: dict[str, Any], *widths: int) -> list[str]:
    size = str(torch.distributed.get_world_size())
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, GROUP_RANK="0")
    os.environ.update(TORCHELASTIC_RUN_ID="1")
    began = []

    def objective(single: optuna.Trial | None) -> float:
        width = integration.TorchDistributedTrial(single).suggest_int("width", SMALL, LARGE)
        began.append(width)
        return train(width, folder)

    shown = guarded(objective, **settings(gpu=TOY_CPU, **options))
    return [*play(rank, shown, *widths), f"{len(began)} began"]


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("train", [with_accelerate, with_trainer, with_lightning])
def test_all_ranks_prune_together(train: Callable[[int, str], float], number: int, tmp_path: Path) -> None:
    log = str(tmp_path / "log.db")
    ended = ends_of(number, main, train, str(tmp_path), {"log": log}, SMALL, LARGE, SMALL)
    assert ended == number * [["COMPLETE", "PRUNED", "COMPLETE", "2 began"]]
    records = MeasurementStore(log).records()
    assert sorted(record.verdict.action for record in records if record.verdict) == ["launch", "launch", "prune"]
    assert [record.status for record in records].count("ok") == 2


def without_a_step(width: int, folder: str) -> float:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(64, width))
    return float(accelerator.gather(model(torch.ones(8, 64)).mean().detach()).mean())


def test_all_ranks_end_together_what_cannot_be_judged(tmp_path: Path) -> None:
    ended = ends_of(2, main, without_a_step, str(tmp_path), {"strict": True}, SMALL)
    assert all(end.startswith("UnguardedTrialError") for end in ended)
    assert "Rank 0 could not begin the trial" in ended[1]
    ended = ends_of(2, main, without_a_step, str(tmp_path), {}, SMALL)
    assert ended == 2 * [["COMPLETE", "1 began"]]


def test_group_that_only_the_objective_makes_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match=r"Make the process group before the first trial.*init_process_group"):
        guarded(lambda _: 0.0, **settings(gpu=TOY_CPU))(None)  # type: ignore[arg-type]
