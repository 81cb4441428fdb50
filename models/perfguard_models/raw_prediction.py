"""GuardNet's weights: a correction of physics, how unsure it is, and where it ends."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from perfguard.collectives import LINKS, LinkTimes, link_times
from perfguard.devices import Device, catalog
from perfguard.graph import OpGraph, assumed_log_sigma, has_assumed_sizes, unknown_operators, unknown_span
from perfguard.predictor import HALF_INTERVAL, Estimate
from perfguard_models.calibration import Setting, timed_as_any
from perfguard_models.compiled import Compiled, as_compiled
from perfguard_models.features.convolutions import CONVOLUTION_KINDS
from perfguard_models.features.step import STEP_FEATURES
from perfguard_models.graph_network import PathTimes
from perfguard_models.learner import FittedModel, Floats, Step, share_of
from perfguard_models.residual import GPInputs, ResidualPrior
from perfguard_models.step_time import StepTime, least_products_s

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
_MIDDLES, _WIDTHS = (np.array(values) for values in list(zip(*_EMBEDDED, strict=True))[1:])
_TIME_SHARES = (
    *(name for name in STEP_FEATURES if name.startswith(("time_", "name_", "product_"))),
    *(name for name in STEP_FEATURES if name.startswith("conv_") and not name.startswith("conv_log_")),
    "nhwc", "compiled", "launch_share", "traffic_share",
)  # fmt: skip
"""Shares of the roofline, and flags, from which the process computes similarity."""
_TIME_SHARES_INDEX = [STEP_FEATURES.index(name) for name in _TIME_SHARES]
_ROOFLINE_INDEX = STEP_FEATURES.index("log_roofline")
_PHYSICS_INDEX = [STEP_FEATURES.index(name) for name in ("log_reserved", "log_live")]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PhysicsConfig:
    """How far measurements are from physics where no training row is like the step. A sigma is the standard deviation of
    log(measured / physics)."""

    memory_log_sigma: float = 0.2
    """The driver's reading is within 10% of replay and context on average, but convolution workspaces can double it."""
    replay_log_sigma: float = 0.04
    """The same in PyTorch's default settings, in float32. Of xMem's 112 training runs of 10 networks on three cards, 94% are
    inside the 90% interval."""
    half_log_sigma: float = 0.06
    """The same in half precision, and of channels last. Seven such runs on an H100 are inside (`benchmarks/on_gpu.py`)."""
    loaded_sigma_bytes: float = 100 * 2**20
    """Standard deviation of the bytes that the driver loads beside the replay, in the same settings."""
    all_modules_bytes: float = 1005 * 2**20
    """Bytes that the machine of the memory's training rows held beside replay and context: CUDA loaded all its modules there.
    GPUMemNet's perceptrons, in which cuDNN has no workspaces, show them (`benchmarks/loaded_bytes.py`). Since CUDA 11.7 only
    those that are used are loaded."""
    new_cpu_log_sigma: float = 0.2
    """What another CPU adds to the time's. A guess: the training rows are of one machine."""
    roofline_log_sigma: float = 1.4
    """Of the roofline's seconds: a factor of ten at both ends of the interval. A guess that accounts show, and that decides
    nothing: the network's sigma replaces it."""


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


PHYSICS = PhysicsConfig()
PROCESS = ProcessConfig()
PRIOR = ResidualPrior(bias=0.35, local=0.8, length=0.7, noise=0.52, trust=1.5, of_the_step=0.9)
"""Prior of a residual of standard deviation 1, chosen on machines whose source was left out (`benchmarks/new_machine.py`).

``of_the_step``: networks that were measured twice in the tables, under two names, are 0.1 to 2% apart, where the noise is 3 to
11%.
"""


class RawEstimate(NamedTuple):
    """One quantity of a step on a device, before any run there."""

    estimate: Estimate
    """Bytes, or seconds of a step."""
    alternatives: Floats
    """Distances from the value: of physics for memory, of machines with a slower host or device for time. Shape: (e,)"""
    is_known: bool
    """Whether the error on such steps was measured on this device."""

    @property
    def prior(self) -> ResidualPrior:
        """The prior of the residual."""
        factor = self.estimate.log_sigma / PRIOR.total
        terms = {term: factor * getattr(PRIOR, term) for term in ("bias", "local", "noise", "trust")}
        return dataclasses.replace(PRIOR, **terms | {"trust": min(terms["trust"], PROCESS.most_trust)})

    def then(self, name: str, why: str, *, median: float | None = None, log_sigma: float | None = None) -> RawEstimate:
        """Return it after another stage, see :meth:`perfguard.predictor.Estimate.then`."""
        return self._replace(estimate=self.estimate.then(name, why, median=median, log_sigma=log_sigma))


