"""GuardNet: PerfGuard's own predictor. A graph network corrects physics; a Gaussian process on its embedding learns online.

The network is trained on many measured runs and ships with the package. What it leaves unexplained on the machine at hand (a
constant factor, a trend, a region) is small and smooth, so a process on the last hidden layer learns it from the first few
trials, in closed form, and says how sure it is.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from perfguard.exceptions import PredictorError
from perfguard.features import FEATURE_VERSION, featurize
from perfguard.graph import OpGraph
from perfguard.predictor import Estimate, Observation, Prediction
from perfguard_models._network import Correction, GuardNetwork
from perfguard_models._residual import ResidualPosterior, ResidualPrior, condition

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from perfguard.devices import Device

_SHIPPED = ("guardnet", "guardnet_gpu")
UNTRAINED_LOG_SIGMA = {"memory": 0.2, "time": 0.6}
"""How far bare physics is from a device of a kind that the network has never seen: the driver's reading is within 10% of replay
and context on average, but convolution workspaces can double it; a step takes one to four times its roofline."""
_UNTRAINED_TIME_FACTOR = 2.0
_TARGETS = ("memory", "time")
_OVERHEAD_ROWS = 20
_OVERHEAD_PRIOR_ROWS = 2.0
_OVERHEAD_LOG_SIGMA = 0.05


class Weights(NamedTuple):
    """A trained network, and what is known of its errors."""

    network: GuardNetwork
    card: dict[str, Any]
    priors: dict[str, ResidualPrior]


def load(path: str | Path | None = None) -> GuardNet:
    """GuardNet with the shipped weights: one network for CPUs, one for GPUs.

    Args:
        path: other weights, without suffix (PATH.safetensors and PATH.json), for the kind of device that their card names.

    Raises:
        PredictorError: if the files are missing, damaged, of another version, or do not belong together.
    """
    if path is not None:
        return GuardNet([_read(Path(f"{path}.safetensors"), Path(f"{path}.json"), str(path))])
    folder = files("perfguard_models") / "weights"
    return GuardNet(
        [
            _read(folder / f"{name}.safetensors", folder / f"{name}.json", name)
            for name in _SHIPPED
            if (folder / f"{name}.json").is_file()
        ]
    )


def _read(tensors: Traversable, card_file: Traversable, name: str) -> Weights:
    try:
        tensors_bytes = tensors.read_bytes()
        card = json.loads(card_file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PredictorError(f"GuardNet's weights cannot be read: {error}. Reinstall perfguard, or train them again.") from error
    if card.get("feature_version") != FEATURE_VERSION:
        raise PredictorError(
            f"The weights {name!r} were made for features of version {card.get('feature_version')}, this PerfGuard has "
            f"version {FEATURE_VERSION}. Train them again with this version."
        )
    if card.get("sha256") != hashlib.sha256(tensors_bytes).hexdigest():
        raise PredictorError(f"The weights {name!r} do not match the hash in their card; the file is damaged or exchanged.")
    try:
        network = GuardNetwork(**card["network"])
        network.load_state_dict(load_tensors(tensors_bytes))
        priors = {target: ResidualPrior(**card["residual"][target]) for target in _TARGETS}
        return Weights(network.eval(), card, priors)
    except (RuntimeError, SafetensorError, KeyError, TypeError) as error:
        raise PredictorError(f"The weights {name!r} do not fit the network: {type(error).__name__}: {error}") from error


class GuardNet:
    """See the module's docstring. Build it with :func:`load`."""

    def __init__(self, weights: Sequence[Weights]) -> None:
        self._weights = {item.card["device_kind"]: item for item in weights}
        self._posteriors: dict[tuple[str, str], ResidualPosterior] = {}
        self._overheads: dict[str, tuple[float, float]] = {}
        self._corrections: WeakKeyDictionary[OpGraph, dict[str, Correction]] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_corrections": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"_corrections": WeakKeyDictionary()})

    @property
    def name(self) -> str:
        """Name and version."""
        return f"guardnet-{max(item.card['version'] for item in self._weights.values())}"

    def predict(self, graph: OpGraph, device: Device, *, steps: int | None = None) -> Prediction:
        """The cost of ``graph`` on ``device``; see :class:`perfguard.predictor.Predictor`."""
        correction = self._correct(graph, device)
        trained = (device.id, "memory") in self._posteriors or (
            self._trained_on(device) and all(self._knows(target, graph, device) for target in _TARGETS)
        )
        memory = self._estimate("memory", correction, graph, device)
        step_time = self._estimate("time", correction, graph, device)
        overhead, overhead_log_sigma = self._overheads.get(device.id, (0.0, _OVERHEAD_LOG_SIGMA))
        total_time = None if steps is None else step_time.scaled(steps * math.exp(overhead), log_sigma=overhead_log_sigma)
        by_kind: dict[str, float] = {}
        scale = step_time.median / math.exp(float(correction.log_time))
        for op, seconds in zip(graph.ops, correction.op_time_s.tolist(), strict=True):
            by_kind[op.kind] = by_kind.get(op.kind, 0.0) + seconds * scale
        return Prediction(
            peak_memory=memory,
            step_time=step_time,
            total_time=total_time,
            predictor=self.name,
            device_id=device.id,
            trained_on_device=trained,
            bytes_at_peak={kind.name.lower(): num_bytes for kind, num_bytes in graph.bytes_by_kind().items() if num_bytes},
            time_by_kind_s=dict(sorted(by_kind.items(), key=lambda item: -item[1])),
            unmodelled=graph.unmodelled,
        )

    def fine_tune(self, observations: Sequence[Observation]) -> None:
        """Condition the residual processes on ``observations``, all that there are for their device."""
        by_device: dict[str, list[Observation]] = {}
        for observation in observations:
            by_device.setdefault(observation.device.id, []).append(observation)
        for device_id, rows in by_device.items():
            self._overheads[device_id] = _overhead_of(rows)
            for target in _TARGETS:
                known = [(row, value) for row in rows if (value := _measured(row, target)) is not None]
                if not known:
                    continue
                corrections = [self._correct(row.graph, row.device) for row, _ in known]
                x = torch.cat([_embedding(correction, target) for correction in corrections])
                predicted = torch.cat([_log_prediction(correction, target) for correction in corrections])
                y = torch.tensor([math.log(value) for _, value in known], dtype=torch.float64) - predicted
                self._posteriors[device_id, target] = condition(self._prior(target, rows[0].graph, rows[0].device), x, y)

    def _knows(self, target: str, graph: OpGraph, device: Device) -> bool:
        """Whether the network has seen the like. Where it has not, physics answers: far outside its data a network invents.

        The GPUs' memory was measured with cuDNN's benchmark mode on, their step time in half precision.
        """
        if device.kind not in self._weights:
            return False
        if device.kind == "cpu":
            return self._trained_on(device)
        return "cudnn_benchmark" in graph.options if target == "memory" else graph.precision != "fp32"

    def _weights_for(self, device: Device) -> Weights:
        """Those of its kind; for a kind without any, others, for their embedding of the graph."""
        return self._weights.get(device.kind) or next(iter(self._weights.values()))

    def _trained_on(self, device: Device) -> bool:
        return device.kind in self._weights and device.id in self._weights[device.kind].card["trained_devices"]

    def _prior(self, target: str, graph: OpGraph, device: Device) -> ResidualPrior:
        prior = self._weights_for(device).priors[target]
        if self._knows(target, graph, device) and self._trained_on(device):
            return prior
        wider = math.hypot(prior.bias, UNTRAINED_LOG_SIGMA[target] / (1 + self._knows(target, graph, device)))
        return ResidualPrior(wider, prior.linear, prior.local, prior.length, prior.noise)

    def _estimate(self, target: str, correction: Correction, graph: OpGraph, device: Device) -> Estimate:
        x = _embedding(correction, target)
        posterior = self._posteriors.get((device.id, target))
        if posterior is None:
            mean, log_sigma = 0.0, float(self._prior(target, graph, device).variance(x).sqrt())
        else:
            means, log_sigmas = posterior.at(x)
            mean, log_sigma = float(means), float(log_sigmas)
        log_median = float(_log_prediction(correction, target)) + mean
        return Estimate(math.exp(log_median), log_sigma * self._interval_scale(target, device))

    def _interval_scale(self, target: str, device: Device) -> float:
        weights = self._weights.get(device.kind)
        return 1.0 if weights is None else float(weights.card["interval_scale"][target])

    def _correct(self, graph: OpGraph, device: Device) -> Correction:
        of_graph = self._corrections.setdefault(graph, {})
        if (cached := of_graph.get(repr(device))) is not None:
            return cached
        data = featurize(graph, device)
        with torch.inference_mode():
            correction: Correction = self._weights_for(device).network(data)
        if not self._knows("memory", graph, device):
            correction = correction._replace(log_memory=data.log_memory)
        if not self._knows("time", graph, device):
            op_time_s = data.roofline * _UNTRAINED_TIME_FACTOR
            correction = correction._replace(log_time=op_time_s.sum()[None].log(), op_time_s=op_time_s)
        of_graph[repr(device)] = correction
        return correction


