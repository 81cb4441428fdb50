"""The residual of the predictor, as a Gaussian process that learns from a handful of runs.

Notation (Rasmussen and Williams 2006, chapter 2, and 3.3 for the robust likelihood):
    X  (n, d)  embeddings of the observed graphs      y  (n,)  log(measured / predicted)
    Z  (n, f)  what the graphs spend their time on    r  (n,)  regimes: runs under equal conditions have equal numbers
    V  (n, g)  shares of kernels of each kind, that differ by layout and compiling
    P  (n, e)  distances of alternative predictions from the prediction: physics, the networks alone, the trees alone
    q  (n,)    scales: 1, or less where the predictor is far surer than of the runs that were measured
    K  = bias² (1 - s + s [r = r']) + q q' · (linear² · X Xᵀ / d + trust² · P Pᵀ
         + local² · exp(-(‖x - x'‖² / d / length² + ‖z - z'‖² / f / reach²) / 2)
         + kind² · exp(-‖z - z'‖² / f / reach² / 2) + kernels² · V Vᵀ)
    W  = diag(noise² q² / w). A Student-t likelihood gives each observation its weight w, so one absurd reading moves nothing.

The terms describe how a new setting differs. The term bias² is a constant factor (another machine), and a share s of its
variance belongs to these conditions alone (another driver). The term linear² is a trend (wider networks are slower). The term
local² is for neighbours, which are alike in size and composition (the sampler returns to a region). The term kind² is a factor
of each kind of network, whatever its size. The term kernels² is a factor of each kind of kernel (grouped convolutions in
channels-last). It moves a network by its share of such kernels. The term trust² moves the
prediction towards an alternative that is right where the prediction is not (physics far outside of the data).

A share o of the noise's variance belongs to a step and not to its readings. After k readings of a step under these conditions,
the fraction w = o / (o + (1 - o) / k) of its own deviation is known. If its readings scatter by more than the rest of the noise
allows, so may the next. For other steps, k readings of one step are worth little more than one. So each counts as if its noise
were 1 + o (k - 1) times as large. A step that ran out of memory has no reading. It is known to need more than it had, under any
conditions.

Runs of one family of networks must not erase what the predictor knew of the device. So a summary of its training data stands
before the runs, as measurements with residuals of 0, in a regime of its own. Then a new residual more likely belongs to a kind
of network than to the machine. The machine's factor can still be learnt. In the other terms, a shipped step and a measured one
have a share c in common. So K's second term is multiplied by c, and s by three quarters. Where they contradict each other, the
measurement counts. The predictor may be far surer of a step than of the measured ones: its inference was in the training data,
and its training was not. Then the measured steps move it less.

The sizes of the terms differ between settings, and five runs do not determine them. So a process with a guessed prior is an
average over hypotheses (`hypotheses`). The weight of a hypothesis is how well it predicts every run from all others. It is a
leave-one-out pseudo-likelihood (Geisser and Eddy 1979; Rasmussen and Williams 2006, 5.4.2). Errors have a Laplace distribution
of unknown width, m is their mean absolute value, and π is the prior plausibility of the hypothesis:
    p ∝ π m^-n
Five similar runs can be explained by an absurd factor of the machine as well as by any other term. So on a known GPU, a
hypothesis is less likely the further it moves the machine as a whole, in standard deviations. Its weight is multiplied by
exp(-αᵀ M α / 2). Here M is the part of K from the constant factor and the alternatives, and α = (K + W)^-1 y. A few runs can
outweigh this factor, because drivers do change. Steps that ran out of memory count by how likely that was, given all others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from perfguard.predictor import SIGMA_OF_MAD

_DEGREES_OF_FREEDOM = 4.0
_REWEIGHTINGS = 3
_SWEEPS, _SWEEP = 6, 0.5
"""Number of sweeps over the bounds, and the damping of each update. A single bound needs a single sweep."""
_MOST_UNLIKELY = 15.0
"""The largest penalty for moving a known machine, in nats. A run that the move explains contributes three or four."""
_MOST_OF_A_BOUND = 4.0
"""The largest contribution of one bound, in nats."""
_OF_THE_REGIME, _OF_THE_REGIME_WHERE_KNOWN = 0.5, 0.2
"""Share of the constant factor's variance that a change of conditions draws anew. The share is smaller on a GPU that the
predictor was fitted to."""
_FROM_SHIPPED = 0.75
"""Share of a full change of conditions between the predictor's training data and a measured run."""
_NEARER = 0.5
"""Factor on the length scale for a setting that is more particular than the prior."""
_PLAUSIBLE = 0.01
"""Prior plausibility of a factor for each kind of network. It is low because five runs of a kind can agree by chance."""
_SAME = 1e-5
"""Runs that are nearer than that are runs of one step."""
_JITTER = 1e-9
_NOTHING_BELOW = -30.0
_LARGEST_ERROR = 1.0
_ERROR_BEFORE, _ROWS_BEFORE = 0.3, 2.0
"""Prior error of a hypothesis, in standard deviations of the residual, and its weight in runs."""
_SHIPPED = -1.0
"""The regime of the predictor's training data."""
_IN_COMMON = 0.9
"""Correlation between training data and measured runs. Smaller: the shipped knowledge of a GPU is lost sooner. Larger: the
process adapts to a change more slowly."""
_JUDGED = 200
"""Number of newest readings that score the hypotheses."""
_UNLIKELY = 0.01


