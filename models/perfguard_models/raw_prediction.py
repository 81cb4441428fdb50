"""GuardNet's weights: a correction of physics, how unsure it is, and where it ends."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from perfguard.devices import catalog
from perfguard.graph import OpGraph
from perfguard_models.features.convolutions import CONVOLUTION_KINDS
from perfguard_models.features.step import STEP_FEATURES
from perfguard_models.graph_network import PathTimes
from perfguard_models.learner import Step, predict_with_spread, share_of, sums_table
from perfguard_models.residual import GPInputs, ResidualPrior
from perfguard_models.setting import Setting, timed_as_any
from perfguard_models.step_time import StepTime
from perfguard_models.trained import FittedModel, step_of
from perfguard_models.weight_files import version_of

if TYPE_CHECKING:
    from perfguard.devices import Device

Floats = npt.NDArray[np.float64]
TARGETS = ("memory", "time")
_SHARES = ("gpu_util", "sm_active")
"""Measured of perceptrons alone."""
_REPLAYED_OPTIONS = frozenset({"tf32", "no-tf32", "batch-on-device"})
"""With other switches on, the replay was never compared with measurements."""
_TRAINED_HALF = "amp-fp16"
"""The half precision of the training rows of compiled steps."""
_EMBEDDED = (
    ("log_reserved", 22.5, 2.0), ("log_roofline", -2.0, 2.0),
    ("log_operators", 6.5, 1.0), ("log_batch", 4.0, 2.0), ("log_parameters", 18.0, 2.0), ("share_activation", 0.5, 0.5),
    ("conv_pointwise", 0.25, 0.25), ("conv_depthwise", 0.1, 0.2), ("time_matmul", 0.3, 0.4),
    ("train", 0.5, 0.5), ("half", 0.5, 0.5),
)  # fmt: skip
"""Step features in the embedding of the residual process: name, middle and width."""
_EMBEDDED_INDEX = [STEP_FEATURES.index(name) for name, _, _ in _EMBEDDED]
_TIME_SHARES = (
    *(name for name in STEP_FEATURES if name.startswith(("time_", "name_", "product_"))),
    *(name for name in STEP_FEATURES if name.startswith("conv_") and not name.startswith("conv_log_")),
    "nhwc", "compiled", "launch_share", "traffic_share",
)  # fmt: skip
"""Shares of the roofline, and flags, from which the process computes similarity."""
_TIME_SHARES_INDEX = [STEP_FEATURES.index(name) for name in _TIME_SHARES]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PhysicsConfig:
    """How far measurements are from physics where no training row is like the step. A sigma is the standard deviation of
    log(measured / physics)."""

    memory_log_sigma: float = 0.2
    """The driver's reading is within 10% of replay and context on average, but convolution workspaces can double it."""
    replay_log_sigma: float = 0.04
    """The same in PyTorch's default settings, in float32. Of xMem's 112 training runs of 10 networks on three cards, 94% are
    inside the 90% interval."""
    loaded_sigma_bytes: float = 100 * 2**20
    """Standard deviation of the bytes that the driver loads beside the replay, in the same settings."""
    all_modules_bytes: float = 1005 * 2**20
    """Bytes that the machine of the memory's training rows held beside replay and context: CUDA loaded all its modules there.
    GPUMemNet's perceptrons, in which cuDNN has no workspaces, show them (`benchmarks/loaded_bytes.py`). Since CUDA 11.7 only
    those that are used are loaded."""
    time_log_sigma: float = 0.6
    """A step takes one to four times its roofline."""
    new_cpu_log_sigma: float = 0.2
    """What another CPU adds to the time's. A guess: the training rows are of one machine."""

    def log_sigma(self, target: str) -> float:
        """``memory_log_sigma`` or ``time_log_sigma``."""
        return self.memory_log_sigma if target == "memory" else self.time_log_sigma


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """What the residual process assumes. `benchmarks/online.py` shows how it learns."""

    most_trust: float = 0.5
    """The largest standard deviation of the trust in alternatives. In units of the distance from the prediction."""
    machine_trust: float = 2.0
    """Factor on the distance of another machine's step time from the usual one."""
    most_correction: float = 2.0
    """A prediction is corrected less if its sigma is smaller than that of the measured runs by more than this factor."""
    farthest: float = 3.0
    """The largest distance of physics from a prediction, as a logarithm."""
    most_gibibytes: float = 4.0
    """The largest share of a constant gibibyte in the memory of a step."""
    share_length: float = 0.15
    """Length scale of the shares of the roofline."""


