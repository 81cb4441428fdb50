"""What the network leaves unexplained, as a Gaussian process that learns from a handful of runs.

Notation (Rasmussen and Williams 2006, chapter 2, and 3.3 for the robust likelihood):
    X  (n, d)  embeddings of the observed graphs      y  (n,)  log(measured / predicted)
    Z  (n, f)  what the graphs spend their time on    r  (n,)  regimes: runs under equal conditions have equal numbers
    P  (n, e)  how far other experts are from the prediction: physics, the networks alone, the trees alone
    q  (n,)    scales: 1, or less where the predictor is far surer than of the runs that were measured
    K  = bias² (1 - s + s [r = r']) + q q' · (linear² · X Xᵀ / d + trust² · P Pᵀ
         + local² · exp(-(‖x - x'‖² / d / length² + ‖z - z'‖² / f / reach²) / 2))
    W  = diag(noise² q² / w), where w are weights that a Student-t likelihood gives to each observation, so that one absurd
         reading moves nothing.
The terms are what a new setting differs by: a constant factor (another machine), of which a part s is of these conditions alone
(another driver); a trend (wider networks suffer more); neighbours, alike in size and in what they are made of (the sampler comes
back to a region, the machine has a slow kernel); and whether another expert is right where the prediction is not (physics far
outside of the data). A share o of the noise's variance is of a step and not of its readings: a step that was read k times under
these conditions has told w = o / (o + (1 - o) / k) of what sets it apart from its like; where its readings scatter by more than
that leaves to them, so may the next. Of other steps k readings of one say little more than one of them would, so each counts as
if its noise were 1 + o (k - 1) times as large. A step that ran out of memory was not read, but is known to need more than it had.

What the predictor knew of the device before is not to be lost for what one family of networks does there. So a summary of what it
was fitted to stands before the runs as if it had been measured, with residuals of 0, in a regime of its own. A constant factor of
this machine can still be learnt; of the other terms, a shipped step and a measured one have a share c in common, so that where
they contradict, what was measured counts. And where the predictor is far surer of a step than of those that are measured, what
these teach moves it less (its inference was measured, its training was not).

How much of each there is differs from setting to setting, and five runs must not be read as if that were known. So a process
whose prior is a guess is an average over hypotheses (`hypotheses`), each weighted by how well it tells every run from all others:
a leave-one-out pseudo-likelihood (Geisser and Eddy 1979; Rasmussen and Williams 2006, 5.4.2) of errors with a Laplace
distribution of unknown width, m being the mean absolute error:
    p ∝ m^-n
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

_DEGREES_OF_FREEDOM = 4.0
_REWEIGHTINGS = 3
_OF_THE_REGIME = 0.5
"""Share of the constant factor's variance that a change of conditions draws anew."""
_NEARER = 0.5
"""How far neighbours reach where a setting is more particular than the prior says."""
_SAME = 1e-5
"""Nearer than that, two places are those of one step."""
_LARGEST_ERROR = 1.0
_ERROR_BEFORE, _ROWS_BEFORE = 0.3, 2.0
"""What a hypothesis is expected to err by before it was tried, in standard deviations of the residual, and what that weighs."""
_SHIPPED = -1.0
"""The regime of what the predictor was fitted to."""
_IN_COMMON = 0.9
"""With less of it, more of what was known of a GPU is forgotten; with all of it, a world that changed is learnt more slowly."""
_JUDGED = 200
"""The newest readings by which hypotheses are judged."""
_UNLIKELY = 0.01


class Place(NamedTuple):
    """Where n runs are in the process."""

    x: torch.Tensor  # shape: (n, d)
    z: torch.Tensor  # shape: (n, f)
    experts: torch.Tensor  # shape: (n, e)
    regime: torch.Tensor  # shape: (n,)
    scale: torch.Tensor  # shape: (n,)
    setting: torch.Tensor
    """Other switches (cuDNN's benchmark mode, a precision), which the rest may not show, have other numbers. Shape: (n,)"""


def joined(places: list[Place]) -> Place:
    """All of them, in order."""
    return Place(*(torch.cat(column) for column in zip(*places, strict=True)))


def as_shipped(x: torch.Tensor, z: torch.Tensor, experts: torch.Tensor, scale: torch.Tensor) -> Place:
    """Steps that the predictor was fitted to."""
    return Place(x, z, experts, x.new_full((len(x),), _SHIPPED), scale, x.new_zeros(len(x)))


