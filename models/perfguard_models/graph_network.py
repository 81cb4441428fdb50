r"""GuardNet's graph network: operators are nodes, tensors are edges, and physics composes the step from what the nodes say.

    z⁰_v  = norm(node(x_v))                                    x_v: the operator, its sizes and the device's figures
    m_v   = mean over tensors u → v and v → u of message(z_v, z_u, e_uv)                                (each of the rounds)
    z_v   = norm(z_v + update(z_v, m_v))
    log i = own(x_v) + BOUND · s(out(z_v - z⁰_v))              the inefficiency, within (-3, 6): device time over roofline time
    d_v   = roofline_v · i + latency

    t = c + m + max over v of ( h_1 + ... + h_v + d_v + ... + d_n )

The last line has two clocks: the host launches operators, and the device computes them in that order. The step ends with the
last operator. So its time is the longest path that follows the host up to some launch, and then the device. A host time h is a
learnt cost of the operator's kind in its phase, and of the views before it. Before the first launch come a constant c and the
copy m of the batch to the device. The time steps of a recurrent layer depend on one another, so each adds a latency of its own.
Each machine has one factor for all host times and one for all device times. This is the critical path of Lin et al. 2022,
"Building a Performance Model for Deep Learning Recommendation Model Training on GPUs" (arXiv 2201.07821), section IV, in closed
form. A CPU is its own host, so nothing overlaps there: the maximum is replaced by the sum of all h and d.

What the neighbours change is bounded, and nothing reads the whole graph: a free read-out breaks the law that a larger batch is
not faster (docs/results/accuracy.md has the laws, and how often each is broken). The bound is s(a) = a / √(1 + a²), which has a
gradient far from 0, and the nodes are normalised (Ba et al. 2016, arXiv 1607.06450). Without these two, training drove every node
to the same side of a tanh, where nothing is learnt any more: messages were a constant. So the bound is also wide. A narrow one is
a switch between its two sides (docs/decisions.md).

Equal operators of a step are one node, and equal tensors between them are one edge with a count. A network repeats its blocks, so
a step of a thousand operators has two hundred nodes, and learning is five times as fast.

Shapes: B steps, R nodes of all steps together, E edges, N launches of the longest step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from perfguard.graph import Phase
from perfguard_models.features.launches import COLUMNS, DEVICE_COLUMNS, EDGE_COLUMNS, HOST_KINDS, NUM_NAMES
from perfguard_models.learner import Floats

with warnings.catch_warnings():  # PyG uses what torch has deprecated, and a script may turn warnings into errors
    warnings.simplefilter("ignore")
    from torch_geometric.nn.conv import MessagePassing

NODE_COLUMNS = len(COLUMNS) + len(DEVICE_COLUMNS) + 1
"""The operator's, the device's, and whether it is a CPU."""
_LOG_INEFFICIENCY = -3.0, 6.0


class Packed(NamedTuple):
    """B steps, as the network reads them."""

    x: Tensor  # shape: (R, NODE_COLUMNS), standardised
    name: Tensor  # shape: (R,)
    host: Tensor  # shape: (R,)
    roofline: Tensor  # shape: (R,), seconds
    steps: Tensor  # shape: (R,), dependent time steps of a recurrent layer
    node_is_cpu: Tensor  # shape: (R,), 0 or 1
    edge_index: Tensor  # shape: (2, E), each tensor in both directions
    edge_attr: Tensor  # shape: (E, len(EDGE_COLUMNS) + 1), the last is the direction
    edge_weight: Tensor  # shape: (E,), they sum to 1 over the edges into a node
    order: Tensor  # shape: (B, N), nodes
    is_launch: Tensor  # shape: (B, N), 0 beyond the end of a step
    views: Tensor  # shape: (B, N)
    compiled: Tensor  # shape: (B, 1), 0 or 1
    train: Tensor  # shape: (B,), 0 or 1
    copied: Tensor  # shape: (B,), bytes
    launched: Tensor  # shape: (B, 1), 0 where the time is that of a kernel alone
    started: Tensor  # shape: (B,), 0 where the time is that of an operator alone
    clock: Tensor  # shape: (B,), the device's log clock
    is_cpu: Tensor  # shape: (B,), 0 or 1


class PathTimes(NamedTuple):
    """Seconds of each part of the longest path of steps with N operators: the account of the step time, up to one factor."""

    start_s: Floats  # shape: (...), of the host before the first launch
    copy_s: Floats  # shape: (...), of the batch
    host_s: Floats  # shape: (..., N), of each launch that the path passes
    device_s: Floats  # shape: (..., N), of each operator that the path passes

    @property
    def op_time_s(self) -> Floats:
        """Seconds that each operator adds to the path. Shape: (..., N)."""
        return self.host_s + self.device_s

    @property
    def total_s(self) -> Floats:
        """Shape: (...)."""
        return np.asarray(self.start_s + self.copy_s + self.op_time_s.sum(axis=-1))


def longest_of(paths: Tensor) -> Tensor:
    """The longest of each step's paths; 0 of a step without operators. Shapes: (B, N) → (B,)."""
    return paths.amax(1) if paths.shape[1] else paths.sum(1)


