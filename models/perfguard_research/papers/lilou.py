"""LILOU: which operators a compiler fuses, the latency of each fused sub-graph, and their sum.

"LILOU: Resource-aware Model-driven Latency Prediction For GPU-accelerated Model Serving", figure 4. The graph partitioner
(section 3.2.1, algorithm 1) is `perfguard_research.fusion`: its kernels come as the features KERNELS. The sub-graph runtime
analyzer (section 3.2.2) is here: three blocks of GAT, GraphSizeNorm and ReLU on the undirected graph of a kernel, a mean over its
operators, a latency, and the sum of the latencies. Table 1 has the features of a layer: type, input, output and parameter sizes,
FLOPs. Table 2 has those of the device.

Deviations:
- Only steps under torch.compile have fused kernels. In an eager step, each operator is a kernel of its own. The paper serves all
  networks by TensorRT.
- The paper measures each kernel. Tables of whole networks have only the sum, so the loss compares the logarithm of the sum. A
  latency is the exponential of the output, so that it is positive.
- The kernel's type has no labels in these tables. `perfguard_research.fusion.kernels` has the same blocks with both outputs, and
  learns the type from NeuSight's single operators. So this loss is equation 4 without its second term.
- Compute capability and bus width are missing. FLOPS, bandwidth, memory and L2 are there.

It has no memory.
"""

from __future__ import annotations

import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.utils import scatter

from perfguard_research.fusion.kernels import KernelBlocks
from perfguard_research.papers.graph_learner import NUM_GLOBAL, NUM_KINDS, GraphLearner, kinds_of
from perfguard_research.papers.layers import KERNELS, LAYERS, NODE_COLUMNS

_OF_LAYER = [NODE_COLUMNS.index(name) for name in ("input_bytes", "output_bytes", "weight_bytes", "flops")]


class _Latency(nn.Module):
    def __init__(self, hidden: int, outputs: int) -> None:
        super().__init__()
        self.blocks = KernelBlocks(NUM_KINDS + len(_OF_LAYER) + NUM_GLOBAL, hidden)
        self.latency = nn.Linear(hidden, outputs)
        # A kernel starts as one of e^5 equal ones. GraphSizeNorm takes a kernel of many operators to the bias. If that is near 0,
        # the latency of a whole network, these kernels take all of the sum, and all of its gradient.
        nn.init.zeros_(self.latency.weight)
        nn.init.constant_(self.latency.bias, -5.0)

    def forward(self, graphs: Data) -> torch.Tensor:
        x = torch.cat([kinds_of(graphs), graphs.nodes[:, _OF_LAYER], graphs.globals[graphs.batch]], dim=1)
        names, kernel = graphs.kernel_index.unique(return_inverse=True)
        source, sink = kernel[graphs.edge_index]
        inside = graphs.edge_index[:, source == sink]
        latency = self.latency(self.blocks(x, inside, kernel, len(names)))[:, 0].clamp(-12, 8).exp()
        network = scatter(graphs.batch, kernel, dim_size=len(names), reduce="max")
        total: torch.Tensor = scatter(latency, network, dim_size=len(graphs.globals), reduce="sum")
        return total.log()[:, None]


class _RootMSELoss(nn.MSELoss):
    def forward(self, predicted: torch.Tensor, measured: torch.Tensor) -> torch.Tensor:
        return super().forward(predicted, measured).add(1e-9).sqrt()


class Lilou(GraphLearner):
    """Latency as a sum over kernels."""

    name = "lilou"
    views = (LAYERS, KERNELS)
    targets = ("time",)
    mode = "infer"
    scales_labels = False
    network_class = _Latency
    loss = _RootMSELoss()
