"""Gradient steps on the runs of a log: the slow speed of online learning. The fast one is the process (`residual`).

What moves is what is read out of the graph network: its two heads, the seconds that are parameters themselves, and for each
device with runs a factor of the host and one of the device. What the network reads of an operator stays, so each run is encoded
once.

    loss = mean over runs of huber(log t - y)  +  w · mean over reference steps of (log t - log t0)²
           +  p · |θ - θ0|²  +  Σ over devices of |f / σ|² · noise² / (2 n)

    t   seconds of a step, for GPUs with the trees' half          y   log measured seconds
    θ   the heads, θ0 those that ship                             f   log factors of the host and the device

The third term pulls the weights to the shipped ones (L2-SP, Li et al. 2018). The second rehearses: on steps of the training
tables, the predictions are to stay what they were (Robins 1995). A prediction for a device without runs does not change.

The process is conditioned on the residuals of these predictions. A prediction for a run that was learnt is too good, so each run
has another one, by a fit without its fold.
"""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from perfguard_models.graph_network import GraphNetwork, Packed
from perfguard_models.learner import LARGEST_BYTES, Floats, Step, fitting
from perfguard_models.step_time import StepTime, batches_of

FORMAT = 3
_USUAL = torch.zeros(2, dtype=torch.float32, device="cpu")
"""Log factors of a usual machine's host and device."""
_LARGEST = 3.0
"""Of a correction, as a logarithm. It bounds what weights can do that somebody else has made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuningConfig:
    """Settings of the gradient steps. `benchmarks/online.py` shows what they do."""

    fewest_runs: int = 10
    """With fewer runs, nothing is fine-tuned."""
    steps: int = 150
    """Steps of Adam, each on all runs."""
    folds: int = 4
    rate: float = 3e-3
    factor_rate: float = 2e-2
    huber: float = 0.2
    rehearsal: float = 1.0
    pull: float = 1e-2
    sigma: tuple[float, float] = (0.5, 0.15)
    """Standard deviations of a machine's log host factor and log device factor."""
    noise: float = 0.1
    """Standard deviation of log times, beside which the factors' prior is weighed."""


CONFIG = FineTuningConfig()


class LearntRun(NamedTuple):
    """A measured run."""

    decision_id: str
    device_id: str
    step: Step
    predicted: float
    """Log seconds by the shipped weights."""
    measured: float
    """Log seconds."""


@dataclass(frozen=True, slots=True)
class FineTuned:
    """Fine-tuned weights: what they add to the shipped ones. Built by :func:`fine_tune` or :meth:`from_bytes`."""

    made_for: str
    """The shipped weights."""
    network: GraphNetwork
    """Their network, fine-tuned."""
    factors: Mapping[str, Tensor]
    """Log factors of the host and the device, by device. Shapes: (2,)."""
    held_out: Mapping[str, float]
    """The correction of each learnt run by a fit without it."""
    shift: float
    """Mean |correction| of the reference steps."""

    def corrections(self, learner: StepTime, steps: Sequence[Step], device_id: str) -> Floats:
        """What is added to log seconds of ``steps`` on a device; 0 on a device without runs. Shape: (len(steps),)."""
        found = torch.zeros(len(steps), dtype=torch.float64)
        with torch.inference_mode():
            for some in batches_of(steps, range(len(steps))) if device_id in self.factors else ():
                encoded = _Encoded.of(learner, [steps[at] for at in some])
                found[some] = encoded.corrections(self.network, self.factors[device_id]).double()
        return np.asarray(found.nan_to_num(0.0).clamp(-_LARGEST, _LARGEST).numpy())

    def to_bytes(self) -> bytes:
        """A safetensors file."""
        tensors: dict[str, Tensor] = {f"factor.{device}": factor for device, factor in self.factors.items()}
        tensors |= {f"network.{name}": head for name, head in self.network.heads.items()}
        header = {"format": FORMAT, "made_for": self.made_for, "shift": self.shift, "held_out": dict(self.held_out)}
        return save({name: value.detach().contiguous() for name, value in tensors.items()}, {"perfguard": json.dumps(header)})

    @classmethod
    def from_bytes(cls, data: bytes, learner: StepTime) -> FineTuned:
        """The inverse of :meth:`to_bytes`, for weights that were made from those of ``learner``.

        Raises:
            PredictorError: if the data are damaged, of another version, or do not fit the network.
        """
        with fitting("Fine-tuned weights"):
            if len(data) > LARGEST_BYTES:
                raise ValueError(f"{len(data)} bytes, more than {LARGEST_BYTES}")
            tensors = load(data)
            size = int.from_bytes(data[:8], "little")
            header = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["perfguard"])
            if header["format"] != FORMAT:
                raise ValueError("they were made by another version of PerfGuard")
            network = copy.deepcopy(learner.network)
            for name, head in network.heads.items():
                head.data.copy_(tensors[f"network.{name}"].reshape(head.shape))
            factors = {name.removeprefix("factor."): f.reshape(2) for name, f in tensors.items() if name.startswith("factor.")}
            held_out = {str(key): float(value) for key, value in header["held_out"].items()}
            shift = float(header["shift"])
            if not all(bool(value.isfinite().all()) for value in (*tensors.values(), torch.tensor([shift, *held_out.values()]))):
                raise ValueError("they have values that are not finite")
            return cls(str(header["made_for"]), network, factors, held_out, shift)