def under_equal_conditions(x: torch.Tensor) -> Place:
    """Runs at ``x`` (n, d) of one regime, of which nothing else is known."""
    nothing = x.new_zeros((len(x), 0))
    return Place(x, nothing, nothing, x.new_zeros(len(x)), x.new_ones(len(x)), x.new_zeros(len(x)))


def are_same(a: Place, b: Place) -> torch.Tensor:
    """Which of m steps are which of n, under the same conditions. Shape: (m, n)."""
    apart = torch.stack([torch.cdist(*pair) for pair in ((a.x, b.x), (a.z, b.z), (a.experts, b.experts))]).sum(0)
    equal = [one[:, None] == other[None, :] for one, other in ((a.regime, b.regime), (a.setting, b.setting))]
    return (apart < _SAME) & equal[0] & equal[1]


@dataclass(frozen=True, slots=True)
class ResidualPrior:
    """Standard deviations of the terms, in logarithms, and how far neighbours reach.

    Attributes:
        of_the_step: share of the noise's variance that another reading of the same step has, too.
        guessed: whether the terms' shares were never fitted, so that others are tried beside them.
    """

    bias: float
    linear: float
    local: float
    length: float
    noise: float
    trust: float = 0.0
    reach: float = 1.0
    of_the_step: float = 0.0
    guessed: bool = False

    def kernel(self, a: Place, b: Place) -> torch.Tensor:
        """Covariance of the residual between n and m runs. Shape: (n, m)."""
        width = a.x.shape[1]
        distance = torch.cdist(a.x, b.x).square() / (width * self.length**2)
        distance = distance + torch.cdist(a.z, b.z).square() / (max(a.z.shape[1], 1) * self.reach**2)
        same = (a.regime[:, None] == b.regime[None, :]).to(a.x.dtype)
        bias = self.bias**2 * (1 - _OF_THE_REGIME + _OF_THE_REGIME * same)
        linear = self.linear**2 * (a.x @ b.x.T) / width
        experts = self.trust**2 * (a.experts @ b.experts.T)
        shipped = (a.regime == _SHIPPED)[:, None] != (b.regime == _SHIPPED)[None, :]
        in_common = torch.where(shipped, _IN_COMMON, 1.0) * a.scale[:, None] * b.scale[None, :]
        return bias + in_common * (linear + experts + self.local**2 * torch.exp(-distance / 2))

    def variance(self, at: Place) -> torch.Tensor:
        """Prior variance of the smooth part for n runs: the kernel's diagonal. Shape: (n,)."""
        width, experts = at.x.shape[1], self.trust**2 * at.experts.square().sum(1)
        scaled = self.linear**2 * at.x.square().sum(1) / width + experts + self.local**2
        return self.bias**2 + at.scale.square() * scaled

    def before(self, x: torch.Tensor) -> torch.Tensor:
        """Prior variance of the residual of n runs, noise included, while nothing was measured: what the held-out runs had, whose
        network was trusted. Shape: (n,)."""
        return self.bias**2 + self.linear**2 * x.square().mean(1) + self.local**2 + self.noise**2

    @property
    def total(self) -> float:
        """Standard deviation of the residual of a run in the middle of the embedding."""
        return math.sqrt(self.bias**2 + self.linear**2 + self.local**2 + self.noise**2)


