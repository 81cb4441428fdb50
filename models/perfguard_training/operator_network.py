"""Training of GuardNet's network for operators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from perfguard_models.operator_network import Network, OperatorNetwork, batches_of, columns_of
from perfguard_training.dataset import ALL_TABLES, Run
from perfguard_training.learner import Epochs, OnEpoch, identity_of, labels_of, shuffled

_HUBER = 0.1
_BOUND_WEIGHT = 0.3
_FARTHEST = 5.0


class TrainableNetwork(OperatorNetwork):
    """GuardNet's network for operators, with `fit`."""

    tables: ClassVar[tuple[str, ...]] = ALL_TABLES

    def fit(self, runs: Sequence[Run], *, on_epoch: OnEpoch | None = None, checkpoint: Path | None = None) -> None:
        """See :class:`perfguard_training.learner.Trainable`. A run without a measured peak bounds it by its card's memory."""
        torch.manual_seed(self.settings["seed"])
        self._fit_scale(runs)
        self.network = Network(self.settings["hidden"]).float()
        parameters = self.network.parameters()
        optimizer = torch.optim.AdamW(parameters, lr=self.settings["learning_rate"], weight_decay=1e-2)
        memory, time = (torch.from_numpy(labels_of(runs, target)).float() for target in ("memory", "time"))
        limit = torch.tensor([math.log(run.capacity_bytes) for run in runs])
        sign = torch.tensor([0.0 if "memory" in run.labels or run.is_single else -1.0 if run.fits else 1.0 for run in runs])
        epochs = self.settings["epochs"]
        steps = epochs * sum(1 for _ in batches_of(runs, range(len(runs))))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.settings["learning_rate"], total_steps=steps + epochs)
        identity = identity_of(self.name, self.settings, runs)
        kept = {"network": self.network, "optimizer": optimizer, "schedule": schedule}
        for epoch in Epochs(epochs, checkpoint, identity, **kept):
            self.network.train()
            total, number = 0.0, 0
            for indices in batches_of(runs, shuffled(len(runs), self.settings["seed"], epoch)):
                predicted_memory, predicted_time = self.network(self.pack([runs[index] for index in indices]))
                loss = _error(predicted_memory, memory[indices]) + _error(predicted_time, time[indices])
                outside = torch.relu(sign[indices] * (limit[indices] - predicted_memory)) / _HUBER
                loss = loss + _BOUND_WEIGHT * outside.clamp_max(_FARTHEST).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                total += float(loss.detach())
                number += 1
            if on_epoch is not None:
                on_epoch(epoch + 1, epochs, total / max(number, 1))

    def _fit_scale(self, runs: Sequence[Run]) -> None:
        sample = runs if len(runs) <= 1500 else [runs[index] for index in shuffled(len(runs), 0, 0)[:1500]]
        x = np.concatenate([columns_of(run) for run in sample])
        self.scale = torch.tensor(np.stack([x.mean(0), np.maximum(x.std(0), 0.05)]), dtype=torch.float32)


def _error(predicted: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    known = ~label.isnan()
    if not known.any():
        return predicted.sum() * 0
    return nn.functional.huber_loss(predicted[known], label[known], delta=_HUBER) / _HUBER
