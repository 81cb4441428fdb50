"""Training of the graph network on measured step times, and of the trees beside it.

Sources differ in their machines: another host, another clock. Each machine has a host factor and a device factor with a prior
around one. They are learnt beside the network and left out when serving. CPUs have none: one was measured, and
the network learns its host, too.
"""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.ensemble import HistGradientBoostingRegressor
from torch import nn

from perfguard_models.features.launches import COLUMNS, DEVICE_COLUMNS, HALF_OVER_FLOAT
from perfguard_models.graph_network import Clocks, GraphNetwork, Packed, longest_of
from perfguard_models.learner import State, Step, sums_table
from perfguard_models.step_time import StepTime, batches_of, columns_of, trees_apply
from perfguard_models.trees import DIRECTIONS, VERSION, StepForest, forest_columns, rough_time, start_of
from perfguard_research.dataset import Run
from perfguard_research.learners import OnEpoch, labels_of, seed_of
from perfguard_research.trees import forest_of_boosting, tensors_of

_START_S = {"phase": 15e-6, "latency": 4e-6, "dependent": 10e-6, "view": 2e-6, "copy": 1 / 6e9}
_START_CONSTANT_S = 200e-6, 400e-6
_START_CLOCK_POWER, _START_LOG_INEFFICIENCY = 0.1, 0.7
"""Where learning starts."""
_SHARPNESS = 0.02
"""Temperature of the smooth maximum, as a share of the longest path."""
_RUNS_A_BATCH = 16
_OPERATORS_A_BATCH = 64
_HUBER = 0.2
_NOISE = 0.1
"""Standard deviation of log times beside which the priors of machines are weighed."""
_HOST_PRIOR = 1e-4
"""Weight of the prior of the host's costs. Without it the loss and its softmax, once in each step, took what all steps have
in common. Then a network with many softmaxes was far too slow."""
_HALF_LAW = 0.3
"""Weight of the law that half precision is not slower than TF32."""
_EPOCHS_OF_CPUS = 3
"""How often an epoch has the runs of CPUs, which are few and small, and must teach what GPUs do not have."""
_MACHINE_RATE = 2e-2
_WEIGHT_DECAY = 1e-2
_ROWS_FOR_SCALE = 400
_LENGTHS_APART = 60
"""Runs of one batch have about as many launches, so that little is padded. The order within this many launches is random."""
_COLUMN = {name: at for at, name in enumerate(COLUMNS)} | {name: len(COLUMNS) + at for at, name in enumerate(DEVICE_COLUMNS)}
_FEWEST_STEPS = 50
"""With fewer measured steps there are no trees."""
_TREES_RATE = 0.05
_LEAVES = 20
_LEAST_LEAF = 20
_FEATURES_A_SPLIT = 0.5
_REFERENCE = 40
"""Steps for rehearsal."""
_FARTHEST_LABEL = 0.2
"""Log times are clipped to this distance from the fitted median."""


class _Machines(nn.Module):
    """The log factors of machines."""

    def __init__(self, runs: Sequence[Run]) -> None:
        super().__init__()
        machines = sorted({run.machine for run in runs})
        self.index = {machine: at for at, machine in enumerate(machines)}
        self.has_factors = torch.tensor([[float(gpu != "cpu")] for _, gpu, _ in machines])
        self.factor = nn.Parameter(torch.zeros(len(machines), 2))

    def of(self, runs: Sequence[Run]) -> torch.Tensor:
        """Log factors of the host and the device of each run. Shape: (len(runs), 2)."""
        at = [self.index[run.machine] for run in runs]
        return self.factor[at] * self.has_factors[at]


