"""The settings of a log's assessment: quarantine, change points, and adaptive conformal intervals."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AssessmentConfig:
    """Settings of :func:`perfguard.learning.assess_log`. A sigma is the standard deviation of a prediction's logarithm."""

    suspect_factor: float = 5.0
    """Quarantine: a reading nearer to its prediction than this factor is never a suspect."""
    suspect_sigmas: float = 8.0
    """Quarantine: nor is one within so many sigmas."""
    agreement_factor: float = 1.5
    """Quarantine: two readings of the same step that differ by less than this factor agree."""
    recent_readings: int = 8
    """Quarantine: suspects are released if many of so many readings are far from their predictions."""
    agreeing_readings: int = 4
    """Quarantine: so many are many."""
    few_steps_share: float = 0.1
    """Quarantine: a trial with less than this share of its study's median number of steps was cut short."""
    max_capacity_share: float = 1.05
    """Quarantine: no peak of memory is above this share of the device's memory."""
    max_trial_share: float = 1.5
    """Quarantine: the steps of a trial take no more than this share of the trial, plus ``trial_slack_s``. Two steps of a trial of
    milliseconds may well have a median that is longer than half of it."""
    trial_slack_s: float = 1.0

    drift_slack_sigmas: float = 1.0
    """Change points: k in Page's sum of z - k. A shift of two sigmas is what the sum is made for; families of networks differ by
    less."""
    drift_alarm_sigmas: float = 10.0
    """Change points: the sum that is an alarm."""
    drift_clip_sigmas: float = 4.0
    """Change points: no z counts for more."""
    settled_runs: int = 10
    """Change points: runs of a regime after which a shift can be distinguished from the first adaptation."""
    scale_runs: int = 60
    """Change points: the most runs from which the scatter before the sum is taken."""

    step_size: float = 0.4
    """Conformal: gamma, by which a miss moves the logarithm of the width. A scatter that doubles overnight costs ln 2 / 0.4 = 1.7
    misses too many, of the twenty that 200 runs may have."""
    min_widening: float = 0.25
    """Conformal: the least factor on a sigma."""
    max_widening: float = 30.0
    """Conformal: the largest factor on a sigma."""
    forgiven_misses: int = 6
    """Conformal: as much as so many misses widened is undone after a shift, within ``forgiven_within_runs``. Of 200 runs, 87%
    stay inside of their intervals."""
    forgiven_within_runs: int = 200


DEFAULT_CONFIG = AssessmentConfig()
