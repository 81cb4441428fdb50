"""LILOU's latency head: graph attention within each kernel, and a sum over kernels.

"LILOU: Resource-aware Model-driven Latency Prediction For GPU-accelerated Model Serving". Table 1 has the features of a layer:
type, input, output and parameter sizes, FLOPs. Table 2 has those of the device. Section 3.2.2 has the head. It has three blocks
of GAT, GraphSizeNorm and ReLU on the undirected graph of a kernel, and a mean over its nodes. The kernels' latencies are summed.

Without a fusing compiler each operator is a kernel of its own, so the graphs have one node and attention has one neighbour: the
node itself. Which operators a compiler fuses is the paper's other half (`perfguard_models.fusion`), as is which kernel runs
(`perfguard_research.fusion.kernels`). The paper measures each kernel. For whole networks we have only the sum, so the loss
compares the sum. Where a table has single operators, it compares those. This predictor has no memory.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch_geometric.data import Batch
from torch_geometric.nn import GATConv, GraphSizeNorm
from torch_geometric.utils import scatter

from perfguard_research.papers.graph_learner import NUM_GLOBAL, NUM_KINDS, GraphLearner, one_hot_kinds
from perfguard_research.papers.layers import NODE_COLUMNS

_BLOCKS = 3
_OF_LAYER = [NODE_COLUMNS.index(name) for name in ("input_bytes", "output_bytes", "weight_bytes", "flops")]


class Lilou(GraphLearner):
    """LILOU's latency head. Root mean squared error."""

    name = "lilou"
    targets = ("time",)
    scales_labels = False

    def make_network(self, hidden: int) -> nn.Module:
        return _LatencyHead(hidden)

    def loss(self, predicted: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(predicted, labels).add(1e-9).sqrt()  # (4), without kernel types


class _LatencyHead(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        widths = [NUM_KINDS + len(_OF_LAYER) + NUM_GLOBAL, *[hidden] * _BLOCKS]
        self.attention = nn.ModuleList(GATConv(a, b) for a, b in itertools.pairwise(widths))
        self.norm = GraphSizeNorm()
        self.latency = nn.Linear(hidden, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        x = torch.cat([one_hot_kinds(batch), batch.x[:, _OF_LAYER], batch.globals[batch.batch]], dim=1)
        kernel = torch.arange(len(x))  # each operator is one
        alone = torch.zeros(2, 0, dtype=torch.long)
        for layer in self.attention:
            x = torch.relu(self.norm(layer(x, alone), kernel))
        latency = self.latency(x)[:, 0].clamp(-12, 8).exp()
        total: torch.Tensor = scatter(latency, batch.batch, dim_size=batch.num_graphs, reduce="sum")
        return total.log()[:, None]
