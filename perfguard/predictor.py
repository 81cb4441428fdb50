"""Predictions, the interface of predictors, how an installed predictor is loaded, and one call that does all of it."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, runtime_checkable

from perfguard.account import PHYSICS, Account, Stage
from perfguard.exceptions import ConfigurationError, PredictorError
from perfguard.pytorch import random_numbers_kept
from perfguard.workload import Mode, Precision, Tf32, Workload

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import nn

    from perfguard.devices import Device
    from perfguard.graph import OpGraph
    from perfguard.measure import Measurement
    from perfguard.unmodelled import Unmodelled

    Network = str | os.PathLike[str] | Workload | OpGraph | nn.Module

ENTRY_POINT_GROUP = "perfguard.predictors"
DEFAULT_PREDICTOR = "guardnet"
Target = Literal["memory", "time"]
"""Quantities that are learnt from runs: the peak of memory, and the time of a step."""
TARGETS: tuple[Target, ...] = get_args(Target)
COVERAGE = 0.9
"""Coverage of reported intervals."""
HALF_INTERVAL = 1.6448536269514722
"""Half of the width of that central interval, in standard deviations of a normal distribution."""
SIGMA_OF_MAD = 1.4826
"""The standard deviation of a normal variable, as a multiple of its median absolute deviation (MAD)."""
MOST_WIDENED = math.log(10.0)
"""Limit of the widening: no end of an interval moves by more than a factor of ten. See `widened_log_sigma`."""
SECONDS_PER_HOUR = 3600
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Estimate:
    """A positive quantity that is known up to a factor: its logarithm is normal around ``log(median)``.

    Example:
        >>> memory = Estimate(median=100.0, log_sigma=0.1)
        >>> round(memory.p_exceeds(100.0), 2), round(memory.quantile(0.95), 1)
        (0.5, 117.9)
    """

    median: float
    """The point prediction, in the quantity's unit."""
    log_sigma: float
    """Standard deviation of the logarithm; 0.1 is about 10%."""
    stages: Account = field(default=(), compare=False, repr=False)
    """How it came to be, from physics to the last bound; see :mod:`perfguard.account`. Empty: it has no account."""

    @classmethod
    def of_physics(cls, median: float, log_sigma: float, why: str) -> Estimate:
        """Return the estimate that an account begins with."""
        return cls(median, log_sigma, (Stage(PHYSICS, 0.0, log_sigma, why),))

    def then(self, name: str, why: str, *, median: float | None = None, log_sigma: float | None = None) -> Estimate:
        """Return the estimate after a stage that has changed its median, its standard deviation, or both.

        Args:
            name: of the stage.
            why: the reason in about six words.
            median: the new one. None: the same.
            log_sigma: the new one. None: the same.
        """
        after = Estimate(self.median if median is None else median, self.log_sigma if log_sigma is None else log_sigma)
        if after == self:
            return self
        stage = Stage(name, math.log(after.median / self.median), after.log_sigma, why)
        return Estimate(after.median, after.log_sigma, (*self.stages, stage))

    def __post_init__(self) -> None:
        if not (math.isfinite(self.median) and self.median > 0):
            raise PredictorError(f"An estimate must be positive and finite, but got {self.median!r}.")
        if not (math.isfinite(self.log_sigma) and self.log_sigma > 0):
            raise PredictorError(f"An estimate's log_sigma must be positive and finite, but got {self.log_sigma!r}.")

    def quantile(self, probability: float) -> float:
        """The value that the quantity stays under with ``probability``, in (0, 1)."""
        return self.median * math.exp(self.log_sigma * _NORMAL.inv_cdf(probability))

    def p_exceeds(self, limit: float) -> float:
        """The chance that the quantity is above ``limit``, a positive number in the same unit."""
        return 1.0 - _NORMAL.cdf((math.log(limit) - math.log(self.median)) / self.log_sigma)

    def interval(self, coverage: float = COVERAGE) -> tuple[float, float]:
        """The central interval that holds the quantity with probability ``coverage``, in (0, 1)."""
        return self.quantile((1 - coverage) / 2), self.quantile((1 + coverage) / 2)

    def scaled(
        self, factor: float, *, log_sigma: float = 0.0, name: str = "units", why: str = "the factor is not sure"
    ) -> Estimate:
        """The estimate in another unit, such as seconds of a trial for those of a step.

        Its account is the same, from a physics that is ``factor`` times as much. A factor that is itself known up to
        ``log_sigma`` is a stage of this ``name``.
        """
        in_unit = Estimate(self.median * factor, self.log_sigma, self.stages)
        return in_unit.then(name, why, log_sigma=math.hypot(self.log_sigma, log_sigma))


