"""A trainer says how many steps it will make, whatever a dry run cuts short, unless it may stop early."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.perfguard.capture.toy_ranks import in_a_child

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="its objectives really train where there is a GPU"),
    pytest.mark.slow,
]
BATCHES = 3000
"""More than a dry run reads."""


def by_lightning(*callbacks: Any, **options: Any) -> None:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(20, 3)

        def training_step(self, batch: Any) -> Any:
            loss = self.layer(batch[0]).mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", enable_model_summary=False, callbacks=[*callbacks], **quiet, **options)
    trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(2 * BATCHES, 20)), 2))


def test_lightning_says_its_steps() -> None:
    from lightning.pytorch.callbacks import EarlyStopping

    limited = in_a_child(lambda: by_lightning(max_epochs=2, limit_train_batches=60, accumulate_grad_batches=2), "cpu")
    assert limited.steps == 60
    early = in_a_child(lambda: by_lightning(EarlyStopping("loss", patience=3), max_epochs=100), "cpu")
    assert (early.steps, early.steps_per_epoch) == (None, BATCHES)


@pytest.mark.parametrize("finds", ["lr_find", "scale_batch_size"])
def test_what_lightning_finds_out_before_it_trains_is_left_out_and_its_checkpoints_are_read(finds: str, tmp_path: Path) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.tuner.tuning import Tuner

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.lr, self.batch_size = nn.Linear(20, 3), 0.1, 2

        def training_step(self, batch: Any) -> Any:
            return self.layer(batch[0]).mean()

        def test_step(self, batch: Any) -> None:
            self.log("score", self.layer(batch[0].repeat(1000, 1)).mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

        def train_dataloader(self) -> Any:
            return DataLoader(TensorDataset(torch.randn(2 * BATCHES, 20)), self.batch_size)

        test_dataloader = train_dataloader

    def objective() -> None:
        model, trainer = Module(), pl.Trainer(max_epochs=2, logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
        found = getattr(Tuner(trainer), finds)(model)
        if finds == "lr_find":
            model.lr = found.suggestion()
        trainer.fit(model)
        trainer.test(model, ckpt_path="best", verbose=False)

    seen = in_a_child(objective, "cpu")
    assert (seen.steps, seen.steps_per_epoch, seen.unseen) == (2 * BATCHES, BATCHES, "")
    assert max(graph.peak_live_bytes for graph in seen.phases.values()) > 4 * 2000 * 20, "the test"
    assert not [*tmp_path.iterdir()]


def test_transformers_says_its_steps(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(20, 3)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layer(x).mean()}

    def run(*callbacks: Any, **options: Any) -> None:
        arguments = transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no", **options
        )
        data = [{"x": torch.zeros(20)}] * 2 * BATCHES
        transformers.Trainer(Model(), arguments, train_dataset=data, eval_dataset=data[:8], callbacks=[*callbacks]).train()

    assert in_a_child(lambda: run(max_steps=150), "cpu").steps == 150
    assert in_a_child(lambda: run(num_train_epochs=2), "cpu").steps == 2 * BATCHES
    early = {"eval_strategy": "steps", "eval_steps": 500, "metric_for_best_model": "loss"}
    assert in_a_child(lambda: run(transformers.EarlyStoppingCallback(2), **early), "cpu").steps is None
