"""Widens intervals until they hold: adaptive conformal inference.

A miss is a run outside of its 90% interval. Sigmas are multiplied by exp(gamma * sum(miss - 0.1)). This is adaptive conformal
inference on the logarithm of the width (Gibbs and Candes 2021). It is the quantile tracker of "conformal PID control"
(Angelopoulos et al. 2023). Over any n consecutive runs the share of misses is within (change of the log width) / (gamma n) of a
tenth, whatever the data. Forgiven misses are extra.

A miss is judged by the width that follows from the runs before it in the log. If runs follow each other, that is the width at
launch. Where many run at once, they do not each widen for the same miss. A run out of memory is a miss if the memory that it had
by then is above its interval. Otherwise it is not used.

After a detected shift (`change_point.py`), the widening by its runs is forgiven, because they are learnt as a new regime.
Without that, intervals would be as wide as the shift, and useless for fifty runs. At most six misses are forgiven within 200
runs. Where many run at once, those that were launched before the shift was detected widen as before.

No end of an interval is moved by more than a factor of ten (`predictor.widened_log_sigma`). That may be too little. If the
readings of one type of step also agree on no factor that could be learnt, the predictor does not fit what runs here. Then no
reading up to that run is learnt, and intervals are the predictor's own again.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence

from perfguard.learning.change_point import Shift
from perfguard.learning.config import DEFAULT_CONFIG, AssessmentConfig
from perfguard.learning.residuals import residual_of, step_type, unwidened_log_sigma
from perfguard.predictor import COVERAGE, HALF_INTERVAL, MOST_WIDENED, SIGMA_OF_MAD, Observation, Target, widened_log_sigma


class AdaptiveConformal:
    """Widens intervals until they hold; see the module's docstring.

    Args:
        config: gamma, the bounds of the width, and what is forgiven.
    """

    def __init__(self, config: AssessmentConfig = DEFAULT_CONFIG) -> None:
        self._config = config

    def widening(
        self, observations: Sequence[Observation], target: Target, judged: Sequence[int], shifts: Sequence[Shift]
    ) -> tuple[float, int | None]:
        """Return the factor on the next prediction's sigma, and the last run at which no width was enough (None: there was none).

        Args:
            observations: the runs of one device, from the oldest to the newest.
            target: which of their readings.
            judged: indices of the runs whose readings are believed. A suspect that was right counts as soon as another reading
                agrees with it.
            shifts: the detected shifts. The widening by their runs is undone as far as forgiveness is left.
        """
        config = self._config
        narrowest, widest = math.log(config.min_widening), math.log(config.max_widening)
        log_width = 0.0
        last_misfit: int | None = None
        residuals: defaultdict[Hashable, list[float]] = defaultdict(list)  # since then, by type of step
        moved: dict[int, float] = {}  # by each run
        forgiven: list[tuple[int, float]] = []
        undone = {shift.noticed: shift for shift in shifts}
        for number, index in enumerate(judged):
            is_missed = _is_missed(observations[index], target, math.exp(log_width))
            before = log_width
            if is_missed is not None:
                log_width += config.step_size * (is_missed - (1 - COVERAGE))
                log_width = min(max(log_width, narrowest), widest)
            moved[index] = log_width - before
            if index in undone:
                widened = sum(moved.pop(one, 0.0) for one in undone[index].runs)
                amount = min(max(widened, 0.0), self._left_to_forgive(forgiven, number))
                forgiven.append((number, amount))
                log_width -= amount
            residual = residual_of(observations[index], target)
            if residual is None:
                continue
            residuals[step_type(observations[index].graph)].append(residual)
            most = min(widest, math.log1p(MOST_WIDENED / HALF_INTERVAL / unwidened_log_sigma(observations[index], target)))
            if log_width >= most and HALF_INTERVAL * _scatter(list(residuals.values())) > MOST_WIDENED:
                last_misfit, log_width, moved = index, 0.0, {}
                residuals.clear()
        return math.exp(log_width), last_misfit

    def _left_to_forgive(self, forgiven: Sequence[tuple[int, float]], number: int) -> float:
        config = self._config
        recently = sum(amount for since, amount in forgiven if number - since < config.forgiven_within_runs)
        return config.forgiven_misses * config.step_size * COVERAGE - recently


def _scatter(groups: Collection[Sequence[float]]) -> float:
    """Standard deviation within the groups, from the median distance to the median of each group."""
    middles = map(statistics.median, groups)
    return SIGMA_OF_MAD * statistics.median(
        abs(value - middle) for middle, group in zip(middles, groups, strict=True) for value in group
    )


def _is_missed(observation: Observation, target: Target, width: float) -> bool | None:
    """Whether the run was outside of its own interval, made ``width`` times as wide; None: unknown.

    What was out of memory needed more than was read: above the interval if the reading is, and otherwise anywhere.
    """
    value, estimate = observation.measured(target), observation.predicted.get(target)
    if value is None or estimate is None:
        return None
    error = math.log(value / estimate.median)
    half = HALF_INTERVAL * widened_log_sigma(unwidened_log_sigma(observation, target), width)
    if observation.measurement.status == "ok":
        return abs(error) > half
    is_bound = target == "memory" and observation.measurement.status == "oom"
    return True if is_bound and error > half else None
