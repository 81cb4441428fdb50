"""What of the measured runs can be believed, under which conditions they ran, and whether the intervals held.

Every run is seen beside what had been predicted of it before it ran. Notation, for each run and target:
    score  log(measured / predicted median)        z  score / log_sigma        miss  |z| > 1.645, outside of the 90% interval

1. A reading that cannot be (a step longer than its trial, more memory than the device has, less memory or time than physics lets
   such a step need: `physics.py`) is quarantined: never learnt, always listed, however many agree. So is one that is far from its
   prediction, until others agree with it: the same step measured again, or four suspects among eight readings (in a row, or in a
   row of steps of one kind), because then it is the prediction that is wrong. A trial that ended after less than a tenth of the
   steps that trials of its study have, because its loss was NaN or because somebody suspended the machine, agrees with nobody:
   its steps are mostly warm-up. Nor is a time believed with four impossible ones of its study near it: another program ran.
2. A regime is the runs under equal conditions. A new one begins with a driver, framework or card behind the same name that was
   not there before (two machines that write in turn are two regimes), or where the z of one shift for good: Page's cumulative
   sum of z - k, with k one (Page 1954), each z being that of the interval before it was widened (3), in units of their scatter
   before the sum began: else a shift would hide itself, because it widens intervals. Four or five runs of a factor of two show
   it where times scatter by a tenth. It began where a mean other than zero explains the sum best (Hinkley 1970).
3. Intervals are widened by exp(gamma * sum(miss - 0.1)), adaptive conformal inference on the logarithm of the width (Gibbs and
   Candes 2021; Angelopoulos et al. 2023, "conformal PID control", whose quantile tracker this is): over any stretch of n runs
   the share of misses is within (change of the log width) / (gamma n) of a tenth, whatever the world does; those that are
   forgiven come on top. A miss is judged by the width that the runs before it in the log come to, which is the one it was
   launched with if runs follow each other; where many run at once, they do not each widen for what one has shown. Runs of another
   predictor say nothing. A run out of memory is a miss if what it had by then is above its interval, and says nothing else.
   Where a shift is seen, what its runs had widened is forgiven, because they are learnt as a new regime, and intervals as wide as
   the shift would let nothing be said for fifty runs; but no more than six misses within 200 runs, and where many run at once,
   those that were launched before the shift was seen widen as before.
4. No end of an interval is moved by more than a factor of ten (`predictor.widened_log_sigma`). Where that is too little, and the
   readings of a kind of step do not agree on a factor either, which could be learnt, the predictor does not fit what runs here.
   Then nothing that was read until that run is learnt, intervals are the predictor's own again, and what comes next is learnt.

All of it is a function of the log alone, so every process that reads the same log comes to the same result.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from perfguard.measure import NOT_A_NUMBER
from perfguard.physics import least_reading
from perfguard.predictor import (
    COVERAGE,
    HALF_INTERVAL,
    MOST_WIDENED,
    TARGETS,
    Estimate,
    Observation,
    Target,
    widened_log_sigma,
)
from perfguard.quantities import format_bytes, format_seconds

if TYPE_CHECKING:
    from perfguard.graph import OpGraph

_GAMMA = 0.4
"""A scatter that doubles overnight costs ln 2 / 0.4 = 1.7 misses too many, of the twenty that 200 runs may have."""
_NARROWEST, _WIDEST = math.log(0.25), math.log(30.0)
_FORGIVEN, _FORGIVEN_RUNS = 6 * _GAMMA * COVERAGE, 200
"""How much of what shifts widened is undone within so many runs: six misses, which leaves 87% inside of 200."""
_FAR = math.log(5.0)
"""Nearer to its prediction than a factor of five, no reading is suspected."""
_FAR_SIGMAS = 8.0
"""Nor within so many standard deviations."""
_AGREE = math.log(1.5)
"""Two readings of the same step within this factor agree."""
_RECENT, _ENOUGH = 8, 4
_FEW_STEPS = 0.1
"""A trial with less than this share of its study's usual number of steps was cut short."""
_MOST_OVER_CAPACITY = 1.05
_MOST_OVER_TRIAL, _SLACK_OF_TRIAL_S = 1.5, 1.0
"""Two steps of a trial of milliseconds may well have a median that is longer than half of it."""
_NOT_ON_A_GPU = "this PyTorch has no CUDA", "did not use CUDA in this process"
"""How the log notes a run that was booked to a GPU without using one; before schema 4 such runs were logged as the GPU's."""
_SLACK, _ALARM = 1.0, 10.0
"""A shift of two standard deviations is what the sum is made for; families of networks differ by less."""
_CLIPPED = 4.0
_MAD_OF_NORMAL = 1.4826
"""A normal variable's standard deviation, in median distances from its median."""
_SETTLED = 10
"""Runs of a regime after which a shift can be told from the first learning."""
_SCALE_RUNS = 60


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A reading that is not learnt."""

    observation: Observation
    target: Target
    reason: str


@dataclass(frozen=True, slots=True)
class Drift:
    """The world changed."""

    first: Observation
    """Of the new regime."""
    reason: str
    noticed: Observation
    """The run that showed it."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a list of runs comes to."""

    observations: tuple[Observation, ...] = ()
    """The runs, each with its regime, and without the readings that are quarantined."""
    quarantined: tuple[Quarantined, ...] = ()
    drifts: tuple[Drift, ...] = ()
    widening: Mapping[Target, float] = field(default_factory=dict)
    """What the standard deviation of the next prediction is to be multiplied by."""
    misfits: tuple[Quarantined, ...] = ()
    """The runs at which the predictor turned out not to fit; what was read until then is quarantined for the same reason."""