class RawPrediction(NamedTuple):
    """The weights' prediction for a graph with N operators on a device, before any run there."""

    of: dict[str, RawEstimate]
    """By target."""
    path: PathTimes
    """What the step time consists of."""
    embedding: Floats  # shape: (d,)
    shares: dict[str, float]
    """"gpu_util" and "sm_active", 0 to 1, where the weights predict them."""
    step: Step
    """The graph as the network reads it."""
    links: LinkTimes | None = None
    """What collectives add, in seconds of ``path``. None: there are none."""
    launched: OpGraph | None = None
    """What a compiler makes of the graph. None: the graph itself. Never the graph, which is the weak key of this prediction."""


class Weights:
    """Weights for one kind of device.

    The graph network and trees for time (`step_time`). For memory the replay, and trees on CPUs and where cuDNN tries algorithms.
    """

    def __init__(self, memory: FittedModel, time: FittedModel) -> None:
        assert isinstance(time.learner, StepTime)
        self._memory = memory
        self._time = time
        self.step_time = time.learner
        """The network and the trees."""
        self.version = memory.version + time.version
        """It differs for other tensors or another calibration."""

    def trained_on(self, device: Device) -> bool:
        """Whether the training rows include runs on this device. A CPU is known by its name."""
        if device.kind == "cpu":
            return device.name in self._time.card["trained_cpus"]
        return device.id in self._time.card["trained_devices"] or device.id in self._memory.card["trained_devices"]

    def predict(self, graph: OpGraph, device: Device) -> RawPrediction:
        """The weights' prediction for ``graph``."""
        # Where the weights were trained on compiled runs of such graphs, they predict the compiled graph itself.
        compiled = None if self._knows_compiled(graph, device) else as_compiled(graph)
        raw = self._of_operators(graph if compiled is None else compiled.eager, device)
        raw = raw if compiled is None else _on_kernels(raw, compiled, device)
        return _with_nccl(_with_links(raw, graph, device), graph, device)

    def _of_operators(self, graph: OpGraph, device: Device) -> RawPrediction:
        """The prediction for the operators of ``graph`` as they are, without what waits for links."""
        setting = Setting.of(graph, device)
        step = self._time.step(graph, device)
        time, device_s, path = self._step_time(graph, step, setting, device)
        memory, is_read = self._memory_by_trees(graph, step, setting, device) or memory_by_replay(graph, device)
        physics = physics_of(step.view["sums"], math.log(memory.median))
        if device.kind == "cpu":
            physics = np.zeros_like(physics)  # there is no allocator's cache, and no context
            is_read = time.is_known  # the training rows have both
        raw = RawPrediction(
            of={"memory": RawEstimate(memory, physics, is_read), "time": time},
            path=path,
            embedding=embedding_of(step.view["sums"]),
            shares=self._shares(step, setting, device),
            step=step,
        )
        return _widened(raw, graph, device_s)

    def _step_time(self, graph: OpGraph, step: Step, setting: Setting, device: Device) -> tuple[RawEstimate, Floats, PathTimes]:
        """Return the step time by network and trees, the device's seconds of each operator, (N,), and the longest path."""
        all_log_s, all_device_s, paths = self.step_time.clocks([step])
        log_step_s = all_log_s[:, 0]
        device_s = all_device_s[0]
        path = PathTimes(*(part[0] for part in paths))
        no_less = self._not_above_whole_card(log_step_s, graph, device)
        known_gpu = device.id in self._time.card["trained_devices"]
        sigma = self._time.calibration.log_sigma("time", setting.group, float(no_less.std()), known_gpu=known_gpu)
        roofline_s = math.exp(step.view["sums"][_ROOFLINE_INDEX])
        usual_s = math.exp(log_step_s[0])
        network_s = float(path.total_s)
        if math.isclose(network_s, usual_s, rel_tol=1e-5):  # the same number, which the network has in single precision
            network_s = usual_s
        time = (
            Estimate.of_physics(roofline_s, PHYSICS.roofline_log_sigma, "operators at the device's peak rates")
            .then("network", "operators as measured steps ran them", median=network_s, log_sigma=PRIOR.total * sigma)
            .then("trees", "half the weight; products are bounded", median=usual_s)
            .then("whole card", "a part is never faster", median=math.exp(no_less[0]))
        )
        if device.kind == "cpu" and not self.trained_on(device):
            wider = math.hypot(time.log_sigma, PRIOR.total * PHYSICS.new_cpu_log_sigma)
            time = time.then("new CPU", "no training run on this one", log_sigma=wider)
        machines = (no_less[[1, 3]] - no_less[0]) * PROCESS.machine_trust
        is_timed = not timed_as_any(graph, device).isdisjoint(self._time.card["timed"])
        return RawEstimate(time, machines, is_timed), device_s, path

    def _not_above_whole_card(self, log_step_s: Floats, graph: OpGraph, device: Device) -> Floats:
        """Return log seconds (5,) that are no shorter on a part of a card than on the whole, though the network may say so."""
        card, is_part, _ = device.id.partition(":")
        if not is_part or card not in catalog():
            return log_step_s
        whole = self.step_time.log_step_s([self._time.step(graph, catalog()[card])])
        return np.maximum(log_step_s, whole[:, 0])

    def _memory_by_trees(self, graph: OpGraph, step: Step, setting: Setting, device: Device) -> tuple[Estimate, bool] | None:
        """The peak memory, and whether training rows have readings in this setting.

        On a CPU, and where cuDNN's benchmark mode leaves workspaces in the cache. There, the training rows of float32 are
        readings, of one machine. Those of half precision say what fitted, on machines of which nobody knows what they had loaded.
        None: it is another step, or the forests have no such ones.
        """
        has_workspaces = "cudnn_benchmark" in graph.options and not graph.kinds.isdisjoint(CONVOLUTION_KINDS)
        if device.kind == "cuda" and not has_workspaces:
            return None
        found = self._memory.learner.predict([step])
        predicted, spread = (float(found[name][0]) for name in ("memory", "spread memory"))
        if not math.isfinite(predicted):
            return None
        calibration = self._memory.calibration
        has_readings = f"memory/{setting.group}" in calibration.scale
        own = calibration.log_sigma("memory", setting.group, spread, known_gpu=has_readings)
        physics, _ = memory_by_replay(graph, device)
        if device.kind == "cpu":
            why = "resident sets that training runs grew"
            return physics.then("trees", why, median=math.exp(predicted), log_sigma=PRIOR.total * own), has_readings
        there = math.exp(predicted)  # on the machines of the training rows
        loaded = PHYSICS.all_modules_bytes
        loaded_sigma = PHYSICS.loaded_sigma_bytes
        if setting.precision != "fp32":
            loaded = 0.0
            loaded_sigma = PHYSICS.all_modules_bytes / 2
        num_bytes = max(there - loaded, graph.peak_live_bytes + device.context_bytes)
        sigma = PRIOR.total * math.hypot(own * there, loaded_sigma) / num_bytes
        return physics.then("trees", "workspaces that cuDNN's benchmark keeps", median=num_bytes, log_sigma=sigma), has_readings

    def _shares(self, step: Step, setting: Setting, device: Device) -> dict[str, float]:
        """Utilisation of steps like the perceptrons of the tables, of which alone it was measured."""
        if setting.has_convolutions or setting.is_single or device.kind == "cpu":
            return {}
        predicted = self._memory.learner.predict([step])
        return {name: share_of(logit) for name in _SHARES if math.isfinite(logit := float(predicted[name][0]))}

    def _knows_compiled(self, graph: OpGraph, device: Device) -> bool:
        """Whether the weights were trained on compiled runs like ``graph``, whatever its sizes.

        Compiled steps of any GPU count, and both half precisions as one.
        """
        if "compiled" not in graph.options or device.kind == "cpu":
            return False
        own = Setting.of(graph, device)
        if own.precision != "fp32":
            own = dataclasses.replace(own, precision=_TRAINED_HALF)
        setting = own.group.partition(" ")[2]
        return any(group.partition(" ")[2] == setting for group in self._time.calibration.scale)


