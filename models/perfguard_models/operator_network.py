"""GuardNet's network for GPUs: every operator's roofline corrected by what it is and what surrounds it, then summed.

    t = sum over operators of count · roofline · exp(f(x, name, device))
    m = constant + most over operators of (live + traffic · exp(g(x, name, device)))

`f` starts at a constant and `g` at almost nothing, so that learning starts at physics. A sum for time and a maximum for memory
are what the quantities are; nothing is averaged, so a deeper network needs no other correction than a shallow one. One operator
measured alone is a step of one operator: tables of single operators and of whole networks teach the same function.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn
from torch_geometric.utils import scatter

from perfguard_models.dataset import ALL_TABLES, TARGETS, Run
from perfguard_models.learner import Epochs, OnEpoch, Predicted, State, identity_of, labels_of, shuffled
from perfguard_models.operators import COLUMNS, DEVICE_COLUMNS, NAMES

if TYPE_CHECKING:
    from typing_extensions import Self

_ROWS_A_BATCH = 12_000
_HUBER = 0.1
_TRAFFIC = [COLUMNS.index("log_read"), COLUMNS.index("log_written")]
_EMBEDDING = 12
_LOG_CONSTANT = 21.0
"""Where learning starts for what a run takes beside the replay's bytes, whatever its size: 1.2 GiB."""
_BOUND_WEIGHT = 0.3
_FARTHEST = 5.0
_DROPOUT = 0.05


class _Packed(NamedTuple):
    """Operators of B runs, N rows in all."""

    x: torch.Tensor  # shape: (N, len(COLUMNS) + len(DEVICE_COLUMNS))
    name: torch.Tensor  # shape: (N,)
    run: torch.Tensor  # shape: (N,)
    cost: torch.Tensor  # shape: (N,), log of count · roofline
    live: torch.Tensor  # shape: (N,), over the reserved bytes
    traffic: torch.Tensor  # shape: (N,), bytes over the reserved bytes
    reserved: torch.Tensor  # shape: (B,), log bytes