class _Encoded(NamedTuple):
    """Steps as the shipped network reads them, and what it says."""

    packed: Packed
    read: Tensor
    changed: Tensor
    shipped: Tensor  # shape: (B,), log seconds of the network
    share: Tensor  # shape: (B,), of the network in the prediction: a half where there are trees

    @classmethod
    def of(cls, learner: StepTime, steps: Sequence[Step]) -> _Encoded:
        packed = learner.pack(steps)
        with torch.no_grad():
            share = torch.from_numpy(learner.share_of_network(steps)).float()
            found = cls(packed, *learner.network.encode(packed), share, share)
            return found._replace(shipped=found._log_s(learner.network, _USUAL))

    def _log_s(self, network: GraphNetwork, machine: Tensor) -> Tensor:
        return network.clocks(self.packed, self.read, self.changed).log_step_s(machine)

    def corrections(self, network: GraphNetwork, machine: Tensor) -> Tensor:
        """What ``network`` adds to the log seconds of the prediction. Shape: (B,)."""
        return self.share * (self._log_s(network, machine) - self.shipped)


def fine_tune(
    made_for: str, learner: StepTime, runs: Sequence[LearntRun], *, config: FineTuningConfig = CONFIG
) -> FineTuned | None:
    """Fine-tune the network of ``learner`` on ``runs``; None if they are too few."""
    if len(runs) < config.fewest_runs:
        return None
    encoded = _Encoded.of(learner, [run.step for run in runs])
    reference = _Encoded.of(learner, learner.reference) if learner.reference else None
    devices = sorted({run.device_id for run in runs})
    at = torch.tensor([devices.index(run.device_id) for run in runs])
    wanted = torch.tensor([run.measured - run.predicted for run in runs], dtype=torch.float32)
    fold = torch.tensor([zlib.crc32(run.decision_id.encode()) % config.folds for run in runs])

    def fitted(learnt: Tensor) -> tuple[GraphNetwork, Tensor]:
        network = copy.deepcopy(learner.network)
        factors = torch.zeros(len(devices), 2, dtype=torch.float32, requires_grad=True)
        heads = [*network.heads.values()]
        start = [head.detach().clone() for head in heads]
        groups: list[dict[str, Any]] = [{"params": heads}, {"params": [factors], "lr": config.factor_rate}]
        optimizer = torch.optim.Adam(groups, lr=config.rate)
        for _ in range(config.steps):
            error = (encoded.corrections(network, factors[at]) - wanted)[learnt]
            loss = nn.functional.huber_loss(error, torch.zeros_like(error), delta=config.huber)
            if reference is not None:
                loss = loss + config.rehearsal * reference.corrections(network, _USUAL).square().mean()
            loss = loss + config.pull * sum((head - one).square().sum() for head, one in zip(heads, start, strict=True))
            prior = (factors / torch.tensor(config.sigma, dtype=torch.float32)).square().sum()
            loss = loss + prior * config.noise**2 / (2 * len(error))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return network, factors.detach()

    with torch.enable_grad():
        held_out = torch.zeros(len(runs), dtype=torch.float32)
        for one in fold.unique().tolist():
            is_learnt = fold != one
            if is_learnt.any():
                network, factors = fitted(is_learnt)
                held_out[~is_learnt] = encoded.corrections(network, factors[at])[~is_learnt].detach()
        network, factors = fitted(torch.ones(len(runs), dtype=torch.bool))
    shift = 0.0 if reference is None else float(reference.corrections(network, _USUAL).detach().abs().mean())
    by_run = {run.decision_id: value for run, value in zip(runs, held_out.tolist(), strict=True)}
    return FineTuned(made_for, network, dict(zip(devices, factors, strict=True)), by_run, shift)
