"""The interfaces of a tuner's trial for a search, and of a constraint for a space of candidates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from perfguard._predict import Network
    from perfguard.graph import GraphBatch, OpGraph
    from perfguard.predictor import Prediction
    from perfguard.verdict import Verdict


class ConstrainedTrial(Protocol):
    """Interface of a tuner's trial that takes constraints. `optuna.trial.Trial` of Optuna 5 implements it."""

    def set_constraint(self, key: str, value: float) -> None:
        """Record a constraint for the sampler. A trial with a value above zero is infeasible."""


class Constraint(Protocol):
    """Interface of :class:`perfguard.nas.LatencyConstraint` for :class:`perfguard.nas.ElasticSpace`."""

    def graph_of(self, model: Network) -> OpGraph:
        """Return the operators of one inference of ``model``."""

    def predict(self, model: Network) -> Prediction:
        """Return what one inference of ``model`` costs."""

    def predict_all(self, graphs: GraphBatch) -> list[Prediction]:
        """Return the result of :meth:`predict` for each of ``graphs``."""

    def verdict_on(self, prediction: Prediction) -> Verdict:
        """Return the verdict on a candidate by its prediction."""

    def learn(self, model: Network, measured_s: float, *, peak_memory_bytes: int | None = None) -> None:
        """Take into account what one batch of ``model`` took, in seconds."""


def constrain(trial: ConstrainedTrial, verdict: Verdict) -> Verdict:
    """Report to the sampler of ``trial`` how far it is from each limit, and return ``verdict``."""
    for quantity, margin in verdict.margins.items():
        trial.set_constraint(f"perfguard:{quantity}", margin)
    return verdict
