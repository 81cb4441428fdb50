"""Readings that cannot be are not learnt, changes of the world are noticed, and intervals hold while it shifts."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from perfguard import Estimate, Measurement, Observation, OpGraph, Prediction
from perfguard.graph import Storage, StorageKind
from perfguard.learning import CALIBRATION, assess
from perfguard.predictor import HALF_INTERVAL
from tests.doubles import TOY_GPU as DEVICE

MIB = 2**20
PREDICTED = {"memory": Estimate(100.0 * MIB, 0.1), "time": Estimate(0.1, 0.1)}


def run(memory: float = 1.0, time: float = 1.0, *, graph: int = 0, status: Any = "ok", **changes: Any) -> Observation:
    """A run whose readings are these multiples of what was predicted; 200 steps in a bit more than their time."""
    step_time_s = 0.1 * time
    measurement = Measurement(
        status=status, device_id="toy", device_name="Toy", peak_memory_bytes=int(100 * MIB * memory), step_time_s=step_time_s,
        total_time_s=210 * abs(step_time_s), num_steps=200, method="nvml", framework="torch 2.13", driver="550.54",
    )  # fmt: skip
    storages = (Storage(graph + 1, StorageKind.INPUT, -1, 0, ""),)
    return Observation(
        OpGraph((), storages, "train", "fp32", "nchw"), DEVICE, replace(measurement, **changes), PREDICTED  # type: ignore[arg-type]
    )  # fmt: skip


def runs(number: int, seed: int = 0, *, time: float = 1.0, sigma: float = 0.1, **changes: Any) -> list[Observation]:
    """Runs that scatter as their predictions say, each of a graph of its own."""
    generator = random.Random(seed)

    def factor() -> float:
        return math.exp(generator.gauss(0, sigma))

    return [run(factor(), time * factor(), graph=1000 * seed + index, **changes) for index in range(number)]


@pytest.mark.parametrize(
    ("observation", "target", "reason"),
    [
        (run(memory=1000.0), "memory", "97.7 GiB measured, but the device has 1.00 GiB"),
        (run(memory=0.001), "memory", "no other reading agrees"),
        (run(step_time_s=math.nan), "time", "the measured step time is nan, which is not above zero"),
        (run(step_time_s=-0.1), "time", "the measured step time is -0.1, which is not above zero"),
        (run(peak_memory_bytes=0), "memory", "the measured memory is 0, which is not above zero"),
        (run(step_time_s=0.5), "time", "200 steps of 500 ms take longer than the trial of 21"),
        (run(total_time_s=-3.0), "time", "the time of the trial is -3.0 s"),
        (run(time=1000.0), "time", "no other reading agrees"),
    ],
)
def test_impossible_reading_is_quarantined(observation: Observation, target: str, reason: str) -> None:
    assessment = assess([*runs(10), observation, *runs(10, seed=1)])
    (found,) = assessment.doubts
    assert (found.observation, found.target) == (observation, target)
    assert reason in found.reason
    masked = assessment.observations[10]
    assert masked.measured("memory" if target == "memory" else "time") is None
    assert masked.measured("time" if target == "memory" else "memory") is not None
    assert len(assessment.observations) == 21


def test_second_reading_releases_suspect() -> None:
    assessment = assess([*runs(10), run(time=20.0, graph=77), *runs(3, seed=1), run(time=22.0, graph=77)])
    assert not assessment.doubts


def test_suspects_of_one_step_type_are_released() -> None:
    compiled = [run(time=6.0, graph=9000 + index) for index in range(10)]
    compiled = [replace(one, graph=replace(one.graph, options=("compiled",))) for one in compiled]
    others = runs(90)
    assessment = assess([one for index, last in enumerate(compiled) for one in (*others[9 * index : 9 * index + 9], last)])
    assert not assessment.doubts


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"driver": "560.35"}, "driver: 550.54 is now 560.35"),
        ({"framework": "torch 2.14"}, "framework: torch 2.13 is now torch 2.14"),
        ({"device_name": "Toy Max-Q"}, "device: Toy is now Toy Max-Q"),
    ],
)
def test_new_conditions_begin_regime(change: dict[str, Any], said: str) -> None:
    assessment = assess([*runs(4), *runs(3, seed=1, **change)])
    assert [observation.regime for observation in assessment.observations] == [0] * 4 + [1] * 3
    assert [change for _, change in assessment.changes] == [said]


def test_two_machines_are_two_regimes() -> None:
    one, other = runs(60), runs(60, seed=1, driver="560.35")
    assessment = assess([run for pair in zip(one, other, strict=True) for run in pair])
    assert [observation.regime for observation in assessment.observations] == [0, 1] * 60
    assert [change for _, change in assessment.changes] == ["driver: 550.54 is now 560.35"]


@pytest.mark.parametrize(("first", "second"), [(0.03, 0.5), (0.5, 0.03), (0.1, 0.1)])
def test_share_of_misses_is_bounded(first: float, second: float) -> None:
    covered, log_widths = coverage([first] * 70 + [second] * 70, seed=0)
    for start in range(len(covered) - 100):
        misses = 100 - sum(covered[start : start + 100])
        moved = log_widths[start + 100] - log_widths[start]
        assert abs(misses - 10) <= abs(moved) / 0.2 + 1


def test_coverage_where_scatter_doubles() -> None:
    covered, _ = coverage([0.1] * 200 + [0.2] * 200, seed=0)
    shares = [sum(covered[start : start + 200]) / 200 for start in range(0, 201, 20)]
    assert min(shares) >= 0.86
    assert max(shares) <= 0.94


def test_oom_above_interval_is_miss() -> None:
    clean = runs(100)
    widening = assess(clean).widening["memory"]
    above = [run(memory=1.5, status="oom", graph=index) for index in range(10)]
    assert assess([*clean, *above]).widening["memory"] > 2 * widening
    inside = [run(memory=memory, status="oom", graph=index) for index, memory in enumerate([0.5, 1.0, 1.05])]
    assert assess([*clean, *inside]).widening["memory"] == pytest.approx(widening, rel=1e-9)


def test_suspect_widens_nothing() -> None:
    clean = runs(100)
    poisoned = [row if index % 10 else run(time=1000.0, graph=index) for index, row in enumerate(clean)]
    widening = assess([row for index, row in enumerate(clean) if index % 10]).widening["time"]
    assert assess(poisoned).widening["time"] == pytest.approx(widening, rel=1e-9)
    assert assess([*clean, run(time=20.0, graph=7), run(time=20.0, graph=7)]).widening["time"] > 1.2 * widening


def test_other_predictor_says_nothing_of_intervals() -> None:
    wrong = [replace(one, predicted_by="roofline-1") for one in runs(100, time=3.0)]
    assessment = assess([*wrong, *(replace(one, predicted_by="guardnet-1+") for one in runs(5, seed=1))], predictor="guardnet-1")
    assert assessment.widening["time"] == pytest.approx(1.0, abs=0.3)
    assert assessment.changes == ()
    assert assess(wrong).widening["time"] > 5.0


def heavy(observation: Observation) -> Observation:
    """Of a step that holds 90 MiB of parameters and 90 MiB of gradients."""
    storages = (Storage(90 * MIB, StorageKind.PARAMETER, -1, 0, ""), Storage(90 * MIB, StorageKind.GRADIENT, -1, 0, ""))
    return replace(observation, graph=replace(observation.graph, storages=(*observation.graph.storages, *storages)))


@pytest.mark.parametrize("number", [1, 4, 50])
def test_memory_below_physics_is_quarantined(number: int) -> None:
    """Finding 1, in Ray: 35.0 GiB predicted, 124 KiB measured, ok. Four readings that agreed were believed. What ran was another
    step, so its time says nothing either."""
    assessment = assess([*runs(10), *(heavy(run(memory=0.001, time=50.0, graph=index)) for index in range(number))])
    assert len(assessment.doubts) == 2 * number
    assert "such a step takes 162 MiB at least" in assessment.doubts[0].reason
    assert all(row.measured("memory") is row.measured("time") is None for row in assessment.observations[10:])
    assert assessment.widening == assess(runs(10)).widening


@pytest.mark.parametrize("number", [1, 4, 50])
def test_time_below_one_launch_is_quarantined(number: int) -> None:
    """Finding 2: a mocked objective marks steps of a microsecond. Nothing ran, so its memory says nothing either."""
    mocks = [run(time=1e-5, graph=index, total_time_s=1.0) for index in range(number)]
    assessment = assess([*runs(10), *mocks])
    assert len(assessment.doubts) == 2 * number
    assert "1.00 us a step measured, but it takes 2.50 us at least on Toy" in assessment.doubts[0].reason
    assert all(row.measured("memory") is row.measured("time") is None for row in assessment.observations[10:])
    assert assessment.widening == assess(runs(10)).widening


@pytest.mark.parametrize("hours", [1.0, 8.0])
def test_short_trials_agree_with_nobody(hours: float) -> None:
    """A trial of two steps, one of which lasted while the laptop slept, or was warm-up: five of them were believed."""
    cut_short = [run(time=36000 * hours, graph=index, num_steps=2) for index in range(5)]
    assessment = assess([*runs(20), *cut_short, *runs(20, seed=1)])
    assert len(assessment.doubts) == 5
    assert assessment.widening["time"] == assess([*runs(20), *runs(20, seed=1)]).widening["time"]


def test_misfit_is_quarantined() -> None:
    """Finding 2: intervals widened to (107 B to 11.7 TiB). Readings that scatter over four orders of magnitude teach nothing."""
    generator = random.Random(0)
    wild = [run(memory=10 ** generator.uniform(-3, 0.9), graph=index) for index in range(40)]
    assessment = assess(wild)
    assert {misfit.target for misfit in assessment.misfits} == {"memory"}
    last = max(index for index, row in enumerate(wild) if row is assessment.misfits[0].observation)
    assert all(row.measured("memory") is None for row in assessment.observations[: last + 1])
    assert "scatter more than intervals can be widened" in assessment.misfits[0].reason
    assert all(row.measured("time") is not None for row in assessment.observations)


def test_runs_after_misfit_are_learnt() -> None:
    """What did not fit must not change what is believed of others' runs."""
    generator = random.Random(0)
    wild = [run(memory=10 ** generator.uniform(-3, 0.9), graph=index) for index in range(8)]
    while not assess(wild).misfits or assess(wild).misfits[0].observation is not wild[-1]:
        wild.append(run(memory=10 ** generator.uniform(-3, 0.9), graph=len(wild)))
    honest = runs(60, seed=3)
    assessment = assess([*wild, *honest])
    assert assessment.widening["memory"] == pytest.approx(assess(honest).widening["memory"])
    assert all(row.measured("memory") is not None for row in assessment.observations[len(wild) :])


