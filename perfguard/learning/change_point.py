"""Change points: where conditions changed. A regime is a set of runs under equal conditions.

A new regime begins with a driver, framework or card behind the same name that was not there before. Two machines that write in
turn are two regimes. A new regime also begins where the z of one regime shift for good. The test is Page's cumulative sum of z -
k, with k one (Page 1954).

Each z uses the interval before it was widened (`conformal.py`), because a shift widens intervals and would hide itself. Its unit
is the scatter of the z before the sum began. Four or five runs of a factor of two show it where times scatter by a tenth. The
shift began where a mean other than zero explains the sum best (Hinkley 1970).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from perfguard.learning.config import DEFAULT_CONFIG, AssessmentConfig
from perfguard.learning.residuals import NOUNS, residual_of
from perfguard.predictor import SIGMA_OF_MAD, Observation, Target
from perfguard.quantities import format_bytes


@dataclass(frozen=True, slots=True)
class Drift:
    """A change of conditions after which runs cost more or less than before."""

    first: Observation
    """The first run of the new regime."""
    reason: str
    """The change, in words."""
    noticed: Observation
    """The run that showed the change."""


class Shift(NamedTuple):
    """A permanent shift of the errors, as indices of runs."""

    runs: Sequence[int]
    """The runs that moved, up to the one that showed it."""
    drift: Drift

    @property
    def noticed(self) -> int:
        """The run that showed the shift."""
        return self.runs[-1]


def number_conditions(observations: Sequence[Observation]) -> tuple[list[int], list[Drift]]:
    """Return a number for the conditions of each run, from 0, and a drift for each change to conditions that are new.

    A run without a driver, framework or device has those of the run before it.

    Args:
        observations: the runs of one device, from the oldest to the newest.
    """
    known: dict[str, str] = {}
    seen: dict[frozenset[tuple[str, str]], int] = {}
    number, numbers, drifts = 0, [], []
    for observation in observations:
        measurement = observation.measurement
        conditions = {
            "driver": measurement.driver,
            "framework": measurement.framework,
            "device": measurement.device_name,
            "memory of the device": format_bytes(observation.device.memory_bytes),
        }
        changed = [
            f"{name}: {known[name]} is now {value}"
            for name, value in conditions.items()
            if value and known.get(name, value) != value
        ]
        known |= {name: value for name, value in conditions.items() if value}
        all_known = frozenset(known.items())
        if changed and all_known not in seen:
            drifts.append(Drift(observation, "; ".join(changed), observation))
        if changed:
            number = seen.get(all_known, max(seen.values()) + 1)
        seen.setdefault(all_known, number)
        numbers.append(number)
    return numbers, drifts


class ChangePointDetector:
    """Page's test on the z of runs under equal conditions; see the module's docstring.

    Args:
        config: slack, alarm and clip of the sum, and from how many runs it is taken.
    """

    def __init__(self, config: AssessmentConfig = DEFAULT_CONFIG) -> None:
        self._config = config

    def shifts(self, observations: Sequence[Observation], target: Target, believed: Sequence[int]) -> list[Shift]:
        """Return where the errors of ``target`` moved for good.

        Args:
            observations: the runs of one device, from the oldest to the newest.
            target: which of their readings.
            believed: indices of the runs to test. All ran under equal conditions.
        """
        config = self._config
        found: list[Shift] = []
        stretch: list[tuple[int, float]] = []
        begun = {1.0: 0, -1.0: 0}  # upwards and downwards
        for index in believed:
            residual = residual_of(observations[index], target)
            if residual is None:
                continue
            z = residual / observations[index].predicted[target].log_sigma
            stretch.append((index, z * observations[index].widening.get(target, 1.0)))
            if len(stretch) <= config.settled_runs:
                begun = dict.fromkeys(begun, len(stretch))
                continue
            for sign, start in begun.items():
                before = [other for _, other in stretch[max(0, start - config.scale_runs) : start]]
                least = min(1.0, observations[stretch[start - 1][0]].widening.get(target, 1.0))
                steps = self._in_scatters(before, [sign * other for _, other in stretch[start:]], least)
                total = sum(steps) - config.drift_slack_sigmas * len(steps)
                if total <= 0:
                    begun[sign] = len(stretch)
                elif total > config.drift_alarm_sigmas:
                    moved = [other for other, _ in stretch[start + _likeliest_begin(steps) :]]
                    drift = Drift(observations[moved[0]], _reason(observations, target, moved), observations[index])
                    found.append(Shift(moved, drift))
                    stretch = []
                    break
        return found

    def _in_scatters(self, before: Sequence[float], since: Sequence[float], least: float) -> list[float]:
        """The z ``since`` Page's sum was zero, clipped, in units of their scatter.

        The scatter is that of the z ``before``, or from one z to the next if that is more, because where errors merely scatter
        more nothing has shifted. It is at ``least`` what intervals had come to.
        """
        scatter = statistics.median(map(abs, before))
        if len(since) > 1:
            scatter = max(scatter, statistics.median(abs(b - a) for a, b in pairwise(since)) / math.sqrt(2))
        scale, clip = max(least, SIGMA_OF_MAD * scatter), self._config.drift_clip_sigmas
        return [min(max(z / scale, -clip), clip) for z in since]


def _likeliest_begin(steps: Sequence[float]) -> int:
    """Index in ``steps`` from which a mean other than zero explains them best. The sum may have grown a bit before the shift."""
    totals = list(accumulate(reversed(steps)))
    return len(steps) - 1 - max(range(len(steps)), key=lambda number: totals[number] ** 2 / (number + 1))


def _reason(observations: Sequence[Observation], target: Target, indices: Sequence[int]) -> str:
    residuals = [found for index in indices if (found := residual_of(observations[index], target)) is not None]
    factor = math.exp(statistics.median(residuals))
    return f"{NOUNS[target]} are {factor:.2f} times what was predicted ({len(residuals)} runs in a row)"
