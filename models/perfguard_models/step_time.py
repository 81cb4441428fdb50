"""The learner of step times: the graph network, and boosted trees on the sums of a step.

The prediction is the geometric mean of the time of the network (`graph_network`) and of the trees (`trees`), whose errors
differ. The trees are for GPUs alone: on CPUs they do not help (docs/decisions.md). Neither is believed where it lets matrix
products be faster than on any card of the same kind.

Shapes: B steps, N launches of the longest step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import pad_sequence

from perfguard_models.features import Arrays, FeatureSet
from perfguard_models.features.launches import COLUMNS, DEVICE_COLUMNS, LAUNCHES
from perfguard_models.features.step import SUMS
from perfguard_models.graph_network import NODE_COLUMNS, Clocks, GraphNetwork, Packed, PathTimes
from perfguard_models.learner import QUANTITIES, Example, Floats, Predicted, State, Step, sums_table
from perfguard_models.trees import StepForest

_LAUNCHES_A_BATCH = 40_000
_COMPILED = COLUMNS.index("compiled")
_TRAIN = COLUMNS.index("train")
_COMPUTE = COLUMNS.index("log_compute_s")
_PRODUCT = COLUMNS.index("log_k")
_TENSOR_CORES = [COLUMNS.index("half"), COLUMNS.index("tf32")]
_FASTEST_ON_TENSOR_CORES, _FASTEST = 0.9, 1.2
"""Shares of the peak: the highest of measured products, rounded up. On tensor cores of data-centre cards: 0.88 of 26,650 on the
A100 and the H100 (Vidur), and 0.90 on the V100 (DeepBench). Else 1.16 on an RTX 5090 (zzc0721/torch-performance-test-data), and
1.07 in float32 on a GTX 1080 Ti (DeepBench): GeForce cards run above the clock of their data sheets. An RTX 4060 Ti is left
aside: 1.35 in float16, but 0.97 in bfloat16."""
_CLOCK = DEVICE_COLUMNS.index("log_clock")
_HALF_OVER_FLOAT = DEVICE_COLUMNS.index("log_half_over_float")
_EDGE_SCALE = 5.0
"""Divides the columns of edges: their logarithms are within ±10."""
_FARTHEST = 6.0
"""Standard deviations from the mean of a column at which it is clipped: beyond what was learnt, nothing is extrapolated."""
_MACHINES = torch.tensor([(0.0, 0.0), (0.5, 0.0), (-0.5, 0.0), (0.0, 0.15), (0.0, -0.15)], dtype=torch.float32, device="cpu")
"""Log factors of hosts and devices: a usual machine, and others as far from it as machines of the tables are. The device is
named, because a script may have set another default before this module is imported."""


class StepTime:
    """The learner of step times.

    Args:
        hidden, rounds, bound: of the network.
        training: what else it was trained with.
    """

    name: ClassVar[str] = "step-time"
    views: ClassVar[tuple[FeatureSet, ...]] = (LAUNCHES, SUMS)

    def __init__(self, *, hidden: int, rounds: int, bound: float, **training: Any) -> None:
        self.settings: dict[str, Any] = {"hidden": hidden, "rounds": rounds, "bound": bound, **training}
        self.scale = torch.zeros(2, NODE_COLUMNS)
        self.network = self.new_network()
        self.forest: StepForest | None = None
        self.reference: list[Step] = []
        """Some steps of the training tables, for rehearsal."""

    def predict(self, runs: Sequence[Example]) -> Predicted:
        """See :class:`perfguard_models.learner.Learner`. The members are machines, a usual one first.

        They differ by as much as machines do, so their spread is what is not known of the machine.
        """
        log_s = np.full((len(_MACHINES), len(runs)), np.nan)
        for indices in batches_of(runs, range(len(runs))):
            log_s[:, indices] = self.log_step_s([runs[index] for index in indices])
        unknown = {target: np.full(len(runs), np.nan) for target in QUANTITIES}
        return unknown | {"time": log_s[0], "spread time": log_s.std(0)}

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
            clocks: Clocks = self.network(packed)
            log_s = torch.stack([clocks.log_step_s(machine) for machine in _MACHINES])
            path = clocks.longest_path()
        found = log_s.double().numpy()
        share = self.share_of_network(runs)
        if self.forest is not None and share.min(initial=1.0) < 1:
            found += (1 - share) * (self.forest.predict(sums_table(runs)) - found[0])
        least_s = np.array([least_products_s(run.view) for run in runs])
        found += np.log(np.maximum(least_s / np.exp(found[0]), 1.0))  # all machines alike: what is not known stays so
        return found, clocks.device_s.double().numpy(), path

    def share_of_network(self, runs: Sequence[Example]) -> Floats:
        """Weight of the network's log time in the prediction: a half where the trees have the other half. Shape: (len(runs),)."""
        return np.array([0.5 if self.forest is not None and trees_apply(run) else 1.0 for run in runs])

    def new_network(self) -> GraphNetwork:
        """A network that has not learnt yet."""
        return GraphNetwork(**{name: self.settings[name] for name in ("hidden", "rounds", "bound")}).float().eval()

    @classmethod
    def from_state(cls, tensors: State, settings: Mapping[str, Any]) -> StepTime:
        """See :class:`perfguard_models.learner.Learner`."""
        made = cls(**settings)
        made.scale = tensors["scale"]
        own = {key.removeprefix("network."): value for key, value in tensors.items() if key.startswith("network.")}
        made.network.load_state_dict(own)
        made.forest = StepForest.from_tensors(tensors)
        reference: dict[str, Arrays] = {}
        for key, tensor in tensors.items():
            if key.startswith("reference"):
                number, _, name = key.partition(".")
                reference.setdefault(number, {})[name] = tensor.numpy()
        made.reference = [Step(False, view) for _, view in sorted(reference.items())]
        return made

    def standardised(self, x: torch.Tensor) -> torch.Tensor:
        """Columns as the network reads them. Shape: (R, NODE_COLUMNS)."""
        return ((x - self.scale[0]) / self.scale[1]).clamp(-_FARTHEST, _FARTHEST)

    def pack(self, runs: Sequence[Example]) -> Packed:
        """What the network reads of ``runs``."""
        views = [run.view for run in runs]
        nodes = [len(view["name"]) for view in views]
        starts = np.cumsum([0, *nodes])
        order = [torch.from_numpy(view["order"] + start) for view, start in zip(views, starts[:-1], strict=True)]
        x = torch.from_numpy(np.concatenate([columns_of(view) for view in views]))
        joined = {
            key: torch.from_numpy(np.concatenate([view[key] for view in views]))
            for key in ("name", "host", "roofline", "steps", "tensor_x", "tensor_count")
        }
        flags = np.array([view["x"][0, [_COMPILED, _TRAIN]] if len(view["x"]) else (0, 0) for view in views], dtype=np.float32)
        timed = torch.from_numpy(np.stack([view["timed"] for view in views]))
        is_cpu = torch.from_numpy(np.concatenate([view["is_cpu"] for view in views]))
        ends = torch.from_numpy(
            np.concatenate([view["tensor_ends"] + start for view, start in zip(views, starts[:-1], strict=True)], axis=1)
        )
        ends = torch.cat([ends, ends.flip(0)], dim=1).long()
        count = joined["tensor_count"].repeat(2)
        direction = count.new_ones((len(count), 1))
        direction[len(count) // 2 :] = -1
        return Packed(
            x=self.standardised(x),
            name=joined["name"].long(),
            host=joined["host"].long(),
            roofline=joined["roofline"],
            steps=joined["steps"],
            node_is_cpu=is_cpu.repeat_interleave(torch.tensor(nodes, dtype=torch.long)),
            edge_index=ends,
            edge_attr=torch.cat([joined["tensor_x"].float().repeat(2, 1) / _EDGE_SCALE, direction], dim=1),
            edge_weight=count / count.new_zeros(int(starts[-1])).index_add(0, ends[1], count)[ends[1]],
            order=pad_sequence(order, batch_first=True).long(),
            is_launch=pad_sequence([torch.ones(len(rows), dtype=torch.float32) for rows in order], batch_first=True),
            views=pad_sequence([torch.from_numpy(view["views"]).float() for view in views], batch_first=True),
            compiled=torch.from_numpy(flags[:, :1]),
            train=torch.from_numpy(flags[:, 1]).long(),
            copied=torch.tensor([float(view["copied"][0]) for view in views], dtype=torch.float32),
            launched=timed[:, :1],
            started=timed[:, 1],
            clock=torch.tensor([float(view["device"][_CLOCK]) for view in views], dtype=torch.float32),
            is_cpu=is_cpu,
        )


def columns_of(view: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
    """The operators' columns, the device's, and whether it is a CPU. Shape: (rows, NODE_COLUMNS)."""
    of_device = np.concatenate([view["device"], view["is_cpu"]])
    return np.concatenate([view["x"], np.broadcast_to(of_device, (len(view["x"]), len(of_device)))], axis=1, dtype=np.float32)


def least_products_s(view: Mapping[str, npt.NDArray[Any]]) -> float:
    """Seconds of the matrix products of a step, if each is as fast as any was. On a CPU 0: there the peak is a measured rate."""
    x = view["x"].astype(np.float64)
    is_data_centre = view["device"][_HALF_OVER_FLOAT] > -0.01  # half precision is 8 times as fast as float32, or more
    on_tensor_cores = (x[:, _TENSOR_CORES] > 0.5).any(axis=1)
    share = np.where(on_tensor_cores & is_data_centre, _FASTEST_ON_TENSOR_CORES, _FASTEST)
    seconds = np.where(x[:, _PRODUCT] > 0, np.exp(x[:, _COMPUTE]) * 1e-6 / share, 0.0)
    return 0.0 if view["is_cpu"][0] else float(seconds[view["order"]].sum())


def trees_apply(run: Example) -> bool:
    """Whether it is a whole step on a GPU, and no operator has time steps that wait for one another, which sums do not show."""
    return not (run.is_single or run.view["is_cpu"][0] or run.view["steps"].any())


def batches_of(runs: Sequence[Example], order: Iterable[int], most: float = math.inf) -> Iterator[list[int]]:
    """Indices of at most ``most`` runs in batches whose padded launches are not too many, in the order of ``order``."""
    chosen: list[int] = []
    longest = 0
    for index in order:
        longest = max(longest, len(runs[index].view["order"]))
        if len(chosen) == most or (chosen and longest * (len(chosen) + 1) > _LAUNCHES_A_BATCH):
            yield chosen
            chosen = []
            longest = len(runs[index].view["order"])
        chosen.append(index)
    if chosen:
        yield chosen
