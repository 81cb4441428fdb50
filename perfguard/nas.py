"""Limits of a deployed network for any architecture search: as a filter, a constraint of a tuner, or a penalty with a gradient.

A candidate is traced and predicted, never run. A user may measure a few candidates on the device and pass their costs to
:meth:`LatencyConstraint.learn`. The predictions then move towards them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING, Protocol, TypeVar

from perfguard.exceptions import ConfigurationError, TooLargeError
from perfguard.guard import Guard
from perfguard.physics import LeastMemory
from perfguard.predictor import DEFAULT_PREDICTOR, Prediction, Predictor, graph_of, most_energy
from perfguard.quantities import parse_bytes
from perfguard.risk_budget import EVEN_CHANCE
from perfguard.verdict import Verdict, check_chance
from perfguard.workload import Workload

if TYPE_CHECKING:
    import torch

    from perfguard.budget import Limit
    from perfguard.devices import Device
    from perfguard.graph import OpGraph
    from perfguard.predictor import Network

_N = TypeVar("_N", bound="Network")


class ConstrainedTrial(Protocol):
    """Interface of a tuner's trial that takes constraints. `optuna.trial.Trial` of Optuna 5 implements it."""

    def set_constraint(self, key: str, value: float) -> None:
        """Record a constraint for the sampler. A trial with a value above zero is infeasible."""


