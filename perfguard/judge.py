"""The judging that guards have in common: a trial's graph against a budget on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from perfguard.exceptions import TooLargeError
from perfguard.physics import HOPELESS, LeastMemory, least_reading
from perfguard.predictor import TARGETS, Predictor, load_predictor
from perfguard.quantities import format_bytes
from perfguard.verdict import Verdict, check_risk

if TYPE_CHECKING:
    from perfguard.budget import Budget, Limit
    from perfguard.devices import Device
    from perfguard.graph import OpGraph
    from perfguard.predictor import Prediction


class Judge:
    """Base class of what judges candidates on one device: :class:`perfguard.Guard` and :class:`perfguard.nas.LatencyConstraint`.

    Args:
        gpu: the device, or a name that :func:`perfguard.resolve_device` takes.
        budget: limits of a candidate.
        risk: the chance of breaking a limit that is accepted, in (0, 1).
        predictor: its name, or the object itself.

    Raises:
        ConfigurationError: if the device cannot have the memory of the budget, or if an argument cannot be right.
    """

    def __init__(self, gpu: str | Device, budget: Budget, *, risk: float, predictor: str | Predictor) -> None:
        from perfguard.devices import resolve_device
        from perfguard.graph import TraceCache

        self.risk = check_risk(risk)
        self.device = resolve_device(gpu)
        budget.check_device(self.device)
        self.budget = budget
        self.predictor: Predictor = load_predictor(predictor) if isinstance(predictor, str) else predictor
        self._traces = TraceCache()

    def _predict(self, graph: OpGraph, *, steps: int | None = None) -> Prediction:
        """The prediction for ``graph``. It is never below what a reading can be."""
        prediction = self.predictor.predict(graph, self.device, steps=steps)
        return prediction.at_least(*(least_reading(target, graph, self.device) for target in TARGETS))

    def _judge_graph(
        self,
        trace: Callable[[], OpGraph],
        predict: Callable[[OpGraph], Prediction],
        limits: Callable[[Prediction], Iterable[Limit]],
        *,
        accepted: float,
        steps: int | None = None,
    ) -> Verdict:
        """Return "launch" if each limit holds with the chance 1 - ``accepted``, else "prune".

        A candidate whose least memory is far over the budget is pruned by this bound alone, without a prediction. The bound
        overrules a prediction that would launch what cannot fit.

        Args:
            trace: makes the graph. A :class:`TooLargeError` of it is a verdict, too.
            predict: predicts the graph.
            limits: the limits beside a prediction.
            accepted: the accepted chance of breaking a limit, in (0, 1).
            steps: steps of the whole trial. None: unknown.
        """
        graph: OpGraph | None = None
        try:
            graph = trace()
            least = LeastMemory.of(graph, self.device)
        except TooLargeError as error:
            least = LeastMemory.behind(error, self.device)
        capacity_bytes = self.budget.capacity_bytes(self.device)
        if graph is not None and least.num_bytes <= HOPELESS * capacity_bytes:
            prediction = predict(graph)
            verdict = Verdict.of(prediction, limits(prediction), accepted=accepted)
            if verdict.action != "launch" or least.num_bytes <= capacity_bytes:
                return verdict
        return self._hopeless(least, limits, accepted=accepted, steps=steps)

    def _hopeless(
        self, least: LeastMemory, limits: Callable[[Prediction], Iterable[Limit]], *, accepted: float, steps: int | None = None
    ) -> Verdict:
        """The verdict on a candidate that needs more memory than the budget by its lower bound alone."""
        prediction = least.prediction(self.device, steps=steps)
        verdict = Verdict.of(prediction, limits(prediction), accepted=accepted)
        capacity = format_bytes(self.budget.capacity_bytes(self.device))
        return replace(verdict, action="prune", reason=f"needs {least}, the budget is {capacity}")


__all__ = ["Judge"]
