"""PerfSeer: SeerNet-Multi, a graph network with node, edge and global features and a global node.

"PerfSeer: An Efficient and Accurate Deep Learning Models Performance Predictor". Section 3.1 has the features. Section 3.2 has
SeerBlock (equations 1 to 8), SynMM (figure 3) and the global node. SeerNet-Multi has a head for each quantity and trains with
PCGrad. Symbols are the paper's:
    v  nodes    e  edges    u  global features    z  the global node
Kinds of operators are not a feature, because the paper found that they hurt. Arithmetic intensity, proportions and statistics are
computed from FLOPs and bytes, and scaled afterwards like all features.

Deviations:
- Features in ``u`` distinguish devices, precisions and phases. The paper trains anew for a device, and has a head for each phase.
- A linear map takes the global node from the width of the features to that of the hidden layer.
- SynMM has two weights and a bias for all channels. The paper leaves their number open.
- SM utilisation is only predicted where a run with such a label has the device and all kinds of operators.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import SoftmaxAggregation, global_max_pool, global_mean_pool
from torch_geometric.utils import scatter

from perfguard_models.features import Arrays
from perfguard_models.learner import QUANTITIES, Example, Predicted
from perfguard_research.dataset import STEPS, Run
from perfguard_research.learners import OnEpoch
from perfguard_research.papers.graph_learner import NUM_EDGE, NUM_GLOBAL, NUM_KINDS, NUM_NODE, GraphLearner
from perfguard_research.papers.layers import DEVICE_COLUMNS, NODE_COLUMNS

_FLOPS = NODE_COLUMNS.index("flops")
_WEIGHTS = NODE_COLUMNS.index("weight_bytes")
_SIZES = [NODE_COLUMNS.index(name) for name in ("input_bytes", "weight_bytes", "output_bytes")]
_OF_NODE = 5
_OF_MODEL = 17
_LABELLED = NUM_KINDS + NUM_GLOBAL - DEVICE_COLUMNS.start
_UTILISATION = ("gpu_util", "sm_active")


def pcgrad(losses: Sequence[torch.Tensor], parameters: Sequence[nn.Parameter]) -> None:
    """Gradient surgery (Yu et al. 2020, algorithm 1): each task's gradient loses what points against another's."""
    every = (torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True) for loss in losses)
    gradients = [nn.utils.parameters_to_vector(own) for own in every]
    total = torch.zeros_like(gradients[0])
    for index, own in enumerate(gradients):
        projected = own.clone()
        others = [other for at, other in enumerate(gradients) if at != index]
        for other in random.Random(index).sample(others, len(others)):
            product = projected @ other
            if product < 0:
                projected -= product / other.square().sum().clamp_min(1e-12) * other
        total += projected
    for parameter, gradient in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = gradient.view_as(parameter)


class _SeerNetMulti(nn.Module):
    def __init__(self, hidden: int, outputs: int) -> None:
        super().__init__()
        self.block = _SeerBlock(NUM_NODE + _OF_NODE, NUM_EDGE, NUM_GLOBAL + _OF_MODEL, hidden)
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)) for _ in range(outputs)
        )

    def forward(self, graphs: Data) -> torch.Tensor:
        embedding = self.block(graphs.nodes, graphs.edges, graphs.globals, graphs.edge_index, graphs.batch)
        return torch.cat([head(embedding) for head in self.heads], dim=1)


class _SeerBlock(nn.Module):
    """Equations 1 to 8."""

    def __init__(self, nodes: int, edges: int, facts: int, hidden: int) -> None:
        super().__init__()
        self.of_edge = _mlp(edges + 2 * nodes, hidden)
        self.of_node = _mlp(hidden + nodes + facts, hidden)
        self.of_global_node = nn.Sequential(_mlp(hidden, hidden), _mlp(hidden, hidden))
        self.enter_global_node = nn.Linear(nodes, hidden)
        self.of_facts = _mlp(2 * hidden + facts, hidden)
        self.synergy = nn.Linear(2, 1)
        self.gather = SoftmaxAggregation()

    def forward(
        self, v: torch.Tensor, e: torch.Tensor, u: torch.Tensor, edge_index: torch.Tensor, batch: torch.Tensor
    ) -> torch.Tensor:
        source, target = edge_index
        number = len(u)
        z = self.gather(v, batch, dim_size=number)  # the global node's start
        e = self.of_edge(torch.cat([e, v[source], v[target]], dim=1))  # (2)
        gathered = scatter(e, target, dim=0, dim_size=len(v), reduce="mean")  # (3)
        v_new = self.of_node(torch.cat([gathered, v + z[batch], u[batch]], dim=1))  # (4)
        z = self.of_global_node(self.gather(v_new, batch, dim_size=number) + self.enter_global_node(z))  # (5), (6)
        both = [pool(v_new, batch, number) for pool in (global_max_pool, global_mean_pool)]
        pooled = self.synergy(torch.stack(both, dim=2))[:, :, 0]  # (7): SynMM
        out: torch.Tensor = self.of_facts(torch.cat([pooled, z, u], dim=1))  # (8)
        return out


def _mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU())


class PerfSeer(GraphLearner):
    """SeerNet-Multi: MSE, PCGrad between the quantities."""

    name = "perfseer"
    tables = (*STEPS, "perceptron")
    targets = QUANTITIES
    network_class = _SeerNetMulti

    def features(self, view: Arrays) -> tuple[npt.NDArray[np.float32], ...]:
        """The paper's, with what it computes from FLOPs and bytes: v^m, v^a, v^p, and u^gp, u^c, u^m, u^a."""
        nodes = view["nodes"]
        edges = view["edges"]
        facts = view["globals"]
        number = len(nodes)
        arcs = len(edges)
        costs = np.stack([nodes[:, _FLOPS], nodes[:, _SIZES].sum(1), nodes[:, _WEIGHTS]])  # FLOPs, memory access, weights
        totals = costs.sum(1)
        intensity = costs[0] / np.maximum(costs[1], 1)
        proportions = costs / np.maximum(totals, 1)[:, None]
        statistics = np.stack([totals, costs.mean(1), np.median(costs, axis=1), costs.max(1)])
        delivered = edges[:, 0].mean() if arcs else 0
        density = 100 * arcs / max(number * (number - 1), 1)
        of_model = [number, arcs, density, *statistics.ravel(), delivered, totals[0] / max(totals[1], 1)]
        return (
            np.column_stack([nodes, costs[1], intensity, proportions.T]),
            edges,
            np.concatenate([facts, np.array(of_model, dtype=np.float32)]),
        )

    def backward(self, losses: Sequence[torch.Tensor], network: nn.Module) -> None:
        pcgrad(losses, [p for p in network.parameters() if p.requires_grad])

    def fit(self, runs: Sequence[Run], *, on_epoch: OnEpoch | None = None) -> None:
        # Kinds of operators (0 or 1) and features of the device of the runs with utilisation. Shape: (rows, _LABELLED).
        rows = {_kinds_and_device(run) for run in runs if not run.labels.keys().isdisjoint(_UTILISATION)}
        self._scale["labelled"] = torch.tensor(sorted(rows)).reshape(len(rows), _LABELLED)
        super().fit(runs, on_epoch=on_epoch)

    def predict(self, runs: Sequence[Example]) -> Predicted:
        found = super().predict(runs)
        kinds, devices = self._scale["labelled"].split([NUM_KINDS, _LABELLED - NUM_KINDS], dim=1)
        for at, run in enumerate(runs):
            own_kinds, own_device = torch.tensor(_kinds_and_device(run)).split([NUM_KINDS, _LABELLED - NUM_KINDS])
            if not ((kinds >= own_kinds).all(1) & (devices == own_device).all(1)).any():
                for target in _UTILISATION:
                    found[target][at] = math.nan
        return found


def _kinds_and_device(run: Example) -> tuple[float, ...]:
    kinds = np.bincount(run.view["kind"], minlength=NUM_KINDS) > 0
    return (*kinds.astype(float).tolist(), *run.view["globals"][DEVICE_COLUMNS].tolist())