def _overhead_of(rows: Sequence[Observation]) -> tuple[float, float]:
    """What a trial takes beyond its steps (setting up, validating): mean and standard deviation of log(trial / steps).

    The last few trials, shrunk towards no overhead; the median, so that one interrupted trial does not count.
    """
    ratios = [
        math.log(row.measurement.total_time_s / (row.measurement.num_steps * step_time_s))
        for row in rows[-_OVERHEAD_ROWS:]
        if (step_time_s := _measured(row, "time"))
        and row.measurement.num_steps > 0
        and 0 < row.measurement.total_time_s < math.inf
    ]
    if not ratios:
        return 0.0, _OVERHEAD_LOG_SIGMA
    median = statistics.median(ratios)
    spread = statistics.median(abs(ratio - median) for ratio in ratios) * 1.4826
    weight = len(ratios) / (len(ratios) + _OVERHEAD_PRIOR_ROWS)
    return weight * median, max(weight * spread + (1 - weight) * _OVERHEAD_LOG_SIGMA, 0.01)


def _embedding(correction: Correction, target: str) -> torch.Tensor:
    return (correction.memory_embedding if target == "memory" else correction.time_embedding).double()


def _log_prediction(correction: Correction, target: str) -> torch.Tensor:
    return (correction.log_memory if target == "memory" else correction.log_time).double()


def _measured(observation: Observation, target: str) -> float | None:
    measurement = observation.measurement
    value = measurement.peak_memory_bytes if target == "memory" else measurement.step_time_s
    return float(value) if value is not None and math.isfinite(value) and value > 0 else None


__all__ = ["GuardNet", "load"]
