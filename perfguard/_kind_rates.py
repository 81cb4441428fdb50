"""Seconds of a graph from a few measured ones: how much slower than its roofline each kind of operator is on this machine.

A machine, a library and a family of networks share properties that no general predictor knows. Examples are the speed of this
CPU's 3 x 3 convolutions and the cost of one call. For networks of one search space a sum over kinds covers nearly all of it:

    seconds = Σₖ aₖ · (roofline seconds of kind k) + Σₖ bₖ · (calls of kind k),   a, b ≥ 0,

The fit minimises relative errors, and pulls each a towards a value common to all kinds. The method of nn-Meter (Zhang et al.
2021) also sums predicted kernels. Here the kernels of a kind share two numbers, so ten networks are enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from perfguard.graph import GraphBatch, batch_roofline_s
from perfguard.predictor import SIGMA_OF_MAD, Estimate, Prediction

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.graph import OpGraph

FEWEST = 8
"""Measured graphs from which rates are fitted."""
_PULL = 0.1
_LEAST_LOG_SIGMA = 0.03
_UNKNOWN_SHARE = 0.02
"""Largest share of a graph's roofline in kinds that were never measured."""

Sums = dict[str, tuple[float, int]]
"""Roofline seconds and number of calls of each kind."""


def sums_by_kind(graphs: GraphBatch, device: Device) -> list[Sums]:
    """The quantities to which the rates apply, for each of ``graphs``.

    As in their libraries, there are three kinds of convolutions: in groups or depthwise, with filters of one pixel, and others.
    """
    seconds, kinds = batch_roofline_s(graphs, device), np.array([op.kind for op in graphs.skeleton.ops], dtype=object)
    in_groups = (kinds == "conv") & (graphs.attribute("groups", length=1)[..., 0] > 1)
    taps = graphs.attribute("weight_shape", length=2)[..., 2:].prod(axis=-1)
    is_pointwise = (kinds == "conv") & ~in_groups & (taps == 1)
    found: list[Sums] = [{} for _ in range(len(graphs))]
    named = np.where(in_groups, "conv in groups", np.where(is_pointwise, "conv 1x1", kinds))  # shape: (C, N)
    for kind in np.unique(named.astype(str)).tolist():
        chosen = named == kind
        of_kind = np.where(chosen, seconds, 0).sum(axis=1).tolist()
        for sums, total, calls in zip(found, of_kind, chosen.sum(axis=1).tolist(), strict=True):
            if calls:
                sums[kind] = total, calls
    return found


class KindRates:
    """Rates fitted to measured graphs, and how well they did on those when each was left out.

    Args:
        measured: of each graph its sums, and its seconds; at least FEWEST.
    """

    def __init__(self, measured: Sequence[tuple[Sums, float]]) -> None:
        self._kinds = sorted({kind for sums, _ in measured for kind in sums})
        rows = np.array([self._row(sums) for sums, _ in measured])
        seconds = np.array([found for _, found in measured])
        self._rates = _fitted(rows, seconds)
        errors = [
            math.log(max(float(rows[at] @ _fitted(np.delete(rows, at, 0), np.delete(seconds, at))), 1e-9) / seconds[at])
            for at in range(len(seconds))
        ]
        self.log_sigma = max(robust_spread(errors), _LEAST_LOG_SIGMA)
        """Standard deviation of log(measured / predicted) for a network that was left out."""

    def seconds_of(self, sums: Sums) -> Estimate | None:
        """Return None for a graph with more than a little of a kind that was never measured."""
        total = sum(seconds for seconds, _ in sums.values())
        known = sum(seconds for kind, (seconds, _) in sums.items() if kind in self._kinds)
        predicted = float(self._row(sums) @ self._rates)
        if known < (1 - _UNKNOWN_SHARE) * total or predicted <= 0:
            return None
        return Estimate(predicted, self.log_sigma)

    def _row(self, sums: Sums) -> npt.NDArray[np.float64]:
        """Seconds of each kind, then calls of each kind."""
        found = [sums.get(kind, (0.0, 0)) for kind in self._kinds]
        return np.array([seconds for seconds, _ in found] + [float(calls) for _, calls in found])


class RateCorrection:
    """Latencies by rates that are fitted to measured graphs, in the place of a predictor's while the rates do better.

    The rates are cross-validated on left-out graphs. The predictor is judged on the later half of the measured graphs, each
    predicted before it was learnt. The rates do better if their error is the lower one.
    """

    def __init__(self) -> None:
        self._measured: list[tuple[Sums, float]] = []
        self._residuals: list[float] = []
        self._rates: KindRates | None = None

    def observe(self, graph: OpGraph, device: Device, *, measured_s: float, predicted_s: float) -> None:
        """Add what ``graph`` took, and what had been predicted before it was learnt, in seconds."""
        self._measured.append((sums_by_kind(graph.as_batch(), device)[0], measured_s))
        self._residuals.append(math.log(measured_s / predicted_s))
        if len(self._measured) >= FEWEST:
            rates = KindRates(self._measured)
            later = self._residuals[len(self._residuals) // 2 :]
            self._rates = rates if rates.log_sigma < robust_spread(later) else None

    def apply(self, predictions: list[Prediction], graphs: GraphBatch, device: Device) -> list[Prediction]:
        """Return the predictions of ``graphs`` with the latency by rates, where the rates apply."""
        if self._rates is None:
            return predictions
        return list(map(_with, predictions, map(self._rates.seconds_of, sums_by_kind(graphs, device))))


def _with(prediction: Prediction, step_time: Estimate | None) -> Prediction:
    if step_time is None:
        return prediction
    return replace(prediction, step_time=step_time, predictor=f"{prediction.predictor}, rates fitted to measured networks")


def robust_spread(errors: Sequence[float]) -> float:
    """A robust standard deviation of errors around zero, from the median of their absolute values."""
    return SIGMA_OF_MAD * float(np.median(np.abs(errors)))


def _fitted(rows: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Rates, none below zero. Shapes: (n, 2 k), (n,) → (2 k,)."""
    number = rows.shape[1] // 2
    common = float(np.median(seconds / rows[:, :number].sum(axis=1)))
    scale = np.maximum(rows.mean(axis=0), 1e-12)
    relative = rows / scale / seconds[:, None]
    share = scale[:number] / scale[:number].sum()
    pull = _PULL * math.sqrt(len(seconds)) * np.diag(np.concatenate([share / (common * scale[:number]), np.zeros(number)]))
    wanted = _PULL * math.sqrt(len(seconds)) * np.concatenate([share, np.zeros(number)])
    found, _ = nnls(np.vstack([relative, pull]), np.concatenate([np.ones(len(seconds)), wanted]))
    return np.asarray(found / scale, dtype=np.float64)