def weigh(observations: Sequence[Observation], *, predictor: str = "") -> Evidence:
    """What ``observations``, the runs of one device from the oldest to the newest, come to.

    Args:
        observations: all on one device.
        predictor: whose intervals are to hold, name and version; what others had predicted says nothing of them, nor of drift.
            Empty: whoever's.
    """
    conditions, drifts = _conditions(observations)
    quarantined: list[Quarantined] = []
    misfits: list[Quarantined] = []
    widening: dict[Target, float] = {}
    masked = list(observations)
    shifts: dict[int, Drift] = {}
    own = [index for index in range(len(observations)) if _is_of(observations[index], predictor)]
    for target in TARGETS:
        believed, refused = _believed(observations, target)
        found: list[_Shift] = []
        for number in set(conditions):
            of_number = [index for index in own if conditions[index] == number]
            found += _shifts(observations, target, sorted({*believed}.intersection(of_number)))
        shifts |= {shift.runs[0]: shift.drift for shift in found}
        judged = [index for index in own if index not in refused]
        widening[target], last_misfit = _widening(observations, target, judged, found)
        if last_misfit is not None:
            reason = (
                f"until this run {_what(target)} scatter more than intervals of {predictor or 'the predictor'} can be widened"
            )
            misfits.append(Quarantined(observations[last_misfit], target, reason))
            refused |= dict.fromkeys((index for index in believed if index <= last_misfit), reason)
        quarantined += [Quarantined(observations[index], target, reason) for index, reason in sorted(refused.items())]
        for index in refused:
            masked[index] = _without(masked[index], target)
    starts = sorted(shifts)
    regimes = _numbered_by_last(
        [
            (number, sum(start <= index and conditions[start] == number for start in starts))
            for index, number in enumerate(conditions)
        ]
    )
    masked = [replace(observation, regime=regime) for observation, regime in zip(masked, regimes, strict=True)]
    drifts += [shifts[index] for index in starts]
    return Evidence(tuple(masked), tuple(quarantined), tuple(drifts), widening, tuple(misfits))


def _numbered_by_last(names: Sequence[tuple[int, int]]) -> list[int]:
    """Numbers in the place of names, from 0; the name that was there last has the highest, for what comes next is like it."""
    last = {name: index for index, name in enumerate(names)}
    numbers = {name: number for number, name in enumerate(sorted(last, key=last.__getitem__))}
    return [numbers[name] for name in names]


def _conditions(observations: Sequence[Observation]) -> tuple[list[int], list[Drift]]:
    """What runs say of their conditions, numbered; one that says nothing ran under those of the one before."""
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


