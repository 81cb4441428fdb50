"""DIPPM: PMGNS, GraphSAGE blocks beside static features, three quantities, Huber loss.

Panner Selvam and Brorsson 2023, "DIPPM: a Deep Learning Inference Performance Predictive Model using Graph Neural Networks".
Algorithm 1 has the node features: kind, attributes, output shape. Equation 1 has the static features: multiply-adds, batch,
numbers of convolutions, dense layers and activations. Section 3.4 and table 3 have the network: three GraphSAGE blocks, three
fully connected ones, dropout 0.05, Huber.

The paper has one device and only inference. Here features of the device and of the setting are added to the static features. The
paper's 512 channels and 500 epochs at a rate of 2.754e-5 need a GPU. Here there are fewer channels and a larger rate.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch_geometric.data import Batch
from torch_geometric.nn import SAGEConv
from torch_geometric.utils import scatter

from perfguard.graph import KIND_INDEX
from perfguard_research.papers.graph_learner import NUM_GLOBAL, NUM_KINDS, NUM_NODE, GraphLearner, one_hot_kinds

_DROPOUT = 0.05
_BLOCKS = 3
_COUNTED = [KIND_INDEX[kind] for kind in ("conv", "matmul", "activation")]


class DIPPM(GraphLearner):
    """PMGNS with Huber loss."""

    name = "dippm"

    def make_network(self, hidden: int) -> nn.Module:
        return _PMGNS(hidden, len(self.targets))

    def loss(self, predicted: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.huber_loss(predicted, labels)


class _PMGNS(nn.Module):
    def __init__(self, hidden: int, outputs: int) -> None:
        super().__init__()
        widths = [NUM_KINDS + NUM_NODE, *[hidden] * _BLOCKS]
        self.sage = nn.ModuleList(SAGEConv(a, b) for a, b in itertools.pairwise(widths))
        widths = [hidden + NUM_GLOBAL + len(_COUNTED), *[hidden] * (_BLOCKS - 1)]
        self.connected = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.out = nn.Linear(hidden, outputs)
        self.dropout = nn.Dropout(_DROPOUT)

    def forward(self, batch: Batch) -> torch.Tensor:
        kinds = one_hot_kinds(batch)
        z = torch.cat([kinds, batch.x], dim=1)
        for layer in self.sage:
            z = self.dropout(torch.relu(layer(z, batch.edge_index)))
        number = batch.num_graphs
        pooled = scatter(z, batch.batch, dim=0, dim_size=number, reduce="mean")
        counts = scatter(kinds[:, _COUNTED], batch.batch, dim=0, dim_size=number, reduce="sum").log1p() / 5
        z = torch.cat([pooled, batch.globals, counts], dim=1)
        for layer in self.connected:
            z = self.dropout(torch.relu(layer(z)))
        out: torch.Tensor = self.out(z)
        return out
