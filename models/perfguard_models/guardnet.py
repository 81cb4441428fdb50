"""GuardNet: PerfGuard's own predictor. A graph network corrects physics; a Gaussian process on its embedding learns online.

The network is trained on many measured runs and ships with the package. What it leaves unexplained on the machine at hand (a
constant factor, a trend, a region) is small and smooth, so a process on the last hidden layer learns it from the first few
trials, in closed form, and says how sure it is.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    from perfguard.devices import Device

_WEIGHTS = "guardnet"
_CACHE_SIZE = 2048
_UNTRAINED_LOG_SIGMA = {"memory": 0.35, "time": 0.7}
"""Added (in quadrature) to what a predictor that has never seen the device says."""
_TARGETS = ("memory", "time")


def load(path: str | Path | None = None) -> GuardNet:
    """GuardNet with the shipped weights, or those at ``path`` (without suffix: PATH.safetensors and PATH.json).

    Raises:
        PredictorError: if the files are missing, damaged, of another version, or do not belong together.
    """
    folder = files("perfguard_models") / "weights"
    try:
        tensors_bytes = (Path(f"{path}.safetensors") if path else folder / f"{_WEIGHTS}.safetensors").read_bytes()
        card = json.loads((Path(f"{path}.json") if path else folder / f"{_WEIGHTS}.json").read_text())
    except (OSError, ValueError) as error:
        raise PredictorError(f"GuardNet's weights cannot be read: {error}. Reinstall perfguard, or train them again.") from error
    name = path or _WEIGHTS
    if card.get("feature_version") != FEATURE_VERSION:
        raise PredictorError(
            f"The weights {str(name)!r} were made for features of version {card.get('feature_version')}, this PerfGuard has "
            f"version {FEATURE_VERSION}. Train them again with this version."
        )
    if card.get("sha256") != hashlib.sha256(tensors_bytes).hexdigest():
        raise PredictorError(f"The weights {str(name)!r} do not match the hash in their card; the file is damaged or exchanged.")
    network = GuardNetwork(**card["network"])
    try:
        network.load_state_dict(load_tensors(tensors_bytes))
    except (RuntimeError, SafetensorError) as error:
        raise PredictorError(f"The weights {str(name)!r} do not fit the network: {error}") from error
    return GuardNet(network.eval(), card)


class GuardNet:
    """See the module's docstring. Build it with :func:`load`."""

    def __init__(self, network: GuardNetwork, card: dict[str, Any]) -> None:
        self._network = network
        self._card = card
        self._priors = {target: ResidualPrior(**card["residual"][target]) for target in _TARGETS}
        self._posteriors: dict[tuple[str, str], ResidualPosterior] = {}
        self._learnt_from: dict[str, int] = {}
        self._corrections: OrderedDict[tuple[str, str], Correction] = OrderedDict()

    @property
    def name(self) -> str:
        """Name and version."""
        return f"guardnet-{self._card['version']}"

    def predict(self, graph: OpGraph, device: Device, *, steps: int | None = None) -> Prediction:
        """The cost of ``graph`` on ``device``; see :class:`perfguard.predictor.Predictor`."""
        correction = self._correct(graph, device)
        trained = device.id in self._card["trained_devices"] or device.id in self._learnt_from
        memory = self._estimate("memory", correction, device)
        step_time = self._estimate("time", correction, device)
        total_time = None
        if steps is not None:
            total_time = step_time.scaled(steps)
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
            for target in _TARGETS:
                known = [(row, value) for row in rows if (value := _measured(row, target)) is not None]
                if not known:
                    continue
                corrections = [self._correct(row.graph, row.device) for row, _ in known]
                x = torch.cat([_embedding(correction, target) for correction in corrections])
                predicted = torch.cat([_log_prediction(correction, target) for correction in corrections])
                y = torch.tensor([math.log(value) for _, value in known], dtype=torch.float64) - predicted
                self._posteriors[device_id, target] = condition(self._prior(target, device_id), x, y)
            self._learnt_from[device_id] = len(rows)

    def _prior(self, target: str, device_id: str) -> ResidualPrior:
        prior = self._priors[target]
        if device_id in self._card["trained_devices"]:
            return prior
        wider = math.hypot(prior.bias, _UNTRAINED_LOG_SIGMA[target])
        return ResidualPrior(wider, prior.linear, prior.local, prior.length, prior.noise)

    def _estimate(self, target: str, correction: Correction, device: Device) -> Estimate:
        x = _embedding(correction, target)
        posterior = self._posteriors.get((device.id, target))
        if posterior is None:
            mean, log_sigma = 0.0, float(self._prior(target, device.id).variance(x).sqrt())
        else:
            means, log_sigmas = posterior.at(x)
            mean, log_sigma = float(means), float(log_sigmas)
        log_median = float(_log_prediction(correction, target)) + mean
        return Estimate(math.exp(log_median), log_sigma * self._card["interval_scale"][target])

    def _correct(self, graph: OpGraph, device: Device) -> Correction:
        key = (graph.content_hash, device.id)
        if (cached := self._corrections.get(key)) is not None:
            return cached
        with torch.inference_mode():
            correction: Correction = self._network(featurize(graph, device))
        self._corrections[key] = correction
        if len(self._corrections) > _CACHE_SIZE:
            self._corrections.popitem(last=False)
        return correction


def _embedding(correction: Correction, target: str) -> torch.Tensor:
    return (correction.memory_embedding if target == "memory" else correction.time_embedding).double()


def _log_prediction(correction: Correction, target: str) -> torch.Tensor:
    return (correction.log_memory if target == "memory" else correction.log_time).double()


def _measured(observation: Observation, target: str) -> float | None:
    measurement = observation.measurement
    value = measurement.peak_memory_bytes if target == "memory" else measurement.step_time_s
    return float(value) if value is not None and math.isfinite(value) and value > 0 else None


__all__ = ["GuardNet", "load"]