class GPInputs(NamedTuple):
    """Inputs of the process for n runs."""

    x: torch.Tensor  # shape: (n, d)
    z: torch.Tensor  # shape: (n, f)
    kernels: torch.Tensor  # shape: (n, g)
    alternatives: torch.Tensor  # shape: (n, e)
    regime: torch.Tensor  # shape: (n,)
    scale: torch.Tensor  # shape: (n,)
    setting: torch.Tensor
    """A number for each combination of switches (cuDNN's benchmark mode, a precision), for those without a column. Shape: (n,)"""
    memorised: torch.Tensor
    """Prediction with the run in the training rows minus the prediction without it, if the residual is from the latter.
    Shape: (n,)"""


def joined(parts: list[GPInputs]) -> GPInputs:
    """Concatenate ``parts`` along the runs."""
    return GPInputs(*(torch.cat(column) for column in zip(*parts, strict=True)))


def as_shipped(inputs: GPInputs) -> GPInputs:
    """Return ``inputs`` in the regime of the predictor's training data."""
    return inputs._replace(regime=torch.full_like(inputs.regime, _SHIPPED))


def under_equal_conditions(x: torch.Tensor) -> GPInputs:
    """Inputs of runs at ``x`` (n, d) in one regime, without other features."""
    nothing, zero = x.new_zeros((len(x), 0)), x.new_zeros(len(x))
    return GPInputs(x, nothing, nothing, nothing, zero, x.new_ones(len(x)), zero, zero)


class Pairs(NamedTuple):
    """Products and distances between m runs and n others. All hypotheses share them. Shapes: (m, n)"""

    changed: torch.Tensor
    """0: the same conditions; 1: others"""
    in_common: torch.Tensor
    """Factor on all terms of the kernel but the constant one."""
    linear: torch.Tensor
    kernels: torch.Tensor
    alternatives: torch.Tensor
    apart2: torch.Tensor
    """‖x - x'‖² / d"""
    apart_in_kind2: torch.Tensor
    """‖z - z'‖² / f"""
    same_step: torch.Tensor
    """Whether both are runs of one step."""

    @property
    def are_same(self) -> torch.Tensor:
        """Whether both are runs of one step under the same conditions."""
        return self.same_step & (self.changed == 0)


def beside(a: GPInputs, b: GPInputs) -> Pairs:
    """Compare each run of ``a`` with each run of ``b``."""
    width, shares = a.x.shape[1], max(a.z.shape[1], 1)
    one_is_shipped = ((a.regime == _SHIPPED)[:, None] != (b.regime == _SHIPPED)[None, :]).to(a.x.dtype)
    other_regime = (a.regime[:, None] != b.regime[None, :]).to(a.x.dtype)
    x2, z2 = torch.cdist(a.x, b.x).square(), torch.cdist(a.z, b.z).square()
    apart = x2 + z2 + torch.cdist(a.alternatives, b.alternatives).square()
    return Pairs(
        other_regime * (1 - (1 - _FROM_SHIPPED) * one_is_shipped),
        (1 - (1 - _IN_COMMON) * one_is_shipped) * a.scale[:, None] * b.scale[None, :],
        (a.x @ b.x.T) / width,
        a.kernels @ b.kernels.T,
        a.alternatives @ b.alternatives.T,
        x2 / width,
        z2 / shares,
        (apart < _SAME**2) & (a.setting[:, None] == b.setting[None, :]),
    )