class Clocks(NamedTuple):
    """The times of B steps on a usual machine, in seconds."""

    device_s: Tensor  # shape: (B, N), of each launch
    host_s: Tensor  # shape: (B, N), of each launch
    constant_s: Tensor  # shape: (B,), of the host before the first launch
    copy_s: Tensor  # shape: (B,), of the batch
    is_cpu: Tensor  # shape: (B,), 0 or 1

    def log_step_s(self, machine: Tensor, *, longest_of: Callable[[Tensor], Tensor] = longest_of) -> Tensor:
        """Log seconds of each step on machines whose host and device take exp(``machine``) times as long.

        Args:
            machine: log factors of the host and the device. Shape: (B, 2), or (2,) for all alike.
            longest_of: the longest of the paths. Training has a smooth maximum, with a gradient for every path. (B, N) → (B,)
        """
        host = machine[..., :1].exp()
        device = machine[..., 1:].exp()
        host_s = self.host_s * host
        device_s = self.device_s * device
        path = host_s.cumsum(1) + device_s.flip(1).cumsum(1).flip(1)
        longest = torch.where(self.is_cpu > 0, (host_s + device_s).sum(1), longest_of(path))
        return (longest + self.constant_s * host[..., 0] + self.copy_s).log()

    def longest_path(self) -> PathTimes:
        """The longest path on a usual machine. On a CPU: all of it."""
        number = self.host_s.shape[1]
        path = self.host_s.cumsum(1) + self.device_s.flip(1).cumsum(1).flip(1)
        turn = path.argmax(1, keepdim=True) if number else 0  # the launch at which the path leaves the host
        at = torch.arange(number)
        all_of_it = self.is_cpu[:, None] > 0
        on_host = self.host_s * ((at <= turn) | all_of_it)
        on_device = self.device_s * ((at >= turn) | all_of_it)
        return PathTimes(*(part.double().numpy() for part in (self.constant_s, self.copy_s, on_host, on_device)))


class OperatorConv(MessagePassing):  # type: ignore[misc]  # PyG has no types
    """One round of messages. A message is what a tensor does to the operator at one of its ends.

    m_v = Σ_u w_uv · SiLU(A z_v + B z_u + C e_uv),    z_v' = norm(z_v + SiLU(V (z_v ‖ m_v)))

    A and B are applied to the nodes, of which there are fewer than edges.

    Args:
        channels: of a node.
        messages: channels of a message.
    """

    def __init__(self, channels: int, messages: int) -> None:
        super().__init__(aggr="sum")
        self.of_ends = nn.Linear(channels, 2 * messages)
        self.of_edge = nn.Linear(len(EDGE_COLUMNS) + 1, messages, bias=False)
        self.update_net = nn.Sequential(nn.Linear(channels + messages, channels), nn.SiLU())
        self.norm = nn.LayerNorm(channels)

    def forward(self, z: Tensor, edge_index: Tensor, edge_attr: Tensor, edge_weight: Tensor) -> Tensor:
        """The nodes after the round. Shape: (R, channels)."""
        a, b = self.of_ends(z).chunk(2, dim=1)
        m = self.propagate(edge_index, a=a, b=b, e=self.of_edge(edge_attr), edge_weight=edge_weight)
        updated: Tensor = self.norm(z + self.update_net(torch.cat([z, m], dim=1)))
        return updated

    def propagate(self, edge_index: Tensor, **tensors: Tensor) -> Tensor:
        """As PyG's own. Of a class without one, PyG leaves a file in the temporary directory, in each process."""
        out: Tensor = super().propagate(edge_index, **tensors)
        return out

    def message(self, a_i: Tensor, b_j: Tensor, e: Tensor, edge_weight: Tensor) -> Tensor:
        """The messages along all edges. Shape: (E, messages)."""
        return edge_weight[:, None] * nn.functional.silu(a_i + b_j + e)


