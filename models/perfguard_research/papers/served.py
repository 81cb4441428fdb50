"""A learner behind the core's `Predictor` protocol: weights from files, intervals from its calibration, learning by an offset."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from perfguard.graph import OpGraph, assumed_log_sigma, memory_parts, roofline_s, unknown_operators, unknown_span
from perfguard.predictor import HALF_INTERVAL, TARGETS, Estimate, Observation, Prediction
from perfguard_models.fusion import Compiled, as_compiled
from perfguard_models.learner import Predicted, predict_with_spread, share_of
from perfguard_models.setting import Setting
from perfguard_models.torch_isolation import undisturbed
from perfguard_models.trained import FittedModel, read_trained, step_of
from perfguard_research.learners import learner_class
from perfguard_research.papers.layers import FEATURE_SETS

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from perfguard.devices import Device

_UNKNOWN_LOG_SIGMA = 1.0
_PRIOR_RUNS = 1.0


def _compiled(graph: OpGraph, device: Device) -> Compiled | None:
    """The kernels of a compiled graph; None: it is not compiled, or in half precision, where compiled runs are training rows."""
    return None if device.kind == "cuda" and graph.precision != "fp32" else as_compiled(graph, device)


class Served:
    """A fitted learner as a predictor. Quantities that it cannot predict come from physics, with a wide interval."""

    def __init__(self, trained: FittedModel) -> None:
        self._trained = trained
        self._offsets: dict[tuple[str, str], float] = {}
        self._cache: WeakKeyDictionary[OpGraph, dict[str, tuple[Predicted, Predicted]]] = WeakKeyDictionary()

    @property
    def name(self) -> str:
        """Name and version."""
        return f"{self._trained.card['predictor']}-{self._trained.card.get('version', 1)}"

    @undisturbed
    def predict(self, graph: OpGraph, device: Device, *, steps: int | None = None) -> Prediction:
        """The cost of ``graph`` on ``device``; see :class:`perfguard.predictor.Predictor`."""
        compiled = _compiled(graph, device)
        memory = self._estimate("memory", graph, device)
        step_time = self._estimate("time", graph, device)
        return Prediction(
            peak_memory=memory,
            step_time=step_time,
            total_time=None if steps is None else step_time.scaled(steps),
            predictor=self.name,
            device_id=device.id,
            trained_on_device=device.id in self._trained.card["trained_devices"],
            memory_parts_bytes=memory_parts(graph if compiled is None else compiled.graph, device),
            gpu_util=self._share("gpu_util", graph, device),
            sm_active=self._share("sm_active", graph, device),
            unmodelled=graph.unmodelled if compiled is None else compiled.graph.unmodelled,
        )

    @undisturbed
    def fine_tune(self, observations: Sequence[Observation]) -> None:
        """A constant factor for each device: the median of what was measured over what was predicted."""
        residuals: dict[tuple[str, str], list[float]] = {}
        for row in observations:
            if row.measurement.status != "ok":
                continue  # out of memory: a lower bound, no measurement of either
            for target in TARGETS:
                if value := row.measured(target):
                    residual = math.log(value) - self._raw(target, row.graph, row.device)[0]
                    residuals.setdefault((row.device.id, target), []).append(residual)
        for key, found in residuals.items():
            self._offsets[key] = statistics.median(found) * len(found) / (len(found) + _PRIOR_RUNS)

    def _answers(self, graph: OpGraph, device: Device) -> tuple[Predicted, Predicted]:
        of_graph = self._cache.setdefault(graph, {})
        key = repr(device)
        if key not in of_graph:
            learner = self._trained.learner
            of_graph[key] = predict_with_spread(learner, [step_of(learner, graph, device, FEATURE_SETS)])
        return of_graph[key]

    def _raw(self, target: str, graph: OpGraph, device: Device) -> tuple[float, float]:
        """Logarithm of the prediction and its standard deviation."""
        compiled = _compiled(graph, device)
        if compiled is not None:
            value, log_sigma = self._raw(target, compiled.eager, device)
            kernels_s, eager_s = (float(roofline_s(seen, device).sum()) for seen in (compiled.graph, compiled.eager))
            share = compiled.memory_share(device) if target == "memory" else kernels_s / max(eager_s, 1e-12)
            return value + math.log(share), log_sigma
        predicted, spreads = self._answers(graph, device)
        value = float(predicted[target][0])
        if not math.isfinite(value):
            if target == "memory":
                value = math.log(graph.peak_live_bytes + device.context_bytes)
            else:
                value = math.log(max(float(roofline_s(graph, device).sum()), 1e-9))
            return value, _UNKNOWN_LOG_SIGMA
        known = device.id in self._trained.card["trained_devices"]
        group = Setting.of(graph, device).group
        return value, self._trained.calibration.log_sigma(target, group, float(spreads[target][0]), known_gpu=known)

    def _estimate(self, target: str, graph: OpGraph, device: Device) -> Estimate:
        value, log_sigma = self._raw(target, graph, device)
        log_sigma = math.hypot(log_sigma, assumed_log_sigma(graph, target))
        if unknown_operators(graph):
            memory_bytes = math.exp(self._raw("memory", graph, device)[0])
            half = unknown_span(graph, roofline_s(graph, device).tolist(), memory_bytes)[target] / 2
            value, log_sigma = value + half, math.hypot(log_sigma, half / HALF_INTERVAL)
        return Estimate(math.exp(value + self._offsets.get((device.id, target), 0.0)), log_sigma)

    def _share(self, target: str, graph: OpGraph, device: Device) -> float | None:
        value = float(self._answers(graph, device)[0][target][0])
        return share_of(value) if math.isfinite(value) else None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cache": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"_cache": WeakKeyDictionary()})


@undisturbed
def load(name: str, path: str | Path | None = None) -> Served:
    """The predictor ``name`` with the shipped weights, or with those at ``path`` (without suffix).

    Raises:
        PredictorError: if the files are refused.
    """
    if path is not None:
        return Served(_read(Path(f"{path}.safetensors"), Path(f"{path}.json"), name))
    folder = files("perfguard_research") / "weights"
    return Served(_read(folder / f"{name}.safetensors", folder / f"{name}.json", name))


def _read(tensors: Traversable, card: Traversable, name: str) -> FittedModel:
    return read_trained(tensors, card, name, learner_of=learner_class, feature_sets=FEATURE_SETS)


# With the shipped weights, for the entry points of `perfguard.predictors`.
load_dnnperf = functools.partial(load, "dnnperf")
load_dnnabacus = functools.partial(load, "dnnabacus")
load_perfseer = functools.partial(load, "perfseer")
load_dippm = functools.partial(load, "dippm")
load_lilou = functools.partial(load, "lilou")
load_trees = functools.partial(load, "trees")
