"""How measured runs change predictions: which readings are believed, how wide intervals must be, and when weights are tuned.

A run ends, its measurement goes into the log, and every guard that reads the log comes to the same result from it:

1. :func:`why_impossible` refuses readings that physics excludes. They are never learnt.
2. :func:`far_readings` holds back readings that are far from their predictions until others agree with them, and
   :func:`outlying_readings` those that disagree with other readings of the same step.
3. :func:`interval_widening` widens or narrows intervals until they hold.
4. The predictor is conditioned on what is left (:class:`Learner`).
5. From time to time :func:`tune_weights` fine-tunes the predictor's weights, and keeps them if they are better on held-out runs.

Notation, for each run and target:
    residual  log(measured / predicted median)
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from perfguard.exceptions import ConfigurationError, LogError, LogWarning, PredictorError, warn_user
from perfguard.measure import NOT_A_NUMBER
from perfguard.own_runs import by_graph
from perfguard.physics import least_reading
from perfguard.predictor import (
    COVERAGE,
    DEFAULT_PREDICTOR,
    HALF_INTERVAL,
    MOST_WIDENED,
    SIGMA_OF_MAD,
    TARGETS,
    Observation,
    Predictor,
    Refinable,
    Target,
    load_predictor,
    widened_log_sigma,
)
from perfguard.quantities import format_bytes, format_seconds

if TYPE_CHECKING:
    from perfguard.devices import Device
    from perfguard.log import MeasurementStore


CALIBRATION = "perfguard calibrate"
"""Name of the study of this command. Its steps are PerfGuard's own, so a far reading of them is the machine's."""


PROCESS_GROWTH_BYTES = 8 * 2**20
"""What the resident set of a process grows by in a trial beside its tensors: allocator, kernels, Python. It is 3 to 9 MiB for
eight tiny networks that Ray ran in processes of their own."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """A reading that is not learnt."""

    observation: Observation
    target: Target
    reason: str


@dataclass(frozen=True, slots=True)
class Assessment:
    """What can be learnt from a list of runs."""

    observations: tuple[Observation, ...] = ()
    """The runs, each with its regime, and without the readings that are in doubt."""
    doubts: tuple[Doubt, ...] = ()
    changes: tuple[tuple[Observation, str], ...] = ()
    """The first run after each change of the driver, the framework or the card, and what changed, in words."""
    widening: Mapping[Target, float] = field(default_factory=dict)
    """The factor on the standard deviation of the next prediction, by target."""
    misfits: tuple[Doubt, ...] = ()
    """The run of each target up to which no width of the interval is enough: the predictor does not fit what runs there."""
    runs_of: Mapping[str, Sequence[Observation]] = field(default_factory=dict)
    """The runs of each graph, by its content hash: those of the study with all readings that are possible, and the others with
    those that are believed."""


def assess(observations: Sequence[Observation], *, study: str = "", predictor: str = "") -> Assessment:
    """Return what a guard of ``study`` can learn from ``observations``, the runs of one device from the oldest to the newest.

    The result depends on the log alone, so every process that reads the same log comes to the same result.

    Args:
        observations: all on one device.
        study: the study that asks. Readings of other studies that are far from their predictions are believed only if two studies
            agree on a direction for a type of step. So one study whose `build` is wrong does not change the verdicts of the next.
        predictor: name and version of the predictor whose intervals must hold. Runs that another one predicted are learnt, but do
            not count for intervals. Empty: all count.
    """
    regimes, changes = number_conditions(observations)
    refused: dict[Target, dict[int, str]] = {}
    widening: dict[Target, float] = {}
    misfits: list[Doubt] = []
    for target in TARGETS:
        impossible = {i: reason for i, run in enumerate(observations) if (reason := why_impossible(run, target)) is not None}
        # On a CPU an honest run that reuses memory reads too little, too, so its neighbours are believed.
        beside = _beside_impossible(observations, impossible) if target == "time" and impossible else {}
        excluded = {*impossible, *beside}
        far = far_readings(observations, target, excluded, study=study)
        refused[target] = impossible | beside | outlying_readings(observations, target, excluded) | far
        judged = [
            i
            for i, run in enumerate(observations)
            # A refined predictor has a "+" after its name, and the same intervals.
            if i not in refused[target] and (not predictor or run.predicted_by.rstrip("+") in ("", predictor.rstrip("+")))
        ]
        widening[target], misfit = interval_widening([observations[i] for i in judged], target)
        if misfit is not None:
            last = judged[misfit]
            reason = f"until this run {_NOUNS[target]} scatter more than intervals can be widened"
            misfits.append(Doubt(observations[last], target, reason))
            refused[target] |= dict.fromkeys((i for i in judged if i <= last), reason)
    believed = (
        _without(run, [target for target in TARGETS if i in refused[target]], regimes[i]) for i, run in enumerate(observations)
    )
    doubts = (Doubt(observations[i], target, refused[target][i]) for target in TARGETS for i in sorted(refused[target]))
    return Assessment(tuple(believed), tuple(doubts), tuple(changes), widening, tuple(misfits))


_NOUNS: Mapping[Target, str] = {"memory": "peaks of memory", "time": "step times"}


def _without(run: Observation, targets: Sequence[Target], regime: int) -> Observation:
    measurement = run.measurement
    if "memory" in targets:
        measurement = replace(measurement, peak_memory_bytes=None)
    if "time" in targets:
        measurement = replace(measurement, step_time_s=None)
    return replace(run, regime=regime, measurement=measurement)


# --- Conditions -----------------------------------------------------------------------------------------------------------------


def number_conditions(observations: Sequence[Observation]) -> tuple[list[int], list[tuple[Observation, str]]]:
    """Return the regime of each run, and each change to conditions that are new: the first run, and what changed.

    A regime is the runs of one driver, framework and card. The regime that was there last has the highest number, because the
    next run is like it. Two machines that write in turn are two regimes. A run that does not know a condition has the one of the
    run before it.
    """
    known: list[str | None] = [None] * 4
    regimes: list[tuple[str | None, ...]] = []
    changes: list[tuple[Observation, str]] = []
    for run in observations:
        measured = run.measurement
        memory = format_bytes(run.device.memory_bytes)  # a few bytes more are no change
        found = measured.driver, measured.framework, measured.device_name, memory
        before = known
        known = [new or old for new, old in zip(found, known, strict=True)]
        regime = tuple(known)
        if regimes and regime not in regimes and (words := _changed_in_words(before, known)):
            changes.append((run, words))
        regimes.append(regime)
    last = {regime: index for index, regime in enumerate(regimes)}
    order = sorted(last, key=last.__getitem__)
    return [order.index(regime) for regime in regimes], changes


def _changed_in_words(before: Sequence[str | None], now: Sequence[str | None]) -> str:
    names = "driver", "framework", "device", "memory of the device"
    changed = ((name, old, new) for name, old, new in zip(names, before, now, strict=True) if old and old != new)
    return "; ".join(f"{name}: {old} is now {new}" for name, old, new in changed)


# --- Readings that physics excludes ---------------------------------------------------------------------------------------------


def why_impossible(run: Observation, target: Target) -> str | None:
    """Return why a reading is impossible, whatever was predicted. None: it is possible, or there is no reading."""
    measurement = run.measurement
    if target == "memory":
        # Steps that were too fast did not run. A process may grow by as much for another reason.
        has_reading = measurement.peak_memory_bytes is not None
        return _impossible_memory(run) or (_too_little(run, "time") if has_reading else None)
    if measurement.status != "ok":
        return None
    if measurement.step_time_s is None:  # the log has what is no number in the note
        strange = (NOT_A_NUMBER.format("step_time_s", value) for value in ("nan", "inf", "-inf"))
        return next((words for words in strange if words in measurement.note), None)
    value = run.measured("time")
    if value is None:
        return f"the measured step time is {measurement.step_time_s}, which is not above zero"
    if run.device.kind == "cuda" and (reason := _too_little(run, "memory")) is not None:
        return reason  # something else ran
    total_s = measurement.total_time_s
    if not (math.isfinite(total_s) and total_s > 0):
        return f"the time of the trial is {total_s} s"
    # Two steps of a trial of milliseconds may have a median that is longer than half of it.
    if value * measurement.num_steps > 1.5 * total_s + 1.0:
        return f"{measurement.num_steps} steps of {format_seconds(value)} take longer than the trial of {format_seconds(total_s)}"
    return _too_little(run, "time", idle=_impossible_memory(run) is not None)


def _impossible_memory(run: Observation) -> str | None:
    """Return why a reading of the memory is impossible by itself. None: it is possible, or there is none."""
    measurement = run.measurement
    capacity_bytes = run.device.memory_bytes
    if measurement.peak_memory_bytes is None:
        return None
    value = run.measured("memory")
    if value is None:
        return f"the measured memory is {measurement.peak_memory_bytes}, which is not above zero"
    if value > 1.05 * capacity_bytes:  # drivers round
        return f"{format_bytes(value)} measured, but the device has {format_bytes(capacity_bytes)}"
    if run.graph.mode == "train" and measurement.status == "ok" and measurement.num_steps == 0:
        return "the trial ended without an optimizer step, so it does not show what steps need"
    return _too_little(run, "memory")


def _too_little(run: Observation, target: Target, *, idle: bool = False) -> str | None:
    """Return why a complete run cannot need so little. None: it can. Out of memory, the memory is a lower bound.

    Args:
        run, target: what was measured.
        idle: whether its memory shows that nothing ran.
    """
    value = run.measured(target)
    bound = least_reading(target, run.graph, run.device, idle=idle)
    if run.measurement.status != "ok" or value is None or value >= bound:
        return None
    if target == "memory":
        return f"{format_bytes(value)} measured, but such a step takes {format_bytes(bound)} at least"
    return f"{format_seconds(value)} a step measured, but it takes {format_seconds(bound)} at least on {run.device.name}"


def _beside_impossible(observations: Sequence[Observation], impossible: Mapping[int, str]) -> dict[int, str]:
    """Step times with four impossible ones of their study next to them, two of these before: another program ran.

    A mocked objective gives readings that are possible for its smallest configurations only. What ran before it is believed.
    """
    found: dict[int, str] = {}
    for indices in _by_study(observations).values():
        read = [i for i in indices if i in impossible or observations[i].measured("time") is not None]
        for position, index in enumerate(read):
            before = read[max(0, position - 4) : position]
            after = read[position + 1 : position + 5]
            num_before, num_after = (sum(other in impossible for other in beside) for beside in (before, after))
            if index not in impossible and num_before >= 2 and num_before + num_after >= 4:
                found[index] = "most readings next to it are impossible"
    return found


# --- Readings that are far from their predictions -------------------------------------------------------------------------------


def far_readings(observations: Sequence[Observation], target: Target, excluded: Iterable[int], *, study: str) -> dict[int, str]:
    """Return the readings that are far from their predictions while too few others agree: their indices, and why.

    These rules come from no paper. They are the least agreement that a single mistake cannot produce. The indices in ``excluded``
    are refused anyway, and agree with nothing.
    """
    refused = {*excluded}
    residuals = {
        i: found for i, run in enumerate(observations) if i not in refused and (found := _residual(run, target)) is not None
    }
    held_back: set[int] = set()
    far: set[int] = set()
    for launched_by, indices in _by_study(observations).items():
        if launched_by != CALIBRATION:
            far_of_study, held_back_of_study = _far_in_a_study(observations, indices, residuals, target)
            far |= far_of_study
            held_back |= held_back_of_study
    reasons = {i: _far_off(observations[i], target) for i in held_back}
    # Another study's far readings are its own affair, until a second study sees the same.
    # The direction alone is no agreement: two mistakes of different steps may have the same.
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for i in far - held_back:
        groups[_step_type(observations[i]), residuals[i] > 0].append(i)
    for released_far in groups.values():
        if len({observations[i].study for i in released_far}) < 2:
            foreign = (i for i in released_far if observations[i].study != study)
            reasons |= {i: f"{_far_off(observations[i], target)} in another study" for i in foreign}
    return reasons


def _far_in_a_study(
    observations: Sequence[Observation], indices: Sequence[int], residuals: Mapping[int, float], target: Target
) -> tuple[set[int], set[int]]:
    """Return the readings of a study that are far from their predictions, and those that too few others agree with.

    A reading of few steps is in the second set alone, as it agrees with no other.
    """
    far: set[int] = set()
    held_back: set[int] = set()
    own = [i for i in indices if i in residuals]
    for position, i in enumerate(own):
        run = observations[i]
        if abs(residuals[i]) <= max(math.log(5.0), 8.0 * run.predicted[target].log_sigma):
            continue  # within a factor of five, or within eight standard deviations
        held_back.add(i)
        median_steps = statistics.median(observations[j].measurement.num_steps for j in indices)
        if target == "time" and run.measurement.num_steps < 0.1 * median_steps:
            continue  # cut short, by a NaN or a suspended machine: its steps are mostly warm-up
        far.add(i)
        so_far = own[: position + 1]
        same_step = [j for j in so_far[:-1] if j in far and observations[j].graph.content_hash == run.graph.content_hash]
        agreeing = [j for j in same_step if abs(residuals[j] - residuals[i]) < math.log(1.5)]
        released = [*agreeing, i] if agreeing else []
        alike = [j for j in so_far if _step_type(observations[j]) == _step_type(run)]
        for recent in (so_far[-8:], alike[-8:]):
            if sum(j in far for j in recent) >= 4:  # then the prediction is wrong
                released += [j for j in recent if j in far]
        held_back -= {*released}
    return far, held_back


def outlying_readings(observations: Sequence[Observation], target: Target, excluded: Iterable[int]) -> dict[int, str]:
    """Return the readings that disagree with at least three others of the same step, which agree: their indices, and why.

    Another program may have shared the machine, or the process has kept what it no longer needed. Let m be the median of the
    others' logarithms, and s their standard deviation from the median distance to m, at least 1%. A reading is outlying if it is
    more than 5 s and more than a tenth away from m, until another reading is like it, within a tenth.
    """
    left_out = {*excluded}
    read: defaultdict[Hashable, dict[int, float]] = defaultdict(dict)
    for i, run in enumerate(observations):
        value = run.measured(target)
        if i not in left_out and run.measurement.status == "ok" and value is not None:
            read[run.graph.content_hash, run.device.id][i] = math.log(value)
    found: dict[int, str] = {}
    for of_step in read.values():
        for i, value in of_step.items():
            others = [other for j, other in of_step.items() if j != i]
            if len(others) < 3:
                continue
            middle = statistics.median(others)
            scatter = max(0.01, SIGMA_OF_MAD * statistics.median(abs(other - middle) for other in others))
            is_repeated = any(abs(other - value) <= math.log(1.1) for other in others)
            if abs(value - middle) > max(math.log(1.1), 5 * scatter) and not is_repeated:
                factor = math.exp(value - middle)
                found[i] = f"it is {factor:.2f} times the median of {len(others)} other readings of the same step, which agree"
    return found


def _far_off(run: Observation, target: Target) -> str:
    written = format_bytes if target == "memory" else format_seconds
    value = run.measured(target)
    assert value is not None  # it has a residual
    return f"{written(value)} measured, {written(run.predicted[target].median)} predicted, and no other reading agrees"


def doubts_of(observations: Sequence[Observation]) -> list[Doubt]:
    """Return the readings of one device that the guards of their own studies do not learn."""
    studies = {run.study for run in observations}
    return [doubt for study in studies for doubt in assess(observations, study=study).doubts if doubt.observation.study == study]


def _residual(run: Observation, target: Target) -> float | None:
    """Return log(measured / predicted) of a complete run. None: there is nothing to compare."""
    value = run.measured(target)
    estimate = run.predicted.get(target)
    if run.measurement.status != "ok" or value is None or estimate is None:
        return None
    return math.log(value / estimate.median)


def _step_type(run: Observation) -> Hashable:
    """A key that is equal for steps that one mistake of a predictor would concern alike."""
    return run.graph.mode, run.graph.precision, run.graph.options, run.graph.kinds


def _by_study(observations: Sequence[Observation]) -> Mapping[str, list[int]]:
    studies: defaultdict[str, list[int]] = defaultdict(list)
    for i, run in enumerate(observations):
        studies[run.study].append(i)
    return studies


# --- Intervals ------------------------------------------------------------------------------------------------------------------


def interval_widening(runs: Sequence[Observation], target: Target) -> tuple[float, int | None]:
    """Return the factor on the next interval's sigma, and the last run at which no width was enough (None: there was none).

    A miss is a run outside of its 90% interval. Sigmas are multiplied by exp(gamma * sum(miss - 0.1)). This is adaptive conformal
    inference on the logarithm of the width (Gibbs and Candes 2021), or the quantile tracker of "conformal PID control"
    (Angelopoulos et al. 2023). Over n runs the share of misses is within (change of the log width) / (gamma n) of a tenth,
    whatever the data. Each run is judged by the width that follows from the runs before it, and not by that of its launch. So
    many runs that were launched at once do not each widen for one miss.

    On a CPU, a process grows by some MiB that no layer explains. This is a sum and no factor. So half an interval of h counts as
    the root of h^2 + a^2, where a = log(1 + growth / predicted). The run moves the width by the part h^2 / (h^2 + a^2) of a step.
    A tiny network says nothing of the factor by which a large one may be off.
    """
    gamma = 0.4  # a scatter that doubles overnight costs ln 2 / 0.4 = 1.7 misses too many
    narrowest = math.log(0.25)
    widest = math.log(30.0)
    log_width = 0.0
    misfit = None
    residuals: defaultdict[Hashable, list[float]] = defaultdict(list)
    for index, run in enumerate(runs):
        value = run.measured(target)
        estimate = run.predicted.get(target)
        if value is None or estimate is None:
            continue
        error = math.log(value / estimate.median)
        shipped_sigma = estimate.log_sigma / run.widening.get(target, 1.0)
        own_half = HALF_INTERVAL * widened_log_sigma(shipped_sigma, math.exp(log_width))
        is_resident_set = target == "memory" and run.device.kind == "cpu"
        half = math.hypot(own_half, math.log1p(PROCESS_GROWTH_BYTES / estimate.median) if is_resident_set else 0.0)
        weight = (own_half / half) ** 2
        if run.measurement.status != "ok":  # out of memory: more was needed than was read
            if target == "memory" and error > half:
                log_width = min(log_width + gamma * weight * COVERAGE, widest)
            continue
        log_width += gamma * weight * ((abs(error) > half) - (1 - COVERAGE))
        log_width = min(max(log_width, narrowest), widest)
        residuals[_step_type(run)].append(error)
        # No end of an interval moves by more than a factor of ten. Where that is not enough, and readings of one type of step
        # agree on no factor that could be learnt, the predictor does not fit what runs here: what was read until now is no use.
        enough = min(widest, math.log1p(MOST_WIDENED / HALF_INTERVAL / shipped_sigma))
        if log_width >= enough and HALF_INTERVAL * _scatter(residuals.values()) > MOST_WIDENED:
            misfit = index
            log_width = 0.0
            residuals.clear()
    return math.exp(log_width), misfit


def _scatter(groups: Iterable[Sequence[float]]) -> float:
    """Standard deviation within the groups, from the median distance to the median of each group."""
    centred = ((group, statistics.median(group)) for group in groups)
    return SIGMA_OF_MAD * statistics.median(abs(value - middle) for group, middle in centred for value in group)


# --- The predictor follows the log ----------------------------------------------------------------------------------------------


def _ran(read: Sequence[Observation], believed: Sequence[Observation], *, study: str) -> Iterator[Observation]:
    """Yield what each run shows of its own configuration. A study's readings that are far from predictions show it, too."""
    for run, as_believed in zip(read, believed, strict=True):
        is_own = run.study == study
        yield run if is_own and not any(why_impossible(run, target) for target in TARGETS) else as_believed


