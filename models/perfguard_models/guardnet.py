"""GuardNet: PerfGuard's own predictor. Networks and trees correct physics; a Gaussian process on an embedding learns online.

Time has a graph network and trees (`step_time`). Memory has the replay, and trees on CPUs and where cuDNN tries algorithms. They
are trained on many measured runs and ship with the package (`raw_prediction`). Their residuals on a particular machine (a slower
host, a constant factor, a region) are small and smooth. A process on an embedding of the graph (`residual`) learns them from the
first few trials, in closed form, with an uncertainty. From ten runs on, gradient steps move the network's heads (`fine_tuning`).

    log value = shipped weights + fine-tuning + process, conditioned on the runs of the device
"""

from __future__ import annotations

import hashlib
import math
import statistics
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from perfguard.devices import Device
from perfguard.exceptions import PredictorError
from perfguard.graph import OpGraph, memory_parts
from perfguard.predictor import SIGMA_OF_MAD, TARGETS, Estimate, Observation, Prediction, Target
from perfguard_models.fine_tuning import FineTuned, LearntRun, fine_tune
from perfguard_models.learner import CPU_PREFIX, FittedModel, Learner, read_trained
from perfguard_models.process_growth import Growth, growth_of, with_growth
from perfguard_models.raw_prediction import PHYSICS, RawPrediction, Weights, gp_inputs, scale_of
from perfguard_models.residual import Bounds, GPInputs, ResidualPosterior, ResidualPrior, condition
from perfguard_models.step_time import StepTime
from perfguard_models.torch_isolation import undisturbed
from perfguard_models.trees import MemoryForest