def _widened(raw: RawPrediction, graph: OpGraph, device_s: Floats) -> RawPrediction:
    """Widen the prior of ``raw`` by what ``graph`` assumes of the data, and by the range that opaque operators allow. Move it to
    the middle of that range.

    An operator takes the share of the step that it has of the device's seconds, ``device_s`` (N,).
    """
    opaque = list(unknown_operators(graph))
    num_bytes = raw.of["memory"].estimate.median
    step_s = raw.of["time"].estimate.median
    op_time_s = device_s * step_s / max(device_s.sum(), 1e-12)
    span = unknown_span(graph, op_time_s.tolist(), num_bytes) if opaque else {}
    of = {}
    for target, own in raw.of.items():
        assumed = _with_assumptions(own, graph, target)
        half = span.get(target, 0.0) / 2
        of[target] = assumed.then(
            "opaque operators",
            f"{len(opaque)} operators of unknown cost",
            median=assumed.estimate.median * math.exp(half),
            log_sigma=math.hypot(assumed.estimate.log_sigma, half / HALF_INTERVAL),
        )
    if not opaque:
        return raw._replace(of=of)
    longer = math.expm1(span["time"] / 2) / len(opaque)
    path_s = raw.path.device_s.copy()
    path_s[opaque] += raw.path.total_s * longer
    return raw._replace(of=of, path=raw.path._replace(device_s=path_s))


