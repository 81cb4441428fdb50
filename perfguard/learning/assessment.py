"""Assessment of measured runs: which readings can be believed, in which regime they ran, and whether the intervals held.

Every run is compared with the prediction that was made before it ran. Impossible readings are quarantined (`quarantine.py`).
Runs under equal conditions are a regime (`change_point.py`). Intervals are widened until they hold (`conformal.py`). Runs of
another predictor are not used for drift and intervals.

The result depends on the log alone, so every process that reads the same log gets the same result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from perfguard.learning.change_point import ChangePointDetector, Drift, Shift, number_conditions
from perfguard.learning.config import DEFAULT_CONFIG, AssessmentConfig
from perfguard.learning.conformal import AdaptiveConformal
from perfguard.learning.quarantine import Quarantine, Quarantined
from perfguard.learning.residuals import NOUNS
from perfguard.predictor import TARGETS, Observation, Target


@dataclass(frozen=True, slots=True)
class LogAssessment:
    """Result of the assessment of a list of runs."""

    observations: tuple[Observation, ...] = ()
    """The runs, each with its regime, and without the readings that are quarantined."""
    quarantined: tuple[Quarantined, ...] = ()
    drifts: tuple[Drift, ...] = ()
    widening: Mapping[Target, float] = field(default_factory=dict)
    """The factor on the standard deviation of the next prediction, by target."""
    misfits: tuple[Quarantined, ...] = ()
    """The runs at which the predictor turned out not to fit. What was read until then is quarantined for the same reason."""


def assess_log(
    observations: Sequence[Observation], *, predictor: str = "", config: AssessmentConfig = DEFAULT_CONFIG
) -> LogAssessment:
    """Return the assessment of ``observations``, the runs of one device from the oldest to the newest.

    Args:
        observations: all on one device.
        predictor: name and version of the predictor whose intervals must hold. Predictions of others are not used for intervals
            or drift. Empty: all predictions are used.
        config: the settings.
    """
    quarantine, detector, conformal = Quarantine(config), ChangePointDetector(config), AdaptiveConformal(config)
    conditions, drifts = number_conditions(observations)
    quarantined: list[Quarantined] = []
    misfits: list[Quarantined] = []
    widening: dict[Target, float] = {}
    masked = list(observations)
    drift_at: dict[int, Drift] = {}
    own = [index for index in range(len(observations)) if _is_of(observations[index], predictor)]
    for target in TARGETS:
        believed, refused = quarantine.split(observations, target)
        shifts: list[Shift] = []
        for number in set(conditions):
            of_number = [index for index in own if conditions[index] == number]
            shifts += detector.shifts(observations, target, sorted({*believed}.intersection(of_number)))
        drift_at |= {shift.runs[0]: shift.drift for shift in shifts}
        judged = [index for index in own if index not in refused]
        widening[target], last_misfit = conformal.widening(observations, target, judged, shifts)
        if last_misfit is not None:
            who = predictor or "the predictor"
            reason = f"until this run {NOUNS[target]} scatter more than intervals of {who} can be widened"
            misfits.append(Quarantined(observations[last_misfit], target, reason))
            refused |= dict.fromkeys((index for index in believed if index <= last_misfit), reason)
        quarantined += [Quarantined(observations[index], target, reason) for index, reason in sorted(refused.items())]
        for index in refused:
            masked[index] = _without(masked[index], target)
    starts = sorted(drift_at)
    regimes = _numbered_by_last(
        [
            (number, sum(start <= index and conditions[start] == number for start in starts))
            for index, number in enumerate(conditions)
        ]
    )
    masked = [replace(observation, regime=regime) for observation, regime in zip(masked, regimes, strict=True)]
    drifts += [drift_at[index] for index in starts]
    return LogAssessment(tuple(masked), tuple(quarantined), tuple(drifts), widening, tuple(misfits))


def _numbered_by_last(names: Sequence[tuple[int, int]]) -> list[int]:
    """Replace names by numbers, from 0. The name that came last has the highest number, because the next run is like it."""
    last = {name: index for index, name in enumerate(names)}
    numbers = {name: number for number, name in enumerate(sorted(last, key=last.__getitem__))}
    return [numbers[name] for name in names]


def _without(observation: Observation, target: Target) -> Observation:
    measurement = observation.measurement
    if target == "memory":
        return replace(observation, measurement=replace(measurement, peak_memory_bytes=None))
    return replace(observation, measurement=replace(measurement, step_time_s=None))


def _is_of(observation: Observation, predictor: str) -> bool:
    """Whether ``predictor`` had predicted it, refined ("+") or not."""
    return not (predictor and observation.predicted_by) or observation.predicted_by.rstrip("+") == predictor.rstrip("+")