PHYSICS, PROCESS = PhysicsConfig(), ProcessConfig()
PRIOR = ResidualPrior(bias=0.35, local=0.8, length=0.7, noise=0.52, trust=1.5, of_the_step=0.9)
"""Prior of a residual of standard deviation 1, chosen on machines whose source was left out (`benchmarks/new_machine.py`).

``of_the_step``: networks that were measured twice in the tables, under two names, are 0.1 to 2% apart, where the noise is 3 to
11%.
"""


class RawPrediction(NamedTuple):
    """The weights' prediction for C graphs on a device, before any run there. :meth:`Weights.predict` gives C = 1.

    Targets are "memory" in log bytes and "time" in log seconds of a step.
    """

    log_value: dict[str, Floats]  # shapes: (C,)
    op_time_s: Floats  # shape: (C, N), the step time in proportion to the device's times
    path: PathTimes
    """What the step time consists of."""
    embedding: dict[str, torch.Tensor]  # shapes: (C, d)
    alternatives: dict[str, torch.Tensor]
    """Distances from the value: of physics for memory, of machines with a slower host or device for time. Shapes: (C, e)"""
    prior_scale: dict[str, Floats]
    """Factors on the standard deviations of PRIOR. Shapes: (C,)"""
    shares: dict[str, Floats]
    """"gpu_util" and "sm_active", 0 to 1, NaN where the weights do not predict them. Shapes: (C,)"""
    known: dict[str, npt.NDArray[np.bool_]]
    """Whether the error on such steps was measured on this device. Shapes: (C,)"""
    step_features: npt.NDArray[np.float32]  # shape: (C, len(STEP_FEATURES))
    step: Step
    """The graph as the network reads it."""

    def prior_at(self, target: str, row: int) -> ResidualPrior:
        """The prior of one of the graphs."""
        scale = float(self.prior_scale[target][row])
        terms = {term: scale * getattr(PRIOR, term) for term in ("bias", "local", "noise", "trust")}
        return dataclasses.replace(PRIOR, **terms | {"trust": min(terms["trust"], PROCESS.most_trust)})