@dataclass(frozen=True, slots=True)
class ResidualPosterior:
    """The process after some observations, n in all."""

    prior: ResidualPrior
    num_shipped: int
    """Of the n, the first ones."""
    num_bounds: int
    """Of the n, the last ones: what is expected of steps that were not read."""
    seen: Place
    y: torch.Tensor  # shape: (n,)
    cholesky: torch.Tensor  # shape: (n, n)
    alpha: torch.Tensor  # shape: (n,)
    noise: float
    """Noise level, at a scale of 1, after seeing how well the observations agree."""

    @property
    def regime(self) -> torch.Tensor:
        """Of the runs that come next. Shape: ()."""
        return self.seen.regime.max()

    def at(self, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of the residual of m new measurements. Shapes: (m,), (m,)."""
        cross = self.prior.kernel(place, self.seen)  # shape: (m, n)
        half = torch.linalg.solve_triangular(self.cholesky, cross.T, upper=False)  # shape: (n, m)
        mean, variance = cross @ self.alpha, self.prior.variance(place) - half.square().sum(0)
        same = are_same(place, self.seen).to(self.y.dtype)
        same[:, len(self.y) - self.num_bounds :] = 0
        number = same.sum(1)
        share = self.prior.of_the_step
        told = number * share / (number * share + 1 - share)
        read = same @ self.y / number.clamp_min(1)
        noise2 = self.noise**2 * place.scale.square()
        apart2 = (same @ self.y.square() - number * read.square()).clamp_min(0)  # readings of one step, from their mean
        more = (number - 1).clamp_min(0)
        of_readings2 = (_DEGREES_OF_FREEDOM * (1 - share) * noise2 + apart2) / (_DEGREES_OF_FREEDOM + more)
        beyond2 = (of_readings2 - (1 - share) * noise2).clamp_min(0) * (1 + 1 / number.clamp_min(1)) * (told > 0)
        smooth2 = variance.clamp_min(0) * (1 - told).square()
        return mean + told * (read - mean), (smooth2 + (1 - share * told) * noise2 + beyond2).sqrt()

    def left_out(self) -> torch.Tensor:
        """What each observation is beyond what all others say of it: leave-one-out (Rasmussen and Williams 2006, eq. 5.12).

        Returns:
            Of those that were measured. Shape: (n - num_shipped,).
        """
        return (self.alpha / torch.cholesky_inverse(self.cholesky).diagonal())[self.num_shipped :]


def condition(
    prior: ResidualPrior, seen: Place, y: torch.Tensor, shipped: Place | None = None, *, num_bounds: int = 0
) -> ResidualPosterior:
    """The process given residuals ``y`` (n,) of the runs ``seen``, n ≥ 1, in double precision, and the summary ``shipped``; the
    last ``num_bounds`` of the runs were not read."""
    num_shipped = 0
    if shipped is not None:
        num_shipped = len(shipped.x)
        seen, y = joined([shipped, seen]), torch.cat([y.new_zeros(num_shipped), y])
    alike = 1 + prior.of_the_step * (are_same(seen, seen).sum(1) - 1)  # k readings of a step say of others what one says
    covariance, noise2_of = prior.kernel(seen, seen), prior.noise**2 * seen.scale.square() * alike
    weights = torch.ones_like(y)
    for _ in range(_REWEIGHTINGS):
        cholesky, alpha = _solve(covariance, noise2_of / weights, y)
        error = y - covariance @ alpha  # what the smooth part leaves over
        expected = noise2_of + _variance_at(covariance, cholesky)
        weights = (_DEGREES_OF_FREEDOM + 1) / (_DEGREES_OF_FREEDOM + error.square() / expected)
    cholesky, alpha = _solve(covariance, noise2_of / weights, y)
    error, weights = ((y - covariance @ alpha) / seen.scale)[num_shipped:], (weights / alike)[num_shipped:]
    noise2 = (_DEGREES_OF_FREEDOM * prior.noise**2 + (weights * error.square()).sum()) / (_DEGREES_OF_FREEDOM + weights.sum())
    noise = max(float(noise2.sqrt()), 0.5 * prior.noise)
    return ResidualPosterior(prior, num_shipped, num_bounds, seen, y, cholesky, alpha, noise)


def hypotheses(prior: ResidualPrior) -> tuple[ResidualPrior, ...]:
    """What a setting may be like: as the prior says, and if that is a guess also more particular; a constant factor and little
    else; or nothing that could be learnt, because the predictor is right and the rest is scatter."""
    if not prior.guessed:
        return (prior,)
    total = prior.total
    return (
        prior,
        replace(prior, reach=_NEARER * prior.reach),
        replace(prior, bias=0.9 * total, linear=0.1 * total, local=0.05 * total, noise=0.1 * total, trust=0.0),
        replace(prior, bias=0.0, linear=0.0, local=0.0, trust=0.0, noise=total),
    )


class Bounds(NamedTuple):
    """Of b runs that were out of memory, how much they needed at the least."""

    at: Place
    least: torch.Tensor  # shape: (b,)
    """As residuals; -inf where another run has shown that it was not so."""


@dataclass(frozen=True, slots=True)
class ResidualAverage:
    """Posteriors of several hypotheses. Their weights add up to one."""

    prior: ResidualPrior
    posteriors: Sequence[ResidualPosterior]
    weights: Sequence[float]
    bounds: Bounds | None = None

    @property
    def regime(self) -> torch.Tensor:
        """Of the runs that come next. Shape: ()."""
        return self.posteriors[0].regime

    def at(self, place: Place, *, times: torch.Tensor | float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of the mixture for m new measurements. Shapes: (m,), (m,).

        Args:
            place: where they are.
            times: what the standard deviation of each hypothesis is multiplied by, for steps that are harder or easier than
                those that the process was made for. How far hypotheses are apart is not.
        """
        found = [posterior.at(place) for posterior in self.posteriors]
        mean, square = torch.zeros(len(place.x)).double(), torch.zeros(len(place.x)).double()
        for weight, (own_mean, own_sigma) in zip(self.weights, found, strict=True):
            mean = mean + weight * own_mean
            square = square + weight * ((times * own_sigma).square() + own_mean.square())
        return mean, (square - mean.square()).clamp_min(0).sqrt()

    def above_bounds(
        self,
        place: Place,
        mean: torch.Tensor,  # shape: (m,)
        sigma: torch.Tensor,  # shape: (m,)
        before: torch.Tensor,  # shape: (m,)
        refuted: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The ``mean`` and ``sigma`` of m new measurements, given that steps that ran out of memory need more than they had.

        How much more, nobody measured; so that is no surer than it was ``before`` any run, and where they had more than was
        expected, no surer than ``refuted``, a standard deviation, too. Shapes: (m,), (m,)
        """
        if self.bounds is None:
            return mean, sigma
        least = torch.where(are_same(place, self.bounds.at), self.bounds.least, -math.inf).amax(1)
        before = torch.where(least > mean, before.clamp_min(refuted), before)
        mean = torch.maximum(mean, least)
        above = expected_above(least, mean, torch.maximum(sigma, before))
        return above, torch.maximum(sigma, above - mean)

    def left_out(self) -> torch.Tensor:
        """See :meth:`ResidualPosterior.left_out`."""
        parts = [weight * posterior.left_out() for weight, posterior in zip(self.weights, self.posteriors, strict=True)]
        return torch.stack(parts).sum(0)


def learnt(
    prior: ResidualPrior, seen: Place, y: torch.Tensor, shipped: Place | None = None, *, bounds: Bounds | None = None
) -> ResidualAverage:
    """The process given residuals ``y`` (n,) of the runs ``seen``, from the oldest to the newest, n ≥ 1, in double precision.

    Args:
        prior: before anything was measured.
        seen: the runs.
        y: their residuals.
        shipped: steps of which the predictor was right where it was fitted.
        bounds: of the last of the runs, which were out of memory; their residuals are what is expected.
    """
    num_bounds = 0 if bounds is None else len(bounds.least)
    begin = max(0, len(y) - num_bounds - _JUDGED)
    tried, newest = hypotheses(prior), Place(*(column[begin:] for column in seen))
    judged = [condition(hypothesis, newest, y[begin:], shipped, num_bounds=num_bounds) for hypothesis in tried]
    before = _ROWS_BEFORE * _ERROR_BEFORE * prior.total
    number = len(y) - begin - num_bounds or num_bounds  # what is only expected judges nothing, unless there is nothing else
    errors = [float(each.left_out()[:number].abs().clamp_max(_LARGEST_ERROR).sum()) for each in judged]
    scores = [-number * math.log((error + before) / (number + _ROWS_BEFORE)) for error in errors]
    shares = [math.exp(score - max(scores)) for score in scores]
    likely = [index for index, share in enumerate(shares) if share > _UNLIKELY]
    posteriors = [
        judged[index] if begin == 0 else condition(tried[index], seen, y, shipped, num_bounds=num_bounds) for index in likely
    ]
    total = sum(shares[index] for index in likely)
    return ResidualAverage(prior, posteriors, [shares[index] / total for index in likely], bounds)


def expected_above(bound: torch.Tensor, mean: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """Mean of a normal variable that is known to exceed ``bound``, by the inverse Mills ratio; -inf: nothing is known. All
    shapes: (n,)."""
    z = (bound - mean) / sigma
    log_tail = torch.special.log_ndtr(-z)
    return mean + sigma * torch.exp(-z.square() / 2 - math.log(2 * math.pi) / 2 - log_tail)


def _solve(covariance: torch.Tensor, noise2: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cholesky = torch.linalg.cholesky(covariance + torch.diag(noise2 + 1e-9))
    return cholesky, torch.cholesky_solve(y[:, None], cholesky)[:, 0]


def _variance_at(covariance: torch.Tensor, cholesky: torch.Tensor) -> torch.Tensor:
    """Posterior variance of the smooth part at the observations themselves. Shape: (n,)."""
    half = torch.linalg.solve_triangular(cholesky, covariance, upper=False)
    variance: torch.Tensor = covariance.diagonal() - half.square().sum(0)
    return variance.clamp_min(0)
