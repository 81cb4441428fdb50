"""What the network leaves unexplained, as a Gaussian process that learns from a handful of runs.

Notation (Rasmussen and Williams 2006, chapter 2, and 3.3 for the robust likelihood):
    X  (n, d)  embeddings of the observed graphs      y  (n,)  log(measured / predicted)
    K  = bias² + linear² · X Xᵀ / d + local² · exp(-‖x - x'‖² / (2 d · length²))
    W  = diag(noise² / w), where w are weights that a Student-t likelihood gives to each observation, so that one absurd
         reading moves nothing.
The three terms are what a new setting differs by: a constant factor (another machine), a trend (wider networks suffer more),
and neighbours (the sampler comes back to a region).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_DEGREES_OF_FREEDOM = 4.0
_REWEIGHTINGS = 3


@dataclass(frozen=True, slots=True)
class ResidualPrior:
    """Standard deviations of the terms, in logarithms."""

    bias: float
    linear: float
    local: float
    length: float
    noise: float

    def kernel(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Covariance of the residual between embeddings ``a`` (n, d) and ``b`` (m, d). Shape: (n, m)."""
        width = a.shape[1]
        distance = torch.cdist(a, b).square() / width
        linear = self.linear**2 * (a @ b.T) / width
        return self.bias**2 + linear + self.local**2 * torch.exp(-distance / (2 * self.length**2))

    def variance(self, x: torch.Tensor) -> torch.Tensor:
        """Prior variance of the residual at ``x`` (n, d), noise included. Shape: (n,)."""
        return self.bias**2 + self.linear**2 * x.square().mean(1) + self.local**2 + self.noise**2


@dataclass(frozen=True, slots=True)
class ResidualPosterior:
    """The process after some observations."""

    prior: ResidualPrior
    x: torch.Tensor  # shape: (n, d)
    cholesky: torch.Tensor  # shape: (n, n)
    alpha: torch.Tensor  # shape: (n,)
    noise: float
    """Noise level after seeing how well the observations agree."""

    def at(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of a new measurement's residual at ``x`` (m, d). Shapes: (m,), (m,)."""
        cross = self.prior.kernel(x, self.x)  # shape: (m, n)
        half = torch.linalg.solve_triangular(self.cholesky, cross.T, upper=False)  # shape: (n, m)
        variance = self.prior.variance(x) - self.prior.noise**2 - half.square().sum(0)
        return cross @ self.alpha, (variance.clamp_min(0) + self.noise**2).sqrt()


def condition(prior: ResidualPrior, x: torch.Tensor, y: torch.Tensor) -> ResidualPosterior:
    """The process given residuals ``y`` (n,) at embeddings ``x`` (n, d), n ≥ 1, in double precision."""
    covariance = prior.kernel(x, x)
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
    return ResidualPosterior(prior, x, cholesky, alpha, noise)


def _solve(covariance: torch.Tensor, noise2: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cholesky = torch.linalg.cholesky(covariance + torch.diag(noise2 + 1e-9))
    return cholesky, torch.cholesky_solve(y[:, None], cholesky)[:, 0]


def _variance_at(covariance: torch.Tensor, cholesky: torch.Tensor) -> torch.Tensor:
    """Posterior variance of the smooth part at the observations themselves. Shape: (n,)."""
    half = torch.linalg.solve_triangular(cholesky, covariance, upper=False)
    variance: torch.Tensor = covariance.diagonal() - half.square().sum(0)
    return variance.clamp_min(0)