class Weights:
    """Weights for one kind of device.

    The graph network and trees for time (`step_time`). For memory the replay, and forests (`memory_forest`) on CPUs and where
    cuDNN tries algorithms.
    """

    def __init__(self, memory: FittedModel, time: FittedModel) -> None:
        self._memory = memory
        self._time = time
        self.version = version_of(memory.card) + version_of(time.card)
        """It differs for other tensors or another calibration."""

    @property
    def step_time(self) -> StepTime:
        """The network and the trees."""
        assert isinstance(self._time.learner, StepTime)
        return self._time.learner

    def trained_on(self, device: Device) -> bool:
        """Whether the training rows include runs on this device. A CPU is known by its name."""
        if device.kind == "cpu":
            return device.name in self._time.card["trained_cpus"]
        return device.id in self._time.card["trained_devices"] or device.id in self._memory.card["trained_devices"]

    def predict(self, graph: OpGraph, device: Device) -> RawPrediction:
        """The weights' prediction for ``graph``, with C = 1."""
        number = 1
        setting, steps = Setting.of(graph, device), [step_of(self._time.learner, graph, device)]
        features = sums_table(steps)
        log_step_s, op_time_s, path = self._clocks(graph, steps, device)
        memory = self._memory_by_trees(graph, steps, setting, device)
        log_bytes, memory_sigma = (np.zeros(number), np.zeros(number)) if memory is None else memory
        is_measured = self._has_readings(setting), not timed_as_any(graph, device).isdisjoint(self._time.card["timed"])
        raw = RawPrediction(
            log_value={"memory": log_bytes, "time": log_step_s[0]},
            op_time_s=op_time_s,
            path=path,
            embedding=dict.fromkeys(TARGETS, embedding_of(features)),
            alternatives={},
            prior_scale={"memory": memory_sigma, "time": self._time_sigma(log_step_s, setting, device)},
            shares=self._shares(steps) if setting.is_perceptron and device.kind == "cuda" else {},
            known={target: np.full(number, one) for target, one in zip(TARGETS, is_measured, strict=True)},
            step_features=features,
            step=steps[0],
        )
        if memory is None:
            raw = memory_by_replay(raw, graph, device)
        machine = torch.from_numpy(log_step_s[[1, 3]] - log_step_s[0]).T * PROCESS.machine_trust
        alternatives = {"memory": torch.from_numpy(physics_of(features, raw.log_value["memory"])), "time": machine}
        if device.kind == "cpu":
            alternatives["memory"] = torch.zeros_like(alternatives["memory"])  # there is no allocator's cache, and no context
            raw = raw._replace(known=raw.known | {"memory": raw.known["time"]})  # the training rows have both
        return raw._replace(alternatives=alternatives)

    def _memory_by_trees(
        self, graph: OpGraph, steps: Sequence[Step], setting: Setting, device: Device
    ) -> tuple[Floats, Floats] | None:
        """Log bytes and their standard deviations on a CPU, and where cuDNN's benchmark mode leaves workspaces in the cache.

        There, the training rows of float32 are readings, of one machine. Those of half precision say what fitted, on machines of
        which nobody knows what they had loaded. Shapes: (C,), (C,). None: it is another step, or the forests have no such ones.
        """
        calibration = self._memory.calibration
        has_workspaces = "cudnn_benchmark" in graph.options and not graph.kinds.isdisjoint(CONVOLUTION_KINDS)
        if device.kind == "cuda" and not has_workspaces:
            return None
        predicted, spread = predict_with_spread(self._memory.learner, steps)
        if not np.isfinite(predicted["memory"]).all():
            return None
        known_gpu = self._has_readings(setting)
        own = np.array([calibration.log_sigma("memory", setting.group, one, known_gpu=known_gpu) for one in spread["memory"]])
        if device.kind == "cpu":
            return predicted["memory"], own
        there = np.exp(predicted["memory"])  # on the machines of the training rows
        loaded, loaded_sigma = PHYSICS.all_modules_bytes, PHYSICS.loaded_sigma_bytes
        if setting.precision != "fp32":
            loaded, loaded_sigma = 0.0, PHYSICS.all_modules_bytes / 2
        num_bytes = np.maximum(there - loaded, graph.peak_live_bytes + device.context_bytes)
        return np.log(num_bytes), np.hypot(own * there, loaded_sigma) / num_bytes

    def _has_readings(self, setting: Setting) -> bool:
        """Whether the training rows have enough readings of the memory in this setting."""
        return f"memory/{setting.group}" in self._memory.calibration.scale

    def _shares(self, steps: Sequence[Step]) -> dict[str, Floats]:
        """Utilisation of perceptrons. Shapes: (C,)."""
        predicted = self._memory.learner.predict(steps)
        return {name: np.array(list(map(share_of, predicted[name].tolist()))) for name in _SHARES}

    def _clocks(self, graph: OpGraph, steps: Sequence[Step], device: Device) -> tuple[Floats, Floats, PathTimes]:
        """Log seconds on machines as :meth:`StepTime.log_step_s` orders them, (5, C), the time by operator, (C, N), and the path
        that takes longest."""
        clocks = self.step_time
        log_step_s, device_s, path = clocks.clocks(steps)
        card, is_part, _ = device.id.partition(":")
        if is_part and card in catalog():  # a part is never faster than the whole, but the network may say so
            log_step_s = np.maximum(log_step_s, clocks.log_step_s([step_of(clocks, graph, catalog()[card])]))
        total_s = np.maximum(device_s.sum(axis=1, keepdims=True), 1e-12)
        return log_step_s, device_s * np.exp(log_step_s[0])[:, None] / total_s, path

    def _time_sigma(self, log_step_s: Floats, setting: Setting, device: Device) -> Floats:
        calibration, known_gpu = self._time.calibration, device.id in self._time.card["trained_devices"]
        spread = log_step_s.std(axis=0).tolist()
        sigma = np.array([calibration.log_sigma("time", setting.group, one, known_gpu=known_gpu) for one in spread])
        is_new_cpu = device.kind == "cpu" and not self.trained_on(device)
        return np.hypot(sigma, PHYSICS.new_cpu_log_sigma) if is_new_cpu else sigma

    def knows_compiled(self, graph: OpGraph, device: Device) -> bool:
        """Whether the weights were trained on compiled runs of such graphs, whatever their sizes.

        Compiled steps of any GPU count, and both half precisions as one.
        """
        if device.kind == "cpu":
            return False
        own = Setting.of(graph, device)
        if own.precision != "fp32":
            own = dataclasses.replace(own, precision=_TRAINED_HALF)
        setting = own.group.partition(" ")[2]
        return any(group.partition(" ")[2] == setting for group in self._time.calibration.scale)


