"""What the network leaves unexplained, as a Gaussian process that learns from a handful of runs.

Notation (Rasmussen and Williams 2006, chapter 2, and 3.3 for the robust likelihood):
    X  (n, d)  embeddings of the observed graphs      y  (n,)  log(measured / predicted)
    Z  (n, f)  what the graphs spend their time on    r  (n,)  regimes: runs under equal conditions have equal numbers
    P  (n, e)  how far physics is from the network
    K  = bias² (1 - s + s [r = r']) + linear² · X Xᵀ / d + physics² · P Pᵀ
         + local² · exp(-(‖x - x'‖² / d + ‖z - z'‖² / f) / (2 · length²))
    W  = diag(noise² / w), where w are weights that a Student-t likelihood gives to each observation, so that one absurd
         reading moves nothing.
The terms are what a new setting differs by: a constant factor (another machine), of which a part s is of these conditions alone
(another driver); a trend (wider networks suffer more); neighbours, alike in size and in what they are made of (the sampler comes
back to a region, the machine has a slow kernel); and whether physics is right where the network is not (far outside of its data).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

_DEGREES_OF_FREEDOM = 4.0
_REWEIGHTINGS = 3
_OF_THE_REGIME = 0.5
"""Share of the constant factor's variance that a change of conditions draws anew."""


class Place(NamedTuple):
    """Where n runs are in the process."""

    x: torch.Tensor  # shape: (n, d)
    z: torch.Tensor  # shape: (n, f)
    physics: torch.Tensor  # shape: (n, e)
    regime: torch.Tensor  # shape: (n,)


def joined(places: list[Place]) -> Place:
    """All of them, in order."""
    return Place(*(torch.cat(column) for column in zip(*places, strict=True)))


def under_equal_conditions(x: torch.Tensor) -> Place:
    """Runs at ``x`` (n, d) of one regime, of which nothing else is known."""
    nothing = x.new_zeros((len(x), 0))
    return Place(x, nothing, nothing, x.new_zeros(len(x)))


@dataclass(frozen=True, slots=True)
class ResidualPrior:
    """Standard deviations of the terms, in logarithms."""

    bias: float
    linear: float
    local: float
    length: float
    noise: float
    physics: float = 0.0

    def kernel(self, a: Place, b: Place) -> torch.Tensor:
        """Covariance of the residual between n and m runs. Shape: (n, m)."""
        width = a.x.shape[1]
        distance = torch.cdist(a.x, b.x).square() / width + torch.cdist(a.z, b.z).square() / max(a.z.shape[1], 1)
        same = (a.regime[:, None] == b.regime[None, :]).to(a.x.dtype)
        bias = self.bias**2 * (1 - _OF_THE_REGIME + _OF_THE_REGIME * same)
        linear = self.linear**2 * (a.x @ b.x.T) / width
        physics = self.physics**2 * (a.physics @ b.physics.T)
        return bias + linear + physics + self.local**2 * torch.exp(-distance / (2 * self.length**2))

    def variance(self, at: Place) -> torch.Tensor:
        """Prior variance of the residual of n runs, noise included. Shape: (n,)."""
        return self.before(at.x) + self.physics**2 * at.physics.square().sum(1)

    def before(self, x: torch.Tensor) -> torch.Tensor:
        """The same while nothing was measured: what the held-out runs had, whose network was trusted. Shape: (n,)."""
        return self.bias**2 + self.linear**2 * x.square().mean(1) + self.local**2 + self.noise**2


@dataclass(frozen=True, slots=True)
class ResidualPosterior:
    """The process after some observations."""

    prior: ResidualPrior
    seen: Place
    cholesky: torch.Tensor  # shape: (n, n)
    alpha: torch.Tensor  # shape: (n,)
    noise: float
    """Noise level after seeing how well the observations agree."""

    @property
    def regime(self) -> torch.Tensor:
        """Of the runs that come next. Shape: ()."""
        return self.seen.regime.max()

    def at(self, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of the residual of m new measurements. Shapes: (m,), (m,)."""
        cross = self.prior.kernel(place, self.seen)  # shape: (m, n)
        half = torch.linalg.solve_triangular(self.cholesky, cross.T, upper=False)  # shape: (n, m)
        variance = self.prior.variance(place) - self.prior.noise**2 - half.square().sum(0)
        return cross @ self.alpha, (variance.clamp_min(0) + self.noise**2).sqrt()

    def left_out(self) -> torch.Tensor:
        """What each observation is beyond what all others say of it: leave-one-out (Rasmussen and Williams 2006, eq. 5.12).

        Returns:
            Shape: (n,).
        """
        return self.alpha / torch.cholesky_inverse(self.cholesky).diagonal()


def condition(prior: ResidualPrior, seen: Place, y: torch.Tensor) -> ResidualPosterior:
    """The process given residuals ``y`` (n,) of the runs ``seen``, n ≥ 1, in double precision."""
    covariance = prior.kernel(seen, seen)
    weights = torch.ones_like(y)
    for _ in range(_REWEIGHTINGS):
        cholesky, alpha = _solve(covariance, prior.noise**2 / weights, y)
        error = y - covariance @ alpha  # what the smooth part leaves over
        scale = prior.noise**2 + _variance_at(covariance, cholesky)
        weights = (_DEGREES_OF_FREEDOM + 1) / (_DEGREES_OF_FREEDOM + error.square() / scale)
    cholesky, alpha = _solve(covariance, prior.noise**2 / weights, y)
    error = y - covariance @ alpha
    noise2 = (_DEGREES_OF_FREEDOM * prior.noise**2 + (weights * error.square()).sum()) / (_DEGREES_OF_FREEDOM + weights.sum())
    noise = max(float(noise2.sqrt()), 0.5 * prior.noise)
    return ResidualPosterior(prior, seen, cholesky, alpha, noise)


def _solve(covariance: torch.Tensor, noise2: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cholesky = torch.linalg.cholesky(covariance + torch.diag(noise2 + 1e-9))
    return cholesky, torch.cholesky_solve(y[:, None], cholesky)[:, 0]


def _variance_at(covariance: torch.Tensor, cholesky: torch.Tensor) -> torch.Tensor:
    """Posterior variance of the smooth part at the observations themselves. Shape: (n,)."""
    half = torch.linalg.solve_triangular(cholesky, covariance, upper=False)
    variance: torch.Tensor = covariance.diagonal() - half.square().sum(0)
    return variance.clamp_min(0)