def _believed(observations: Sequence[Observation], target: Target) -> tuple[list[int], dict[int, str]]:
    """Indices of the readings that count, in order, and why others do not."""
    refused: dict[int, str] = {}
    suspects: dict[int, str] = {}
    far: set[int] = set()
    counted: list[int] = []
    of_graph: defaultdict[str, list[int]] = defaultdict(list)
    scores: dict[int, float] = {}
    of_study: defaultdict[str, list[int]] = defaultdict(list)
    for index, observation in enumerate(observations):
        of_study[observation.study].append(index)
    few_steps = {
        study: _FEW_STEPS * statistics.median(observations[index].measurement.num_steps for index in indices)
        for study, indices in of_study.items()
    }
    for index, observation in enumerate(observations):
        reason = why_impossible(observation, target)
        if reason is not None:
            refused[index] = reason
        value = observation.measured(target)
        if value is None or reason is not None:
            continue
        counted.append(index)
        score = _score(observation, target)
        if score is None:
            continue
        scores[index] = score
        estimate = observation.predicted[target]
        if abs(score) <= max(_FAR, _FAR_SIGMAS * estimate.log_sigma):
            continue
        suspects[index] = _far_off(estimate, value, target)
        if target == "time" and observation.measurement.num_steps < few_steps[observation.study]:
            continue
        far.add(index)
        agreeing = [other for other in of_graph[observation.graph.content_hash] if abs(scores[other] - score) < _AGREE]
        of_graph[observation.graph.content_hash].append(index)
        released = [*agreeing, index] if agreeing else []
        kind = _kind_of(observation.graph)
        alike = [other for other in counted if _kind_of(observations[other].graph) == kind]
        for recent in (counted[-_RECENT:], alike[-_RECENT:]):
            if sum(other in far for other in recent) >= _ENOUGH:  # those that were released count too
                released += recent
        for other in released:
            suspects.pop(other, None)
    if target == "time":  # a resident set that reuses memory reads too little in honest runs, too
        read, impossible = {*refused, *counted}, {*refused}
        for indices in of_study.values():
            refused |= _beside_impossible([index for index in indices if index in read], impossible)
    refused |= suspects
    measured = (index for index, observation in enumerate(observations) if observation.measured(target) is not None)
    return [index for index in measured if index not in refused], dict(sorted(refused.items()))


def _beside_impossible(measured: Sequence[int], impossible: Collection[int]) -> dict[int, str]:
    """The readings among ``measured``, those of one study, with four impossible ones near them, two or more before, and a reason.

    A mocked objective gives readings that are possible for its smallest configurations only. What ran before it is believed.
    """
    found: dict[int, str] = {}
    for position, index in enumerate(measured):
        before, after = measured[max(0, position - _ENOUGH) : position], measured[position + 1 : position + 1 + _ENOUGH]
        num_before, num_after = (sum(other in impossible for other in beside) for beside in (before, after))
        if index not in impossible and num_before >= _ENOUGH // 2 and num_before + num_after >= _ENOUGH:
            found[index] = "most readings beside it are impossible"
    return found


def _kind_of(graph: OpGraph) -> Hashable:
    """Equal for steps that one mistake of a predictor would concern alike."""
    return graph.mode, graph.precision, graph.options, graph.kinds