class UsualMachine(nn.Module):
    """The seconds of a usual machine that no operator's sizes decide. They are parameters themselves.

    All are logarithms, with a row for GPUs and one for CPUs. `perfguard_research.step_time` has where they start.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(2, len(Phase)))
        self.kind = nn.Parameter(torch.zeros(2, HOST_KINDS // len(Phase), len(Phase)))
        self.view = nn.Parameter(torch.zeros(2))
        self.latency = nn.Parameter(torch.zeros(2))
        self.dependent = nn.Parameter(torch.zeros(2))
        self.constant = nn.Parameter(torch.zeros(2, 2))  # of inference and of training
        self.copy = nn.Parameter(torch.zeros(()))  # of a byte
        self.compiled = nn.Parameter(torch.zeros(()))
        self.clock_power = nn.Parameter(torch.zeros(()))  # squared, so that it is never negative

    def forward(self, packed: Packed, log_inefficiency: Tensor) -> Clocks:
        """The clocks of ``packed``, whose operators have these inefficiencies. Shape of the latter: (R,)."""
        on = packed.is_cpu.long()
        of_node = packed.node_is_cpu.long()
        computed = packed.roofline * log_inefficiency.exp() + packed.steps * self.dependent.exp()[of_node]
        device = computed[packed.order] + packed.launched * self.latency.exp()[on][:, None]
        launch = (self.phase[:, None] + self.kind).exp().reshape(2, -1)[of_node, packed.host]
        host = launch[packed.order] + packed.views * self.view.exp()[on][:, None]
        # In the tables, cards with a higher clock are in machines with a faster host. A better card is never in a slower one.
        usual = -self.clock_power.square() * packed.clock
        return Clocks(
            device * packed.is_launch,
            host * packed.is_launch * packed.launched * (usual[:, None] + packed.compiled * self.compiled).exp(),
            (self.constant[on, packed.train] + usual).exp() * packed.started,
            packed.copied * self.copy.exp(),
            packed.is_cpu,
        )


class GraphNetwork(nn.Module):
    """See the module's docstring.

    Args:
        hidden: width of the layers that read an operator alone.
        channels: of a node, while messages pass.
        messages: channels of a message.
        rounds: of messages. 0: each operator is read alone.
        bound: the most that an operator's neighbours change of the logarithm of its inefficiency.
    """

    def __init__(self, hidden: int = 96, channels: int = 48, messages: int = 32, rounds: int = 1, bound: float = 1.5) -> None:
        super().__init__()
        self.bound = bound
        self.name = nn.Embedding(NUM_NAMES, 8)
        nn.init.normal_(self.name.weight, std=0.1)
        self.read = nn.Sequential(
            nn.Linear(NODE_COLUMNS + self.name.embedding_dim, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU()
        )
        self.own = nn.Linear(hidden, 1)
        self.node = nn.Sequential(nn.Linear(hidden, channels), nn.SiLU(), nn.LayerNorm(channels))
        self.rounds = nn.ModuleList(OperatorConv(channels, messages) for _ in range(rounds))
        self.out = nn.Linear(channels, 1)
        self.machine = UsualMachine()

    @property
    def heads(self) -> dict[str, nn.Parameter]:
        """What fine-tuning moves, by name: the two heads, and the machine's seconds."""
        encoder = ("name.", "read.", "node.", "rounds.")
        return {name: parameter for name, parameter in self.named_parameters() if not name.startswith(encoder)}

    def encode(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """What is read of each operator alone, and what its neighbours change. Shapes: (R, hidden), (R, channels)."""
        read = self.read(torch.cat([packed.x, self.name(packed.name)], dim=1))
        alone = z = self.node(read)
        for conv in self.rounds:
            z = conv(z, packed.edge_index, packed.edge_attr, packed.edge_weight)
        return read, z - alone

    def of_neighbours(self, changed: Tensor) -> Tensor:
        """What the neighbours add to the log inefficiency of each operator, within ±bound. Shapes: (R, channels) → (R,).

        Args:
            changed: what they change, from :meth:`encode`.
        """
        wanted: Tensor = self.out(changed)[:, 0]
        return self.bound * wanted * (1 + wanted.square()).rsqrt()

    def clocks(self, packed: Packed, read: Tensor, changed: Tensor) -> Clocks:
        """The clocks of ``packed``, of which :meth:`encode` has made ``read`` and ``changed``."""
        log_inefficiency = (self.own(read)[:, 0] + self.of_neighbours(changed)).clamp(*_LOG_INEFFICIENCY)
        clocks: Clocks = self.machine(packed, log_inefficiency)
        return clocks

    def forward(self, packed: Packed) -> Clocks:
        """The clocks of ``packed``."""
        return self.clocks(packed, *self.encode(packed))
