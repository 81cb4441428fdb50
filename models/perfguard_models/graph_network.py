"""GuardNet's network: it reads the operators of a step and corrects physics by factors.

Step time is a sum over operators, each its roofline time times a learnt factor. Peak memory is the replay's peak times a learnt
factor that depends on what is kept at the peak and on the heaviest operator. Both start at pure physics: the last layers are
zero when training begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import nn

from perfguard.graph import OP_KINDS
from perfguard_models.features.graph import GRAPH_FEATURES, NODE_FEATURES, graph_features, kinds_of

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.graph import GraphBatch

_OPS_AT_ONCE = 8192
"""A limit that keeps data in the CPU's caches."""


class Operators(Protocol):
    """Input of the network: B graphs with N operators in all, for instance a PyG ``Batch`` of examples."""

    x: torch.Tensor  # shape: (N, len(NODE_FEATURES))
    kind: torch.Tensor  # shape: (N,), indices into OP_KINDS
    edge_index: torch.Tensor  # shape: (2, num_edges)
    globals: torch.Tensor  # shape: (B, len(GRAPH_FEATURES))
    roofline: torch.Tensor  # shape: (N,), seconds
    log_memory: torch.Tensor  # shape: (B,), log bytes of the replay's peak
    batch: torch.Tensor | None  # shape: (N,), which graph; None: there is one


class OperatorBatch(NamedTuple):
    """:class:`Operators` as plain tensors."""

    x: torch.Tensor
    kind: torch.Tensor
    edge_index: torch.Tensor
    globals: torch.Tensor
    roofline: torch.Tensor
    log_memory: torch.Tensor
    batch: torch.Tensor


class MeanConv(nn.Module):
    """GraphSAGE's layer with the mean of the neighbours (Hamilton et al. 2017), with the parameters of PyG's ``SAGEConv``.

    It is written out here because importing torch_geometric takes as long as importing torch.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.lin_l = nn.Linear(inputs, outputs)
        self.lin_r = nn.Linear(inputs, outputs, bias=False)

    def forward(
        self,
        x: torch.Tensor,  # shape: (N, inputs)
        edge_index: torch.Tensor,  # shape: (2, num_edges)
    ) -> torch.Tensor:  # shape: (N, outputs)
        source, sink = edge_index
        mean = _sums(x[source], sink, len(x)) / _counts(sink, len(x), x.dtype)
        out: torch.Tensor = self.lin_l(mean) + self.lin_r(x)
        return out


class Correction(NamedTuple):
    """The network's outputs for a batch of B graphs with N operators in all."""

    log_memory: torch.Tensor  # shape: (B,), log bytes
    log_time: torch.Tensor  # shape: (B,), log seconds of a step
    op_time_s: torch.Tensor  # shape: (N,), seconds of each operator
    memory_embedding: torch.Tensor  # shape: (B, width + 9)
    time_embedding: torch.Tensor  # shape: (B, width + 9)


