"""The residual of the predictor, as a Gaussian process that learns from a handful of runs.

Notation (Rasmussen and Williams 2006, chapter 2, and 3.3 for the robust likelihood):
    X  (n, d)  embeddings of the observed graphs      y  (n,)  log(measured / predicted)
    P  (n, e)  distances of alternative predictions from the prediction: a slower host or device, or physics alone
    r  (n,)    regimes: runs under equal conditions have equal numbers
    q  (n,)    scales: 1, or less where the predictor is far surer than of the runs that were measured
    K  = bias² (1 - s + s [r = r']) + q q' · (trust² · P Pᵀ + local² · exp(-‖x - x'‖² / d / length² / 2))
    W  = diag(noise² q² / w). A Student-t likelihood gives each observation its weight w, so one absurd reading moves nothing.

The term bias² is a constant factor (another machine), and a share s of its variance belongs to these conditions alone (another
driver). The term trust² moves the prediction towards an alternative, such as a machine whose host is slower. The term local² is
for neighbours, which are alike in size and composition (the sampler returns to a region).

A share o of the noise's variance belongs to a step and not to its readings. After k readings of a step under these conditions,
the fraction o k / (o k + 1 - o) of its own deviation is known. For other steps, k readings of one step are worth little more than
one. So each counts as if its noise were 1 + o (k - 1) times as large.

A step that ran out of memory has no reading. It is known to need more than it had, under any conditions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from perfguard.predictor import SIGMA_OF_MAD

_JITTER = 1e-9
_NOTHING_BELOW = -30.0
"""Standard deviations below the mean at which a bound says nothing."""


class GPInputs(NamedTuple):
    """Inputs of the process for n runs."""

    x: torch.Tensor  # shape: (n, d)
    alternatives: torch.Tensor  # shape: (n, e)
    regime: torch.Tensor  # shape: (n,)
    scale: torch.Tensor  # shape: (n,)
    setting: torch.Tensor
    """A number for each combination of switches (cuDNN's benchmark mode, a precision), for those without a column. Shape: (n,)"""
    memorised: torch.Tensor
    """Prediction with the run in the training rows minus the prediction without it, if the residual is from the latter.
    Shape: (n,)"""


def same_step(a: GPInputs, b: GPInputs) -> torch.Tensor:
    """Whether a run of ``a`` and one of ``b`` are of one step, under any conditions. Shape: (m, n)."""
    apart2 = torch.cdist(a.x, b.x).square() + torch.cdist(a.alternatives, b.alternatives).square()
    return (apart2 < 1e-10) & (a.setting[:, None] == b.setting[None, :])


def same_regime(a: GPInputs, b: GPInputs) -> torch.Tensor:
    """Whether a run of ``a`` and one of ``b`` are under the same conditions. Shape: (m, n)."""
    return a.regime[:, None] == b.regime[None, :]


def repeats(a: GPInputs, b: GPInputs) -> torch.Tensor:
    """Whether a run of ``a`` and one of ``b`` are of one step under the same conditions. Shape: (m, n)."""
    return same_step(a, b) & same_regime(a, b)


@dataclass(frozen=True, slots=True)
class ResidualPrior:
    """Standard deviations of the kernel's terms, in logarithms, and what else the process assumes.

    Attributes:
        length: length scale of the term "local", in units of the embedding.
        of_the_regime: share of the constant factor's variance that belongs to one regime. A change of conditions draws it anew.
        of_the_step: share of the noise's variance that belongs to the step. All readings of the step have it in common.
        degrees_of_freedom: of the Student-t likelihood, and weight in readings of the prior noise.
        reweightings: iterations for the weights of the likelihood. 0: a Gaussian likelihood.
        least_noise: lower limit of the noise that is learnt, as a share of the prior's.
    """

    bias: float
    local: float
    length: float
    noise: float
    trust: float = 0.0
    of_the_regime: float = 0.5
    of_the_step: float = 0.0
    degrees_of_freedom: float = 4.0
    reweightings: int = 3
    least_noise: float = 0.5

    def kernel(self, a: GPInputs, b: GPInputs) -> torch.Tensor:
        """Covariance of the residual between m and n runs. Shape: (m, n)."""
        constant = self.bias**2 * (1 - self.of_the_regime * (~same_regime(a, b)).to(a.x.dtype))
        smooth = self.trust**2 * (a.alternatives @ b.alternatives.T)
        local = self.local**2 * torch.exp(-torch.cdist(a.x, b.x).square() / (2 * a.x.shape[1] * self.length**2))
        return constant + a.scale[:, None] * b.scale[None, :] * (smooth + local)

    def variance(self, at: GPInputs) -> torch.Tensor:
        """Prior variance of the smooth part for n runs: the kernel's diagonal. Shape: (n,)."""
        smooth = self.trust**2 * at.alternatives.square().sum(1) + self.local**2
        return self.bias**2 + at.scale.square() * smooth

    @property
    def total(self) -> float:
        """Prior standard deviation of a run's residual, noise included.

        The alternatives are left out, as for the held-out runs that the prior was fitted to.
        """
        return math.sqrt(self.bias**2 + self.local**2 + self.noise**2)


class Bounds(NamedTuple):
    """Lower bounds on the memory of b runs that ran out of memory."""

    at: GPInputs
    least: torch.Tensor  # shape: (b,)
    """Bounds as residuals; -inf where another run has refuted the bound."""


@dataclass(frozen=True, slots=True)
class ResidualPosterior:
    """The process after some observations, n in all. Made by :func:`condition`."""

    prior: ResidualPrior
    seen: GPInputs
    y: torch.Tensor  # shape: (n,)
    weights: torch.Tensor
    """Weight of each reading among the readings of its step. A bound has none. Shape: (n,)"""
    cholesky: torch.Tensor  # shape: (n, n)
    alpha: torch.Tensor  # shape: (n,)
    noise: float
    """Noise level, at a scale of 1, after seeing how well the observations agree."""
    num_read: int
    """Number of readings. They come first; bounds follow."""
    bounds: Bounds | None = None

    @property
    def regime(self) -> torch.Tensor:
        """Regime of the next runs. Shape: ()."""
        return self.seen.regime.max()

    def predict(self, inputs: GPInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of the residual of m new measurements. Shapes: (m,), (m,)."""
        cross = self.prior.kernel(inputs, self.seen)  # shape: (m, n)
        half = torch.linalg.solve_triangular(self.cholesky, cross.T, upper=False)  # shape: (n, m)
        mean = cross @ self.alpha
        smooth2 = (self.prior.variance(inputs) - half.square().sum(0)).clamp_min(0)
        noise2 = self.noise**2 * inputs.scale.square()
        share = self.prior.of_the_step
        own = self.y - self.seen.memorised
        of_step = repeats(inputs, self.seen) * self.weights
        number = of_step.sum(1)
        read = of_step @ own / number.clamp_min(_JITTER)
        known = number * share / (number * share + 1 - share)
        # The scatter of a step's readings is that of the noise, or larger if theirs is.
        scatter2 = (of_step @ own.square() - number * read.square()).clamp_min(0)
        degrees = self.prior.degrees_of_freedom
        of_readings2 = (degrees * (1 - share) * noise2 + scatter2) / (degrees + (number - 1).clamp_min(0))
        beyond2 = torch.where(known > 0, (1 + 1 / number.clamp_min(1)) * (of_readings2 - (1 - share) * noise2).clamp_min(0), 0.0)
        return mean + known * (read - mean), (smooth2 * (1 - known).square() + (1 - share * known) * noise2 + beyond2).sqrt()

    def left_out(self) -> torch.Tensor:
        """Leave-one-out residual of each reading: it minus its prediction from all others. Shape: (num_read,).

        Rasmussen and Williams 2006, eq. 5.12.
        """
        return (self.alpha / torch.cholesky_inverse(self.cholesky).diagonal())[: self.num_read]

    def above_bounds(
        self,
        inputs: GPInputs,
        mean: torch.Tensor,  # shape: (m,)
        sigma: torch.Tensor,  # shape: (m,)
        before: torch.Tensor,  # shape: (m,)
        refuted: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Raise ``mean`` and ``sigma`` of m new measurements by the bounds of steps that ran out of memory.

        The excess was never measured, so its standard deviation is at least the one ``before`` any run. Where they had more than
        expected, it is at least ``refuted``, too. Shapes: (m,), (m,)
        """
        if self.bounds is None:
            return mean, sigma
        least = torch.where(same_step(inputs, self.bounds.at), self.bounds.least, -math.inf).amax(1)
        before = torch.where(least > mean, before.clamp_min(refuted), before)
        mean = torch.maximum(mean, least)
        wide = torch.maximum(sigma, before)
        above = mean + wide * _mills((least - mean) / wide)  # the mean of what exceeds the bound
        return above, torch.maximum(sigma, above - mean)


def condition(prior: ResidualPrior, seen: GPInputs, y: torch.Tensor, bounds: Bounds | None = None) -> ResidualPosterior:
    """Condition the process on residuals ``y`` (n,) of the runs ``seen``, and on bounds of other runs. In double precision.

    Without any reading, no alternative is known to be better.
    """
    if not len(y):
        prior = replace(prior, trust=0.0)
    posterior = _conditioned(prior, seen, y, torch.zeros_like(y), len(y))
    if bounds is None or not (stands := bounds.least > -math.inf).any():
        return replace(posterior, bounds=bounds)
    out = GPInputs(*(column[stands] for column in bounds.at))
    readings, noise2 = _as_readings_of_all(posterior, out, bounds.least[stands])
    both = GPInputs(*map(torch.cat, zip(seen, out, strict=True)))
    found = _conditioned(prior, both, torch.cat([y, readings]), torch.cat([torch.zeros_like(y), noise2]), len(y))
    return replace(found, bounds=bounds)


def _as_readings_of_all(posterior: ResidualPosterior, out: GPInputs, least: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Approximate b lower bounds ``least`` (b,) by Gaussian readings: their values and variances. Shapes: (b,), (b,).

    Each reading gives its step the mean and the variance above its bound, given all readings and the bounds before it. This is
    assumed-density filtering, one sweep of expectation propagation (Minka 2001). Where many bounds agree, the result is a quarter
    too sure, and a fifth too far from the prior.
    """
    prior = posterior.prior
    cross = prior.kernel(out, posterior.seen)
    half = torch.linalg.solve_triangular(posterior.cholesky, cross.T, upper=False)
    mean = cross @ posterior.alpha
    covariance = prior.kernel(out, out) - half.T @ half
    noise2 = (prior.noise * out.scale).square()
    alike = _times_counted(prior, repeats(out, out))
    readings = torch.zeros_like(least)
    more_noise2 = torch.zeros_like(least)
    for at, bound in enumerate(least):
        sigma = (covariance[at, at] + noise2[at]).sqrt()
        readings[at], more_noise2[at] = as_reading(bound, mean[at], sigma)
        gain = covariance[:, at] / (covariance[at, at] + (noise2[at] + more_noise2[at]) * alike[at] + _JITTER)
        mean = mean + gain * (readings[at] - mean[at])
        covariance = covariance - torch.outer(gain, covariance[at])
    return readings, more_noise2


def _times_counted(prior: ResidualPrior, repeated: torch.Tensor) -> torch.Tensor:
    """Factor on the noise of each run, so that k readings of a step count as one for other steps. Shape: (n,).

    Args:
        prior: the prior of the process.
        repeated: which of the runs repeat each other. Shape: (n, n).
    """
    return 1 + prior.of_the_step * (repeated.sum(1) - 1)


def _conditioned(
    prior: ResidualPrior,
    seen: GPInputs,
    y: torch.Tensor,  # shape: (n,)
    more_noise2: torch.Tensor,  # shape: (n,)
    num_read: int,
) -> ResidualPosterior:
    degrees = prior.degrees_of_freedom
    is_read = torch.arange(len(y)) < num_read
    repeated = repeats(seen, seen) & (is_read[:, None] == is_read)  # a bound does not repeat a reading
    alike = _times_counted(prior, repeated)
    covariance = prior.kernel(seen, seen)
    noise2 = (prior.noise**2 * seen.scale.square() + more_noise2) * alike
    weights = torch.ones_like(y)
    for remaining in reversed(range(prior.reweightings + 1)):
        own2 = noise2 / weights + _JITTER
        cholesky = torch.linalg.cholesky(covariance + torch.diag(own2))
        alpha = torch.cholesky_solve(y[:, None], cholesky)[:, 0]
        error2 = (own2 * alpha).square()  # what the smooth part leaves over: y - K alpha
        if remaining:
            precision = torch.cholesky_inverse(cholesky).diagonal()
            variance = (own2 - own2.square() * precision).clamp_min(0)  # of the smooth part, at the observations themselves
            weights = (degrees + 1) / (degrees + error2 / (noise2 + variance))
            weights = torch.where(is_read, weights, weights.clamp_max(1.0))
    read = slice(num_read)
    counted = (weights / alike)[read]
    scatter2 = (counted * error2[read] / seen.scale[read].square()).sum()
    noise = float(((degrees * prior.noise**2 + scatter2) / (degrees + counted.sum())).sqrt())
    noise = max(noise, prior.least_noise * prior.noise)
    own_noise2 = (1 - prior.of_the_step) * noise**2 * seen.scale.square()
    among = _weights_among_readings(prior.degrees_of_freedom, repeated, y - seen.memorised, own_noise2)
    return ResidualPosterior(prior, seen, y, torch.where(is_read, among, 0.0), cholesky, alpha, noise, num_read)


def _weights_among_readings(degrees: float, repeated: torch.Tensor, own: torch.Tensor, noise2: torch.Tensor) -> torch.Tensor:
    """The Student-t weight of each reading ``own`` (n,) around the median of its step's readings. Shape: (n,).

    If three readings agree and one is absurd, the three count. Of two readings, either may be wrong.

    Args:
        degrees: degrees of freedom.
        repeated: which readings are of one step. Shape: (n, n).
        own: the readings.
        noise2: their variances around the step. Shape: (n,).
    """
    weights = torch.ones_like(own)
    if (several := repeated.sum(1) > 2).any():
        readings = torch.where(repeated[several], own, math.nan)
        median = readings.nanquantile(0.5, dim=1)
        scatter = SIGMA_OF_MAD * (readings - median[:, None]).abs().nanquantile(0.5, dim=1)
        apart2 = (own[several] - median).square() / torch.maximum(noise2[several], scatter.square())
        weights[several] = ((degrees + 1) / (degrees + apart2)).clamp_max(1.0)
    return weights


def as_reading(bound: torch.Tensor, mean: torch.Tensor, sigma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Readings and variances that are equivalent to a lower ``bound`` on a normal variable.

    Conditioned on them, the variable has the mean and variance that it has above the bound. All shapes: (n,).
    """
    z = ((bound - mean) / sigma).clamp_min(_NOTHING_BELOW)
    ratio = _mills(z)
    narrowed = (ratio * (ratio - z)).clamp(_JITTER, 1 - _JITTER)  # share of the variance that the bound takes away
    return mean + sigma / (ratio - z), sigma.square() * (1 / narrowed - 1)


def _mills(z: torch.Tensor) -> torch.Tensor:
    """The inverse Mills ratio: the mean of a standard normal variable above ``z``. From (n,) to (n,)."""
    ratio: torch.Tensor = math.sqrt(2 / math.pi) / torch.special.erfcx(z / math.sqrt(2))
    return ratio