class TrainableStepTime(StepTime):
    """:class:`StepTime`, with `fit`.

    Args:
        epochs: how often each run is seen.
        hidden: width of the layers that read an operator alone.
        rounds: of messages between operators. 0: none.
        bound: the most that neighbours change of the logarithm of an operator's inefficiency.
        learning_rate: of AdamW, at its highest.
        host_sigma: prior standard deviation of a machine's log host factor.
        device_sigma: the same of its log device factor. It is small, so that the network learns the cards and no source does.
        trees: how many boosted trees. 0: the network alone.
        seed: of weights, order and trees.
    """

    tables: ClassVar[tuple[str, ...]] = ("workload", "transformer", "run", "operator", "collected")

    def __init__(
        self,
        *,
        epochs: int = 8,
        hidden: int = 96,
        rounds: int = 1,
        bound: float = 1.5,
        learning_rate: float = 5e-3,
        host_sigma: float = 0.5,
        device_sigma: float = 0.01,
        trees: int = 400,
        seed: int = 0,
    ) -> None:
        super().__init__(
            epochs=epochs, hidden=hidden, rounds=rounds, bound=bound, learning_rate=learning_rate, host_sigma=host_sigma,
            device_sigma=device_sigma, trees=trees, seed=seed,
        )  # fmt: skip

    def new_network(self) -> GraphNetwork:
        """A network that has not learnt yet."""
        network = super().new_network()
        with torch.no_grad():
            for head, start in ((network.own, _START_LOG_INEFFICIENCY), (network.out, 0.0)):
                nn.init.zeros_(head.weight)
                nn.init.constant_(head.bias, start)
            for name, seconds in _START_S.items():
                getattr(network.machine, name).fill_(math.log(seconds))
            network.machine.constant.copy_(torch.tensor(_START_CONSTANT_S).log())
            network.machine.clock_power.fill_(_START_CLOCK_POWER**0.5)
        return network

    def state(self) -> tuple[State, Mapping[str, Any]]:
        """See :class:`perfguard_research.learners.Trainable`."""
        tensors = {"scale": self.scale}
        tensors |= {f"network.{name}": value for name, value in self.network.state_dict().items()}
        for at, step in enumerate(self.reference):
            tensors |= {f"reference{at}.{name}": torch.from_numpy(np.ascontiguousarray(a)) for name, a in step.view.items()}
        if self.forest is not None:
            tensors |= tensors_of({"forest": self.forest.forest})
            tensors["forest.largest"] = torch.tensor([self.forest.largest], dtype=torch.float64)
            tensors["forest.columns"] = torch.tensor(VERSION)
        return tensors, self.settings

    def fit(self, runs: Sequence[Run], *, on_epoch: OnEpoch | None = None) -> None:
        timed = [run for run in runs if "time" in run.labels and len(run.view["order"])]
        sample = random.Random(self.settings["seed"]).sample(timed, min(len(timed), _ROWS_FOR_SCALE))
        x = np.concatenate([columns_of(run.view) for run in sample])
        self.scale = torch.from_numpy(np.stack([x.mean(0), x.std(0) + 0.1]))
        self._fit_network(timed, on_epoch)
        steps = [run for run in timed if trees_apply(run)]
        has_trees = self.settings["trees"] > 0 and len(steps) >= _FEWEST_STEPS
        self.forest = self._fitted_forest(steps) if has_trees else None
        self.reference = _drawn(timed, self.settings["seed"])

    def _fitted_forest(self, steps: Sequence[Run]) -> StepForest:
        """Trees of the squared error, on log times that are clipped around the median, so that outliers count less.

        scikit-learn does not keep monotonic constraints with the absolute error: its leaves become medians after they have grown.
        """
        sums = sums_table(steps)
        largest = float(np.sort(rough_time(sums))[-_LEAST_LEAF])  # no tree splits beyond
        x = forest_columns(sums)
        y = labels_of(steps, "time") - start_of(sums, largest)
        median = self._boosting("absolute_error", None).fit(x, y).predict(x)
        mean = self._boosting("squared_error", list(DIRECTIONS.values()))
        mean.fit(x, np.clip(y, median - _FARTHEST_LABEL, median + _FARTHEST_LABEL))
        return StepForest(forest_of_boosting(mean), largest)

    def _boosting(self, loss: str, directions: list[int] | None) -> HistGradientBoostingRegressor:
        return HistGradientBoostingRegressor(
            loss=loss,
            max_iter=self.settings["trees"],
            learning_rate=_TREES_RATE,
            max_leaf_nodes=_LEAVES,
            min_samples_leaf=_LEAST_LEAF,
            max_features=_FEATURES_A_SPLIT,
            early_stopping=False,  # the default depends on the number of rows
            monotonic_cst=directions,
            random_state=self.settings["seed"],
        )

    def _fit_network(self, runs: Sequence[Run], on_epoch: OnEpoch | None) -> None:
        runs = [run for run in runs for _ in range(_EPOCHS_OF_CPUS if run.gpu == "cpu" else 1)]
        seed = self.settings["seed"]
        torch.manual_seed(seed)
        self.network = self.new_network()
        self.machines = _Machines(runs)
        network = self.network
        machines = self.machines
        weights = [parameter for name, parameter in network.named_parameters() if not name.startswith("machine.")]
        rate = self.settings["learning_rate"]
        epochs = self.settings["epochs"]
        optimizer = torch.optim.AdamW(
            [
                {"params": weights, "weight_decay": _WEIGHT_DECAY},
                {"params": [*network.machine.parameters(), *machines.parameters()], "lr": _MACHINE_RATE, "weight_decay": 0.0},
            ],
            lr=rate,
            fused=True,
        )
        weight = _weights_of(runs)
        sigma = torch.tensor([self.settings["host_sigma"], self.settings["device_sigma"]])
        steps = sum(len(_batches(runs, seed_of(seed, epoch))) for epoch in range(epochs))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [rate, _MACHINE_RATE], total_steps=steps, pct_start=0.2)
        network.train()
        for epoch in range(epochs):
            total = 0.0
            for batch in _batches(runs, seed_of(seed, epoch)):
                some = [runs[index] for index in batch]
                packed = self.pack(some)
                clocks: Clocks = network(packed)
                smooth = functools.partial(smooth_longest_of, is_launch=packed.is_launch)
                measured = torch.tensor([run.labels["time"] for run in some])
                error = clocks.log_step_s(machines.of(some), longest_of=smooth) - measured
                own = weight[batch]
                huber = nn.functional.huber_loss(error, torch.zeros_like(error), delta=_HUBER, reduction="none")
                loss = (huber * own).sum() / _RUNS_A_BATCH  # each run counts alike, also in a batch of fewer or more
                prior = (machines.factor / sigma).square().sum() / 2
                loss = loss + prior * _NOISE**2 / len(runs) + _HOST_PRIOR * _prior_of(network)
                loss = loss + _HALF_LAW * self._half_over_tf32(network, packed)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                total += float(error.detach().abs().mean()) * len(batch)
            if on_epoch is not None:
                on_epoch(epoch + 1, epochs, total / len(runs))
        network.eval()

    def _half_over_tf32(self, network: GraphNetwork, packed: Packed) -> torch.Tensor:
        """How much longer products take in half precision than in TF32, which no law allows. Shape: ().

        It is the mean squared log ratio of the times, where it is above 0. The operators in TF32 are those of the batch with
        the columns changed: no row of the tables has both. Half precision was measured far more often, so TF32 gives way.
        """
        x = packed.x * self.scale[1] + self.scale[0]
        chosen = (x[:, _COLUMN["log_k"]] > 0) & (x[:, _COLUMN["half"]] > 0.5) & (x[:, _COLUMN["log_tf32_over_float"]] > 0)
        half = x[chosen]
        names = packed.name[chosen]
        if not len(half):
            return torch.zeros(())
        tf32 = half.clone()
        rates = half[:, _COLUMN["log_half_over_float"]] - half[:, _COLUMN["log_tf32_over_float"]]
        tf32[:, [_COLUMN["half"], _COLUMN["bf16"]]] = 0.0
        tf32[:, _COLUMN["tf32"]] = 1.0
        tf32[:, _COLUMN["log_compute_s"]] += rates + math.log(HALF_OVER_FLOAT)
        tf32[:, [_COLUMN[name] for name in ("log_read", "log_written", "log_traffic_s", "log_over_l2")]] += math.log(2)
        both = []
        for rows in (half, tf32):
            log_roofline = torch.maximum(rows[:, _COLUMN["log_compute_s"]], rows[:, _COLUMN["log_traffic_s"]])
            rows[:, _COLUMN["log_roofline_s"]] = log_roofline
            read = network.read(torch.cat([self.standardised(rows), network.name(names)], dim=1))
            both.append(log_roofline + network.own(read)[:, 0])  # without neighbours
        return torch.relu(both[0].detach() - both[1]).square().mean()


