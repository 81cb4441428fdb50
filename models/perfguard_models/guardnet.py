"""GuardNet: PerfGuard's own predictor. Networks and trees correct physics; a Gaussian process on an embedding learns online.

For CPUs a graph network (`_network`), for GPUs networks and trees (`ensemble`). They are trained on many measured runs and ship
with the package. What they leave unexplained on the machine at hand (a constant factor, a trend, a region) is small and smooth,
so a process on an embedding of the graph learns it from the first few trials, in closed form, and says how sure it is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from perfguard.graph import OpGraph
from perfguard.predictor import Estimate, Observation, Prediction
from perfguard_models._engines import TARGETS, UNTRAINED_LOG_SIGMA, Answer, CpuEngine, Engine, GpuEngine
from perfguard_models._residual import ResidualPosterior, ResidualPrior, condition
from perfguard_models.fusion import Compiled, as_compiled
from perfguard_models.served import trained_of
from perfguard_models.weight_files import read_pair

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from perfguard.devices import Device

_ON_CPU, _ON_GPU = "guardnet_cpu", "guardnet"
_OVERHEAD_ROWS = 20
_OVERHEAD_PRIOR_ROWS = 2.0
_OVERHEAD_LOG_SIGMA = 0.05


def load(path: str | Path | None = None) -> GuardNet:
    """GuardNet with the shipped weights: one set for CPUs, one for GPUs.

    Args:
        path: other weights, without suffix (PATH.safetensors and PATH.json), in the place of those for the same kind of device.

    Raises:
        PredictorError: if the files are missing, damaged, of another version, or do not belong together.
    """
    folder = files("perfguard_models") / "weights"
    engines = dict(_read(folder / f"{name}.safetensors", folder / f"{name}.json", name) for name in (_ON_CPU, _ON_GPU))
    if path is not None:
        engines |= [_read(Path(f"{path}.safetensors"), Path(f"{path}.json"), str(path))]
    return GuardNet(engines)


def _read(tensors: Traversable, card: Traversable, name: str) -> tuple[str, Engine]:
    """The kind of device, and the weights for it. `perfguard train` writes cards with a format; those for CPUs have none."""
    data, document = read_pair(tensors, card, "GuardNet's weights", "train them again")
    if "format" in document:
        return "cuda", GpuEngine(trained_of(data, document, name))
    return "cpu", CpuEngine(data, document, name)


class GuardNet:
    """See the module's docstring. Build it with :func:`load`."""

    def __init__(self, engines: dict[str, Engine]) -> None:
        self._engines = engines
        self._posteriors: dict[tuple[str, str], ResidualPosterior] = {}
        self._overheads: dict[str, tuple[float, float]] = {}
        self._answers: WeakKeyDictionary[OpGraph, dict[str, Answer]] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_answers": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"_answers": WeakKeyDictionary()})

    @property
    def name(self) -> str:
        """Name and version."""
        return f"guardnet-{max(engine.version for engine in self._engines.values())}"

    def predict(self, graph: OpGraph, device: Device, *, steps: int | None = None) -> Prediction:
        """The cost of ``graph`` on ``device``; see :class:`perfguard.predictor.Predictor`."""
        answer, compiled = self._answer(graph, device), as_compiled(graph, device)
        launched = graph if compiled is None else compiled.graph
        trained = (device.id, "memory") in self._posteriors or (
            self._engines[device.kind].trained_on(device) and all(answer.known.values())
        )
        memory = self._estimate("memory", answer, device)
        step_time = self._estimate("time", answer, device)
        overhead, overhead_log_sigma = self._overheads.get(device.id, (0.0, _OVERHEAD_LOG_SIGMA))
        total_time = None if steps is None else step_time.scaled(steps * math.exp(overhead), log_sigma=overhead_log_sigma)
        by_kind: dict[str, float] = {}
        scale = step_time.median / math.exp(answer.log_value["time"])
        for op, seconds in zip(graph.ops, answer.op_time_s.tolist(), strict=True):
            by_kind[op.kind] = by_kind.get(op.kind, 0.0) + seconds * scale
        return Prediction(
            peak_memory=memory,
            step_time=step_time,
            total_time=total_time,
            predictor=self.name,
            device_id=device.id,
            trained_on_device=trained,
            bytes_at_peak={kind.name.lower(): num_bytes for kind, num_bytes in launched.bytes_by_kind().items() if num_bytes},
            time_by_kind_s=dict(sorted(by_kind.items(), key=lambda item: -item[1])),
            gpu_util=answer.shares.get("gpu_util"),
            sm_active=answer.shares.get("sm_active"),
            unmodelled=launched.unmodelled,
        )

    def fine_tune(self, observations: Sequence[Observation]) -> None:
        """Condition the residual processes on ``observations``, all that there are for their device.

        A run that was out of memory needed more than was measured. It counts with what it is expected to have needed, given that
        and what the others say (one step of expectation and maximisation for a censored Gaussian, Tobin 1958).
        """
        by_device: dict[str, list[Observation]] = {}
        for observation in observations:
            by_device.setdefault(observation.device.id, []).append(observation)
        for device_id, rows in by_device.items():
            ended_well = [row for row in rows if row.measurement.status == "ok"]
            out_of_memory = [row for row in rows if row.measurement.status == "oom"]
            self._overheads[device_id] = _overhead_of(ended_well)
            for target in TARGETS:
                bounds = self._residuals(out_of_memory, target) if target == "memory" else None
                self._learn(device_id, target, self._residuals(ended_well, target), bounds)

    def _residuals(self, rows: Sequence[Observation], target: str) -> _Residuals | None:
        """Of the rows whose ``target`` was measured; None: of none."""
        known = [(row, value) for row in rows if (value := _measured(row, target)) is not None]
        if not known:
            return None
        answers = [self._answer(row.graph, row.device) for row, _ in known]
        predicted = torch.tensor([answer.log_value[target] for answer in answers], dtype=torch.float64)
        measured = torch.tensor([math.log(value) for _, value in known], dtype=torch.float64)
        x = torch.cat([answer.embedding[target] for answer in answers])
        return _Residuals(answers[0].prior[target], x, measured - predicted)

    def _learn(self, device_id: str, target: str, measured: _Residuals | None, bounds: _Residuals | None) -> None:
        key = (device_id, target)
        if measured is not None:
            self._posteriors[key] = condition(measured.prior, measured.x, measured.y)
        if bounds is None:
            return
        if measured is None:
            mean, sigma = torch.zeros_like(bounds.y), bounds.prior.variance(bounds.x).sqrt()
        else:
            mean, sigma = self._posteriors[key].at(bounds.x)
        expected = _expected_above(bounds.y, mean, sigma)
        x = bounds.x if measured is None else torch.cat([measured.x, bounds.x])
        y = expected if measured is None else torch.cat([measured.y, expected])
        self._posteriors[key] = condition(bounds.prior, x, y)

    def _estimate(self, target: str, answer: Answer, device: Device) -> Estimate:
        x, prior = answer.embedding[target], answer.prior[target]
        posterior = self._posteriors.get((device.id, target))
        if posterior is None:
            mean, log_sigma = 0.0, float(prior.variance(x).sqrt())
        else:
            means, log_sigmas = posterior.at(x)
            # The process has one prior; this graph may be harder or easier than the one that it was made for.
            mean, log_sigma = float(means), float(log_sigmas) * prior.noise / posterior.prior.noise
        scale = self._engines[device.kind].interval_scale(target)
        return Estimate(math.exp(answer.log_value[target] + mean), log_sigma * scale)

    def _answer(self, graph: OpGraph, device: Device) -> Answer:
        of_graph = self._answers.setdefault(graph, {})
        key = repr(device)
        if key not in of_graph:
            engine, compiled = self._engines[device.kind], as_compiled(graph, device)
            answer = engine.answer(graph if compiled is None else compiled.eager, device)
            of_graph[key] = answer if compiled is None else _on_kernels(answer, compiled, device)
        return of_graph[key]