def scale_of(log_sigma: float, of_the_process: float) -> float:
    """Share of the process's correction that applies to a step with this sigma, beside the sigma of the measured runs."""
    return min(1.0, PROCESS.most_correction * log_sigma / of_the_process)


def gp_inputs(
    x: torch.Tensor,
    alternatives: torch.Tensor,
    *,
    regime: torch.Tensor | float = 0.0,
    scale: torch.Tensor | float = 1.0,
    setting: torch.Tensor | float = 0.0,
) -> GPInputs:
    """Inputs of the residual process for C steps. A single number holds for all of them."""
    columns = (torch.as_tensor(column, dtype=torch.float64).expand(len(x)) for column in (regime, scale, setting, 0.0))
    return GPInputs(x, alternatives, *columns)


def memory_by_replay(raw: RawPrediction, graph: OpGraph, device: Device) -> RawPrediction:
    """Replace the memory by that of the allocator's replay and the driver's context, with its sigma."""
    num_bytes = graph.peak_live_bytes if device.kind == "cpu" else graph.reserved_bytes
    value = np.log(np.array([max(num_bytes, 1) + device.context_bytes], dtype=np.float64))
    is_validated = device.kind == "cuda" and _replay_is_validated(graph)
    sigma = np.full(1, PHYSICS.memory_log_sigma)
    if is_validated:  # a relative and a constant part
        sigma = np.hypot(PHYSICS.replay_log_sigma, PHYSICS.loaded_sigma_bytes / np.exp(value))
    return raw._replace(
        log_value=raw.log_value | {"memory": value},
        prior_scale=raw.prior_scale | {"memory": sigma},
        known=raw.known | {"memory": np.full(1, is_validated)},
    )


def _replay_is_validated(graph: OpGraph) -> bool:
    """Whether the replay's memory was compared with measurements of such steps: training in PyTorch's default settings."""
    if (graph.mode, graph.precision, graph.layout) != ("train", "fp32", "nchw") or "rnn" in graph.kinds:
        return False
    idle = {"cudnn_benchmark"} if graph.kinds.isdisjoint(CONVOLUTION_KINDS) else set()
    return (_REPLAYED_OPTIONS | idle).issuperset(graph.options) and graph.has_all_bytes


def embedding_of(sums: npt.NDArray[np.float32]) -> torch.Tensor:
    """Embedding of C steps from their step features ``sums``: their sizes, and what they spend their time on. Shape: (C, d).

    Distances within both halves count alike, whatever their number of columns.
    """
    middles, widths = (np.array([row[part] for row in _EMBEDDED]) for part in (1, 2))
    sizes = (sums[:, _EMBEDDED_INDEX].astype(np.float64) - middles) / widths
    shares = sums[:, _TIME_SHARES_INDEX].astype(np.float64) / PROCESS.share_length
    halves = [half * math.sqrt((sizes.shape[1] + shares.shape[1]) / half.shape[1]) for half in (sizes, shares)]
    return torch.from_numpy(np.concatenate(halves, axis=1))


def physics_of(sums: npt.NDArray[np.float32], log_bytes: Floats) -> Floats:
    """Log reserved and live bytes minus ``log_bytes`` (C,), and the share of a constant gibibyte in them. Shape: (C, 3)."""
    physics = sums[:, [STEP_FEATURES.index(name) for name in ("log_reserved", "log_live")]].astype(np.float64)
    apart = np.clip(physics - log_bytes[:, None], -PROCESS.farthest, PROCESS.farthest)
    gibibyte = np.minimum(2**30 / np.exp(physics[:, :1]), PROCESS.most_gibibytes)
    return np.concatenate([apart, gibibyte], axis=1)
