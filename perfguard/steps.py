"""Steps of a trial whose workload or dry run does not say how many there are: estimated from the trials that have finished."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from perfguard.predictor import COVERAGE, HALF_INTERVAL, Observation


class Steps(NamedTuple):
    """Optimizer steps of a whole trial."""

    number: int
    log_sigma: float = 0.0
    """Standard deviation of the number's logarithm. 0: the number is known."""
    remark: str = ""
    """Where an unsure number comes from."""


def steps_of_finished(runs: Sequence[Observation], *, study: str, steps_per_epoch: int | None) -> Steps | None:
    """Return the steps of the next trial, as unsure as the finished trials of its study disagree. None: there is none.

    Let x be the logarithms of the steps of k finished trials, and m their median. The 90% interval of the next logarithm is

        m ± ((k + 1) / (k - 1) d + log(2) / k),    d: the ceil(0.9 (k + 1))-th smallest |x - m|, or the largest

    The quantile d is that of split conformal prediction (Lei et al. 2018). The factor makes the range of a few uniform draws the
    range that they come from. The last term is for what few trials cannot show: one trial says the number up to a factor of two.

    With another batch size, a trial that counts epochs makes other steps, and one that counts steps does not. Which of the two
    this study does, its trials show by agreeing in epochs or in steps. Each unit weighs as the likelihood of a normal
    distribution with its sigma, sigma ** -k. The result has the mean and the variance of the mixture.

    Args:
        runs: of the device. Those that were cut short are left out, because they would have made more steps.
        study: the study of the trial. Empty: none, so nothing is known.
        steps_per_epoch: of the next trial. None: unknown.
    """
    runs = [run for run in runs if study and run.study == study and run.measurement.has_result and run.measurement.num_steps]
    if not (number := len(runs)):
        return None
    logs = [math.log(run.measurement.num_steps) for run in runs]
    ratios = [math.log(steps_per_epoch / run.steps_per_epoch) if steps_per_epoch and run.steps_per_epoch else 0.0 for run in runs]
    (in_steps, sigma) = _next_of(logs)
    (in_epochs, other) = _next_of([a + b for a, b in zip(logs, ratios, strict=True)])
    share = 1 / (1 + math.exp(min(700.0, number * math.log(other / sigma))))  # of epochs
    mean = in_steps + share * (in_epochs - in_steps)
    variance = (1 - share) * sigma**2 + share * other**2 + share * (1 - share) * (in_epochs - in_steps) ** 2
    steps = max(1, round(math.exp(mean)))
    remark = f"steps: about {steps:,}, from {number} finished trial{'' if number == 1 else 's'}"
    return Steps(steps, math.sqrt(variance), remark)


def _next_of(logs: Sequence[float]) -> tuple[float, float]:
    """Median and standard deviation of the next of ``logs``."""
    number = len(logs)
    median = statistics.median(logs)
    distances = sorted(abs(value - median) for value in logs)
    quantile = distances[min(number, math.ceil(COVERAGE * (number + 1))) - 1]
    half = (number + 1) / max(1, number - 1) * quantile + math.log(2) / number
    return median, half / HALF_INTERVAL