@dataclass(frozen=True, slots=True)
class ResidualPrior:
    """Standard deviations of the kernel's terms, in logarithms, and length scales.

    Attributes:
        plausible: its prior plausibility among the hypotheses.
        of_the_regime: share of the constant factor's variance that belongs to one regime. A change of conditions draws it anew.
        of_the_step: share of the noise's variance that belongs to the step. All readings of the step have it in common.
        guessed: whether the terms' shares are a guess. Then other shares are tried, too.
    """

    bias: float
    linear: float
    local: float
    length: float
    noise: float
    trust: float = 0.0
    reach: float = 1.0
    kernels: float = 0.0
    kind: float = 0.0
    plausible: float = 1.0
    of_the_regime: float = _OF_THE_REGIME
    of_the_step: float = 0.0
    guessed: bool = False

    def kernel(self, pairs: Pairs) -> torch.Tensor:
        """Covariance of the residual between m and n runs. Shape: (m, n)."""
        return self.of_the_machine(pairs) + self.of_networks(pairs)

    def of_networks(self, pairs: Pairs) -> torch.Tensor:
        """The part of the kernel that differs between networks. Shape: (m, n)."""
        in_kind2 = pairs.apart_in_kind2 / (2 * self.reach**2)
        smooth = self.linear**2 * pairs.linear + self.kernels**2 * pairs.kernels
        smooth = smooth + self.local**2 * torch.exp(-pairs.apart2 / (2 * self.length**2) - in_kind2)
        if self.kind > 0:
            smooth = smooth + self.kind**2 * torch.exp(-in_kind2)
        return pairs.in_common * smooth

    def of_the_machine(self, pairs: Pairs) -> torch.Tensor:
        """The part of the kernel that all networks share: the constant factor and the alternatives. Shape: (m, n)."""
        constant = self.bias**2 * (1 - self.of_the_regime * pairs.changed)
        return constant + pairs.in_common * self.trust**2 * pairs.alternatives

    def variance(self, at: GPInputs) -> torch.Tensor:
        """Prior variance of the smooth part for n runs: the kernel's diagonal. Shape: (n,)."""
        linear = self.linear**2 * at.x.square().mean(1) + self.kernels**2 * at.kernels.square().sum(1)
        smooth = linear + self.trust**2 * at.alternatives.square().sum(1) + self.local**2 + self.kind**2
        return self.bias**2 + at.scale.square() * smooth

    def before(self, x: torch.Tensor) -> torch.Tensor:
        """Prior variance of the residual of n runs, noise included. The terms for alternatives and kernels are left out, as for
        the held-out runs that the prior was fitted to. Shape: (n,)."""
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
    """Number of shipped steps. They come first."""
    num_bounds: int
    """Number of steps with a bound instead of a reading. They come last."""
    seen: GPInputs
    y: torch.Tensor  # shape: (n,)
    reading_weights: torch.Tensor
    """Weight of each reading among the readings of its step. Shape: (n,)"""
    own2: torch.Tensor
    """Diagonal of W. Shape: (n,)"""
    cholesky: torch.Tensor  # shape: (n, n)
    alpha: torch.Tensor  # shape: (n,)
    precision: torch.Tensor
    """Diagonal of the inverse of K + W. Shape: (n,)"""
    noise: float
    """Noise level, at a scale of 1, after seeing how well the observations agree."""
    moved2: float
    """Squared shift of the whole machine, in prior standard deviations."""

    @property
    def regime(self) -> torch.Tensor:
        """Regime of the next runs. Shape: ()."""
        return self.seen.regime.max()

    def at(self, inputs: GPInputs, pairs: Pairs | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of the residual of m new measurements. Shapes: (m,), (m,).

        Args:
            inputs: inputs of the measurements.
            pairs: the inputs compared with the observations, if that is computed already.
        """
        pairs = beside(inputs, self.seen) if pairs is None else pairs
        cross = self.prior.kernel(pairs)  # shape: (m, n)
        half = torch.linalg.solve_triangular(self.cholesky, cross.T, upper=False)  # shape: (n, m)
        mean, variance = cross @ self.alpha, self.prior.variance(inputs) - half.square().sum(0)
        same = pairs.are_same.to(self.y.dtype)
        same[:, len(self.y) - self.num_bounds :] = 0
        same = same * self.reading_weights
        number = same.sum(1)
        share = self.prior.of_the_step
        known_share = number * share / (number * share + 1 - share)
        own = self.y - self.seen.memorised
        read = same @ own / number.clamp_min(1)
        noise2 = self.noise**2 * inputs.scale.square()
        apart2 = (same @ own.square() - number * read.square()).clamp_min(0)  # readings of one step, from their mean
        more = (number - 1).clamp_min(0)
        of_readings2 = (_DEGREES_OF_FREEDOM * (1 - share) * noise2 + apart2) / (_DEGREES_OF_FREEDOM + more)
        beyond2 = (of_readings2 - (1 - share) * noise2).clamp_min(0) * (1 + 1 / number.clamp_min(1)) * (known_share > 0)
        smooth2 = variance.clamp_min(0) * (1 - known_share).square()
        return mean + known_share * (read - mean), (smooth2 + (1 - share * known_share) * noise2 + beyond2).sqrt()

    def left_out(self) -> torch.Tensor:
        """Leave-one-out residual of each measured run (Rasmussen and Williams 2006, eq. 5.12).

        Returns:
            Observation minus the prediction from all others. Shape: (n - num_shipped - num_bounds,).
        """
        return (self.alpha / self.precision)[self.num_shipped : len(self.y) - self.num_bounds]

    def likelihood_of_bounds(self, least: torch.Tensor) -> float:
        """Log probability that each bounded step needs at least ``least`` (b,), given all others."""
        mean, sigma = self.of_bounds()
        return float(torch.special.log_ndtr((mean - least) / sigma).clamp_min(-_MOST_OF_A_BOUND).sum())

    def of_bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of a reading of each bounded step, without its bound. Shapes: (b,), (b,)."""
        some, noise2 = slice(len(self.y) - self.num_bounds, None), (self.prior.noise * self.seen.scale).square()
        return _by_others(self.y[some], self.alpha[some], self.precision[some], self.own2[some], noise2[some])


class Bounds(NamedTuple):
    """Lower bounds on the memory of b runs that ran out of memory."""

    at: GPInputs
    least: torch.Tensor  # shape: (b,)
    """Bounds as residuals; -inf where another run has refuted the bound."""


def condition(
    prior: ResidualPrior, seen: GPInputs, y: torch.Tensor, shipped: GPInputs | None = None, bounds: Bounds | None = None
) -> ResidualPosterior:
    """Condition the process on residuals ``y`` (n,) of the runs ``seen``, on a summary, and on bounds of other runs.

    All tensors are in double precision.
    """
    posteriors = _read([prior], seen, y, shipped)
    return (posteriors if bounds is None else _bounded(posteriors, bounds))[0]


def _read(priors: Sequence[ResidualPrior], seen: GPInputs, y: torch.Tensor, shipped: GPInputs | None) -> list[ResidualPosterior]:
    """:func:`condition` for each of ``priors``, without bounds."""
    num_shipped = 0
    if shipped is not None:
        num_shipped = len(shipped.x)
        seen, y = joined([shipped, seen]), torch.cat([y.new_zeros(num_shipped), y])
    pairs, none = beside(seen, seen), torch.zeros_like(y)
    return [_conditioned(prior, seen, pairs, y, none, num_shipped) for prior in priors]


def _bounded(posteriors: list[ResidualPosterior], bounds: Bounds) -> list[ResidualPosterior]:
    """Condition ``posteriors`` on ``bounds``, too. All have the same readings, and no bounds yet."""
    if not (stands := bounds.least > -math.inf).any():
        return posteriors
    out, least = GPInputs(*(column[stands] for column in bounds.at)), bounds.least[stands]
    before = posteriors[0]
    to_seen, among = beside(out, before.seen), beside(out, out)
    readings = [_as_readings_of_all(posterior, out, to_seen, among, least) for posterior in posteriors]
    seen, none = joined([before.seen, out]), torch.zeros_like(before.y)
    pairs = beside(seen, seen)
    return [
        _conditioned(each.prior, seen, pairs, torch.cat([each.y, read]), torch.cat([none, noise2]), each.num_shipped, len(least))
        for each, (read, noise2) in zip(posteriors, readings, strict=True)
    ]


def _as_readings_of_all(
    posterior: ResidualPosterior, out: GPInputs, to_seen: Pairs, among: Pairs, least: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Approximate b lower bounds ``least`` (b,) by Gaussian readings: their values and variances.

    Each reading gives its step the mean and the variance that follow from its bound and from all others. This is expectation
    propagation (Minka 2001). It updates all bounds at once, and is damped because they are much alike. Where many bounds agree,
    the result is a third too sure. Shapes: (b,), (b,)
    """
    prior = posterior.prior
    cross = prior.kernel(to_seen)
    half = torch.linalg.solve_triangular(posterior.cholesky, cross.T, upper=False)
    mean, covariance = cross @ posterior.alpha, prior.kernel(among) - half.T @ half
    noise2, alike = (prior.noise * out.scale).square(), 1 + prior.of_the_step * (among.are_same.sum(1) - 1)
    cavity = mean, (covariance.diagonal() + noise2).sqrt()
    natural = torch.zeros(2, len(least)).to(mean)  # natural parameters: the precision, and precision times reading
    for change in [_SWEEP] * _SWEEPS if len(least) > 1 else [1.0]:
        read, more_noise2 = as_readings(least, *cavity)
        natural = (1 - change) * natural + change * torch.stack([1 / more_noise2, read / more_noise2])
        read, more_noise2 = natural[1] / natural[0], 1 / natural[0]
        own2 = (noise2 + more_noise2) * alike + _JITTER
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(covariance + torch.diag(own2)))
        cavity = _by_others(read, inverse @ (read - mean), inverse.diagonal(), own2, noise2)
    return read, more_noise2


def _by_others(
    y: torch.Tensor, alpha: torch.Tensor, precision: torch.Tensor, own2: torch.Tensor, noise2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Leave-one-out mean and standard deviation of each of ``y`` (Rasmussen and Williams 2006, eq. 5.12).

    The standard deviation is that of a reading with noise ``noise2``. All shapes: (b,).
    """
    return y - alpha / precision, (1 / precision - own2 + noise2).clamp_min(_JITTER).sqrt()


def _conditioned(
    prior: ResidualPrior,
    seen: GPInputs,
    pairs: Pairs,
    y: torch.Tensor,  # shape: (n,)
    more_noise2: torch.Tensor,  # shape: (n,)
    num_shipped: int,
    num_bounds: int = 0,
) -> ResidualPosterior:
    same, is_read = pairs.are_same, torch.arange(len(y)) < len(y) - num_bounds
    same = same & (is_read[:, None] == is_read[None, :])
    alike = 1 + prior.of_the_step * (same.sum(1) - 1)  # for other steps, k readings count as one
    machine = prior.of_the_machine(pairs)
    covariance, noise2_of = machine + prior.of_networks(pairs), (prior.noise**2 * seen.scale.square() + more_noise2) * alike
    weights = torch.ones_like(y)
    for remaining in reversed(range(_REWEIGHTINGS + 1)):
        own2 = noise2_of / weights + _JITTER
        cholesky = torch.linalg.cholesky(covariance + torch.diag(own2))
        precision = torch.cholesky_inverse(cholesky).diagonal()
        alpha = torch.cholesky_solve(y[:, None], cholesky)[:, 0]
        error = own2 * alpha  # what the smooth part leaves over: y - K alpha
        if remaining:
            variance = (own2 - own2.square() * precision).clamp_min(0)  # of the smooth part, at the observations themselves
            weights = (_DEGREES_OF_FREEDOM + 1) / (_DEGREES_OF_FREEDOM + error.square() / (noise2_of + variance))
            weights = torch.where(is_read, weights, weights.clamp_max(1.0))
    read = slice(num_shipped, len(y) - num_bounds)
    of_noise = (weights / alike)[read]
    noise2 = _DEGREES_OF_FREEDOM * prior.noise**2 + (of_noise * (error / seen.scale)[read].square()).sum()
    noise = max(float((noise2 / (_DEGREES_OF_FREEDOM + of_noise.sum())).sqrt()), 0.5 * prior.noise)
    reading_weights = _reading_weights(y - seen.memorised, same, (1 - prior.of_the_step) * noise**2 * seen.scale.square())
    moved2 = float(alpha @ machine @ alpha)
    return ResidualPosterior(
        prior, num_shipped, num_bounds, seen, y, reading_weights, own2, cholesky, alpha, precision, noise, moved2
    )


def _reading_weights(own: torch.Tensor, same: torch.Tensor, noise2: torch.Tensor) -> torch.Tensor:
    """The weight of each reading among the readings of its step, by its distance from their median.

    If three readings agree and one is absurd, the three count. Shapes: (n,), (n, n), (n,) to (n,).
    """
    reading_weights = torch.ones_like(own)
    several = same.sum(1) > 2  # of two readings, either may be wrong
    if several.any():
        readings = torch.where(same[several], own, math.nan)
        median = readings.nanquantile(0.5, dim=1, keepdim=True)
        scatter = SIGMA_OF_MAD * (readings - median).abs().nanquantile(0.5, dim=1)
        apart2 = (own[several] - median[:, 0]).square() / torch.maximum(noise2[several], scatter.square())
        reading_weights[several] = ((_DEGREES_OF_FREEDOM + 1) / (_DEGREES_OF_FREEDOM + apart2)).clamp_max(1.0)
    return reading_weights


def hypotheses(prior: ResidualPrior, *, knows: bool = False) -> tuple[ResidualPrior, ...]:
    """The hypotheses on a setting, as priors.

    A setting may be like the prior. If the prior is a guess, a setting may also be more particular. It may be a constant factor
    and little else. Or there is nothing to learn, because the predictor is right and the rest is scatter.

    On a GPU that the predictor ``knows``, a new residual more likely belongs to a kind of network of any size than to the
    machine.
    """
    if not prior.guessed:
        return (prior,)
    particular, alone, total = replace(prior, reach=_NEARER * prior.reach), replace(prior, trust=0.0, kernels=0.0), prior.total
    if knows:
        particular = replace(particular, kind=total, plausible=_PLAUSIBLE)
    found = (
        prior,
        particular,
        replace(alone, bias=0.9 * total, linear=0.1 * total, local=0.05 * total, noise=0.1 * total),
        replace(alone, bias=0.0, linear=0.0, local=0.0, noise=total),
    )
    return tuple(replace(one, of_the_regime=_OF_THE_REGIME_WHERE_KNOWN) for one in found) if knows else found


@dataclass(frozen=True, slots=True)
class ResidualAverage:
    """Posteriors of several hypotheses. Their weights add up to one."""

    prior: ResidualPrior
    posteriors: Sequence[ResidualPosterior]
    weights: Sequence[float]
    bounds: Bounds | None = None

    @property
    def regime(self) -> torch.Tensor:
        """Regime of the next runs. Shape: ()."""
        return self.posteriors[0].regime

    def at(self, inputs: GPInputs, *, times: torch.Tensor | float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of the mixture for m new measurements. Shapes: (m,), (m,).

        Args:
            inputs: inputs of the measurements.
            times: factor on the standard deviation of each hypothesis. It is for steps that are harder or easier than those that
                the process was made for. The distance between hypotheses does not change.
        """
        pairs = beside(inputs, self.posteriors[0].seen)  # all have the same observations
        found = [posterior.at(inputs, pairs) for posterior in self.posteriors]
        mean, square = torch.zeros(len(inputs.x)).double(), torch.zeros(len(inputs.x)).double()
        for weight, (own_mean, own_sigma) in zip(self.weights, found, strict=True):
            mean = mean + weight * own_mean
            square = square + weight * ((times * own_sigma).square() + own_mean.square())
        return mean, (square - mean.square()).clamp_min(0).sqrt()

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
        least = torch.where(beside(inputs, self.bounds.at).same_step, self.bounds.least, -math.inf).amax(1)
        before = torch.where(least > mean, before.clamp_min(refuted), before)
        mean = torch.maximum(mean, least)
        above = expected_above(least, mean, torch.maximum(sigma, before))
        return above, torch.maximum(sigma, above - mean)

    def left_out(self) -> torch.Tensor:
        """See :meth:`ResidualPosterior.left_out`."""
        parts = [weight * posterior.left_out() for weight, posterior in zip(self.weights, self.posteriors, strict=True)]
        return torch.stack(parts).sum(0)


def condition_average(
    prior: ResidualPrior, seen: GPInputs, y: torch.Tensor, shipped: GPInputs | None = None, bounds: Bounds | None = None
) -> ResidualAverage:
    """Condition an average over hypotheses on residuals ``y`` (n,) of the runs ``seen``, from the oldest to the newest.

    All tensors are in double precision.

    Args:
        prior: the prior before any measurement.
        seen: the runs.
        y: their residuals.
        shipped: steps of the predictor's training data. Their residuals are 0.
        bounds: lower bounds from runs that were out of memory.
    """
    begin = max(0, len(y) - _JUDGED)
    tried, newest = hypotheses(prior, knows=shipped is not None), GPInputs(*(column[begin:] for column in seen))
    if not len(y):  # no hypothesis and no alternative is known to be better
        tried = (replace(tried[0], trust=0.0, kernels=0.0),)
    posteriors = _read(tried, newest, y[begin:], shipped)
    number, before = len(y) - begin, _ROWS_BEFORE * _ERROR_BEFORE * prior.total
    errors = [float(each.left_out().abs().clamp_max(_LARGEST_ERROR).sum()) for each in posteriors]
    scores = [
        math.log(hypothesis.plausible) - number * math.log((error + before) / (number + _ROWS_BEFORE))
        for hypothesis, error in zip(tried, errors, strict=True)
    ]
    if shipped is not None:
        scores = [score - min(one.moved2 / 2, _MOST_UNLIKELY) for score, one in zip(scores, posteriors, strict=True)]
    if bounds is not None:
        posteriors = _bounded(posteriors if begin == 0 else _read(tried, seen, y, shipped), bounds)
        least = bounds.least[bounds.least > -math.inf]
        scores = [score + one.likelihood_of_bounds(least) for score, one in zip(scores, posteriors, strict=True)]
    shares = [math.exp(score - max(scores)) for score in scores]
    likely = [index for index, share in enumerate(shares) if share > _UNLIKELY]
    if begin > 0 and bounds is None:
        posteriors = _read([tried[index] for index in likely], seen, y, shipped)
    else:
        posteriors = [posteriors[index] for index in likely]
    total = sum(shares[index] for index in likely)
    return ResidualAverage(prior, posteriors, [shares[index] / total for index in likely], bounds)


def as_readings(bound: torch.Tensor, mean: torch.Tensor, sigma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Readings and variances that are equivalent to a lower ``bound`` on a normal variable.

    Conditioned on them, the variable has the mean and variance that it has above the bound. All shapes: (n,).
    """
    z = ((bound - mean) / sigma).clamp_min(_NOTHING_BELOW)
    ratio = _mills(z)
    narrowed = (ratio * (ratio - z)).clamp(_JITTER, 1 - _JITTER)  # share of the variance that the bound takes away
    return mean + sigma / (ratio - z), sigma.square() * (1 / narrowed - 1)


def expected_above(bound: torch.Tensor, mean: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """Mean of a normal variable that is known to exceed ``bound``; -inf: nothing is known. All shapes: (n,)."""
    return mean + sigma * _mills((bound - mean) / sigma)


def _mills(z: torch.Tensor) -> torch.Tensor:
    """The inverse Mills ratio: the mean of a standard normal variable above ``z``. From (n,) to (n,)."""
    ratio: torch.Tensor = math.sqrt(2 / math.pi) / torch.special.erfcx(z / math.sqrt(2))
    return ratio
