r"""Step time with two clocks: the host launches operators, and the device computes them.

The device starts an operator when it is launched and the one before has ended. The step ends with the last operator. So its time
is the longest path that follows the host up to some launch, and then the device:

    t = c + m + max over i of ( h_1 + ... + h_i + d_i + ... + d_n )

A device time d_i is the operator's roofline time multiplied by a learnt inefficiency, plus a latency. The time steps of a
recurrent layer depend on one another, so each adds a latency of its own. A host time h_i is a learnt cost of the operator's kind
in its phase, and of the views before it. Before the first launch come a constant c and the copy m of the batch to the device.
Each machine has one factor for all host times and one for all device times. This is the critical path of Lin et al. 2022,
"Building a Performance Model for Deep Learning Recommendation Model Training on GPUs" (arXiv 2201.07821), section IV, in closed
form. A CPU is its own host, so nothing overlaps there: the maximum is replaced by the sum of all h_i and d_i.

The prediction is the geometric mean of this time and the time of boosted trees (`step_forest`), whose errors differ.

Shapes: B steps, R rows of different operators of all steps together, N launches of the longest step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from perfguard.graph import Phase
from perfguard_models.features.launches import COLUMNS, DEVICE_COLUMNS, HOST_KINDS, NUM_NAMES
from perfguard_models.learner import TARGETS, Example, Predicted, State, sums_table
from perfguard_models.step_forest import StepForest

if TYPE_CHECKING:
    from typing_extensions import Self

Floats = npt.NDArray[np.float64]
_LAUNCHES_A_BATCH = 40_000
_EMBEDDING = 8
_COMPILED, _TRAIN = COLUMNS.index("compiled"), COLUMNS.index("train")
_CLOCK = DEVICE_COLUMNS.index("log_clock")
_FARTHEST = 6.0
"""Standard deviations from the mean of a column at which it is clipped: beyond what was learnt, nothing is extrapolated."""
_LOG_INEFFICIENCY = -3.0, 6.0
_START_S = {"latency": 4e-6, "dependent": 10e-6, "host": 15e-6, "view": 2e-6, "copy": 1 / 6e9}
_START_CONSTANT_S = 200e-6, 400e-6
_START_CLOCK_POWER = 0.1
"""Where learning starts."""
_SHARPNESS = 0.02
"""Temperature of the smooth maximum while learning, as a share of the longest path."""
_MACHINES = torch.tensor([(0.0, 0.0), (0.5, 0.0), (-0.5, 0.0), (0.0, 0.15), (0.0, -0.15)], dtype=torch.float32, device="cpu")
"""Log factors of hosts and devices: a usual machine, and others as far from it as machines of the tables are. The device is
named, because a script may have set another default before this module is imported."""


class Packed(NamedTuple):
    """The launches of B steps."""

    x: torch.Tensor  # shape: (R, len(COLUMNS) + len(DEVICE_COLUMNS)), standardised
    name: torch.Tensor  # shape: (R,)
    host: torch.Tensor  # shape: (R,)
    roofline: torch.Tensor  # shape: (R,), seconds
    steps: torch.Tensor  # shape: (R,), dependent time steps of a recurrent layer
    order: torch.Tensor  # shape: (B, N), rows
    is_launch: torch.Tensor  # shape: (B, N), 0 beyond the end of a step
    views: torch.Tensor  # shape: (B, N)
    compiled: torch.Tensor  # shape: (B, 1), 0 or 1
    train: torch.Tensor  # shape: (B,), 0 or 1
    copied: torch.Tensor  # shape: (B,), bytes
    launched: torch.Tensor  # shape: (B, 1), 0 where the time is that of a kernel alone
    started: torch.Tensor  # shape: (B,), 0 where the time is that of an operator alone
    device: torch.Tensor  # shape: (B, len(DEVICE_COLUMNS))
    is_cpu: torch.Tensor  # shape: (B,), 0 or 1


class PathTimes(NamedTuple):
    """Seconds of each part of the longest path of C steps with N operators: the account of the step time, up to one factor."""

    start_s: Floats  # shape: (C,), of the host before the first launch
    copy_s: Floats  # shape: (C,), of the batch
    host_s: Floats  # shape: (C, N), of each launch that the path passes
    device_s: Floats  # shape: (C, N), of each operator that the path passes

    @classmethod
    def on_device(cls, op_time_s: Floats) -> Self:
        """The path through nothing but operators. Without operators it is all start. Shape: (C, N)."""
        number, num_ops = op_time_s.shape
        return cls(np.full(number, float(num_ops == 0)), np.zeros(number), np.zeros_like(op_time_s), op_time_s)

    @property
    def op_time_s(self) -> Floats:
        """Seconds that each operator adds to the path. Shape: (C, N)."""
        return self.host_s + self.device_s

    @property
    def total_s(self) -> Floats:
        """Shape: (C,)."""
        return np.asarray(self.start_s + self.copy_s + self.op_time_s.sum(axis=1))


class Clocks(NamedTuple):
    """The times of B steps on a usual machine, in seconds."""

    device_s: torch.Tensor  # shape: (B, N), of each launch
    host_s: torch.Tensor  # shape: (B, N), of each launch
    constant_s: torch.Tensor  # shape: (B,), of the host before the first launch
    copy_s: torch.Tensor  # shape: (B,), of the batch
    is_cpu: torch.Tensor  # shape: (B,), 0 or 1

    def log_step_s(self, is_launch: torch.Tensor, machine: torch.Tensor, *, smooth: bool = False) -> torch.Tensor:
        """Log seconds of each step on machines whose host and device take exp(``machine``) times as long.

        Args:
            is_launch: 0 beyond the end of a step. Shape: (B, N).
            machine: log factors of the host and the device. Shape: (B, 2), or (2,) for all alike.
            smooth: with a smooth maximum, which has a gradient for every path.
        """
        host, device = machine[..., :1].exp(), machine[..., 1:].exp()
        host_s, device_s = self.host_s * host, self.device_s * device
        path = host_s.cumsum(1) + device_s.flip(1).cumsum(1).flip(1)
        longest = path.amax(1) if path.shape[1] else path.sum(1)  # a step without operators has no path
        if smooth:
            temperature = _SHARPNESS * longest.detach()[:, None]
            closed = torch.where(is_launch > 0, path / temperature, -1e9)
            longest = (temperature * torch.logsumexp(closed, 1, keepdim=True))[:, 0]
        longest = torch.where(self.is_cpu > 0, (host_s + device_s).sum(1), longest)
        return (longest + self.constant_s * host[..., 0] + self.copy_s).log()

    def longest_path(self) -> tuple[torch.Tensor, ...]:
        """Seconds of each part of the longest path on a usual machine, in the order of :class:`PathTimes`. On a CPU: of all."""
        number = self.host_s.shape[1]
        path = self.host_s.cumsum(1) + self.device_s.flip(1).cumsum(1).flip(1)
        turn = path.argmax(1, keepdim=True) if number else 0  # the launch at which the path leaves the host
        at, all_of_it = torch.arange(number), self.is_cpu[:, None] > 0
        return self.constant_s, self.copy_s, self.host_s * ((at <= turn) | all_of_it), self.device_s * ((at >= turn) | all_of_it)


class Network(nn.Module):
    """The weights."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.name = nn.Embedding(NUM_NAMES, _EMBEDDING)
        nn.init.normal_(self.name.weight, std=0.1)
        self.inefficiency = nn.Sequential(
            nn.Linear(len(COLUMNS) + len(DEVICE_COLUMNS) + _EMBEDDING, hidden),
            nn.SiLU(),
            nn.Linear(hidden, hidden),
            nn.SiLU(),
            nn.Linear(hidden, 1),
        )
        last = self.inefficiency[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.constant_(last.bias, 0.7)
        self.phase = nn.Parameter(torch.full((len(Phase),), math.log(_START_S["host"])))
        self.kind = nn.Parameter(torch.zeros(HOST_KINDS // len(Phase), len(Phase)))
        self.view, self.latency, self.dependent, self.copy = (
            nn.Parameter(torch.tensor(math.log(_START_S[name]))) for name in ("view", "latency", "dependent", "copy")
        )
        self.constant = nn.Parameter(torch.tensor(_START_CONSTANT_S).log())  # of inference and of training
        self.compiled = nn.Parameter(torch.zeros(()))
        self.clock_power = nn.Parameter(torch.tensor(_START_CLOCK_POWER**0.5))  # squared, so that it is never negative

    @property
    def prior(self) -> torch.Tensor:
        """Squared distances of kinds from their phase's mean, and ten times those of the constants from their start. Shape: ().

        Rare kinds stay at the mean. What one kind of network has in each step is not taken for the host's constant.
        """
        start = torch.tensor(_START_CONSTANT_S).log()
        return self.kind.square().sum() + 10 * (self.constant - start).square().sum()

    def forward(self, packed: Packed) -> Clocks:
        """The clocks of ``packed``."""
        inefficiency = self.inefficiency(torch.cat([packed.x, self.name(packed.name)], dim=1))[:, 0].clamp(*_LOG_INEFFICIENCY)
        computed = packed.roofline * inefficiency.exp() + packed.steps * self.dependent.exp()
        device = computed[packed.order] + packed.launched * self.latency.exp()
        host = (self.phase + self.kind).exp().ravel()[packed.host][packed.order] + packed.views * self.view.exp()
        # In the tables, cards with a higher clock are in machines with a faster host. A better card is never in a slower one.
        usual = -self.clock_power.square() * packed.device[:, _CLOCK]
        return Clocks(
            device * packed.is_launch,
            host * packed.is_launch * packed.launched * (usual[:, None] + packed.compiled * self.compiled).exp(),
            (self.constant[packed.train] + usual).exp() * packed.started,
            packed.copied * self.copy.exp(),
            packed.is_cpu,
        )


class TwoClocks:
    """The learner of step times.

    Args:
        networks: how many networks. Their seeds differ, and the mean of the log times is the prediction.
        epochs: how often each run is seen.
        hidden: width of the network.
        learning_rate: of AdamW, at its highest.
        host_sigma: prior standard deviation of a machine's log host factor.
        device_sigma: the same of its log device factor. It is small, so that the network learns the cards and no source does.
        trees: how many boosted trees. 0: the clocks alone.
        seed: of weights, order and trees.
    """

    name: ClassVar[str] = "two-clocks"
    views: ClassVar[tuple[str, ...]] = ("launches", "sums")

    def __init__(
        self,
        *,
        networks: int = 2,
        epochs: int = 14,
        hidden: int = 96,
        learning_rate: float = 1e-2,
        host_sigma: float = 0.5,
        device_sigma: float = 0.01,
        trees: int = 400,
        seed: int = 0,
    ) -> None:
        self.settings: dict[str, Any] = {
            "networks": networks, "epochs": epochs, "hidden": hidden, "learning_rate": learning_rate,
            "host_sigma": host_sigma, "device_sigma": device_sigma, "trees": trees, "seed": seed,
        }  # fmt: skip
        self.scale = torch.zeros(2, len(COLUMNS) + len(DEVICE_COLUMNS))
        self.networks: list[Network] = []
        self.forest: StepForest | None = None

    def parts(self, runs: Sequence[Example]) -> list[Predicted]:
        """The prediction on a usual machine, then with a slower host, a faster one, a slower device, a faster one.

        They differ by as much as machines do, so the spread of these members is what is not known of the machine.
        """
        unknown = np.full(len(runs), np.nan)
        found: list[Predicted] = [{target: unknown.copy() for target in TARGETS} for _ in _MACHINES]
        for indices in batches_of(runs, range(len(runs))):
            for part, values in zip(found, self.log_step_s([runs[index] for index in indices]), strict=True):
                part["time"][indices] = values
        return found

    def log_step_s(self, runs: Sequence[Example]) -> Floats:
        """Log seconds of each step on a usual machine, with a slower host, a faster one, a slower device, a faster one.

        Shape: (5, len(runs)).
        """
        return self.clocks(runs)[0]

    def clocks(self, runs: Sequence[Example]) -> tuple[Floats, Floats, PathTimes]:
        """:meth:`log_step_s`, the device's seconds of each launch on a usual machine, and the longest path there.

        Shapes: (5, B), (B, N).
        """
        packed = self.pack(runs)
        with torch.inference_mode():
            clocks = [network(packed) for network in self.networks]
            log_s = [torch.stack([one.log_step_s(packed.is_launch, machine) for one in clocks]).mean(0) for machine in _MACHINES]
            device_s = torch.stack([one.device_s for one in clocks]).mean(0)
            parts = zip(*(one.longest_path() for one in clocks), strict=True)
            path = PathTimes(*(torch.stack(part).mean(0).double().numpy() for part in parts))
        found = torch.stack(log_s).double().numpy()
        return found + self._towards_trees(found[0], runs), device_s.double().numpy(), path

    def _towards_trees(self, log_s: Floats, runs: Sequence[Example]) -> Floats:
        """Half the difference between the trees' log time and the clocks' ``log_s`` (B,); 0 where the trees do not apply."""
        way = np.zeros(len(runs))
        some = [at for at, run in enumerate(runs) if trees_apply(run)]
        if self.forest is not None and some:
            way[some] = (self.forest.predict(sums_table([runs[at] for at in some])) - log_s[some]) / 2
        return way

    def combine(self, parts: Sequence[Predicted], runs: Sequence[Example]) -> Predicted:
        """The prediction on a usual machine."""
        return parts[0]

    def predict(self, runs: Sequence[Example]) -> Predicted:
        """See :class:`perfguard_models.learner.Learner`."""
        return self.combine(self.parts(runs), runs)

    def state(self) -> tuple[State, Mapping[str, Any]]:
        """See :class:`perfguard_models.learner.Learner`."""
        tensors = {"scale": self.scale}
        for at, network in enumerate(self.networks):
            tensors |= {f"network{at}.{name}": value for name, value in network.state_dict().items()}
        return tensors | (self.forest.tensors() if self.forest else {}), self.settings

    @classmethod
    def from_state(cls, tensors: State, settings: Mapping[str, Any]) -> Self:
        """See :class:`perfguard_models.learner.Learner`."""
        made = cls(**settings)
        made.scale = tensors["scale"]
        for at in range(settings["networks"]):
            network, prefix = Network(settings["hidden"]).float(), f"network{at}."
            network.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
            made.networks.append(network.eval())
        made.forest = StepForest.from_tensors(tensors)
        return made

    def pack(self, runs: Sequence[Example]) -> Packed:
        """What a network reads of ``runs``."""
        views = [run.view for run in runs]
        lengths = [len(view["order"]) for view in views]
        starts = np.cumsum([0, *(len(view["name"]) for view in views)])
        order = np.zeros((len(runs), max(lengths, default=0)), dtype=np.int64)
        before, is_launch = np.zeros_like(order, dtype=np.float32), np.zeros_like(order, dtype=np.float32)
        for at, (view, length) in enumerate(zip(views, lengths, strict=True)):
            order[at, :length] = view["order"] + starts[at]
            before[at, :length] = view["views"]
            is_launch[at, :length] = 1
        x = torch.from_numpy(np.concatenate([columns_of(view) for view in views]))
        joined = {
            key: torch.from_numpy(np.concatenate([view[key] for view in views])) for key in ("name", "host", "roofline", "steps")
        }
        flags = np.array([view["x"][0, [_COMPILED, _TRAIN]] if len(view["x"]) else (0, 0) for view in views], dtype=np.float32)
        timed = torch.from_numpy(np.stack([view["timed"] for view in views]))
        is_cpu = torch.from_numpy(np.concatenate([view["is_cpu"] for view in views]))
        return Packed(
            x=((x - self.scale[0]) / self.scale[1]).clamp(-_FARTHEST, _FARTHEST),
            name=joined["name"].long(),
            host=joined["host"].long(),
            roofline=joined["roofline"],
            steps=joined["steps"],
            order=torch.from_numpy(order),
            is_launch=torch.from_numpy(is_launch),
            views=torch.from_numpy(before),
            compiled=torch.from_numpy(flags[:, :1]),
            train=torch.from_numpy(flags[:, 1]).long(),
            copied=torch.tensor([float(view["copied"][0]) for view in views], dtype=torch.float32),
            launched=timed[:, :1],
            started=timed[:, 1],
            device=torch.from_numpy(np.stack([view["device"] for view in views])),
            is_cpu=is_cpu,
        )


def columns_of(view: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
    """The operators' columns and the device's. Shape: (rows, len(COLUMNS) + len(DEVICE_COLUMNS))."""
    device = np.broadcast_to(view["device"], (len(view["x"]), len(DEVICE_COLUMNS)))
    return np.concatenate([view["x"], device], axis=1, dtype=np.float32)


def trees_apply(run: Example) -> bool:
    """Whether it is a whole step, and no operator has time steps that wait for one another, which sums do not show."""
    return not (run.is_single or run.view["steps"].any())


def batches_of(runs: Sequence[Example], order: Iterable[int], most: float = math.inf) -> Iterator[list[int]]:
    """Indices of at most ``most`` runs in batches whose padded launches are not too many, in the order of ``order``."""
    chosen: list[int] = []
    longest = 0
    for index in order:
        longest = max(longest, len(runs[index].view["order"]))
        if len(chosen) == most or (chosen and longest * (len(chosen) + 1) > _LAUNCHES_A_BATCH):
            yield chosen
            chosen, longest = [], len(runs[index].view["order"])
        chosen.append(index)
    if chosen:
        yield chosen