def widened_log_sigma(log_sigma: float, factor: float) -> float:
    """Return ``log_sigma`` times ``factor``, limited so that no end of the 90% interval moves by more than :data:`MOST_WIDENED`.

    Example:
        >>> 1.5 < widened_log_sigma(0.1, 30.0) < 1.6
        True
    """
    return min(log_sigma * factor, log_sigma + MOST_WIDENED / HALF_INTERVAL)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted cost of a workload on a device."""

    peak_memory: Estimate
    """Bytes of device memory at the peak, the driver's context included."""
    step_time: Estimate
    """Seconds of one optimizer step, or of one batch of inference."""
    total_time: Estimate | None
    """Seconds of the whole trial; None if the workload does not say how many steps it has."""
    predictor: str
    """Name and version, for instance "guardnet-5d41402a"."""
    device_id: str
    trained_on_device: bool
    """False: the predictor was not trained on such steps on this device, and no trial of yours has run there."""
    memory_parts_bytes: Mapping[str, float] = field(default_factory=dict)
    """Bytes of each part of ``peak_memory.median``, which they add up to; empty: the predictor cannot say.

    Those of the replay come from :func:`perfguard.graph.memory_parts`. The rest is "correction": what the later stages of
    :attr:`account` add, or take away. It may be negative.
    """
    time_parts_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each part of ``step_time.median``, which they add up to; empty: the predictor cannot say.

    "host" launches operators while the device waits for it, "device" computes them, "copies" move the batch to the device. With
    several ranks, "communication" waits for the links between them and for the slowest one. These are as the shipped weights
    predict them. The rest is "correction": what the later stages of :attr:`account` add, or take away. It may be negative.
    """
    time_by_kind_s: Mapping[str, float] = field(default_factory=dict)
    """The same seconds by kind of operator, largest first: its launches where the device waits for the host, else its kernels.
    "start" is before the first launch, and "batch_copy" the copy of the batch to the device."""
    gpu_util: float | None = None
    """Share of the time in which a kernel runs, 0 to 1, as the driver reports it; None if the predictor cannot say."""
    sm_active: float | None = None
    """Share of the multiprocessors' time in which they have work, 0 to 1; None if the predictor cannot say."""
    energy: Estimate | None = None
    """Joules of one step or one batch of inference; None if the predictor cannot say."""
    unmodelled: tuple[Unmodelled, ...] = ()
    """Parts that the trace does not account for, each a code and a sentence: those of the graph, and the predictor's own."""
    widening: Mapping[Target, float] = field(default_factory=dict)
    """Factors by which :meth:`widened` has widened the standard deviations; empty: none."""
    trained_quantities: tuple[Target, ...] | None = None
    """Quantities for which ``trained_on_device`` holds, of "memory" and "time". It is True if it holds for both. None: the
    predictor does not tell them apart."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory_parts_bytes", _adding_up(self.memory_parts_bytes, self.peak_memory.median))
        object.__setattr__(self, "time_parts_s", _adding_up(self.time_parts_s, self.step_time.median))
        object.__setattr__(self, "time_by_kind_s", _adding_up(self.time_by_kind_s, self.step_time.median))

    @property
    def account(self) -> Mapping[str, Account]:
        """What each stage has changed, from physics to the last bound, by quantity: "memory", "step_time", "time", "energy".

        The shifts of a quantity add up to log(median / physics). A quantity that is not known is left out.
        """
        known = {
            "memory": self.peak_memory,
            "step_time": self.step_time,
            "time": self.total_time,
            "energy": self.energy,
        }
        return {quantity: estimate.stages for quantity, estimate in known.items() if estimate is not None}

    def p_oom(self, capacity_bytes: int) -> float:
        """The chance that the peak does not fit in ``capacity_bytes``."""
        return self.peak_memory.p_exceeds(capacity_bytes)

    def cost(self, price_per_hour: float) -> Estimate | None:
        """Return the cost of the whole trial, in the currency of ``price_per_hour``. None: ``total_time`` is not known."""
        return None if self.total_time is None else self.total_time.scaled(price_per_hour / SECONDS_PER_HOUR)

    def widened(self, factors: Mapping[Target, float], *, least_memory_log_sigma: float = 0.0) -> Prediction:
        """Return the prediction with wider or narrower intervals.

        Args:
            factors: on the standard deviations (of logarithms), within the limit of :func:`widened_log_sigma`.
            least_memory_log_sigma: standard deviation of the logarithm of equal readings of the memory. No interval is narrower.
        """

        def widened(estimate: Estimate, target: Target) -> Estimate:
            factor = factors.get(target, 1.0)
            why = f"runs here scatter {'more' if factor > 1 else 'less'} than predicted"
            return estimate.then("width", why, log_sigma=widened_log_sigma(estimate.log_sigma, factor))

        step_time = widened(self.step_time, "time")
        memory = widened(self.peak_memory, "memory")
        scatter = max(memory.log_sigma, least_memory_log_sigma)
        memory = memory.then("scatter of readings", "equal trials differ by as much", log_sigma=scatter)
        done = {"memory": memory.log_sigma / self.peak_memory.log_sigma, "time": step_time.log_sigma / self.step_time.log_sigma}
        return replace(
            self,
            widening={target: self.widening.get(target, 1.0) * done[target] for target in TARGETS},
            peak_memory=memory,
            step_time=step_time,
            total_time=self.total_time and widened(self.total_time, "time"),
        )

    def at_least(self, memory_bytes: float, step_time_s: float) -> Prediction:
        """Return the prediction with medians that are no lower than these; see :func:`perfguard.physics.least_reading`."""

        def raised(estimate: Estimate, least: float) -> Estimate:
            return estimate.then("least reading", "no correct reading is lower", median=max(estimate.median, least))

        step_time = raised(self.step_time, step_time_s)
        total_time = self.total_time
        slower = step_time.median / self.step_time.median
        if total_time is not None:
            total_time = raised(total_time, total_time.median * slower)
        return replace(self, peak_memory=raised(self.peak_memory, memory_bytes), step_time=step_time, total_time=total_time)

    def with_memory_of(self, other: Prediction, *, phase: str) -> Prediction:
        """Return the prediction with the memory of ``other``, another ``phase`` of the same trial, such as "the evaluation"."""
        theirs = other.peak_memory
        memory = self.peak_memory.then("largest phase", f"{phase} needs most", median=theirs.median, log_sigma=theirs.log_sigma)
        return replace(self, peak_memory=memory, memory_parts_bytes=other.memory_parts_bytes)


def _adding_up(parts: Mapping[str, float], total: float) -> Mapping[str, float]:
    """Return ``parts`` with a "correction" that makes them add up to ``total``. No parts stay none."""
    known = {name: value for name, value in parts.items() if name != "correction"}
    correction = total - sum(known.values())
    is_needed = known and abs(correction) > 1e-9 * total
    return known | {"correction": correction} if is_needed else known


@dataclass(frozen=True, slots=True)
class Observation:
    """A graph, the device it ran on, and what it cost: one row to learn from."""

    graph: OpGraph
    device: Device
    measurement: Measurement
    predicted: Mapping[Target, Estimate] = field(default_factory=dict)
    """Prediction of the run from before it ran; empty: unknown."""
    widening: Mapping[Target, float] = field(default_factory=dict)
    """Factors by which the standard deviations of ``predicted`` were widened, see :meth:`Prediction.widened`; empty: none."""
    predicted_by: str = ""
    """Name and version of the predictor that ``predicted``; empty: unknown."""
    regime: int = 0
    """Runs of one device under one driver, one framework and one behaviour have the same number; the regime that was there last
    has the highest. See :func:`perfguard.learning.number_conditions`."""
    decision_id: str = ""
    """Key in the measurement log; empty: it is not logged."""
    recorded_at_ns: int = 0
    """Time of logging since 1970; 0: it is not logged."""
    study: str = ""
    """The study that launched it; empty: none is known."""
    steps_per_epoch: float | None = None
    """Steps of an epoch of it; None: unknown."""

    def measured(self, target: Target) -> float | None:
        """Bytes at the peak, or seconds of a step; None if it was not measured, or cannot be (not positive, not finite)."""
        value = self.measurement.peak_memory_bytes if target == "memory" else self.measurement.step_time_s
        return float(value) if value is not None and math.isfinite(value) and value > 0 else None


@runtime_checkable
class Predictor(Protocol):
    """An object that predicts what a graph costs on a device. Register it under the entry-point group `perfguard.predictors`."""

    @property
    def name(self) -> str:
        """Name and version, for instance "guardnet-5d41402a"."""

    def predict(self, graph: OpGraph, device: Device, *, steps: int | None = None) -> Prediction:
        """The cost of ``graph`` on ``device``; ``steps`` is the number of steps of the trial, if known."""

    def fine_tune(self, observations: Sequence[Observation]) -> None:
        """Learn from ``observations``, all runs of one device. This replaces what was learnt before for that device.

        The runs have the status "ok" or "oom". With "oom" the memory is a lower bound and the times are not used. The next
        predictions are for the last regime among the runs.
        """


@runtime_checkable
class OperatorTimes(Protocol):
    """A predictor that knows the time of each operator, for ``perfguard predict --explain``."""

    def op_time_shares(self, graph: OpGraph, device: Device) -> npt.NDArray[np.float64]:
        """The share of the step time of `predict` that each operator adds; the rest is before the first. Shape: (len(ops),)."""


@runtime_checkable
class Refinable(Protocol):
    """A predictor whose weights can be fine-tuned: what :func:`perfguard.learning.tune_weights` works on."""

    @property
    def lineage(self) -> str:
        """Name and version of the shipped weights. Fine-tuned weights fit these alone."""

    @property
    def shift_on_reference(self) -> float:
        """Distance of the fine-tuned weights in use from the shipped ones, as a mean |logarithm| over steps of the training data.

        0: the shipped weights are in use.
        """

    def refine(self, observations: Sequence[Observation]) -> bytes | None:
        """New weights, fine-tuned on ``observations`` of any devices. None: they are too few. The predictor stays as it is."""

    def use_refinement(self, data: bytes | None) -> None:
        """Use the weights that :meth:`refine` made. None: the shipped weights. Call `fine_tune` again afterwards.

        Raises:
            PredictorError: if the weights are refused. The predictor stays as it is.
        """


def load_predictor(name: str = DEFAULT_PREDICTOR) -> Predictor:
    """The predictor that an installed package registered as ``name``.

    Raises:
        PredictorError: if there is none, or its weights are refused.
    """
    found = entry_points(group=ENTRY_POINT_GROUP)
    for entry_point in found:
        if entry_point.name == name:
            # Networks draw weights before they are filled: a seeded study is to be the same with a guard as without. Libraries
            # make tensors as they are imported, which would begin CUDA where a script has made it the default.
            torch = sys.modules.get("torch")
            with random_numbers_kept(beside_threads=True), nullcontext() if torch is None else torch.device("cpu"):
                predictor = entry_point.load()()
            if not isinstance(predictor, Predictor):
                raise PredictorError(f"The entry point {entry_point.value!r} of predictor {name!r} did not return a Predictor.")
            return predictor
    known = ", ".join(sorted({entry_point.name for entry_point in found})) or "none"
    raise PredictorError(f"No predictor is called {name!r}. Installed: {known}. Install the package that ships it.")


def predict(
    model: Network,
    *,
    gpu: str | Device = "auto",
    mode: Mode | None = None,
    inputs: object = None,
    batch_size: int | None = None,
    dims: Mapping[str, int | Sequence[int]] | None = None,
    precision: Precision | None = None,
    tf32: Tf32 | None = None,
    predictor: str | Predictor = DEFAULT_PREDICTOR,
) -> Prediction:
    """Return the predicted cost of one inference or training step of ``model``: time, peak memory, and other known quantities.

    Example:
        >>> import torch
        >>> prediction = predict(torch.nn.Linear(64, 10), inputs=(32, 64), gpu="a100")
        >>> prediction.device_id
        'a100-pcie-40gb'

    Args:
        model: the path of an ONNX file, a Workload, a graph, or an ``nn.Module`` (with ``inputs``).
        gpu: the device. A catalog name such as "a100", "auto", "cpu", or a Device, for instance from
            `perfguard.devices.mig_instance`.
        mode: "infer" or "train". None: a Workload's own, else "infer".
        inputs: one batch for a module. The form is that of :class:`Workload`.
        batch_size: the batch of an ONNX file, as :func:`perfguard.onnx.graph_from_onnx` takes it. A fixed batch is replaced.
        dims: other sizes of an ONNX file, as :func:`perfguard.onnx.graph_from_onnx` takes them. None: the file's own.
        precision: another precision than that of the workload or of the ONNX file. None: the same.
        tf32: "default", "on" or "off", as :class:`Workload` takes it. None: a Workload's own, PyTorch's switches for a module,
            and "default" for an ONNX file.
        predictor: its name, or the object itself.

    Raises:
        OnnxError, WorkloadError: if the network cannot be read or traced.
        ConfigurationError: for arguments that do not go together.
    """
    from perfguard.devices import resolve_device

    device = resolve_device(gpu)
    graph = graph_of(model, device, mode=mode, inputs=inputs, batch_size=batch_size, dims=dims, precision=precision, tf32=tf32)
    chosen = load_predictor(predictor) if isinstance(predictor, str) else predictor
    steps = model.steps if isinstance(model, Workload) else None
    return chosen.predict(graph, device, steps=steps)


def graph_of(
    model: Network,
    device: Device,
    *,
    mode: Mode | None = None,
    inputs: object = None,
    batch_size: int | None = None,
    dims: Mapping[str, int | Sequence[int]] | None = None,
    precision: Precision | None = None,
    tf32: Tf32 | None = None,
) -> OpGraph:
    """The graph of whatever :func:`predict` takes."""
    from perfguard.graph import OpGraph, trace  # imports torch

    if isinstance(model, OpGraph):
        if tf32 is not None:
            raise ConfigurationError(
                "A graph has its arithmetic already. Give tf32 to the Workload that is traced, or to the file."
            )
        return model
    if isinstance(model, (str, os.PathLike)):
        if Path(model).suffix.lower() != ".onnx":
            raise ConfigurationError(f"Expected the path of an .onnx file, a Workload or a module, but got {str(model)!r}.")
        if mode == "train":
            raise ConfigurationError("An ONNX file has only the forward pass. Give mode='infer', or the network in PyTorch.")
        from perfguard.onnx import graph_from_onnx  # only here: the package onnx is slow to import

        return graph_from_onnx(
            model, batch_size=batch_size, dims=dims, tf32=tf32, target=device,
            precision=precision,  # type: ignore[arg-type]
        )  # fmt: skip
    if batch_size is not None or dims:
        raise ConfigurationError("batch_size and dims are for ONNX files. The inputs of a module or a workload have the batch.")
    if not isinstance(model, Workload):
        if inputs is None:
            raise ConfigurationError("A module needs its inputs, for instance predict(model, inputs=(32, 3, 224, 224)).")
        model = Workload(model, inputs, mode="infer")
    stated: dict[str, Any] = {"mode": mode, "precision": precision, "tf32": tf32}
    changes = {name: value for name, value in stated.items() if value is not None}
    return trace(replace(model, **changes), target=device)


def most_energy(prediction: Prediction, device: Device) -> Estimate | None:
    """Joules of one step: what the predictor says, else the most that it can be, the card's power limit (TDP) for all the time.

    None on a device whose power limit is not known, such as a CPU.
    """
    if prediction.energy is not None or device.tdp_w <= 0:
        return prediction.energy
    return prediction.step_time.scaled(device.tdp_w)
