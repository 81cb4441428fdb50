"""PerfSeer: SeerNet-Multi, a graph network with node, edge and global features and a global node.

"PerfSeer: An Efficient and Accurate Deep Learning Models Performance Predictor". Section 3.1 has the features. Section 3.2 has
SeerBlock (equations 1 to 8), SynMM (figure 3) and the global node. SeerNet-Multi has a head for each quantity and trains with
PCGrad. Symbols are the paper's:
    v  nodes    e  edges    u  global features    z  the global node
Kinds of operators are not a feature, because the paper found that they hurt. Features in ``u`` distinguish devices.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import nn
from torch_geometric.data import Batch
from torch_geometric.utils import scatter, softmax

from perfguard_research.papers.graph_learner import NUM_EDGE, NUM_GLOBAL, NUM_NODE, GraphLearner
from perfguard_research.papers.layers import NODE_COLUMNS

_FLOPS = NODE_COLUMNS.index("flops")
_SIZES = [NODE_COLUMNS.index(name) for name in ("input_bytes", "weight_bytes", "output_bytes")]
_STATISTICS = 4


class PerfSeer(GraphLearner):
    """SeerNet-Multi: MSE, PCGrad between the quantities."""

    name = "perfseer"

    def make_network(self, hidden: int) -> nn.Module:
        return _SeerNetMulti(hidden, len(self.targets))

    def backward(self, losses: Sequence[torch.Tensor], network: nn.Module) -> None:
        pcgrad(losses, [p for p in network.parameters() if p.requires_grad])


def pcgrad(losses: Sequence[torch.Tensor], parameters: Sequence[nn.Parameter]) -> None:
    """Gradient surgery (Yu et al. 2020, algorithm 1): each task's gradient loses what points against another's."""
    if len(losses) == 1:
        losses[0].backward()
        return
    gradients = []
    for loss in losses:
        found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        gradients.append(
            torch.cat([torch.zeros(p.numel()) if g is None else g.flatten() for g, p in zip(found, parameters, strict=True)])
        )
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
        nodes = NUM_NODE + 5
        self.block = _SeerBlock(nodes, NUM_EDGE, NUM_GLOBAL + 3 + 2 * _STATISTICS + 2, hidden)
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)) for _ in range(outputs)
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        v, u = _with_intensity(batch), _with_profile(batch)
        embedding = self.block(v, batch.edge_attr, u, batch.edge_index, batch.batch)
        return torch.cat([head(embedding) for head in self.heads], dim=1)


def _with_intensity(batch: Batch) -> torch.Tensor:
    """Adds v^a, the arithmetic intensity, and v^p, shares of the model's FLOPs, memory access and weights."""
    x = batch.x
    flops, access, weights = x[:, _FLOPS], x[:, _SIZES].logsumexp(1), x[:, _SIZES[1]]
    shares = [softmax(values, batch.batch, num_nodes=batch.num_graphs) for values in (flops, access, weights)]
    return torch.cat([x, access[:, None], (flops - access)[:, None], *(share[:, None] for share in shares)], dim=1)


def _with_profile(batch: Batch) -> torch.Tensor:
    """Adds u^gp (nodes, edges, density), and total, mean, median and most of FLOPs and memory access (u^c, u^m, u^a)."""
    number = batch.num_graphs
    of_edge = batch.batch[batch.edge_index[0]]
    nodes = torch.bincount(batch.batch, minlength=number).float()
    edges = torch.bincount(of_edge, minlength=number).float()
    density = edges / (nodes * (nodes - 1)).clamp_min(1)
    statistics = []
    for values in (batch.x[:, _FLOPS], batch.x[:, _SIZES].logsumexp(1)):
        total = scatter(values.exp(), batch.batch, dim_size=number, reduce="sum").clamp_min(1e-6).log()
        mean = scatter(values, batch.batch, dim_size=number, reduce="mean")
        most = scatter(values, batch.batch, dim_size=number, reduce="max")
        middle = torch.stack([values[batch.ptr[i] : batch.ptr[i + 1]].median() for i in range(number)])
        statistics += [total, mean, middle, most]
    delivered = scatter(batch.edge_attr[:, 0], of_edge, dim_size=number, reduce="mean")
    statistics.append(statistics[0] - statistics[_STATISTICS])
    added = torch.stack([nodes.log() / 8, edges.clamp_min(1).log() / 8, density * 10, *statistics, delivered], dim=1)
    return torch.cat([batch.globals, added], dim=1)


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

    def forward(
        self, v: torch.Tensor, e: torch.Tensor, u: torch.Tensor, edge_index: torch.Tensor, batch: torch.Tensor
    ) -> torch.Tensor:
        source, target = edge_index
        number = len(u)
        z = _softmax_sum(v, batch, number)  # the global node's start
        e = self.of_edge(torch.cat([e, v[source], v[target]], dim=1))  # (2)
        gathered = scatter(e, target, dim=0, dim_size=len(v), reduce="mean")  # (3)
        v_new = self.of_node(torch.cat([gathered, v + z[batch], u[batch]], dim=1))  # (4)
        z = self.of_global_node(_softmax_sum(v_new, batch, number) + self.enter_global_node(z))  # (5), (6)
        highest = scatter(v_new, batch, dim=0, dim_size=number, reduce="max")
        mean = scatter(v_new, batch, dim=0, dim_size=number, reduce="mean")
        pooled = self.synergy(torch.stack([highest, mean], dim=2))[:, :, 0]  # (7): SynMM
        out: torch.Tensor = self.of_facts(torch.cat([pooled, z, u], dim=1))  # (8)
        return out


def _softmax_sum(values: torch.Tensor, batch: torch.Tensor, number: int) -> torch.Tensor:
    weight = softmax(values, batch, num_nodes=number)
    summed: torch.Tensor = scatter(weight * values, batch, dim=0, dim_size=number, reduce="sum")
    return summed


def _mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU())
