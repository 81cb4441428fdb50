"""GuardNet's network for GPUs: every operator's roofline corrected by what it is and what surrounds it, then summed.

    t = sum over operators of count · roofline · exp(f(x, name, device))
    m = constant + most over operators of (live + traffic · exp(g(x, name, device)))

`f` starts at a constant and `g` at almost nothing, so learning starts at physics. Time is a sum over operators, and memory is a
maximum. Nothing is averaged, so a deeper network needs the same correction as a shallow one. One operator measured alone is a
step of one operator. So tables of single operators and of whole networks train the same function.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn
from torch_geometric.utils import scatter

from perfguard_models.features.operators import COLUMNS, DEVICE_COLUMNS, NAMES
from perfguard_models.learner import TARGETS, Example, Predicted, State

if TYPE_CHECKING:
    from typing_extensions import Self

_ROWS_A_BATCH = 12_000
_TRAFFIC = [COLUMNS.index("log_read"), COLUMNS.index("log_written")]
_EMBEDDING = 12
_LOG_CONSTANT = 21.0
"""Initial value of the constant memory beside the replay's bytes, as a logarithm: 1.2 GiB."""
_DROPOUT = 0.05


class Packed(NamedTuple):
    """Operators of B runs, N rows in all."""

    x: torch.Tensor  # shape: (N, len(COLUMNS) + len(DEVICE_COLUMNS))
    name: torch.Tensor  # shape: (N,)
    run: torch.Tensor  # shape: (N,)
    cost: torch.Tensor  # shape: (N,), log of count · roofline
    live: torch.Tensor  # shape: (N,), over the reserved bytes
    traffic: torch.Tensor  # shape: (N,), bytes over the reserved bytes
    reserved: torch.Tensor  # shape: (B,), log bytes


class Network(nn.Module):
    """The weights."""

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

    def forward(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
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

    def __init__(self, *, epochs: int = 14, hidden: int = 128, learning_rate: float = 3e-3, seed: int = 0) -> None:
        self.settings: dict[str, Any] = {"epochs": epochs, "hidden": hidden, "learning_rate": learning_rate, "seed": seed}
        self.scale = torch.zeros(2, len(COLUMNS) + len(DEVICE_COLUMNS))
        self.network = Network(hidden).float()

    def predict(self, runs: Sequence[Example]) -> Predicted:
        """See :class:`perfguard_models.learner.Learner`."""
        self.network.eval()
        found = {target: np.full(len(runs), np.nan) for target in TARGETS}
        with torch.inference_mode():
            for indices in batches_of(runs, range(len(runs))):
                memory, time = self.network(self.pack([runs[index] for index in indices]))
                found["memory"][indices], found["time"][indices] = memory.double().numpy(), time.double().numpy()
        return found

    def state(self) -> tuple[State, Mapping[str, Any]]:
        """See :class:`perfguard_models.learner.Learner`."""
        return {"scale": self.scale, **{f"network.{k}": v for k, v in self.network.state_dict().items()}}, self.settings

    @classmethod
    def from_state(cls, tensors: State, settings: Mapping[str, Any]) -> Self:
        """See :class:`perfguard_models.learner.Learner`."""
        made = cls(**settings)
        made.scale = tensors["scale"]
        prefix = "network."
        made.network.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
        return made

    def pack(self, runs: Sequence[Example]) -> Packed:
        """Input of the network for ``runs``."""
        sizes = [len(run.view["name"]) for run in runs]
        joined = {
            key: torch.from_numpy(np.concatenate([run.view[key] for run in runs])).float()
            for key in ("count", "roofline", "live")
        }
        x = torch.from_numpy(np.concatenate([columns_of(run) for run in runs]))
        reserved = torch.tensor([float(run.view["reserved"][0]) for run in runs], dtype=torch.float32)
        run = torch.repeat_interleave(torch.arange(len(runs)), torch.tensor(sizes))
        moved = x[:, _TRAFFIC].exp().sum(1).clamp_min(1.0).log() - reserved[run]
        return Packed(
            x=(x - self.scale[0]) / self.scale[1],
            name=torch.from_numpy(np.concatenate([run.view["name"] for run in runs])).long(),
            run=run,
            cost=(joined["count"] * joined["roofline"]).clamp_min(1e-9).log(),
            live=joined["live"],
            traffic=moved.exp(),
            reserved=reserved,
        )


def columns_of(run: Example) -> Any:
    """The operators' columns and the device's. Shape: (rows, len(COLUMNS) + len(DEVICE_COLUMNS))."""
    x = run.view["x"].astype(np.float32)
    return np.concatenate([x, np.broadcast_to(run.view["device"], (len(x), len(DEVICE_COLUMNS)))], axis=1)


def batches_of(runs: Sequence[Example], order: Sequence[int]) -> Iterator[list[int]]:
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