def _with_assumptions(own: RawEstimate, graph: OpGraph, target: str) -> RawEstimate:
    """Widen the prior of a quantity by what ``graph`` assumes of the data."""
    least = PHYSICS.memory_log_sigma if target == "memory" and has_assumed_sizes(graph) else 0.0
    sized = own.then("assumed sizes", "sizes depend on the data's values", log_sigma=max(own.estimate.log_sigma, least))
    sigma = math.hypot(sized.estimate.log_sigma, assumed_log_sigma(graph, target))
    return sized.then("assumed data", "the data decide what is computed", log_sigma=sigma)


def _on_kernels(raw: RawPrediction, compiled: Compiled, device: Device) -> RawPrediction:
    """Convert the prediction for the eager graph to the kernels of the compiled one."""
    left = compiled.time_shares(device)
    path = raw.path._replace(host_s=raw.path.host_s * left, device_s=raw.path.device_s * left)
    less = {"memory": compiled.memory_share(device), "time": float(path.total_s / raw.path.total_s)}
    # The compiler leaves matrix products as they are.
    least_s = least_products_s(raw.step.view) / raw.of["time"].estimate.median
    less["time"] = max(less["time"], least_s)
    features = raw.step.view["sums"].copy()
    features[STEP_FEATURES.index("compiled")] = 1.0
    return raw._replace(
        of={
            target: own.then("compiler", "operators merged into fewer kernels", median=own.estimate.median * less[target])
            for target, own in raw.of.items()
        },
        path=path,
        embedding=embedding_of(features),
        launched=compiled.graph,
    )


def _with_links(raw: RawPrediction, graph: OpGraph, device: Device) -> RawPrediction:
    """Add what the step waits for links and for the other ranks."""
    time = raw.of["time"]
    path = raw.path
    to_seconds = time.estimate.median / path.total_s
    links = link_times(graph, device, path.op_time_s * to_seconds)
    if links is None:
        return raw
    waits_s = links.waits_s / to_seconds
    longer_s = time.estimate.median * float(1 + waits_s.sum() / path.total_s)
    sigma = math.hypot(time.estimate.log_sigma, links.log_sigma)
    waiting = time.then("links", "waits for links and other ranks", median=longer_s, log_sigma=sigma)
    return raw._replace(of=raw.of | {"time": waiting}, links=links._replace(waits_s=waits_s))


