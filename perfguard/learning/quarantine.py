"""Quarantine: the readings that are not learnt.

An impossible reading is quarantined: it is never learnt and always listed, however many readings agree with it. Examples are a
step longer than its trial, and more memory than the device has. Memory or time below the physical bound of the step
(`physics.py`) is impossible, too. A time with four impossible ones of its study near it is not believed either: another program
ran.

A reading that is far from its prediction is a suspect until others agree with it. The same step measured again may agree with
it. So may four suspects among eight readings in a row, or among eight in a row of steps of one type. Then the prediction is
wrong. Some trials end after less than a tenth of the steps of their study's trials, because the loss was NaN or the machine was
suspended. Their readings agree with no others, because their steps are mostly warm-up.

These rules come from no paper. They are physical bounds, and the least agreement that a single mistake cannot produce.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from perfguard.learning.config import DEFAULT_CONFIG, AssessmentConfig
from perfguard.learning.residuals import residual_of, step_type
from perfguard.measure import NOT_A_NUMBER
from perfguard.physics import least_reading
from perfguard.predictor import Estimate, Observation, Target
from perfguard.quantities import format_bytes, format_seconds

_NOT_ON_A_GPU = "this PyTorch has no CUDA", "did not use CUDA in this process"
"""Notes in the log of runs that were booked to a GPU without using one. Before schema 4 such runs were logged as the GPU's."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A reading that is not learnt."""

    observation: Observation
    target: Target
    reason: str


class Quarantine:
    """Separates readings that are believed from those that are not; see the module's docstring.

    Args:
        config: what is far, what agrees, and how many are enough.
    """

    def __init__(self, config: AssessmentConfig = DEFAULT_CONFIG) -> None:
        self._config = config

    def split(self, observations: Sequence[Observation], target: Target) -> tuple[list[int], dict[int, str]]:
        """Return the indices of the readings that count, in order, and by index why others do not.

        Args:
            observations: the runs of one device, from the oldest to the newest.
            target: which of their readings.
        """
        of_study: defaultdict[str, list[int]] = defaultdict(list)
        for index, observation in enumerate(observations):
            of_study[observation.study].append(index)
        reasons = ((index, why_impossible(run, target, config=self._config)) for index, run in enumerate(observations))
        impossible = {index: reason for index, reason in reasons if reason is not None}
        measured = [index for index, observation in enumerate(observations) if observation.measured(target) is not None]
        possible = [index for index in measured if index not in impossible]
        refused = dict(impossible)
        if target == "time":  # a resident set that reuses memory reads too little in honest runs, too
            read = {*impossible, *possible}
            for indices in of_study.values():
                refused |= self._beside_impossible([index for index in indices if index in read], impossible)
        refused |= self._suspects(observations, target, possible, of_study)
        return [index for index in measured if index not in refused], dict(sorted(refused.items()))

    def _suspects(
        self, observations: Sequence[Observation], target: Target, possible: Sequence[int], of_study: Mapping[str, Sequence[int]]
    ) -> dict[int, str]:
        """The ``possible`` readings that are far from their predictions while too few agree, each with the reason."""
        config = self._config
        few_steps = {
            study: config.few_steps_share * statistics.median(observations[index].measurement.num_steps for index in indices)
            for study, indices in of_study.items()
        }
        suspects: dict[int, str] = {}
        far: set[int] = set()
        far_of_graph: defaultdict[str, list[int]] = defaultdict(list)
        residuals: dict[int, float] = {}
        for position, index in enumerate(possible):
            observation = observations[index]
            residual, value = residual_of(observation, target), observation.measured(target)
            if residual is None or value is None:
                continue
            residuals[index] = residual
            estimate = observation.predicted[target]
            if abs(residual) <= max(math.log(config.suspect_factor), config.suspect_sigmas * estimate.log_sigma):
                continue
            suspects[index] = _far_off(estimate, value, target)
            if target == "time" and observation.measurement.num_steps < few_steps[observation.study]:
                continue
            far.add(index)
            same_graph = far_of_graph[observation.graph.content_hash]
            agreeing = [other for other in same_graph if abs(residuals[other] - residual) < math.log(config.agreement_factor)]
            same_graph.append(index)
            released = [*agreeing, index] if agreeing else []
            so_far, own_type = possible[: position + 1], step_type(observation.graph)
            alike = [other for other in so_far if step_type(observations[other].graph) == own_type]
            for recent in (so_far[-config.recent_readings :], alike[-config.recent_readings :]):
                if sum(other in far for other in recent) >= config.agreeing_readings:  # those that were released count too
                    released += recent
            for other in released:
                suspects.pop(other, None)
        return suspects

    def _beside_impossible(self, measured: Sequence[int], impossible: Collection[int]) -> dict[int, str]:
        """The ``measured`` readings of one study that have four impossible ones near them, two or more of them before, with the
        reason.

        A mocked objective gives readings that are possible for its smallest configurations only. What ran before it is believed.
        """
        enough = self._config.agreeing_readings
        found: dict[int, str] = {}
        for position, index in enumerate(measured):
            before, after = measured[max(0, position - enough) : position], measured[position + 1 : position + 1 + enough]
            num_before, num_after = (sum(other in impossible for other in beside) for beside in (before, after))
            if index not in impossible and num_before >= enough // 2 and num_before + num_after >= enough:
                found[index] = "most readings next to it are impossible"
        return found


