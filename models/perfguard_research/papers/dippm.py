"""DIPPM: PMGNS, GraphSAGE blocks beside static features, Huber loss.

Panner Selvam and Brorsson 2023, "DIPPM: a Deep Learning Inference Performance Predictive Model using Graph Neural Networks".
Algorithm 1 has the node features: kind, attributes, output shape. Equation 1 has the static features: multiply-adds, batch,
numbers of convolutions, dense layers and activations. Section 3.4 and table 3 have the network: three GraphSAGE blocks, three
fully connected ones, dropout 0.05, Huber. As in the authors' code, a block has two layers whose outputs have unit length, and
the readout is a sum.

Deviations:
- Energy is the paper's third quantity. No table has labels of it, so it has no output.
- The paper has one device. Here features of the device and of the setting are added to the static features. FLOPs and bytes are
  added to those of a node.
- The paper has 512 channels and 500 epochs of one graph a step at a rate of 2.754e-5. See the card for those of the weights.
- Its memory and latency are those of inference on an A100. The tables have memory of inference for few runs.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE, global_add_pool

from perfguard.graph import KIND_INDEX
from perfguard_research.papers.graph_learner import NUM_GLOBAL, NUM_KINDS, NUM_NODE, GraphLearner, kinds_of

_DROPOUT = 0.05
_BLOCKS = 3
_LAYERS = 2
_COUNTED = [KIND_INDEX[kind] for kind in ("conv", "matmul", "activation")]


class _PMGNS(nn.Module):
    def __init__(self, hidden: int, outputs: int) -> None:
        super().__init__()
        widths = [NUM_KINDS + NUM_NODE, *[hidden] * _BLOCKS]
        self.sage = nn.ModuleList(
            GraphSAGE(a, b, _LAYERS, dropout=_DROPOUT, normalize=True) for a, b in itertools.pairwise(widths)
        )
        widths = [hidden + NUM_GLOBAL + len(_COUNTED), *[hidden] * _BLOCKS]
        self.connected = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.out = nn.Linear(hidden, outputs)
        self.dropout = nn.Dropout(_DROPOUT)

    def forward(self, graphs: Data) -> torch.Tensor:
        kinds = kinds_of(graphs)
        z = torch.cat([kinds, graphs.nodes], dim=1)
        for block in self.sage:
            z = self.dropout(torch.relu(block(z, graphs.edge_index)))
        number = len(graphs.globals)
        summed, counts = (global_add_pool(values, graphs.batch, number) for values in (z, kinds[:, _COUNTED]))
        z = torch.cat([summed, graphs.globals, counts.log1p() / 5], dim=1)
        for layer in self.connected:
            z = self.dropout(torch.relu(layer(z)))
        out: torch.Tensor = self.out(z)
        return out


class DIPPM(GraphLearner):
    """PMGNS with Huber loss."""

    name = "dippm"
    mode = "infer"
    network_class = _PMGNS
    loss = nn.HuberLoss()