def _with_nccl(raw: RawPrediction, graph: OpGraph, device: Device) -> RawPrediction:
    """Add what NCCL holds beside the allocator. An evaluation under DDP has no collective, and NCCL is there all the same."""
    if device.kind == "cpu" or not {"ddp", "deepspeed", "fsdp", "tp"}.intersection(graph.options):
        return raw
    sigma_bytes = PRIOR.total * LINKS.nccl_sigma_bytes  # as all that is not sure before a run
    memory = with_bytes(raw.of["memory"], "NCCL", "buffers beside the allocator", LINKS.nccl_bytes, sigma_bytes)
    return raw._replace(of=raw.of | {"memory": memory})


def with_bytes(memory: RawEstimate, name: str, why: str, num_bytes: float, sigma_bytes: float) -> RawEstimate:
    """Return ``memory`` after a stage that adds bytes, whose standard deviation is independent of that of the step."""
    alone_bytes = memory.estimate.median
    together_bytes = alone_bytes + num_bytes
    sigma = math.hypot(memory.estimate.log_sigma * alone_bytes, sigma_bytes) / together_bytes
    return memory.then(name, why, median=together_bytes, log_sigma=sigma)


def scale_of(log_sigma: float, of_the_process: float) -> float:
    """Share of the process's correction that applies to a step with this sigma, beside the sigma of the measured runs."""
    return min(1.0, PROCESS.most_correction * log_sigma / of_the_process)


def gp_inputs(
    raws: Sequence[RawPrediction],
    target: str,
    *,
    regime: Sequence[float] | float,
    scale: Sequence[float] | float,
    setting: Sequence[float] | float,
) -> GPInputs:
    """Inputs of the residual process for n steps. A single number holds for all of them."""
    columns = (torch.as_tensor(column, dtype=torch.float64).expand(len(raws)) for column in (regime, scale, setting, 0.0))
    x = np.stack([raw.embedding for raw in raws])
    alternatives = np.stack([raw.of[target].alternatives for raw in raws])
    return GPInputs(torch.from_numpy(x), torch.from_numpy(alternatives), *columns)


def memory_by_replay(graph: OpGraph, device: Device) -> tuple[Estimate, bool]:
    """Return the bytes of the allocator's replay with the context, and whether such steps were compared with readings."""
    num_bytes = max(graph.peak_live_bytes if device.kind == "cpu" else graph.reserved_bytes(device), 1) + device.context_bytes
    idle = {"cudnn_benchmark"} if graph.kinds.isdisjoint(CONVOLUTION_KINDS) else set()
    is_compared = (
        device.kind == "cuda"
        and graph.mode == "train"
        and "rnn" not in graph.kinds
        and (_REPLAYED_OPTIONS | idle).issuperset(graph.options)
        and graph.has_all_bytes
    )
    sigma = PHYSICS.memory_log_sigma
    if is_compared:  # in PyTorch's default settings: a relative and a constant part
        relative = PHYSICS.replay_log_sigma if (graph.precision, graph.layout) == ("fp32", "nchw") else PHYSICS.half_log_sigma
        sigma = math.hypot(relative, PHYSICS.loaded_sigma_bytes / num_bytes)
    why = "tensors that live at once" if device.kind == "cpu" else "the allocator's replay and the context"
    return Estimate.of_physics(num_bytes, PRIOR.total * sigma, why), is_compared


def embedding_of(sums: npt.NDArray[np.float32]) -> Floats:
    """Embedding of a step from its step features ``sums``: its sizes, and what it spends its time on. Shape: (d,).

    Distances within both halves count alike, whatever their number of columns.
    """
    sizes = (sums[_EMBEDDED_INDEX].astype(np.float64) - _MIDDLES) / _WIDTHS
    shares = sums[_TIME_SHARES_INDEX].astype(np.float64) / PROCESS.share_length
    return np.concatenate([half * math.sqrt((len(sizes) + len(shares)) / len(half)) for half in (sizes, shares)])


def physics_of(sums: npt.NDArray[np.float32], log_bytes: float) -> Floats:
    """Log reserved and live bytes minus ``log_bytes``, and the share of a constant gibibyte in them. Shape: (3,)."""
    physics = sums[_PHYSICS_INDEX].astype(np.float64)
    apart = np.clip(physics - log_bytes, -PROCESS.farthest, PROCESS.farthest)
    return np.array([*apart, min(2**30 / math.exp(physics[0]), PROCESS.most_gibibytes)])