class Learner:
    """Keeps a predictor up to date with a log: conditioned on its runs, with the weights that are promoted in it."""

    def __init__(self, predictor: Predictor, log: MeasurementStore) -> None:
        self._predictor = predictor
        self._log = log
        self._weights_id: str | None = None

    def update(self, device: Device, *, study: str = "") -> Assessment:
        """Condition the predictor on the runs of ``device`` as ``study`` may learn from them, and return their assessment."""
        self._take_promoted()
        read = self._log.observations(device)
        assessment = assess(read, study=study, predictor=self._predictor.name)
        self._predictor.fine_tune(assessment.observations)
        return replace(assessment, runs_of=by_graph(_ran(read, assessment.observations, study=study)))

    def _take_promoted(self) -> None:
        """Use the weights that are promoted in the log, if they are others now."""
        if not isinstance(self._predictor, Refinable):
            return
        try:
            promoted = self._log.promoted(self._predictor.lineage)
        except LogError:
            return  # the log is away; what is in use goes on
        weights_id, data = (None, None) if promoted is None else promoted
        if weights_id == self._weights_id:
            return
        self._weights_id = weights_id
        try:
            self._predictor.use_refinement(data)
        except PredictorError as error:
            warn_user(f"The weights {weights_id} that were promoted in the log are not used: {error}", LogWarning)