def why_impossible(observation: Observation, target: Target, *, config: AssessmentConfig = DEFAULT_CONFIG) -> str | None:
    """Return why a reading is impossible, whatever the prediction. None: it is possible, or there is no reading.

    Args:
        observation: one run, the graph of its step and the device that the log has for it.
        target: which of its readings.
        config: the tolerances. Readings may be above the device's memory by so much, and steps above their trial.
    """
    measurement, capacity_bytes = observation.measurement, observation.device.memory_bytes
    read = measurement.peak_memory_bytes if target == "memory" else measurement.step_time_s
    if target == "time" and measurement.status != "ok":
        return None
    if read is None:
        strange = [NOT_A_NUMBER.format("step_time_s", value) for value in ("nan", "inf", "-inf")]
        return next((words for words in strange if target == "time" and words in measurement.note), None)
    value = observation.measured(target)
    if value is None:
        return f"the measured {'memory' if target == 'memory' else 'step time'} is {read}, which is not above zero"
    if target == "memory":
        if value > config.max_capacity_share * capacity_bytes:
            return f"{format_bytes(value)} measured, but the device has {format_bytes(capacity_bytes)}"
        return _too_little(observation, value, target, config)
    if observation.device.kind == "cuda":
        if measurement.method == "none" and any(words in measurement.note for words in _NOT_ON_A_GPU):
            return f"the run did not use {observation.device.name}"
        memory_bytes = observation.measured("memory")
        reason = None if memory_bytes is None else _too_little(observation, memory_bytes, "memory", config)
        if reason is not None:  # something else ran
            return reason
    total_s = measurement.total_time_s
    if not (math.isfinite(total_s) and total_s > 0):
        return f"the time of the trial is {total_s} s"
    if value * measurement.num_steps > config.max_trial_share * total_s + config.trial_slack_s:
        return f"{measurement.num_steps} steps of {format_seconds(value)} take longer than the trial of {format_seconds(total_s)}"
    return _too_little(observation, value, target, config)


def _too_little(observation: Observation, value: float, target: Target, config: AssessmentConfig) -> str | None:
    """Return why a complete run cannot need so little. None: it can. With status "oom" memory is a lower bound."""
    idle = target == "time" and why_impossible(observation, "memory", config=config) is not None
    bound = least_reading(target, observation.graph, observation.device, idle=idle)
    if observation.measurement.status != "ok" or value >= bound:
        return None
    if target == "memory":
        return f"{format_bytes(value)} measured, but such a step takes {format_bytes(bound)} at least"
    return f"{format_seconds(value)} a step measured, but it takes {format_seconds(bound)} at least on {observation.device.name}"


def _far_off(estimate: Estimate, value: float, target: Target) -> str:
    written = format_bytes if target == "memory" else format_seconds
    return f"{written(value)} measured, {written(estimate.median)} predicted, and no other reading agrees"
