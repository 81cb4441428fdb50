"""Schedules: short, and never more on a device than it holds."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfguard.cli import main
from perfguard.exceptions import ConfigurationError
from perfguard_packing import Job, Method, Schedule, Slot, parse_slots, plan, read_jobs

GIB = 2**30
BIG, SMALL = Slot("big-0", "big", 40 * GIB), Slot("small-0", "small", 16 * GIB)
METHODS: tuple[Method, ...] = ("exact", "longest-first", "best")


def job(name: str, gib: float, big_s: float, small_s: float | None = None) -> Job:
    return Job(name, int(gib * GIB), {"big": big_s} | ({} if small_s is None else {"small": small_s}))


jobs_of_any_kind = st.lists(
    st.builds(
        lambda number, gib, big_s, ratio: job(f"job{number}", gib, big_s, big_s * ratio),
        st.integers(0, 99),
        st.floats(0.5, 39),
        st.floats(1, 100),
        st.floats(1, 3),
    ),
    min_size=1,
    max_size=7,
)


def by_brute_force(jobs: list[Job], slots: list[Slot]) -> float:
    """The shortest makespan, by trying everything."""
    makespans = []
    for choice in itertools.product(slots, repeat=len(jobs)):
        if all(slot.can_run(one) for one, slot in zip(jobs, choice, strict=True)):
            loads = dict.fromkeys(slots, 0.0)
            for one, slot in zip(jobs, choice, strict=True):
                loads[slot] += one.time_s[slot.kind]
            makespans.append(max(loads.values()))
    return min(makespans)


def most_bytes_at_once(schedule: Schedule, slot: Slot) -> int:
    mine = [placement for placement in schedule.placements if placement.slot == slot]
    sums = [sum(other.job.memory_bytes for other in mine if other.start_s <= one.start_s < other.end_s - 1e-6) for one in mine]
    return max(sums, default=0)


@pytest.mark.parametrize("at_once", [1, 2, 3])
@given(jobs=jobs_of_any_kind)
@settings(max_examples=20)
def test_plan_runs_each_job_once_within_memory(jobs: list[Job], at_once: int) -> None:
    slots = [BIG, Slot("big-1", "big", 40 * GIB), SMALL]
    for method in METHODS:
        if method == "exact" and at_once > 1:
            continue
        schedule = plan(jobs, slots, method=method, at_once=at_once)
        assert sorted(placement.job.name for placement in schedule.placements) == sorted(one.name for one in jobs)
        for slot in slots:
            assert most_bytes_at_once(schedule, slot) <= slot.memory_bytes


@given(jobs=jobs_of_any_kind)
@settings(max_examples=15)
def test_the_exact_plan_is_the_shortest_there_is(jobs: list[Job]) -> None:
    schedule = plan(jobs, [BIG, SMALL], method="exact")
    assert schedule.is_optimal
    assert schedule.makespan_s == pytest.approx(by_brute_force(jobs, [BIG, SMALL]), abs=0.01)


def test_jobs_that_share_a_device_slow_each_other_down() -> None:
    jobs = [job("a", 10, 10), job("b", 10, 10), job("c", 30, 10)]
    schedule = plan(jobs, [BIG], method="longest-first", at_once=2, slowdown=0.5)
    ends = {placement.job.name: (placement.start_s, placement.end_s) for placement in schedule.placements}
    assert ends["a"] == pytest.approx((0, 15))  # beside b, half as slow again
    assert ends["b"] == pytest.approx((0, 15))
    assert ends["c"] == pytest.approx((15, 25))  # 30 + 10 GiB would fit beside neither


def test_plan_lets_a_job_pass_one_that_does_not_fit() -> None:
    jobs = [job("first", 30, 30), job("large", 35, 20), job("little", 5, 10)]
    starts = {one.job.name: one.start_s for one in plan(jobs, [BIG], method="longest-first", at_once=2, slowdown=0).placements}
    assert starts == {"first": 0, "little": 0, "large": pytest.approx(30)}


def test_a_job_for_one_kind_of_device_stays_there() -> None:
    jobs = [job("anywhere", 1, 5, 5), job("only big", 1, 50), job("too large for small", 20, 50, 1)]
    for method in METHODS:
        where = {one.job.name: one.slot for one in plan(jobs, [BIG, SMALL], method=method).placements}
        assert where["only big"] == where["too large for small"] == BIG


def test_no_jobs_make_an_empty_plan() -> None:
    for method in METHODS:
        assert plan([], [BIG], method=method).makespan_s == 0.0


@pytest.mark.parametrize(
    ("jobs", "options", "message"),
    [
        ([job("huge", 41, 1)], {}, "'huge' needs 41.0 GiB, but the largest device has 40.0 GiB"),
        ([Job("alien", 1, {"tpu": 1.0})], {}, "'alien' has no time for any of the devices big, small"),
        ([job("a", 1, 1)], {"method": "fastest"}, "method must be one of best, exact"),
        ([job("a", 1, 1)], {"at_once": 0}, "at_once must be at least 1"),
        ([job("a", 1, 1)], {"slowdown": 2.0}, r"slowdown must lie in \[0, 1\]"),
        ([job("a", 1, 1)], {"method": "exact", "at_once": 2}, "one job at a time"),
    ],
)
def test_what_cannot_be_planned_says_why(jobs: list[Job], options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan(jobs, [BIG, SMALL], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_job_takes_a_positive_time(seconds: float) -> None:
    with pytest.raises(ConfigurationError, match="must be positive"):
        job("a", 1, seconds)


def test_exact_plan_without_ortools_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ortools", "ortools.sat", "ortools.sat.python"):
        monkeypatch.setitem(sys.modules, name, None)
    jobs = [job("a", 1, 1)]
    with pytest.raises(ConfigurationError, match=r"pip install 'perfguard\[packing\]'"):
        plan(jobs, [BIG], method="exact")
    assert plan(jobs, [BIG], method="best").method == "longest-first"


def test_devices_are_read_from_a_text() -> None:
    slots = parse_slots("a100:2, t4")
    assert [slot.name for slot in slots] == ["a100-0", "a100-1", "t4-0"]
    assert slots[0].memory_bytes > 39 * GIB


@pytest.mark.parametrize("text", ["", "a100:two", "a100:-1", "a1000:2"])
def test_devices_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"a100:2,t4:4|a name from the catalog"):
        parse_slots(text)


def test_jobs_are_read_from_a_table(tmp_path: Path) -> None:
    table = tmp_path / "jobs.csv"
    table.write_text("name,memory,time,time_t4\nresnet,12GiB,90s,5min\nvgg,1073741824,10,\nonly t4,1GiB,,1h\n")
    jobs = read_jobs(table, ["a100", "t4"])
    assert jobs[0] == Job("resnet", 12 * GIB, {"a100": 90.0, "t4": 300.0})
    assert jobs[1].time_s == {"a100": 10.0, "t4": 10.0}
    assert jobs[2].time_s == {"t4": 3600.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("job,memory\n", "must have the columns name, memory and time_<gpu>"),
        ("name,memory,time\na,lots,1s\n", "line 2: memory must look like"),
        ("name,memory,time\na,1GiB,soon\n", "line 2: time must look like"),
        ("name,memory,time\na,,1s\n", "line 2: memory"),
    ],
)
def test_a_table_that_cannot_be_read_names_the_line(text: str, message: str, tmp_path: Path) -> None:
    table = tmp_path / "jobs.csv"
    table.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read_jobs(table, ["a100"])


def test_the_command_plans_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, picture = tmp_path / "jobs.csv", tmp_path / "out" / "schedule.png"
    rows = [f"job{number},{number + 1}GiB,{30 + 10 * number}s,{90 + 20 * number}s" for number in range(9)]
    table.write_text("\n".join(["name,memory,time_a100,time_t4", *rows]))
    assert main(["pack", str(table), "--gpus", "a100:2,t4:1", "--plot", str(picture), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["is_optimal"]
    assert {placement["job"] for placement in data["placements"]} == {f"job{number}" for number in range(9)}
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["pack", str(table), "--gpus", "t4:2", "--at-once", "2"]) == 0
    assert "in all (" in capsys.readouterr().out
    assert main(["pack", str(tmp_path / "none.csv"), "--gpus", "t4"]) == 2
    assert "cannot be read" in capsys.readouterr().err