MEMORY = MemoryForest.name
TIME = StepTime.name
WEIGHTS = Path(__file__).parent / "weights"
"""The folder of the shipped weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialConfig:
    """What GuardNet assumes of trials and readings. A sigma is the standard deviation of a logarithm."""

    recent: int = 20
    """Number of newest trials from which overhead and power are taken."""
    overhead_log_sigma: float = 0.05
    """Overhead of a trial beyond its steps, before any trial."""
    overhead_prior: float = 2.0
    """Weight of no overhead, in trials."""
    few: int = 3
    """With fewer trials, the least overhead counts, and no more than ``most_overhead``."""
    most_overhead: float = 3.0
    """As a factor on the time of the steps."""
    power_log_sigma: float = 0.3
    """Power between workloads on one card, before any trial. From idle to its limit is a factor of three."""
    power_prior: float = 3.0
    """Weight of this prior, in trials."""
    memory_log_sigma: float = 0.005
    """The least of a prediction, however often its step was read. The driver reports memory in blocks of 2 MiB."""
    time_log_sigma: float = 0.01
    """The same for time: clocks vary."""


TRIALS = TrialConfig()


@undisturbed
def load(path: str | Path | None = None) -> GuardNet:
    """GuardNet with the shipped weights: one file for time, one for the memory of GPUs and one for that of CPUs.

    Args:
        path: other weights, without suffix (PATH.safetensors and PATH.json). They replace those of the same learner, for the
            kinds of device that they were trained on.

    Raises:
        PredictorError: if the files are missing, damaged, of another version, or do not belong together.
    """
    shipped = [WEIGHTS / name for name in (MEMORY, CPU_PREFIX + MEMORY, TIME)]
    found: dict[tuple[str, str], FittedModel] = {}
    for each in [*shipped, *([] if path is None else [Path(path)])]:
        trained = read_weights(each)
        for device in trained.card["trained_devices"]:
            found["cpu" if device == "cpu" else "cuda", trained.learner.name] = trained
    return GuardNet({kind: Weights(found[kind, MEMORY], found[kind, TIME]) for kind in ("cuda", "cpu")})


def read_weights(path: Path) -> FittedModel:
    """Weights of GuardNet: of step times or of memory.

    Raises:
        PredictorError: see :func:`perfguard_models.learner.read_trained`.
    """
    learners: dict[str, type[Learner]] = {MEMORY: MemoryForest, TIME: StepTime}

    def learner_of(name: str) -> type[Learner]:
        if name not in learners:
            known = ", ".join(learners)
            raise PredictorError(f"GuardNet has no learner {name!r}, only {known}. These are another predictor's weights.")
        return learners[name]

    return read_trained(path, learner_of)


class GuardNet:
    """See the module's docstring. Build it with :func:`load`."""

    def __init__(self, weights: Mapping[str, Weights]) -> None:  # by the kind of device
        self._weights = weights
        self._posteriors: dict[tuple[str, Target], ResidualPosterior] = {}
        self._growths: dict[str, Growth] = {}
        """What processes on a device add to the memory of a step, by its id."""
        self._overheads: dict[str, tuple[float, float]] = {}
        self._powers: dict[str, tuple[float, float] | None] = {}
        self._tuned: FineTuned | None = None
        self._known: WeakKeyDictionary[OpGraph, dict[str, RawPrediction]] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_known": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"_known": WeakKeyDictionary()})

    @property
    def lineage(self) -> str:
        """Name and hash of the shipped weights. Fine-tuned weights are valid for these alone."""
        versions = repr(sorted((kind, weights.version) for kind, weights in self._weights.items()))
        return f"guardnet-{hashlib.sha256(versions.encode()).hexdigest()[:8]}"

    @property
    def name(self) -> str:
        """The lineage, with "+" if fine-tuned weights are in use."""
        return self.lineage if self._tuned is None else f"{self.lineage}+"

    @undisturbed
    def predict(self, graph: OpGraph, device: Device, *, steps: int | None = None) -> Prediction:
        """The cost of ``graph`` on ``device``; see :class:`perfguard.predictor.Predictor`."""
        raw = with_growth(self._raw(graph, device), self._growths.get(device.id, Growth()))
        launched = graph if raw.launched is None else raw.launched
        memory, step_time = (self._estimate(target, raw, graph, device) for target in TARGETS)
        power = self._powers.get(device.id)
        on_device = self._weights[device.kind].trained_on(device)
        trained = tuple(
            target for target in TARGETS if (device.id, target) in self._posteriors or (raw.of[target].is_known and on_device)
        )
        path = raw.path
        waits_s = 0.0 if raw.links is None else float(raw.links.waits_s.sum())
        by_kind = {"start": float(path.start_s), "batch_copy": float(path.copy_s)}
        for op, seconds in zip(graph.ops, path.op_time_s.tolist(), strict=True):
            by_kind[op.kind] = by_kind.get(op.kind, 0.0) + seconds
        by_part = {"host": path.start_s + path.host_s.sum(), "device": path.device_s.sum(), "copies": path.copy_s}
        if raw.links is not None:
            by_part["communication"] = by_kind["communication"] = waits_s
        to_seconds = raw.of["time"].estimate.median / (path.total_s + waits_s)  # of what the shipped weights predict
        longest_first = sorted(by_kind.items(), key=lambda item: -item[1])
        return Prediction(
            peak_memory=memory,
            step_time=step_time,
            total_time=None if steps is None else self._total_time(step_time, steps, device),
            predictor=self.name,
            device_id=device.id,
            trained_on_device=trained == TARGETS,
            trained_quantities=trained,
            memory_parts_bytes=memory_parts(launched, device),
            time_parts_s={name: float(to_seconds * time) for name, time in by_part.items()},
            time_by_kind_s={kind: float(to_seconds * time) for kind, time in longest_first if time > 0},
            gpu_util=raw.shares.get("gpu_util"),
            sm_active=raw.shares.get("sm_active"),
            energy=None if power is None else self._energy(step_time, *power),
            unmodelled=launched.unmodelled + (() if raw.links is None else raw.links.assumed),
        )

    def _total_time(self, step_time: Estimate, steps: int, device: Device) -> Estimate:
        """The time of a whole trial of ``steps`` on ``device``, with what the trials there took beside their steps."""
        overhead, log_sigma = self._overheads.get(device.id, (0.0, TRIALS.overhead_log_sigma))
        alone = step_time.scaled(steps)
        return alone.then(
            "overhead",
            "set-up and validation beside steps",
            median=alone.median * math.exp(overhead),
            log_sigma=math.hypot(alone.log_sigma, log_sigma),
        )

    def _energy(self, step_time: Estimate, log_power: float, log_sigma: float) -> Estimate:
        """The joules of a step, from the power of the runs on its device."""
        return step_time.scaled(math.exp(log_power), log_sigma=log_sigma, name="power", why="runs here differ in power")

    @undisturbed
    def op_time_shares(self, graph: OpGraph, device: Device) -> npt.NDArray[np.float64]:
        """See :class:`perfguard.predictor.OperatorTimes`."""
        raw = self._raw(graph, device)
        waits_s = np.zeros(len(graph.ops)) if raw.links is None else raw.links.waits_s
        return np.asarray((raw.path.op_time_s + waits_s) / (raw.path.total_s + waits_s.sum()))

    @undisturbed
    def fine_tune(self, observations: Sequence[Observation]) -> None:
        """Condition the residual processes on ``observations``, all that there are for their device.

        A run that was out of memory needed more than was measured. It counts as a reading with the same information, given the
        others (a censored observation, Tobin 1958). The prediction for the step itself stays above the memory that it had, unless
        a later run fits.
        """
        by_device: dict[str, list[Observation]] = {}
        for observation in observations:
            by_device.setdefault(observation.device.id, []).append(observation)
        for device_id, rows in by_device.items():
            ended_well = [row for row in rows if row.measurement.status == "ok"]
            out_of_memory = [row for row in rows if row.measurement.status == "oom" and row.measured("memory") is not None]
            is_refuted = _are_refuted(rows, out_of_memory)
            self._overheads[device_id] = _overhead_of(ended_well)
            self._powers[device_id] = _power_of(ended_well)
            self._growths[device_id] = self._growth_of(ended_well)
            for target in TARGETS:
                measured = self._residuals(ended_well, target)
                prior = None if measured is None else measured.prior
                bounds = self._residuals(out_of_memory, target, prior) if target == "memory" else None
                self._learn(rows[0].device, target, measured, bounds, is_refuted)

    @undisturbed
    def use_refinement(self, data: bytes | None) -> None:
        """See :class:`perfguard.predictor.Refinable`."""
        tuned = None if data is None else FineTuned.from_bytes(data, self._weights["cuda"].step_time)
        if tuned is not None and tuned.made_for != self.lineage:
            raise PredictorError(f"Weights fine-tuned for {tuned.made_for!r} do not fit {self.lineage!r}.")
        self._tuned = tuned
        self._posteriors.clear()

    @property
    def shift_on_reference(self) -> float:
        """See :class:`perfguard.predictor.Refinable`."""
        return 0.0 if self._tuned is None else self._tuned.shift

    @undisturbed
    def refine(self, observations: Sequence[Observation]) -> bytes | None:
        """See :class:`perfguard.predictor.Refinable`. Step times are fine-tuned; of memory, the process alone learns."""
        runs = []
        for row in observations:
            seconds = row.measured("time")
            if row.measurement.status == "ok" and row.decision_id and seconds and self._is_tuned_on(row.device):
                raw = self._raw(row.graph, row.device)
                predicted = math.log(raw.of["time"].estimate.median)
                runs.append(LearntRun(row.decision_id, row.device.id, raw.step, predicted, math.log(seconds)))
        tuned = fine_tune(self.lineage, self._weights["cuda"].step_time, runs)
        return None if tuned is None else tuned.to_bytes()

    def _is_tuned_on(self, device: Device) -> bool:
        """Whether ``device`` has the network that is fine-tuned. Weights of one's own may be for one kind of device."""
        return self._weights[device.kind].step_time is self._weights["cuda"].step_time

    def _corrections(
        self, tuned: FineTuned | None, target: Target, raws: Sequence[RawPrediction], device: Device
    ) -> npt.NDArray[np.float64]:
        """What ``tuned`` adds to each graph of ``raws``. Shape: (len(raws),)."""
        if tuned is None or target != "time" or not self._is_tuned_on(device):
            return np.zeros(len(raws))
        return tuned.corrections(self._weights[device.kind].step_time, [raw.step for raw in raws], device.id)

    def _residuals(self, rows: Sequence[Observation], target: Target, prior: ResidualPrior | None = None) -> _Residuals | None:
        """Residuals of the rows with a measured ``target``; None: there is no such row.

        They are scaled for a process with this ``prior``. None: the median of the rows' priors.
        """
        known = [(row, value) for row in rows if (value := row.measured(target)) is not None]
        if not known:
            return None
        raws = [with_growth(self._raw(row.graph, row.device), self._growths.get(row.device.id, Growth())) for row, _ in known]
        apart = [math.log(value / raw.of[target].estimate.median) for (_, value), raw in zip(known, raws, strict=True)]
        y = torch.tensor(apart, dtype=torch.float64)
        priors = [raw.of[target].prior for raw in raws]
        prior = prior or sorted(priors, key=lambda one: one.total)[len(priors) // 2]
        inputs = gp_inputs(
            raws,
            target,
            regime=[float(row.regime) for row, _ in known],
            scale=[scale_of(own.total, prior.total) for own in priors],
            setting=[_setting_of(row.graph) for row, _ in known],
        )
        tuned = self._tuned  # another thread may replace it
        if tuned is None or target != "time":
            return _Residuals(prior, inputs, y)
        own = torch.from_numpy(self._corrections(tuned, target, raws, known[0][0].device))
        held_out = [tuned.held_out.get(row.decision_id, float(there)) for (row, _), there in zip(known, own, strict=True)]
        without = torch.tensor(held_out, dtype=torch.float64)
        return _Residuals(prior, inputs._replace(memorised=own - without), y - without)

    def _growth_of(self, rows: Sequence[Observation]) -> Growth:
        """Return what ``rows``, the trials of one device that ended well, show that a process adds. On a GPU it adds nothing."""
        known = [(self._raw(row.graph, row.device), value) for row in rows if (value := row.measured("memory")) is not None]
        if not known or rows[0].device.kind != "cpu":
            return Growth()
        memories = [raw.of["memory"].estimate for raw, _ in known]
        return growth_of(
            np.array([memory.median for memory in memories]),
            np.array([value for _, value in known]),
            np.array([memory.log_sigma for memory in memories]),
        )

    def _learn(
        self,
        device: Device,
        target: Target,
        measured: _Residuals | None,
        bounds: _Residuals | None,
        is_refuted: Sequence[bool],  # of the bounds
    ) -> None:
        """Replace the device's posterior in one assignment, because other threads may be predicting."""
        key = (device.id, target)
        known = measured if measured is not None else bounds
        if known is None or (measured is None and all(is_refuted)):
            self._posteriors.pop(key, None)
            return
        limits = None
        if bounds is not None:
            limits = Bounds(bounds.at, torch.where(torch.tensor(is_refuted), -math.inf, bounds.y))
        at, y = (GPInputs(*(column[:0] for column in known.at)), known.y[:0]) if measured is None else (measured.at, measured.y)
        self._posteriors[key] = condition(known.prior, at, y, limits)

    def _estimate(self, target: Target, raw: RawPrediction, graph: OpGraph, device: Device) -> Estimate:
        corrected = self._by_runs(target, raw, graph, device)
        correction = float(self._corrections(self._tuned, target, [raw], device)[0])
        tuned = corrected.then("fine-tuned weights", "promoted in your log", median=corrected.median * math.exp(correction))
        least = TRIALS.memory_log_sigma if target == "memory" else TRIALS.time_log_sigma
        return tuned.then("least width", "no reading is more exact", log_sigma=max(tuned.log_sigma, least))

    def _by_runs(self, target: Target, raw: RawPrediction, graph: OpGraph, device: Device) -> Estimate:
        """The estimate after the residual process, conditioned on the runs of ``device``, and after their bounds."""
        shipped = raw.of[target].estimate
        posterior = self._posteriors.get((device.id, target))
        if posterior is None:
            return shipped
        of_the_process = posterior.prior.total
        before = torch.tensor([shipped.log_sigma], dtype=torch.float64)
        scale = scale_of(shipped.log_sigma, of_the_process)
        inputs = gp_inputs([raw], target, regime=float(posterior.regime), scale=scale, setting=_setting_of(graph))
        means, log_sigmas = posterior.predict(inputs)
        # The process has one prior; a graph may be harder or easier than those that it was made for.
        log_sigmas = log_sigmas * before / of_the_process / scale
        above, above_log_sigmas = posterior.above_bounds(inputs, means, log_sigmas, before, PHYSICS.memory_log_sigma)
        median = shipped.median * math.exp(means)
        runs = "1 run" if posterior.num_read == 1 else f"{posterior.num_read} runs"
        learnt = shipped.then("this device's runs", f"learnt from {runs} there", median=median, log_sigma=float(log_sigmas))
        return learnt.then(
            "out of memory", "it ran out with less", median=shipped.median * math.exp(above), log_sigma=float(above_log_sigmas)
        )

    def _raw(self, graph: OpGraph, device: Device) -> RawPrediction:
        """The weights' prediction for ``graph``. It is cached for the life of the graph."""
        of_graph = self._known.setdefault(graph, {})
        key = repr(device)
        if key not in of_graph:
            of_graph[key] = self._weights[device.kind].predict(graph, device)
        return of_graph[key]


def _setting_of(graph: OpGraph) -> float:
    """A number that identifies the switches of ``graph``."""
    return float(zlib.crc32(repr((graph.mode, graph.precision, graph.layout, graph.options)).encode()))


class _Residuals(NamedTuple):
    """log(measured / predicted) of n runs, with their inputs."""

    prior: ResidualPrior
    at: GPInputs
    y: torch.Tensor  # shape: (n,)


def _are_refuted(rows: Sequence[Observation], out_of_memory: Sequence[Observation]) -> list[bool]:
    """Whether a successful run of the same step refutes each out-of-memory run.

    It does so if it is later, or if it needed as much memory. ``rows`` are from the oldest to the newest.
    """
    last_ok: dict[str, int] = {}
    most_bytes: dict[str, float] = {}
    position = {id(row): index for index, row in enumerate(rows)}
    for index, row in enumerate(rows):
        if row.measurement.status == "ok" and (num_bytes := row.measured("memory")) is not None:
            step = row.graph.content_hash
            last_ok[step] = index
            most_bytes[step] = max(num_bytes, most_bytes.get(step, 0.0))
    steps = [row.graph.content_hash for row in out_of_memory]
    return [
        last_ok.get(step, -1) > position[id(row)] or most_bytes.get(step, 0.0) >= (row.measured("memory") or 0.0)
        for step, row in zip(steps, out_of_memory, strict=True)
    ]


def _middle_of(values: Sequence[float]) -> tuple[float, float]:
    """Median, and a robust standard deviation from the median absolute deviation."""
    median = statistics.median(values)
    return median, SIGMA_OF_MAD * statistics.median(abs(value - median) for value in values)


def _power_of(rows: Sequence[Observation]) -> tuple[float, float] | None:
    """Mean and standard deviation of the log power of the newest runs, in watts; None: no run has its energy."""
    powers = [
        math.log(energy_j / row.measurement.total_time_s)
        for row in rows
        if (energy_j := row.measurement.energy_j) is not None
        and 0 < energy_j < math.inf
        and 0 < row.measurement.total_time_s < math.inf
    ][-TRIALS.recent :]
    if not powers:
        return None
    median, spread = _middle_of(powers)
    weight = len(powers) / (len(powers) + TRIALS.power_prior)
    return median, math.sqrt(weight * spread**2 + (1 - weight) * TRIALS.power_log_sigma**2)


def _overhead_of(rows: Sequence[Observation]) -> tuple[float, float]:
    """Overhead of a trial beyond its steps (setting up, validating): mean and standard deviation of log(trial / steps).

    It is the median over the last few trials, shrunk towards no overhead. The median ignores one interrupted trial. Only trials
    with at least half as many steps as the longest of them count, because a trial that stops early is mostly setup. Until there
    are three, the least of them counts, and no more than a factor of three. A suspended machine turns minutes into hours.
    """
    most_steps = max((row.measurement.num_steps for row in rows[-TRIALS.recent :]), default=0)
    ratios = [
        math.log(row.measurement.total_time_s / (row.measurement.num_steps * step_time_s))
        for row in rows[-TRIALS.recent :]
        if 2 * row.measurement.num_steps >= most_steps
        and (step_time_s := row.measured("time"))
        and row.measurement.num_steps > 0
        and 0 < row.measurement.total_time_s < math.inf
    ]
    if not ratios:
        return 0.0, TRIALS.overhead_log_sigma
    median, spread = _middle_of(ratios)
    if len(ratios) < TRIALS.few:
        median = min(*ratios, math.log(TRIALS.most_overhead), key=abs)
    weight = len(ratios) / (len(ratios) + TRIALS.overhead_prior)
    return weight * median, max(weight * spread + (1 - weight) * TRIALS.overhead_log_sigma, 0.01)


__all__ = ["GuardNet", "load"]
