"""Limits of a deployed network for any search: as a filter, as a constraint of a tuner, or as a penalty with a gradient.

A candidate is traced and predicted, never run. A user may measure a few candidates on the device and pass their costs to
`LatencyConstraint.learn`. The predictions then move towards them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from perfguard._kind_rates import RateCorrection
from perfguard._predict import graph_of, most_energy
from perfguard.budget import Budget
from perfguard.exceptions import ConfigurationError
from perfguard.judge import Judge
from perfguard.nas._protocols import ConstrainedTrial, constrain
from perfguard.nas._space import ElasticSpace
from perfguard.predictor import DEFAULT_PREDICTOR, BatchPredictor, Observation, Prediction, Predictor
from perfguard.quantities import parse_bytes
from perfguard.verdict import EVEN_CHANCE, Verdict
from perfguard.workload import TensorSpec, Workload

if TYPE_CHECKING:
    import torch

    from perfguard._predict import Network
    from perfguard.budget import Limit
    from perfguard.devices import Device
    from perfguard.graph import GraphBatch, OpGraph

_N = TypeVar("_N", bound="Network")


class LatencyConstraint(Judge):
    """Whether a network runs fast enough, on little enough energy and memory, on a given device.

    It judges a candidate as :class:`perfguard.Guard` judges a trial: by a budget of latency, energy and memory, at an accepted
    risk. It keeps no risk budget and no log, because a candidate is not launched.

    Example:
        >>> from torch import nn
        >>> constraint = LatencyConstraint(gpu="t4", max_latency_ms=5, inputs=(8, 3, 32, 32))
        >>> constraint(nn.Conv2d(3, 8, 3)).action
        'launch'
        >>> constraint(nn.Conv2d(3, 4096, 31, padding=15)).action
        'prune'

    Args:
        gpu: a catalog name such as "a100", "auto", "cpu", or a Device (a MIG instance, for example).
        max_latency_ms: milliseconds of one batch.
        max_energy_j: joules of one batch. Where the predictor does not know energy, the power limit of the card times the
            latency must stay below it, which is cautious. A CPU has no known power limit.
        max_memory: bytes or a text such as "2GiB". None: all that the device has.
        inputs: one batch, for candidates that are modules. The form is that of :class:`perfguard.Workload`.
        risk: the chance to break a limit up to which a candidate passes, in (0, 1). With the default, one half, the median
            decides. Most candidates of a search are near the limit, and the winner is measured in the end.
        predictor: its name, or the object itself.

    .. note::
        Build modules inside ``torch.device("meta")``. It costs no memory, and equal structures are traced once. In an
        ``nn.Sequential`` each distinct block is traced once for all candidates.
    """

    def __init__(
        self,
        gpu: str | Device = "auto",
        *,
        max_latency_ms: float | None = None,
        max_energy_j: float | None = None,
        max_memory: int | str | None = None,
        inputs: Any = None,
        risk: float = EVEN_CHANCE,
        predictor: str | Predictor = DEFAULT_PREDICTOR,
    ) -> None:
        from perfguard.graph import SequenceTracer

        budget = Budget(
            memory_bytes=None if max_memory is None else parse_bytes(max_memory, what="max_memory"),
            latency_s=_positive("max_latency_ms", max_latency_ms, 1e-3),
            energy_j=_positive("max_energy_j", max_energy_j, 1.0),
        )
        if budget == Budget():
            raise ConfigurationError("Give at least one of max_latency_ms, max_energy_j and max_memory.")
        super().__init__(gpu, budget, risk=risk, predictor=predictor)
        if self.budget.energy_j is not None and self.device.tdp_w <= 0:
            raise ConfigurationError(
                f"The power of {self.device.name} is unknown, so max_energy_j cannot be checked. Give a GPU."
            )
        self.inputs = inputs
        self._blocks = SequenceTracer()
        self._observations: list[Observation] = []
        self._rates = RateCorrection()

    def __call__(self, model: Network) -> Verdict:
        """ "launch" if ``model`` keeps all limits with enough certainty, else "prune", with the numbers and a sentence.

        Raises:
            WorkloadError: if it cannot be traced or read.
        """
        return self._judge_graph(lambda: self.graph_of(model), self._predict, self._limits_of, accepted=self.risk)

    def verdict_on(self, prediction: Prediction) -> Verdict:
        """The verdict on a prediction of :meth:`predict`."""
        return Verdict.of(prediction, self._limits_of(prediction), accepted=self.risk)

    def _limits_of(self, prediction: Prediction) -> Iterable[Limit]:
        if self.budget.energy_j is not None:
            prediction = dataclasses.replace(prediction, energy=most_energy(prediction, self.device))
        return self.budget.limits(prediction, self.device, infers=True)

    def filter(self, models: Iterable[_N]) -> list[_N]:
        """The ``models`` that pass, in their order."""
        return [model for model in models if self(model).action == "launch"]

    def predict(self, model: Network) -> Prediction:
        """Predicted cost of one inference of ``model``."""
        return self._predict(self.graph_of(model))

    def _predict(self, graph: OpGraph, *, steps: int | None = None) -> Prediction:
        """With the rates that were learnt. There is no least reading, because a candidate is not read."""
        return self._rates.apply([self.predictor.predict(graph, self.device, steps=steps)], graph.as_batch(), self.device)[0]

    def predict_all(self, graphs: GraphBatch) -> list[Prediction]:
        """The result of :meth:`predict` for each of ``graphs``."""
        if isinstance(self.predictor, BatchPredictor):
            predictions = self.predictor.predict_all(graphs, self.device)
        else:
            predictions = [self.predictor.predict(graph, self.device) for graph in graphs]
        return self._rates.apply(predictions, graphs, self.device)

    def elastic(self, build: Callable[..., Network], widths: Mapping[str, Iterable[int]]) -> ElasticSpace:
        """The space of all networks that ``build(**widths)`` makes. It judges thousands of them per second.

        Example:
            >>> from torch import nn
            >>> def build(stem, body):
            ...     return nn.Sequential(nn.Conv2d(3, stem, 3), nn.ReLU(), nn.Conv2d(stem, body, 3))
            >>> constraint = LatencyConstraint(gpu="t4", max_latency_ms=5, inputs=(8, 3, 32, 32))
            >>> space = constraint.elastic(build, widths={"stem": range(8, 65), "body": range(8, 129, 8)})
            >>> [verdict.action for verdict in space.verdicts([{"stem": 17, "body": 64}, {"stem": 64, "body": 128}])]
            ['launch', 'launch']

        Args:
            build: takes the widths as keyword arguments and returns a candidate as :meth:`__call__` takes it. It is called on the
                meta device.
            widths: by name, what each may be: whole numbers, none below zero.

        Raises:
            ConfigurationError: if there are no widths, or one has no values, or such that are no whole numbers.
            WorkloadError: if ``build`` raises, or what it makes cannot be traced.
        """
        return ElasticSpace(self, build, widths)

    def graph_of(self, model: Network) -> OpGraph:
        """The operators of one inference; equal structures are traced once."""
        from torch import nn

        if isinstance(model, nn.Module):
            if self.inputs is None:
                raise ConfigurationError("Modules need LatencyConstraint(inputs=...), for instance inputs=(1, 3, 32, 32).")
            if isinstance(model, nn.Sequential) and self._inputs_are_one_tensor:
                graph = self._blocks.trace(model, self.inputs, target=self.device)
                if graph is not None:
                    return graph
            model = Workload(model, self.inputs, mode="infer")
        if isinstance(model, Workload):
            return self._traces.trace(model, target=self.device)
        return graph_of(model, self.device)

    @property
    def _inputs_are_one_tensor(self) -> bool:
        is_shape = isinstance(self.inputs, tuple) and all(type(size) is int for size in self.inputs)
        return is_shape or isinstance(self.inputs, TensorSpec)

    def learn(self, model: Network, measured_s: float, *, peak_memory_bytes: int | None = None) -> None:
        """Learn what one batch of ``model`` took on this device. Every later prediction takes it into account.

        The predictor is conditioned on it. From the eighth candidate on, two rates are fitted to each kind of operator besides.
        They give the latency as long as they do better than the predictor, see `perfguard/_kind_rates.py`.

        Args:
            model: a candidate that was run.
            measured_s: seconds of one batch: the median of several, after a warm-up.
            peak_memory_bytes: if that was measured too.
        """
        from perfguard.measure import Measurement

        if isinstance(measured_s, bool) or not (math.isfinite(measured_s) and measured_s > 0):
            raise ConfigurationError(f"measured_s must be positive seconds, but got {measured_s!r}.")
        measurement = Measurement(
            "ok", self.device.id, self.device.name, peak_memory_bytes, measured_s, measured_s, 1, method="given", framework=""
        )
        graph = self.graph_of(model)
        predicted_s = self.predictor.predict(graph, self.device).step_time.median
        self._rates.observe(graph, self.device, measured_s=measured_s, predicted_s=predicted_s)
        self._observations.append(Observation(graph, self.device, measurement))
        self.predictor.fine_tune(self._observations)

    def constrain(self, trial: ConstrainedTrial, model: Network) -> Verdict:
        """Return the verdict, and write into the trial how far it is from each limit, so that its sampler learns it.

        With Optuna: ``constraint.constrain(trial, model)`` inside the objective, before training; a candidate that breaks a
        limit need not be trained (``raise optuna.TrialPruned(verdict.reason)``). In a study of accuracy against latency, the
        second objective is ``verdict.prediction.step_time.median``.
        """
        return constrain(trial, self(model))

    def seconds_of(self, choices: Sequence[Network]) -> torch.Tensor:
        """The predicted latency of each of ``choices``, seconds. Shape: (len(choices),)."""
        import torch

        return torch.tensor([self.predict(choice).step_time.median for choice in choices])

    def penalty(
        self,
        weights: Sequence[torch.Tensor],  # shapes: (choices_i,), each adding up to 1
        seconds: Sequence[torch.Tensor],  # shapes: (choices_i,)
        *,
        fixed_s: float = 0.0,
    ) -> torch.Tensor:
        """Penalty for a differentiable search: the excess of the expected latency of weighted choices over the limit, as a
        logarithm.

        The penalty is relu(log((fixed + Σᵢ wᵢ · sᵢ) / limit)). It is zero where the limit holds. Elsewhere its gradient points
        to the faster choices (ProxylessNAS, Cai et al. 2019, equation 6, with a threshold).

        Args:
            weights: for each layer the probabilities of its choices. A softmax of architecture parameters gives them.
            seconds: for each layer the seconds of its choices, from :meth:`seconds_of`.
            fixed_s: seconds of the rest of the network.

        Returns:
            A scalar to add to the loss, times a factor of your own.
        """
        import torch

        if self.budget.latency_s is None:
            raise ConfigurationError("penalty needs LatencyConstraint(max_latency_ms=...).")
        expected = torch.stack([(w * s.to(w)).sum() for w, s in zip(weights, seconds, strict=True)]).sum() + fixed_s
        return torch.relu(torch.log(expected / self.budget.latency_s))


def _positive(name: str, value: float | None, unit: float) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
        raise ConfigurationError(f"{name} must be a positive number, but got {value!r}.")
    return float(value) * unit


__all__ = ["LatencyConstraint"]