@pytest.mark.parametrize("own", [0.005, 0.1, 0.7])
def test_widening_is_at_most_tenfold(own: float) -> None:
    """Whatever the log says: see `widened_log_sigma`."""
    before = Estimate(1.0, own)
    prediction = Prediction(before, before, before, "p", "toy", trained_on_device=True)
    after = prediction.widened({"memory": 1e6, "time": 1e6})
    for estimate, target in ((after.peak_memory, "memory"), (after.step_time, "time")):
        assert estimate.interval()[1] == pytest.approx(10 * before.interval()[1])
        assert after.widening[target] == pytest.approx(estimate.log_sigma / own)  # type: ignore[index]
    assert HALF_INTERVAL * (after.step_time.log_sigma - own) == pytest.approx(math.log(10))


def coverage(scatter: Sequence[float], seed: int) -> tuple[list[bool], list[float]]:
    """Whether each run was inside of the 90% interval that had been issued for it, the predictor believing in 0.1; and the
    logarithms of what its width had been multiplied by."""
    generator = random.Random(seed)
    observations: list[Observation] = []
    inside: list[bool] = []
    for index, sigma in enumerate(scatter):
        error, width = generator.gauss(0, sigma), assess(observations).widening["time"]
        predicted = Estimate(0.1, 0.1 * width)
        inside.append(abs(error) <= HALF_INTERVAL * predicted.log_sigma)
        one = run(time=math.exp(error), graph=index)
        observations.append(replace(one, predicted={"time": predicted}, widening={"time": width}))
    return inside, [math.log(row.widening["time"]) for row in observations]


