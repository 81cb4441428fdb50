"""The residual process against the textbook, and against readings that should not move it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import truncnorm

from perfguard_models.residual import Bounds, GPInputs, ResidualPosterior, ResidualPrior, condition

PRIOR = ResidualPrior(bias=0.2, local=0.15, length=0.5, noise=0.1, trust=0.1)
GUESS = ResidualPrior(bias=0.3, local=0.25, length=1.0, noise=0.1, of_the_step=0.9)
GAUSSIAN = replace(PRIOR, reweightings=0)
seeds = st.integers(0, 2**16)


def under_equal_conditions(x: torch.Tensor) -> GPInputs:
    """Inputs of runs at ``x`` (n, d) in one regime, without other features."""
    none = x.new_zeros(len(x))
    return GPInputs(x, x.new_zeros((len(x), 0)), none, torch.ones_like(none), none, none)


def embeddings(num_points: int, seed: int, *, width: int = 3) -> torch.Tensor:
    return torch.rand(num_points, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1


def places(num_points: int, seed: int) -> GPInputs:
    """Two regimes, and two opinions of physics."""
    regime = torch.arange(num_points, dtype=torch.float64) % 2
    return GPInputs(
        embeddings(num_points, seed),
        embeddings(num_points, seed + 7, width=2),
        regime,
        1 - 0.5 * torch.rand(num_points, generator=torch.Generator().manual_seed(seed), dtype=torch.float64),
        torch.zeros(num_points, dtype=torch.float64),
        torch.zeros(num_points, dtype=torch.float64),
    )


def first(place: GPInputs, count: int) -> GPInputs:
    return GPInputs(*(column[:count] for column in place))


def latent_variance(posterior: ResidualPosterior, x: GPInputs) -> torch.Tensor:
    """Of the residual itself, without the noise of a new measurement."""
    return posterior.predict(x)[1].square() - posterior.noise**2 * x.scale.square()


def slow_kernel(prior: ResidualPrior, a: GPInputs, b: GPInputs) -> npt.NDArray[np.float64]:
    """Entry by entry, from the formula in the module's docstring."""
    width = a.x.shape[1]
    matrix = np.zeros((len(a.x), len(b.x)))
    for i, x in enumerate(a.x.tolist()):
        for j, y in enumerate(b.x.tolist()):
            distance = sum((p - q) ** 2 for p, q in zip(x, y, strict=True)) / width / prior.length**2
            other = sum(float(p * q) for p, q in zip(a.alternatives[i], b.alternatives[j], strict=True))
            bias = prior.bias**2 * (1 - prior.of_the_regime * float(a.regime[i] != b.regime[j]))
            smooth = prior.trust**2 * other + prior.local**2 * math.exp(-distance / 2)
            matrix[i, j] = bias + float(a.scale[i] * b.scale[j]) * smooth
    return matrix


