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

from perfguard_models import residual
from perfguard_models.residual import (
    Bounds,
    GPInputs,
    ResidualPosterior,
    ResidualPrior,
    as_shipped,
    beside,
    condition,
    condition_average,
    hypotheses,
    joined,
    under_equal_conditions,
)

PRIOR = ResidualPrior(bias=0.2, linear=0.1, local=0.15, length=0.5, noise=0.1, trust=0.1, reach=0.7, kernels=0.1, kind=0.1)
GUESS = ResidualPrior(bias=0.3, linear=0.1, local=0.25, length=1.0, noise=0.1, of_the_step=0.9, guessed=True)
seeds = st.integers(0, 2**16)


def embeddings(num_points: int, seed: int, *, width: int = 3) -> torch.Tensor:
    return torch.rand(num_points, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1


def places(num_points: int, seed: int) -> GPInputs:
    """Two regimes, and two opinions of physics."""
    regime = torch.arange(num_points, dtype=torch.float64) % 2
    return GPInputs(
        embeddings(num_points, seed),
        embeddings(num_points, seed + 3, width=4),
        embeddings(num_points, seed + 5, width=5),
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
    return posterior.at(x)[1].square() - posterior.noise**2 * x.scale.square()


def slow_kernel(prior: ResidualPrior, a: GPInputs, b: GPInputs) -> npt.NDArray[np.float64]:
    """Entry by entry, from the formula in the module's docstring."""
    width = a.x.shape[1]
    matrix = np.zeros((len(a.x), len(b.x)))
    for i, x in enumerate(a.x.tolist()):
        for j, y in enumerate(b.x.tolist()):
            product = sum(p * q for p, q in zip(x, y, strict=True))
            distance = sum((p - q) ** 2 for p, q in zip(x, y, strict=True)) / width / prior.length**2
            spent = sum(float(p - q) ** 2 for p, q in zip(a.z[i], b.z[j], strict=True)) / a.z.shape[1] / prior.reach**2
            local = prior.local**2 * math.exp(-(distance + spent) / 2)
            physics = prior.trust**2 * sum(float(p * q) for p, q in zip(a.alternatives[i], b.alternatives[j], strict=True))
            one_is_shipped = (a.regime[i] == -1) != (b.regime[j] == -1)
            changed = 0.75 if one_is_shipped else float(a.regime[i] != b.regime[j])
            bias = prior.bias**2 * (1 - prior.of_the_regime * changed)
            scale = float(a.scale[i] * b.scale[j]) * (0.9 if one_is_shipped else 1.0)
            kind = prior.kind**2 * math.exp(-spent / 2)
            kernels = prior.kernels**2 * sum(float(p * q) for p, q in zip(a.kernels[i], b.kernels[j], strict=True))
            matrix[i, j] = bias + scale * (prior.linear**2 * product / width + local + kind + kernels + physics)
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
@given(seeds)
def test_kernel_equals_formula_and_prior_variance(seed: int) -> None:
    a, b = places(4, seed), joined([places(3, seed + 1), as_shipped(places(2, seed + 2))])
    np.testing.assert_allclose(PRIOR.kernel(beside(a, b)), slow_kernel(PRIOR, a, b), rtol=1e-6)
    np.testing.assert_allclose(PRIOR.variance(b), np.diag(slow_kernel(PRIOR, b, b)), rtol=1e-6)


@pytest.mark.parametrize("of_the_regime", [0.2, 0.5])
def test_kernel_of_many_regimes_is_a_covariance(of_the_regime: float) -> None:
    place = joined([as_shipped(places(1, 0)), places(50, 1)._replace(regime=torch.arange(50).double())])
    constant = ResidualPrior(bias=1.0, linear=0.0, local=0.0, length=1.0, noise=0.1, of_the_regime=of_the_regime)
    assert torch.linalg.eigvalsh(constant.kernel(beside(place, place))).min() > -1e-9


@settings(max_examples=20)
@given(seeds, st.integers(1, 8))
def test_posterior_without_reweighting_is_textbook(seed: int, num_points: int) -> None:
    x, new = places(num_points, seed), places(5, seed + 1)
    y = torch.sin(3 * x.x.sum(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residual, "_REWEIGHTINGS", 0)
        posterior = condition(PRIOR, x, y)
    mean, variance = textbook(PRIOR, x, y, new)
    np.testing.assert_allclose(posterior.at(new)[0], mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(latent_variance(posterior, new), variance, rtol=1e-3, atol=1e-6)


@settings(max_examples=20)
@given(seeds, st.integers(2, 8))
def test_reweighting_changes_agreeing_readings_little(seed: int, num_points: int) -> None:
    x, new = places(num_points, seed), places(5, seed + 1)
    y = torch.full((num_points,), 0.2, dtype=torch.float64)
    posterior = condition(PRIOR, x, y)
    mean, variance = textbook(PRIOR, x, y, new)
    np.testing.assert_allclose(posterior.at(new)[0], mean, atol=0.03)
    np.testing.assert_allclose(latent_variance(posterior, new), variance, atol=0.01)


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

    def moved(factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        """How far, and what is uncertain there."""
        absurd = y.clone()
        absurd[position] += math.log(factor)
        mean, deviation = condition(PRIOR, x, absurd).at(new)
        return (mean - condition(PRIOR, x, y).at(new)[0]).abs(), deviation

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residual, "_REWEIGHTINGS", 0)
        trusting, _ = moved(1e3)
    by_a_thousand, deviation = moved(1e3)
    by_a_million, _ = moved(1e6)
    assert by_a_thousand.max() < trusting.max() / 5
    assert (by_a_thousand < 2 * deviation).all()
    assert by_a_million.max() < by_a_thousand.max()


@settings(max_examples=25)
@given(seeds, st.integers(1, 6), st.integers(1, 6))
def test_more_data_never_raises_the_latent_variance(seed: int, num_points: int, more: int) -> None:
    x, new = places(num_points + more, seed), places(5, seed + 1)
    y = torch.zeros(num_points + more, dtype=torch.float64)
    few, many = (condition(PRIOR, first(x, count), y[:count]) for count in (num_points, num_points + more))
    assert (latent_variance(many, new) <= latent_variance(few, new) + 1e-9).all()
    assert (latent_variance(few, new) <= PRIOR.variance(new) + 1e-9).all()


def test_data_from_far_away_leave_the_prior() -> None:
    prior = ResidualPrior(bias=1e-6, linear=1e-6, local=0.15, length=0.5, noise=0.1)
    x = under_equal_conditions(embeddings(6, 0) + 100)
    new = under_equal_conditions(embeddings(5, 1))
    posterior = condition(prior, x, torch.full((6,), 0.5, dtype=torch.float64))
    torch.testing.assert_close(posterior.at(new)[0], torch.zeros(5, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(latent_variance(posterior, new), prior.variance(new))


def test_a_constant_factor_is_learnt_everywhere() -> None:
    prior = ResidualPrior(bias=0.5, linear=1e-6, local=1e-6, length=0.5, noise=0.1)
    posterior = condition(prior, under_equal_conditions(embeddings(10, 0)), torch.full((10,), 0.4, dtype=torch.float64))
    # weights of 5/4 for readings without error: 10 · 0.25 · 1.25 / (10 · 0.25 · 1.25 + 0.01) of 0.4
    assert posterior.at(under_equal_conditions(embeddings(1, 1) + 50))[0].item() == pytest.approx(0.4, rel=0.01)


def test_the_noise_follows_how_well_the_readings_agree() -> None:
    x = under_equal_conditions(torch.zeros(20, 3, dtype=torch.float64))
    sign = torch.ones(20, dtype=torch.float64)
    sign[::2] = -1
    agreeing, scattered = condition(PRIOR, x, 0 * sign), condition(PRIOR, x, 0.3 * sign)
    assert 0.5 * PRIOR.noise <= agreeing.noise < PRIOR.noise < scattered.noise


def test_the_same_point_many_times_is_no_trouble() -> None:
    x = under_equal_conditions(torch.zeros(50, 3, dtype=torch.float64))
    posterior = condition(PRIOR, x, torch.zeros(50, dtype=torch.float64))
    mean, sigma = posterior.at(under_equal_conditions(embeddings(3, 0)))
    assert torch.isfinite(mean).all()
    assert torch.isfinite(sigma).all()


@settings(max_examples=20)
@given(seeds)
def test_left_out_equals_refit_on_the_others(seed: int) -> None:
    x, y = places(7, seed), torch.sin(5 * embeddings(7, seed).sum(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residual, "_REWEIGHTINGS", 0)
        left_out = condition(PRIOR, x, y).left_out()
        for index in range(7):
            others = [other for other in range(7) if other != index]
            alone = condition(PRIOR, GPInputs(*(column[others] for column in x)), y[others])
            mean = alone.at(GPInputs(*(column[[index]] for column in x)))[0]
            assert float(left_out[index]) == pytest.approx(float(y[index] - mean), abs=1e-6)


def test_posterior_learns_new_regime_from_three_runs() -> None:
    """It keeps the shape learnt in the old regime; only the factor is new."""
    prior = ResidualPrior(bias=0.5, linear=0.3, local=1e-6, length=0.5, noise=0.03)
    x = embeddings(60, 0)
    trend = 0.4 * x.sum(1)
    regime = torch.cat([torch.zeros(57, dtype=torch.float64), torch.ones(3, dtype=torch.float64)])
    place = under_equal_conditions(x)._replace(regime=regime)
    posterior = condition(prior, place, trend + 0.5 * regime)
    new = embeddings(5, 1)
    at = under_equal_conditions(new)._replace(regime=posterior.regime.expand(5))
    torch.testing.assert_close(posterior.at(at)[0], 0.4 * new.sum(1) + 0.5, atol=0.06, rtol=0)


def test_posterior_believes_confirmed_physics() -> None:
    prior = ResidualPrior(bias=0.1, linear=1e-6, local=1e-6, length=0.5, noise=0.05, trust=0.5)
    x, gap = torch.zeros(12, 3, dtype=torch.float64), embeddings(12, 0, width=1)
    posterior = condition(prior, under_equal_conditions(x)._replace(alternatives=gap), gap[:, 0])
    new = torch.tensor([[0.8]], dtype=torch.float64)
    assert posterior.at(under_equal_conditions(x[:1])._replace(alternatives=new))[0].item() == pytest.approx(0.8, abs=0.05)


def test_repeat_reading_counts_as_far_as_steps_differ() -> None:
    x = under_equal_conditions(torch.cat([embeddings(10, 0), embeddings(1, 1).expand(2, 3)]))
    y = torch.cat([torch.zeros(10), torch.full((2,), 0.2)]).double()
    prior = ResidualPrior(bias=0.2, linear=0.01, local=0.01, length=0.5, noise=0.1)
    same = GPInputs(*(column[-1:] for column in x))
    strange, of_steps = (condition(replace(prior, of_the_step=share), x, y) for share in (0.0, 0.9))
    assert strange.at(same)[0].item() < 0.1
    assert of_steps.at(same)[0].item() == pytest.approx(0.2, abs=0.02)
    assert of_steps.at(same)[1].item() < 0.5 * strange.at(same)[1].item()
    other = under_equal_conditions(embeddings(3, 2))
    assert (of_steps.at(other)[0] < strange.at(other)[0]).all()  # to which a step that was read twice is one step
    for another in (same._replace(regime=same.regime + 1), same._replace(setting=same.setting + 1)):
        assert of_steps.at(another)[0].item() < 0.1


@pytest.mark.parametrize("scatter", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("num_readings", [10, 30])
def test_scattered_readings_of_a_step_are_not_certain(scatter: float, num_readings: int) -> None:
    prior = ResidualPrior(bias=0.2, linear=0.01, local=0.01, length=0.5, noise=0.1, of_the_step=0.9)
    x = under_equal_conditions(embeddings(1, 1).expand(num_readings, 3))
    y = 0.2 + scatter * torch.where(torch.arange(num_readings) % 2 == 0, 1.0, -1.0).double()
    same = GPInputs(*(column[-1:] for column in x))
    mean, sigma = condition(prior, x, y).at(same)
    assert mean.item() == pytest.approx(0.2, abs=0.02)
    assert 0.8 * scatter < sigma.item() < 1.2 * scatter + 0.03
    agreeing = condition(prior, x, torch.full_like(y, 0.2)).at(same)[1]
    assert agreeing.item() < 0.03


@pytest.mark.parametrize("of_the_step", [[0.1, math.log(4), 0.1], [0.4, 0.4, 0.0], [0.4] * 9 + [0.0], [0.4, 0.38, -5.0, 0.42]])
def test_agreeing_readings_of_a_step_outweigh_its_like(of_the_step: list[float]) -> None:
    prior = ResidualPrior(bias=0.2, linear=0.01, local=0.01, length=0.5, noise=0.03, of_the_step=0.9)
    x = under_equal_conditions(torch.cat([embeddings(10, 0), embeddings(1, 1).expand(len(of_the_step), 3)]))
    y = torch.cat([torch.zeros(10), torch.tensor(of_the_step)]).double()
    same = GPInputs(*(column[-1:] for column in x))
    mean, sigma = condition(prior, x, y).at(same)
    assert mean.item() == pytest.approx(np.median(of_the_step), abs=0.06)
    assert sigma.item() < 0.1


def test_a_bound_is_no_reading_of_its_step() -> None:
    prior = ResidualPrior(bias=0.2, linear=0.01, local=0.01, length=0.5, noise=0.1, of_the_step=0.9)
    x = under_equal_conditions(embeddings(11, 0))
    readings, out = (GPInputs(*(column[part] for column in x)) for part in (slice(10), slice(10, 11)))
    bounded = condition(prior, readings, torch.zeros(10).double(), bounds=Bounds(out, torch.ones(1).double()))
    of_steps_none = condition(
        replace(prior, of_the_step=0.0), readings, torch.zeros(10).double(), bounds=Bounds(out, torch.ones(1).double())
    )
    torch.testing.assert_close(bounded.at(out), of_steps_none.at(out))


NOWHERE = under_equal_conditions(torch.zeros(0, 3, dtype=torch.float64))
NOWHERE_OF_PLACES = first(places(1, 0), 0)
NOWHERE_OF_KINDS = NOWHERE._replace(z=torch.zeros(0, 2, dtype=torch.float64))


def test_a_bound_that_says_nothing_changes_nothing() -> None:
    x, new = under_equal_conditions(embeddings(8, 0)), under_equal_conditions(embeddings(5, 1))
    y, out = torch.sin(3 * x.x[:, 0]), under_equal_conditions(embeddings(3, 2))
    with_bounds = condition(PRIOR, x, y, bounds=Bounds(out, torch.tensor([-20.0, -3.0, -math.inf]).double()))
    for changed, as_before in zip(with_bounds.at(new), condition(PRIOR, x, y).at(new), strict=True):
        torch.testing.assert_close(changed, as_before, rtol=1e-4, atol=1e-6)
    assert with_bounds.left_out().shape == (8,)


@pytest.mark.parametrize("least", [-0.5, 0.0, 0.5])
def test_bound_has_moments_of_a_truncated_normal(least: float) -> None:
    out = under_equal_conditions(embeddings(1, 2))
    sigma = (PRIOR.variance(out) + PRIOR.noise**2).sqrt().item()
    above = truncnorm(least / sigma, math.inf, scale=sigma)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residual, "_REWEIGHTINGS", 0)
        posterior = condition(PRIOR, NOWHERE, NOWHERE.scale, bounds=Bounds(out, torch.tensor([least]).double()))
    # What is learnt is of the step's like, not of its noise: of a like step as much as the smooth part is of the whole.
    smooth = PRIOR.variance(out).item() / sigma**2
    mean, own_sigma = posterior.at(out)
    assert mean.item() == pytest.approx(smooth * above.mean(), rel=1e-3)
    assert own_sigma.item() ** 2 == pytest.approx(sigma**2 - smooth**2 * (sigma**2 - above.var()), rel=1e-3)


def test_bound_that_says_nothing_keeps_the_prior() -> None:
    out, new = places(3, 0), places(5, 1)
    prior = replace(GUESS, trust=0.5, kernels=0.3)
    found = condition_average(prior, NOWHERE_OF_PLACES, NOWHERE.scale, bounds=Bounds(out, torch.full((3,), -20.0).double()))
    mean, sigma = found.at(new._replace(scale=torch.ones(5).double()))
    torch.testing.assert_close(mean, torch.zeros(5).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(sigma, prior.before(new.x).sqrt(), rtol=1e-4, atol=0)


def test_many_expected_bounds_equal_sampling() -> None:
    at = under_equal_conditions(embeddings(50, 0))
    found = condition(GUESS, NOWHERE, NOWHERE.scale, bounds=Bounds(at, torch.full((50,), -0.6).double()))
    generator = torch.Generator().manual_seed(0)
    factor = torch.linalg.cholesky(GUESS.kernel(beside(at, at)) + 1e-9 * torch.eye(50))
    smooth = torch.randn(200_000, 50, generator=generator).double() @ factor.T
    noise = GUESS.noise * torch.randn(200_000, 50, generator=generator).double()
    kept = smooth[((smooth + noise) > -0.6).all(1)]
    mean, sigma = found.at(at)
    assert len(kept) > 50_000
    assert (mean - kept.mean(0)).abs().max() < 0.03
    assert (sigma / (kept.var(0) + GUESS.noise**2).sqrt() - 1).abs().max() < 0.2


@pytest.mark.parametrize("z", [-40.0, 0.0, 40.0, 1e5])
def test_as_readings_lies_above_its_bound(z: float) -> None:
    bound, zero, one = torch.tensor([z]).double(), torch.zeros(1).double(), torch.ones(1).double()
    reading, variance = residual.as_readings(bound, zero, one)
    assert max(z, 0) * (1 - 1e-6) < reading.item() < max(1.01 * z, 1.5)
    assert variance.item() > 0


def test_repeated_failure_says_little_more_of_others() -> None:
    out, new = under_equal_conditions(embeddings(1, 2)), under_equal_conditions(embeddings(5, 1))
    prior, ten = replace(PRIOR, of_the_step=0.9), GPInputs(*(column.expand(10, *column.shape[1:]) for column in out))
    once, often = (
        condition(prior, NOWHERE, NOWHERE.scale, bounds=Bounds(at, torch.full((len(at.x),), 0.3).double())).at(new)[0]
        for at in (out, ten)
    )
    assert (often < 1.15 * once).all()


@settings(max_examples=20)
@given(seeds, st.integers(1, 30))
def test_an_average_lies_within_its_hypotheses(seed: int, num_points: int) -> None:
    x, new = places(num_points, seed), places(5, seed + 1)
    y = 0.3 * torch.randn(num_points, generator=torch.Generator().manual_seed(seed)).double()
    average = condition_average(GUESS, x, y)
    means = torch.stack([condition(each, x, y).at(new)[0] for each in hypotheses(GUESS)])
    assert sum(average.weights) == pytest.approx(1.0)
    assert (average.at(new)[0] >= means.amin(0) - 1e-9).all()
    assert (average.at(new)[0] <= means.amax(0) + 1e-9).all()
    widest = torch.stack([posterior.at(new)[1] for posterior in average.posteriors]).amin(0)
    assert (average.at(new)[1] >= widest - 1e-9).all()


def test_hypothesis_spread_ignores_step_difficulty() -> None:
    """A harder step has wider noise, but its hypotheses are no further apart."""
    x, new = under_equal_conditions(embeddings(1, 0)), under_equal_conditions(embeddings(3, 1))
    average = condition_average(GUESS, x, torch.full((1,), 2.0).double())  # by no hypothesis to be expected
    of_each = [posterior.at(new) for posterior in average.posteriors]
    within = sum(weight * sigma.square() for weight, (_, sigma) in zip(average.weights, of_each, strict=True))
    (mean, sigma), (same_mean, harder) = average.at(new), average.at(new, times=10.0)
    torch.testing.assert_close(mean, same_mean)
    torch.testing.assert_close(harder.square() - sigma.square(), 99 * within)
    assert (sigma.square() - within > 0.1).all()


def test_average_moves_less_than_prior_on_few_runs() -> None:
    """A few scattered runs must not move the average far."""
    new, generator = under_equal_conditions(embeddings(100, 1)), torch.Generator().manual_seed(0)
    average, alone = 0.0, 0.0
    for seed in range(20):
        x, y = under_equal_conditions(embeddings(5, seed)), 0.4 * torch.randn(5, generator=generator).double()
        average += float(condition_average(GUESS, x, y).at(new)[0].abs().mean())
        alone += float(condition(GUESS, x, y).at(new)[0].abs().mean())
    assert average < 0.8 * alone


def test_average_learns_what_many_runs_agree_on() -> None:
    """The average learns it as well as the one hypothesis that fits would."""
    x, new = under_equal_conditions(embeddings(40, 0)), under_equal_conditions(embeddings(20, 1))
    y = torch.full((40,), 0.4).double()
    assert (condition_average(GUESS, x, y).at(new)[0] - 0.4).abs().max() < 0.01
    assert (condition_average(GUESS, x, y).left_out()).abs().max() < 0.02


def test_a_prior_that_was_fitted_stands_alone() -> None:
    x, new = places(8, 0), places(3, 1)
    y = torch.sin(x.x.sum(1))
    torch.testing.assert_close(condition_average(PRIOR, x, y).at(new), condition(PRIOR, x, y).at(new))


@settings(max_examples=20)
@given(seeds, st.integers(1, 4), st.floats(-50, 50))
def test_oom_step_is_expected_above_its_bound(seed: int, num_bounds: int, least: float) -> None:
    at, number = under_equal_conditions(embeddings(8 + num_bounds, seed)), torch.full((num_bounds,), least).double()
    out = GPInputs(*(column[8:] for column in at))
    average = condition_average(
        GUESS, GPInputs(*(column[:8] for column in at)), torch.zeros(8).double(), bounds=Bounds(out, number)
    )
    mean, sigma = average.at(at)
    before = torch.full_like(mean, 0.4)
    above, own_sigma = average.above_bounds(at, mean, sigma, before, 0.5)
    torch.testing.assert_close(above[:8], mean[:8])
    torch.testing.assert_close(own_sigma[:8], sigma[:8])
    assert (above[8:] >= number).all()
    assert (own_sigma >= sigma).all()
    if least < -10:
        torch.testing.assert_close(above, mean)
    if least > 10:  # more than what others say by far
        assert (above[8:] > number + 0.39).all()
        assert (own_sigma[8:] > 0.39).all()


def test_a_bound_holds_under_other_conditions_too() -> None:
    at = under_equal_conditions(embeddings(9, 0))
    readings, out = (GPInputs(*(column[part] for column in at)) for part in (slice(8), slice(8, 9)))
    later = readings._replace(regime=readings.regime + 1)
    average = condition_average(GUESS, later, torch.zeros(8).double(), bounds=Bounds(out, torch.ones(1).double()))
    mean, sigma = average.at(at._replace(regime=at.regime + 1))
    assert average.above_bounds(at._replace(regime=at.regime + 1), mean, sigma, sigma, 0.5)[0][8] > 1


def test_failures_of_a_kind_are_not_averaged_away() -> None:
    """Hypotheses that fit all other runs must not outvote them."""
    x = under_equal_conditions(embeddings(50, 0))
    kinds = torch.cat([torch.zeros(30, 2), torch.full((20, 2), 9.0)]).double()
    at = x._replace(z=kinds)
    read, out, like = (GPInputs(*(column[part] for column in at)) for part in (slice(30), slice(30, 45), slice(45, 50)))
    sure = replace(GUESS, bias=0.05, linear=0.02, local=0.04, noise=0.02)
    bounds = Bounds(out, torch.full((15,), 0.3).double())
    found = condition_average(sure, read, 0.02 * torch.sin(9 * x.x[:30, 0]), as_shipped(first(read, 10)), bounds)
    assert sum(found.weights) == pytest.approx(1.0)
    assert found.at(like)[0].min() > 0.25
    assert found.at(read)[0].abs().max() < 0.05
    nothing_read = condition_average(GUESS, NOWHERE_OF_KINDS, NOWHERE.scale, bounds=Bounds(out, torch.zeros(15).double()))
    assert (nothing_read.at(out)[0] > 0).all()


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_more_failures_never_say_that_less_is_needed(noise: float) -> None:
    prior = ResidualPrior(bias=0.3, linear=1e-6, local=1e-6, length=1.0, noise=noise)
    new, means = under_equal_conditions(embeddings(1, 1)), []
    for number in (1, 2, 20, 60, 200):
        out = under_equal_conditions(embeddings(number, 0))
        bounds = Bounds(out, torch.full((number,), 0.3).double())
        means.append(condition(prior, NOWHERE, NOWHERE.scale, bounds=bounds).at(new)[0].item())
    assert means == sorted(means)


def test_slow_kernel_counts_by_its_share_of_a_network() -> None:
    x, shares = embeddings(40, 0), (embeddings(40, 1, width=4) + 1) / 4
    at = under_equal_conditions(x)._replace(kernels=shares)
    new = GPInputs(*(column[:2] for column in at))._replace(x=embeddings(2, 2) + 3, kernels=torch.eye(4).double()[:2])
    mean, _ = condition_average(replace(GUESS, kernels=1.0, linear=0.03), at, 0.8 * shares[:, 0]).at(new)
    assert mean[0].item() == pytest.approx(0.8, abs=0.15)
    assert abs(mean[1].item()) < 0.1


def two_kinds() -> tuple[torch.Tensor, torch.Tensor]:
    """Forty steps of each of two kinds."""
    one, other = (torch.cat([embeddings(40, seed, width=2), torch.full((40, 1), at)], 1) for seed, at in ((0, 1.0), (1, -1.0)))
    return one.double(), other.double()


def fitted_to(x: torch.Tensor, *, scale: float = 1.0) -> GPInputs:
    return as_shipped(under_equal_conditions(x))._replace(scale=x.new_full((len(x),), scale))


def test_known_steps_stay_while_others_are_learnt() -> None:
    measured, known = two_kinds()
    shipped = fitted_to(known[:20])
    at, new = under_equal_conditions(measured), under_equal_conditions(known[20:])
    y = 0.4 * measured[:, 0]
    forgetful, mindful = condition_average(GUESS, at, y), condition_average(GUESS, at, y, shipped)
    assert mindful.at(new)[0].abs().mean() < 0.7 * forgetful.at(new)[0].abs().mean()
    assert (mindful.at(at)[0] - y).abs().max() < 0.05


def test_machine_factor_is_learnt_beside_shipped_steps() -> None:
    measured, known = two_kinds()
    shipped = fitted_to(known[:20])
    some = torch.cat([measured[:20], known[20:25]])
    posterior = condition_average(GUESS, under_equal_conditions(some), torch.full((25,), 0.4).double(), shipped)
    assert (posterior.at(under_equal_conditions(known[25:]))[0] - 0.4).abs().mean() < 0.1


def test_factor_by_network_kind_holds_for_every_size() -> None:
    """On a known GPU, a factor learnt at one size carries over to larger networks."""
    x, kinds = embeddings(60, 0), torch.arange(3).repeat(20)
    at = under_equal_conditions(x)._replace(z=3 * kinds[:, None].expand(60, 2).double())
    y = torch.tensor([0.3, -0.2, 0.1]).double()[kinds]
    larger = GPInputs(*(column[:3] for column in at))._replace(x=embeddings(3, 1) + 3)
    shipped = fitted_to(x[:20])._replace(z=torch.full((20, 2), 9.0).double())
    errors = [(condition_average(GUESS, at, y, known).at(larger)[0] - y[:3]).abs().max() for known in (shipped, None)]
    assert errors[0] < 0.1 < errors[1]


def test_posterior_resists_five_absurd_runs() -> None:
    """Runs of one corner of the space do not move the rest of a known machine."""
    x, prior = embeddings(40, 0), replace(GUESS, bias=0.03, linear=0.01, local=0.025, noise=0.01, trust=0.1)
    known = under_equal_conditions(x)._replace(alternatives=-0.4 + 0.05 * embeddings(40, 1, width=2))
    corner = GPInputs(*(column[:5] for column in known))._replace(x=x[:5] / 10 + 2)
    y, others = torch.tensor([-0.5, -0.7, -0.6, -0.65, -0.55]).double(), GPInputs(*(column[20:] for column in known))
    moved = [
        condition_average(prior, corner, y, shipped).at(others)[0].abs().max() for shipped in (as_shipped(first(known, 20)), None)
    ]
    assert moved[0] < 0.05 < 0.3 < moved[1]
    plausible = condition_average(prior, corner, y / 10, as_shipped(first(known, 20)))
    assert plausible.at(others)[0].max() < -0.02  # as a driver moves it


@pytest.mark.parametrize("shift", [-0.3, -0.1, 0.25])
def test_posterior_adapts_to_machine_change(shift: float) -> None:
    """Ten runs of several kinds are enough, however sure the weights were."""
    prior = replace(GUESS, bias=0.004, linear=0.0015, local=0.0035, noise=0.0015)
    x, kinds = embeddings(60, 0), torch.arange(60).remainder(3)
    at = under_equal_conditions(x)._replace(z=6 * kinds[:, None].expand(60, 2).double())
    known, others = as_shipped(first(at, 30)), GPInputs(*(column[50:] for column in at))
    scatter = 0.003 * torch.randn(20, generator=torch.Generator().manual_seed(0)).double()
    measured = GPInputs(*(column[30:50] for column in at))
    error = [
        float((condition_average(prior, first(measured, n), shift + scatter[:n], known).at(others)[0] - shift).abs().max())
        for n in (10, 20)
    ]
    assert max(error) < 0.03


def test_measurement_overrides_a_shipped_step() -> None:
    x = embeddings(30, 0)
    y = 0.5 * torch.sign(x[:, 0])
    posterior = condition_average(GUESS, under_equal_conditions(x), y, fitted_to(x))
    assert (posterior.at(under_equal_conditions(x))[0] - y).abs().mean() < 0.05
    assert posterior.left_out().shape == (30,)


def test_summary_does_not_reduce_measurement_noise() -> None:
    x = under_equal_conditions(torch.zeros(20, 3, dtype=torch.float64))
    y = 0.3 * torch.where(torch.arange(20) % 2 == 0, 1.0, -1.0).double()
    shipped = fitted_to(embeddings(60, 0))
    assert condition(PRIOR, x, y, shipped).noise == pytest.approx(condition(PRIOR, x, y).noise, rel=0.1)


def test_surer_prediction_is_moved_less_by_others() -> None:
    measured, known = two_kinds()
    at, y = under_equal_conditions(measured), 0.4 * measured[:, 0]
    new, sure = under_equal_conditions(known[20:]), torch.full((20,), 0.2).double()
    alike = condition_average(GUESS, at, y, fitted_to(known[:20])).at(new)
    surer = condition_average(GUESS, at, y, fitted_to(known[:20], scale=0.2)).at(new._replace(scale=sure))
    assert surer[0].abs().mean() < 0.5 * alike[0].abs().mean()
    assert surer[1].mean() < alike[1].mean()
    constant = torch.full((40,), 0.4).double()
    of_the_machine = condition_average(GUESS, at, constant).at(under_equal_conditions(measured[:20])._replace(scale=sure))
    assert (of_the_machine[0] - 0.4).abs().max() < 0.1  # a factor of the machine is the same for all


def test_ten_readings_of_a_step_count_as_about_one() -> None:
    """Ten readings of one step say little more of other steps than one does."""
    x, new = embeddings(6, 0), under_equal_conditions(embeddings(20, 1))
    repeated, y = torch.cat([x, x[:1].expand(9, 3)]), torch.full((15,), 0.2).double()
    for share, most in ((0.9, 0.06), (0.0, 1.0)):
        prior = ResidualPrior(bias=0.3, linear=0.1, local=0.1, length=1.0, noise=0.3, of_the_step=share)
        once, often = (condition(prior, under_equal_conditions(at), y[: len(at)]) for at in (x, repeated))
        surer = (1 - latent_variance(often, new) / latent_variance(once, new)).mean()
        assert 0 <= surer < most
        assert (surer > 0.1) == (share == 0.0)