def _on_kernels(answer: Answer, compiled: Compiled, device: Device) -> Answer:
    """What was said of the eager graph, for the kernels that are launched instead."""
    op_time_s = answer.op_time_s * torch.from_numpy(compiled.time_shares(device)).to(answer.op_time_s)
    saved = math.log(max(float(op_time_s.sum()), 1e-12) / max(float(answer.op_time_s.sum()), 1e-12))
    changes = {"memory": math.log(compiled.memory_share(device)), "time": saved}
    log_value = {target: value + changes[target] for target, value in answer.log_value.items()}
    return answer._replace(log_value=log_value, op_time_s=op_time_s)


class _Residuals(NamedTuple):
    """What was measured beyond what was predicted, as logarithms, for n runs."""

    prior: ResidualPrior
    x: torch.Tensor  # embeddings, shape: (n, d)
    y: torch.Tensor  # shape: (n,)


def _expected_above(bound: torch.Tensor, mean: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """Mean of a normal variable that is known to exceed ``bound``, by the inverse Mills ratio. All shapes: (n,)."""
    z = (bound - mean) / sigma
    log_tail = torch.special.log_ndtr(-z)
    return mean + sigma * torch.exp(-z.square() / 2 - math.log(2 * math.pi) / 2 - log_tail)


def _overhead_of(rows: Sequence[Observation]) -> tuple[float, float]:
    """What a trial takes beyond its steps (setting up, validating): mean and standard deviation of log(trial / steps).

    The last few trials that went half as far as the longest of them or further (what was stopped early is mostly setting up),
    shrunk towards no overhead; the median, so that one interrupted trial does not count.
    """
    most_steps = max((row.measurement.num_steps for row in rows[-_OVERHEAD_ROWS:]), default=0)
    ratios = [
        math.log(row.measurement.total_time_s / (row.measurement.num_steps * step_time_s))
        for row in rows[-_OVERHEAD_ROWS:]
        if 2 * row.measurement.num_steps >= most_steps
        and (step_time_s := _measured(row, "time"))
        and row.measurement.num_steps > 0
        and 0 < row.measurement.total_time_s < math.inf
    ]
    if not ratios:
        return 0.0, _OVERHEAD_LOG_SIGMA
    median = statistics.median(ratios)
    spread = statistics.median(abs(ratio - median) for ratio in ratios) * 1.4826
    weight = len(ratios) / (len(ratios) + _OVERHEAD_PRIOR_ROWS)
    return weight * median, max(weight * spread + (1 - weight) * _OVERHEAD_LOG_SIGMA, 0.01)


def _measured(observation: Observation, target: str) -> float | None:
    measurement = observation.measurement
    value = measurement.peak_memory_bytes if target == "memory" else measurement.step_time_s
    return float(value) if value is not None and math.isfinite(value) and value > 0 else None


__all__ = ["UNTRAINED_LOG_SIGMA", "GuardNet", "load"]
