"""Training of the papers' graph networks: the same data and loop for all, with each paper's features, network and loss.

They predict standardised logarithms of all targets that have labels, with one output each. The papers regress the plain quantity
of one device and one range of sizes. Here steps take from a millisecond to ten seconds, and in plain units only the longest
would count. Features are taken as log(1 + value) before they are scaled, for the same reason. Both help the papers' networks.
Predictions are also limited to the range of the training labels, plus one standard deviation. This helps, too, because a network
without physics may predict anything far from its training data.

Of each kind of table, an eighth of the runs is held out of each training, by family. The weights are those of the epoch with the
smallest error there. One network serves all devices, and the device is a feature. Most papers train one for each.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch_geometric.data import Batch, Data

from perfguard.graph import OP_KINDS
from perfguard_models.features import Arrays, FeatureSet
from perfguard_models.learner import QUANTITIES, Example, Predicted, State
from perfguard_research.dataset import STEPS, Fold, Run, folds
from perfguard_research.learners import OnEpoch, batches, labels_of, seed_of
from perfguard_research.papers.layers import EDGE_COLUMNS, GLOBAL_COLUMNS, KERNELS, LAYERS, NODE_COLUMNS, trains

NUM_KINDS = len(OP_KINDS)
NUM_NODE = len(NODE_COLUMNS)
NUM_EDGE = len(EDGE_COLUMNS)
NUM_GLOBAL = len(GLOBAL_COLUMNS)
_NODES_A_BATCH = 2_000
_MARGIN = 1.0
_SCALERS = ("nodes", "edges", "globals")
_VALIDATION = 8
"""One part of so many is held out."""


def kinds_of(graphs: Data, number: int = NUM_KINDS) -> torch.Tensor:
    """Kinds of the operators, one-hot. Shape: (n, number)."""
    return nn.functional.one_hot(graphs.kind, number).float()


class GraphLearner:
    """A graph network on the features of a paper. Subclasses say which one.

    Args:
        epochs: the most epochs. Training ends sooner after a third of them without a smaller validation error.
        hidden: channels. The papers have 256 (PerfSeer, LILOU's latency), 512 (DIPPM), and the number of features (DNNPerf). This
            default and that of ``epochs`` are for a thousand runs and some minutes of one core.
        learning_rate: of Adam, at the start. It falls to zero along half a cosine. None: ``usual_rate``.
        seed: of the weights, of the order of the runs and of the validation families.
    """

    name: ClassVar[str]
    network_class: ClassVar[type[nn.Module]]
    """Makes the network of so many channels and outputs: a batch of B graphs with n operators and m tensors → (B, outputs).

    The batch has ``edge_index`` (2, m) and ``batch`` (n,) as PyG writes them, ``kind`` (n,), the scaled features ``nodes``
    (n, columns), ``edges`` (m, columns) and ``globals`` (B, columns), and ``kernel_index`` (n,): which kernel an operator runs
    in. Where the learner does not read KERNELS, each operator is one.
    """
    views: ClassVar[tuple[FeatureSet, ...]] = (LAYERS,)
    tables: ClassVar[tuple[str, ...]] = STEPS
    targets: ClassVar[tuple[str, ...]] = ("memory", "time")
    mode: ClassVar[str] = ""
    """The paper's scope: "train", "infer", or "" for both. Other runs are neither learnt from nor predicted."""
    scaling: ClassVar[str] = "standard"
    """"standard" (zero mean, unit variance) or "minmax" (0 to 1)."""
    scales_labels: ClassVar[bool] = True
    """False: labels are only centred, so that a sum of parts stays one."""
    loss: ClassVar[nn.Module] = nn.MSELoss()
    """Of one target: predicted and measured, both (n,)."""
    usual_rate: ClassVar[float] = 2e-3

    def __init__(self, *, epochs: int = 30, hidden: int = 64, learning_rate: float | None = None, seed: int = 0) -> None:
        rate = self.usual_rate if learning_rate is None else learning_rate
        self.settings: dict[str, Any] = {"epochs": epochs, "hidden": hidden, "learning_rate": rate, "seed": seed}
        self._scale: dict[str, torch.Tensor] = {}
        self._labels = torch.zeros(4, len(self.targets))
        """Mean, scale, and scaled minimum and maximum of each target; NaN: no labels."""
        self._labels[1] = 1
        self._labels[2:] = math.nan
        self._network = self._new_network()

    def _new_network(self) -> nn.Module:
        return self.network_class(self.settings["hidden"], len(self.targets))

    def backward(self, losses: Sequence[torch.Tensor], network: nn.Module) -> None:
        """Gradients of the sum of the targets' losses."""
        torch.stack(list(losses)).sum().backward()

    def features(self, view: Arrays) -> tuple[npt.NDArray[np.float32], ...]:
        """Features of nodes, edges and the graph, in plain units."""
        return view["nodes"], view["edges"], view["globals"]

    def fit(self, runs: Sequence[Run], *, on_epoch: OnEpoch | None = None) -> None:
        """See :class:`perfguard_research.learners.Trainable`. Runs without any label or outside the scope are passed over."""
        torch.manual_seed(self.settings["seed"])
        runs = [run for run in runs if self._applies(run) and not run.labels.keys().isdisjoint(self.targets)]
        if not runs:
            return
        self._fit_scale(runs)
        labels = self._fit_labels(np.stack([labels_of(runs, target) for target in self.targets], axis=1))
        graphs = [self._graph(run.view) for run in runs]
        sizes = [graph.num_nodes for graph in graphs]
        every = list(range(len(runs)))
        seed = self.settings["seed"]
        parts = [Fold("", every, every), *folds(runs, "family", number=_VALIDATION, seed=seed)]
        learn, judge = parts[-1].learn, parts[-1].judge  # the largest families are in the first parts
        network = self._network = self._new_network()
        optimizer = torch.optim.Adam(network.parameters(), lr=self.settings["learning_rate"])
        epochs = self.settings["epochs"]
        best = math.inf
        kept = network.state_dict()
        best_epoch = 0
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
        for epoch in range(epochs):
            network.train()
            order = [*learn]
            random.Random(seed_of(seed, epoch)).shuffle(order)
            for chosen in batches(sizes, order, _NODES_A_BATCH):
                losses = []
                for column, measured in enumerate(labels.T):
                    known = [i for i in chosen if not measured[i].isnan()]  # PCGrad would go back through all others, too
                    if known:
                        predicted = network(Batch.from_data_list([graphs[i] for i in known]))[:, column]
                        losses.append(self.loss(predicted, measured[known]))
                optimizer.zero_grad()
                self.backward(losses, network)
                nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                optimizer.step()
            schedule.step()
            error = float((self._outputs(graphs, judge) - labels[judge]).abs().nanmean(0).nansum())
            if on_epoch is not None:
                on_epoch(epoch + 1, epochs, error)
            if error < best:
                best = error
                kept = copy.deepcopy(network.state_dict())
                best_epoch = epoch
            elif epoch - best_epoch > epochs // 3:
                break
        network.load_state_dict(kept)

    def predict(self, runs: Sequence[Example]) -> Predicted:
        out = torch.full((len(runs), len(QUANTITIES)), math.nan, dtype=torch.float64)
        own = [at for at, run in enumerate(runs) if self._applies(run)]
        columns = [QUANTITIES.index(target) for target in self.targets]
        for start in range(0, len(own), 500):  # the scaled features of all would be much
            some = own[start : start + 500]
            scaled = self._outputs([self._graph(runs[at].view) for at in some], range(len(some)))
            limited = scaled.clamp(self._labels[2], self._labels[3]) * self._labels[1] + self._labels[0]
            out[torch.tensor(some)[:, None], torch.tensor(columns)] = limited.double()
        return {target: out[:, at].numpy() for at, target in enumerate(QUANTITIES)}

    def state(self) -> tuple[State, Mapping[str, Any]]:
        network = {f"network.{key}": value for key, value in self._network.state_dict().items()}
        return {**network, **{f"scale.{key}": value for key, value in self._scale.items()}, "labels": self._labels}, self.settings

    @classmethod
    def from_state(cls, tensors: State, settings: Mapping[str, Any]) -> GraphLearner:
        made = cls(**settings)
        network, made._scale = (
            {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            for prefix in ("network.", "scale.")
        )
        made._labels = tensors["labels"]
        made._network.load_state_dict(network)
        return made

    def _applies(self, run: Example) -> bool:
        return not self.mode or trains(run.view) == (self.mode == "train")

    def _fit_scale(self, runs: Sequence[Example]) -> None:
        for key, parts in zip(_SCALERS, zip(*(self.features(run.view) for run in runs), strict=True), strict=True):
            values = np.log1p(np.concatenate([np.atleast_2d(part) for part in parts]))
            if self.scaling == "minmax":
                low = values.min(0)
                width = np.ptp(values, axis=0)
            else:
                low = values.mean(0, dtype=np.float64)
                width = values.std(0, dtype=np.float64)
            self._scale[key] = torch.tensor(np.stack([low, np.maximum(width, 1e-3)]), dtype=torch.float32)

    def _fit_labels(self, y: npt.NDArray[np.float64]) -> torch.Tensor:
        """Scaled labels. Shapes: (n, len(targets)) → the same; NaN: not measured."""
        for at, column in enumerate(y.T):
            if len(seen := column[~np.isnan(column)]):
                mean = seen.mean()
                scale = max(seen.std(), 1e-3) if self.scales_labels else 1.0
                low = (seen.min() - mean) / scale - _MARGIN
                high = (seen.max() - mean) / scale + _MARGIN
                self._labels[:, at] = torch.tensor([mean, scale, low, high])
        return (torch.from_numpy(y).float() - self._labels[0]) / self._labels[1]

    def _graph(self, view: Arrays) -> Data:
        scaled = {}
        for key, values in zip(_SCALERS, self.features(view), strict=True):
            low, width = self._scale[key]
            scaled[key] = (torch.from_numpy(np.atleast_2d(values)).log1p() - low) / width
        number = len(view["kind"])
        return Data(
            kind=torch.from_numpy(view["kind"]),
            edge_index=torch.from_numpy(view["edge_index"]),
            kernel_index=torch.from_numpy(view["kernel"]) if KERNELS in self.views else torch.arange(number),
            num_nodes=number,
            **scaled,
        )

    def _outputs(self, graphs: Sequence[Data], order: Sequence[int]) -> torch.Tensor:
        self._network.eval()
        chosen = batches([graph.num_nodes for graph in graphs], order, _NODES_A_BATCH)
        with torch.inference_mode():
            outputs = [self._network(Batch.from_data_list([graphs[i] for i in some])) for some in chosen]
            return torch.cat([torch.zeros(0, len(self.targets)), *outputs])