def test_time_beside_impossible_ones_is_quarantined() -> None:
    """Finding 2: a mock's readings are possible for its smallest configurations, and one that was believed halved all others."""
    impossible = [replace(run(total_time_s=-3.0, graph=index), study="mock") for index in range(8)]
    of_the_mock = replace(run(time=0.3, graph=50), study="mock")
    honest = runs(12, seed=3)
    assessment = assess([*honest, *impossible[:4], of_the_mock, *impossible[4:], *runs(12, seed=4)])
    reasons = [found.reason for found in assessment.doubts if found.observation is of_the_mock]
    assert reasons == ["most readings next to it are impossible"]
    refused = {id(found.observation) for found in assessment.doubts}
    assert not refused & {id(row) for row in honest}, "what ran before is believed as before"
    assert not assess([*honest, *impossible[:3], of_the_mock, *runs(12, seed=4)]).doubts[3:], "three are not enough"
    turns = [row for pair in zip(impossible, honest[:8], strict=True) for row in pair]
    assert len(assess(turns).doubts) == 8, "a study that runs at the same time is believed"


def test_few_steps_are_judged_by_study() -> None:
    """Old runs of 10,000 steps made every trial of 500 look cut short, so that a study far from its predictions never learnt."""
    long = [replace(run(num_steps=10_000, total_time_s=1050.0, graph=index), study="old") for index in range(40)]
    short = [replace(run(time=8.0, num_steps=500, total_time_s=420.0, graph=100 + index), study="new") for index in range(20)]
    assert not [found for found in assess([*long, *short], study="new").doubts if found.target == "time"]


