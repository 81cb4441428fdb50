"""DNNPerf: a graph network with an attention-based encoder of nodes and edges.

Gao et al. 2023, "Runtime Performance Prediction for Deep Learning Models with Graph Neural Network", ICSE-SEIP. Section III.C
and tables I and II have the features, section III.D has the encoder. Symbols are the paper's:
    h  features of a node     e  features of an edge     W_u, W_e, a, W_m  learnt, shared between the rounds
Device features belong to each node (FLOPS, memory) and edge (bandwidth). Training also has the edges of the backward pass. They
run against those of the forward pass and have another type.

Where the paper leaves it open: the softmax of f(u', l') runs over the edges that come into u, as in graph attention; three
rounds. The paper trains one network a quantity with MSE; here one network has an output for each.
"""

from __future__ import annotations

import torch
from torch import nn
from torch_geometric.data import Batch
from torch_geometric.utils import scatter, softmax

from perfguard_research.papers.graph_learner import NUM_EDGE, NUM_KINDS, NUM_NODE, GraphLearner, one_hot_kinds
from perfguard_research.papers.layers import GLOBAL_COLUMNS

_ROUNDS = 3
_SLOPE = 0.01
_OF_NODE = [GLOBAL_COLUMNS.index(name) for name in ("device_flops", "device_matrix_flops", "device_memory")]
_OF_EDGE = [GLOBAL_COLUMNS.index("device_bandwidth")]
_OF_CONFIGURATION = [GLOBAL_COLUMNS.index(name) for name in ("optimizer_states", "train", "half", "nhwc", "compiled")]


class DNNPerf(GraphLearner):
    """DNNPerf's features and network; min-max scaling, sum readout, MSE."""

    name = "dnnperf"
    targets = ("memory", "time")
    scaling = "minmax"

    def make_network(self, hidden: int) -> nn.Module:
        return _Network(hidden, len(self.targets))


class _Network(nn.Module):
    def __init__(self, hidden: int, outputs: int) -> None:
        super().__init__()
        nodes = NUM_KINDS + NUM_NODE + len(_OF_NODE) + len(_OF_CONFIGURATION)
        edges = 2 + NUM_EDGE + len(_OF_EDGE)
        self.enter_node, self.enter_edge = nn.Linear(nodes, hidden), nn.Linear(edges, hidden)  # F: alignment of the features
        self.rounds = _NodeEdgeEncoder(hidden)
        self.predictor = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs))

    def forward(self, batch: Batch) -> torch.Tensor:
        facts = batch.globals
        h = torch.cat([one_hot_kinds(batch), batch.x, facts[batch.batch][:, _OF_NODE + _OF_CONFIGURATION]], dim=1)
        trains = facts[:, GLOBAL_COLUMNS.index("train")] > 0.5
        edge_index, of_edge = batch.edge_index, batch.edge_attr
        backwards = trains[batch.batch[edge_index[0]]]
        kinds = torch.zeros(edge_index.shape[1] + int(backwards.sum()), 2)
        kinds[: edge_index.shape[1], 0] = 1
        kinds[edge_index.shape[1] :, 1] = 1
        edge_index = torch.cat([edge_index, edge_index[:, backwards].flip(0)], dim=1)
        of_edge = torch.cat([of_edge, of_edge[backwards]])
        bandwidth = facts[batch.batch[edge_index[0]]][:, _OF_EDGE]
        h, e = self.enter_node(h), self.enter_edge(torch.cat([kinds, of_edge, bandwidth], dim=1))
        for _ in range(_ROUNDS):
            h, e = self.rounds(h, e, edge_index)
        summed = scatter(h, batch.batch, dim=0, dim_size=len(facts), reduce="sum")
        predicted: torch.Tensor = self.predictor(torch.sign(summed) * torch.log1p(summed.abs()))
        return predicted


class _NodeEdgeEncoder(nn.Module):
    """One round of ANEE, section III.D. A node keeps its own state beside what it gathers, or a source would be lost."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.of_node = nn.Linear(hidden, hidden, bias=False)  # W_u
        self.of_edge = nn.Linear(hidden, hidden, bias=False)  # W_e
        self.attention = nn.Linear(2 * hidden, 1, bias=False)  # a
        self.coefficient = nn.Linear(hidden, 1, bias=False)  # W_m

    def forward(self, h: torch.Tensor, e: torch.Tensor, edge_index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        source, target = edge_index
        local = nn.functional.leaky_relu(self.of_node(h), _SLOPE)
        e = torch.sigmoid(self.attention(torch.cat([local[source], local[target]], dim=1)) * self.of_edge(e))
        weight = softmax(self.coefficient(e), target, num_nodes=len(h))
        gathered = scatter(weight * local[source], target, dim=0, dim_size=len(h), reduce="sum")
        return nn.functional.leaky_relu(gathered + local, _SLOPE), e
