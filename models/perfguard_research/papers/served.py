"""A learner behind the core's `Predictor` protocol: weights from files, intervals from its calibration, learning by an offset."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from perfguard.devices import Device
from perfguard.graph import OpGraph, assumed_log_sigma, memory_parts, roofline_s, unknown_operators, unknown_span
from perfguard.predictor import HALF_INTERVAL, TARGETS, Estimate, Observation, Prediction
from perfguard_models.calibration import Setting
from perfguard_models.learner import QUANTITIES, FittedModel, read_trained, share_of
from perfguard_models.torch_isolation import undisturbed
from perfguard_research.learners import WEIGHTS, learner_class

_UNKNOWN_LOG_SIGMA = 1.0
_PRIOR_RUNS = 1.0


class Served:
    """A fitted learner as a predictor. Quantities that it cannot predict come from physics, with a wide interval."""

    def __init__(self, trained: FittedModel) -> None:
        self._trained = trained
        self._offsets: dict[tuple[str, str], float] = {}

    @property
    def name(self) -> str:
        """Name and version."""
        return f"{self._trained.card['predictor']}-{self._trained.card.get('version', 1)}"

    @undisturbed
    def predict(self, graph: OpGraph, device: Device, *, steps: int | None = None) -> Prediction:
        """The cost of ``graph`` on ``device``; see :class:`perfguard.predictor.Predictor`."""
        answers = self._answers(graph, device)
        raw = _physics(graph, device) | answers
        learnt = tuple(target for target in TARGETS if target in answers)
        trained = learnt if device.id in self._trained.card["trained_devices"] else ()
        memory, step_time = (self._estimate(target, raw, graph, device) for target in TARGETS)
        gpu_util, sm_active = (share_of(raw[name][0]) if name in raw else None for name in ("gpu_util", "sm_active"))
        return Prediction(
            peak_memory=memory,
            step_time=step_time,
            total_time=None if steps is None else step_time.scaled(steps),
            predictor=self.name,
            device_id=device.id,
            trained_on_device=trained == TARGETS,
            trained_quantities=trained,
            memory_parts_bytes=memory_parts(graph, device),
            gpu_util=gpu_util,
            sm_active=sm_active,
            unmodelled=graph.unmodelled,
        )

    @undisturbed
    def fine_tune(self, observations: Sequence[Observation]) -> None:
        """A constant factor for each device: the median of what was measured over what was predicted."""
        residuals: dict[tuple[str, str], list[float]] = {}
        for row in observations:
            if row.measurement.status != "ok":
                continue  # out of memory: a lower bound, no measurement of either
            raw = _physics(row.graph, row.device) | self._answers(row.graph, row.device)
            for target in TARGETS:
                if value := row.measured(target):
                    residuals.setdefault((row.device.id, target), []).append(math.log(value) - raw[target][0])
        for key, found in residuals.items():
            self._offsets[key] = statistics.median(found) * len(found) / (len(found) + _PRIOR_RUNS)

    def _answers(self, graph: OpGraph, device: Device) -> dict[str, tuple[float, float]]:
        """The logarithm (or logit) and standard deviation of each quantity that the learner answers for.

        It does not answer for memory or time if no held-out run has told how far it is off.
        """
        learner, card, calibration = self._trained
        predicted = learner.predict([self._trained.step(graph, device)])
        known = device.id in card["trained_devices"]
        group = Setting.of(graph, device).group
        found = {}
        for quantity in QUANTITIES:
            (value,) = predicted[quantity]
            if math.isfinite(value) and (quantity not in TARGETS or quantity in calibration.scale):
                found[quantity] = float(value), calibration.log_sigma(quantity, group, 0.0, known_gpu=known)
        return found

    def _estimate(self, target: str, raw: dict[str, tuple[float, float]], graph: OpGraph, device: Device) -> Estimate:
        value, log_sigma = raw[target]
        log_sigma = math.hypot(log_sigma, assumed_log_sigma(graph, target))
        if unknown_operators(graph):
            half = unknown_span(graph, roofline_s(graph, device).tolist(), math.exp(raw["memory"][0]))[target] / 2
            value = value + half
            log_sigma = math.hypot(log_sigma, half / HALF_INTERVAL)
        return Estimate(math.exp(value + self._offsets.get((device.id, target), 0.0)), log_sigma)


def _physics(graph: OpGraph, device: Device) -> dict[str, tuple[float, float]]:
    """The logarithms of memory and time without a learner, with a wide standard deviation."""
    live_bytes = graph.peak_live_bytes + device.context_bytes
    least_s = float(roofline_s(graph, device).sum())
    return {"memory": (math.log(live_bytes), _UNKNOWN_LOG_SIGMA), "time": (math.log(max(least_s, 1e-9)), _UNKNOWN_LOG_SIGMA)}


@undisturbed
def load(name: str, path: str | Path | None = None) -> Served:
    """The predictor ``name`` with the shipped weights, or with those at ``path`` (without suffix).

    Raises:
        PredictorError: if the files are refused.
    """
    return Served(read_trained(Path(path or WEIGHTS / name), learner_class))


# With the shipped weights, for the entry points of `perfguard.predictors`.
load_dnnperf = functools.partial(load, "dnnperf")
load_dnnabacus = functools.partial(load, "dnnabacus")
load_perfseer = functools.partial(load, "perfseer")
load_dippm = functools.partial(load, "dippm")
load_lilou = functools.partial(load, "lilou")
load_trees = functools.partial(load, "trees")