def test_far_readings_of_one_study_do_not_move_another() -> None:
    """STRANGERS.md A1: objectives that ran 16 times the batch of their `build` made an unrelated network 20 times slower."""
    wrong = [replace(run(time=16.0, graph=index), study="wrong") for index in range(12)]
    own = assess(wrong, study="wrong")
    assert all(row.measured("time") is not None for row in own.observations), "the study itself learns its factor"
    other = assess(wrong, study="other")
    assert all(row.measured("time") is None for row in other.observations)
    assert {found.reason.partition(" predicted, ")[2] for found in other.doubts} == {
        "and no other reading agrees in another study"
    }
    assert other.widening["time"] == 1.0


def test_far_readings_that_two_studies_agree_on_are_learnt() -> None:
    """A machine that is sixteen times slower is slower for all studies."""
    slow = [replace(run(time=16.0, graph=index), study=f"study {index % 2}") for index in range(16)]
    assert all(row.measured("time") is not None for row in assess(slow, study="new").observations[8:])
    opposite = [replace(run(time=1 / 16, graph=100 + index), study="fast") for index in range(8)]
    only_one = [row for row in slow if row.study == "study 0"]
    assert all(row.measured("time") is None for row in assess([*only_one, *opposite], study="new").observations), "they disagree"
    other_step = [replace(row, graph=replace(row.graph, precision="fp16")) for row in slow if row.study == "study 1"]
    assert all(row.measured("time") is None for row in assess([*only_one, *other_step], study="new").observations), "two mistakes"


def test_far_readings_of_a_calibration_are_learnt_by_all_studies() -> None:
    """Its steps are PerfGuard's own: no `build` can be wrong, so the first far reading is the machine's."""
    calibration = [replace(run(time=16.0, graph=index), study=CALIBRATION) for index in range(3)]
    for study in ("", "other", CALIBRATION):
        assert all(row.measured("time") is not None for row in assess(calibration, study=study).observations)
    alone = assess([replace(row, study="other") for row in calibration], study="other")
    assert all(row.measured("time") is None for row in alone.observations), "those of a user's study wait for a fourth"


def test_memory_of_a_trial_without_a_step_is_refused() -> None:
    """STRANGERS.md A1: twenty-five objectives that ran nothing pulled the memory of a CPU from 14.6 to 8.5 MiB."""
    idle = [run(memory=0.6, graph=index, num_steps=0, step_time_s=None) for index in range(25)]
    assessment = assess(idle)
    assert all(row.measured("memory") is None for row in assessment.observations)
    assert "without an optimizer step" in assessment.doubts[0].reason


def test_one_reading_among_like_readings_of_a_step_is_not_learnt() -> None:
    """Another program ran beside the trial. Three such readings widened every interval of a study by a factor of 1.3 to 5."""
    like = [run(memory=factor, graph=5) for factor in (1.0, 1.02, 0.99, 1.01, 1.0)]
    outlier = run(memory=1.4, graph=5)
    assessment = assess([*like, outlier, *runs(5)])
    (doubt,) = assessment.doubts
    assert doubt.observation is outlier
    assert doubt.reason == "it is 1.40 times the median of 5 other readings of the same step, which agree"
    assert assessment.widening["memory"] == assess([*like, *runs(5)]).widening["memory"]
    assert assessment.observations[5].measured("memory") is None
    assert assessment.observations[5].measured("time") is not None


def test_repeats_of_a_reading_are_believed() -> None:
    like = [run(memory=1.0, graph=5) for _ in range(3)]
    assert not assess([*like[:2], run(memory=1.4, graph=5)]).doubts, "of three readings, nobody knows which is wrong"
    assert not assess([*like, *[run(memory=1.4, graph=5)] * 2]).doubts
    assert not assess([*like, run(memory=1.09, graph=5)]).doubts, "within a tenth"


def test_what_a_process_adds_on_a_cpu_does_not_widen_the_intervals_of_large_steps() -> None:
    """Eight tiny networks of 0.1 MiB were read at 3 to 10 MiB. Each was a miss, by a factor of 50."""
    tiny: Any = {"memory": Estimate(0.1 * MIB, 0.4)}
    of_a_process = [replace(run(memory=0.06, graph=i), predicted=tiny) for i in range(8)]
    on_a_cpu = [replace(one, device=replace(DEVICE, kind="cpu")) for one in of_a_process]
    assert assess(of_a_process, study="s").widening["memory"] > 2 or assess(of_a_process, study="s").doubts
    assert assess(on_a_cpu, study="s").widening["memory"] == pytest.approx(1.0, abs=0.02)
    far = [replace(one, device=replace(DEVICE, kind="cpu")) for one in runs(8, sigma=0.5)]
    assert assess(far).widening["memory"] > 2, "a large step that is far off is a miss there, too"