class LatencyConstraint:
    """Whether a network runs fast enough, on little enough energy and memory, on a given device.

    Its :attr:`guard` judges a candidate as :class:`perfguard.Guard` judges a trial. A candidate is not launched, so it uses up no
    risk. What :meth:`learn` is given stays in memory.

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
        Build modules inside ``torch.device("meta")``. It costs no memory, and equal networks are traced once.
    """

    def __init__(
        self,
        gpu: str | Device = "auto",
        *,
        max_latency_ms: float | None = None,
        max_energy_j: float | None = None,
        max_memory: int | str | None = None,
        inputs: object = None,
        risk: float = EVEN_CHANCE,
        predictor: str | Predictor = DEFAULT_PREDICTOR,
    ) -> None:
        from perfguard.devices import resolve_device

        if max_latency_ms is None and max_energy_j is None and max_memory is None:
            raise ConfigurationError("Give at least one of max_latency_ms, max_energy_j and max_memory.")
        latency_ms = None if max_latency_ms is None else _positive("max_latency_ms", max_latency_ms)
        energy_j = None if max_energy_j is None else _positive("max_energy_j", max_energy_j)
        device = resolve_device(gpu)
        if energy_j is not None and device.tdp_w <= 0:
            raise ConfigurationError(f"The power of {device.name} is unknown, so max_energy_j cannot be checked. Give a GPU.")
        self.guard = Guard(
            device,
            memory_budget=None if max_memory is None else parse_bytes(max_memory, what="max_memory"),
            latency_budget=None if latency_ms is None else 1e-3 * latency_ms,
            energy_budget=energy_j,
            predictor=predictor,
            log=False,
        )
        self.inputs = inputs
        self.risk = check_chance(risk, what="risk")

    def __call__(self, model: Network) -> Verdict:
        """ "launch" if ``model`` keeps all limits with enough certainty, else "prune", with the numbers and a sentence.

        Raises:
            WorkloadError: if it cannot be traced or read.
        """
        graph: OpGraph | LeastMemory
        try:
            graph = self.graph_of(model)
        except TooLargeError as error:  # which is a verdict, too
            graph = LeastMemory.behind(error, self.guard.device)
        return self.guard.judge(graph, self._limits_of, threshold=self.risk)

    def _limits_of(self, prediction: Prediction) -> Iterable[Limit]:
        if "energy" in self.guard.budget.most:
            prediction = replace(prediction, energy=most_energy(prediction, self.guard.device))
        return self.guard.budget.limits(prediction, self.guard.device, infers=True)

    def filter(self, models: Iterable[_N]) -> list[_N]:
        """The ``models`` that pass, in their order."""
        return [model for model in models if self(model).action == "launch"]

    def predict(self, model: Network) -> Prediction:
        """Predicted cost of one inference of ``model``."""
        return self.guard.predict(self.graph_of(model))

    def graph_of(self, model: Network) -> OpGraph:
        """The operators of one inference; equal networks are traced once."""
        from torch import nn

        if isinstance(model, nn.Module):
            if self.inputs is None:
                raise ConfigurationError("Modules need LatencyConstraint(inputs=...), for instance inputs=(1, 3, 32, 32).")
            model = Workload(model, self.inputs, mode="infer")
        if not isinstance(model, Workload):
            return graph_of(model, self.guard.device)
        if model.mode != "infer":
            raise ConfigurationError('A LatencyConstraint judges inference. Give Workload(..., mode="infer").')
        return self.guard.trace(model)

    def learn(self, model: Network, measured_s: float, *, peak_memory_bytes: int | None = None) -> None:
        """Learn what one batch of ``model`` took on this device. Every later prediction takes it into account.

        A reading that cannot be believed is not learnt, and the guard warns about it once.

        Args:
            model: a candidate that was run.
            measured_s: seconds of one batch: the median of several, after a warm-up.
            peak_memory_bytes: if that was measured too.
        """
        from perfguard.measure import Measurement

        measured_s = _positive("measured_s", measured_s)
        peak_memory_bytes = None if peak_memory_bytes is None else int(_positive("peak_memory_bytes", peak_memory_bytes))
        device = self.guard.device
        measurement = Measurement(
            "ok", device.id, device.name, peak_memory_bytes, measured_s, measured_s, 1, method="given", framework=""
        )
        decision = self.guard.record(self(model), self.graph_of(model))
        self.guard.learn(decision, measurement)

    def constrain(self, trial: ConstrainedTrial, model: Network) -> Verdict:
        """Return the verdict, and write into the trial how far it is from each limit, so that its sampler learns it.

        With Optuna: ``constraint.constrain(trial, model)`` inside the objective, before training; a candidate that breaks a
        limit need not be trained (``raise optuna.TrialPruned(verdict.reason)``). In a study of accuracy against latency, the
        second objective is ``verdict.prediction.step_time.median``.
        """
        verdict = self(model)
        for quantity, margin in verdict.margins.items():
            trial.set_constraint(f"perfguard:{quantity}", margin)
        return verdict

    def seconds_of(self, choices: Sequence[Network]) -> torch.Tensor:
        """The predicted latency of each of ``choices``, seconds. Shape: (len(choices),)."""
        import torch

        return torch.tensor([self.predict(choice).step_time.median for choice in choices])

    def penalty(
        self,
        weights: Sequence[torch.Tensor],  # shapes: (choices_i,), each adding up to 1
        seconds: Sequence[torch.Tensor],  # shapes: (choices_i,)
    ) -> torch.Tensor:
        """Penalty for a differentiable search: the excess of the expected latency of weighted choices over the limit, as a
        logarithm.

        The penalty is relu(log(Σᵢ wᵢ · sᵢ / limit)). It is zero where the limit holds. Elsewhere its gradient points
        to the faster choices (ProxylessNAS, Cai et al. 2019, equation 6, with a threshold).

        Args:
            weights: for each layer the probabilities of its choices. A softmax of architecture parameters gives them.
            seconds: for each layer the seconds of its choices, from :meth:`seconds_of`. The rest of the network is a layer of one
                choice.

        Returns:
            A scalar to add to the loss, times a factor of your own.
        """
        import torch

        limit_s = self.guard.budget.most.get("latency")
        if limit_s is None:
            raise ConfigurationError("penalty needs LatencyConstraint(max_latency_ms=...).")
        expected = torch.stack([(w * s.to(w)).sum() for w, s in zip(weights, seconds, strict=True)]).sum()
        return torch.relu(torch.log(expected / limit_s))


def _positive(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not (math.isfinite(value) and value > 0):
        raise ConfigurationError(f"{name} must be a positive number, but got {value!r}.")
    return float(value)