class GuardNetwork(nn.Module):
    """Message passing over the data flow, then one readout a target.

    Args:
        hidden: channels of each operator's state.
        layers: rounds of message passing. Each goes along and against the data flow.
        width: size of the embeddings. A residual process may learn on them.
        dropout: share of each operator's state that is dropped while training.
        num_node_features: how many of NODE_FEATURES it reads. It reads the first ones.
        num_graph_features: how many of GRAPH_FEATURES.
    """

    def __init__(
        self,
        hidden: int = 48,
        layers: int = 2,
        width: int = 12,
        dropout: float = 0.0,
        num_node_features: int = len(NODE_FEATURES),
        num_graph_features: int = len(GRAPH_FEATURES),
    ) -> None:
        super().__init__()
        self._columns = num_node_features, num_graph_features
        self.dropout = nn.Dropout(dropout)
        self.kind = nn.Embedding(len(OP_KINDS), hidden)
        self.encode_op = nn.Linear(num_node_features, hidden)
        self.encode_graph = nn.Linear(num_graph_features, hidden)
        self.along = nn.ModuleList(MeanConv(hidden, hidden) for _ in range(layers))
        self.against = nn.ModuleList(MeanConv(hidden, hidden) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(layers))
        self.op_time = nn.Linear(hidden, 1)
        self.memory_readout = _readout(4 * hidden, hidden, width, dropout)
        self.time_readout = _readout(3 * hidden, hidden, width, dropout)
        self.memory_head = nn.Linear(width, 1)
        self.time_head = nn.Linear(width, 1)
        for head in (self.op_time, self.memory_head, self.time_head):
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)

    def forward(self, data: Operators) -> Correction:
        num_graphs = data.globals.shape[0]
        batch = torch.zeros(len(data.x), dtype=torch.long) if data.batch is None else data.batch
        of_node, of_graph = self._columns
        context = self.encode_graph(data.globals[:, :of_graph])  # shape: (B, hidden)
        state = torch.relu(self.encode_op(data.x[:, :of_node]) + self.kind(data.kind) + context[batch])
        backwards = data.edge_index.flip(0)
        for along, against, norm in zip(self.along, self.against, self.norms, strict=True):
            message = norm(along(state, data.edge_index) + against(state, backwards))
            state = state + self.dropout(torch.relu(message))

        def total(values: torch.Tensor) -> torch.Tensor:
            return _sums(values, batch, num_graphs)

        share = data.x[:, [NODE_FEATURES.index("roofline_share")]]
        kept = data.x[:, [NODE_FEATURES.index("kept_share")]]
        live = data.x[:, [NODE_FEATURES.index("live_share")]]
        heaviest = _largest(state * live, batch, num_graphs)
        mean = total(state) / _counts(batch, num_graphs, state.dtype)
        memory_embedding = self.memory_readout(torch.cat([total(state * kept), heaviest, mean, context], dim=1))
        time_embedding = self.time_readout(torch.cat([total(state * share), mean, context], dim=1))

        op_time_s = data.roofline * torch.exp(self.op_time(state)[:, 0].clamp(-4, 6))
        graph_factor = self.time_head(time_embedding)[:, 0]
        log_time = torch.log(total(op_time_s).clamp_min(1e-9)) + graph_factor  # a network may have no operators
        log_memory = data.log_memory + self.memory_head(memory_embedding)[:, 0]
        sizes = self._sizes(data, total(data.x * share), log_memory, log_time)
        return Correction(
            log_memory,
            log_time,
            op_time_s * torch.exp(graph_factor)[batch],
            torch.cat([memory_embedding, sizes], dim=1),
            torch.cat([time_embedding, sizes], dim=1),
        )

    @staticmethod
    def _sizes(data: Operators, mean_op: torch.Tensor, log_memory: torch.Tensor, log_time: torch.Tensor) -> torch.Tensor:
        """Quantities that a study varies (size, depth, batch, channels), each roughly within ±1. Shape: (B, 9)."""

        def column(name: str) -> torch.Tensor:
            values: torch.Tensor = data.globals[:, GRAPH_FEATURES.index(name)]
            return values

        def op_column(name: str) -> torch.Tensor:
            return 10 * mean_op[:, NODE_FEATURES.index(name)]

        return torch.stack(
            [
                (log_memory - 18) / 3,
                (log_time + 4) / 3,
                (4 * column("log_num_ops") - 4.5) / 1.5,
                2 * column("activation_share") - 1,
                2 * column("optimizer_share"),
                column("log_working_peak"),
                (op_column("log_batch") - 4) / 2,
                (op_column("log_channels") - 4) / 2,
                (op_column("conv_log_kernel") - 2) / 2,
            ],
            dim=1,
        )


def batches_of(graphs: GraphBatch, device: Device) -> Iterator[OperatorBatch]:
    """Yield what the network reads of ``graphs`` on ``device``, some of them at once."""
    num_ops = len(graphs.skeleton.ops)
    kinds, edges = kinds_of(graphs.skeleton), torch.from_numpy(graphs.skeleton.edges)
    features = [torch.from_numpy(values) for values in graph_features(graphs, device)]
    for x, columns, roofline, log_memory, _ in zip(
        *(values.split(max(_OPS_AT_ONCE // max(num_ops, 1), 1)) for values in features), strict=True
    ):
        number = len(x)
        yield OperatorBatch(
            x=x.flatten(0, 1),
            kind=kinds.repeat(number),
            edge_index=(edges[:, None, :] + num_ops * torch.arange(number)[None, :, None]).flatten(1),
            globals=columns,
            roofline=roofline.flatten(),
            log_memory=log_memory,
            batch=torch.arange(number).repeat_interleave(num_ops),
        )


def _sums(values: torch.Tensor, index: torch.Tensor, size: int) -> torch.Tensor:
    """Sum of the rows of ``values`` with the same ``index``. Shapes: (N, ...), (N,) → (size, ...)."""
    return values.new_zeros(size, *values.shape[1:]).index_add(0, index, values)


def _counts(index: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Number of rows with each index, at least 1. Shapes: (N,) → (size, 1)."""
    return torch.bincount(index, minlength=size).clamp(min=1).to(dtype)[:, None]


def _largest(values: torch.Tensor, index: torch.Tensor, size: int) -> torch.Tensor:
    """Largest of the rows of ``values`` with the same ``index``, 0 where there is none. Shapes: (N, d), (N,) → (size, d)."""
    at = index[:, None].expand_as(values)
    return values.new_zeros(size, values.shape[1]).scatter_reduce(0, at, values, reduce="amax", include_self=False)


def _readout(inputs: int, hidden: int, width: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, width), nn.Tanh())