def smooth_longest_of(paths: torch.Tensor, *, is_launch: torch.Tensor) -> torch.Tensor:
    """A maximum of the paths with a gradient for each; ``is_launch`` is 0 beyond the end of a step. Shapes: (B, N) → (B,)."""
    temperature = _SHARPNESS * longest_of(paths).detach()[:, None]
    closed = torch.where(is_launch > 0, paths / temperature, -1e9)
    return (temperature * torch.logsumexp(closed, 1, keepdim=True))[:, 0]


def _prior_of(network: GraphNetwork) -> torch.Tensor:
    """Squared distances of kinds from their phase's mean, and ten times those of the constants from their start. Shape: ().

    Rare kinds stay at the mean. What one kind of network has in each step is not taken for the host's constant.
    """
    start = torch.tensor(_START_CONSTANT_S).log()
    return network.machine.kind.square().sum() + 10 * (network.machine.constant - start).square().sum()


def _drawn(runs: Sequence[Run], seed: int) -> list[Step]:
    """Steps for rehearsal, of as many groups as can be. Small graphs come first: they ship with the weights."""
    steps = sorted((run for run in runs if not run.is_single), key=lambda run: len(run.view["order"]))
    small = steps[: max(_REFERENCE, len(steps) // 2)]
    by_group: dict[str, list[Run]] = {}
    for run in random.Random(seed).sample(small, len(small)):
        by_group.setdefault(run.setting.group, []).append(run)
    found: list[Step] = []
    while len(found) < min(_REFERENCE, len(small)):
        found += [Step(False, own.pop(0).view) for own in by_group.values() if own]
    return found[:_REFERENCE]


def _weights_of(runs: Sequence[Run]) -> torch.Tensor:
    """Runs of a large group count less, so that small sources are heard. Their mean is 1. Shape: (len(runs),)."""
    groups = [(run.source, run.gpu, run.mode, run.setting.variant) for run in runs]
    sizes = Counter(groups)
    weight = torch.tensor([sizes[group] ** -0.5 for group in groups])
    return weight / weight.mean()


def _batches(runs: Sequence[Run], seed: int) -> list[list[int]]:
    """Batches of runs of about the same length, in a random order. Single operators have their own."""
    random_numbers = np.random.default_rng(seed)
    lengths = np.array([len(run.view["order"]) for run in runs])
    order = np.argsort(lengths + random_numbers.normal(size=len(runs)) * _LENGTHS_APART).tolist()
    steps, single = ([index for index in order if runs[index].is_single == one] for one in (False, True))
    batches = [*batches_of(runs, steps, _RUNS_A_BATCH), *batches_of(runs, single, _OPERATORS_A_BATCH)]
    random.Random(seed).shuffle(batches)
    return batches
