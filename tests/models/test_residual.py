"""The residual process against the textbook, and against readings that should not move it."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perfguard_models import _residual
from perfguard_models._residual import ResidualPosterior, ResidualPrior, condition

PRIOR = ResidualPrior(bias=0.2, linear=0.1, local=0.15, length=0.5, noise=0.1)
seeds = st.integers(0, 2**16)


def embeddings(num_points: int, seed: int, *, width: int = 3) -> torch.Tensor:
    return torch.rand(num_points, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1


def latent_variance(posterior: ResidualPosterior, x: torch.Tensor) -> torch.Tensor:
    """Of the residual itself, without the noise of a new measurement."""
    return posterior.at(x)[1].square() - posterior.noise**2


def slow_kernel(prior: ResidualPrior, a: torch.Tensor, b: torch.Tensor) -> npt.NDArray[np.float64]:
    """Entry by entry, from the formula in the module's docstring."""
    width = a.shape[1]
    matrix = np.zeros((len(a), len(b)))
    for i, x in enumerate(a.tolist()):
        for j, y in enumerate(b.tolist()):
            product = sum(p * q for p, q in zip(x, y, strict=True))
            distance = sum((p - q) ** 2 for p, q in zip(x, y, strict=True))
            local = prior.local**2 * math.exp(-distance / (2 * width * prior.length**2))
            matrix[i, j] = prior.bias**2 + prior.linear**2 * product / width + local
    return matrix


def textbook(
    prior: ResidualPrior, x: torch.Tensor, y: torch.Tensor, new: torch.Tensor
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Mean and variance of the latent function (Rasmussen and Williams 2006, equations 2.23 and 2.24)."""
    inverse = np.linalg.inv(slow_kernel(prior, x, x) + prior.noise**2 * np.eye(len(x)))
    cross = slow_kernel(prior, new, x)
    variance = slow_kernel(prior, new, new) - cross @ inverse @ cross.T
    return cross @ inverse @ y.numpy(), np.diag(variance)


@settings(max_examples=20)
@given(seeds)
def test_the_kernel_is_the_formula_and_its_diagonal_the_prior_variance(seed: int) -> None:
    a, b = embeddings(4, seed), embeddings(3, seed + 1)
    np.testing.assert_allclose(PRIOR.kernel(a, b), slow_kernel(PRIOR, a, b), rtol=1e-6)
    np.testing.assert_allclose(PRIOR.variance(a), np.diag(slow_kernel(PRIOR, a, a)) + PRIOR.noise**2, rtol=1e-6)


@settings(max_examples=20)
@given(seeds, st.integers(1, 8))
def test_without_reweighting_the_posterior_is_that_of_the_textbook(seed: int, num_points: int) -> None:
    x, new = embeddings(num_points, seed), embeddings(5, seed + 1)
    y = torch.sin(3 * x.sum(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_residual, "_REWEIGHTINGS", 0)
        posterior = condition(PRIOR, x, y)
    mean, variance = textbook(PRIOR, x, y, new)
    np.testing.assert_allclose(posterior.at(new)[0], mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(latent_variance(posterior, new), variance, rtol=1e-3, atol=1e-6)


@settings(max_examples=20)
@given(seeds, st.integers(2, 8))
def test_where_all_readings_agree_the_reweighting_changes_little(seed: int, num_points: int) -> None:
    x, new = embeddings(num_points, seed), embeddings(5, seed + 1)
    y = torch.full((num_points,), 0.2, dtype=torch.float64)
    posterior = condition(PRIOR, x, y)
    mean, variance = textbook(PRIOR, x, y, new)
    np.testing.assert_allclose(posterior.at(new)[0], mean, atol=0.03)
    np.testing.assert_allclose(latent_variance(posterior, new), variance, atol=0.01)


@settings(max_examples=20)
@given(seeds, st.integers(0, 11))
def test_one_reading_a_thousandfold_too_large_moves_the_mean_by_little(seed: int, position: int) -> None:
    x, new = embeddings(12, seed), embeddings(5, seed + 1)
    y = torch.full((12,), 0.1, dtype=torch.float64)
    absurd = y.clone()
    absurd[position] += math.log(1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_residual, "_REWEIGHTINGS", 0)
        trusting = (condition(PRIOR, x, absurd).at(new)[0] - condition(PRIOR, x, y).at(new)[0]).abs().max()
    moved = (condition(PRIOR, x, absurd).at(new)[0] - condition(PRIOR, x, y).at(new)[0]).abs().max()
    assert moved < 0.1
    assert moved < trusting / 5


@settings(max_examples=25)
@given(seeds, st.integers(1, 6), st.integers(1, 6))
def test_more_data_never_raises_the_latent_variance(seed: int, num_points: int, more: int) -> None:
    x, new = embeddings(num_points + more, seed), embeddings(5, seed + 1)
    y = torch.zeros(num_points + more, dtype=torch.float64)
    few, many = (condition(PRIOR, x[:count], y[:count]) for count in (num_points, num_points + more))
    assert (latent_variance(many, new) <= latent_variance(few, new) + 1e-9).all()
    assert (latent_variance(few, new) <= PRIOR.variance(new) - PRIOR.noise**2 + 1e-9).all()


def test_data_from_far_away_leave_the_prior() -> None:
    prior = ResidualPrior(bias=1e-6, linear=1e-6, local=0.15, length=0.5, noise=0.1)
    x = embeddings(6, 0) + 100
    new = embeddings(5, 1)
    posterior = condition(prior, x, torch.full((6,), 0.5, dtype=torch.float64))
    torch.testing.assert_close(posterior.at(new)[0], torch.zeros(5, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(latent_variance(posterior, new), prior.variance(new) - prior.noise**2)


def test_a_constant_factor_is_learnt_everywhere() -> None:
    prior = ResidualPrior(bias=0.5, linear=1e-6, local=1e-6, length=0.5, noise=0.1)
    posterior = condition(prior, embeddings(10, 0), torch.full((10,), 0.4, dtype=torch.float64))
    # weights of 5/4 for readings without error: 10 · 0.25 · 1.25 / (10 · 0.25 · 1.25 + 0.01) of 0.4
    assert posterior.at(embeddings(1, 1) + 50)[0].item() == pytest.approx(0.4, rel=0.01)


def test_the_noise_follows_how_well_the_readings_agree() -> None:
    x = torch.zeros(20, 3, dtype=torch.float64)
    sign = torch.ones(20, dtype=torch.float64)
    sign[::2] = -1
    agreeing, scattered = condition(PRIOR, x, 0 * sign), condition(PRIOR, x, 0.3 * sign)
    assert 0.5 * PRIOR.noise <= agreeing.noise < PRIOR.noise < scattered.noise


def test_the_same_point_many_times_is_no_trouble() -> None:
    posterior = condition(PRIOR, torch.zeros(50, 3, dtype=torch.float64), torch.zeros(50, dtype=torch.float64))
    mean, sigma = posterior.at(embeddings(3, 0))
    assert torch.isfinite(mean).all()
    assert torch.isfinite(sigma).all()