def why_impossible(observation: Observation, target: Target) -> str | None:
    """Return why a reading cannot be, whatever was predicted and however many agree; None if it can, or if there is none.

    Args:
        observation: one run, the graph of its step and the device that the log says it ran on.
        target: which of its readings.
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
        return f"{read} is no {'number of bytes' if target == 'memory' else 'time'} above zero"
    if target == "memory":
        if value > _MOST_OVER_CAPACITY * capacity_bytes:
            return f"{format_bytes(value)} measured, but the device has {format_bytes(capacity_bytes)}"
        return _too_little(observation, value, target)
    if observation.device.kind == "cuda":
        if measurement.method == "none" and any(words in measurement.note for words in _NOT_ON_A_GPU):
            return f"the run did not use {observation.device.name}"
        memory_bytes = observation.measured("memory")
        reason = None if memory_bytes is None else _too_little(observation, memory_bytes, "memory")
        if reason is not None:  # something else ran
            return reason
    total_s = measurement.total_time_s
    if not (math.isfinite(total_s) and total_s > 0):
        return f"a trial of {total_s} s"
    if value * measurement.num_steps > _MOST_OVER_TRIAL * total_s + _SLACK_OF_TRIAL_S:
        return f"{measurement.num_steps} steps of {format_seconds(value)} in a trial of {format_seconds(total_s)}"
    return _too_little(observation, value, target)


def _too_little(observation: Observation, value: float, target: Target) -> str | None:
    """Why physics does not let a complete run need so little; None if it does. With status "oom" memory is a lower bound."""
    idle = target == "time" and why_impossible(observation, "memory") is not None
    bound = least_reading(target, observation.graph, observation.device, idle=idle)
    if observation.measurement.status != "ok" or value >= bound:
        return None
    if target == "memory":
        return f"{format_bytes(value)} measured, but such a step takes {format_bytes(bound)} at the least"
    return (
        f"{format_seconds(value)} a step measured, but it takes {format_seconds(bound)} at the least on {observation.device.name}"
    )


def _far_off(estimate: Estimate, value: float, target: Target) -> str:
    written = format_bytes if target == "memory" else format_seconds
    return f"{written(value)} measured, {written(estimate.median)} predicted, and no other reading agrees"


def _without(observation: Observation, target: Target) -> Observation:
    measurement = observation.measurement
    if target == "memory":
        return replace(observation, measurement=replace(measurement, peak_memory_bytes=None))
    return replace(observation, measurement=replace(measurement, step_time_s=None))


def _is_of(observation: Observation, predictor: str) -> bool:
    """Whether ``predictor`` had predicted it, refined ("+") or not."""
    return not (predictor and observation.predicted_by) or observation.predicted_by.rstrip("+") == predictor.rstrip("+")


def _score(observation: Observation, target: Target) -> float | None:
    """How far a complete run was from its prediction, as a logarithm; None if there is nothing to compare."""
    value, estimate = observation.measured(target), observation.predicted.get(target)
    if observation.measurement.status != "ok" or value is None or estimate is None:
        return None
    return math.log(value / estimate.median)


def _z(observation: Observation, target: Target) -> float | None:
    """The same in standard deviations of the prediction."""
    score = _score(observation, target)
    return None if score is None else score / observation.predicted[target].log_sigma


def _widening(
    observations: Sequence[Observation], target: Target, judged: Sequence[int], shifts: Sequence[_Shift]
) -> tuple[float, int | None]:
    """What the ``judged`` runs come to, whose readings are believed: a suspect that was right counts as soon as another reading
    agrees with it. Of what the runs of one of ``shifts`` widened, as much is undone as is left to forgive.

    Returns:
        The factor of the standard deviation, and the last run at which no width was enough; None: there was none.
    """
    log_width = 0.0
    last_misfit: int | None = None
    scores: defaultdict[Hashable, list[float]] = defaultdict(list)  # since then, by kind of step
    moved: dict[int, float] = {}  # by each run
    forgiven: list[tuple[int, float]] = []
    undone = {shift.noticed: shift for shift in shifts}
    for number, index in enumerate(judged):
        is_missed = _is_missed(observations[index], target, math.exp(log_width))
        before = log_width
        if is_missed is not None:
            log_width += _GAMMA * (is_missed - (1 - COVERAGE))
            log_width = min(max(log_width, _NARROWEST), _WIDEST)
        moved[index] = log_width - before
        if index in undone:
            widened = sum(moved.pop(one, 0.0) for one in undone[index].runs)
            left = _FORGIVEN - sum(amount for since, amount in forgiven if number - since < _FORGIVEN_RUNS)
            amount = min(max(widened, 0.0), left)
            forgiven.append((number, amount))
            log_width -= amount
        score = _score(observations[index], target)
        if score is None:
            continue
        scores[_kind_of(observations[index].graph)].append(score)
        widest = min(_WIDEST, math.log1p(MOST_WIDENED / HALF_INTERVAL / _own_log_sigma(observations[index], target)))
        if log_width >= widest and HALF_INTERVAL * _scatter(list(scores.values())) > MOST_WIDENED:
            last_misfit, log_width, moved = index, 0.0, {}
            scores.clear()
    return math.exp(log_width), last_misfit


def _own_log_sigma(observation: Observation, target: Target) -> float:
    """The standard deviation that was predicted, before it was widened."""
    return observation.predicted[target].log_sigma / observation.widening.get(target, 1.0)


def _scatter(groups: Sequence[Sequence[float]]) -> float:
    """Standard deviation of what is in the groups, by the median distance from the median of each."""
    middles = map(statistics.median, groups)
    return _MAD_OF_NORMAL * statistics.median(
        abs(value - middle) for middle, group in zip(middles, groups, strict=True) for value in group
    )


def _is_missed(observation: Observation, target: Target, width: float) -> bool | None:
    """Whether the run was outside of its own interval, made ``width`` times as wide; None if nobody can tell.

    What was out of memory needed more than was read: above the interval if the reading is, and otherwise anywhere.
    """
    score = _score(observation, target)
    if score is not None:
        return abs(score) > HALF_INTERVAL * widened_log_sigma(_own_log_sigma(observation, target), width)
    bound, estimate = observation.measured(target), observation.predicted.get(target)
    if target == "time" or observation.measurement.status != "oom" or bound is None or estimate is None:
        return None
    half = HALF_INTERVAL * widened_log_sigma(_own_log_sigma(observation, target), width)
    return True if math.log(bound / estimate.median) > half else None


class _Shift(NamedTuple):
    """Where errors moved for good, as indices of runs."""

    runs: Sequence[int]
    """That moved, until it was noticed."""
    drift: Drift

    @property
    def noticed(self) -> int:
        """The run that showed it."""
        return self.runs[-1]


def _shifts(observations: Sequence[Observation], target: Target, believed: Sequence[int]) -> list[_Shift]:
    """Where the errors of ``target`` moved for good, ``believed`` being of equal conditions."""
    found: list[_Shift] = []
    stretch: list[tuple[int, float]] = []
    begun = {1.0: 0, -1.0: 0}  # upwards and downwards
    for index in believed:
        z = _z(observations[index], target)
        if z is None:
            continue
        stretch.append((index, z * observations[index].widening.get(target, 1.0)))
        if len(stretch) <= _SETTLED:
            begun = dict.fromkeys(begun, len(stretch))
            continue
        for sign, start in begun.items():
            before = [other for _, other in stretch[max(0, start - _SCALE_RUNS) : start]]
            least = min(1.0, observations[stretch[start - 1][0]].widening.get(target, 1.0))
            steps = _in_scatters(before, [sign * other for _, other in stretch[start:]], least)
            total = sum(steps) - _SLACK * len(steps)
            if total <= 0:
                begun[sign] = len(stretch)
            elif total > _ALARM:
                moved = [other for other, _ in stretch[start + _likeliest_begin(steps) :]]
                drift = Drift(observations[moved[0]], _shifted(observations, target, moved), observations[index])
                found.append(_Shift(moved, drift))
                stretch = []
                break
    return found


def _in_scatters(before: Sequence[float], since: Sequence[float], least: float) -> list[float]:
    """The z ``since`` Page's sum was zero, clipped, in units of their scatter: as it was ``before``, or from one to the next if
    that is more, because where errors merely scatter more nothing has shifted; at ``least`` what intervals had come to."""
    scatter = statistics.median(map(abs, before))
    if len(since) > 1:
        scatter = max(scatter, statistics.median(abs(b - a) for a, b in pairwise(since)) / math.sqrt(2))
    scale = max(least, _MAD_OF_NORMAL * scatter)
    return [min(max(z / scale, -_CLIPPED), _CLIPPED) for z in since]


def _likeliest_begin(steps: Sequence[float]) -> int:
    """From which of ``steps`` on a mean other than zero explains them best: the sum may have grown a bit before the shift."""
    totals = list(accumulate(reversed(steps)))
    return len(steps) - 1 - max(range(len(steps)), key=lambda number: totals[number] ** 2 / (number + 1))


def _shifted(observations: Sequence[Observation], target: Target, indices: Sequence[int]) -> str:
    scores = [score for index in indices if (score := _score(observations[index], target)) is not None]
    return f"{_what(target)} are {math.exp(statistics.median(scores)):.2f} times what was predicted ({len(scores)} runs in a row)"


def _what(target: Target) -> str:
    return "peaks of memory" if target == "memory" else "step times"
