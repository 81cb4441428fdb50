"""LILOU's graph partitioner: which operators a compiler fuses, by a network over the edges between them.

The network is from section 3.2.1 of "LILOU: Resource-aware Model-driven Latency Prediction For GPU-accelerated Model Serving".
Operators have their type, the sizes of input, output and parameters, and FLOPs. They pass one layer of graph attention,
GraphSizeNorm and ReLU. For each edge an LSTM reads the pair (x_i, x_j), so that their order counts. A linear layer follows. The
loss is cross-entropy. The compiler is an input.

Three things differ from the paper, because compilers depend on them and the labels show it. Attention runs with the edges and
against them, because a tensor with several readers is often written in any case. An operator's own features are kept beside the
output of attention. These features include the number of its readers and its shape.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import networkx as nx
import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GraphSizeNorm

from perfguard.graph import KIND_INDEX, OP_KINDS, OpGraph, StorageKind
from perfguard_models.learner import fitting, read_pair

FORMAT = 1
SIZES = ("log_input", "log_output", "log_weights", "log_flops", "readers", "writers", "rank", "log_last", "log_first")
"""Columns of what is known of an operator, beside its kind and its name: logarithms of bytes, FLOPs and sizes of its output."""
_HIDDEN = 64


def edges_of(graph: OpGraph, names: Sequence[str], compiler: int) -> Data:
    """``graph``, of n operators, for the network. ``names`` has those with an embedding of their own; 0 stands for all others.

    It has ``sizes`` (n, len(SIZES)), ``kind``, ``name`` and ``compiler`` (n,), and ``edge_index`` (2, num_edges).
    """
    source, sink = graph.edges
    number = len(graph.ops)
    index = {name: at for at, name in enumerate(names, start=1)}
    flops, read, written = graph.costs.astype(np.float64)
    is_weight = [storage.kind in (StorageKind.PARAMETER, StorageKind.BUFFER) for storage in graph.storages]
    weights = [sum(graph.storages[at].num_bytes for at in op.inputs if is_weight[at]) for op in graph.ops]
    readers, writers = (np.bincount(ends, minlength=number) for ends in (source, sink))
    shapes = [op.shape or (1,) for op in graph.ops]
    columns = [
        *(np.log1p(size) / 8 for size in (read, written, np.array(weights, dtype=np.float64), flops)),
        *(np.minimum(others, 4) / 2 for others in (readers, writers)),
        [len(op.shape) / 4 for op in graph.ops],
        np.log1p([shape[-1] for shape in shapes]) / 4,
        np.log1p([shape[min(1, len(shape) - 1)] for shape in shapes]) / 4,
    ]
    return Data(
        sizes=torch.from_numpy(np.stack(columns, axis=1)).float(),
        kind=torch.tensor([KIND_INDEX[op.kind] for op in graph.ops], dtype=torch.long),
        name=torch.tensor([index.get(op.name.rstrip("_"), 0) for op in graph.ops], dtype=torch.long),
        compiler=torch.full((number,), compiler, dtype=torch.long),
        edge_index=torch.from_numpy(graph.edges),
        num_nodes=number,
    )


class EdgeClassifier(nn.Module):
    """The GAT-LSTM; see the module's docstring.

    Args:
        num_names: operators with an embedding, and one for all others.
        num_compilers: how many compilers it knows. The compiler is an input.
        hidden: channels of attention and of the LSTM (the paper: 128).
    """

    def __init__(self, num_names: int, num_compilers: int, hidden: int = _HIDDEN) -> None:
        super().__init__()
        self.name = nn.Embedding(num_names, 16)
        self.compiler = nn.Embedding(num_compilers, 4)
        width = len(SIZES) + len(OP_KINDS) + 16 + 4
        self.own = nn.Linear(width, hidden)
        self.before = GATConv(width, hidden // 2)
        self.after = GATConv(width, hidden // 2)
        self.norm = GraphSizeNorm()
        self.scale = nn.Parameter(torch.tensor(10.0))
        """GraphSizeNorm divides by the root of the number of operators: some tens."""
        self.lstm = nn.LSTM(2 * hidden, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, edges: Data) -> torch.Tensor:
        """The logit of fusion for each edge. Shape: (m,)."""
        kind = nn.functional.one_hot(edges.kind, len(OP_KINDS)).float()
        x = torch.cat([edges.sizes, kind, self.name(edges.name), self.compiler(edges.compiler)], dim=1)
        own = torch.relu(self.own(x))
        around = torch.cat([self.before(x, edges.edge_index), self.after(x, edges.edge_index.flip(0))], dim=1)
        around = torch.relu(self.norm(around, edges.batch) * self.scale)
        state = torch.cat([own, around], dim=1)
        pairs = state[edges.edge_index.T]  # shape: (m, 2, 2 * hidden)
        _, (last, _) = self.lstm(pairs)
        logit: torch.Tensor = self.out(last[0])[:, 0]
        return logit


class FusionModel(NamedTuple):
    """Trained weights: which edges of a graph a compiler fuses."""

    network: EdgeClassifier
    names: list[str]
    """Operators with an embedding, from 1."""
    compilers: list[str]
    """What the weights were trained on, in order."""

    def chances(self, graph: OpGraph, compiler: str) -> npt.NDArray[np.float64]:
        """The probability that ``compiler`` fuses each of ``graph.edges``. Shape: (num_edges,)."""
        if not graph.edges.shape[1]:
            return np.zeros(0)
        with torch.inference_mode():
            logits = self.network(edges_of(graph, self.names, self.compilers.index(compiler)))
        found: npt.NDArray[np.float64] = torch.sigmoid(logits).double().numpy()
        return found

    def kernels(self, graph: OpGraph, compiler: str) -> list[list[int]]:
        """The operators in each kernel that ``compiler`` is expected to launch. The surest edges are fused first."""
        chances = self.chances(graph, compiler)
        return kernels_of(graph, np.argsort(-chances, kind="stable")[: int((chances > 0.5).sum())])


def kernels_of(graph: OpGraph, fused: npt.NDArray[np.int64]) -> list[list[int]]:
    """The operators of ``graph`` by kernel, each ascending, in the order of their first operators.

    Algorithm 1 of the paper: union-find over the fused edges. Two kernels are united only if an order of the kernels remains: a
    value that leaves a kernel must not return to it through another one.

    Args:
        graph: any graph.
        fused: columns of ``graph.edges`` that unite the kernels of their ends, the first ones first.
    """
    order = nx.DiGraph(_dependencies(graph))  # of the kernels, each by one of its operators
    order.add_nodes_from(range(len(graph.ops)))
    sets = nx.utils.UnionFind(range(len(graph.ops)))
    for first, second in graph.edges[:, fused].T.tolist():
        a = sets[first]
        b = sets[second]
        if a == b:
            continue
        direct = [edge for edge in ((a, b), (b, a)) if order.has_edge(*edge)]
        order.remove_edges_from(direct)
        if nx.has_path(order, a, b) or nx.has_path(order, b, a):  # through a third kernel
            order.add_edges_from(direct)
            continue
        sets.union(a, b)
        kept, gone = (a, b) if sets[a] == a else (b, a)
        order.add_edges_from([(kept, after) for after in order.successors(gone)])
        order.add_edges_from([(before, kept) for before in order.predecessors(gone)])
        order.remove_node(gone)
    return sorted(sorted(kernel) for kernel in sets.to_sets())


def _dependencies(graph: OpGraph) -> set[tuple[int, int]]:
    """Pairs of operators whose order must stay: one reads what the other wrote, or overwrites what the other read or wrote."""
    pairs = {(first, second) for first, second in graph.edges.T.tolist()}
    users: dict[int, list[int]] = {}  # of each storage: its last writer, and who has read it since
    for index, op in enumerate(graph.ops):
        for storage in op.outputs:
            pairs.update((user, index) for user in users.get(storage, ()))
            users[storage] = [index]
        for storage in op.inputs:
            users.setdefault(storage, []).append(index)
    return {(first, second) for first, second in pairs if first != second}


def read_fusion_model(path: Path) -> FusionModel:
    """Read PATH.safetensors and PATH.json, the files of `perfguard_research.fusion.train`.

    Raises:
        PredictorError: if a file is missing, damaged, of another version, or they do not belong together.
    """
    hint = "python -m perfguard_research.fusion.train LABELS --out DIR"
    made_for = {"format": FORMAT, "sizes": list(SIZES), "kinds": list(OP_KINDS)}
    state, document = read_pair(path, hint=hint, made_for=made_for)
    with fitting("The weights 'fusion'"):
        network = EdgeClassifier(len(document["names"]) + 1, len(document["compilers"]), document["hidden"])
        network.load_state_dict(state)
        return FusionModel(network.eval(), document["names"], document["compilers"])


@functools.cache
def shipped() -> FusionModel:
    """The weights that come with the package."""
    return read_fusion_model(Path(__file__).parents[1] / "weights" / "fusion")