def textbook(
    prior: ResidualPrior, x: GPInputs, y: torch.Tensor, new: GPInputs
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Mean and variance of the latent function (Rasmussen and Williams 2006, equations 2.23 and 2.24)."""
    inverse = np.linalg.inv(slow_kernel(prior, x, x) + prior.noise**2 * np.diag(x.scale.numpy() ** 2))
    cross = slow_kernel(prior, new, x)
    variance = slow_kernel(prior, new, new) - cross @ inverse @ cross.T
    return cross @ inverse @ y.numpy(), np.diag(variance)


@settings(max_examples=20)
@given(seeds, st.integers(1, 8))
def test_posterior_without_reweighting_is_textbook(seed: int, num_points: int) -> None:
    x, new = places(num_points, seed), places(5, seed + 1)
    y = torch.sin(3 * x.x.sum(1))
    posterior = condition(GAUSSIAN, x, y)
    mean, variance = textbook(PRIOR, x, y, new)
    np.testing.assert_allclose(posterior.predict(new)[0], mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(latent_variance(posterior, new), variance, rtol=1e-3, atol=1e-6)


@settings(max_examples=20)
@given(seeds, st.integers(0, 11))
def test_posterior_is_robust_to_one_outlier(seed: int, position: int) -> None:
    """One misread clock must not spoil all that follows.

    A Student-t likelihood gives no bound in absolute terms: where no other reading is near, even an absurd one says something.
    It says little beside what it would say if it were believed, it stays within the interval, and the more absurd it is, the less
    it says.
    """
    x, new = places(12, seed), places(5, seed + 1)
    y = torch.full((12,), 0.1, dtype=torch.float64)

    def moved(factor: float, prior: ResidualPrior = PRIOR) -> tuple[torch.Tensor, torch.Tensor]:
        """How far, and what is uncertain there."""
        absurd = y.clone()
        absurd[position] += math.log(factor)
        mean, deviation = condition(prior, x, absurd).predict(new)
        return (mean - condition(prior, x, y).predict(new)[0]).abs(), deviation

    trusting, _ = moved(1e3, GAUSSIAN)
    by_a_thousand, deviation = moved(1e3)
    by_a_million, _ = moved(1e6)
    assert by_a_thousand.max() < trusting.max() / 5
    assert (by_a_thousand < 2 * deviation).all()
    assert by_a_million.max() < by_a_thousand.max().clamp_min(0.01)


@settings(max_examples=20)
@given(seeds)
def test_left_out_equals_refit_on_the_others(seed: int) -> None:
    x, y = places(7, seed), torch.sin(5 * embeddings(7, seed).sum(1))
    left_out = condition(GAUSSIAN, x, y).left_out()
    for index in range(7):
        others = [other for other in range(7) if other != index]
        alone = condition(GAUSSIAN, GPInputs(*(column[others] for column in x)), y[others])
        mean = alone.predict(GPInputs(*(column[[index]] for column in x)))[0]
        assert float(left_out[index]) == pytest.approx(float(y[index] - mean), abs=1e-6)


def test_posterior_learns_new_regime_from_three_runs() -> None:
    """It keeps the shape learnt in the old regime; only the factor is new."""
    prior = ResidualPrior(bias=0.5, local=1.0, length=2.0, noise=0.03)
    x = embeddings(60, 0)
    trend = 0.4 * x.sum(1)
    regime = torch.cat([torch.zeros(57, dtype=torch.float64), torch.ones(3, dtype=torch.float64)])
    place = under_equal_conditions(x)._replace(regime=regime)
    posterior = condition(prior, place, trend + 0.5 * regime)
    new = embeddings(5, 1)
    at = under_equal_conditions(new)._replace(regime=posterior.regime.expand(5))
    torch.testing.assert_close(posterior.predict(at)[0], 0.4 * new.sum(1) + 0.5, atol=0.06, rtol=0)


@pytest.mark.parametrize("of_the_step", [[0.1, math.log(4), 0.1], [0.4, 0.4, 0.0], [0.4] * 9 + [0.0], [0.4, 0.38, -5.0, 0.42]])
def test_agreeing_readings_of_a_step_outweigh_its_like(of_the_step: list[float]) -> None:
    prior = ResidualPrior(bias=0.2, local=0.01, length=0.5, noise=0.03, of_the_step=0.9)
    x = under_equal_conditions(torch.cat([embeddings(10, 0), embeddings(1, 1).expand(len(of_the_step), 3)]))
    y = torch.cat([torch.zeros(10), torch.tensor(of_the_step)]).double()
    same = GPInputs(*(column[-1:] for column in x))
    mean, sigma = condition(prior, x, y).predict(same)
    assert mean.item() == pytest.approx(np.median(of_the_step), abs=0.06)
    assert sigma.item() < 0.1


NOWHERE = under_equal_conditions(torch.zeros(0, 3, dtype=torch.float64))


@pytest.mark.parametrize("least", [-0.5, 0.0, 0.5])
def test_bound_has_moments_of_a_truncated_normal(least: float) -> None:
    out = under_equal_conditions(embeddings(1, 2))
    sigma = (PRIOR.variance(out) + PRIOR.noise**2).sqrt().item()
    above = truncnorm(least / sigma, math.inf, scale=sigma)
    posterior = condition(GAUSSIAN, NOWHERE, NOWHERE.scale, bounds=Bounds(out, torch.tensor([least]).double()))
    # What is learnt is of the step's like, not of its noise: of a like step as much as the smooth part is of the whole.
    smooth = PRIOR.variance(out).item() / sigma**2
    mean, own_sigma = posterior.predict(out)
    assert mean.item() == pytest.approx(smooth * above.mean(), rel=1e-3)
    assert own_sigma.item() ** 2 == pytest.approx(sigma**2 - smooth**2 * (sigma**2 - above.var()), rel=1e-3)


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_more_failures_never_say_that_less_is_needed(noise: float) -> None:
    prior = ResidualPrior(bias=0.3, local=1e-6, length=1.0, noise=noise)
    new, means = under_equal_conditions(embeddings(1, 1)), []
    for number in (1, 2, 20, 60, 200):
        out = under_equal_conditions(embeddings(number, 0))
        bounds = Bounds(out, torch.full((number,), 0.3).double())
        means.append(condition(prior, NOWHERE, NOWHERE.scale, bounds=bounds).predict(new)[0].item())
    assert means == sorted(means)


@pytest.mark.parametrize("shift", [-0.3, -0.1, 0.25])
def test_posterior_adapts_to_machine_change(shift: float) -> None:
    """Ten runs of several kinds are enough, however sure the weights were."""
    prior = replace(GUESS, bias=0.02, local=0.0035, noise=0.0015)
    at = under_equal_conditions(embeddings(60, 0))
    scatter = 0.003 * torch.randn(20, generator=torch.Generator().manual_seed(0)).double()
    others = GPInputs(*(column[50:] for column in at))
    for number in (10, 20):
        learnt = condition(prior, first(at, number), shift + scatter[:number])
        assert float((learnt.predict(others)[0] - shift).abs().max()) < 0.03
