"""What a process on a CPU adds to the memory of a step: some MiB that no layer explains, such as kernels and arenas.

It is a sum and no factor. A network of 0.1 MiB that is read at 6 MiB shows what its process adds. It says nothing of the factor
by which one of 300 MiB may be off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from perfguard.predictor import SIGMA_OF_MAD
from perfguard_models.raw_prediction import RawPrediction, with_bytes

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthConfig:
    """What is assumed of the growth of a process, in bytes."""

    largest_step_bytes: float = 8.0 * MIB
    """Steps that are predicted to be larger say nothing of it: their own error is as large."""
    noise_bytes: float = 1.0 * MIB
    """Of a reading of the resident set."""
    prior_bytes: float = 10.0 * MIB
    """Scale of the growth before any reading: no growth counts as one reading with this error."""
    most_bytes: float = 64.0 * MIB


GROWTH = GrowthConfig()


class Growth(NamedTuple):
    """What a process adds."""

    num_bytes: float = 0.0
    sigma_bytes: float = 0.0
    """Its standard deviation from trial to trial."""


def growth_of(predicted: npt.NDArray[np.float64], read: npt.NDArray[np.float64], log_sigma: npt.NDArray[np.float64]) -> Growth:
    """Return the growth that trials show, as a weighted median of read - predicted.

    Args:
        predicted: bytes of each step, before any run. Shape: (n,).
        read: bytes that its trial was read to need. Shape: (n,).
        log_sigma: standard deviations of the logarithms of ``predicted``. Shape: (n,).
    """
    small = predicted <= GROWTH.largest_step_bytes
    if not small.any():
        return Growth()
    excess = (read - predicted)[small]
    weights = 1 / (GROWTH.noise_bytes + (log_sigma * predicted)[small])
    with_prior = np.append(weights, 1 / GROWTH.prior_bytes)
    num_bytes = min(max(0.0, weighted_median(np.append(excess, 0.0), with_prior)), GROWTH.most_bytes)
    scatter = SIGMA_OF_MAD * weighted_median(np.abs(excess - num_bytes), weights)
    return Growth(num_bytes, math.hypot(scatter, num_bytes / (1 + small.sum())))


def weighted_median(values: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]) -> float:
    """Return the smallest of ``values`` up to which at least half of the weight lies. Both have shape (n,)."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])


def with_growth(raw: RawPrediction, growth: Growth) -> RawPrediction:
    """Return ``raw`` with the memory that the process adds. The sigmas of step and process are independent."""
    if not growth.num_bytes:
        return raw
    why = "a process adds it to each step"
    memory = with_bytes(raw.of["memory"], "process growth", why, growth.num_bytes, growth.sigma_bytes)
    return raw._replace(of=raw.of | {"memory": memory})