# --- Fine-tuned weights ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of one update of a predictor's weights."""

    promoted: bool
    num_rows: int
    """The runs that were learnt."""
    metrics: Mapping[str, float]
    """Mean |log(measured / predicted)| of held-out runs, for instance "recent time before" and "kept back memory after"."""
    why_rejected: str = ""
    """The condition that does not hold, in words. Empty: all hold, and the weights are promoted."""

    def __str__(self) -> str:
        errors = ", ".join(f"{name} {value:.3f}" for name, value in self.metrics.items())
        result = "promoted" if self.promoted else f"rejected: {self.why_rejected}"
        return f"{result}; {self.num_rows} runs learnt; mean errors: {errors}"


def tune_weights(
    log: MeasurementStore,
    *,
    predictor: str | Callable[[], Predictor] = DEFAULT_PREDICTOR,
    min_new: int = 20,
) -> Generation | None:
    """Fine-tune a predictor's weights on a log, and promote them there if they are better. None: there is too little that is new.

    The newest 1,000 runs are learnt, of all devices alike.

    Two sets of runs are held out of each device: the newest quarter (8 to 200), and one in five of the others. A hash of their
    key chooses these, so that all generations are judged by the same. The new weights are promoted if three conditions hold. On
    the newest runs they are better, by 2% and by two standard errors of the difference. On the others they are worse by at most
    half a point. On the shipped weights' reference data they stay within 1% of the shipped ones.

    Args:
        log: the log to learn from and to promote in.
        predictor: the name of a predictor, or a function that makes one. It must be :class:`perfguard.predictor.Refinable`.
        min_new: how many runs must be new since the last promotion or rollback.

    Raises:
        ConfigurationError: if the predictor cannot be fine-tuned.
        LogError: if the log cannot be used now. Nothing is promoted then.
    """
    make = partial(load_predictor, predictor) if isinstance(predictor, str) else predictor
    in_use = make()
    candidate = make()
    if not isinstance(in_use, Refinable) or not isinstance(candidate, Refinable):
        raise ConfigurationError(f"The predictor {predictor!r} cannot be fine-tuned; {DEFAULT_PREDICTOR!r} can.")
    since_ns = max((int(known.state_changed_at.timestamp() * 1e9) for known in log.weights(in_use.lineage)), default=0)
    device_ids = log.device_ids()
    share = max(1, 1000 // max(1, len(device_ids)))
    by_device = [assess(log.observations(device_id, share), predictor=in_use.lineage).observations for device_id in device_ids]
    if sum(run.recorded_at_ns > since_ns for runs in by_device for run in runs) < min_new:
        return None
    splits = [_split(runs) for runs in by_device]
    learnt = [run for learn, _, _ in splits for run in learn]
    data = candidate.refine(learnt)
    if data is None:
        return None
    promoted = log.promoted(in_use.lineage)
    with suppress(PredictorError):  # guards refuse damaged weights too, and a better generation takes their place
        in_use.use_refinement(None if promoted is None else promoted[1])
    candidate.use_refinement(data)
    before = _judged(in_use, splits)
    after = _judged(candidate, splits)
    metrics = {
        f"{name} {when}": statistics.fmean(errors[name])
        for when, errors in (("before", before), ("after", after))
        for name in errors
        if errors[name]
    }
    why_rejected = _why_not_better(before, after) or _why_forgetful(candidate.shift_on_reference)
    if not why_rejected:
        log.promote(in_use.lineage, data, {name: round(value, 5) for name, value in metrics.items()} | {"rows": len(learnt)})
    return Generation(not why_rejected, len(learnt), metrics, why_rejected)


_Runs = Sequence[Observation]


def _split(runs: _Runs) -> tuple[_Runs, _Runs, _Runs]:
    """Return the runs of one device to learn from, the newest ones, and those of the others that are kept back."""
    number = min(max(8, math.ceil(len(runs) / 4)), 200)
    older = runs[:-number]
    recent = runs[-number:]
    is_kept = [zlib.crc32(run.decision_id.encode()) % 5 == 0 for run in older]
    learn = [run for run, kept in zip(older, is_kept, strict=True) if not kept]
    present = max((run.regime for run in runs), default=0)  # runs of an earlier regime must not decide a promotion
    return learn, recent, [run for run, kept in zip(older, is_kept, strict=True) if kept and run.regime == present]


def _judged(predictor: Predictor, splits: Sequence[tuple[_Runs, _Runs, _Runs]]) -> dict[str, list[float]]:
    """|log(measured / predicted)| of the held-out runs, by set and target, after the others were learnt."""
    errors: dict[str, list[float]] = {f"{which} {target}": [] for which in ("recent", "kept back") for target in TARGETS}
    for learn, recent, kept_back in splits:
        predictor.fine_tune(learn)
        for which, runs in (("recent", recent), ("kept back", kept_back)):
            for run in runs:
                prediction = predictor.predict(run.graph, run.device)
                for target, estimate in zip(TARGETS, (prediction.peak_memory, prediction.step_time), strict=True):
                    value = run.measured(target)
                    if value is not None and run.measurement.status == "ok":
                        errors[f"{which} {target}"].append(abs(math.log(value / estimate.median)))
    return errors


def _why_not_better(
    before: Mapping[str, Sequence[float]],
    after: Mapping[str, Sequence[float]],
    *,
    most_worse: float = 0.005,
    least_recent: int = 8,
    least_gain: float = 0.02,
) -> str:
    """Return why the weights are no better: on the newest runs, over both quantities, or on those that were kept back, in one.

    Empty: they are better.
    """
    for target in TARGETS:
        name = f"kept back {target}"
        if not before[name]:
            continue
        was = statistics.fmean(before[name])
        became = statistics.fmean(after[name])
        if became > was + most_worse:
            return (
                f"on older runs that were kept back, the mean error of {target} rose from {was:.3f} to {became:.3f}, and "
                f"{most_worse} more is accepted"
            )
    old = [error for target in TARGETS for error in before[f"recent {target}"]]
    new = [error for target in TARGETS for error in after[f"recent {target}"]]
    if len(old) < least_recent:
        return f"the newest runs have {len(old)} readings to judge by, and {least_recent} are needed"
    gains = [a - b for a, b in zip(old, new, strict=True)]
    gain = statistics.fmean(gains)
    chance = 2.0 * statistics.stdev(gains) / math.sqrt(len(gains))
    needed = max(least_gain * statistics.fmean(old), chance)
    if gain > needed:
        return ""
    return f"on the newest runs, the mean error fell by {gain:.4f}, and more than {needed:.4f} is needed to be no chance"


def _why_forgetful(shift: float, *, most: float = 0.01) -> str:
    """Return why the weights have forgotten what the shipped ones know. Empty: they have not."""
    if shift <= most:
        return ""
    return f"on the reference data of the shipped weights, predictions moved by {shift:.1%}, and {most:.0%} is accepted"


def start_tuning(url: str, predictor: str) -> subprocess.Popen[bytes]:
    """Start `perfguard learn` beside this process, and return it at once: of low priority, on one core, without the GPU."""
    command = [sys.executable, "-m", "perfguard.cli", "learn", "--predictor", predictor]
    environment = os.environ | {"PERFGUARD_LOG": url, "CUDA_VISIBLE_DEVICES": ""}
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, env=environment, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
