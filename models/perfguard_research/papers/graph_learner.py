"""Training of the papers' graph networks: the same data and loop for all, with each paper's features, network and loss.

They predict standardised logarithms of all targets that have labels, with one output each. The papers regress the plain quantity
of one device and one range of sizes. Here steps take from a millisecond to ten seconds, and in plain units only the longest
would count. Sizes are taken as log(1 + size) before they are scaled, for the same reason. Both help the papers' networks.
Predictions are also limited to the range of the training labels, plus one standard deviation. This helps, too, because a network
without physics may predict anything far from its training data.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch_geometric.data import Batch, Data

from perfguard.graph import OP_KINDS
from perfguard_models.learner import TARGETS, Example, Predicted, State
from perfguard_research.dataset import STEPS, Run
from perfguard_research.learners import OnEpoch, labels_of, shuffled
from perfguard_research.papers.layers import EDGE_COLUMNS, GLOBAL_COLUMNS, NODE_COLUMNS

if TYPE_CHECKING:
    from typing_extensions import Self

_NODES_A_BATCH = 6_000
_MARGIN = 1.0
_SCALERS = ("nodes", "edges", "globals")


class GraphLearner(ABC):
    """A graph network on the forward graph. Subclasses say which one.

    Args:
        epochs: how often each run is seen.
        hidden: channels. None: the paper's number.
        learning_rate: of Adam, at the start. It falls to zero along half a cosine.
        most_runs: the most runs, drawn with the seed. A core handles that many in a minute.
        seed: of the weights and of the order of the runs.
    """

    name: ClassVar[str]
    views: ClassVar[tuple[str, ...]] = ("layers",)
    tables: ClassVar[tuple[str, ...]] = STEPS
    targets: ClassVar[tuple[str, ...]] = TARGETS
    scaling: ClassVar[str] = "standard"
    """"standard" (zero mean, unit variance) or "minmax" (0 to 1)."""
    scales_labels: ClassVar[bool] = True
    """False: labels are only centred, so that a sum of parts stays one."""

    def __init__(
        self, *, epochs: int = 5, hidden: int = 64, learning_rate: float = 2e-3, most_runs: int = 2500, seed: int = 0
    ) -> None:
        self.settings: dict[str, Any] = {
            "epochs": epochs, "hidden": hidden, "learning_rate": learning_rate, "most_runs": most_runs, "seed": seed,
        }  # fmt: skip
        self._scale: dict[str, torch.Tensor] = {}
        self._labels = torch.zeros(4, len(self.targets))
        """Mean, scale, and scaled minimum and maximum of each target; NaN: no labels."""
        self._labels[1], self._labels[2:] = 1, math.nan
        self._network: nn.Module | None = None

    @abstractmethod
    def make_network(self, hidden: int) -> nn.Module:
        """The network: a Batch with x, kind, edge_index, edge_attr, globals → standardised targets, shape (B, len(targets))."""

    def loss(self, predicted: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of one target, predicted and measured, both (n,)."""
        return nn.functional.mse_loss(predicted, labels)

    def backward(self, losses: Sequence[torch.Tensor], network: nn.Module) -> None:
        """Gradients of the sum of the targets' losses."""
        torch.stack(list(losses)).sum().backward()

    def fit(self, runs: Sequence[Run], *, on_epoch: OnEpoch | None = None) -> None:
        """See :class:`perfguard_research.learners.Trainable`. Runs without any label are passed over."""
        torch.manual_seed(self.settings["seed"])
        y = np.stack([labels_of(runs, target) for target in self.targets], axis=1)
        known = [index for index in range(len(runs)) if not np.isnan(y[index]).all()]
        if len(known) > self.settings["most_runs"]:
            known = sorted(random.Random(self.settings["seed"]).sample(known, self.settings["most_runs"]))
        runs, y = [runs[index] for index in known], y[known]
        self._fit_scale(runs)
        with np.errstate(invalid="ignore"):
            for at in range(len(self.targets)):
                column = y[:, at][~np.isnan(y[:, at])]
                if len(column):
                    self._labels[:2, at] = torch.tensor([column.mean(), max(column.std(), 1e-3) if self.scales_labels else 1.0])
        labels = (torch.from_numpy(y).float() - self._labels[0]) / self._labels[1]
        for at, column in enumerate(labels.T):
            if len(seen := column[~column.isnan()]):
                self._labels[2:, at] = torch.stack([seen.min() - _MARGIN, seen.max() + _MARGIN])
        self._network = self.make_network(self.settings["hidden"])
        optimizer = torch.optim.Adam(self._network.parameters(), lr=self.settings["learning_rate"])
        epochs = self.settings["epochs"]
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
        for epoch in range(epochs):
            self._network.train()
            total, number = 0.0, 0
            for indices, batch in self._batches(runs, shuffled(len(runs), self.settings["seed"], epoch)):
                predicted, wanted = self._network(batch), labels[indices]
                losses = [
                    self.loss(predicted[there, at], wanted[there, at])
                    for at in range(len(self.targets))
                    if (there := ~wanted[:, at].isnan()).any()
                ]
                optimizer.zero_grad()
                self.backward(losses, self._network)
                nn.utils.clip_grad_norm_(self._network.parameters(), 1.0)
                optimizer.step()
                total += float(sum(loss.detach() for loss in losses))
                number += 1
            schedule.step()
            if on_epoch is not None:
                on_epoch(epoch + 1, epochs, total / max(number, 1))

    def predict(self, runs: Sequence[Example]) -> Predicted:
        if self._network is None:
            raise RuntimeError(f"{self.name} was not fitted.")
        self._network.eval()
        out = torch.full((len(runs), len(self.targets)), math.nan, dtype=torch.float64)
        with torch.inference_mode():
            for indices, batch in self._batches(runs, range(len(runs))):
                scaled = self._network(batch).clamp(self._labels[2], self._labels[3])
                out[indices] = (scaled * self._labels[1] + self._labels[0]).double()
        found = {target: out[:, at].numpy() for at, target in enumerate(self.targets)}
        return {target: found.get(target, np.full(len(runs), math.nan)) for target in TARGETS}

    def state(self) -> tuple[State, Mapping[str, Any]]:
        if self._network is None:
            raise RuntimeError(f"{self.name} was not fitted.")
        network = {f"network.{key}": value for key, value in self._network.state_dict().items()}
        return {**network, **{f"scale.{key}": value for key, value in self._scale.items()}, "labels": self._labels}, self.settings

    @classmethod
    def from_state(cls, tensors: State, settings: Mapping[str, Any]) -> Self:
        made = cls(**settings)
        made._scale = {key: tensors[f"scale.{key}"] for key in _SCALERS}
        made._labels = tensors["labels"]
        made._network = made.make_network(settings["hidden"])
        prefix = "network."
        made._network.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
        return made

    def _fit_scale(self, runs: Sequence[Example]) -> None:
        sample = runs if len(runs) <= 2000 else random.Random(0).sample(list(runs), 2000)
        for key in _SCALERS:
            values = np.log1p(np.concatenate([np.atleast_2d(run.view[key]) for run in sample]).astype(np.float64))
            if self.scaling == "minmax":
                low, high = values.min(0), values.max(0)
            else:
                low, high = values.mean(0), values.mean(0) + values.std(0)
            self._scale[key] = torch.tensor(np.stack([low, np.maximum(high - low, 1e-3)]), dtype=torch.float32)

    def _scaled(self, key: str, values: Any) -> torch.Tensor:
        low, width = self._scale[key]
        scaled: torch.Tensor = (torch.log1p(torch.from_numpy(values).float()) - low) / width
        return scaled

    def _data(self, run: Example) -> Data:
        return Data(
            x=self._scaled("nodes", run.view["nodes"]),
            kind=torch.from_numpy(run.view["kind"]).long(),
            edge_index=torch.from_numpy(run.view["edge_index"]).long(),
            edge_attr=self._scaled("edges", run.view["edges"]),
            globals=self._scaled("globals", run.view["globals"])[None],
            num_nodes=len(run.view["kind"]),
        )

    def _batches(self, runs: Sequence[Example], order: Sequence[int]) -> Iterator[tuple[list[int], Batch]]:
        chosen: list[int] = []
        num_nodes = 0
        for position, index in enumerate(order):
            chosen.append(index)
            num_nodes += len(runs[index].view["kind"])
            if num_nodes >= _NODES_A_BATCH or position == len(order) - 1:
                yield chosen, Batch.from_data_list([self._data(runs[i]) for i in chosen])
                chosen, num_nodes = [], 0


NUM_KINDS, NUM_NODE, NUM_EDGE, NUM_GLOBAL = len(OP_KINDS), len(NODE_COLUMNS), len(EDGE_COLUMNS), len(GLOBAL_COLUMNS)


def one_hot_kinds(batch: Batch) -> torch.Tensor:
    """Kinds of the operators, one-hot. Shape: (N, NUM_KINDS)."""
    return nn.functional.one_hot(batch.kind, NUM_KINDS).float()
