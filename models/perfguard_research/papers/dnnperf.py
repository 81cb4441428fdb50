"""DNNPerf: a graph network with an attention-based encoder of nodes and edges (ANEE).

Gao et al. 2023, "Runtime Performance Prediction for Deep Learning Models with Graph Neural Network", ICSE-SEIP. Section III.C
and tables I and II have the features, section III.D has the encoder. Symbols are the paper's:
    h  features of a node     e  features of an edge     W_u, W_e, a, W_m  learnt, shared between the rounds
Operators of the forward pass, of the backward pass and of the optimizer are nodes, as in figure 2. Their features have the sizes
of temporaries and of gradients of weights (table I). Device features belong to each node (FLOPS, memory) and edge (bandwidth).
The edge's type says whether an operator of the backward pass or of the optimizer reads the tensor.

Deviations:
- A node keeps its own state beside what it gathers. In the paper, a node without an incoming edge becomes zero.
- The softmax over features is multiplied by their number. Otherwise three rounds would divide h by its cube.
- A linear map aligns features to ``hidden`` channels; the paper's h is as wide as the features. There are features of the setting
  (precision, layout, optimizer), which the paper keeps fixed. Edges have the shape of the tensor, too.
- The sum of the readout is taken as sign(x) log(1 + |x|).
- One network with three rounds has an output for each quantity. The paper has one network for each, with one round for memory.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import global_add_pool
from torch_geometric.utils import scatter

from perfguard_research.papers.graph_learner import NUM_EDGE, NUM_KINDS, GraphLearner, kinds_of
from perfguard_research.papers.layers import GLOBAL_COLUMNS, STEP_COLUMNS, WHOLE_STEP

_ROUNDS = 3
_SLOPE = 0.01
_TYPES = 3 * NUM_KINDS
_OF_NODE = [GLOBAL_COLUMNS.index(name) for name in ("device_flops", "device_matrix_flops", "device_memory")]
_OF_EDGE = [GLOBAL_COLUMNS.index("device_bandwidth")]
_OF_CONFIGURATION = [GLOBAL_COLUMNS.index(name) for name in ("optimizer_states", "half", "nhwc", "compiled")]


class _Network(nn.Module):
    def __init__(self, hidden: int, outputs: int) -> None:
        super().__init__()
        nodes = _TYPES + len(STEP_COLUMNS) + len(_OF_NODE) + len(_OF_CONFIGURATION)
        self.enter_node, self.enter_edge = nn.Linear(nodes, hidden), nn.Linear(2 + NUM_EDGE + len(_OF_EDGE), hidden)  # F
        self.encoder = NodeEdgeEncoder(hidden)
        widths = (hidden, 512, 128, 16)
        layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.predictor = nn.Sequential(*layers, nn.Linear(widths[-1], outputs))

    def forward(self, graphs: Data) -> torch.Tensor:
        edge_index = graphs.edge_index
        facts = graphs.globals[graphs.batch]
        h = self.enter_node(torch.cat([kinds_of(graphs, _TYPES), graphs.nodes, facts[:, _OF_NODE + _OF_CONFIGURATION]], dim=1))
        backward = (graphs.kind[edge_index[1]] >= NUM_KINDS).long()
        kinds = nn.functional.one_hot(backward, 2)
        e = self.enter_edge(torch.cat([kinds, graphs.edges, facts[edge_index[0]][:, _OF_EDGE]], dim=1))
        for _ in range(_ROUNDS):
            h, e = self.encoder(h, e, edge_index)
        summed = global_add_pool(h, graphs.batch, len(graphs.globals))
        predicted: torch.Tensor = self.predictor(torch.sign(summed) * torch.log1p(summed.abs()))
        return predicted


class NodeEdgeEncoder(nn.Module):
    """One round of ANEE, section III.D."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.of_node = nn.Linear(hidden, hidden, bias=False)  # W_u
        self.of_edge = nn.Linear(hidden, hidden, bias=False)  # W_e
        self.attention = nn.Linear(2 * hidden, 1, bias=False)  # a
        self.coefficient = nn.Parameter(torch.randn(hidden))  # W_m, a vector

    def forward(self, h: torch.Tensor, e: torch.Tensor, edge_index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        source, target = edge_index
        local = nn.functional.leaky_relu(self.of_node(h), _SLOPE)
        e = torch.sigmoid(self.attention(torch.cat([local[source], local[target]], dim=1)) * self.of_edge(e))
        weight = torch.softmax(self.coefficient * e, dim=1) * e.shape[1]  # over the features
        gathered = scatter(weight * local[source], target, dim=0, dim_size=len(h), reduce="sum")
        return nn.functional.leaky_relu(gathered + local, _SLOPE), e


class DNNPerf(GraphLearner):
    """DNNPerf's features and network; min-max scaling, sum readout, MSE."""

    name = "dnnperf"
    views = (WHOLE_STEP,)
    mode = "train"
    scaling = "minmax"
    network_class = _Network
    usual_rate = 5e-4
    """At that of the other papers' networks it stays on a plateau, and predicts the same for all runs."""