class _Network(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.name = nn.Embedding(len(NAMES) + 1, _EMBEDDING)
        self.body = nn.Sequential(
            nn.Linear(len(COLUMNS) + len(DEVICE_COLUMNS) + _EMBEDDING, hidden),
            nn.SiLU(),
            nn.Dropout(_DROPOUT),
            nn.Linear(hidden, hidden),
            nn.SiLU(),
        )
        self.slowdown, self.workspace = nn.Linear(hidden, 1), nn.Linear(hidden, 1)
        self.slack = nn.Parameter(torch.zeros(1))
        self.constant = nn.Parameter(torch.tensor([_LOG_CONSTANT]))
        for head, start in ((self.slowdown, 0.5), (self.workspace, -4.0)):
            nn.init.zeros_(head.weight)
            nn.init.constant_(head.bias, start)

    def forward(self, packed: _Packed) -> tuple[torch.Tensor, torch.Tensor]:
        """Log bytes and log seconds. Shapes: (B,), (B,)."""
        number = len(packed.reserved)
        state = self.body(torch.cat([packed.x, self.name(packed.name)], dim=1))
        log_time = packed.cost + self.slowdown(state)[:, 0].clamp(-4, 6)
        time = scatter(log_time.exp(), packed.run, dim_size=number, reduce="sum").clamp_min(1e-9).log()
        needed = packed.live + packed.traffic * self.workspace(state)[:, 0].clamp(-12, 5).exp()
        most = scatter(needed, packed.run, dim_size=number, reduce="max")
        memory = torch.logaddexp(packed.reserved + self.slack + most.clamp_min(1.0).log(), self.constant)
        return memory, time


class OperatorNetwork:
    """The network alone, without the trees beside it.

    Args:
        epochs: how often each run is seen.
        hidden: channels.
        learning_rate: of AdamW, at its highest.
        seed: of weights and order.
    """

    name: ClassVar[str] = "guardnet-network"
    views: ClassVar[tuple[str, ...]] = ("operators",)
    tables: ClassVar[tuple[str, ...]] = ALL_TABLES

    def __init__(self, *, epochs: int = 14, hidden: int = 128, learning_rate: float = 3e-3, seed: int = 0) -> None:
        self.settings: dict[str, Any] = {"epochs": epochs, "hidden": hidden, "learning_rate": learning_rate, "seed": seed}
        self._scale = torch.zeros(2, len(COLUMNS) + len(DEVICE_COLUMNS))
        self._network = _Network(hidden).float()

    def fit(self, runs: Sequence[Run], *, on_epoch: OnEpoch | None = None, checkpoint: Path | None = None) -> None:
        """See :class:`perfguard_models.learner.Learner`. A run without a measured peak still bounds it by its card's memory."""
        torch.manual_seed(self.settings["seed"])
        self._fit_scale(runs)
        self._network = _Network(self.settings["hidden"]).float()
        parameters = self._network.parameters()
        optimizer = torch.optim.AdamW(parameters, lr=self.settings["learning_rate"], weight_decay=1e-2)
        memory, time = (torch.from_numpy(labels_of(runs, target)).float() for target in ("memory", "time"))
        limit = torch.tensor([math.log(run.capacity_bytes) for run in runs])
        sign = torch.tensor(
            [0.0 if "memory" in run.labels or run.table == "operator" else -1.0 if run.fits else 1.0 for run in runs]
        )
        epochs = self.settings["epochs"]
        steps = epochs * sum(1 for _ in _parts(runs, range(len(runs))))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.settings["learning_rate"], total_steps=steps + epochs)
        identity = identity_of(self.name, self.settings, runs)
        kept = {"network": self._network, "optimizer": optimizer, "schedule": schedule}
        for epoch in Epochs(epochs, checkpoint, identity, **kept):
            self._network.train()
            total, number = 0.0, 0
            for indices in _parts(runs, shuffled(len(runs), self.settings["seed"], epoch)):
                predicted_memory, predicted_time = self._network(self._pack([runs[index] for index in indices]))
                loss = _error(predicted_memory, memory[indices]) + _error(predicted_time, time[indices])
                outside = torch.relu(sign[indices] * (limit[indices] - predicted_memory)) / _HUBER
                loss = loss + _BOUND_WEIGHT * outside.clamp_max(_FARTHEST).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self._network.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                total += float(loss.detach())
                number += 1
            if on_epoch is not None:
                on_epoch(epoch + 1, epochs, total / max(number, 1))

    def predict(self, runs: Sequence[Run]) -> Predicted:
        """See :class:`perfguard_models.learner.Learner`."""
        self._network.eval()
        found = {target: np.full(len(runs), np.nan) for target in TARGETS}
        with torch.inference_mode():
            for indices in _parts(runs, range(len(runs))):
                memory, time = self._network(self._pack([runs[index] for index in indices]))
                found["memory"][indices], found["time"][indices] = memory.double().numpy(), time.double().numpy()
        return found

    def state(self) -> tuple[State, Mapping[str, Any]]:
        """See :class:`perfguard_models.learner.Learner`."""
        return {"scale": self._scale, **{f"network.{k}": v for k, v in self._network.state_dict().items()}}, self.settings

    @classmethod
    def from_state(cls, tensors: State, settings: Mapping[str, Any]) -> Self:
        """See :class:`perfguard_models.learner.Learner`."""
        made = cls(**settings)
        made._scale = tensors["scale"]
        prefix = "network."
        made._network.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
        return made

    def _fit_scale(self, runs: Sequence[Run]) -> None:
        sample = runs if len(runs) <= 1500 else [runs[index] for index in shuffled(len(runs), 0, 0)[:1500]]
        x = np.concatenate([_columns(run) for run in sample])
        self._scale = torch.tensor(np.stack([x.mean(0), np.maximum(x.std(0), 0.05)]), dtype=torch.float32)

    def _pack(self, runs: Sequence[Run]) -> _Packed:
        sizes = [len(run.view["name"]) for run in runs]
        joined = {
            key: torch.from_numpy(np.concatenate([run.view[key] for run in runs])).float()
            for key in ("count", "roofline", "live")
        }
        x = torch.from_numpy(np.concatenate([_columns(run) for run in runs]))
        reserved = torch.tensor([float(run.view["reserved"][0]) for run in runs], dtype=torch.float32)
        run = torch.repeat_interleave(torch.arange(len(runs)), torch.tensor(sizes))
        moved = x[:, _TRAFFIC].exp().sum(1).clamp_min(1.0).log() - reserved[run]
        return _Packed(
            x=(x - self._scale[0]) / self._scale[1],
            name=torch.from_numpy(np.concatenate([run.view["name"] for run in runs])).long(),
            run=run,
            cost=(joined["count"] * joined["roofline"]).clamp_min(1e-9).log(),
            live=joined["live"],
            traffic=moved.exp(),
            reserved=reserved,
        )


def _columns(run: Run) -> Any:
    x = run.view["x"].astype(np.float32)
    return np.concatenate([x, np.broadcast_to(run.view["device"], (len(x), len(DEVICE_COLUMNS)))], axis=1)


def _error(predicted: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    known = ~label.isnan()
    if not known.any():
        return predicted.sum() * 0
    return nn.functional.huber_loss(predicted[known], label[known], delta=_HUBER) / _HUBER


def _parts(runs: Sequence[Run], order: Sequence[int]) -> Iterator[list[int]]:
    """Indices of runs that together have about as many operators each time."""
    chosen: list[int] = []
    rows = 0
    for index in order:
        chosen.append(index)
        rows += len(runs[index].view["name"])
        if rows >= _ROWS_A_BATCH:
            yield chosen
            chosen, rows = [], 0
    if chosen:
        yield chosen
